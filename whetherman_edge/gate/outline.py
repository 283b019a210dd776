"""The dialogue, split at the last user turn, without looking at a single text.

A dialogue grows at its end, so what was found out about all but its last message is kept: the next request of the same
dialogue is walked from there. A message counts as the same when it is the same object, which it is where the dialect's
reader kept it too.
"""

from __future__ import annotations

from typing import Final

from whetherman_edge.dialects.chat import Message, ToolCall

# A laptop has a handful of dialogues at a time; each entry holds references to messages of one.
DIALOGUES_KEPT_MAX: Final = 8

Messages = tuple[Message, ...]


class Outline:
    """``user``, ``previous``: texts of the last two user turns; ``assistant``: the assistant's last text; ``systems``.

    ``calls``, ``results``: after the last user turn; ``earlier_*``: before it, calls by distinct name.
    ``n_last_results``: tool messages at the end. ``before_user``: role of the message before the last user turn.
    """

    __slots__ = (
        "assistant",
        "before_user",
        "calls",
        "earlier_names",
        "earlier_results",
        "last_role",
        "n_earlier_calls",
        "n_last_results",
        "n_user_turns",
        "previous",
        "results",
        "systems",
        "user",
    )

    def __init__(self) -> None:
        self.user = self.previous = self.assistant = self.before_user = self.last_role = ""
        self.systems: tuple[str, ...] = ()
        self.calls: tuple[ToolCall, ...] = ()
        self.results: tuple[Message, ...] = ()
        self.earlier_results: tuple[Message, ...] = ()
        self.earlier_names: frozenset[str] = frozenset()
        self.n_earlier_calls = self.n_last_results = self.n_user_turns = 0

    def copy(self) -> Outline:
        """Another one with the same values, which are never changed in place."""
        other = Outline.__new__(Outline)
        other.user, other.previous, other.assistant = self.user, self.previous, self.assistant
        other.before_user, other.last_role, other.systems = self.before_user, self.last_role, self.systems
        other.calls, other.results = self.calls, self.results
        other.earlier_results, other.earlier_names = self.earlier_results, self.earlier_names
        other.n_earlier_calls, other.n_last_results = self.n_earlier_calls, self.n_last_results
        other.n_user_turns = self.n_user_turns
        return other

    def add(self, message: Message) -> None:
        """One more message at the end."""
        role = message.role
        if role == "tool":
            self.results += (message,)
            self.n_last_results += 1
            self.last_role = role
            return
        self.n_last_results = 0
        if role == "user":
            self.n_user_turns += 1
            self.previous, self.user = self.user, message.text
            self.before_user = self.last_role
            if self.calls:
                self.n_earlier_calls += len(self.calls)
                self.earlier_names |= {call.name for call in self.calls}
                self.calls = ()
            if self.results:
                self.earlier_results += self.results
                self.results = ()
        elif role == "assistant":
            if message.calls:
                self.calls += message.calls
            text = message.text
            if text and not text.isspace():
                self.assistant = text
        else:
            self.systems += (message.text,)
        self.last_role = role


class Outliner:
    """Outlines of dialogues, each continued from where the last request of the same one stood."""

    def __init__(self) -> None:
        self._kept: list[tuple[Messages, Outline]] = []

    def outline(self, messages: Messages) -> Outline:
        """The outline of all messages."""
        n = len(messages) - 1
        for place, (known, outline) in enumerate(self._kept):
            length = len(known)
            if length <= n and messages[length - 1] is known[-1] and messages[:length] == known:
                if length < n:
                    outline = self._keep(place, messages, length, outline)
                elif place:
                    self._kept.insert(0, self._kept.pop(place))
                break
        else:
            outline = self._keep(None, messages, 0, Outline())
        whole = outline.copy()
        if n >= 0:
            whole.add(messages[n])
        return whole

    def _keep(self, place: int | None, messages: Messages, start: int, outline: Outline) -> Outline:
        """The outline of all messages but the last, from ``outline``, which is that of the first ``start``."""
        outline = outline.copy()
        end = len(messages) - 1
        for index in range(start, end):
            outline.add(messages[index])
        if end > 0:
            if place is not None:
                del self._kept[place]
            self._kept.insert(0, (messages[:end], outline))
            del self._kept[DIALOGUES_KEPT_MAX:]
        return outline
