"""The thresholds a gate ships with: one Tau a phase."""

from __future__ import annotations

import numpy as np
import pytest

from convert.gate_metrics import BUDGETS, FALSE_SKIPS_MAX, decisions, false_skips, fit_operating_point
from whetherman_edge.gate.operating_point import NEVER, problem_of, read_operating_point
from whetherman_edge.gate.verdict import LABELS, PHASES
from whetherman_edge.profiles.schema import ByKind, Tau


def test_what_is_written_is_read() -> None:
    found = read_operating_point([{"ANSWER": 0.9, "ASK": None}, {"DECLINE": 0.5}, {}])
    assert found == (Tau(answer=0.9), Tau(decline=0.5), Tau())
    assert problem_of(NEVER) == ""


@pytest.mark.parametrize(
    "value",
    [None, {}, [], [{}], [{}] * 4, [{"ANSWER": 1.1}, {}, {}], [{"ANSWER": "x"}, {}, {}], [{"ACT": 0.5}, {}, {}]],
)
def test_anything_else_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="default_tau"):
        read_operating_point(value)


def test_a_threshold_by_kind_of_step_is_a_profile_s() -> None:
    assert "0..1" in problem_of((Tau(answer=ByKind(first=0.5)), Tau(), Tau()))


def test_every_phase_and_first_steps_beside_few_tools_hold_their_budget() -> None:
    rng = np.random.default_rng(0)
    n = 6000
    gold, phase = rng.integers(0, 4, n), rng.integers(0, 3, n)
    n_tools = rng.integers(1, 9, n)
    logits = rng.normal(size=(n, 4)) + 2.0 * np.eye(4)[gold]
    logits[(n_tools <= 2) & (phase == 0), 0] -= 1.5  # less sure of a call there
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    accept = np.eye(4, dtype=bool)[gold]
    tau = fit_operating_point(p, gold, accept, phase, n_tools)
    chosen = decisions(p, phase, tau)
    wrong = false_skips(chosen, gold, accept)
    groups = [(phase == k, BUDGETS[k]) for k in range(len(PHASES))] + [((phase == 0) & (n_tools <= 2), BUDGETS[0])]
    for rows, budget in groups:
        limit = budget * FALSE_SKIPS_MAX * (rows & (gold == 0)).sum()
        assert 0.5 * limit < wrong[rows].sum() <= limit or rows is groups[0][0]
    assert min(tau[1][label] - tau[0][label] for label in LABELS[1:]) != 0.0
    assert ((chosen != 0) & (gold != 0)).mean() > 0.1
