"""What one calibration has measured so far: a JSON Lines file that survives a kill.

One object a line, written and fsync'd as it comes. A line that a kill has cut short ends the file; it is dropped when
the file is opened again. Kinds of line (key ``t``): ``start`` (settings), ``capability``, ``spent`` (tokens of one
response), ``run`` (a finished run on a probe), ``choice`` (of the intervention), ``look`` (a test of the thresholds).
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import msgspec

from whetherman_edge.calibrate.episode import Episode, StepRecord
from whetherman_edge.errors import EnvironmentFault

CONTENT_CHARS_MAX = 2000


class StepLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request of a run: the server's counts and times, and what kind of reply it was. Times in seconds.

    ``calls``: their names; ``arguments``: their JSON texts, left out for calls ``written`` in the ``content``.
    """

    prompt: int
    output: int
    ttft: float
    seconds: float
    cached: int | None = None
    calls: tuple[str, ...] = ()
    written: bool = False
    steered: bool = False
    refused: bool = False
    resent: bool = False
    content: str = ""
    finish: str = ""
    arguments: tuple[str, ...] = ()


class RunLine(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, tag_field="t", tag="run"):
    """A finished run. ``probe_sha``: digest of the probe it ran on. ``arm``: "with", or a mode and wording, as
    "note:reason". ``index``: repeats of one arm on one probe, from 0; 0 is the one at temperature 0.
    """

    probe: str
    probe_sha: str
    arm: str
    index: int
    success: bool
    why: str = ""
    n_calls: int = 0
    n_refused: int = 0
    unfinished: bool = False
    error: str = ""
    steps: tuple[StepLine, ...] = ()

    @property
    def seconds(self) -> float:
        """Model time of the run."""
        return sum(step.seconds for step in self.steps)

    @property
    def output_tokens(self) -> int:
        """Output tokens of the run."""
        return sum(step.output for step in self.steps)

    @property
    def called_first(self) -> bool:
        """The first reply was a call."""
        return bool(self.steps) and bool(self.steps[0].calls)


class SpentLine(msgspec.Struct, frozen=True, tag_field="t", tag="spent"):
    """Tokens and seconds of one response, written before anything else is known of the run it belongs to."""

    prompt: int
    output: int
    seconds: float


class StartLine(msgspec.Struct, frozen=True, tag_field="t", tag="start"):
    """What was calibrated; a log of another agent is not gone on with. ``max_tokens``: of a reply, 0 for not known."""

    endpoint: str
    model: str
    seed: int
    version: str
    max_tokens: int = 0


class CapabilityLine(msgspec.Struct, frozen=True, tag_field="t", tag="capability"):
    """What the capability probe found, as ``capability_probe.Found`` encodes."""

    found: dict[str, Any]


class ChoiceLine(msgspec.Struct, frozen=True, tag_field="t", tag="choice"):
    """The arm that was chosen from the comparison, and the seconds that each one was worth."""

    arm: str
    value_s: dict[str, float]


class LookLine(msgspec.Struct, frozen=True, tag_field="t", tag="look"):
    """A test of the thresholds that could have passed: ``level`` is the error it spent, ``digest`` of what it saw, so
    that the same test again spends nothing. ``artifact``: SHA-256 of the engine's, since each engine's profile is a
    claim of its own.
    """

    kind: str
    artifact: str
    digest: str
    level: float


Line = StartLine | CapabilityLine | SpentLine | RunLine | ChoiceLine | LookLine
_decode = msgspec.json.Decoder(Line).decode
_encode = msgspec.json.Encoder().encode


class RunLog:
    """The open file. ``lines``: all that are in it, those read at the start and those added since."""

    def __init__(self, path: Path, file: IO[bytes], lines: list[Line]) -> None:
        self.path = path
        self.lines = lines
        self._file = file

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open or make the log; a torn last line is cut off. Raises EnvironmentFault for a file that is no log, and for
        one that another calibration is writing: it would be torn under its hands, and its runs made twice.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.ExitStack() as stack:
                file = stack.enter_context(path.open("a+b"))
                _lock(path, file)
                file.seek(0)
                lines, good = _parse(path, file.read())
                file.truncate(good)
                file.seek(0, os.SEEK_END)
                stack.pop_all()  # it stays open
        except OSError as exc:
            raise EnvironmentFault(f"{path} cannot be opened: {exc.strerror}; choose another --dir") from exc
        return cls(path, file, lines)

    def add(self, line: Line) -> None:
        """Append a line; it is on the disk when this returns. Raises EnvironmentFault when it cannot be."""
        try:
            self._file.write(_encode(line) + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as exc:
            raise EnvironmentFault(f"{self.path} cannot be written: {exc.strerror}; free some space") from exc
        self.lines.append(line)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def runs(self) -> list[RunLine]:
        """Finished runs that say something about the agent: those in which the server did not fail."""
        return [line for line in self.lines if isinstance(line, RunLine) and not line.error]

    def spent(self) -> tuple[int, int, float]:
        """Prompt tokens, output tokens and seconds of every response so far, those of unfinished runs too."""
        spent = [line for line in self.lines if isinstance(line, SpentLine)]
        return sum(s.prompt for s in spent), sum(s.output for s in spent), sum(s.seconds for s in spent)


def _lock(path: Path, file: IO[bytes]) -> None:
    """Hold the file until it is closed; file systems without locks do without. Raises EnvironmentFault when held."""
    if sys.platform == "win32":
        return
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        raise EnvironmentFault(f"{path} is being written by another calibration; wait until it has ended") from exc
    except OSError:
        return


def run_line(probe: str, probe_sha: str, arm: str, index: int, episode: Episode) -> RunLine:
    """The line of a finished run."""
    return RunLine(
        probe=probe,
        probe_sha=probe_sha,
        arm=arm,
        index=index,
        success=episode.success,
        why=episode.why[:CONTENT_CHARS_MAX],
        n_calls=episode.n_calls,
        n_refused=episode.n_refused,
        unfinished=episode.unfinished,
        error=episode.error,
        steps=tuple(_step_line(record) for record in episode.steps),
    )


def _step_line(record: StepRecord) -> StepLine:
    reply = record.reply
    return StepLine(
        prompt=reply.prompt_tokens,
        output=reply.output_tokens,
        ttft=round(reply.ttft_s, 4),
        seconds=round(reply.seconds, 4),
        cached=reply.cached_tokens,
        calls=tuple(call.name for call in reply.calls),
        written=reply.from_content,
        steered=record.steered,
        refused=record.refused,
        resent=record.resent,
        content=reply.content[:CONTENT_CHARS_MAX],
        finish=reply.finish,
        arguments=() if reply.from_content else tuple(call.raw for call in reply.calls),
    )


def _parse(path: Path, data: bytes) -> tuple[list[Line], int]:
    """The lines, and how many bytes of the file they are. The last line may be torn, no other one."""
    lines: list[Line] = []
    position = 0
    while position < len(data):
        end = data.find(b"\n", position)
        if end < 0:
            break
        try:
            lines.append(_decode(data[position:end]))
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            if data.find(b"\n", end + 1) < 0:
                break  # the disk kept the line's end and not its middle
            raise EnvironmentFault(
                f"{path}: line {len(lines) + 1} is no line of a calibration log ({exc}); move the file away"
            ) from exc
        position = end + 1
    return lines, position
