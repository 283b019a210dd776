"""Figures against hand-counted ones and textbook intervals."""

from __future__ import annotations

import pytest

from whetherman_edge.bench import scoring
from whetherman_edge.bench.report import page
from whetherman_edge.bench.scoring import Judged
from whetherman_edge.bench.when2call import score


def judged(gold: str, verdict: str, decision: str, p_act: float, accept: tuple[str, ...] = ()) -> Judged:
    """An item whose other probability is ANSWER's."""
    p = {"ACT": p_act, "ANSWER": 1 - p_act, "ASK": 0.0, "DECLINE": 0.0}
    return Judged("x", gold, accept or (gold,), verdict, decision, p)


ITEMS = [
    judged("ACT", "ACT", "ACT", 0.9),
    judged("ACT", "ANSWER", "ANSWER", 0.2),
    judged("ACT", "ASK", "ASK", 0.3, ("ACT", "ASK")),
    judged("ANSWER", "ANSWER", "ANSWER", 0.1),
    judged("ANSWER", "ACT", "ACT", 0.6),
    judged("DECLINE", "DECLINE", "ACT", 0.4),
]


def test_false_skips_count_only_what_is_not_acceptable() -> None:
    figures = scoring.figures(ITEMS)
    assert (figures["false_skips"]["k"], figures["false_skips"]["n"]) == (1, 3)
    assert (figures["skipped"]["k"], figures["skipped"]["n"]) == (1, 3)
    assert (figures["acceptable"]["k"], figures["acceptable"]["n"]) == (4, 6)
    assert figures["confusion"] == [[1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1]]
    assert figures["recall"]["ACT"]["share"] == pytest.approx(1 / 3, abs=1e-4)
    assert figures["recall"]["ASK"]["share"] is None


def test_macro_f1_and_auroc() -> None:
    gold, predicted = ["a", "a", "b", "b"], ["a", "b", "b", "b"]
    assert scoring.macro_f1(gold, predicted, ["a", "b"]) == pytest.approx((2 / 3 + 4 / 5) / 2)
    assert scoring.macro_f1(gold, predicted, ["a", "b", "c"]) == pytest.approx((2 / 3 + 4 / 5) / 3)
    assert scoring.auroc([0.1, 0.4, 0.4, 0.8], [False, False, True, True]) == pytest.approx(0.875)
    assert scoring.auroc([0.1, 0.4], [True, True]) is None


def test_intervals_are_the_textbook_ones() -> None:
    assert scoring.wilson(10, 100) == pytest.approx((0.0552, 0.1744), abs=1e-4)
    assert scoring.clopper_pearson(10, 100) == pytest.approx((0.0490, 0.1762), abs=1e-4)
    assert scoring.clopper_pearson(0, 20) == pytest.approx((0.0, 0.1684), abs=1e-4)
    assert scoring.wilson(0, 0) == (0.0, 1.0)


def test_calibration_error_weighs_bins_by_their_items() -> None:
    bins = scoring.reliability([0.05, 0.05, 0.95, 0.95], [False, True, True, True])
    assert [one["n"] for one in bins] == [2, 2]
    assert scoring.calibration_error(bins) == pytest.approx((0.45 + 0.05) / 2)


def test_when2call_counts_a_call_without_tools_as_a_hallucination() -> None:
    gold = ["tool_call", "cannot_answer", "cannot_answer", "request_for_info"]
    answers = ["tool_call", "tool_call", "cannot_answer", "direct"]
    figures = score(gold, answers, [False, True, True, False])
    assert (figures["tool_hallucination"]["k"], figures["tool_hallucination"]["n"]) == (1, 2)
    assert figures["accuracy"]["k"] == 2
    assert figures["macro_f1"] == pytest.approx((2 / 3 + 0 + 2 / 3 + 0) / 4, abs=1e-4)
    assert figures["macro_f1_three"] == pytest.approx((2 / 3 + 0 + 2 / 3) / 3, abs=1e-4)


def test_the_page_escapes_what_it_is_given() -> None:
    text = page("<script>alert(1)</script>", "a & b", {"<b>": scoring.figures(ITEMS)})
    assert "<script>" not in text
    assert "a &amp; b" in text
    assert "<svg" in text
    assert "http" not in text, "the page fetches nothing"
