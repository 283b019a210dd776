"""From a request's bytes to a Ruling: view, judge under a deadline, decide, plan. Fails open at every step.

A Ruling says what the headers and the log will say, and which bytes go out. Whatever breaks on the way, the original
body goes out with a reason of its own (field cases O01, O02).
"""

from __future__ import annotations

import asyncio
import fnmatch
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Literal, Protocol, cast

import msgspec

from whetherman_edge.config import Config
from whetherman_edge.dialects import registry
from whetherman_edge.dialects.chat import ChatView, Intervention
from whetherman_edge.dialects.dialect import Dialect
from whetherman_edge.dialects.json_spans import refuse_crowded
from whetherman_edge.dialects.openai_chat import bypass_reason
from whetherman_edge.dialects.registry import OPENAI_CHAT
from whetherman_edge.dialects.system_one import Refusal
from whetherman_edge.dialects.tool_cache import ToolCache
from whetherman_edge.errors import ArtifactError, EnvironmentFault, OverLimit, ProfileError, ProfileNotFound, ViewError
from whetherman_edge.gate import intervention, loop_guard, policy
from whetherman_edge.gate.backoff import Outcome
from whetherman_edge.gate.intervention import InterventionSettings
from whetherman_edge.gate.later import Later
from whetherman_edge.gate.operating_point import OperatingPoint
from whetherman_edge.gate.policy import PolicySettings, SessionState
from whetherman_edge.gate.verdict import Cause, Decision, Mode, Verdict, check_verdict
from whetherman_edge.gate.wordings import DEFAULT_WORDING
from whetherman_edge.ledger.counters import Counters
from whetherman_edge.profiles.schema import Profile, basis_of, likeness, measured_on
from whetherman_edge.profiles.suggestions import line
from whetherman_edge.proxy.breaker import FAILURES_MAX, Breaker
from whetherman_edge.proxy.inflate import inflate
from whetherman_edge.proxy.learned import Learned
from whetherman_edge.proxy.sessions import Sessions, drawn
from whetherman_edge.proxy.upstream import Headers

log = logging.getLogger(__name__)

# A judge that waits keeps the deadline itself, and then has a verdict to give; this is for one that does not.
GRACE_S = 0.05

# So many interventions of an agent go by what calibration measured; then a share of them is left out, to measure on.
SHADOW_AFTER = 20

_MODES = frozenset({"off", "shadow", "enforce"})


class Judge(Protocol):
    """What gives a verdict. ``fused_names`` and ``default_tau``: see ``gate.policy.PolicySettings``."""

    fused_names: tuple[str, ...]
    default_tau: OperatingPoint

    def judge(
        self, chat: ChatView, deadline_s: float, profile: Profile | None = None, /
    ) -> Verdict | Awaitable[Verdict]:
        """The verdict on one request, at once or awaited. ``deadline_s``: time.monotonic() when nobody waits any more.

        ``profile``: the request's, whose measurements say when the first stage is decisive.

        Raises ArtifactError when the model is missing or broken; anything else it raises counts as a gate error.
        """

    def tool_probabilities(self, chat: ChatView, /) -> Mapping[str, float]:
        """The ToolRouter's probability of each offered tool, by name; asked for under ``intervention = prune`` only."""


class Profiles(Protocol):
    """Where profiles come from."""

    def load(self, name: str) -> Profile:
        """Raises ProfileNotFound and ProfileError."""


