"""What ``bench ab`` writes as it goes: JSON Lines, appended and flushed row by row, readable after a kill."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from whetherman_edge.errors import EnvironmentFault, UsageError


class Journal:
    """A file of JSON objects, one a line. A last line that a kill cut in half is dropped when the file is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def rows(self) -> list[dict[str, Any]]:
        """All rows; a torn last one is cut off the file, so that the next row starts on a line of its own.

        Raises EnvironmentFault for a file that cannot be read, or holds something else.
        """
        try:
            data = self.path.read_bytes() if self.path.exists() else b""
            whole = data[: data.rfind(b"\n") + 1]
            if len(whole) < len(data):
                os.truncate(self.path, len(whole))
            return [msgspec.json.decode(line, type=dict[str, Any]) for line in whole.splitlines()]
        except OSError as exc:
            raise EnvironmentFault(f"{self.path} cannot be read: {exc.strerror}; choose another --out") from exc
        except msgspec.DecodeError as exc:
            raise EnvironmentFault(f"{self.path}: expected a JSON object a line: {exc}; choose another --out") from exc

    def append(self, row: Any) -> None:
        """Write one row; it is in the file when this returns. Raises EnvironmentFault."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                file.write(msgspec.json.encode(row) + b"\n")
        except OSError as exc:
            raise EnvironmentFault(f"{self.path} cannot be written: {exc.strerror}; choose another --out") from exc


class Step(msgspec.Struct, frozen=True):
    """What the gate did with one request, from the response headers; all empty for an ungated one."""

    label: str = ""
    applied: bool = False
    reason: str = ""
    engine: str = ""
    confidence: float = 0.0
    ms: float = 0.0


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One episode under one gate.

    ``group``: tasks of one group are not independent. ``calls``: tool calls made. ``requests``: to the model server,
    those sent again and the gate's own among them; ``reused``: those that an earlier gate had sent, byte for byte.
    Tokens and ``seconds`` are as measured when each reply was made; ``cached_tokens`` is part of ``prompt_tokens``.
    ``error``: the model server failed, so the run says nothing.
    """

    gate: str
    task: str
    repeat: int
    family: str
    difficulty: int
    kind: str
    group: str
    success: bool
    why: str
    calls: int
    steps: tuple[Step, ...]
    requests: int
    reused: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    seconds: float
    unfinished: bool = False
    error: str = ""

    @property
    def skipped(self) -> int:
        """Decisions that were applied."""
        return sum(step.applied for step in self.steps)


class RunLog:
    """The episodes of one bench. The first row says what is measured; a resumed bench must measure the same."""

    def __init__(self, path: Path) -> None:
        self._journal = Journal(path)
        self.runs: dict[tuple[str, str, int], Run] = {}

    def open(self, about: dict[str, Any], *, resume: bool) -> None:
        """Read what is there. Raises UsageError for a log of another bench, or when it is not to be resumed."""
        rows = self._journal.rows()
        if not rows:
            self._journal.append({"about": about})
            return
        if not resume:
            raise UsageError(f"{self._journal.path} exists already; go on with --resume, or choose another --out")
        before = rows[0].get("about", {})
        differing = [key for key in about if before.get(key) != about[key]]
        if differing:
            told = "; ".join(f"{key}: was {before.get(key)}, is {about[key]}" for key in differing)
            raise UsageError(f"{self._journal.path} is of another bench ({told}); choose another --out")
        for row in rows[1:]:
            try:
                run = msgspec.convert(row, Run)
            except msgspec.ValidationError as exc:
                raise UsageError(f"{self._journal.path}: no row of this version's bench: {exc}; other --out") from exc
            if not run.error:  # one that failed is tried again
                self.runs[run.gate, run.task, run.repeat] = run

    def add(self, run: Run) -> None:
        """Keep one episode."""
        self._journal.append(run)
        self.runs[run.gate, run.task, run.repeat] = run
