"""The ledger's writer: bounds, faults of the disk, kills, who may read it."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
import time

import msgspec
import pytest

from tests.fakes.upstream import PATIENCE_S
from tests.ledger.entries import entry
from whetherman_edge.ledger import records
from whetherman_edge.ledger.records import COLUMNS, Ledger, default_path


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(records, "FLUSH_EVERY_S", 0.0)


def stored(path) -> list[tuple]:
    with sqlite3.connect(path) as db:
        return db.execute(f"SELECT {', '.join(COLUMNS)} FROM decisions ORDER BY id").fetchall()


def test_entries_come_back_as_they_went_in(tmp_path):
    ledger = Ledger(tmp_path / "deep" / "l.sqlite3")
    given = [entry(agent="qwen", applied=i % 2 == 0, confidence=0.1 * i) for i in range(5)]
    for one in given:
        ledger.record(one)
    ledger.close()
    assert stored(ledger.path) == [msgspec.structs.astuple(one) for one in given]
    assert (ledger.written, ledger.dropped) == (5, {"queue": 0, "storage": 0})
    assert stat.S_IMODE(ledger.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(ledger.path.parent.stat().st_mode) == 0o700
    with sqlite3.connect(ledger.path) as db:
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_nothing_is_made_before_the_first_decision(tmp_path):
    ledger = Ledger(tmp_path / "l.sqlite3")
    ledger.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["link", "folder", "writable_by_all", "parent_is_a_file"])
def test_an_unsafe_path_is_left_alone(tmp_path, kind):
    path = tmp_path / "l.sqlite3"
    target = tmp_path / "precious"
    target.write_text("precious")
    if kind == "link":
        path.symlink_to(target)
    elif kind == "folder":
        path.mkdir()
    elif kind == "writable_by_all":
        path.touch()
        path.chmod(0o666)
    else:
        path = target / "l.sqlite3"
    ledger = Ledger(path)
    ledger.record(entry())
    ledger.close()
    assert (ledger.written, ledger.dropped["storage"]) == (0, 1)
    assert target.read_text() == "precious"


def test_a_dangling_link_is_not_followed(tmp_path):
    (tmp_path / "l.sqlite3").symlink_to(tmp_path / "elsewhere")
    ledger = Ledger(tmp_path / "l.sqlite3")
    ledger.record(entry())
    ledger.close()
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("content", [b"no database at all, only text. " * 40, b"SQLite format 3\0" + b"\xff" * 8000])
def test_a_broken_ledger_is_set_aside_not_overwritten(tmp_path, content):
    path = tmp_path / "l.sqlite3"
    path.write_bytes(content)
    path.chmod(0o600)
    ledger = Ledger(path)
    ledger.record(entry())
    ledger.record(entry())
    ledger.close()
    assert ledger.written + ledger.dropped["storage"] == 2
    assert [one.read_bytes() for one in tmp_path.glob("l.sqlite3.broken-*")] == [content]


def test_what_was_written_behind_the_file_is_set_aside_with_it(tmp_path):
    """A daemon that was killed left its last decisions in the journal; a newer version's ledger is whole with it."""
    path = tmp_path / "l.sqlite3"
    db = records.open_database(path, records.BYTES_MAX)
    db.execute("PRAGMA user_version=99")
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.execute("CREATE TABLE later (x)")
    journal = path.with_name(path.name + "-wal").read_bytes()
    assert journal
    killed = tmp_path / "killed"
    killed.mkdir()
    for name in (path.name, path.name + "-wal"):
        (killed / name).write_bytes((tmp_path / name).read_bytes())
        (killed / name).chmod(0o600)
    db.close()
    ledger = Ledger(killed / path.name)
    ledger.record(entry())
    ledger.close()
    assert ledger.written == 1
    (aside,) = killed.glob("l.sqlite3.broken-*[0-9]")
    with sqlite3.connect(aside) as kept:
        assert kept.execute("SELECT count(*) FROM sqlite_master WHERE name = 'later'").fetchone() == (1,)


def test_a_ledger_of_before_a_column_came_is_gone_on_with_by_both(tmp_path):
    """Nothing is set aside: neither the earlier version's file by this one, nor this one's by the earlier."""
    path = tmp_path / "l.sqlite3"
    names = [name for name in COLUMNS if name not in records.ADDED]
    earlier = f"INSERT INTO decisions ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"
    values = [getattr(entry(), name) for name in names]
    with sqlite3.connect(path) as db:
        db.execute(f"CREATE TABLE decisions (id INTEGER PRIMARY KEY, {', '.join(names)})")
        db.execute(f"PRAGMA user_version={records.SCHEMA_VERSION}")
        db.execute(earlier, values)
    path.chmod(0o600)
    for _ in range(2):
        ledger = Ledger(path)
        ledger.record(entry(cause="loop_guard"))
        ledger.close()
        assert (ledger.written, ledger.dropped["storage"]) == (1, 0)
    with sqlite3.connect(path) as db:
        db.execute(earlier, values)
        assert db.execute("PRAGMA user_version").fetchone() == (records.SCHEMA_VERSION,)
    assert [row[COLUMNS.index("cause")] for row in stored(path)] == ["", "loop_guard", "loop_guard", ""]
    assert list(tmp_path.glob("*.broken-*")) == []


