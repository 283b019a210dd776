"""The typed answer of the router."""

from __future__ import annotations

import math
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


def reordered(choice: Choice, matches: Mapping[str, float], weight: float) -> Choice:
    """``choice`` with what some of its options share between them given out anew; all others keep their probability.

    matches: logits of how well an option fits the query; weight: what the log-probability so far counts beside them.
    """
    if len(matches) < 2:
        return choice
    before = {name: choice.probabilities[name] for name in matches}
    logits = {name: weight * math.log(max(p, 1e-12)) + matches[name] for name, p in before.items()}
    top = max(logits.values())
    weights = {name: math.exp(logit - top) for name, logit in logits.items()}
    share = sum(before.values()) / sum(weights.values())
    p = dict(choice.probabilities) | {name: share * one for name, one in weights.items()}
    best = max(p, key=lambda name: p[name])
    return Choice(best, p, p[best])
