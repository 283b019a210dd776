"""Counts the tool calls in a response while it passes by: what the model did, beside what was forecast.

The bytes are only looked at, and most of them not even that: text tokens hold none of the words that a call needs.
Compressed bodies are not counted.
"""

from __future__ import annotations

import logging

from whetherman_edge.dialects.dialect import Dialect, StreamSplitter
from whetherman_edge.dialects.registry import OPENAI_CHAT

log = logging.getLogger(__name__)

# A body beyond this is not parsed; arguments of one call are rarely above 100 KB.
BODY_BYTES_MAX = 1 << 20


class Tally:
    """Feed it the body's chunks, then read ``end()``. ``stream``: the body is a stream of the dialect's.

    A fault of ours is logged once and ends the counting: the bytes are the client's, and go on.
    """

    __slots__ = ("_broken", "_events", "_marks", "_pending", "_reply", "_splitter", "_stream")

    def __init__(self, dialect: Dialect = OPENAI_CHAT, *, stream: bool) -> None:
        self._stream = stream
        self._marks = dialect.call_marks
        self._splitter = dialect.splitter
        self._pending: bytes | None = b""
        self._events: StreamSplitter | None = None
        self._reply = dialect.reader()
        self._broken = False

    def feed(self, chunk: bytes) -> None:
        """Look at the next bytes. Never raises."""
        if self._broken:
            return
        try:
            self._feed(chunk)
        except Exception as exc:
            self._break(exc)

    def end(self) -> int:
        """The body is complete; returns the number of calls. Never raises."""
        if not self._broken:
            try:
                self._end()
            except Exception as exc:
                self._break(exc)
        self._pending = b""
        return self._reply.n_calls

    def _break(self, exc: Exception) -> None:
        self._broken = True
        log.error("event=tally_failed", exc_info=exc)

    def _feed(self, chunk: bytes) -> None:
        if self._stream:
            self._feed_stream(chunk)
        elif self._pending is not None:
            pending = self._pending + chunk if self._pending else chunk
            self._pending = pending if len(pending) <= BODY_BYTES_MAX else None

    def _end(self) -> None:
        if self._stream:
            if self._events is not None:
                self._read(self._events.close())
        elif self._pending and self._marked(self._pending):
            self._reply.read(self._pending)

    def _feed_stream(self, chunk: bytes) -> None:
        """Events are split from the first mark on; until then only the unfinished line is kept."""
        if self._events is not None:
            self._read(self._events.feed(chunk))
            return
        pending = self._pending + chunk if self._pending else chunk
        if self._marked(pending):
            self._events = self._splitter()
            self._pending = b""
            self._read(self._events.feed(pending))
        else:
            line = pending[pending.rfind(b"\n") + 1 :]
            self._pending = line if len(line) <= BODY_BYTES_MAX else b""

    def _read(self, payloads: list[bytes]) -> None:
        for payload in payloads:
            if self._marked(payload):
                self._reply.read(payload)

    def _marked(self, data: bytes) -> bool:
        for mark in self._marks:  # noqa: SIM110  # a generator costs more than the search
            if mark in data:
                return True
        return False
