"""Which prefix is reused, what is thrown out, and that the bookkeeping never promises cells that are not there."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whetherman_edge.backbone.prefix_cache import SCRATCH_CELLS, Plan, PrefixCache, common_prefix, is_whole
from whetherman_edge.backbone.worker import usable_prefix

TOOLS = list(range(100, 150))


def run(cache: PrefixCache, ids: list[int], n_tools: int) -> Plan:
    """Plan and carry out, as the worker does."""
    plan = cache.plan(ids, n_tools)
    if plan.root >= 0:
        cache.commit(plan.root, ids[:n_tools], root=True, shared=0)
    cache.commit(plan.seq, ids, root=False, shared=n_tools)
    return plan


def test_first_sight_then_a_growing_dialogue_in_place() -> None:
    cache = PrefixCache(8, 2000)
    first = run(cache, [*TOOLS, 1, 2, 3, 999], len(TOOLS))
    assert (first.n_reused, first.source) == (0, -1)
    assert first.root >= 0
    second = run(cache, [*TOOLS, 1, 2, 3, 4, 5, 999], len(TOOLS))
    assert second.seq == first.seq
    assert second.source == -1
    assert second.n_reused == len(TOOLS) + 3  # all but the old cue
    assert second.root == -1


def test_another_dialogue_with_the_same_tools_copies_the_root() -> None:
    cache = PrefixCache(8, 2000)
    first = run(cache, [*TOOLS, 1, 2, 3], len(TOOLS))
    other = run(cache, [*TOOLS, 7, 8], len(TOOLS))
    assert other.seq != first.seq
    assert other.source >= 0
    assert other.n_reused == len(TOOLS)


def test_the_last_token_is_always_decoded() -> None:
    cache = PrefixCache(8, 2000)
    run(cache, [*TOOLS, 1, 2], len(TOOLS))
    assert run(cache, [*TOOLS, 1, 2], len(TOOLS)).n_reused == len(TOOLS) + 1


def test_sessions_go_before_roots_and_oldest_first() -> None:
    cache = PrefixCache(4, 2000)
    run(cache, [*TOOLS, 1, 2], len(TOOLS))
    run(cache, [*TOOLS, 3, 4], len(TOOLS))
    run(cache, [*TOOLS, 5, 6], len(TOOLS))
    plan = run(cache, [*TOOLS, 7, 8], len(TOOLS))
    assert len(plan.evict) == 1
    assert plan.n_reused == len(TOOLS)
    kept = {tuple(entry.tokens[len(TOOLS) :].tolist()) for entry in cache.entries}
    assert (1, 2) not in kept


def test_a_prompt_that_can_never_fit_is_refused_and_changes_nothing() -> None:
    cache = PrefixCache(4, 200)
    run(cache, [1, 2, 3], 2)
    with pytest.raises(ValueError, match="does not fit"):
        cache.plan(list(range(200)), 10)
    assert len(cache) == 2


def test_an_evicted_roots_cells_count_for_the_sessions_that_hold_them() -> None:
    cache = PrefixCache(8, 2000)
    plan = run(cache, [*TOOLS, 1, 2], len(TOOLS))
    before = cache.cells
    cache.forget(plan.root)
    assert cache.cells == before


def test_O15_other_tools_never_share_a_dialogue() -> None:
    cache = PrefixCache(8, 2000)
    run(cache, [*TOOLS, 1, 2, 3], len(TOOLS))
    assert run(cache, [5, 6, 7, 1, 2, 3], 3).n_reused == 0


PROMPTS = st.lists(
    st.tuples(st.integers(0, 4), st.lists(st.integers(0, 3), min_size=1, max_size=40)), min_size=1, max_size=60
)


@given(PROMPTS, st.integers(3, 8))
@settings(max_examples=150)
def test_bookkeeping_never_exceeds_its_limits(prompts: list[tuple[int, list[int]]], n_seq: int) -> None:
    """Against a model of llama.cpp's cells: what a plan reuses is really there, and cells and sequences suffice."""
    n_cells = 40 + 60 + SCRATCH_CELLS
    cache = PrefixCache(n_seq, n_cells)
    held: dict[int, list[int]] = {}
    for tool_set, dialogue in prompts:
        block = [10 + tool_set] * (5 + tool_set)
        ids = block + dialogue
        plan = cache.plan(ids, len(block))
        for seq in plan.evict:
            held.pop(seq, None)
        holder = plan.source if plan.source >= 0 else plan.seq
        assert held.get(holder, [])[: plan.n_reused] == ids[: plan.n_reused]
        assert plan.n_reused < len(ids)
        held[plan.seq] = list(ids)
        if plan.root >= 0:
            assert plan.root != plan.seq
            held[plan.root] = list(block)
            cache.commit(plan.root, block, root=True, shared=0)
        cache.commit(plan.seq, ids, root=False, shared=len(block))
        assert set(held) == {entry.seq for entry in cache.entries}
        assert len(held) <= n_seq
        distinct = {tuple(tokens[: i + 1]) for tokens in held.values() for i in range(len(tokens))}
        assert len(distinct) <= cache.cells + sum(len(e.tokens) for e in cache.entries if e.root)
        assert cache.cells <= n_cells


