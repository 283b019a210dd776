"""Server-sent events, read for our own accounting; the bytes themselves are relayed as they came.

Tolerant of what servers send: comments, CRLF and lone CR, events of several data lines, odd cuts anywhere.
"""

from __future__ import annotations

# An event larger than this is not read (an image in a reply); the stream is relayed all the same.
EVENT_BYTES_MAX = 1 << 20


class EventReader:
    """Splits a byte stream into the data of its events. WHATWG HTML, section 9.2.6."""

    __slots__ = ("_data", "_line", "_n_bytes", "_passing", "_skip_lf")

    def __init__(self) -> None:
        self._line = bytearray()
        self._data: list[bytes] = []
        self._n_bytes = 0
        self._passing = False  # inside a line that is too long to be kept
        self._skip_lf = False

    def feed(self, piece: bytes) -> list[bytes]:
        """Data of the events that this piece completes, in order; lines of one event joined with a line feed."""
        found: list[bytes] = []
        if self._skip_lf and piece:
            piece = piece.removeprefix(b"\n")
            self._skip_lf = False
        if piece.endswith(b"\r"):
            self._skip_lf = True
        lines = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        for line in lines[:-1]:
            self._line += line
            self._end_line(found)
        self._line += lines[-1]
        if len(self._line) > EVENT_BYTES_MAX:
            if not self._passing and self._line.startswith(b"data:"):
                self._n_bytes += len(self._line)
            self._passing = True
            self._line.clear()
        return found

    def close(self) -> list[bytes]:
        """Data of an event that the end of the stream cut off before its blank line."""
        found: list[bytes] = []
        self._end_line(found)
        self._end_line(found)
        return found

    def _end_line(self, found: list[bytes]) -> None:
        line = bytes(self._line)
        self._line.clear()
        if self._passing:
            self._passing = False
        elif not line:
            if self._data and self._n_bytes <= EVENT_BYTES_MAX:
                found.append(b"\n".join(self._data))
            self._data.clear()
            self._n_bytes = 0
        elif line.startswith(b"data:"):
            value = line[5:].removeprefix(b" ")
            self._n_bytes += len(value)
            if self._n_bytes <= EVENT_BYTES_MAX:
                self._data.append(value)
