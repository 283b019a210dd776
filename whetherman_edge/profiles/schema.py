"""A profile: what one agent's own measurements allow. The file's shape, its checks, and the layer's arithmetic.

A profile file is ours, so unknown fields are refused; every message names the field and the fix.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Literal

import msgspec

from whetherman_edge.errors import ProfileError
from whetherman_edge.gate.verdict import STEP_KINDS, Label, StepKind
from whetherman_edge.profiles.risk import Threshold, upper_bound

SCHEMA_VERSION = 2
# A profile with 64 features is 4 KB; anything near this is no profile.
FILE_BYTES_MAX = 1 << 20

Likeness = Literal["same", "untold", "requantised", "no"]
InterventionMode = Literal["auto", "note", "none", "strip", "prefill", "prune"]

# More probes than anybody runs; the bound's arithmetic is linear in them.
N_MEASURED_MAX = 100_000
# The stated bound is a number that was written and read; it is recomputed from the counts all the same.
_BOUND_TOLERANCE = 1e-4

_QUANTISATION = re.compile(
    r"[-_.:]((?:i?q\d(?:[-_](?:[0-9a-z]{1,3}))*)|bf16|f(?:p)?(?:8|16|32)|int[48]|awq|gptq|mxfp4)(?![0-9a-z])"
)
_TUNED = re.compile(r"-(?:instruct|chat|it|gguf)(?=-|$)")
_SEPARATORS = re.compile(r"[-_.:\s]+")
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


class ByKind(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A threshold for each kind of step (``gate.verdict.StepKind``); None: never."""

    first: float | None = None
    later: float | None = None


class Tau(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="upper"):
    """Least 1 - p(need) at which a decision is made: a number for both kinds of step, or one for each; None: never."""

    answer: float | ByKind | None = None
    ask: float | ByKind | None = None
    decline: float | ByKind | None = None

    def at(self, label: Label, kind: StepKind) -> float | None:
        """The threshold of a decision other than ACT on a step of that kind."""
        value = self.answer if label == "ANSWER" else self.ask if label == "ASK" else self.decline
        return getattr(value, kind) if isinstance(value, ByKind) else value


class Counted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One decision's part of a Proof: steps withheld by it, and needed ones among them (by group, as in the Proof)."""

    n_withheld: int
    n_false_skips: int


