"""Thresholds with a guarantee: how far a gate may go for one agent, and how sure we are of it. Pure.

The risk is the false-skip rate of *needed* steps: of the steps where this agent fails without its call, the share that
the gate would withhold. "At most alpha, with confidence 1 - delta" is a statement about the agent's steps to come, so
it is read off a finite-sample bound on probes that the fit never saw, not off the observed rate.

Learn-then-test with a fixed sequence (Angelopoulos et al. 2021, arXiv:2110.01052; Bauer 1991 for the sequence):
thresholds are tried from the strictest on, each with an exact binomial test at the full level delta, and the first
that fails ends it. The family-wise error stays at delta however fine the grid is, because the order is fixed before
the data is seen.

First steps and later ones are told apart: each kind has its thresholds and its own proof at the full level. The claim
is about all decisions together, since a needed step is lost whichever of them withholds it. Which decisions are tried
is chosen on the split that the fit saw (``promising``), so that the calibration split only ever sees one path.

A calibration that is gone on with is tested again on more data, and would pass in the end by trying alone. So each
look spends a part of delta (``look_level``), most of it the first; all looks together stay below delta.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import msgspec

from whetherman_edge.gate.verdict import Label, StepKind

ALPHA: Final = 0.05
DELTA: Final = 0.10
GRID: Final[tuple[float, ...]] = tuple(round(1.0 - 0.01 * step, 2) for step in range(1, 100))
"""Thresholds on 1 - p(need), strictest first: 0.99 down to 0.01."""
SKIPS: Final[tuple[Label, ...]] = ("ANSWER", "ASK", "DECLINE")
FIRST_LOOK: Final = 0.9
"""Part of delta that the first look spends; the next one spends this part of what is left, and so on."""
_BISECTIONS: Final = 60


class Step(msgspec.Struct, frozen=True, gc=False):
    """One measured step of the calibration split.

    ``skip_score``: 1 - p(need) under the fitted layer. ``needed``: the agent fails without its call. ``wanted``: the
    gate would withhold here if the threshold let it (no guard forbids it). ``group``: probes that share a group are not
    independent (one generator, one trajectory). ``kind``: of the step. ``decision``: the class that would be decided.
    ``doubtful``: not needed under another decision than this one, for which it was not measured; withheld it counts as
    a false skip.
    """

    skip_score: float
    needed: bool
    wanted: bool = True
    group: str = ""
    kind: StepKind = "first"
    decision: Label = "ANSWER"
    doubtful: bool = False


class Threshold(msgspec.Struct, frozen=True, gc=False):
    """A threshold that passed, for one kind of step. ``bound``: upper confidence bound of its false-skip rate.

    ``n_needed``: groups with a needed step, or a doubtful one that is withheld; ``n_false_skips``: those with one that
    is withheld; ``n_withheld``, ``n_measured``: steps. ``decisions``: (n_withheld, n_false_skips) of each decision that
    was tried.
    """

    tau: float
    bound: float
    n_needed: int
    n_false_skips: int
    n_withheld: int
    n_measured: int
    decisions: dict[Label, tuple[int, int]] = {}


def upper_bound(n_hits: int, n: int, delta: float) -> float:
    """One-sided Clopper-Pearson bound: the largest rate under which at most ``n_hits`` of ``n`` still has probability
    delta. 1.0 without observations.

    Raises ValueError for counts that are none.
    """
    if not 0 <= n_hits <= n or not 0.0 < delta < 1.0:
        raise ValueError(f"expected 0 <= n_hits <= n and 0 < delta < 1, got {n_hits}, {n}, {delta}")
    if n_hits == n:
        return 1.0
    low, high = n_hits / n, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if _at_most(n_hits, n, middle) > delta:
            low = middle
        else:
            high = middle
    return high


def look_level(delta: float, n_before: int) -> float:
    """The error that a look may spend after ``n_before`` earlier ones on the same calibration."""
    return delta * FIRST_LOOK * (1.0 - FIRST_LOOK) ** n_before


def needed_for(alpha: float, delta: float, n_hits: int = 0) -> int:
    """Least number of needed steps that can prove a rate of at most alpha when ``n_hits`` of them are skipped."""
    n = max(n_hits, 1)
    while upper_bound(n_hits, n, delta) > alpha:
        n += max(1, n // 50)
    while n > 1 and n > n_hits and upper_bound(n_hits, n - 1, delta) <= alpha:
        n -= 1
    return n


def choose(
    steps: Sequence[Step],
    *,
    alpha: float = ALPHA,
    delta: float = DELTA,
    grid: Sequence[float] = GRID,
    decisions: Collection[Label] = SKIPS,
) -> Threshold | None:
    """The loosest threshold that the fixed sequence lets through, or None when not even the strictest passes.

    steps: of one kind (``choose_by_kind`` sorts them). decisions: those that are allowed; a step that another one would
    decide is never withheld. Where steps cluster, a group counts once: as a false skip as soon as one of its needed
    steps would be skipped. That is stricter than any correlation between its members could make it.
    """
    groups = _groups([step for step in steps if step.needed], decisions)
    doubts = _groups([step for step in steps if step.doubtful and not step.needed], decisions)
    passed: tuple[float, float] | None = None
    for tau in sorted(grid, reverse=True):
        hits, n = _false_skips(groups, doubts, tau)
        bound = upper_bound(hits, n, delta) if n else 1.0
        if bound > alpha:
            break
        passed = (tau, bound)
    if passed is None:
        return None
    tau, bound = passed
    hits, n = _false_skips(groups, doubts, tau)
    counts: dict[Label, tuple[int, int]] = {}
    for decision in SKIPS:
        if decision in decisions:
            n_withheld = sum(s.wanted and s.decision == decision and s.skip_score >= tau for s in steps)
            n_false = sum(
                any(s.decision == decision and s.skip_score >= tau for s in group) for group in (*groups, *doubts)
            )
            counts[decision] = (n_withheld, n_false)
    return Threshold(
        tau=tau,
        bound=bound,
        n_needed=n,
        n_false_skips=hits,
        n_withheld=sum(n_withheld for n_withheld, _ in counts.values()),
        n_measured=len(steps),
        decisions=counts,
    )


def choose_by_kind(
    steps: Sequence[Step],
    *,
    fit_steps: Sequence[Step] = (),
    alpha: float = ALPHA,
    delta: float = DELTA,
    levels: Mapping[StepKind, float] | None = None,
) -> dict[StepKind, Threshold | None]:
    """``choose`` for first and for later steps apart. levels: the error that each kind may spend in place of delta;
    kinds that are not in it are not looked at.

    fit_steps: steps of the fit split, scored by layers that never saw their group; they say which decisions are tried.
    Without them all are.
    """
    found: dict[StepKind, Threshold | None] = {}
    kinds: tuple[StepKind, StepKind] = ("first", "later")
    for kind in kinds:
        if levels is not None and kind not in levels:
            continue
        seen = [step for step in fit_steps if step.kind == kind]
        tried = promising(seen, alpha) if seen else SKIPS
        own = [step for step in steps if step.kind == kind]
        level = delta if levels is None else levels[kind]
        found[kind] = choose(own, alpha=alpha, delta=level, decisions=tried) if tried else None
    return found


def promising(steps: Sequence[Step], alpha: float = ALPHA) -> tuple[Label, ...]:
    """The decisions that together withhold most of what is not needed, at an observed rate of at most alpha.

    steps: of the fit split, never of the one that the thresholds are proven on. Empty when none withholds anything.
    """
    best: tuple[Label, ...] = ()
    most = 0
    for size in range(1, len(SKIPS) + 1):
        for tried in itertools.combinations(SKIPS, size):
            own = [step if step.decision in tried else msgspec.structs.replace(step, wanted=False) for step in steps]
            tau = smallest_observed(own, alpha)
            if tau is None:
                continue
            n_right = sum(step.wanted and not (step.needed or step.doubtful) and step.skip_score >= tau for step in own)
            if n_right > most:  # of equals the smaller set: it has less to prove
                best, most = tried, n_right
    return best


def smallest_observed(steps: Sequence[Step], alpha: float = ALPHA, grid: Sequence[float] = GRID) -> float | None:
    """The loosest threshold whose *observed* false-skip rate is at most alpha. For comparison only: it proves nothing,
    and it is what made the research gate lose 15 of 120 tasks.
    """
    needed = [step for step in steps if (step.needed or step.doubtful) and step.wanted]
    n = max(sum(step.needed for step in steps), 1)
    safe = [tau for tau in grid if sum(step.skip_score >= tau for step in needed) <= alpha * n]
    return min(safe, default=None)


def _groups(steps: Sequence[Step], decisions: Collection[Label]) -> list[list[Step]]:
    """Steps by group; within a group only those that the gate would withhold can go wrong."""
    groups: dict[str, list[Step]] = {}
    for index, step in enumerate(steps):
        group = groups.setdefault(step.group or f"#{index}", [])
        if step.wanted and step.decision in decisions:
            group.append(step)
    return list(groups.values())


def _false_skips(groups: Sequence[Sequence[Step]], doubts: Sequence[Sequence[Step]], tau: float) -> tuple[int, int]:
    """(groups with a false skip at tau, groups that count): a doubt counts only against the threshold."""
    hits, doubtful = (
        sum(any(step.skip_score >= tau for step in group) for group in found) for found in (groups, doubts)
    )
    return hits + doubtful, len(groups) + doubtful


def _at_most(k: int, n: int, p: float) -> float:
    """P(X <= k) for X binomial(n, p), summed in logarithms."""
    if p <= 0.0:
        return 1.0
    if p >= 1.0:
        return 0.0
    log_p, log_q = math.log(p), math.log1p(-p)
    total, log_choose = 0.0, 0.0
    for i in range(k + 1):
        if i:
            log_choose += math.log((n - i + 1) / i)
        total += math.exp(log_choose + i * log_p + (n - i) * log_q)
    return min(total, 1.0)
