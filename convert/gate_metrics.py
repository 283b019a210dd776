"""Figures of the gate: discrimination, accuracy, skips at a bounded false-skip rate, with n and intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from whetherman_edge.bench.scoring import wilson
from whetherman_edge.gate.verdict import LABELS

F64 = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

FALSE_SKIPS_MAX: Final = 0.05
"""Of the gold-ACT items: what the shipped operating point must hold on traffic that nobody has seen."""
BUDGETS: Final = (0.9, 0.4, 0.4)
"""Shares of FALSE_SKIPS_MAX that the thresholds aim at on held-out authors, one for each phase.

The rate of one author's later turns and steps lies between none and twice the mean, of first steps seldom beyond 1.5
times; and behind results a needed call that is withheld loses the work done so far as well. On `steps` one rate for all
phases, 0.9, gave 15 false skips in 168.
"""
FEW_TOOLS: Final = 2
"""Tools up to which first steps are also held to the budget on their own: the gate has little to go by there."""

Tau = Sequence[Mapping[str, float]]


def auroc(score: F64, positive: Bools) -> float:
    """Area under the ROC curve (ties count half); NaN where one class is absent."""
    n_positive = int(positive.sum())
    n_negative = len(positive) - n_positive
    if not n_positive or not n_negative:
        return math.nan
    order = np.argsort(score, kind="stable")
    ordered = score[order]
    ranks = np.empty(len(score))
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    ends = np.concatenate([starts[1:], [len(score)]])
    for start, end in zip(starts, ends, strict=True):
        ranks[order[start:end]] = (start + end + 1) / 2
    return float((ranks[positive].sum() - n_positive * (n_positive + 1) / 2) / (n_positive * n_negative))


def macro_f1(predicted: Ints, gold: Ints) -> float:
    """Mean F1 of the classes that occur in gold."""
    scores = []
    for label in np.unique(gold):
        hit = int(((predicted == label) & (gold == label)).sum())
        total = int((predicted == label).sum() + (gold == label).sum())
        scores.append(2 * hit / total)
    return float(np.mean(scores))


def decisions(probabilities: F64, phase: Ints, tau: Tau) -> Ints:
    """The policy's rule without a profile: the likeliest other class where 1 - p(ACT) reaches its tau, else ACT (0)."""
    candidate = probabilities[:, 1:].argmax(axis=1) + 1
    limits = np.array([[2.0] + [one.get(label, 2.0) for label in LABELS[1:]] for one in tau])
    return np.where(1 - probabilities[:, 0] >= limits[phase, candidate], candidate, 0)


def false_skips(chosen: Ints, gold: Ints, accept: Bools) -> Bools:
    """Gold ACT, another decision made that is not acceptable either."""
    return np.asarray((gold == 0) & (chosen != 0) & ~accept[np.arange(len(gold)), chosen])


def fit_operating_point(
    probabilities: F64, gold: Ints, accept: Bools, phase: Ints, n_tools: Ints
) -> list[dict[str, float]]:
    """The lowest thresholds of each phase that hold its false skips to its budget, rounded up to four digits."""
    tau: list[dict[str, float]] = []
    for k, budget in enumerate(BUDGETS):
        rows = phase == k
        every = np.ones(int(rows.sum()), bool)
        groups = [every, n_tools[rows] <= FEW_TOOLS] if k == 0 else [every]
        found = fit_tau(probabilities[rows], gold[rows], accept[rows], groups, budget * FALSE_SKIPS_MAX)
        tau.append({label: math.ceil(found[label] * 1e4) / 1e4 for label in LABELS[1:] if label in found})
    return tau


def fit_tau(probabilities: F64, gold: Ints, accept: Bools, groups: Sequence[Bools], limit: float) -> dict[str, float]:
    """The lowest thresholds, one a decision, that hold false skips to ``limit`` of gold ACT in every group.

    Greedy: items are admitted by falling 1 - p(ACT); a class whose next item would break the limit in any group is
    closed there. ``groups``: masks over the items.
    """
    candidate = probabilities[:, 1:].argmax(axis=1) + 1
    skip = 1 - probabilities[:, 0]
    order = np.argsort(-skip, kind="stable")
    wrong = (gold == 0) & ~accept[np.arange(len(gold)), candidate]
    budgets = [limit * max(1, int(((gold == 0) & g).sum())) for g in groups]
    used = [0] * len(groups)
    tau: dict[str, float] = {}
    closed: set[int] = set()
    for i in order:
        c = int(candidate[i])
        if c in closed:
            continue
        if wrong[i]:
            full = any(g[i] and used[k] + 1 > budgets[k] for k, g in enumerate(groups))
            if full:
                closed.add(c)
                continue
            for k, g in enumerate(groups):
                used[k] += int(g[i])
        tau[LABELS[c]] = float(skip[i])
    return tau


def bootstrap(statistic: Callable[[Ints], float], clusters: Sequence[str], rounds: int = 400, seed: int = 0) -> Any:
    """95 % interval of ``statistic(rows)`` over resampled clusters (dialogue sets, or items)."""
    rng = np.random.default_rng(seed)
    names, inverse = np.unique(np.array(clusters), return_inverse=True)
    members = [np.flatnonzero(inverse == k) for k in range(len(names))]
    values = []
    for _ in range(rounds):
        rows = np.concatenate([members[k] for k in rng.integers(0, len(names), len(names))])
        value = statistic(rows)
        if not math.isnan(value):
            values.append(value)
    return [round(float(v), 4) for v in np.percentile(values, [2.5, 97.5])] if values else None


def figures(
    probabilities: F64, gold: Ints, accept: Bools, phase: Ints, clusters: Sequence[str], tau: Tau
) -> dict[str, Any]:
    """All figures of one test set, JSON-ready; shares with [k, n, low, high]."""
    predicted = probabilities.argmax(axis=1)
    chosen = decisions(probabilities, phase, tau)
    need = probabilities[:, 0]
    n_act, n_other = int((gold == 0).sum()), int((gold != 0).sum())
    wrong = int(false_skips(chosen, gold, accept).sum())
    skipped = int(((chosen != 0) & (gold != 0)).sum())
    right = int(accept[np.arange(len(gold)), predicted].sum())
    taken = chosen != 0
    apt = int(accept[np.arange(len(gold)), chosen][taken].sum())

    def share(k: int, n: int) -> list[float]:
        low, high = wilson(k, n)
        return [k, n, round(low, 4), round(high, 4)]

    return {
        "n": len(gold),
        "auroc_act": _rounded(auroc(need, gold == 0)),
        "auroc_act_ci": bootstrap(lambda r: auroc(need[r], gold[r] == 0), clusters),
        "macro_f1": _rounded(macro_f1(predicted, gold)),
        "macro_f1_ci": bootstrap(lambda r: macro_f1(predicted[r], gold[r]), clusters),
        "acceptable": share(right, len(gold)),
        "false_skips": share(wrong, n_act),
        "skipped": share(skipped, n_other),
        "skips_of_the_right_kind": share(apt, int(taken.sum())),
        "brier_need": _rounded(float(np.mean((need - (gold == 0)) ** 2))),
    }


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 4)
