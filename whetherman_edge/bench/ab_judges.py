"""Judges that ``bench ab`` puts in the place of the gate's engine. Only the verdict is theirs.

Guards, thresholds, interventions and the second try are the product's own. A verdict's one fused value is the logit of
its p(need), which the stand-in profile (``stand_in``) takes as it is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import msgspec

from whetherman_edge import __version__
from whetherman_edge.dialects.chat import ChatView, Message
from whetherman_edge.gate.operating_point import OperatingPoint
from whetherman_edge.gate.verdict import LABELS, PHASES, Verdict
from whetherman_edge.profiles.schema import (
    SCHEMA_VERSION,
    Agent,
    EngineArtifact,
    InterventionChoice,
    Layer,
    Profile,
    Risk,
    Tau,
)
from whetherman_edge.proxy.gating import Judge

NEED_LOGIT: Final[tuple[str, ...]] = ("need_logit",)
STAND_IN: Final = "bench"
SURE: Final = Tau(answer=0.5, ask=0.5, decline=0.5)
_ZEROS: Final = "0" * 64
_CERTAIN: Final = 40.0
"""A logit: the probability is 1 but for rounding."""

Ask = Callable[[list[dict[str, Any]]], Awaitable[str]]


def stand_in(tau: Tau, choice: InterventionChoice) -> Profile:
    """A profile that lets a gate act which no calibration stands behind, for the bench alone."""
    return Profile(
        schema=SCHEMA_VERSION,
        agent=Agent("bench", ""),
        engine=EngineArtifact("static", _ZEROS),
        layer=Layer(NEED_LOGIT, (0.0,), (1.0,), (1.0,), 0.0),
        tau=tau,
        risk=Risk(alpha=0.05, delta=0.1, n_measured=1, n_withheld=0, n_false_skips=0),
        intervention=choice,
        created="",
        version=__version__,
    )


class _Certain:
    """Common part of judges without probabilities of their own."""

    fused_names: tuple[str, ...] = NEED_LOGIT
    default_tau: OperatingPoint = (SURE,) * len(PHASES)
    name = ""

    def _verdict(self, *, needed: bool) -> Verdict:
        p = 0.999 if needed else 0.001
        return _with_logit(Verdict(probabilities=(p, 1.0 - p, 0.0, 0.0), engine=self.name))

    def tool_probabilities(self, _chat: ChatView) -> Mapping[str, float]:
        """Nothing is pruned in the bench."""
        return {}


class NeverSkip(_Certain):
    """ACT always: what is left is the loop guard."""

    name = "none"

    def judge(self, _chat: ChatView, _deadline_s: float, _profile: Profile | None = None, /) -> Verdict:
        """ACT."""
        return self._verdict(needed=True)


class Oracle(_Certain):
    """Skips from one step on, as replays of the task have shown to be enough; the bench sets both before each run.

    ``skip_from``: steps after the decision point that keep their tools; None: all. ``n_recorded``: assistant turns that
    the task starts with.
    """

    name = "oracle"

    def __init__(self) -> None:
        self.skip_from: int | None = None
        self.n_recorded = 0

    def judge(self, chat: ChatView, _deadline_s: float, _profile: Profile | None = None, /) -> Verdict:
        """By the number of steps taken."""
        taken = sum(message.role == "assistant" for message in chat.messages) - self.n_recorded
        return self._verdict(needed=self.skip_from is None or taken < self.skip_from)


class SharedScore:
    """The engine's verdict as it is, with no agent's layer on it."""

    fused_names: tuple[str, ...] = NEED_LOGIT

    def __init__(self, engine: Judge) -> None:
        self._engine = engine
        self.default_tau = engine.default_tau

    def judge(self, chat: ChatView, deadline_s: float, _profile: Profile | None = None) -> Verdict | Awaitable[Verdict]:
        """As the engine's, without a profile."""
        verdict = self._engine.judge(chat, deadline_s, None)
        return self._scored(verdict) if isinstance(verdict, Verdict) else self._later(verdict)

    async def _later(self, waiting: Awaitable[Verdict]) -> Verdict:
        return self._scored(await waiting)

    def _scored(self, verdict: Verdict) -> Verdict:
        return _with_logit(verdict)

    def tool_probabilities(self, chat: ChatView) -> Mapping[str, float]:
        """The engine's."""
        return self._engine.tool_probabilities(chat)


