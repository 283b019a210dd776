"""What is remembered between requests: of a dialogue (was it just asked back?) and of an agent (does it go along?).

Bounded, in memory only, no text kept: a dialogue's key is the client's ``x-session-id``, or hashes of the model and of
the first system and user texts, which stay the same while a dialogue grows.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from whetherman_edge.dialects.chat import ChatView
from whetherman_edge.gate.backoff import AgentState, Outcome
from whetherman_edge.gate.policy import SessionState

# A laptop has a handful of dialogues at a time; a forgotten one costs at most one more question by the model.
SESSIONS_MAX = 1_024
AGENTS_MAX = 256

Key = tuple[str, int, int]

_NEW_SESSION = SessionState()
_NEW_AGENT = AgentState()


class Sessions:
    """Owns SessionState by dialogue and AgentState by agent; both forget the least recently used."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[Key, SessionState] = OrderedDict()
        self._agents: OrderedDict[str, AgentState] = OrderedDict()

    def session(self, chat: ChatView, session_id: str, agent: str) -> SessionState:
        """The state of this dialogue, with its agent's back-off filled in."""
        state = self._sessions.get(key_of(chat, session_id), _NEW_SESSION) if self._sessions else _NEW_SESSION
        known = self._agents.get(agent, _NEW_AGENT) if self._agents else _NEW_AGENT
        backed_off, notes_ignored = known.backed_off, known.notes_ignored
        if not backed_off and not notes_ignored:
            return state
        return msgspec.structs.replace(state, backed_off=backed_off, notes_ignored=notes_ignored)

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

    def record(self, agent: str, outcome: Outcome) -> AgentState:
        """Count the outcome of one applied intervention; returns the agent's new state."""
        state = self._agents.pop(agent, _NEW_AGENT).after(outcome)
        self._agents[agent] = state
        if len(self._agents) > AGENTS_MAX:
            self._agents.popitem(last=False)
        return state

    def __len__(self) -> int:
        return len(self._sessions)


def key_of(chat: ChatView, session_id: str) -> Key:
    """The dialogue's key; see the module."""
    if session_id:
        return (session_id, 0, 0)
    first_user = next((message.text for message in chat.messages if message.role == "user"), "")
    first = chat.messages[0].text if chat.messages and chat.messages[0].role == "system" else ""
    return (chat.model, hash(first), hash(first_user))
