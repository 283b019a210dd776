"""A profile: what one agent's own measurements allow. The file's shape, its checks, and the layer's arithmetic.

A profile file is ours, so unknown fields are refused; every message names the field and the fix.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import datetime
from typing import Literal

import msgspec

from whetherman_edge.errors import ProfileError

SCHEMA_VERSION = 1
# A profile with 64 features is 4 KB; anything near this is no profile.
FILE_BYTES_MAX = 1 << 20

InterventionMode = Literal["auto", "note", "none", "strip", "prefill", "prune"]

_SHA256 = re.compile(r"[0-9a-f]{64}")


class Agent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The agent measured: kind of endpoint, model name as in requests, quantisation if known."""

    kind: str
    model: str
    quantisation: str = ""


class EngineArtifact(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The stage whose outputs the layer reads, and the SHA-256 (hex) of its artifact."""

    name: Literal["static", "gemma"]
    sha256: str


class Layer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Logistic layer on the fused outputs of the gate: p(need) = sigmoid((w . (x - mean) / scale + bias) /
    temperature).

    ``features``: names, each one of the engine's fused outputs; ``mean``, ``scale``, ``weights``: one float for each.
    """

    features: tuple[str, ...]
    mean: tuple[float, ...]
    scale: tuple[float, ...]
    weights: tuple[float, ...]
    bias: float
    temperature: float = 1.0

    def p_need(self, values: Sequence[float]) -> float:
        """Probability that a tool call is needed.  values: the features, in their order.  Returns a float in [0, 1]."""
        logit = self.bias
        for value, mean, scale, weight in zip(values, self.mean, self.scale, self.weights, strict=True):
            logit += weight * (value - mean) / scale
        return sigmoid(logit / self.temperature)


class Tau(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="upper"):
    """Least 1 - p(need) at which a decision is made; None: never."""

    answer: float | None = None
    ask: float | None = None
    decline: float | None = None


class Risk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was proven: with probability 1 - delta, at most alpha of the withheld calls were needed.

    Counts of the calibration set: measured requests, those the thresholds would withhold, and how many of these needed
    the call (false skips).
    """

    alpha: float
    delta: float
    n_measured: int
    n_withheld: int
    n_false_skips: int


class InterventionChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How this agent is best steered; ``wording``: name of a note wording, "" for the default one."""

    mode: InterventionMode = "auto"
    wording: str = ""


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One agent's profile, as in ``NAME.json``.

    ``risk`` None: nothing was proven, so the daemon stays in shadow. ``interactive`` False: nobody can answer a
    question, so ASK is never decided. ``payoff``: inputs of the threshold's choice, kept for ``profile show``.
    ``probes_sha256``: digest of the probe results. ``created``: ISO 8601. ``version``: of Whetherman Edge.
    """

    schema: int
    agent: Agent
    engine: EngineArtifact
    layer: Layer
    tau: Tau
    risk: Risk | None
    payoff: dict[str, float] = {}
    intervention: InterventionChoice = InterventionChoice()
    interactive: bool = True
    probes_sha256: str = ""
    created: str
    version: str

    @property
    def calibrated(self) -> bool:
        """True when this profile has proven that it may intervene, and in at least one way."""
        taus = (self.tau.answer, self.tau.ask, self.tau.decline)
        return self.risk is not None and any(tau is not None for tau in taus)


_decode = msgspec.json.Decoder(Profile).decode
_encode = msgspec.json.Encoder().encode


def sigmoid(x: float) -> float:
    """Logistic function without overflow."""
    if x >= 0.0:
        return 1.0 / (1.0 + math.exp(-x))
    e = math.exp(x)
    return e / (1.0 + e)


def parse_profile(data: bytes, name: str) -> Profile:
    """A validated Profile from a file's bytes.  name: for the messages.  Raises ProfileError naming field and fix."""
    if len(data) > FILE_BYTES_MAX:
        raise ProfileError(f"profile {name!r}: expected at most {FILE_BYTES_MAX} bytes, got {len(data)}; not a profile")
    try:
        profile = _decode(data)
    except msgspec.ValidationError as exc:
        raise ProfileError(f"profile {name!r}: {exc}; correct the file or calibrate again") from exc
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ProfileError(f"profile {name!r}: expected a JSON object, {exc}; copy the file again") from exc
    validate(profile, name)
    return profile


def serialize_profile(profile: Profile) -> bytes:
    """The file's bytes: indented JSON with a final newline."""
    return msgspec.json.format(_encode(profile), indent=2) + b"\n"


def validate(profile: Profile, name: str) -> None:
    """Raises ProfileError for values that JSON's types let through but that mean nothing."""
    for problem in _problems(profile):
        raise ProfileError(f"profile {name!r}: {problem}")


def check_engine(profile: Profile, name: str, engine_name: str, sha256: str) -> None:
    """Raises ProfileError when the profile was fitted on another engine artifact than the one that is loaded."""
    if profile.engine.name != engine_name or profile.engine.sha256 != sha256:
        raise ProfileError(
            f"profile {name!r}: engine: fitted on {profile.engine.name} {profile.engine.sha256[:12]}…, loaded is "
            f"{engine_name} {sha256[:12]}…; calibrate again with this version, or install the one it was made with"
        )


def check_features(profile: Profile, name: str, available: Sequence[str]) -> None:
    """Raises ProfileError when the layer reads a feature that the loaded engine does not produce."""
    missing = [feature for feature in profile.layer.features if feature not in available]
    if missing:
        raise ProfileError(
            f"profile {name!r}: layer.features: the engine has no {missing[0]!r}"
            f"{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}; calibrate again with this version"
        )


def _problems(profile: Profile) -> list[str]:
    """All that is wrong, the most basic first."""
    found: list[str] = []
    if profile.schema != SCHEMA_VERSION:
        found.append(
            f"schema: expected {SCHEMA_VERSION}, got {profile.schema}; made by Whetherman Edge {profile.version}, "
            "calibrate again with this one"
        )
    if not _SHA256.fullmatch(profile.engine.sha256):
        found.append("engine.sha256: expected 64 lower-case hex digits; calibrate again")
    found += _layer_problems(profile.layer)
    for key, value in (("ANSWER", profile.tau.answer), ("ASK", profile.tau.ask), ("DECLINE", profile.tau.decline)):
        if value is not None and not 0.0 <= value <= 1.0:
            found.append(f"tau.{key}: expected a number in 0..1 or null (never), got {value:g}")
    if profile.risk is not None:
        found += _risk_problems(profile.risk)
    found += [
        f"payoff.{key}: expected a finite number, got {value}"
        for key, value in profile.payoff.items()
        if not math.isfinite(value)
    ]
    try:
        datetime.fromisoformat(profile.created)
    except ValueError:
        found.append(f"created: expected an ISO 8601 time, got {profile.created[:40]!r}")
    return found


def _layer_problems(layer: Layer) -> list[str]:
    n = len(layer.features)
    found: list[str] = []
    if n == 0:
        found.append("layer.features: expected at least one name, got none")
    if len(set(layer.features)) != n:
        found.append("layer.features: expected each name once; calibrate again")
    for key in ("mean", "scale", "weights"):
        values: tuple[float, ...] = getattr(layer, key)
        if len(values) != n:
            found.append(f"layer.{key}: expected {n} numbers, one for each of layer.features, got {len(values)}")
        bad = next((i for i, value in enumerate(values) if not math.isfinite(value)), None)
        if bad is not None:
            found.append(f"layer.{key}[{bad}]: expected a finite number, got {values[bad]}; calibrate again")
    bad = next((i for i, value in enumerate(layer.scale) if not value > 0.0), None)
    if bad is not None:
        found.append(f"layer.scale[{bad}]: expected a number above 0, got {layer.scale[bad]}; calibrate again")
    if not math.isfinite(layer.bias):
        found.append(f"layer.bias: expected a finite number, got {layer.bias}; calibrate again")
    if not (math.isfinite(layer.temperature) and layer.temperature > 0.0):
        found.append(f"layer.temperature: expected a number above 0, got {layer.temperature}; calibrate again")
    return found


def _risk_problems(risk: Risk) -> list[str]:
    found = [
        f"risk.{key}: expected a number between 0 and 1, got {value:g}"
        for key, value in (("alpha", risk.alpha), ("delta", risk.delta))
        if not 0.0 < value < 1.0
    ]
    if not 0 <= risk.n_false_skips <= risk.n_withheld <= risk.n_measured:
        found.append(
            "risk: expected 0 <= n_false_skips <= n_withheld <= n_measured, got "
            f"{risk.n_false_skips}, {risk.n_withheld}, {risk.n_measured}"
        )
    elif risk.n_measured == 0:
        found.append("risk.n_measured: expected measurements, got 0; write null for a profile without any")
    elif risk.n_false_skips > risk.alpha * risk.n_withheld:
        found.append(
            f"risk: {risk.n_false_skips} false skips of {risk.n_withheld} withheld are more than alpha {risk.alpha:g}; "
            "write null for risk, or calibrate again"
        )
    return found
