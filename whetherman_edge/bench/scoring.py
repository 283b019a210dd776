"""Figures of decisions against labels. Pure: what ``bench bfcl``, ``when2call``, ``when2tool`` and ``decisions`` share.

Intervals are 95 %: Wilson's for shares, Clopper-Pearson's as well for the false-skip rate, whose upper end is a
promise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from whetherman_edge.gate.verdict import LABELS
from whetherman_edge.profiles.risk import upper_bound

N_BINS: Final = 10


class Judged(msgspec.Struct, frozen=True):
    """One labelled item and what the gate made of it.

    ``gold``: the right label; ``accept``: all acceptable ones. ``verdict``: the most probable class, ``decision``:
    what the policy makes of it. ``probabilities``: by label.
    """

    id: str
    gold: str
    accept: tuple[str, ...]
    verdict: str
    decision: str
    probabilities: Mapping[str, float]
    group: str = ""


def wilson(k: float, n: int, z: float = 1.959964) -> tuple[float, float]:
    """95 % interval of a share, (0, 1) without items."""
    if n == 0:
        return 0.0, 1.0
    p = k / n
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, middle - half), min(1.0, middle + half)


def clopper_pearson(k: int, n: int, error: float = 0.05) -> tuple[float, float]:
    """Exact two-sided interval of a share."""
    if n == 0:
        return 0.0, 1.0
    return 1.0 - upper_bound(n - k, n, error / 2) if k else 0.0, upper_bound(k, n, error / 2)


def share(k: int, n: int) -> dict[str, Any]:
    """A share with its counts and interval, JSON-ready."""
    low, high = wilson(k, n)
    return {"k": k, "n": n, "share": round(k / n, 4) if n else None, "low": round(low, 4), "high": round(high, 4)}


def confusion(gold: Sequence[str], predicted: Sequence[str], labels: Sequence[str]) -> list[list[int]]:
    """Counts, a row a gold label, a column a predicted one."""
    place = {label: i for i, label in enumerate(labels)}
    table = [[0] * len(labels) for _ in labels]
    for g, p in zip(gold, predicted, strict=True):
        table[place[g]][place[p]] += 1
    return table


def macro_f1(gold: Sequence[str], predicted: Sequence[str], labels: Sequence[str]) -> float:
    """Mean F1 over ``labels``; a label that neither occurs nor is predicted counts 0, as in scikit-learn."""
    scores = []
    for label in labels:
        hits = sum(g == label == p for g, p in zip(gold, predicted, strict=True))
        total = sum(g == label for g in gold) + sum(p == label for p in predicted)
        scores.append(2 * hits / total if total else 0.0)
    return sum(scores) / len(scores) if scores else 0.0


def auroc(score: Sequence[float], positive: Sequence[bool]) -> float | None:
    """Probability that a positive item has the higher score, ties counting half; None without both kinds."""
    ordered = sorted(zip(score, positive, strict=True))
    n_positive = sum(positive)
    n_negative = len(ordered) - n_positive
    if not n_positive or not n_negative:
        return None
    rank_sum, at = 0.0, 0
    while at < len(ordered):
        end = at
        while end < len(ordered) and ordered[end][0] == ordered[at][0]:
            end += 1
        rank_sum += (at + end + 1) / 2 * sum(flag for _, flag in ordered[at:end])
        at = end
    return (rank_sum - n_positive * (n_positive + 1) / 2) / (n_positive * n_negative)


def reliability(p: Sequence[float], hit: Sequence[bool], n_bins: int = N_BINS) -> list[dict[str, float]]:
    """Bins of equal width: mean probability, observed share, count; empty bins are left out."""
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(n_bins)]
    for value, flag in zip(p, hit, strict=True):
        bins[min(int(value * n_bins), n_bins - 1)].append((value, flag))
    return [
        {
            "p": round(sum(v for v, _ in one) / len(one), 4),
            "observed": round(sum(f for _, f in one) / len(one), 4),
            "n": len(one),
        }
        for one in bins
        if one
    ]


def calibration_error(bins: Sequence[Mapping[str, float]]) -> float:
    """Expected calibration error of ``reliability`` bins."""
    total = sum(one["n"] for one in bins)
    return sum(abs(one["p"] - one["observed"]) * one["n"] for one in bins) / total if total else 0.0


def figures(items: Sequence[Judged]) -> dict[str, Any]:
    """All figures of four-class decisions, JSON-ready.

    A false skip: gold ACT, and a decision that is neither ACT nor acceptable. Skipped: of the steps that need no call,
    those for which no call was decided.
    """
    gold, verdicts = [i.gold for i in items], [i.verdict for i in items]
    needed = [i for i in items if i.gold == "ACT"]
    needless = [i for i in items if i.gold != "ACT"]
    false_skips = sum(i.decision != "ACT" and i.decision not in i.accept for i in needed)
    p_need = [i.probabilities["ACT"] for i in items]
    bins = reliability(p_need, [g == "ACT" for g in gold])
    ranked = auroc(p_need, [g == "ACT" for g in gold])
    low, high = clopper_pearson(false_skips, len(needed))
    return {
        "n": len(items),
        "labels": list(LABELS),
        "confusion": confusion(gold, verdicts, LABELS),
        "macro_f1": round(macro_f1(gold, verdicts, [label for label in LABELS if label in {*gold, *verdicts}]), 4),
        "accuracy": share(sum(g == v for g, v in zip(gold, verdicts, strict=True)), len(items)),
        "acceptable": share(sum(i.verdict in i.accept for i in items), len(items)),
        "recall": {
            label: share(sum(i.verdict == label for i in items if i.gold == label), gold.count(label))
            for label in LABELS
        },
        "auroc_act": round(ranked, 4) if ranked is not None else None,
        "false_skips": {**share(false_skips, len(needed)), "exact_low": round(low, 4), "exact_high": round(high, 4)},
        "skipped": share(sum(i.decision != "ACT" for i in needless), len(needless)),
        "ece_need": round(calibration_error(bins), 4),
        "reliability_need": bins,
    }
