"""Watches the reply to a request that was steered to a text, whole or as a stream: hold, release, or ask again (R06).

The gate's ``leak`` judges text; here the text is taken out of the bytes. A reply may have several alternatives (``n``):
one leak is enough, and all must be clear before anything is released.

``calls_leak`` False: the tools were left in place with a note, so a structured call is the model's own choice and the
client's to take; only a call written as text is a leak, as a client would show it for the answer.
"""

from __future__ import annotations

from collections.abc import Collection

from whetherman_edge.dialects.dialect import Dialect, Piece
from whetherman_edge.dialects.registry import OPENAI_CHAT
from whetherman_edge.gate.leak import LeakDetector, State


def judge_reply(
    body: bytes, offered: Collection[str], dialect: Dialect = OPENAI_CHAT, *, calls_leak: bool = True
) -> State:
    """CLEAR or LEAK for a whole reply. What is no reply is CLEAR: it is the client's to see.

    offered: names of the tools that the client offered.
    """
    for piece in dialect.reader().read(body) or ():
        if piece.n_calls and not calls_leak:
            continue
        detector = LeakDetector(offered)
        _show(detector, piece)
        if detector.close() == "LEAK" or detector.leaked_late:
            return "LEAK"
    return "CLEAR"


class StreamWatch:
    """Reads a stream before it is released. CLEAR releases all that was held; LEAK asks for the original request."""

    __slots__ = ("_calls_leak", "_detectors", "_events", "_offered", "_reply", "_state")

    def __init__(self, offered: Collection[str], dialect: Dialect = OPENAI_CHAT, *, calls_leak: bool = True) -> None:
        self._calls_leak = calls_leak
        self._offered = frozenset(offered)
        self._events = dialect.splitter()
        self._reply = dialect.reader()
        self._detectors: dict[int, LeakDetector] = {}
        self._state: State = "HOLD"

    def feed(self, piece: bytes) -> State:
        """More bytes of the stream, cut anywhere."""
        for data in self._events.feed(piece):
            self._read(data)
        return self._state

    def close(self) -> State:
        """The stream has ended, in whatever way; never HOLD."""
        for data in self._events.close():
            self._read(data)
        for detector in self._detectors.values():
            detector.close()
        self._settle()
        if self._state == "HOLD":
            self._state = "CLEAR"
        return self._state

    def _read(self, data: bytes) -> None:
        pieces = self._reply.read(data)
        if pieces is None:
            if data.strip() != b"[DONE]" and self._state == "HOLD":
                self._state = "CLEAR"  # an error or something unknown: the client's to see
            return
        for piece in pieces:
            detector = self._detectors.setdefault(piece.choice, LeakDetector(self._offered))
            if piece.n_calls and not self._calls_leak:
                detector.release()
            else:
                _show(detector, piece)
        self._settle()

    def _settle(self) -> None:
        if self._state != "HOLD":
            return
        states = [detector.state for detector in self._detectors.values()]
        if "LEAK" in states:
            self._state = "LEAK"
        elif states and all(state == "CLEAR" for state in states):
            self._state = "CLEAR"


def _show(detector: LeakDetector, piece: Piece) -> None:
    """Reasoning first: a server that sends both in one value means it came before the text."""
    if piece.n_reasoning_chars:
        detector.reasoning(piece.n_reasoning_chars)
    if piece.n_calls:
        detector.call()
    if piece.text:
        detector.text(piece.text)