class Ruling(msgspec.Struct, frozen=True):
    """What is done with one request, and what is said about it.

    ``plain``: the body with its content coding undone, b"" where it was not read. ``plan``: the intervention, when it
    is applied. ``session``: the dialogue's state when it was ruled on. ``agent``: key of the agent's back-off,
    ``basis``: of the profile that it is about.
    ``repeats``: how often the last call came back with the same result. ``ms``: time from body to ruling.
    """

    decision: Decision
    mode: Mode
    ms: float
    applied: bool = False
    plain: bytes = b""
    chat: ChatView | None = None
    plan: Intervention | None = None
    session: SessionState = SessionState()
    session_id: str = ""
    agent: str = ""
    basis: str = ""
    profile: str = ""
    repeats: int = 0

    def headers(self) -> Headers:
        """The ``x-whetherman-*`` response headers; the values are from closed sets, or numbers: nothing to escape."""
        decision = self.decision
        return [
            (b"x-whetherman-decision", decision.label.encode("ascii")),
            (b"x-whetherman-applied", b"yes" if self.applied else b"no"),
            (b"x-whetherman-reason", decision.reason.encode("ascii")),
            (b"x-whetherman-confidence", b"%.4f" % decision.confidence),
            (b"x-whetherman-engine", decision.engine.encode("ascii")),
            (b"x-whetherman-ms", b"%.3f" % self.ms),
        ]

    def tool_names(self) -> frozenset[str]:
        """Names of the offered tools."""
        return frozenset(tool.name for tool in self.chat.tools) if self.chat is not None else frozenset()

    def reopened(self, reason: str) -> Ruling:
        """The same request when its original bytes go out in the end."""
        decision = msgspec.structs.replace(self.decision, reason=reason)
        return msgspec.structs.replace(self, decision=decision, applied=False, plan=None)


class _Case(msgspec.Struct, frozen=True):
    """A request between its view and its verdict; the fields become the Ruling's."""

    chat: ChatView
    plain: bytes
    profile: Profile | None
    mode: Mode
    session: SessionState
    session_id: str
    agent: str
    basis: str
    foreign: bool
    profile_name: str
    started_s: float


class Pending:
    """A ruling whose verdict is still awaited.

    ``may_apply`` False: whatever it will be, the request goes out as it came. ``ruling``: starts the waiting; call it
    once.
    """

    __slots__ = ("may_apply", "ruling")

    def __init__(self, may_apply: bool, ruling: Callable[[], Awaitable[Ruling]]) -> None:
        self.may_apply = may_apply
        self.ruling = ruling


