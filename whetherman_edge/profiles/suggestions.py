"""The profile that was measured on a model somebody serves, and the line that gives it to that model. Pure.

Nothing here switches anything on: whether the weights are those that were measured is for the user to say.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec

from whetherman_edge.profiles.schema import Likeness, Profile, likeness
from whetherman_edge.profiles.store import Stored

_RANKS: dict[Likeness, int] = {"same": 0, "untold": 1, "requantised": 2}


class Suggestion(msgspec.Struct, frozen=True):
    """``name``: of the profile. ``twin``: of the one for the static engine alone, where ``name`` wants the backbone."""

    name: str
    profile: Profile
    likeness: Likeness
    twin: str = ""


def suggest(stored: Sequence[Stored], model: str, quantisation: str = "", engine: str = "auto") -> Suggestion | None:
    """The stored profile that is nearest to a model; None where none was measured on anything like it.

    quantisation: where the server tells it. engine: as configured; with "static" a backbone's profile is of no use.
    """
    found: list[tuple[int, bool, str, Profile, Likeness]] = []
    for one in stored:
        if one.profile is None or one.fault or not one.profile.calibrated:
            continue
        static = one.profile.engine.name == "static"
        like = likeness(one.profile, model, quantisation)
        if like != "no" and (static or engine != "static"):
            found.append((_RANKS[like], static, one.name, one.profile, like))
    if not found:
        return None
    rank, static, name, profile, like = min(found, key=lambda entry: entry[:3])
    twins = [entry[2] for entry in found if entry[:2] == (rank, True)]
    return Suggestion(name, profile, like, min(twins) if twins and not static else "")


def line(model: str, name: str) -> str:
    """The line under ``[agents]`` that gives a model a profile."""
    return f"{json.dumps(model, ensure_ascii=False)} = {json.dumps(name)}"


def advice(found: Suggestion, model: str, file: str) -> str:
    """What to do about it, in one sentence. file: the configuration file."""
    agent = found.profile.agent
    measured = " ".join(filter(None, (agent.model, agent.quantisation)))
    if found.likeness == "requantised":
        return f"{model}: the profile {found.name} was measured on {measured} and proves nothing here; calibrate it"
    add = f"add {line(model, found.name)} under [agents] in {file}"
    if found.twin:
        add += f' (or "{found.twin}" where the backbone has no weights)'
    if found.likeness == "same":
        return f"{model} was measured: {add}"
    return f"{model}: if the server runs {measured}, which its name does not tell, {add}; else calibrate it"
