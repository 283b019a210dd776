"""From a verdict to a decision: the profile's layer, its thresholds, and the guards. Pure: it also runs offline.

``decide`` never logs and never raises for a request's content; the exchange logs the one decision that was committed.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import msgspec

from whetherman_edge.dialects.chat import ChatView
from whetherman_edge.errors import ProfileError
from whetherman_edge.gate import guards, loop_guard
from whetherman_edge.gate.backoff import NO_DIALOGUE_EVIDENCE, DialogueEvidence
from whetherman_edge.gate.operating_point import NEVER, OperatingPoint
from whetherman_edge.gate.verdict import LABELS, Cause, Decision, Label, Mode, Verdict, step_kind
from whetherman_edge.profiles.payoff import FREE, ToolCost, break_even, cost_of, payoff_of
from whetherman_edge.profiles.schema import Profile

# Every reason a decision can carry, and what it says. They are label values of a counter: a closed set.
REASONS: dict[str, str] = {
    "need": "ACT is the most probable class",
    "low_confidence": "another class is more probable, but not by as much as the threshold asks",
    "scored": "the class passed its threshold and every guard",
    "not_worth_it": "safe to skip, but steering costs more than the call it saves",
    "shadow_share": "one of the few that go out as they came, so that what the gate saves stays measured",
    "profile_foreign": "the profile was measured on another model: calibrate again; until then nothing is changed",
    "forced": "--force fixed the verdict",
    "loop_guard": "the same call came back with the same result; steered to a text answer",
    "guard:action": "an action is asked for and a tool for it is offered: never ANSWER",
    "guard:tool_named": "an offered tool is named in the user's or system text: never DECLINE",
    "guard:ask_twice": "the assistant asked in its last turn, or an ASK was made in this one: never twice in a row",
    "guard:ask_tool": "the client offers its own question tool: never ASK",
    "guard:lookup_first": "a read-only tool can find the missing detail: never ASK",
    "guard:structured_output": "response_format asks for JSON: never ASK or DECLINE",
    "guard:number_missing": "how many or how much is asked, and no result holds a number yet: never ANSWER",
    "guard:side_effect": "the likely tool has a side effect by the configuration: never ANSWER",
    "guard:user_repeats": "the user says the same again after a skip: the tools stay",
    "guard:non_interactive": "nobody is there to answer a question: never ASK",
    "bypass:no_tools": "no tools, null, or an empty list",
    "bypass:only_other_tools": "hosted or custom tools only",
    "bypass:tool_choice_none": "the client itself forbids tools",
    "bypass:forced_tool": "the client itself demands a tool",
    "bypass:no_messages": "no turns to judge",
    "bypass:assistant_last": "the client has the model continue its own text",
    "bypass:off": "the mode is off, by header or configuration",
    "bypass:unknown_mode": "x-whetherman-mode is none of off, shadow, enforce; the request is left as it came",
    "bypass:model": "the model is in never_gate_models",
    "bypass:oversize": "the body, or the number of turns, calls or tools in it, is above the gate's limit",
    "bypass:stored_dialogue": "earlier turns of the dialogue are kept by the server",
    "bypass:subscription": "the credentials are a subscription's: the request is left as it came",
    "tools_unsupported": "the model takes no tools and strip_unsupported is on: sent without them",
    "bypass:encoding": "the body's content encoding is not one the gate reads",
    "backed_off": "the evidence in this agent's or dialogue's requests is against what would have withheld: left alone",
    "leaked_call": "the model wrote a call although the tools were withheld; the request was sent again unmodified",
    "refused": "the upstream refused the edited request; it was sent again unmodified",
    "no_intervention": "the upstream offers no safe way to carry out the decision",
    "gate_timeout": "the gate took longer than its deadline",
    "gate_error": "the gate failed",
    "backbone_late": "the profile was measured on the backbone, which did not answer in time",
    "model_missing": "the gate's model file is missing or broken",
    "breaker_open": "the gate failed several times in a row and rests",
    "view_error": "the body could not be read or edited",
    "profile_unknown": "the request names a profile that does not exist or cannot be used",
}
FAILURES = frozenset({"gate_timeout", "gate_error", "model_missing", "breaker_open", "view_error", "profile_unknown"})
# Needs no profile to be safe: it is a rule, not a probability.
RULES = frozenset({"loop_guard"})


class PolicySettings(msgspec.Struct, frozen=True):
    """What the daemon fixes for all requests.

    ``fused_names``: names of ``Verdict.fused``, same order. ``default_tau``: the gate's shipped operating point, used
    without a profile; ``fallback_tau``: that of a verdict which stands in for the backbone's. ``force``: the verdict is
    replaced by this label; guards still hold, thresholds do not. ``tools``: name globs, the more exact first, and what
    a call of such a tool costs.
    """

    fused_names: tuple[str, ...] = ()
    default_tau: OperatingPoint = NEVER
    fallback_tau: OperatingPoint | None = None
    force: Label | None = None
    loop_guard: bool = True
    tools: tuple[tuple[str, ToolCost], ...] = ()
    non_interactive: bool = False


class SessionState(msgspec.Struct, frozen=True, gc=False):
    """What must be remembered of one dialogue between its requests.

    ``asked_in_turn``: number of user turns when ASK was last applied, 0 for never; ``asked_at_length``: number of
    messages then. ``sent_stripped``: the last request of this dialogue went out without its tools. ``skipped_in_turn``:
    number of user turns when ANSWER or DECLINE was last applied, 0 once the request after it was looked at;
    ``skipped_by``: what withheld then. ``evidence``: the dialogue's own (``gate.backoff``). ``backed_off``: the causes
    that this dialogue, or its agent, is to be left alone by. ``notes_ignored``, ``n_applied``: the agent's state at
    this request.
    """

    asked_in_turn: int = 0
    asked_at_length: int = 0
    backed_off: tuple[Cause, ...] = ()
    sent_stripped: bool = False
    notes_ignored: bool = False
    skipped_in_turn: int = 0
    skipped_by: Cause | Literal[""] = ""
    evidence: DialogueEvidence = NO_DIALOGUE_EVIDENCE
    n_applied: int = 0

    def after(self, decision: Decision, chat: ChatView, *, applied: bool, stripped: bool = False) -> SessionState:
        """The state to keep when the request has gone out; the agent's part is filled in anew each time."""
        asked, length = self.asked_in_turn, self.asked_at_length
        skipped, skipped_by = self.skipped_in_turn, self.skipped_by
        turns = n_user_turns(chat) if applied or skipped else 0
        if applied and decision.label == "ASK":
            asked, length = turns, len(chat.messages)
        if applied and decision.label in ("ANSWER", "DECLINE"):
            skipped, skipped_by = turns, decision.cause
        elif turns != skipped:
            skipped, skipped_by = 0, ""  # which it is where the turns were not counted
        return SessionState(
            asked_in_turn=asked,
            asked_at_length=length,
            sent_stripped=stripped,
            skipped_in_turn=skipped,
            skipped_by=skipped_by,
            evidence=self.evidence,
        )

    def follows_skip(self, chat: ChatView) -> bool:
        """True for the first request of the user turn that follows a skip."""
        if not self.skipped_in_turn or chat.last_role != "user":
            return False
        return n_user_turns(chat) == self.skipped_in_turn + 1

    def user_repeats(self, chat: ChatView) -> bool:
        """True when the user says the same again right after a skip: the answer did not do."""
        if not self.follows_skip(chat):
            return False
        texts = [message.text for message in chat.messages if message.role == "user"][-2:]
        before, now = (" ".join(text.casefold().split()) for text in texts)
        return bool(now) and now == before


