"""The running daemon's ledger: what is recorded, what the page asks, what ``/metrics`` says of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whetherman_edge.ledger.counters import Counters
from whetherman_edge.ledger.entry import Entry
from whetherman_edge.ledger.records import Ledger, default_path

DAYS = 14
ROWS = 100
# A full ledger takes a second to sum up, and the page asks every three: the model server wants the core.
DEAR_S = 0.1
SHARE_MAX = 0.05


class LiveLedger:
    """``recording`` False: nothing is written; the page still shows what was recorded before."""

    def __init__(self, recording: bool, counters: Counters, path: Path | None = None) -> None:
        self.recording = recording
        self.path = default_path() if path is None else path
        self._counters = counters
        self._ledger = Ledger(self.path)
        self._summing = threading.Lock()
        self._summary: dict[str, Any] = {}
        self._good_until_s = 0.0

    def record(self, entry: Entry) -> None:
        """Queue an entry; never waits, never raises."""
        self._ledger.record(entry)

    def close(self) -> None:
        """Write what is queued; blocks for some seconds at most."""
        self._ledger.close()

    def count(self) -> None:
        """Bring the counts into the counters."""
        self._counters.set_total("ledger_written_total", self._ledger.written)
        for cause, n in self._ledger.dropped.items():
            self._counters.set_total("ledger_dropped_total", n, (("cause", cause),))

    def shown(self, asked: Mapping[str, str]) -> dict[str, Any]:
        """What the page shows. ``asked``: filters (agent, decision, …), ``before``, ``limit``. Any thread.

        The sums of a large ledger are those of up to half a minute ago. Raises sqlite3.Error.
        """
        from whetherman_edge.ledger import queries  # only once somebody looks

        where = {name: value for name, value in asked.items() if name in queries.FILTERS | {"applied"}}
        before, limit = asked.get("before", ""), asked.get("limit", "")
        return {
            **self._summed_up(),
            "rows_list": queries.rows(
                self.path,
                limit=int(limit[:6]) if limit.isascii() and limit.isdecimal() else ROWS,
                before=int(before[:18]) if before.isascii() and before.isdecimal() else 0,
                where=where,
            ),
            "recording": self.recording,
            "dropped": dict(self._ledger.dropped),
        }

    def _summed_up(self) -> dict[str, Any]:
        """``queries.summary``, anew where that is cheap, else so rarely that it takes SHARE_MAX of a core."""
        from whetherman_edge.ledger import queries

        with self._summing:
            begun_s = time.monotonic()
            if begun_s >= self._good_until_s:
                self._summary = queries.summary(self.path, DAYS)
                took_s = time.monotonic() - begun_s
                self._good_until_s = begun_s + took_s / SHARE_MAX if took_s > DEAR_S else 0.0
            return self._summary
