"""Slates of tools with queries: what is right in them, and how many tools they offer."""

from __future__ import annotations

from collections.abc import Sequence

from convert.gate_trie import NONE, Reader
from convert.lora_corpus import ACT_OR_NOT, cut_packs, few_tools_packs, slate_examples
from convert.router_corpus import Pool, Query, ToolText
from whetherman_edge.backbone.prompt import Piece


def reader() -> Reader:
    """A reader whose tokens are characters."""

    def tokens(piece: Piece) -> Sequence[int]:
        return [ord(letter) + 1 for letter in piece.text]

    return Reader(tokens, 0, tools_max=4_096, dialogue_max=4_096)


def pool(n_tools: int, n_queries: int) -> Pool:
    """Tools that serve ``n_queries`` requests each."""
    tools = [ToolText(f"tool_{i}", [f"Does {i}."]) for i in range(n_tools)]
    queries = [Query(f"do {i}, {n}", [i]) for i in range(n_tools) for n in range(n_queries)]
    one = Pool("metatool", "office", tools, queries)
    assert not one.is_held_out
    return one


def test_slates_of_few_tools_hold_requests_for_and_against_their_tool() -> None:
    examples = [e for p in few_tools_packs(reader(), [pool(2, 3)], 40, seed=1) for e in p.examples]
    assert {len(e.tool_ends) for e in examples} == {1, 2}
    alone = [e for e in examples if len(e.tool_ends) == 1]
    assert {e.target for e in alone} == {ACT_OR_NOT[True], ACT_OR_NOT[False]}
    for example in examples:
        assert (example.target == ACT_OR_NOT[False]) == (example.tools == (NONE,))
        assert example.weight == 0.3


def test_larger_slates_only_doubt_where_many_requests_fit() -> None:
    examples = list(slate_examples(reader(), [pool(4, 1)], 10, seed=1, sizes=(3,)))
    assert {e.target for e in examples} == {ACT_OR_NOT[True]}
    assert {e.weight for e in examples} == {0.1}


def test_cuts_are_as_many_as_asked_for_and_the_same_for_a_seed() -> None:
    """Without dialogues they are the public queries alone, beside one or two tools, decided one way."""
    examples = [e for p in cut_packs(reader(), [], 40, seed=3) for e in p.examples]
    assert len(examples) == 40
    assert {len(e.tool_ends) for e in examples} == {1, 2}
    assert {e.weight for e in examples} == {0.5}
    assert {e.target.index(max(e.target)) for e in examples} > {0}
    again = [e.key for p in cut_packs(reader(), [], 40, seed=3) for e in p.examples]
    other = [e.key for p in cut_packs(reader(), [], 40, seed=4) for e in p.examples]
    assert [e.key for e in examples] == again
    assert set(other) != set(again)
