"""The nearest agent that was measured before: where a plan and a fit may start from. Pure.

It says where to begin and no more. Which probes come first may follow it, since that looks at no score of the gate; the
layer is pulled towards the neighbour's only where cross-validation on this agent's own probes prefers that to the
shared gate; thresholds and their proof rest on this agent's calibrate split alone. For the proof to stand, a neighbour
for the fit is chosen on the fit split.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from whetherman_edge.calibrate.labels import Outcome, label
from whetherman_edge.calibrate.plan import Item
from whetherman_edge.profiles.schema import Found, Profile

SHARED_MIN: Final = 8
"""Probes measured here, of generators measured there, from which on agreement is judged."""
_APART: Final = 0.1
"""Nats a probe that another kind of server, or another intervention, counts as distance."""
_STATES: Final = ("needed", "not_needed", "lost")


class Neighbour(msgspec.Struct, frozen=True):
    """``agreement``: mean log-probability of this agent's labels by the neighbour's rates, nats a probe, over ``n``
    probes.
    """

    name: str
    profile: Profile
    agreement: float
    n: int


def found_of(items: Sequence[Item], outcomes: Mapping[str, Outcome]) -> dict[str, Found]:
    """Labels by generator, as a profile keeps them; soft ones count as needed when they do in the proof."""
    counts: dict[str, Counter[str]] = {}
    for item in items:
        state = _state(outcomes.get(item.probe.id))
        if state:
            counts.setdefault(item.probe.generator, Counter())[state] += 1
    return {name: Found(*(found[state] for state in _STATES)) for name, found in sorted(counts.items())}


def nearest(
    known: Sequence[tuple[str, Profile]], items: Sequence[Item], outcomes: Mapping[str, Outcome], kind: str, mode: str
) -> Neighbour | None:
    """The known agent whose labels are most like this one's; None where none tells more than this agent's own shares
    of labels do. kind, mode: of this agent's server and its intervention.

    With fewer than SHARED_MIN labels in common only an agent like it in both is taken: that is enough for an order.
    """
    best: Neighbour | None = None
    for name, profile in known:
        told = [
            (state, profile.found[item.probe.generator])
            for item in items
            if item.probe.generator in profile.found and (state := _state(outcomes.get(item.probe.id)))
        ]
        apart = (profile.agent.kind != kind) + (profile.intervention.mode != mode)
        if not profile.found or (len(told) < SHARED_MIN and apart):
            continue
        agreement = sum(math.log(_share(found, state)) for state, found in told) / max(len(told), 1)
        if len(told) >= SHARED_MIN and agreement <= _own([state for state, _ in told]):
            continue
        near = Neighbour(name, profile, agreement - _APART * apart, len(told))
        if best is None or (near.n >= SHARED_MIN, near.agreement) > (best.n >= SHARED_MIN, best.agreement):
            best = near
    return best


def _state(outcome: Outcome | None) -> str:
    made = label(outcome or Outcome())
    if made.state == "soft":
        return "needed" if made.proof else "not_needed" if made.proof is False else ""
    return made.state if made.state in _STATES else ""


def _share(found: Found, state: str) -> float:
    """A label's share in one generator of the neighbour, one of each added."""
    n: int = getattr(found, state)
    return (n + 1) / (found.needed + found.not_needed + found.lost + len(_STATES))


def _own(states: Sequence[str]) -> float:
    """Mean log-probability of these labels by their own shares."""
    counts = Counter(states)
    return sum(n * math.log(n / len(states)) for n in counts.values()) / len(states)
