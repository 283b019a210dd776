"""Slates of tools with queries: what is right in them, and how many tools they offer."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from convert.gate_trie import NONE, Reader
from convert.lora_corpus import (
    ACT_OR_NOT,
    MATCH_WEIGHT,
    cut_packs,
    few_tools_packs,
    match_pack,
    match_packs,
    slate_examples,
)
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


def test_matches_are_requests_beside_each_tool_alone() -> None:
    packs = match_packs(reader(), [pool(5, 3), pool(30, 1)], 6, seed=2)
    assert len(packs) == 6
    for packed in packs:
        assert {len(e.tool_ends) for e in packed.examples} == {1}
        requests = {e.query for e in packed.examples}
        assert len(requests) == 8
        for number in requests:
            some = [e for e in packed.examples if e.query == number]
            assert len(some) == 8
            assert sum(e.fits for e in some) == 1
            assert all(e.target == ACT_OR_NOT[e.fits] for e in some)
            assert sum(e.weight for e in some if not e.fits) == pytest.approx(MATCH_WEIGHT)
            assert sum(e.weight for e in some if e.fits) == MATCH_WEIGHT
    again = match_packs(reader(), [pool(5, 3), pool(30, 1)], 6, seed=2)
    assert [e.ids for p in again for e in p.examples] == [e.ids for p in packs for e in p.examples]


def test_a_request_whose_other_tools_were_not_judged_competes_among_its_candidates() -> None:
    """The others of its pool may fit as well: nobody has said that they do not. So may another request's candidates."""
    tools = [ToolText(f"own_{i}", [f"Does {i}."]) for i in range(9)]
    queries = [Query("do 7", [7], candidates=[5, 7, 8]), Query("do 3", [3], candidates=[1, 2, 3])]
    strangers = [ToolText(f"other_{i}", [f"Does {i}."]) for i in range(40)]
    one = Pool("metatool", "office", tools, queries)
    packed = match_pack(reader(), one, strangers, random.Random(1), n_queries=8, n_tools=6)
    assert {e.query for e in packed.examples} == {0}
    shown = ["".join(chr(i - 1) for i in e.ids[1:]) for e in packed.examples]
    own = {name for text in shown for name in (f"own_{i}" for i in range(9)) if name in text}
    assert own in ({"own_5", "own_7", "own_8"}, {"own_1", "own_2", "own_3"})
    assert sum("other_" in text for text in shown) == 3


def test_a_pack_of_several_tools_blocks_gives_each_prompt_its_own_path() -> None:
    (packed,) = match_packs(reader(), [pool(5, 3)], 1, seed=2)
    for example, node in zip(packed.examples, packed.readout, strict=True):
        path = []
        while node >= 0:
            path.append(int(packed.ids[node]))
            node = int(packed.parent[node])
        assert tuple(reversed(path)) == example.ids


def test_no_pool_that_validates_is_matched() -> None:
    tools = [ToolText(f"tool_{i}", [f"Does {i}."]) for i in range(5)]
    queries = [Query(f"secret {i}", [i]) for i in range(5)]
    held = next(p for n in range(99) if (p := Pool("authored", f"domain {n}", tools, queries)).is_held_out)
    texts = {e.ids for p in match_packs(reader(), [held, pool(5, 3)], 20, seed=1) for e in p.examples}
    secret = tuple(ord(letter) + 1 for letter in "secret")
    assert not any(secret == ids[i : i + 6] for ids in texts for i in range(len(ids)))