class Gating:
    """Owns the gate's part of a request.

    ``tools``: parsed tools, for the views of all dialects. ``learned``: the upstream's capabilities. ``deadline_s``:
    the gate's time for one request; None: no limit (offline use). ``on_unprofiled``: told the model of every request
    for which no profile is configured.
    """

    def __init__(
        self,
        config: Config,
        *,
        judge: Judge,
        tools: ToolCache,
        settings: PolicySettings,
        profiles: Profiles,
        learned: Learned,
        sessions: Sessions,
        counters: Counters,
        deadline_s: float | None,
        clock: Callable[[], float] = time.monotonic,
        breaker: Breaker | None = None,
        on_unprofiled: Callable[[str], None] = lambda _model: None,
    ) -> None:
        self._config = config
        self._judge = judge
        self._tools = tools
        self._settings = settings
        self._profiles = profiles
        self._learned = learned
        self._sessions = sessions
        self._counters = counters
        self._clock = clock
        self._breaker = Breaker(FAILURES_MAX, clock) if breaker is None else breaker
        self._deadline_s = deadline_s
        self._on_unprofiled = on_unprofiled

    @property
    def strips_unsupported(self) -> bool:
        """Whether a request goes out without its tools when the model takes none (``strip_unsupported``)."""
        return self._config.strip_unsupported

    async def rule(self, headers: Mapping[str, str], body: bytes, dialect: Dialect = OPENAI_CHAT) -> Ruling:
        """Rule on one request. ``headers``: by lower-case name. Never raises but for cancellation."""
        begun = self.begin(headers, body, dialect)
        return begun if isinstance(begun, Ruling) else await begun.ruling()

    def leaves_alone(self, headers: Mapping[str, str]) -> bool:
        """True when the request goes out as it came, whatever the verdict will be.

        What only the request's body can tell (the profile of its model, and whether that takes tools) counts as False.
        """
        if self._config.strip_unsupported:
            return False
        requested = headers.get("x-whetherman-mode", "").strip().lower()
        if requested or self._config.mode is not None:
            return (requested or self._config.mode) != "enforce"
        unset = self._config.force is None and not self._config.profile and not self._config.agents
        return unset and not headers.get("x-whetherman-profile", "")

    def begin(self, headers: Mapping[str, str], body: bytes, dialect: Dialect = OPENAI_CHAT) -> Ruling | Pending:
        """Rule on one request as far as that needs no waiting. Never raises.

        A Pending's ``ruling`` must be awaited, or the Pending dropped.
        """
        started_s = time.perf_counter()
        requested = headers.get("x-whetherman-mode", "").strip().lower()
        asked = cast("Mode", requested) if requested in _MODES else None
        if asked == "off" or self._config.mode == "off":
            return self._unscored("bypass:off", "off", started_s)
        if requested and asked is None:  # a wish that is not understood: nothing is done to the request
            log.warning("event=unknown_mode hint=off_shadow_or_enforce")
            return self._unscored("bypass:unknown_mode", "off", started_s)
        if dialect.untouchable is not None and dialect.untouchable(headers):
            return self._unscored("bypass:subscription", "off", started_s)
        seen = self._view(headers, body, dialect)
        if isinstance(seen, str):
            return self._unscored(seen, "shadow", started_s)
        plain, chat = seen
        try:
            bypass = bypass_reason(chat)
            if bypass is None and self._never_gated(chat.model):
                bypass = "bypass:model"
            if bypass is not None:
                return self._bypassed(bypass, asked, plain, chat, started_s)
            if self._config.strip_unsupported and self._learned.takes_no_tools(chat.model):
                mode = policy.mode_for(self._config.mode, asked, None, self._config.force)
                return _stripped(self._unscored("tools_unsupported", mode, started_s, chat), plain)
            return self._judged(headers, plain, chat, asked, started_s)
        except Exception as exc:
            return self._broken(exc, chat, started_s)

    def _view(self, headers: Mapping[str, str], body: bytes, dialect: Dialect) -> tuple[bytes, ChatView] | str:
        """The body without its content coding, and the view of it; or the reason why there is none."""
        try:
            plain = inflate(body, headers.get("content-encoding", ""), self._config.gate_body_bytes_max)
            refuse_crowded(plain)
            return plain, dialect.view(plain, self._tools)
        except Refusal:
            return "bypass:encoding"
        except OverLimit:
            return "bypass:oversize"
        except ViewError:
            return "view_error"
        except Exception:
            log.exception("event=view_failed")
            return "view_error"

    def _broken(self, exc: Exception, chat: ChatView, started_s: float) -> Ruling:
        """A fault of our own: logged, counted, and the request passes."""
        log.error("event=gate_failed", exc_info=exc)
        self._counters.add("gate_failures_total", (("reason", "gate_error"),))
        return self._unscored("gate_error", "shadow", started_s, chat)

    def edit(self, body: bytes, ruling: Ruling) -> tuple[bytes, Ruling]:
        """The bytes that go out: the body itself unless the ruling is applied; fails open to it when splicing fails."""
        if ruling.plan is None or ruling.chat is None:
            return body, ruling
        try:
            return registry.apply(ruling.plain, ruling.chat, ruling.plan), ruling
        except ViewError:
            return _edit_without_words(body, ruling, ruling.chat, ruling.plan)
        except Exception:
            log.exception("event=edit_failed")
            return body, ruling.reopened("view_error")

    def _bypassed(self, reason: str, asked: Mode | None, plain: bytes, chat: ChatView, started_s: float) -> Ruling:
        """A request that is not judged; in enforce the client's own tool_choice "none" is made good where needed."""
        mode = policy.mode_for(self._config.mode, asked, None, self._config.force)
        ruling = self._unscored(reason, mode, started_s, chat)
        if reason == "bypass:tool_choice_none" and mode == "enforce":
            plan = intervention.plan_client_none(chat, self._learned.capability(chat.model, chat.dialect))
            if plan is not None:
                return msgspec.structs.replace(ruling, plain=plain, plan=plan, applied=True)
        return ruling

    def _judged(
        self, headers: Mapping[str, str], plain: bytes, chat: ChatView, asked: Mode | None, started_s: float
    ) -> Ruling | Pending:
        asked_for = headers.get("x-whetherman-profile", "")
        given = asked_for or self._config.profile_for_model(chat.model)
        name = given or self._config.profile
        if not name:
            self._say_unprofiled(chat.model)
        profile, fault = self._profile(name)
        agent = f"profile:{name}" if name else f"model:{chat.model[:200]}"
        session_id = headers.get("x-session-id", "")[:200]
        basis = basis_of(profile) if profile is not None else ""
        mode = policy.mode_for(self._config.mode, asked, profile, self._config.force)
        # Who names the profile in the request, gives it to this model, or asks for enforce knows that it is another's.
        meant = bool(given) or self._config.mode == "enforce"
        foreign = profile is not None and self._is_foreign(profile, chat.model, agent, name, basis, meant)
        if (foreign and self._config.force is None) or fault:
            mode = "shadow"
        case = _Case(
            chat=chat,
            plain=plain,
            profile=profile,
            mode=mode,
            session=self._sessions.session(chat, session_id, agent, basis),
            session_id=session_id,
            agent=agent,
            basis=basis,
            foreign=foreign,
            profile_name=name,
            started_s=started_s,
        )
        verdict = fault or self._verdict(chat, profile)
        if isinstance(verdict, (Verdict, str)):
            return self._ruled(case, verdict)
        return Pending(case.mode == "enforce", lambda: self._awaited(case, verdict))

    def _say_unprofiled(self, model: str) -> None:
        """Advice must not cost a request."""
        try:
            self._on_unprofiled(model)
        except Exception:
            log.exception("event=advice_failed")

    def _is_foreign(self, profile: Profile, model: str, agent: str, name: str, basis: str, meant: bool) -> bool:
        """Whether the profile was measured on another model, or on other weights of it, and that is not what the user
        asked for; said once.
        """
        if measured_on(profile, model):
            self._sessions.advise(agent, "", basis)
            return False
        measured = " ".join(filter(None, (profile.agent.model, profile.agent.quantisation)))
        advice = f"measured on {measured[:200]!r}, requests now name {model[:200]!r}: calibrate again"
        if self._sessions.advise(agent, advice, basis):
            hint = "used_all_the_same" if meant else "in_shadow_until_then"
            if not meant and likeness(profile, model) == "untold":
                hint += f"_or_add_under_agents_if_it_is_the_same:{line(model[:200], name)}"
            log.warning("event=recalibrate profile=%s detail=%r hint=%s", name, advice, hint)
        return not meant

    async def _awaited(self, case: _Case, verdict: Awaitable[Verdict | str]) -> Ruling:
        """The ruling once the verdict is there."""
        try:
            return self._ruled(case, await verdict)
        except Exception as exc:
            return self._broken(exc, case.chat, case.started_s)

    def _ruled(self, case: _Case, verdict: Verdict | str) -> Ruling:
        """From a verdict, or the reason why there is none, to the ruling."""
        chat, profile, session, mode = case.chat, case.profile, case.session, case.mode
        if isinstance(verdict, str):
            decision = policy.decide_unscored(verdict, chat, session, self._settings)
        else:
            self._counters.add("verdicts_total", (("engine", verdict.engine),))
            decision = policy.decide(verdict, chat, profile, session, self._settings)
        plan: Intervention | None = None
        if decision.label != "ACT" and case.foreign:
            decision = msgspec.structs.replace(decision, reason="profile_foreign")
        if decision.reason == "scored" and self._draws(case, decision):
            decision, mode = msgspec.structs.replace(decision, reason="shadow_share"), "shadow"
        if policy.may_apply(decision, mode, profile, self._config.force):
            plan = self._plan(decision, chat, profile, session)
            if plan is None:
                decision = msgspec.structs.replace(decision, reason="no_intervention")
        elif decision.label == "ACT" and mode == "enforce" and self._config.intervention == "prune":
            plan = self._prune(chat, decision)
        repeats = loop_guard.inspect(chat).repeats if chat.last_role == "tool" else 0
        if repeats:
            self._counters.add("repeat_call_total")
        return Ruling(
            decision=decision,
            mode=mode,
            ms=(time.perf_counter() - case.started_s) * 1e3,
            applied=plan is not None,
            plain=case.plain,
            chat=chat,
            plan=plan,
            session=session,
            session_id=case.session_id,
            agent=case.agent,
            basis=case.basis,
            profile=case.profile_name,
            repeats=repeats,
        )

    def _draws(self, case: _Case, decision: Decision) -> bool:
        """Whether this request, which would be changed, is one of the share that goes out as it came."""
        share = self._config.shadow_share
        if share <= 0.0 or case.session.n_applied < SHADOW_AFTER:
            return False
        if not policy.may_apply(decision, case.mode, case.profile, self._config.force):
            return False
        return drawn(case.chat, case.session_id, share)

    def _plan(
        self, decision: Decision, chat: ChatView, profile: Profile | None, session: SessionState
    ) -> Intervention | None:
        """The intervention for this upstream and agent; the note where the chosen one was refused before."""
        capability = self._learned.capability(chat.model, chat.dialect)
        settings = self._intervention_settings(profile)
        plan = intervention.plan(decision, chat, capability, settings, session)
        if plan is not None and self._learned.refuses(chat.model, plan.mode, chat.dialect):
            noted = msgspec.structs.replace(settings, mode="note")
            other = intervention.plan(decision, chat, capability, noted, session)
            return None if other is not None and other.mode == plan.mode != "note" else other
        return plan

    def _prune(self, chat: ChatView, decision: Decision) -> Intervention | None:
        if decision.reason in policy.FAILURES or self._learned.refuses(chat.model, "prune", chat.dialect):
            return None
        probabilities = self._judge.tool_probabilities(chat)
        return intervention.plan_prune(chat, probabilities, self._intervention_settings(None))

    def _intervention_settings(self, profile: Profile | None) -> InterventionSettings:
        mode, wording = self._config.intervention, DEFAULT_WORDING
        if profile is not None:
            mode = profile.intervention.mode if mode == "auto" else mode
            wording = profile.intervention.wording or wording
        return InterventionSettings(mode=mode, wording=wording, always_keep=self._config.always_keep)

    def learn(self, ruling: Ruling, calls: int) -> None:
        """Remember how a request went: the dialogue's state, and whether the agent went along. ``calls``: it made."""
        chat = ruling.chat
        if chat is None or not ruling.agent:
            return
        session = ruling.session
        if session.follows_skip(chat):
            called = calls > 0 and not ruling.applied
            follow: Outcome = "repeated" if session.user_repeats(chat) else "called_next" if called else "went_on"
            session = self._record(ruling, session, session.skipped_by, follow)
        if ruling.plan is not None and ruling.decision.label != "ACT":
            outcomes: tuple[Outcome, Outcome] = ("kept", "leaked") if ruling.plan.withholds else ("heeded", "ignored")
            session = self._record(ruling, session, ruling.decision.cause, outcomes[calls > 0])
        stripped = ruling.plan is not None and ruling.plan.strip
        state = session.after(ruling.decision, chat, applied=ruling.applied, stripped=stripped)
        self._sessions.keep(chat, ruling.session_id, state)

    def leaked(self, ruling: Ruling) -> Ruling:
        """The model wrote a call although the tools were withheld: count it; the ruling for the original bytes."""
        cause = ruling.decision.cause
        self._counters.add("leaked_call_total", (("cause", cause or "client"),))
        session = self._record(ruling, ruling.session, cause, "leaked")
        return msgspec.structs.replace(ruling.reopened("leaked_call"), session=session)

    def refused(self, ruling: Ruling) -> Ruling:
        """The upstream refused the edited request: remember that; the ruling for the original bytes."""
        session = ruling.session
        if ruling.chat is not None and ruling.plan is not None:
            self._learned.refused(ruling.chat.model, ruling.plan.mode, ruling.chat.dialect)
            log.warning("event=intervention_refused plan=%s", ruling.plan.mode)
            session = self._record(ruling, session, ruling.decision.cause, "refused")
        return msgspec.structs.replace(ruling.reopened("refused"), session=session)

    def without_tools(self, ruling: Ruling) -> tuple[bytes, Ruling]:
        """The model takes no tools: remember that; the bytes without them, and the ruling that goes with these."""
        if ruling.chat is not None:
            self._learned.refused_tools(ruling.chat.model)
        return self.edit(ruling.plain, _stripped(ruling.reopened("tools_unsupported"), ruling.plain))

    def _record(
        self, ruling: Ruling, session: SessionState, cause: Cause | Literal[""], outcome: Outcome
    ) -> SessionState:
        """Count an outcome of what ``cause`` withheld, for the agent and for the dialogue, whose state comes back."""
        if not cause:  # a prune, or the client's own tool_choice: no decision of ours withheld anything
            return session
        if ruling.agent and cause not in session.backed_off:
            stopped = self._sessions.record(ruling.agent, cause, outcome, ruling.basis).of(cause).stopped
            if stopped:
                hint = "the_evidence_is_against_withholding"
                log.warning("event=backed_off cause=%s test=%s hint=%s", cause, stopped, hint)
        return msgspec.structs.replace(session, evidence=session.evidence.after(cause, outcome))

    def _verdict(self, chat: ChatView, profile: Profile | None) -> Verdict | str | Awaitable[Verdict | str]:
        """A valid verdict, or the reason why there is none; awaited where the judge needs time."""
        if not self._breaker.admits():
            return "breaker_open"
        deadline_s = self._clock() + self._deadline_s if self._deadline_s is not None else math.inf
        try:
            verdict = self._judge.judge(chat, deadline_s, profile)
            if isinstance(verdict, Verdict):
                return self._valid(verdict, deadline_s)
        except Exception as exc:
            return self._failed(exc)
        return Later(lambda: self._verdict_of(verdict, deadline_s))

    async def _verdict_of(self, waiting: Awaitable[Verdict], deadline_s: float) -> Verdict | str:
        try:
            async with asyncio.timeout(None if deadline_s == math.inf else deadline_s + GRACE_S - self._clock()):
                verdict = await waiting
            return self._valid(verdict, deadline_s + GRACE_S)
        except asyncio.CancelledError:
            self._breaker.gave_up()
            raise
        except Exception as exc:
            return self._failed(exc)

    def _valid(self, verdict: Verdict, deadline_s: float) -> Verdict:
        """The verdict, counted as a success. Raises TimeoutError, ValueError."""
        if self._clock() > deadline_s:  # a stage that does not yield is not interrupted, but it counts
            raise TimeoutError
        check_verdict(verdict)
        self._breaker.succeeded()
        return verdict

    def _failed(self, exc: Exception) -> str:
        """The reason for a failure, counted."""
        self._breaker.failed()
        reason = _failure(exc)
        self._counters.add("gate_failures_total", (("reason", reason),))
        if reason == "gate_error":
            log.error("event=gate_failed", exc_info=exc)
        return reason

    def _profile(self, name: str) -> tuple[Profile | None, str]:
        if not name:
            return None, ""
        try:
            return self._profiles.load(name), ""
        except (ProfileNotFound, ProfileError):
            return None, "profile_unknown"

    def _never_gated(self, model: str) -> bool:
        return any(fnmatch.fnmatchcase(model, glob) for glob in self._config.never_gate_models)

    def _unscored(self, reason: str, mode: Mode, started_s: float, chat: ChatView | None = None) -> Ruling:
        ms = (time.perf_counter() - started_s) * 1e3
        return Ruling(decision=policy.unscored(reason), mode=mode, ms=ms, chat=chat)


def _stripped(ruling: Ruling, plain: bytes) -> Ruling:
    """The ruling for a request whose tools are taken out because the model takes none, whatever was decided."""
    decision = msgspec.structs.replace(ruling.decision, label="ACT")  # nothing is steered, so nothing is learned of it
    plan = Intervention(mode="strip", strip=True)
    return msgspec.structs.replace(ruling, decision=decision, plain=plain, plan=plan, applied=True)


def _edit_without_words(body: bytes, ruling: Ruling, chat: ChatView, plan: Intervention) -> tuple[bytes, Ruling]:
    """After a first failure: what an ANSWER can do without a sentence when only that found no place."""
    bare = msgspec.structs.replace(plan, sentence="", note_at=())
    try:
        edited = registry.apply(ruling.plain, chat, bare)
    except ViewError:
        return body, ruling.reopened("view_error")
    if bare.withholds and ruling.decision.label == "ANSWER":
        return edited, msgspec.structs.replace(ruling, plan=bare)
    return body, ruling.reopened("no_intervention")


def _failure(exc: Exception) -> str:
    if isinstance(exc, TimeoutError):
        return "gate_timeout"
    if isinstance(exc, (ArtifactError, EnvironmentFault)):
        return "model_missing"
    return "gate_error"