class AtOperatingPoint(SharedScore):
    """The engine's verdict with its logit moved so that the thresholds it ships with, each phase's own, lie at SURE.

    ``fallback_tau``: those of verdicts that stand in for the backbone's.
    """

    def __init__(self, engine: Judge, fallback_tau: OperatingPoint | None = None) -> None:
        super().__init__(engine)
        self._fallback_tau = fallback_tau or engine.default_tau

    def _scored(self, verdict: Verdict) -> Verdict:
        point = self._fallback_tau if verdict.fallback else self.default_tau
        others = verdict.probabilities[1:]
        candidate = LABELS[1 + others.index(max(others))]
        tau = point[verdict.phase].at(candidate, "first")  # one number for both kinds of step
        return _with_logit(verdict, math.inf if tau is None else _logit(tau))


_CHAT = re.compile(
    r"\W*(?:hi|hello|hey|good (?:morning|evening|night)|thanks?|thank you|bye|goodbye|how are you|nice|cool|great"
    r"|who are you|what can you do)\b.{0,40}",
    re.IGNORECASE,
)
_WRITING = re.compile(
    r"\W*(?:please )?(?:translate|rewrite|rephrase|paraphrase|summari[sz]e|shorten|proofread|correct|spell"
    r"|write (?:me )?a (?:poem|joke|haiku|limerick|story|tagline|slogan))\b",
    re.IGNORECASE,
)
_OUTSIDE = re.compile(
    r"\b(?:files?|mails?|inbox|calendar|tickets?|invoices?|database|table|repository|corpus|documents?|today|tomorrow"
    r"|now|latest|current(?:ly)?|weather|news|price)\b|https?:|/\w+/",
    re.IGNORECASE,
)
_SUM = re.compile(r"(?<![\w.])\d{1,2}(?:\s*[-+*x×]\s*\d{1,2}){1,2}(?![\w.])")
_NOT_ENOUGH = re.compile(r"error|not found|no (?:match|result|such)|failed|denied|timed? ?out|next page", re.IGNORECASE)


class Rules(_Certain):
    """A few rules that a person would write in an afternoon, and no model.

    No call for small talk, for work on a text that is in the message, and for sums of small numbers; none after a
    result that reports no failure when the user asked one question.
    """

    name = "rules"

    def judge(self, chat: ChatView, _deadline_s: float, _profile: Profile | None = None, /) -> Verdict:
        """By the last user turn, or by the last result."""
        text = chat.messages[chat.last_user_index].text if chat.last_user_index >= 0 else ""
        if chat.last_role == "tool":
            one_question = text.count("?") <= 1 and not re.search(r"\b(?:then|after that|step)\b", text, re.IGNORECASE)
            return self._verdict(needed=not one_question or bool(_NOT_ENOUGH.search(chat.messages[-1].text)))
        plain = not _OUTSIDE.search(text)
        small_talk = len(text) < 60 and _CHAT.fullmatch(text.strip()) is not None
        arithmetic = _SUM.search(text) is not None and not re.search(r"\d{3,}", text)
        return self._verdict(needed=not (small_talk or (plain and (arithmetic or _WRITING.match(text) is not None))))


class Prompted(_Certain):
    """Asks the agent's own model first. ``ask``: one prompt to one reply; what it costs counts for the gate."""

    name = "prompted"

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    async def judge(self, chat: ChatView, _deadline_s: float, _profile: Profile | None = None, /) -> Verdict:
        """ANSWER when the model says NO; anything else counts as a call that is needed."""
        reply = await self._ask(question(chat))
        return self._verdict(needed=re.match(r"\W*no\b", reply, re.IGNORECASE) is None)


def question(chat: ChatView) -> list[dict[str, Any]]:
    """The prompt of ``Prompted``: the dialogue and the tools as text, and one question."""
    tools = "\n".join(f"- {tool.name}: {tool.description}" for tool in chat.tools)
    turns = "\n".join(_turn(message) for message in chat.messages)
    text = (
        f"An assistant has these tools:\n{tools}\n\nThe conversation so far:\n{turns}\n\n"
        "Does the assistant need to call a tool now to answer correctly, or can it answer from what it knows and from "
        "the conversation? Reply with one word: YES if a tool call is needed, NO if not."
    )
    return [{"role": "user", "content": text}]


def _turn(message: Message) -> str:
    calls = "".join(f" [calls {call.name}({call.arguments})]" for call in message.calls)
    return f"{message.role}: {message.text}{calls}"


def _with_logit(verdict: Verdict, moved: float = 0.0) -> Verdict:
    """With the logit of p(need) as the one fused value, moved up by so much; within what stands for certain."""
    return msgspec.structs.replace(verdict, fused=(min(max(_logit(verdict.p_need) + moved, -_CERTAIN), _CERTAIN),))


def _logit(p: float) -> float:
    p = min(max(p, 1e-9), 1.0 - 1e-9)
    return math.log(p / (1.0 - p))