def test_two_broken_ledgers_in_a_second_are_both_kept(tmp_path):
    path = tmp_path / "l.sqlite3"
    for content in (b"one", b"two"):
        path.write_bytes(content)
        records.set_aside(path)
    assert sorted(one.read_bytes() for one in tmp_path.glob("l.sqlite3.broken-*")) == [b"one", b"two"]


def test_the_last_broken_ledgers_are_kept_and_no_others(tmp_path):
    """A disk that breaks one a day does not fill up with them; a neighbour's files stay."""
    path = tmp_path / "l[1].sqlite3"
    neighbour = tmp_path / "l1.sqlite3.broken-7"
    neighbour.write_bytes(b"other")
    for n in range(records.BROKEN_MAX + 2):
        path.write_bytes(b"%d" % n)
        os.utime(path, ns=(n, n))
        records.set_aside(path)
    aside = [one for one in tmp_path.iterdir() if one != neighbour]
    assert sorted(one.read_bytes() for one in aside) == [b"2", b"3", b"4"]
    assert neighbour.exists()


def test_an_index_that_does_not_fit_its_table_is_broken(tmp_path, monkeypatch):
    """Entries can be written, but none can be deleted: the ledger would grow to its end and stay there."""
    monkeypatch.setattr(records, "FULL_SHARE", 0.0)
    path = tmp_path / "l.sqlite3"
    with records.open_database(path, records.BYTES_MAX) as db:
        db.execute(records._INSERT, msgspec.structs.astuple(entry(at_s=1.0)))
        db.execute("CREATE INDEX empty ON decisions (at_s) WHERE 0")
        db.execute("PRAGMA writable_schema=ON")
        root = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'empty'").fetchone()[0]
        db.execute("UPDATE sqlite_master SET rootpage = ? WHERE name = 'decisions_at'", (root,))
        db.execute("DELETE FROM sqlite_master WHERE name = 'empty'")
    db.close()
    ledger = Ledger(path)
    ledger.record(entry())
    assert ledger.settled(PATIENCE_S)
    ledger.record(entry())
    ledger.close()
    assert (ledger.written, ledger.dropped["storage"]) == (2, 0)
    assert len(list(tmp_path.glob("l.sqlite3.broken-*"))) == 1


def test_what_is_written_counts_as_written_when_the_old_cannot_be_removed(tmp_path, monkeypatch):
    def full(_ledger):
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(Ledger, "_prune", full)
    ledger = Ledger(tmp_path / "l.sqlite3")
    ledger.record(entry())
    assert ledger.settled(PATIENCE_S)
    ledger.close()
    assert (ledger.written, ledger.dropped["storage"], len(stored(ledger.path))) == (1, 0, 1)


def test_a_locked_ledger_drops_and_recovers(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "BUSY_TIMEOUT_S", 0.01)
    ledger = Ledger(tmp_path / "l.sqlite3")
    ledger.record(entry())
    assert ledger.settled(PATIENCE_S)
    other = sqlite3.connect(ledger.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    ledger.record(entry())
    assert ledger.settled(PATIENCE_S)
    other.execute("ROLLBACK")
    other.close()
    ledger.record(entry())
    ledger.close()
    assert (ledger.written, ledger.dropped["storage"]) == (2, 1)


def test_a_full_disk_drops_and_counts(tmp_path, monkeypatch):
    """max_page_count gives the same SQLITE_FULL as a file system without room."""
    monkeypatch.setattr(records, "FULL_SHARE", 1e9)  # no pruning
    ledger = Ledger(tmp_path / "l.sqlite3", bytes_max=1)  # 16 pages
    for _ in range(2_000):
        ledger.record(entry(text="x" * 200))
    ledger.close()
    assert ledger.dropped["storage"] > 0
    assert ledger.written + ledger.dropped["storage"] == 2_000
    assert len(stored(ledger.path)) == ledger.written


def test_what_cannot_be_stored_costs_one_entry(tmp_path):
    ledger = Ledger(tmp_path / "l.sqlite3")
    for agent in ("qwen", "\ud800", "gemma"):
        ledger.record(entry(agent=agent))
        assert ledger.settled(PATIENCE_S)
    ledger.close()
    assert (ledger.written, ledger.dropped["storage"]) == (1, 2)  # after a fault it rests


def test_a_broken_ledger_that_cannot_be_set_aside_is_tried_again(tmp_path, monkeypatch):
    def broken(_ledger, _batch):
        raise sqlite3.NotSupportedError("not a ledger")

    def read_only(_path):
        raise PermissionError("read-only folder")

    ledger = Ledger(tmp_path / "l.sqlite3")
    ledger.record(entry())
    assert ledger.settled(PATIENCE_S)
    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "_write", broken)
        patched.setattr(records, "set_aside", read_only)
        patched.setattr(records, "RETRY_AFTER_S", 0.0)
        ledger.record(entry())
        assert ledger.settled(PATIENCE_S)
    ledger.record(entry())
    ledger.close()
    assert (ledger.written, ledger.dropped["storage"], len(stored(ledger.path))) == (2, 1, 2)


