"""Figures of ``bench ab``: each gate against none on the same tasks and repeats. Pure.

Shares have Wilson's 95 % intervals; differences against none have a 90 % interval from a bootstrap over groups of tasks
that are not independent of each other, and McNemar's exact test on the discordant groups. Repeats of a task count as
one group, so that running the same tasks more often makes nothing surer than more tasks would.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from whetherman_edge.bench import scoring
from whetherman_edge.bench.ab_log import Run

N_BOOTSTRAP: Final = 4_000
_COVERED: Final = 0.90


class Prices(msgspec.Struct, frozen=True):
    """Dollars a million tokens; cached prompt tokens are priced as prompt tokens unless told."""

    prompt_usd: float = 0.0
    output_usd: float = 0.0

    def of(self, run: Run) -> float:
        """Cost of one run in dollars."""
        return (run.prompt_tokens * self.prompt_usd + run.output_tokens * self.output_usd) / 1e6


Key = tuple[str, int]
ByGate = Mapping[str, Mapping[Key, Run]]


def compare(runs: Sequence[Run], gates: Sequence[str], baseline: str, prices: Prices, seed: int) -> dict[str, Any]:
    """All figures, JSON-ready.

    Only tasks and repeats that every gate has finished count, so that a bench that was cut short compares like with
    like.
    """
    by_gate: dict[str, dict[Key, Run]] = {gate: {} for gate in gates}
    for run in runs:
        if run.gate in by_gate and not run.error:
            by_gate[run.gate][run.task, run.repeat] = run
    keys = sorted(set.intersection(*(set(found) for found in by_gate.values()))) if by_gate else []
    figures: dict[str, Any] = {}
    for gate in gates:
        figures[gate] = of_gate([by_gate[gate][key] for key in keys], prices)
        if keys:
            pairs = [(by_gate[baseline][key], by_gate[gate][key]) for key in keys]
            figures[gate] |= {"against_none": against(pairs, prices, seed), **false_skips(pairs)}
    return {
        "n_tasks": len({task for task, _ in keys}),
        "n_runs": len(keys),
        "n_started": len({(run.task, run.repeat) for run in runs}),
        "gates": figures,
        "families": _parts(by_gate, keys, lambda run: run.family),
        "difficulties": _parts(by_gate, keys, lambda run: ("", "easy", "medium", "hard")[run.difficulty]),
        "kinds": _parts(by_gate, keys, lambda run: run.kind),
    }


def of_gate(runs: Sequence[Run], prices: Prices) -> dict[str, Any]:
    """Success and means a run of one gate."""
    n = max(len(runs), 1)
    applied: dict[str, int] = {}
    for run in runs:
        for step in run.steps:
            if step.applied:
                told = f"{step.label} ({step.reason})"
                applied[told] = applied.get(told, 0) + 1
    steps = [step for run in runs for step in run.steps]
    reasons: dict[str, int] = {}
    for step in steps:
        reasons[step.reason or "ungated"] = reasons.get(step.reason or "ungated", 0) + 1
    return {
        "success": _success(runs),
        "calls": round(sum(run.calls for run in runs) / n, 3),
        "prompt_tokens": round(sum(run.prompt_tokens for run in runs) / n, 1),
        "cached_tokens": round(sum(run.cached_tokens for run in runs) / n, 1),
        "output_tokens": round(sum(run.output_tokens for run in runs) / n, 1),
        "seconds": round(sum(run.seconds for run in runs) / n, 3),
        "usd": round(sum(prices.of(run) for run in runs) / n, 6),
        "requests": round(sum(run.requests for run in runs) / n, 3),
        "reused_requests": scoring.share(sum(run.reused for run in runs), sum(run.requests for run in runs)),
        "reused_runs": sum(run.requests > 0 and run.reused == run.requests for run in runs),
        "unfinished": sum(run.unfinished for run in runs),
        "steps": len(steps),
        "applied": dict(sorted(applied.items(), key=lambda one: -one[1])),
        "reasons": dict(sorted(reasons.items(), key=lambda one: -one[1])),
    }


def against(pairs: Sequence[tuple[Run, Run]], prices: Prices, seed: int) -> dict[str, Any]:
    """Differences of (none, gated) pairs: success in points, the rest as shares of none's mean."""
    won = sum(gated.success and not none.success for none, gated in pairs)
    lost = sum(none.success and not gated.success for none, gated in pairs)
    low, high = _difference(pairs, seed)
    nets = [sum(gated.success - none.success for none, gated in group) for group in _groups(pairs)]
    measures: dict[str, Callable[[Run], float]] = {
        "calls": lambda run: run.calls,
        "tokens": lambda run: run.prompt_tokens + run.output_tokens,
        "output_tokens": lambda run: run.output_tokens,
        "seconds": lambda run: run.seconds,
        "usd": prices.of,
    }
    return {
        "won": won,
        "lost": lost,
        "mcnemar_p": round(mcnemar(sum(net > 0 for net in nets), sum(net < 0 for net in nets)), 4),
        "success_points": round(100 * (won - lost) / len(pairs), 2),
        "success_points_low": round(100 * low, 2),
        "success_points_high": round(100 * high, 2),
        "change": {name: _change(pairs, measure, seed) for name, measure in measures.items()},
    }


