"""dialects.dialogue_cache: turns that were read before give the view that reading them again would."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from whetherman_edge.dialects.dialogue_cache import BYTES_MIN, DIALOGUES_KEPT_MAX
from whetherman_edge.dialects.openai_chat import view
from whetherman_edge.dialects.tool_cache import ToolCache
from whetherman_edge.errors import ViewError

SEPARATORS = [(",", ":"), (", ", ": "), (" ,\n", " :\t")]
PAD = "x" * BYTES_MIN


def turn(n: int, chance: random.Random) -> dict[str, Any]:
    kind = chance.randrange(5)
    if kind == 0:
        call = {"id": f"c{n}", "type": "function", "function": {"name": f"f{n % 3}", "arguments": {"a": n}}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == 1:
        return {"role": "tool", "tool_call_id": f"c{n - 1}", "content": f"result {n}, [] ]"}
    if kind == 2:
        return {"role": "assistant", "content": f"ünder {n}", "reasoning_content": "hm" if n % 7 == 3 else None}
    return {"role": "user", "content": [{"type": "text", "text": f"turn {n}"}, "more"] if n % 2 else f'turn "{n}" }},'}


def body(turns: list[dict[str, Any]], separators: tuple[str, str], end: str = "") -> bytes:
    text = json.dumps(turns, separators=separators, ensure_ascii=False)
    return ('{"model":"m","messages":' + text[:-1] + end + "]}").encode()


@pytest.mark.parametrize("separators", SEPARATORS)
@pytest.mark.parametrize("seed", range(8))
def test_growing_dialogues_give_the_view_of_a_fresh_reader(separators: tuple[str, str], seed: int) -> None:
    chance, cache = random.Random(seed), ToolCache()
    dialogues: list[list[dict[str, Any]]] = [[{"role": "system", "content": f"{PAD}{n}"}] for n in range(3)]
    for n in range(60):
        turns = chance.choice(dialogues)
        turns += [turn(n + i, chance) for i in range(chance.randrange(4))]
        if chance.random() < 0.2 and len(turns) > 2:
            del turns[-1]  # asked again, or edited
        if chance.random() < 0.2:
            turns[-1] = turn(n, chance)
        sent = body(turns, separators, chance.choice(["", " ", "\n"]))
        assert view(sent, cache) == view(sent, ToolCache())


def test_known_turns_are_the_same_objects() -> None:
    cache = ToolCache()
    turns = [{"role": "system", "content": PAD}, {"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
    first = view(body(turns, SEPARATORS[0]), cache)
    second = view(body([*turns[:2], {"role": "user", "content": "three"}], SEPARATORS[0]), cache)
    assert [one is other for one, other in zip(first.messages, second.messages, strict=True)] == [True, True, False]


@pytest.mark.parametrize("behind", [",", ", ", ",,{}", ",{", ",3", ",{}]", ' ,{"role":"user"}}', ",{}{}"])
def test_what_is_no_array_is_refused_also_behind_known_turns(behind: str) -> None:
    cache = ToolCache()
    turns = [{"role": "system", "content": PAD}, {"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
    view(body(turns, SEPARATORS[0]), cache)
    broken = body(turns[:2], SEPARATORS[0], behind)
    with pytest.raises(ViewError) as fresh:
        view(broken, ToolCache())
    with pytest.raises(ViewError) as known:
        view(broken, cache)
    assert str(known.value) == str(fresh.value)


def test_few_dialogues_are_kept() -> None:
    cache = ToolCache()
    for n in range(3 * DIALOGUES_KEPT_MAX):
        view(
            body([{"role": "system", "content": f"{PAD}{n}"}, {"role": "user", "content": "hi"}], SEPARATORS[0]), cache
        )
    assert len(cache.dialogues._kept) == DIALOGUES_KEPT_MAX