class Proof(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Counts of the calibration split for one kind of step, and the bound that follows from them.

    ``n_measured``: steps. ``n_needed``: independent ones (groups) on which this agent fails without its call;
    ``n_false_skips``: those of them that the thresholds withhold, by any decision; ``n_withheld``: steps withheld.
    ``bound``: upper Clopper-Pearson bound of n_false_skips in n_needed at the risk's delta, or at the part of it that
    this look at a calibration could spend (``risk.look_level``), which gives more. ``decisions``: those that the
    thresholds allow on this kind of step; the claim is about all of them together.
    """

    n_measured: int
    n_needed: int
    n_false_skips: int
    n_withheld: int
    bound: float
    decisions: dict[Label, Counted]


class Risk(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What was proven: with confidence 1 - delta, at most alpha of this agent's needed steps of a kind are withheld.

    ``first``, ``later``: the proof for that kind of step. The plain form states counts for both kinds at once
    (``n_measured``, ``n_withheld``, ``n_false_skips``, and best ``n_needed``) in place of them.
    """

    alpha: float
    delta: float
    n_measured: int | None = None
    n_withheld: int | None = None
    n_false_skips: int | None = None
    n_needed: int | None = None
    first: Proof | None = None
    later: Proof | None = None

    @property
    def plain(self) -> bool:
        """True for the form with one set of counts."""
        return self.n_measured is not None or self.n_withheld is not None or self.n_false_skips is not None

    def covers(self, label: Label, kind: StepKind) -> bool:
        """True when these counts speak about that decision on that kind of step."""
        if self.plain:
            return True
        proof: Proof | None = getattr(self, kind)
        return proof is not None and label in proof.decisions


class InterventionChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How this agent is best steered; ``wording``: name of a note wording, "" for the default one."""

    mode: InterventionMode = "auto"
    wording: str = ""


_N = Annotated[int, msgspec.Meta(ge=0, le=N_MEASURED_MAX)]


class Found(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Labels of the probes of one generator: for how many this agent's call was needed, for how many not, and how many
    it lost either way.
    """

    needed: _N = 0
    not_needed: _N = 0
    lost: _N = 0


class _Head(msgspec.Struct, frozen=True):
    """What every schema version has."""

    schema: int
    version: str = ""


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One agent's profile, as in ``NAME.json``.

    ``risk`` None: nothing was proven, so the daemon stays in shadow. ``interactive`` False: nobody can answer a
    question, so ASK is never decided. ``payoff``: inputs of the threshold's choice, kept for ``profile show``.
    ``probes_sha256``: digest of the probe results. ``created``: ISO 8601. ``version``: of Whetherman Edge. ``found``:
    labels by generator of probes, for the calibration of an agent like this one.
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
    found: dict[str, Found] = {}

    @property
    def calibrated(self) -> bool:
        """True when this profile has proven that it may intervene, and in at least one way."""
        return self.risk is not None and any(tau is not None for _, _, tau in taus(self.tau))


def proven(thresholds: Mapping[StepKind, Threshold | None], *, alpha: float, delta: float) -> tuple[Tau, Risk | None]:
    """The ``tau`` and ``risk`` of a profile, from ``risk.choose_by_kind``; (Tau(), None) where nothing was proven.

    A decision that withheld no step at its threshold is left out: nothing shows that it is of use.
    """
    tau: dict[str, dict[str, float]] = {}
    proofs: dict[StepKind, Proof] = {}
    for kind, found in thresholds.items():
        used = {} if found is None else {label: n for label, n in found.decisions.items() if n[0]}
        if found is None or not used:
            continue
        for label in used:
            tau.setdefault(label.lower(), {})[kind] = found.tau
        proofs[kind] = Proof(
            n_measured=found.n_measured,
            n_needed=found.n_needed,
            n_false_skips=found.n_false_skips,
            n_withheld=found.n_withheld,
            bound=found.bound,
            decisions={label: Counted(*counts) for label, counts in used.items()},
        )
    if not proofs:
        return Tau(), None
    values = {label: ByKind(**by_kind) for label, by_kind in tau.items()}
    return Tau(**values), Risk(alpha, delta, first=proofs.get("first"), later=proofs.get("later"))


def proven_kinds(profile: Profile) -> frozenset[StepKind]:
    """The kinds of step on which this profile has proven that it may withhold calls."""
    risk = profile.risk
    if risk is None:
        return frozenset()
    return frozenset(kind for label, kind, tau in taus(profile.tau) if tau is not None and risk.covers(label, kind))


def joined(tau: Tau, risk: Risk | None, before: Profile, stands: Collection[StepKind]) -> tuple[Tau, Risk | None]:
    """Thresholds and proofs of an earlier profile for the kinds in ``stands``, these ones for the others; all of the
    earlier profile's layer.
    """
    values = {
        label.lower(): ByKind(**{kind: (before.tau if kind in stands else tau).at(label, kind) for kind in STEP_KINDS})
        for label in ("ANSWER", "ASK", "DECLINE")
    }
    found = {kind: getattr(before.risk if kind in stands else risk, kind, None) for kind in STEP_KINDS}
    of = before.risk if risk is None else risk
    return Tau(**values), None if of is None else Risk(of.alpha, of.delta, first=found["first"], later=found["later"])


def taus(tau: Tau) -> Iterator[tuple[Label, StepKind, float | None]]:
    """Every decision and kind of step with its threshold."""
    for label in ("ANSWER", "ASK", "DECLINE"):
        for kind in STEP_KINDS:
            yield label, kind, tau.at(label, kind)


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
        _refuse_old(data, name)
        raise ProfileError(f"profile {name!r}: {exc}; correct the file or calibrate again") from exc
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ProfileError(f"profile {name!r}: expected a JSON object, {exc}; copy the file again") from exc
    validate(profile, name)
    return profile


def _refuse_old(data: bytes, name: str) -> None:
    """Raise ProfileError for a file of another schema version: which of its keys are wrong is then beside the point."""
    try:
        head = msgspec.json.decode(data, type=_Head)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # also one that is cut off behind its fault
        return
    if head.schema != SCHEMA_VERSION:
        raise ProfileError(f"profile {name!r}: {_other_schema(head.schema, head.version)}")


def _other_schema(schema: int, version: str) -> str:
    return (
        f"schema: expected {SCHEMA_VERSION}, got {schema}; made by Whetherman Edge {version or '(no version)'}, "
        "calibrate again with this one"
    )


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


def basis_of(profile: Profile) -> str:
    """What tells one calibration of an agent from another: 12 hex digits of the profile's own."""
    parts = (profile.created, profile.probes_sha256, profile.engine.sha256, profile.agent.model)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def measured_on(profile: Profile, model: str) -> bool:
    """True when a request's model is the one that was measured, as far as its name tells.

    Folders, ``.gguf`` and ``:latest`` do not count, nor does a quantisation that one side leaves out. A request or a
    profile without a model name says nothing against it.
    """
    name, quantisation = _model_name(model)
    own, own_quantisation = _model_name(profile.agent.model)
    own_quantisation = _plain(profile.agent.quantisation) or own_quantisation
    if quantisation and own_quantisation and quantisation != own_quantisation:
        return False
    return not name or not own or name == own


def likeness(profile: Profile, model: str, quantisation: str = "") -> Likeness:
    """How much a model that a server names is the one that was measured. quantisation: where the server tells it.

    A proof holds for one quantisation, which names seldom tell: "untold" where a side leaves it out, or where the names
    agree but for ``-instruct`` and the like; "requantised" where both tell another one.
    """
    name, told = _model_name(model)
    own, own_told = _model_name(profile.agent.model)
    told, own_told = _plain(quantisation) or told, _plain(profile.agent.quantisation) or own_told
    if not name or not own or _TUNED.sub("", name) != _TUNED.sub("", own):
        return "no"
    if told and own_told and told != own_told:
        return "requantised"
    return "same" if told and own_told and name == own else "untold"


def quantisation_in(model: str) -> str:
    """The quantisation that a model's name or file tells, reduced as ``likeness`` compares it; "" without."""
    return _model_name(model)[1]


@functools.lru_cache(maxsize=512)
def _model_name(model: str) -> tuple[str, str]:
    """(name, quantisation) of a model as requests name it, both reduced to what matters."""
    name = model.strip().casefold().replace("\\", "/").rstrip("/").rpartition("/")[2]
    name = name.removesuffix(".gguf").removesuffix(":latest")
    found = _QUANTISATION.search(name)
    if found is None:
        return _plain(name), ""
    return _plain(name[: found.start()] + name[found.end() :]), _plain(found[1])


def _plain(name: str) -> str:
    return _SEPARATORS.sub("-", name.strip().casefold()).strip("-")


def _problems(profile: Profile) -> list[str]:
    """All that is wrong, the most basic first."""
    found: list[str] = []
    if profile.schema != SCHEMA_VERSION:
        found.append(_other_schema(profile.schema, profile.version))
    if not _SHA256.fullmatch(profile.engine.sha256):
        found.append("engine.sha256: expected 64 lower-case hex digits; calibrate again")
    found += _layer_problems(profile.layer)
    for label, kind, value in taus(profile.tau):
        if value is not None and not 0.0 <= value <= 1.0:
            found.append(f"tau.{label}, {kind} steps: expected a number in 0..1 or null (never), got {value:g}")
    if profile.risk is not None:
        found += _risk_problems(profile.risk)
        found += [
            f"risk.{kind}.decisions: expected the counts of {label}, which tau allows; calibrate again"
            for label, kind, value in taus(profile.tau)
            if value is not None and not profile.risk.covers(label, kind)
        ]
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
    if found:
        return found
    if risk.plain:
        if risk.first is not None or risk.later is not None:
            return ["risk: expected counts for first and later steps, or one set for both, got both; calibrate again"]
        return _plain_problems(risk)
    if risk.first is None and risk.later is None:
        return ["risk: expected counts, got none; write null for a profile without any"]
    for kind in STEP_KINDS:
        proof: Proof | None = getattr(risk, kind)
        if proof is not None:
            found += _proof_problems(f"risk.{kind}", proof, risk)
    return found


def _proof_problems(key: str, proof: Proof, risk: Risk) -> list[str]:
    """Counts that cannot be, or that do not prove what the risk claims."""
    n_needed, n_false = proof.n_needed, proof.n_false_skips
    if not (0 <= n_false <= n_needed <= proof.n_measured and n_false <= proof.n_withheld <= proof.n_measured):
        counts = f"{n_false}, {n_needed}, {proof.n_measured}, and {proof.n_withheld} withheld"
        expected = "0 <= n_false_skips <= n_needed <= n_measured and n_false_skips <= n_withheld <= n_measured"
        return [f"{key}: expected {expected}, got {counts}; calibrate again"]
    if proof.n_measured > N_MEASURED_MAX:
        return [f"{key}.n_measured: expected at most {N_MEASURED_MAX}, got {proof.n_measured}"]
    parts = proof.decisions.values()
    if "ACT" in proof.decisions or any(not 0 <= part.n_false_skips <= part.n_withheld for part in parts):
        return [f"{key}.decisions: expected ANSWER, ASK or DECLINE, 0 <= n_false_skips <= n_withheld; calibrate again"]
    n_parts = sum(part.n_false_skips for part in parts)
    most = max((part.n_false_skips for part in parts), default=0)
    if sum(part.n_withheld for part in parts) != proof.n_withheld or not most <= n_false <= n_parts:
        return [f"{key}.decisions: expected counts that add up to those of {key}; calibrate again"]
    bound = upper_bound(n_false, n_needed, risk.delta)
    if bound > risk.alpha:
        return [_unproven(key, n_false, n_needed, bound, risk)]
    if not bound - _BOUND_TOLERANCE <= proof.bound <= risk.alpha:
        expected = f"{bound:.5f}, which follows from the counts, or more up to {risk.alpha:g}"
        return [f"{key}.bound: expected {expected}, got {proof.bound:g}"]
    return []


def _plain_problems(risk: Risk) -> list[str]:
    """The same for the plain form. Without ``n_needed`` the most is assumed that the other counts leave room for."""
    n_measured, n_withheld, n_false = risk.n_measured, risk.n_withheld, risk.n_false_skips
    if n_measured is None or n_withheld is None or n_false is None:
        return ["risk: expected n_measured, n_withheld and n_false_skips; calibrate again"]
    if not 0 <= n_false <= n_withheld <= n_measured:
        return [
            f"risk: expected 0 <= n_false_skips <= n_withheld <= n_measured, got {n_false}, {n_withheld}, {n_measured}"
        ]
    if n_measured == 0:
        return ["risk.n_measured: expected measurements, got 0; write null for a profile without any"]
    if n_measured > N_MEASURED_MAX:
        return [f"risk.n_measured: expected at most {N_MEASURED_MAX}, got {n_measured}"]
    n_most = n_measured - n_withheld + n_false
    n_needed = n_most if risk.n_needed is None else risk.n_needed
    if not n_false <= n_needed <= n_most:
        return [f"risk.n_needed: expected {n_false} to {n_most} by the other counts, got {n_needed}"]
    if risk.n_needed is None and n_false > risk.alpha * n_withheld:
        claimed = f"{n_false} false skips of {n_withheld} withheld are more than alpha {risk.alpha:g}"
        return [f"risk: {claimed}; write null for risk, or calibrate again"]
    bound = upper_bound(n_false, n_needed, risk.delta)
    return [_unproven("risk", n_false, n_needed, bound, risk)] if bound > risk.alpha else []


def _unproven(key: str, n_false: int, n_needed: int, bound: float, risk: Risk) -> str:
    return (
        f"{key}: {n_false} false skips of {n_needed} needed steps prove at most {bound:.1%} with confidence "
        f"{1 - risk.delta:.0%}, the claim is {risk.alpha:.1%}; calibrate again"
    )
