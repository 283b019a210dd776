"""The guarantee, against a textbook value, and against a thousand synthetic agents."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from whetherman_edge.profiles.risk import (
    ALPHA,
    DELTA,
    Step,
    choose,
    choose_by_kind,
    look_level,
    needed_for,
    promising,
    smallest_observed,
    upper_bound,
)


@pytest.mark.parametrize(
    ("n_hits", "n", "delta", "expected"),
    [
        (0, 45, 0.10, 1 - 0.10 ** (1 / 45)),  # closed form: (1 - p)^n = delta
        (0, 100, 0.05, 1 - 0.05 ** (1 / 100)),
        (1, 10, 0.05, 0.39416),  # R: binom.test(1, 10, alternative = "less")
        (5, 100, 0.05, 0.10225),  # R: binom.test(5, 100, alternative = "less")
        (10, 10, 0.1, 1.0),
    ],
)
def test_upper_bound_is_clopper_pearson(n_hits: int, n: int, delta: float, expected: float) -> None:
    assert upper_bound(n_hits, n, delta) == pytest.approx(expected, abs=1e-4)


def test_upper_bound_refuses_impossible_counts() -> None:
    with pytest.raises(ValueError, match="n_hits"):
        upper_bound(3, 2, 0.1)


def test_needed_for_is_the_least_number_that_can_prove_it() -> None:
    n = needed_for(ALPHA, DELTA)
    assert n == 45
    assert upper_bound(0, n, DELTA) <= ALPHA < upper_bound(0, n - 1, DELTA)
    assert upper_bound(2, needed_for(ALPHA, DELTA, 2), DELTA) <= ALPHA


def test_without_enough_needed_steps_nothing_is_allowed() -> None:
    steps = [Step(skip_score=0.0, needed=True) for _ in range(44)] + [Step(0.99, needed=False) for _ in range(500)]
    assert choose(steps) is None


def test_a_separating_gate_gets_a_loose_threshold() -> None:
    steps = [Step(0.2, needed=True) for _ in range(60)] + [Step(0.8, needed=False) for _ in range(60)]
    found = choose(steps)
    assert found is not None
    assert 0.2 < found.tau <= 0.21
    assert (found.n_needed, found.n_false_skips, found.n_withheld) == (60, 0, 60)


def test_the_sequence_stops_at_the_first_failure() -> None:
    """A looser threshold that would pass again by luck is not reached: it cannot be, false skips only add up."""
    steps = [Step(0.95, needed=True)] * 10 + [Step(0.1, needed=True)] * 90
    assert choose(steps) is not None
    assert choose(steps).tau > 0.95  # type: ignore[union-attr]


def test_steps_the_gate_never_withholds_are_evidence_but_no_risk() -> None:
    guarded = [Step(0.99, needed=True, wanted=False) for _ in range(60)]
    found = choose(guarded)
    assert found is not None
    assert found.n_false_skips == 0


def test_a_group_counts_once() -> None:
    """Sixty copies of one probe are one observation, not sixty."""
    assert choose([Step(0.1, needed=True, group="one") for _ in range(60)]) is None


def _agent(rng: np.random.Generator, n: int) -> tuple[list[Step], float, float]:
    """Steps of an agent whose scores are informative or useless, and the parameters of its needed scores."""
    a, b = rng.uniform(0.5, 4.0), rng.uniform(1.0, 9.0)
    needed = rng.random(n) < rng.uniform(0.3, 0.7)
    scores = np.where(needed, rng.beta(a, b, n), rng.beta(b, a, n))
    return [Step(float(s), bool(y)) for s, y in zip(scores, needed, strict=True)], a, b


def test_at_most_delta_of_a_thousand_agents_get_an_unsafe_threshold() -> None:
    rng = np.random.default_rng(20)
    n_agents, unsafe, unsafe_observed, n_useful = 1_000, 0, 0, 0
    for _ in range(n_agents):
        steps, a, b = _agent(rng, 240)
        population = np.sort(rng.beta(a, b, 20_000))

        def true_rate(tau: float, population: np.ndarray = population) -> float:
            return float(1 - np.searchsorted(population, tau) / len(population))

        found = choose(steps)
        if found is not None:
            n_useful += found.n_withheld > 0
            unsafe += true_rate(found.tau) > ALPHA
        observed = smallest_observed(steps)
        unsafe_observed += observed is not None and true_rate(observed) > ALPHA
    assert unsafe <= DELTA * n_agents + 2 * (n_agents * DELTA * (1 - DELTA)) ** 0.5  # two standard errors of the count
    assert n_useful > n_agents / 2, "a bound that allows nothing would be safe too"
    assert unsafe_observed > 3 * max(unsafe, 1), "the rule of the observed rate has to fail here, or this shows nothing"


def test_a_decision_that_is_wrong_on_the_fit_split_is_not_tried() -> None:
    fit = [Step(0.9, needed=True, decision="ASK")] * 30 + [Step(0.8, needed=False, decision="ANSWER")] * 30
    assert promising(fit) == ("ANSWER",)
    steps = [Step(0.9, needed=True, decision="ASK")] * 60 + [Step(0.8, needed=False, decision="ANSWER")] * 30
    found = choose_by_kind(steps, fit_steps=fit)
    assert found["later"] is None
    first = found["first"]
    assert first is not None
    assert (first.n_needed, first.decisions) == (60, {"ANSWER": (30, 0)})
    assert choose(steps) is not None
    assert choose(steps).n_withheld == 0  # type: ignore[union-attr]  # ASK stops the common threshold at 0.91


def test_the_guarantee_holds_for_each_kind_of_step() -> None:
    """Each kind has scores of its own, its own share of needed steps, and three decisions; also what the fit split
    chooses is counted in."""
    rng = np.random.default_rng(21)
    n_agents, n_useful = 250, 0
    unsafe = {"first": 0, "later": 0}
    for _ in range(n_agents):
        shapes = {kind: rng.uniform((0.5, 1.0), (3.0, 9.0), (3, 2)) for kind in unsafe}

        def draw(kind: str, n: int, shapes: dict[str, np.ndarray] = shapes) -> list[Step]:
            decided = rng.integers(3, size=n)
            needed = rng.random(n) < 0.5
            a, b = shapes[kind][decided].T
            scores = np.where(needed, rng.beta(a, b), rng.beta(b, a))
            labels = ("ANSWER", "ASK", "DECLINE")
            rows = zip(scores, needed, decided, strict=True)
            return [Step(float(s), bool(y), kind=kind, decision=labels[d]) for s, y, d in rows]  # type: ignore[arg-type]

        fit = draw("first", 120) + draw("later", 120)
        found = choose_by_kind(draw("first", 160) + draw("later", 160), fit_steps=fit)
        for kind, threshold in found.items():
            if threshold is not None:
                n_useful += threshold.n_withheld > 0
                decided = rng.integers(3, size=20_000)
                scores = rng.beta(*shapes[kind][decided].T)
                tried = np.isin(np.array(("ANSWER", "ASK", "DECLINE"))[decided], list(threshold.decisions))
                lost = (tried & (scores >= threshold.tau)).mean()
                unsafe[kind] += lost > ALPHA
    allowed = DELTA * n_agents
    for n_unsafe in unsafe.values():
        assert n_unsafe <= allowed + 2 * (allowed * (1 - DELTA)) ** 0.5
    assert n_useful > n_agents / 2


def test_all_looks_together_spend_less_than_delta() -> None:
    levels = [look_level(DELTA, n) for n in range(20)]
    assert levels[0] == pytest.approx(0.9 * DELTA)
    assert levels == sorted(levels, reverse=True)
    assert sum(levels) <= DELTA


def _passes_once(rate: float, looks: Sequence[int], levels: Sequence[float]) -> float:
    """Exact probability that needed steps which are skipped at this rate ever pass, looked at after so many of them."""
    failing, passed, n_before = np.ones(1), 0.0, 0  # chance of so many false skips and no pass so far
    for n, level in zip(looks, levels, strict=True):
        hits = np.arange(n - n_before + 1)
        more = np.array([math.comb(n - n_before, k) * rate**k * (1 - rate) ** (n - n_before - k) for k in hits])
        failing = np.convolve(failing, more)
        good = np.array([upper_bound(k, n, level) <= ALPHA if k < 0.1 * n else False for k in range(len(failing))])
        passed += float(failing[good].sum())
        failing, n_before = np.where(good, 0.0, failing), n
    return passed


def test_looking_again_and_again_would_pass_by_trying_and_the_looks_levels_prevent_it() -> None:
    looks = range(60, 601, 60)
    unsafe = ALPHA + 1e-9
    assert _passes_once(unsafe, looks, [DELTA] * len(looks)) > 1.4 * DELTA
    assert _passes_once(unsafe, looks, [look_level(DELTA, n) for n in range(len(looks))]) <= DELTA
    assert _passes_once(unsafe, [60], [DELTA]) <= DELTA


def test_a_step_that_was_measured_under_another_decision_counts_against_the_threshold_only() -> None:
    needed = [Step(0.1, True)] * 60
    doubts = [Step(0.9, False, doubtful=True, group=f"d{n}") for n in range(12)]
    free = [Step(0.95, False)] * 20
    found = choose(needed + doubts + free)
    assert found is not None
    assert found.tau > 0.9
    assert (found.n_needed, found.n_false_skips, found.n_withheld) == (60, 0, 20)
    few = choose(needed * 2 + doubts[:1] + free)
    assert few is not None
    assert few.tau < 0.2
    assert (few.n_needed, few.n_false_skips) == (121, 1), "it counts once, on both sides"
    assert choose(needed[:44] + doubts * 3) is None, "as evidence it does not count"
