"""What was made of tools and lists is kept within bounds, and the least recently used goes first."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from whetherman_edge.router import tool_lru
from whetherman_edge.router.tool_lru import ListLru, ToolLru


class Named(NamedTuple):
    key: bytes


A, B, C, D = (Named(bytes([n])) for n in range(4))


def test_what_is_missing_is_made_together_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_lru, "TOOLS_MAX", 3)
    made: list[list[Named]] = []

    def make(tools: list[Named]) -> list[str]:
        made.append(tools)
        return [f"of {tool.key[0]}" for tool in tools]

    kept: ToolLru[str] = ToolLru()
    assert kept.each([A, B, A], make) == ["of 0", "of 1", "of 0"]
    assert kept.each([], make) == []
    assert kept.each([C, B], make) == ["of 2", "of 1"]
    assert kept.each([D], make) == ["of 3"]  # A goes
    assert kept.each([B, C], make) == ["of 1", "of 2"]
    assert made == [[A, B], [C], [D]]
    assert kept.each([A, B, C, D], make) == ["of 0", "of 1", "of 2", "of 3"]  # more than are kept
    assert (len(kept), made[-1]) == (3, [A])


def test_lists_are_bounded_in_number_and_in_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_lru, "LISTS_MAX", 3)
    monkeypatch.setattr(tool_lru, "LIST_TOOLS_MAX", 10)
    kept: ListLru[str] = ListLru()
    for name in "abc":
        assert kept.put(name, name.upper(), 2) == name.upper()
    assert kept.get("a") == "A"
    kept.put("d", "D", 2)
    assert [kept.get(name) for name in "abcd"] == ["A", None, "C", "D"]
    kept.put("e", "E", 5)
    assert [kept.get(name) for name in "acde"] == [None, "C", "D", "E"]
    kept.put("long", "LONG", 100)
    assert [kept.get(name) for name in ("c", "d", "e", "long")] == [None, None, None, "LONG"]
    assert (len(kept), kept.n_tools) == (1, 100)