def n_user_turns(chat: ChatView) -> int:
    """Number of user messages."""
    return [message.role for message in chat.messages].count("user")


def unscored(reason: str) -> Decision:
    """The ACT of a request that was not judged: a bypass or a failure, told apart from a scored ACT by its reason."""
    return Decision(
        label="ACT",
        verdict="ACT",
        probabilities=(1.0, 0.0, 0.0, 0.0),
        p_need=1.0,
        confidence=0.0,
        reason=reason,
        engine="none",
    )


def decide(
    verdict: Verdict, chat: ChatView, profile: Profile | None, session: SessionState, settings: PolicySettings
) -> Decision:
    """What to do with a verdict.

    With ``s = 1 - p_need``: the candidate is the most probable class but ACT, and it is decided when s reaches its
    threshold. A repeated call overrides the scores, unless the loop guard has backed off; a guard, or a cause that
    has backed off, leaves the request alone.
    Raises ProfileError when the profile's layer does not fit the verdict's fused values (a wiring fault).
    """
    probabilities = calibrated(verdict, profile, settings.fused_names)
    label, reason, cause = _chosen(probabilities, verdict, chat, profile, session, settings)
    if label != "ACT":
        veto = guard(label, reason, chat, profile, session, settings)
        if veto is not None:
            label, reason = "ACT", veto
    return Decision(
        label=label,
        verdict=settings.force or verdict.label,
        probabilities=probabilities,
        p_need=probabilities[0],
        confidence=probabilities[LABELS.index(label)],
        reason=reason,
        engine=verdict.engine,
        tool=verdict.tool,
        cause=cause,
    )


