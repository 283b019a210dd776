"""What the running daemon's page asks of its ledger."""

from __future__ import annotations

import pytest

from tests.ledger.entries import entry
from whetherman_edge.ledger import live, queries, records
from whetherman_edge.ledger.counters import Counters
from whetherman_edge.ledger.live import LiveLedger


@pytest.mark.parametrize(("takes_s", "n_summed"), [(0.01, 20), (1.0, 3)])
def test_a_page_that_asks_again_and_again_takes_little_of_a_core(tmp_path, monkeypatch, takes_s, n_summed):
    """Every three seconds for a minute: a cheap sum each time, a dear one so often that it takes a twentieth."""
    now_s, summed = 100.0, 0

    def summary(_path, _days):
        nonlocal now_s, summed
        now_s += takes_s
        summed += 1
        return {"rows": summed}

    monkeypatch.setattr(live.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(queries, "summary", summary)
    ledger = LiveLedger(True, Counters(), tmp_path / "l.sqlite3")
    shown = []
    for second in range(0, 60, 3):
        now_s = 100.0 + second
        shown.append(ledger.shown({})["rows"])
    assert summed == n_summed
    assert shown[-1] == n_summed


def test_the_rows_are_always_of_now(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "FLUSH_EVERY_S", 0.0)
    monkeypatch.setattr(live, "DEAR_S", -1.0)
    monkeypatch.setattr(live, "SHARE_MAX", 1e-9)
    ledger = LiveLedger(True, Counters(), tmp_path / "l.sqlite3")
    assert ledger.shown({})["rows_list"] == []
    ledger.record(entry())
    ledger.close()
    shown = ledger.shown({})
    assert (shown["rows"], len(shown["rows_list"])) == (0, 1)
