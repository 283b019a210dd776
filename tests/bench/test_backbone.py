"""What ``bench latency --engine gemma`` measures: prompts that continue those before them as a dialogue would."""

from __future__ import annotations

import itertools
import zlib

import pytest

from whetherman_edge.backbone.prompt import Piece, Prompt, tokenize
from whetherman_edge.bench.backbone import CASES, STEPS_OF_LONG, samples


def tokens(prompt: Prompt) -> tuple[int, ...]:
    """About as many tokens as the backbone's."""

    def four_characters(piece: Piece) -> list[int]:
        return [zlib.crc32(piece.text[at : at + 4].encode()) for at in range(0, len(piece.text), 4)]

    return tokenize(prompt, four_characters, 2, tools_max=1_536, dialogue_max=1_024).ids


def new_tokens(before: Prompt, after: Prompt) -> int:
    known, ids = tokens(before), tokens(after)
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(known, ids, strict=False))
    return len(ids) - sum(1 for _ in same)


@pytest.mark.parametrize("case", sorted(CASES))
def test_a_next_step_adds_a_call_and_its_result(case: str) -> None:
    counts = [new_tokens(s.before[0], s.prompt) for s in samples(case, "next_step", STEPS_OF_LONG, "compact")]
    few, many = [n for n in counts if n < 60], [n for n in counts if n > 150]
    assert len(few) + len(many) == STEPS_OF_LONG
    # The middle of a long dialogue is cut anew once or twice on the way.
    assert (len(many) in (1, 2)) if CASES[case][1] else not many


def test_a_next_step_follows_a_dialogue_of_its_own() -> None:
    seen = [s.before[0] for s in samples("history1500", "next_step", STEPS_OF_LONG + 1, "compact")]
    assert len(set(seen)) == len(seen)


def test_same_tools_share_nothing_but_the_tools() -> None:
    for sample in samples("history1500", "same_tools", 3, "compact"):
        assert sample.before[0].tools == sample.prompt.tools
        assert new_tokens(sample.before[0], sample.prompt) > 500