def test_the_size_is_bounded_and_the_newest_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "BATCH_MAX", 50)
    bytes_max = 400_000
    ledger = Ledger(tmp_path / "l.sqlite3", bytes_max=bytes_max)
    n = 4_000
    for i in range(n):
        ledger.record(entry(messages=i))
    ledger.close()
    kept = [row[COLUMNS.index("messages")] for row in stored(ledger.path)]
    assert ledger.path.stat().st_size <= bytes_max
    assert 200 < len(kept) < n
    assert kept == list(range(n - len(kept), n))


def test_old_entries_go(tmp_path):
    ledger = Ledger(tmp_path / "l.sqlite3", age_days_max=1.0)
    for days in (2.1, 1.05):
        ledger.record(entry(at_s=time.time() - days * 86_400.0))
    ledger.close()
    ledger = Ledger(ledger.path, age_days_max=1.0)
    ledger.record(entry(messages=7))
    ledger.close()
    assert [row[COLUMNS.index("messages")] for row in stored(ledger.path)] == [2, 7]


NOW_S = 1_800_000_000.0


def kept_days(path, monkeypatch, *days: float) -> list[float]:
    """The days of the entries that are left after a daemon was started on each of these days and wrote one."""
    for day in days:
        monkeypatch.setattr(records.time, "time", lambda day=day: NOW_S + day * 86_400.0)
        ledger = Ledger(path)
        ledger.record(entry(at_s=NOW_S + day * 86_400.0))
        ledger.close()
        assert ledger.dropped == {"queue": 0, "storage": 0}
    return [round((row[COLUMNS.index("at_s")] - NOW_S) / 86_400.0, 3) for row in stored(path)]


def test_of_days_of_use_the_last_ninety_stay(tmp_path, monkeypatch):
    assert kept_days(tmp_path / "l.sqlite3", monkeypatch, *range(101)) == list(range(10, 101))


def test_a_clock_that_leaps_takes_nothing_with_it(tmp_path, monkeypatch):
    """Set forward by more than any entry may be old, it is set right within hours, and may leap again."""
    path = tmp_path / "l.sqlite3"
    days = [0, 10, 20, 30, 200, 30.1, 200.1, 200.4, 30.2, 202, 30.3, 10_000, 30.4]
    assert kept_days(path, monkeypatch, *days) == days


def test_a_clock_that_stands_for_a_day_is_the_time(tmp_path, monkeypatch):
    """Somebody was away for months: what is too old goes, a day after the first entry."""
    path = tmp_path / "l.sqlite3"
    assert kept_days(path, monkeypatch, 0, 10, 30, 200, 200.9) == [0, 10, 30, 200, 200.9]
    assert kept_days(path, monkeypatch, 201.1) == [200, 200.9, 201.1]


def test_a_clock_that_was_set_back_takes_nothing_with_it(tmp_path, monkeypatch):
    days = [0, 10, 30, -20_000, 31]
    assert kept_days(tmp_path / "l.sqlite3", monkeypatch, *days) == days


def test_a_full_queue_drops_and_never_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "QUEUE_MAX", 3)
    monkeypatch.setattr(records.threading.Thread, "start", lambda _thread: None)  # a writer that does not get to run
    ledger = Ledger(tmp_path / "l.sqlite3")
    for _ in range(5):
        ledger.record(entry())
    assert ledger.dropped["queue"] == 2


KILLED = """
import sys
from pathlib import Path
from tests.ledger.entries import entry
from whetherman_edge.ledger import records
records.FLUSH_EVERY_S = 0.0
ledger = records.Ledger(Path(sys.argv[1]))
told = False
while True:
    ledger.record(entry())
    ledger.settled(10)
    if ledger.written > 200 and not told:
        print("writing", flush=True)
        told = True
"""


def test_a_kill_leaves_a_consistent_ledger(tmp_path):
    path = tmp_path / "l.sqlite3"
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": "."}
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"writing\n"
        process.send_signal(signal.SIGKILL)
        process.wait(PATIENCE_S)
        process.stdout.close()
        with sqlite3.connect(path) as db:
            assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert len(stored(path)) > 600
    ledger = Ledger(path)
    ledger.record(entry())
    ledger.close()
    assert ledger.written == 1


def test_o03_the_folder_that_systemd_gives_comes_first(monkeypatch, tmp_path):
    monkeypatch.setenv("STATE_DIRECTORY", f"{tmp_path}/one:{tmp_path}/two")
    assert default_path() == tmp_path / "one" / "ledger.sqlite3"