def decide_unscored(reason: str, chat: ChatView, session: SessionState, settings: PolicySettings) -> Decision:
    """The decision when the gate failed: ACT with that reason, or one that needs no gate: forced, or the loop guard's.

    A profile that does not exist is no failure of the gate: nothing is forced past it.
    """
    if settings.force is not None and reason != "profile_unknown":
        p: list[float] = [float(label == settings.force) for label in LABELS]
        verdict = Verdict(probabilities=(p[0], p[1], p[2], p[3]), engine="none")
        return decide(verdict, chat, None, session, settings)
    if _loops(chat, settings) and "loop_guard" not in session.backed_off:
        return msgspec.structs.replace(unscored("loop_guard"), label="ANSWER", cause="loop_guard")
    return unscored(reason)


def calibrated(
    verdict: Verdict, profile: Profile | None, fused_names: tuple[str, ...]
) -> tuple[float, float, float, float]:
    """Class probabilities under the profile's layer; the verdict's own without a profile.

    The layer gives p(need); what is left goes to the other classes in the verdict's proportions.
    """
    if profile is None:
        return verdict.probabilities
    layer = profile.layer
    if len(verdict.fused) != len(fused_names):
        raise ProfileError(f"expected {len(fused_names)} fused values from the gate, got {len(verdict.fused)}")
    indices = _indices(layer.features, fused_names)
    p_need = layer.p_need([verdict.fused[index] for index in indices])
    _, answer, ask, decline = verdict.probabilities
    rest = answer + ask + decline
    if rest <= 0.0:
        third = (1.0 - p_need) / 3.0
        return (p_need, third, third, third)
    share = (1.0 - p_need) / rest
    return (p_need, answer * share, ask * share, decline * share)


def guard(
    label: Label,
    reason: str,
    chat: ChatView,
    profile: Profile | None,
    session: SessionState,
    settings: PolicySettings,
) -> str | None:
    """The guard that forbids this decision (``guard:*``), or None. ``reason``: why it was to be made."""
    if reason != "loop_guard" and session.user_repeats(chat):
        return "guard:user_repeats"
    if label == "ANSWER":
        if reason == "loop_guard":
            return None
        if guards.action_wanted(chat):
            return "guard:action"
        return "guard:number_missing" if guards.number_missing(chat) else None
    if chat.structured_output:
        return "guard:structured_output"
    if label == "DECLINE":
        return "guard:tool_named" if guards.tool_named(chat) else None
    if settings.non_interactive or (profile is not None and not profile.interactive):
        return "guard:non_interactive"
    if guards.asks_itself(chat):
        return "guard:ask_tool"
    if _asked_already(chat, session) or guards.just_asked(chat):
        return "guard:ask_twice"
    if guards.lookup_first(chat):
        return "guard:lookup_first"
    return None


def mode_for(configured: Mode | None, requested: Mode | None, profile: Profile | None, force: Label | None) -> Mode:
    """The mode one request runs in.

    Unset: enforce where a calibrated profile or ``--force`` stands behind it, else shadow. A request may ask for less,
    and for enforce; what enforce may apply is for ``may_apply``.
    """
    if requested is not None:
        return "off" if configured == "off" else requested
    if configured is not None:
        return configured
    return "enforce" if force is not None or (profile is not None and profile.calibrated) else "shadow"


def may_apply(decision: Decision, mode: Mode, profile: Profile | None, force: Label | None) -> bool:
    """True when this decision changes the request: in enforce, with a calibrated profile, force or a rule behind it."""
    if decision.label == "ACT" or mode != "enforce":
        return False
    if decision.reason in RULES or force is not None:
        return True
    return profile is not None and profile.calibrated