@pytest.mark.parametrize(
    ("first", "n_tokens", "window", "whole"),
    [
        (0, 0, 0, True),
        (0, 900, 512, True),
        (389, 900, 512, True),  # the next token, at 900, attends to 389 and what follows
        (390, 900, 512, False),
        (1, 511, 512, False),
        (1, 512, 512, True),
        (1, 900, 0, False),
    ],
)
def test_a_prefix_is_whole_while_the_window_before_its_end_is(
    first: int, n_tokens: int, window: int, whole: bool
) -> None:
    assert is_whole(first, n_tokens, window) == whole


def test_a_sequence_that_lost_its_front_gives_its_whole_but_no_short_prefix() -> None:
    first: dict[int, int] = {}
    cache = PrefixCache(8, 2000, lambda seq: first.get(seq, 0), 20)
    run(cache, [*TOOLS, 1, 2, 3], len(TOOLS))
    for entry in cache.entries:
        first[entry.seq] = len(TOOLS) - 19
    assert run(cache, [*TOOLS, 7, 8], len(TOOLS)).n_reused == len(TOOLS)
    first = {entry.seq: len(TOOLS) - 19 for entry in cache.entries}
    assert cache.plan([*TOOLS[:10], 55, 1], 11).n_reused == 0


def test_an_entry_that_cannot_be_gone_on_from_is_thrown_out() -> None:
    first: dict[int, int] = {}
    cache = PrefixCache(8, 2000, lambda seq: first.get(seq, 0), 20)
    run(cache, [*TOOLS, 1, 2, 3], len(TOOLS))
    broken = {entry.seq for entry in cache.entries}
    first.update(dict.fromkeys(broken, 10_000))
    plan = cache.plan([*TOOLS, 7, 8], len(TOOLS))
    assert (plan.n_reused, set(plan.evict)) == (0, broken)
    assert plan.root >= 0


@given(st.lists(st.integers(0, 2), max_size=8), st.lists(st.integers(0, 2), max_size=8))
def test_common_prefix(a: list[int], b: list[int]) -> None:
    n = common_prefix(np.array(a, dtype=np.int32), np.array(b, dtype=np.int32))
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]


@pytest.mark.parametrize(
    ("n_reused", "n_states", "expected"),
    [(30, 3, (30, 3)), (30, 1, (19, 1)), (15, 3, (15, 1)), (9, 0, (9, 0)), (10, 0, (9, 0))],
)
def test_usable_prefix(n_reused: int, n_states: int, expected: tuple[int, int]) -> None:
    assert usable_prefix(n_reused, (9, 19, 29), n_states) == expected
