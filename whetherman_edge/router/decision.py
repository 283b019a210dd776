"""The typed answer of the router."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class Choice(msgspec.Struct, frozen=True):
    """One chosen option.

    ``choice``: an option name, byte-identical to the caller's. ``probabilities``: calibrated, one an option in the
    caller's order, summing to 1. ``confidence``: the calibrated probability of ``choice`` (System One's own confidence
    formula, which subtracts chance, is applied by that dialect).
    """

    choice: str
    probabilities: Mapping[str, float]
    confidence: float