def _chosen(
    probabilities: tuple[float, float, float, float],
    verdict: Verdict,
    chat: ChatView,
    profile: Profile | None,
    session: SessionState,
    settings: PolicySettings,
) -> tuple[Label, str, Cause | Literal[""]]:
    """The decision before the guards, why, and what makes it: the loop guard, else the scores, each unless it has
    backed off. Where one of them would have withheld and none does, "backed_off", with the one that came first.
    """
    cause: Cause | Literal[""] = ""
    if _loops(chat, settings):
        if "loop_guard" not in session.backed_off:
            return "ANSWER", "loop_guard", "loop_guard"
        cause = "loop_guard"
    label, reason = _scored(probabilities, verdict, chat, profile, settings)
    if label != "ACT" and "scored" not in session.backed_off:
        return label, reason, "scored"
    if label != "ACT" or cause:
        return "ACT", "backed_off", cause or "scored"
    return label, reason, ""


def _loops(chat: ChatView, settings: PolicySettings) -> bool:
    """True where the loop guard has something to say; a forced verdict is for tests of the wiring, and goes before."""
    return settings.force is None and settings.loop_guard and loop_guard.inspect(chat).looping


def _scored(
    probabilities: tuple[float, float, float, float],
    verdict: Verdict,
    chat: ChatView,
    profile: Profile | None,
    settings: PolicySettings,
) -> tuple[Label, str]:
    """What the scores decide, if it is worth it too, or what is forced in their place."""
    if settings.force is not None:
        return settings.force, "forced"
    label, reason = _choose(probabilities, verdict, chat, profile, settings)
    if reason == "scored" and profile is not None:
        return _worth(label, verdict, 1.0 - probabilities[0], chat, profile, settings)
    return label, reason


def _choose(
    probabilities: tuple[float, float, float, float],
    verdict: Verdict,
    chat: ChatView,
    profile: Profile | None,
    settings: PolicySettings,
) -> tuple[Label, str]:
    if profile is not None and verdict.fallback and profile.engine.name == "gemma":
        return "ACT", "backbone_late"  # what was proven about this agent was proven with the backbone
    if profile is not None:
        tau = profile.tau
    elif verdict.fallback and settings.fallback_tau is not None:
        tau = settings.fallback_tau[verdict.phase]
    else:
        tau = settings.default_tau[verdict.phase]
    others = probabilities[1:]
    at = others.index(max(others))  # the earlier of equals
    candidate = LABELS[1 + at]
    threshold = tau.at(candidate, step_kind(chat))
    if threshold is not None and 1.0 - probabilities[0] >= threshold:
        return candidate, "scored"
    return "ACT", "need" if verdict_label(probabilities) == "ACT" else "low_confidence"


def _worth(
    label: Label, verdict: Verdict, skip_score: float, chat: ChatView, profile: Profile, settings: PolicySettings
) -> tuple[Label, str]:
    """The decision, if it is worth it too by the profile's measured inputs and the configured costs of the tools.

    An ASK or a DECLINE says what a call could not do, so a side effect of the likely tool does not forbid it.
    """
    cost = FREE
    if settings.tools:
        names = [tool.name for tool in chat.tools]
        cost = cost_of(names, verdict.tool, verdict.tool_probability, settings.tools)
        if cost.side_effect:
            if label == "ANSWER":
                return "ACT", "guard:side_effect"
            cost = FREE
    payoff = payoff_of(profile.payoff)
    if payoff is not None and skip_score < break_even(payoff, cost):
        return "ACT", "not_worth_it"
    return label, "scored"


def verdict_label(probabilities: tuple[float, float, float, float]) -> Label:
    """The most probable class; ties go to the earlier label."""
    return LABELS[probabilities.index(max(probabilities))]


def _asked_already(chat: ChatView, session: SessionState) -> bool:
    """ASK was applied in this user turn (the same request again may get it again) or in the one before it."""
    if session.asked_in_turn == 0:
        return False
    turns = n_user_turns(chat)
    if turns == session.asked_in_turn:
        return len(chat.messages) != session.asked_at_length
    return turns == session.asked_in_turn + 1


@lru_cache(maxsize=64)
def _indices(features: tuple[str, ...], fused_names: tuple[str, ...]) -> tuple[int, ...]:
    missing = [feature for feature in features if feature not in fused_names]
    if missing:
        raise ProfileError(f"expected the gate to produce {missing[0]!r}, which the profile's layer reads")
    return tuple(fused_names.index(feature) for feature in features)
