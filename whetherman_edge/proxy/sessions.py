"""What is remembered between requests: of a dialogue (was it just asked back?) and of an agent (does it go along?).

Bounded, no text kept: a dialogue's key is the client's ``x-session-id``, or hashes of the model and of the first system
and user texts, which stay the same while a dialogue grows. What the field showed of an agent outlives the process
(``profiles.field``): ``records`` gives it out, and a new Sessions takes it.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec

from whetherman_edge.dialects.chat import ChatView
from whetherman_edge.gate.backoff import TESTS, AgentState, CauseState, Evidence, Outcome
from whetherman_edge.gate.policy import SessionState
from whetherman_edge.gate.verdict import CAUSES, Cause
from whetherman_edge.profiles.field import AGENTS_MAX, CauseRecord, FieldRecord

# A laptop has a handful of dialogues at a time; a forgotten one costs at most one more question by the model.
SESSIONS_MAX = 1_024

Key = tuple[str, int, int]

_NEW_SESSION = SessionState()
_NEW_AGENT = AgentState()


class Agent(msgspec.Struct, frozen=True):
    """An agent's state, the profile it is about (``basis``), and why it should be calibrated again, or ""."""

    state: AgentState = _NEW_AGENT
    basis: str = ""
    advice: str = ""
    at_s: float = 0.0


class Sessions:
    """Owns SessionState by dialogue and Agent by agent; both forget the least recently used.

    ``known``: records of an earlier process. ``clock``: Unix time. ``n_changes`` grows with every change of an agent;
    ``on_stop`` is called when one was stopped or got an advice.
    """

    def __init__(self, known: Mapping[str, FieldRecord] | None = None, clock: Callable[[], float] = time.time) -> None:
        self._sessions: OrderedDict[Key, SessionState] = OrderedDict()
        self._agents: OrderedDict[str, Agent] = OrderedDict()
        self._clock = clock
        self.n_changes = 0
        self.on_stop: Callable[[], None] = lambda: None
        for agent, record in sorted((known or {}).items(), key=lambda item: item[1].at_s)[-AGENTS_MAX:]:
            self._agents[agent] = _restored(record)

    def session(self, chat: ChatView, session_id: str, agent: str, basis: str = "") -> SessionState:
        """The state of this dialogue, with its agent's back-off filled in.

        basis: digest of the agent's profile; evidence about another one does not count.
        """
        state = self._sessions.get(key_of(chat, session_id), _NEW_SESSION) if self._sessions else _NEW_SESSION
        found = self._agents.get(agent) if self._agents else None
        known = found.state if found is not None and found.basis == basis else _NEW_AGENT
        stopped = known.backed_off, state.evidence.backed_off
        if known is _NEW_AGENT and not any(stopped):
            return state
        return msgspec.structs.replace(
            state,
            backed_off=tuple(cause for cause in CAUSES if any(cause in by for by in stopped)),
            notes_ignored=known.notes_ignored,
            n_applied=known.n_applied,
        )

    def keep(self, chat: ChatView, session_id: str, state: SessionState) -> None:
        """Remember a dialogue's state; the initial one is not worth a place."""
        if not self._sessions and state == _NEW_SESSION:
            return
        key = key_of(chat, session_id)
        if state == _NEW_SESSION:
            self._sessions.pop(key, None)
            return
        self._sessions[key] = state
        self._sessions.move_to_end(key)
        if len(self._sessions) > SESSIONS_MAX:
            self._sessions.popitem(last=False)

    def record(self, agent: str, cause: Cause, outcome: Outcome, basis: str = "") -> AgentState:
        """Count one outcome of what ``cause`` withheld; returns the agent's new state."""
        found = self._agents.pop(agent, None)
        if found is None or found.basis != basis:
            found = Agent(basis=basis)
        state = found.state.after(cause, outcome)
        self._put(agent, msgspec.structs.replace(found, state=state, at_s=self._clock()))
        if state.backed_off != found.state.backed_off:
            self.on_stop()
        return state

    def advise(self, agent: str, advice: str, basis: str = "") -> bool:
        """Keep why an agent should be calibrated again ("": no longer); True when that is news."""
        found = self._agents.get(agent)
        known = found if found is not None and found.basis == basis else Agent(basis=basis)
        if known.advice == advice:
            return False
        self._put(agent, msgspec.structs.replace(known, advice=advice, at_s=self._clock()))
        self.on_stop()
        return True

    def records(self) -> dict[str, FieldRecord]:
        """What the field showed of each agent, for the file."""
        return {agent: _record(found) for agent, found in self._agents.items()}

    def _put(self, agent: str, value: Agent) -> None:
        self.n_changes += 1
        self._agents[agent] = value
        self._agents.move_to_end(agent)
        if len(self._agents) > AGENTS_MAX:
            self._agents.popitem(last=False)

    def __len__(self) -> int:
        return len(self._sessions)


def drawn(chat: ChatView, session_id: str, share: float) -> bool:
    """True for a ``share`` of all requests, by lot; the same for a request that is sent again, also after a restart."""
    digest = hashlib.blake2b(digest_size=8)
    if session_id:
        digest.update(session_id.encode("utf-8", "replace"))
    else:
        first_user = next((message.text for message in chat.messages if message.role == "user"), "")
        first = chat.messages[0].text if chat.messages and chat.messages[0].role == "system" else ""
        for text in (chat.model, first, first_user):
            digest.update(text.encode("utf-8", "replace") + b"\0")
    digest.update(b"%d" % len(chat.messages))
    return int.from_bytes(digest.digest(), "big") < share * 2.0**64


def key_of(chat: ChatView, session_id: str) -> Key:
    """The dialogue's key; see the module."""
    if session_id:
        return (session_id, 0, 0)
    first_user = next((message.text for message in chat.messages if message.role == "user"), "")
    first = chat.messages[0].text if chat.messages and chat.messages[0].role == "system" else ""
    return (chat.model, hash(first), hash(first_user))


def _record(found: Agent) -> FieldRecord:
    scored, looped = (_cause_record(cause, found.state.of(cause)) for cause in CAUSES)
    return FieldRecord(
        basis=found.basis,
        at_s=found.at_s,
        tests=scored.tests,
        n_applied=scored.n_applied,
        stopped=scored.stopped,
        advice=found.advice,
        loop_guard=looped,
    )


def _cause_record(cause: Cause, state: CauseState) -> CauseRecord:
    tests: dict[str, Evidence] = {name: getattr(state, name) for name in TESTS[cause]}
    shown = {name: (found.n, found.e) for name, found in tests.items()}
    return CauseRecord(tests=shown, n_applied=state.n_applied, stopped=state.stopped)


def _restored(record: FieldRecord) -> Agent:
    """The agent of a record; what the file says of tests that there are none of is left out."""
    causes = {cause: _restored_cause(cause, shown) for cause, shown in record.by_cause().items()}
    return Agent(AgentState(**causes), record.basis, record.advice, record.at_s)


def _restored_cause(cause: Cause, record: CauseRecord) -> CauseState:
    evidence = {name: Evidence(*record.tests[name]) for name in TESTS[cause] if name in record.tests}
    stopped = cast("Any", record.stopped if record.stopped in TESTS[cause] else "")
    return CauseState(**evidence, n_applied=record.n_applied, stopped=stopped)
