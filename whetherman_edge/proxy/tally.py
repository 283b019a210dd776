"""Counts the tool calls in a response while it passes by: what the model did, beside what was forecast.

The bytes are only looked at. Calls are told by index and id, not by finish_reason, because servers disagree about both
(field case S03: parallel calls all with index 0, done in a chunk of its own). Compressed bodies are not counted.
"""

from __future__ import annotations

from typing import Any

import msgspec

# A line or body beyond this is not parsed; arguments of one call are rarely above 100 KB.
TEXT_BYTES_MAX = 1 << 20

_MARKS = (b'"tool_calls"', b'"function_call"')
_decode = msgspec.json.Decoder(dict[str, Any]).decode


class Tally:
    """Feed it the body's chunks, then read ``calls``. ``stream``: the body is an event stream."""

    __slots__ = ("_names", "_pending", "_size", "_stream")

    def __init__(self, *, stream: bool) -> None:
        self._stream = stream
        self._pending = b""
        self._size = 0
        self._names: set[tuple[object, ...]] = set()

    @property
    def calls(self) -> int:
        """Calls seen so far."""
        return len(self._names)

    def feed(self, chunk: bytes) -> None:
        """Look at the next bytes."""
        self._size += len(chunk)
        if len(self._pending) + len(chunk) > TEXT_BYTES_MAX:
            self._pending = b""
            return
        pending = self._pending + chunk if self._pending else chunk
        if not self._stream:
            self._pending = pending
            return
        end = pending.rfind(b"\n") + 1
        if not end:
            self._pending = pending
            return
        lines, self._pending = pending[:end], pending[end:]
        if any(mark in lines for mark in _MARKS):
            for line in lines.splitlines():
                if line.startswith(b"data:") and any(mark in line for mark in _MARKS):
                    self._parse(line[5:].strip(), "delta")

    def end(self) -> int:
        """The body is complete; returns ``calls``."""
        if not self._stream and any(mark in self._pending for mark in _MARKS):
            self._parse(self._pending, "message")
        self._pending = b""
        return self.calls

    def _parse(self, text: bytes, key: str) -> None:
        try:
            choices = _decode(text).get("choices") or ()
            for position, choice in enumerate(choices):
                self._message(choice.get("index", position), choice.get(key) or {})
        except (msgspec.DecodeError, AttributeError, TypeError, UnicodeDecodeError, RecursionError):
            return

    def _message(self, choice: object, message: dict[str, Any]) -> None:
        for position, call in enumerate(message.get("tool_calls") or ()):
            function = call.get("function") or {}
            if function.get("name"):  # later pieces of a streamed call carry arguments only
                self._names.add((choice, call.get("index", position), call.get("id") or position))
        function = message.get("function_call") or {}
        if function.get("name"):
            self._names.add((choice, "function_call"))
