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
FAILURE_RUNS: Final = 3.0
"""Price of a new failure, in runs with tools: the vain run, another one, and the user who has to notice. At the price
of one run an arm that fails half of these easy tasks at once would beat one that solves them all a little faster.
"""
NEAR: Final = 0.1
"""Arms within this share of a run's seconds of the best count as equal; the earliest in ALL_ARMS is taken, a note."""
_FAMILIES: Final = ("chat", "sufficient", "knowledge", "done", "arithmetic", "context")


class Measured(msgspec.Struct, frozen=True):
    """Means of one arm over the probes it shares with the runs with tools. Token and second differences are arm less
    with; ``calls_left``: calls that came all the same, a run. ``reevaluated``: prompt tokens evaluated in the first
    step, None where the server does not say. ``value_s``: seconds a run saved, a new failure at the price of
    FAILURE_RUNS runs.
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
    """The arm with the most value; the earlier one of those that are about equal; a note where nothing was measured.

    available: those that are still tried; measured: of the probes that they share (``compared``).
    """
    full = [arm for arm in available if arm in measured]
    if not full:
        return DEFAULT_ARM
    best = max(measured[arm].value_s for arm in full)
    margin = NEAR * max(measured[arm].seconds_with for arm in full)
    return next(arm for arm in full if measured[arm].value_s >= best - margin)


def still_tried(measured: Mapping[str, Measured], available: Sequence[str]) -> tuple[str, ...]:
    """The arms to go on with: all at first, then the best few."""
    if any(arm not in measured or measured[arm].n < HALVE_AFTER for arm in available):
        return tuple(available)
    ranked = sorted(available, key=lambda arm: -measured[arm].value_s)
    return tuple(arm for arm in available if arm in ranked[:KEPT])


def compared(
    probes: Sequence[str], runs: Sequence[RunLine], available: Sequence[str]
) -> tuple[dict[str, Measured], tuple[str, ...]]:
    """How far the comparison on these probes is: the arms that are still tried, measured on the probes that all of them
    have, and their names.

    Told probe by probe from the runs, so that a calibration that is gone on with drops the arms it dropped before, and
    that no arm is compared by means over other probes than its rivals'. An arm without a run on a probe, though a later
    probe was begun, is one that the server refuses.
    """
    tried = tuple(available)
    found = {(run.probe, run.arm) for run in runs if run.index == 0 and run.steps}
    done: list[str] = []
    for place, probe in enumerate(probes):
        over = any((later, arm) in found for later in probes[place + 1 :] for arm in ("with", *available))
        with_run = tuple(arm for arm in tried if (probe, arm) in found)
        if (probe, "with") not in found or not with_run:
            if over:
                continue
            break
        if with_run != tried and not over:
            break
        done.append(probe)
        tried = still_tried(measure([run for run in runs if run.probe in done]), with_run)
    measured = measure([run for run in runs if run.probe in done])
    return {arm: measured[arm] for arm in tried if arm in measured}, tried


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
        value_s=seconds_with - seconds - FAILURE_RUNS * max(seconds_with, 1e-3) * (success_with - success),
    )
