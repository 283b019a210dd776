"""What the page and replay read: counts, savings against shadow, suspects."""

from __future__ import annotations

import sqlite3
import time

import pytest

from tests.ledger.entries import entry
from whetherman_edge.ledger import records
from whetherman_edge.ledger.queries import SHADOW_MIN, rows, summary
from whetherman_edge.ledger.records import Ledger

NOW_S = 1_800_000_000.0


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "FLUSH_EVERY_S", 0.0)
    monkeypatch.setattr(records.time, "time", lambda: NOW_S)
    path = tmp_path / "l.sqlite3"

    def run(*entries):
        ledger = Ledger(path)
        for one in entries:
            ledger.record(one)
        ledger.close()
        assert ledger.written == len(entries)
        return path

    return run


def at(seconds_ago: float, **keys):
    return entry(at_s=NOW_S - seconds_ago, **keys)


def test_without_a_ledger_all_is_zero(tmp_path):
    shown = summary(tmp_path / "none.sqlite3")
    assert (shown["rows"], shown["savings"]["enough"], rows(tmp_path / "none.sqlite3")) == (0, False, [])


def test_counts_by_hour_day_and_agent(write):
    path = write(
        at(10, decision="ACT", agent="a"),
        at(20, decision="ANSWER", agent="a", applied=True, mode="enforce"),
        at(2 * 86_400, decision="ASK", agent="b"),
        at(40 * 86_400, decision="ASK", agent="old"),
    )
    shown = summary(path, days=14, now_s=NOW_S)
    assert shown["rows"] == 4
    assert shown["hour"] == {"ACT": 1, "ANSWER": 1, "ASK": 0, "DECLINE": 0, "applied": 1}
    assert [(day["ACT"], day["ANSWER"], day["ASK"]) for day in shown["per_day"]] == [(0, 0, 1), (1, 1, 0)]
    assert {one["agent"]: one["requests"] for one in shown["agents"]} == {"a": 2, "b": 1}


def test_leaks_and_back_offs_are_counted_by_what_withheld(write):
    path = write(
        *(at(9, reason="leaked_call", mode="enforce", calls=1, cause=cause) for cause in ("scored", "loop_guard", "")),
        *(at(9, reason="backed_off", decision="ACT", cause=cause) for cause in ("scored", "scored", "loop_guard")),
        at(9, reason="loop_guard", cause="loop_guard"),
    )
    (agent,) = summary(path, now_s=NOW_S)["agents"]
    assert [agent[key] for key in ("leaked", "loop_guard_leaked", "backed_off", "loop_guard_backed_off")] == [
        3,
        1,
        3,
        1,
    ]


def test_a_ledger_of_before_a_column_came_is_read_as_it_will_be_written_on(write):
    path = write(at(90, session=1, applied=True, mode="enforce"), at(80, session=1, decision="ACT", calls=1))
    with sqlite3.connect(path) as db:
        db.execute("ALTER TABLE decisions DROP COLUMN cause")
    before = summary(path, now_s=NOW_S), rows(path)
    assert [(row["cause"], bool(row["suspect"])) for row in before[1]] == [("", False), ("", True)]
    assert before[0]["agents"][0]["loop_guard_leaked"] == 0
    assert rows(path, where={"decision": "ACT"}, before=9)[0]["id"] == 2
    write(at(10, cause="loop_guard"))
    assert [row["cause"] for row in rows(path)] == ["loop_guard", "", ""]
    assert rows(path)[1:] == before[1]


def test_savings_are_counted_against_shadow(write):
    """Half of the shadow requests called, one in ten of the withheld did: 40 x 0.5 - 4 calls avoided."""
    shadow = [at(60, calls=i % 2, total_ms=3_000.0) for i in range(20)]
    withheld = [
        at(50, applied=True, mode="enforce", calls=int(i < 4), total_ms=1_000.0, tokens_withheld=100) for i in range(40)
    ]
    follow = [at(40, decision="ACT", last_role="tool", total_ms=2_000.0, request_bytes=8_000) for _ in range(3)]
    saved = summary(write(*shadow, *withheld, *follow), now_s=NOW_S)["savings"]
    assert saved["enough"]
    assert saved["calls"] == 16.0
    assert saved["seconds"] == 40 * 2.0 + 16 * 2.0
    assert saved["tokens"] == 40 * 100 + 16 * 2_000


