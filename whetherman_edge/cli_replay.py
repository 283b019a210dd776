"""``whetherman-edge replay``: recorded decisions as one self-contained HTML file."""

from __future__ import annotations

import argparse
import os
import sqlite3
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from whetherman_edge.errors import EnvironmentFault, UsageError
from whetherman_edge.ledger import replay
from whetherman_edge.ledger.records import default_path

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]


def register(verbs: Verbs) -> None:
    """Add ``replay``."""
    parser = verbs.add_parser("replay", help="recorded decisions as one HTML file")
    parser.add_argument("--ledger", metavar="FILE", help=f"which ledger (default {default_path()})")
    parser.add_argument("--out", metavar="FILE", default="whetherman-replay.html", help="what to write; - for stdout")
    parser.add_argument("--limit", type=int, default=replay.REPLAY_ROWS_MAX, help="newest decisions at most")
    parser.set_defaults(run=_run)


def _run(parsed: argparse.Namespace) -> int:
    path = Path(parsed.ledger) if parsed.ledger else default_path()
    if not path.is_file():
        raise EnvironmentFault(f"expected a ledger at {path}, found none; it is made with the first decision")
    if not 1 <= parsed.limit <= 100_000:
        raise UsageError(f"--limit: expected 1..100,000, got {parsed.limit}")
    if parsed.out != "-" and _is_same(parsed.out, path):
        raise UsageError(f"--out {parsed.out}: expected another file than the ledger itself; name a new one")
    try:
        html = replay.render(path, limit=parsed.limit)
    except sqlite3.Error as exc:
        raise EnvironmentFault(f"{path} cannot be read ({exc}); `whetherman-edge doctor` says more") from exc
    if parsed.out == "-":
        sys.stdout.buffer.write(html)
        return 0
    try:
        # What an agent was asked to do is nobody else's business.
        handle = os.open(parsed.out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "wb") as out:
            out.write(html)
    except OSError as exc:
        raise EnvironmentFault(f"cannot write {parsed.out}: {exc.strerror}; name another file with --out") from exc
    print(f"{parsed.out}: {len(html) / 1e3:.0f} kB")
    return 0


def _is_same(name: str, path: Path) -> bool:
    try:
        return os.path.samefile(name, path)
    except (OSError, ValueError):
        return False
