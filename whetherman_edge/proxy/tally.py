"""Counts the tool calls in a response while it passes by: what the model did, beside what was forecast.

The bytes are only looked at, and most of them not even that: text tokens hold none of the words that a call needs.
Compressed bodies are not counted.
"""

from __future__ import annotations

from whetherman_edge.dialects.openai_reply import ReplyReader
from whetherman_edge.dialects.sse import EventReader

# A body beyond this is not parsed; arguments of one call are rarely above 100 KB.
BODY_BYTES_MAX = 1 << 20

_MARKS = (b'"tool_calls"', b'"function_call"')


class Tally:
    """Feed it the body's chunks, then read ``end()``. ``stream``: the body is an event stream."""

    __slots__ = ("_events", "_pending", "_reply", "_stream")

    def __init__(self, *, stream: bool) -> None:
        self._stream = stream
        self._pending: bytes | None = b""
        self._events: EventReader | None = None
        self._reply = ReplyReader()

    def feed(self, chunk: bytes) -> None:
        """Look at the next bytes."""
        if self._stream:
            self._feed_stream(chunk)
        elif self._pending is not None:
            pending = self._pending + chunk if self._pending else chunk
            self._pending = pending if len(pending) <= BODY_BYTES_MAX else None

    def end(self) -> int:
        """The body is complete; returns the number of calls."""
        if self._stream:
            if self._events is not None:
                self._read(self._events.close())
        elif self._pending and _marked(self._pending):
            self._reply.read(self._pending)
        self._pending = b""
        return self._reply.n_calls

    def _feed_stream(self, chunk: bytes) -> None:
        """Events are split from the first mark on; until then only the unfinished line is kept."""
        if self._events is not None:
            self._read(self._events.feed(chunk))
            return
        pending = self._pending + chunk if self._pending else chunk
        if _marked(pending):
            self._events = EventReader()
            self._pending = b""
            self._read(self._events.feed(pending))
        else:
            line = pending[pending.rfind(b"\n") + 1 :]
            self._pending = line if len(line) <= BODY_BYTES_MAX else b""

    def _read(self, payloads: list[bytes]) -> None:
        for payload in payloads:
            if _marked(payload):
                self._reply.read(payload)


def _marked(data: bytes) -> bool:
    return any(mark in data for mark in _MARKS)