def false_skips(pairs: Sequence[tuple[Run, Run]]) -> dict[str, Any]:
    """Replay evidence: the gated run failed, with a skip applied, where the ungated run of the same task succeeded.

    Among the runs with a skip that had something to lose. By chance alone some of them would have failed again.
    """
    exposed = [(none, gated) for none, gated in pairs if gated.skipped and none.success]
    bad = [gated for _, gated in exposed if not gated.success]
    tasks = [{"task": run.task, "repeat": run.repeat, "family": run.family, "why": run.why} for run in bad]
    return {"false_skips": scoring.share(len(bad), len(exposed)), "false_skip_tasks": tasks}


def mcnemar(won: int, lost: int) -> float:
    """Exact two-sided p of won against lost discordant pairs under even odds."""
    n = won + lost
    if n == 0:
        return 1.0
    fewer = sum(math.comb(n, k) for k in range(min(won, lost) + 1))
    return min(1.0, float(2 * fewer / (1 << n)))


def _success(runs: Sequence[Run]) -> dict[str, Any]:
    """The share of runs that succeed; its interval is of as many observations as there are groups of tasks."""
    made = scoring.share(sum(run.success for run in runs), len(runs))
    n_groups = len({run.group for run in runs})
    if n_groups < len(runs):
        low, high = scoring.wilson(made["k"] / len(runs) * n_groups, n_groups)
        made |= {"low": round(low, 4), "high": round(high, 4)}
    return made


def _groups(pairs: Sequence[tuple[Run, Run]]) -> list[list[tuple[Run, Run]]]:
    found: dict[str, list[tuple[Run, Run]]] = {}
    for pair in pairs:
        found.setdefault(pair[0].group, []).append(pair)
    return list(found.values())


def _difference(pairs: Sequence[tuple[Run, Run]], seed: int) -> tuple[float, float]:
    """90 % interval of the paired difference in success, by a bootstrap over groups.

    A made-up group that is won and one that is lost are among them (after Bonett and Price 2012): pairs that hardly
    differ, or not at all, would else prove a difference of nought, and thirty of them do not.
    """
    groups = _groups(pairs)
    usual = len(pairs) / len(groups)
    nets = [sum(gated.success - none.success for none, gated in group) for group in groups]
    wins = np.array([*nets, usual, -usual], float)
    sizes = np.array([*(len(group) for group in groups), usual, usual], float)
    return _interval(wins, sizes, seed)


def _change(pairs: Sequence[tuple[Run, Run]], measure: Callable[[Run], float], seed: int) -> dict[str, Any] | None:
    """Relative change of a mean, with its 90 % interval; None where none's is 0."""
    groups = _groups(pairs)
    before = np.array([sum(measure(none) for none, _ in group) for group in groups], float)
    after = np.array([sum(measure(gated) for _, gated in group) for group in groups], float)
    if before.sum() <= 0.0:
        return None
    low, high = _interval(after - before, before, seed)
    share = after.sum() / before.sum() - 1.0
    return {"share": round(float(share), 4), "low": round(low, 4), "high": round(high, 4)}


def _interval(
    top: np.ndarray[Any, np.dtype[np.float64]], bottom: np.ndarray[Any, np.dtype[np.float64]], seed: int
) -> tuple[float, float]:
    """Quantiles of sum(top) / sum(bottom) over resampled groups.  top, bottom: (n_groups,) float64."""
    rng = np.random.default_rng(seed)
    chosen = rng.integers(0, len(top), (N_BOOTSTRAP, len(top)))
    below = bottom[chosen].sum(axis=1)
    ratios = np.divide(top[chosen].sum(axis=1), below, out=np.zeros(N_BOOTSTRAP), where=below > 0)
    low, high = np.quantile(ratios, [(1 - _COVERED) / 2, (1 + _COVERED) / 2])
    return float(low), float(high)


def _parts(by_gate: ByGate, keys: Sequence[Key], part: Callable[[Run], str]) -> dict[str, dict[str, Any]]:
    """Success and calls by part of the tasks, then gate."""
    found: dict[str, dict[str, Any]] = {}
    for gate, runs in by_gate.items():
        groups: dict[str, list[Run]] = {}
        for key in keys:
            groups.setdefault(part(runs[key]), []).append(runs[key])
        for name, inside in groups.items():
            found.setdefault(name, {})[gate] = {
                "n": len(inside),
                "success": round(sum(run.success for run in inside) / len(inside), 4),
                "calls": round(sum(run.calls for run in inside) / len(inside), 3),
            }
    return dict(sorted(found.items()))
