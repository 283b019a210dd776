"""Logging: one line an event, ``key=value``, to stderr, where systemd and launchd pick it up.

What never appears, at any level: prompt text, header values, keys, query strings, exception texts of foreign libraries
(aiohttp quotes the bad header line in its errors). An exception shows as its class and the place it was raised at
(field case O10).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any

FLUSH_EVERY_S = 0.05


class LineRecord(logging.LogRecord):
    """A record without what no line of ours shows (file, function, thread, process): half the cost of one."""

    pathname = filename = module = funcName = ""  # noqa: N815
    lineno = 0
    thread = threadName = processName = process = taskName = None  # noqa: N815
    relativeCreated = 0.0  # noqa: N815
    exc_text = None

    def __init__(
        self,
        name: str,
        level: int,
        _pathname: str,
        _lineno: int,
        msg: object,
        args: Any,
        exc_info: Any,
        _func: str | None = None,
        sinfo: str | None = None,
        **_more: Any,
    ) -> None:
        if args and len(args) == 1 and isinstance(args[0], Mapping) and args[0]:
            args = args[0]
        self.name = name
        self.msg = msg
        self.args = args
        self.levelno = level
        self.levelname = logging.getLevelName(level)
        self.exc_info = exc_info
        self.stack_info = sinfo
        self.created = now_s = time.time()
        self.msecs = now_s % 1.0 * 1e3


class LineFormatter(logging.Formatter):
    """``ts=… level=… event=… key=value …`` in UTC, always one line."""

    def __init__(self) -> None:
        super().__init__()
        self._second = -1
        self._stamp = ""

    def format(self, record: logging.LogRecord) -> str:
        second = int(record.created)
        if second != self._second:
            self._second, self._stamp = second, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        text = record.getMessage().replace("\n", " ")
        line = f"ts={self._stamp}.{int(record.msecs):03d}Z level={record.levelname.lower()} {text}"
        if record.exc_info and record.exc_info[0] is not None:
            line += f" error={record.exc_info[0].__name__} at={_place(record.exc_info[2])}"
        return line


class LineHandler(logging.Handler):
    """Writes lines to stderr, many with one system call where many come: under load a line is the dearest thing we do.

    A line goes out at once when none went out just before, and with it when it is a warning or worse; the others wait
    for FLUSH_EVERY_S at most, so that a daemon that is killed loses no more than those.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[str] = []
        self._timer: asyncio.TimerHandle | None = None
        self._written_at_s = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line, or keep it for a moment. Called with the handler's lock held."""
        try:
            self._lines.append(self.format(record))
        except Exception:
            self.handleError(record)
            return
        if record.levelno >= logging.WARNING or time.monotonic() - self._written_at_s > FLUSH_EVERY_S:
            self.flush()
        elif self._timer is None:
            try:
                self._timer = asyncio.get_running_loop().call_later(FLUSH_EVERY_S, self.flush)
            except RuntimeError:  # not on the loop's thread
                self.flush()

    def flush(self) -> None:
        """Write what is kept; the interpreter's end calls it too."""
        with self.lock or contextlib.nullcontext():
            self._timer = None
            if not self._lines:
                return
            text = "\n".join([*self._lines, ""])
            self._lines.clear()
            self._written_at_s = time.monotonic()
            with contextlib.suppress(OSError, ValueError):  # nobody reads any more, or stderr is closed
                sys.stderr.write(text)
                sys.stderr.flush()


class _ForeignFilter(logging.Filter):
    """Keeps of a library's record its level and the class of the error, nothing of its text."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg = f"event=library_error logger={record.name}"
        record.args = None
        return True


def configure(level: str) -> None:
    """Send our records, and those of aiohttp and asyncio, to stderr as lines.

    Nothing in a line needs the caller, thread or process, and finding them costs more than writing the line: these are
    the switches that the logging HOWTO names for it.
    """
    logging._srcfile = None
    logging.logThreads = False
    logging.logProcesses = False
    logging.logMultiprocessing = False
    logging.setLogRecordFactory(LineRecord)
    handler = LineHandler()
    handler.setFormatter(LineFormatter())
    ours = logging.getLogger("whetherman_edge")
    ours.handlers = [handler]
    ours.setLevel(level.upper())
    ours.propagate = False
    for name in ("aiohttp.internal", "aiohttp.client", "asyncio"):
        foreign = logging.getLogger(name)
        foreign.handlers = [handler]
        foreign.filters = [_ForeignFilter()]
        foreign.setLevel(logging.WARNING)
        foreign.propagate = False


def _place(tb: object) -> str:
    frames = traceback.extract_tb(tb)  # type: ignore[arg-type]
    if not frames:
        return "?"
    last = frames[-1]
    return f"{last.filename.rsplit('/', 1)[-1]}:{last.lineno}"
