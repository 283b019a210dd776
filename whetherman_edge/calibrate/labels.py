"""From runs to labels, and which run would decide a probe next. Pure.

A step is *needed* when this agent fails without its call and succeeds with it. Right without is not needed, however
well it does with tools. Wrong both ways is *lost*: a skip would lose nothing there, but the probe is no evidence for
safety either, so it is left out of the fit and of the proof. Where runs disagree the label is soft for the fit; for the
proof it is needed as soon as tools help in half of the cases or more, and left out where they help less.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal

import msgspec

from whetherman_edge.calibrate.probe import Expect
from whetherman_edge.calibrate.run_log import RunLine
from whetherman_edge.gate.verdict import Label as Decided

State = Literal["open", "needed", "not_needed", "soft", "lost"]
Arm = Literal["with", "without"]

NEEDED_GAP: Final = 0.5
"""Difference of success rates, with less without, from which a soft step counts as needed in the proof."""
SOFT_WEIGHT: Final = 0.5
RIGHT_MIN: Final = 2
"""Runs without that must be right before a step counts as not needed: the one at temperature 0 may be luck."""


class Outcome(msgspec.Struct, frozen=True):
    """Successes in the runs on one probe, in the order of their index."""

    with_tools: tuple[bool, ...] = ()
    without: tuple[bool, ...] = ()

    @property
    def rate_with(self) -> float:
        """Success rate with tools; 0.0 without runs."""
        return sum(self.with_tools) / len(self.with_tools) if self.with_tools else 0.0

    @property
    def rate_without(self) -> float:
        """Success rate with calls refused; 0.0 without runs."""
        return sum(self.without) / len(self.without) if self.without else 0.0


class Label(msgspec.Struct, frozen=True):
    """``needed``: soft label in [0, 1] for the fit, with its ``weight``. ``proof``: the same for the proof, None where
    the probe is left out. ``worse_with_tools``: right more often without than with.
    """

    state: State
    needed: float = 0.0
    weight: float = 0.0
    proof: bool | None = None
    worse_with_tools: bool = False


def steered_label(expect: Expect) -> Decided:
    """The decision carried out where a probe is run without calls: the one that a careful person would take."""
    return expect if expect in ("ASK", "DECLINE") else "ANSWER"


def outcome(runs: Iterable[RunLine], without_arm: str) -> Outcome:
    """The runs of one probe; those of other arms than "with" and the chosen one are left out."""
    ordered = sorted(runs, key=lambda run: run.index)
    return Outcome(
        tuple(run.success for run in ordered if run.arm == "with"),
        tuple(run.success for run in ordered if run.arm == without_arm),
    )


def label(found: Outcome) -> Label:
    """The label that these runs give; "open" while they decide nothing."""
    n_with, n_without = len(found.with_tools), len(found.without)
    worse = bool(n_with and n_without and found.rate_without > found.rate_with)
    if n_without and all(found.without):
        if n_without < RIGHT_MIN:
            return Label("open", worse_with_tools=worse)
        return Label("not_needed", 0.0, 1.0, proof=False, worse_with_tools=worse)
    if n_with and not any(found.with_tools):
        if n_without and any(found.without):
            return Label("soft", 0.0, SOFT_WEIGHT, proof=False, worse_with_tools=worse)
        return Label("lost")
    if not n_with or not n_without:
        return Label("open")
    if not any(found.without) and all(found.with_tools):
        return Label("needed", 1.0, 1.0, proof=True)
    gap = found.rate_with - found.rate_without
    proof = True if gap >= NEEDED_GAP else False if gap <= 0.0 else None
    needed = found.rate_with * (1.0 - found.rate_without)
    return Label("soft", needed, SOFT_WEIGHT, proof=proof, worse_with_tools=worse)


def next_arm(found: Outcome, expect: Expect, *, thorough: bool, runs: int = 3, runs_max: int = 5) -> Arm | None:
    """The arm to run next on this probe, or None when it is decided.

    Quick first: one look where the task itself says what to expect, a second one where the agent surprised or where
    everything hangs on it (a step must be right without twice, once sampled, to count as not needed). thorough: up to
    ``runs`` of each arm, ``runs_max`` where they are mixed, still stopping where no further run could change the label.
    """
    n_with, n_without = len(found.with_tools), len(found.without)
    if not thorough:
        return _quick(found, expect)
    mixed_without = 0 < sum(found.without) < n_without
    mixed_with = 0 < sum(found.with_tools) < n_with
    if n_without < (runs_max if mixed_without else runs):
        return "without"
    if all(found.without):
        return None
    if n_with < (runs_max if mixed_with else runs):
        return "with"
    return None


def _quick(found: Outcome, expect: Expect) -> Arm | None:
    n_with, n_without = len(found.with_tools), len(found.without)
    if expect == "ACT":
        if not n_with:
            return "with"
        if not found.with_tools[0]:
            return None  # it cannot do this with tools, so it can lose nothing without
        if not n_without:
            return "without"
        if not any(found.without):
            return None
        return "without" if n_without < 2 else None
    if not n_without:
        return "without"
    if all(found.without):
        return "without" if n_without < 2 else None
    if not n_with:
        return "with"
    if not any(found.with_tools):
        return None
    if n_without < 2:
        return "without"
    return "with" if n_with < 2 else None
