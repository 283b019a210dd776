"""Progress of long steps, for people: one line that moves on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Protocol, TextIO

TERMINAL_INTERVAL_S = 0.2
LOG_INTERVAL_S = 5.0
"""A log (CI, journald, a pipe) gets a sign of life without being flooded."""


class Progress(Protocol):
    """What a long step reports to. ``begin``, then ``at`` with the total number of bytes done so far, then ``end``."""

    def note(self, text: str) -> None:
        """One line of text."""

    def begin(self, label: str, total_bytes: int, done_bytes: int, unit: str = "bytes") -> None:
        """Starts a step; ``done_bytes`` are there already and do not count for the rate. ``unit``: what is counted."""

    def at(self, done_bytes: int) -> None:
        """Where the step is now."""

    def end(self) -> None:
        """Closes the step, also after an error."""


class Silent:
    """Reports nothing."""

    def note(self, text: str) -> None: ...
    def begin(self, label: str, total_bytes: int, done_bytes: int, unit: str = "bytes") -> None: ...
    def at(self, done_bytes: int) -> None: ...
    def end(self) -> None: ...


class ConsoleProgress:
    """Writes to a text stream (stderr by default): bytes, share, rate and time left."""

    def __init__(self, stream: TextIO | None = None, interval_s: float | None = None) -> None:
        """``interval_s``: a whole line that often, on a terminal too, for one that others write to as well."""
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty() and interval_s is None
        self._line_interval_s = LOG_INTERVAL_S if interval_s is None else interval_s
        self._label, self._unit = "", "bytes"
        self._total_bytes = self._first_bytes = self._shown_bytes = 0
        self._start_s = self._next_s = 0.0
        self._drawn = 0

    def note(self, text: str) -> None:
        self._clear()
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def begin(self, label: str, total_bytes: int, done_bytes: int, unit: str = "bytes") -> None:
        self._label, self._total_bytes, self._unit = label, total_bytes, unit
        self._first_bytes = self._shown_bytes = done_bytes
        self._start_s = time.monotonic()
        self._next_s = self._start_s + (0.0 if self._terminal else self._line_interval_s)
        if done_bytes:
            self.note(f"{label}: going on behind {human_bytes(done_bytes)} fetched earlier")

    def at(self, done_bytes: int) -> None:
        # A wheel unpacks to a little more than was downloaded: never count backwards, never beyond the end.
        self._shown_bytes = min(max(self._shown_bytes, done_bytes), self._total_bytes)
        now_s = time.monotonic()
        if now_s < self._next_s and self._shown_bytes < self._total_bytes:
            return
        self._next_s = now_s + (TERMINAL_INTERVAL_S if self._terminal else self._line_interval_s)
        line = self._line(now_s)
        if self._terminal:
            self._stream.write("\r" + line.ljust(self._drawn))
            self._drawn = len(line)
        else:
            self._stream.write(f"{line}\n")
        self._stream.flush()

    def end(self) -> None:
        if self._drawn:
            self._stream.write("\n")
            self._stream.flush()
            self._drawn = 0

    def _line(self, now_s: float) -> str:
        share = self._shown_bytes / self._total_bytes if self._total_bytes else 1.0
        elapsed_s = max(now_s - self._start_s, 1e-6)
        rate = (self._shown_bytes - self._first_bytes) / elapsed_s
        left = (self._total_bytes - self._shown_bytes) / rate if rate > 0 else None
        if self._unit != "bytes":
            pace = "" if left is None else f", about {left / 60:.0f} min left" if left > 90 else f", {left:.0f} s left"
            return f"{self._label}: {self._shown_bytes} of {self._total_bytes} {self._unit} ({share:.0%}){pace}"
        pace = "" if left is None else f", {human_bytes(int(rate))}/s, {left:.0f} s left"
        shown, total = human_bytes(self._shown_bytes), human_bytes(self._total_bytes)
        return f"{self._label}: {shown} of {total} ({share:.0%}){pace}"

    def _clear(self) -> None:
        if self._drawn:
            self._stream.write("\r" + " " * self._drawn + "\r")
            self._drawn = 0


def human_bytes(count: int) -> str:
    """Decimal units, as disks and package indexes state sizes: 98362432 -> '98 MB'."""
    value = float(count)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}"
        value /= 1000
    return f"{value:.2f} GB"
