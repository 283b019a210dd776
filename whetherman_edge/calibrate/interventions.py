"""Which intervention suits this agent: each is tried on the same easy probes that need no call. Pure.

An arm is a mode and a wording, as "note:reason"; its runs refuse calls, so that they are the runs without tools that
labels rest on as well, once the arm is chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from whetherman_edge.calibrate.capability_probe import Found
from whetherman_edge.calibrate.episode import Steer, SteerMode
from whetherman_edge.calibrate.plan import Item
from whetherman_edge.calibrate.run_log import RunLine
from whetherman_edge.gate.intervention import Capability
from whetherman_edge.gate.verdict import Label

DEFAULT_ARM: Final = "note:reason"
ALL_ARMS: Final = (DEFAULT_ARM, "note:direct", "strip:reason", "none:reason", "prefill:reason")
PROBES: Final = 6
HALVE_AFTER: Final = 3
KEPT: Final = 3
NEAR: Final = 0.1
"""Arms within this share of a run's seconds of the best count as equal; the earliest in ALL_ARMS is taken, a note."""
_FAMILIES: Final = ("chat", "sufficient", "knowledge", "done", "arithmetic", "context")


class Measured(msgspec.Struct, frozen=True):
    """Means of one arm over the probes it shares with the runs with tools. Token and second differences are arm less
    with; ``calls_left``: calls that came all the same, a run. ``reevaluated``: prompt tokens evaluated in the first
    step, None where the server does not say. ``value_s``: seconds a run saved, a new failure at the price of a run.
    """

    n: int
    success: float
    success_with: float
    calls_with: float
    calls_left: float
    output_tokens: float
    output_with: float
    seconds: float
    seconds_with: float
    ttft_s: float
    ttft_with_s: float
    reevaluated: float | None
    value_s: float


def arms(found: Found) -> tuple[str, ...]:
    """The arms worth trying on this upstream."""
    usable = {"none": bool(found.honours_none), "prefill": bool(found.prefill) and not found.thinks}
    return tuple(arm for arm in ALL_ARMS if usable.get(arm.split(":")[0], True))


def steer(arm: str, label: Label, capability: Capability) -> Steer:
    """What an arm does to requests."""
    mode, _, wording = arm.partition(":")
    modes: dict[str, SteerMode] = {"note": "note", "none": "none", "strip": "strip", "prefill": "prefill"}
    return Steer(label=label, mode=modes[mode], wording=wording, capability=capability)


def comparison_probes(items: Sequence[Item], n: int = PROBES) -> list[Item]:
    """Easy probes of the fit split that a careful person answers without a call, of different families."""
    free = [item for item in items if item.split == "fit" and item.probe.expect in ("ANSWER", "")]
    found: list[Item] = []
    for turn in range(n):
        for family in _FAMILIES:
            members = sorted(
                (item for item in free if item.probe.family == family),
                key=lambda item: (item.probe.difficulty, item.probe.id),
            )
            if len(members) > turn:
                found.append(members[turn])
            if len(found) == n:
                return found
    return found


def measure(runs: Sequence[RunLine]) -> dict[str, Measured]:
    """Each arm against the runs with tools, on the probes that have both. Only runs at temperature 0 count."""
    first = {(run.probe, run.arm): run for run in runs if run.index == 0 and run.steps}
    pairs: dict[str, list[tuple[RunLine, RunLine]]] = {}
    for (probe, arm), run in first.items():
        base = first.get((probe, "with"))
        if arm != "with" and base is not None:
            pairs.setdefault(arm, []).append((run, base))
    return {arm: _means(found) for arm, found in pairs.items()}


def choose(measured: Mapping[str, Measured], available: Sequence[str]) -> str:
    """The arm with the most value; the earlier one of those that are about equal; a note where nothing was measured."""
    known = [arm for arm in available if arm in measured]
    if not known:
        return DEFAULT_ARM
    enough = max(measured[arm].n for arm in known)
    full = [arm for arm in known if measured[arm].n >= min(enough, HALVE_AFTER)]
    best = max(measured[arm].value_s for arm in full)
    margin = NEAR * max(measured[arm].seconds_with for arm in full)
    return next(arm for arm in full if measured[arm].value_s >= best - margin)


def still_tried(measured: Mapping[str, Measured], available: Sequence[str]) -> tuple[str, ...]:
    """The arms to go on with: all at first, then the best few."""
    if any(arm not in measured or measured[arm].n < HALVE_AFTER for arm in available):
        return tuple(available)
    ranked = sorted(available, key=lambda arm: -measured[arm].value_s)
    return tuple(arm for arm in available if arm in ranked[:KEPT])


def _means(pairs: Sequence[tuple[RunLine, RunLine]]) -> Measured:
    n = len(pairs)
    seconds = sum(run.seconds for run, _ in pairs) / n
    seconds_with = sum(base.seconds for _, base in pairs) / n
    success = sum(run.success for run, _ in pairs) / n
    success_with = sum(base.success for _, base in pairs) / n
    evaluated = [run.steps[0].prompt - run.steps[0].cached for run, _ in pairs if run.steps[0].cached is not None]
    return Measured(
        n=n,
        success=success,
        success_with=success_with,
        calls_with=sum(base.n_calls for _, base in pairs) / n,
        calls_left=sum(run.n_refused for run, _ in pairs) / n,
        output_tokens=sum(run.output_tokens for run, _ in pairs) / n,
        output_with=sum(base.output_tokens for _, base in pairs) / n,
        seconds=seconds,
        seconds_with=seconds_with,
        ttft_s=sum(run.steps[0].ttft for run, _ in pairs) / n,
        ttft_with_s=sum(base.steps[0].ttft for _, base in pairs) / n,
        reevaluated=sum(evaluated) / len(evaluated) if evaluated else None,
        value_s=seconds_with - seconds - max(seconds_with, 1e-3) * (success_with - success),
    )
