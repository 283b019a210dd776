"""Newline-delimited JSON, Ollama's streams, read for our own accounting; the bytes themselves go on as they came."""

from __future__ import annotations

# A line larger than this is not read; the stream is relayed all the same.
LINE_BYTES_MAX = 1 << 20


class LineReader:
    """Splits a byte stream into its lines, without the line break; blank lines are nothing."""

    __slots__ = ("_line", "_too_long")

    def __init__(self) -> None:
        self._line = bytearray()
        self._too_long = False

    def feed(self, piece: bytes) -> list[bytes]:
        """Lines that this piece completes, in order."""
        found: list[bytes] = []
        *ended, rest = piece.split(b"\n")
        for part in ended:
            self._line += part
            self._end_line(found)
        self._line += rest
        if len(self._line) > LINE_BYTES_MAX:
            self._line.clear()
            self._too_long = True
        return found

    def close(self) -> list[bytes]:
        """A line that the end of the stream left without its line break."""
        found: list[bytes] = []
        self._end_line(found)
        return found

    def _end_line(self, found: list[bytes]) -> None:
        line = bytes(self._line).strip()
        if line and not self._too_long and len(line) <= LINE_BYTES_MAX:
            found.append(line)
        self._line.clear()
        self._too_long = False