def test_nothing_is_claimed_without_enough_shadow(write):
    shadow = [at(60, calls=1) for _ in range(SHADOW_MIN - 1)]
    withheld = [at(50, applied=True, mode="enforce") for _ in range(40)]
    saved = summary(write(*shadow, *withheld), now_s=NOW_S)["savings"]
    assert (saved["enough"], saved["calls"], saved["tokens"]) == (False, 0.0, 0)


def test_a_leaked_call_is_no_saving(write):
    """It was withheld, and the model called all the same: the request was paid for twice."""
    shadow = [at(60, calls=1) for _ in range(SHADOW_MIN)]
    leaked = [at(50, mode="enforce", reason="leaked_call", calls=1) for _ in range(10)]
    saved = summary(write(*shadow, *leaked), now_s=NOW_S)["savings"]
    assert saved["calls"] == 0.0
    assert saved["basis"][0]["withheld"] == 10


def test_what_follows_speaks_against_a_decision(write):
    path = write(
        at(100, session=1, applied=True, mode="enforce"),
        at(90, session=1, decision="ACT", calls=1),
        at(80, session=2, applied=True, mode="enforce"),
        at(70, session=2, decision="ACT", calls=0),
        at(60, session=3, mode="enforce", reason="leaked_call", calls=1),
        at(50, session=4, calls=1),
        at(40, session=5, calls=0),
        at(1_000, session=6, applied=True, mode="enforce"),
        at(30, session=6, decision="ACT", calls=1),
    )
    suspects = [bool(row["suspect"]) for row in reversed(rows(path))]
    assert suspects == [True, False, False, False, True, True, False, False, False]


@pytest.mark.parametrize("asked", [{"where": {"decision": "ANSWER"}}, {"before": 2}])
def test_what_follows_speaks_against_a_decision_that_is_shown_without_it(write, asked):
    """A filter or a page leaves out the request that followed; it was recorded all the same."""
    path = write(
        at(100, session=1, applied=True, mode="enforce"),
        at(95, session=2, decision="ACT", calls=1),
        at(90, session=1, decision="ACT", calls=1),
        at(80, session=1, decision="ACT", calls=0),
    )
    assert [row["suspect"] for row in rows(path, **asked)] == ["the next turn of the same dialogue called a tool"]


def test_days_are_those_of_the_clock_on_the_wall(write, monkeypatch):
    """The page shows local times; a decision just before midnight is today's there too."""
    monkeypatch.setenv("TZ", "UTC+7")  # POSIX: seven hours behind; NOW_S is 08:00 UTC of 15 January 2027
    time.tzset()
    try:
        path = write(at(2 * 3_600), at(0))
        assert [day["day"] for day in summary(path, now_s=NOW_S)["per_day"]] == ["2027-01-14", "2027-01-15"]
    finally:
        monkeypatch.undo()
        time.tzset()


def test_rows_are_filtered_and_paged(write):
    path = write(*(at(100 - i, agent="a" if i % 2 else "b", messages=i) for i in range(10)))
    assert [row["messages"] for row in rows(path, where={"agent": "a"}, limit=2)] == [9, 7]
    last = rows(path, where={"agent": "a"}, limit=2)[-1]["id"]
    assert [row["messages"] for row in rows(path, where={"agent": "a"}, before=last)] == [5, 3, 1]


@pytest.mark.parametrize("name", ["id; DROP TABLE decisions", "1=1 OR agent", "rowid"])
def test_no_other_word_reaches_the_query(write, name):
    path = write(at(1))
    assert len(rows(path, where={name: "x"})) == 1
    assert rows(path, where={"agent": "' OR 1=1 --"}) == []
