"""The thresholds that a gate ships with, for agents without a profile: a Tau for each phase of a dialogue.

The phases have budgets of their own (``convert.gate_metrics``): a needed call that is withheld at the first step costs
one answer, behind earlier turns or results the work done so far as well, and its rate differs more between writers.
Pure.
"""

from __future__ import annotations

from typing import Final

import msgspec

from whetherman_edge.gate.verdict import PHASES
from whetherman_edge.profiles.schema import Tau

OperatingPoint = tuple[Tau, ...]
"""In the order of ``gate.verdict.PHASES``; one number a decision."""

NEVER: Final[OperatingPoint] = (Tau(),) * len(PHASES)


def read_operating_point(value: object) -> OperatingPoint:
    """From a manifest's JSON: a list of objects like {"ANSWER": 0.9, "ASK": null}, one for each phase.

    Raises ValueError.
    """
    try:
        found = msgspec.convert(value, tuple[Tau, ...])
    except msgspec.ValidationError as exc:
        raise ValueError(f"expected default_tau as a list of thresholds ({exc})") from exc
    problem = problem_of(found)
    if problem:
        raise ValueError(problem)
    return found


def problem_of(tau: OperatingPoint) -> str:
    """What is wrong with it; "" when all is well."""
    if len(tau) != len(PHASES):
        return f"expected default_tau of {len(PHASES)} phases, found {len(tau)}"
    numbers = [one for phase in tau for one in (phase.answer, phase.ask, phase.decline) if one is not None]
    if not all(isinstance(one, float) and 0.0 <= one <= 1.0 for one in numbers):
        return "expected each default_tau in 0..1, or null"
    return ""
