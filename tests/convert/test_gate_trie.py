"""Tries: every path is its dialogue, nodes see their ancestors and nothing else, and nothing is computed twice."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from convert.gate_trie import Example, pack, target_of

TRUNKS = st.sampled_from([(2, 5, 6), (2, 5, 7), (2, 9, 9, 9)])
TAILS = st.lists(st.integers(10, 12), min_size=1, max_size=8).map(tuple)


def example(trunk: tuple[int, ...], tail: tuple[int, ...]) -> Example:
    """A dialogue ``tail`` under the tools block ``trunk``."""
    return Example("x", trunk + tail, len(trunk), (len(trunk) - 1,), (1.0, 0.0, 0.0, 0.0), 1.0, ())


@given(st.lists(st.tuples(TRUNKS, TAILS), min_size=1, max_size=20), st.sampled_from([4, 12, 1000]))
def test_every_readout_sees_exactly_its_own_prompt(
    pairs: list[tuple[tuple[int, ...], tuple[int, ...]]], limit: int
) -> None:
    examples = [example(*pair) for pair in pairs]
    packs = pack(examples, limit)
    seen = [e for p in packs for e in p.examples]
    assert sorted(e.ids for e in seen) == sorted(e.ids for e in examples)
    for one in packs:
        mask = one.mask()
        assert not mask[np.triu_indices(len(mask), 1)].any(), "nobody sees a later node"
        for node, e in zip(one.readout, one.examples, strict=True):
            path = np.flatnonzero(mask[node])
            assert tuple(one.ids[path].tolist()) == e.ids
            assert one.position[path].tolist() == list(range(len(e.ids)))
            assert one.tool_ends.tolist() == [path[end] for end in e.tool_ends]


def test_what_is_shared_is_there_once() -> None:
    trunk = tuple(range(100))
    packs = pack([example(trunk, (200, 201, i)) for i in range(300, 310)])
    assert len(packs) == 1
    assert len(packs[0].ids) == 100 + 2 + 10


def test_another_tools_block_is_another_pack() -> None:
    assert len(pack([example((2, 5), (7,)), example((2, 6), (7,))])) == 2


def test_soft_targets_share_what_gold_leaves() -> None:
    assert target_of("ACT", ["ACT"]) == [1.0, 0.0, 0.0, 0.0]
    assert target_of("ASK", ["ASK", "ANSWER", "DECLINE"]) == [0.0, 0.125, 0.75, 0.125]
