"""Decisions on disk: SQLite in WAL mode, written by a thread of its own, bounded in size and age.

A request pays for one append to a deque. Whatever the disk does (full, locked, read-only, a broken file), entries are
dropped and counted, and no request notices. Each batch is one transaction, so that a kill leaves whole batches; WAL
with ``synchronous=NORMAL`` may lose the last ones at a power cut, and stays consistent. Age is counted against the
entries themselves, not against a clock that may have leapt.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import sqlite3
import stat
import threading
import time
from collections import deque
from pathlib import Path

import msgspec
import platformdirs

from whetherman_edge.ledger.entry import Entry

log = logging.getLogger(__name__)

NAME = "ledger.sqlite3"
SCHEMA_VERSION = 1
# About 250 bytes an entry: a quarter of a million decisions, which is months of one person's agent.
BYTES_MAX = 64 << 20
# Broken ledgers set aside and kept.
BROKEN_MAX = 3
PAGE_BYTES = 4096
AGE_DAYS_MAX = 90
# A clock that is set forward by mistake makes all of a ledger look old, and is set right within hours mostly, by NTP or
# its owner. So age is counted against the last entry that is this old by now, and against no later time.
CLOCK_TRUSTED_AFTER_S = 86_400.0
# When the file is this full, the oldest tenth goes; below the hard stop, so that the delete itself still has room.
FULL_SHARE = 0.8
PRUNED_SHARE = 0.1
# Two seconds of a load that no laptop has; beyond it entries are dropped.
QUEUE_MAX = 8_192
BATCH_MAX = 2_048
# One wake-up and one transaction for all that came in this time.
FLUSH_EVERY_S = 0.5
PRUNE_EVERY_S = 300.0
RETRY_AFTER_S = 15.0
BUSY_TIMEOUT_S = 1.0
CLOSE_TIMEOUT_S = 5.0

COLUMNS = Entry.__struct_fields__
_TYPES = {"float": "REAL", "int": "INTEGER", "bool": "INTEGER", "str": "TEXT"}
# Columns that came later, with what earlier rows have in them. With that default an earlier version can go on with such
# a file, so the schema's number stays.
ADDED = {"cause": "''"}
_COLUMN = {name: f"{name} {_TYPES[Entry.__annotations__[name]]} NOT NULL" for name in COLUMNS}
_COLUMN |= {name: f"{_COLUMN[name]} DEFAULT {value}" for name, value in ADDED.items()}
_TABLE = ", ".join(_COLUMN.values())
_CREATE = (
    f"CREATE TABLE IF NOT EXISTS decisions (id INTEGER PRIMARY KEY, {_TABLE})",
    "CREATE INDEX IF NOT EXISTS decisions_at ON decisions (at_s)",
)
_DELETE_OLD = (
    "DELETE FROM decisions WHERE at_s < :trusted_after_s - :age_s_max + "
    # The last one written, as the latest may be of an earlier leap. The plus keeps SQLite from sorting all of them.
    "(SELECT at_s FROM decisions WHERE +at_s <= :now_s - :trusted_after_s ORDER BY id DESC LIMIT 1)"
)
_INSERT = f"INSERT INTO decisions ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))})"


class Unsafe(Exception):
    """The ledger's path is a link, another kind of file, or belongs to or is writable by somebody else."""


def default_path() -> Path:
    """In the folder that systemd gives the service (``StateDirectory=``), else in the user's state folder."""
    folder = os.environ.get("STATE_DIRECTORY", "").split(":")[0]
    return (Path(folder) if folder else Path(platformdirs.user_state_dir("whetherman"))) / NAME


class Ledger:
    """Takes entries from the event loop and writes them from its thread, which starts with the first one.

    ``written`` and ``dropped`` (by cause: queue, storage) only grow.
    """

    def __init__(self, path: Path | None = None, *, bytes_max: int = BYTES_MAX, age_days_max: float = AGE_DAYS_MAX):
        self.path = default_path() if path is None else path
        self.written = 0
        self.dropped = {"queue": 0, "storage": 0}
        self._bytes_max = bytes_max
        self._age_s_max = age_days_max * 86_400.0
        self._queue: deque[Entry] = deque()
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._flushed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._db: sqlite3.Connection | None = None
        self._retry_at_s = 0.0
        self._prune_at_s = 0.0

    def record(self, entry: Entry) -> None:
        """Queue an entry; never waits, never raises."""
        if len(self._queue) >= QUEUE_MAX:
            self.dropped["queue"] += 1
            return
        self._queue.append(entry)
        if not self._wake.is_set():
            self._wake.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Write what is queued and end the thread; blocks for CLOSE_TIMEOUT_S at most."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)

    def settled(self, timeout_s: float) -> bool:
        """Wait until everything recorded so far is written or dropped."""
        with self._flushed:
            return self._flushed.wait_for(lambda: not self._queue, timeout_s)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.wait()
            self._stop.wait(FLUSH_EVERY_S)
            self._wake.clear()
            self._flush()
        self._flush()
        self._disconnect()

    def _flush(self) -> None:
        """Write all that is queued, a batch at a time; a batch leaves the queue once it is written or given up."""
        while self._queue:
            batch = [self._queue[i] for i in range(min(len(self._queue), BATCH_MAX))]
            try:
                self._write(batch)
                self.written += len(batch)
            except Exception as exc:  # whatever it is, the thread lives on
                self._give_up(batch, exc)
            for _ in batch:
                self._queue.popleft()
            try:
                self._tidy()
            except Exception as exc:  # what was written stays written
                self._give_up([], exc)
        with self._flushed:
            self._flushed.notify_all()

    def _write(self, batch: list[Entry]) -> None:
        if self._db is None:
            if time.monotonic() < self._retry_at_s:
                raise OSError("the ledger is closed for a while")
            self._db = open_database(self.path, self._bytes_max)
        with self._db:  # commits, or rolls back
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany(_INSERT, map(msgspec.structs.astuple, batch))

    def _tidy(self) -> None:
        """Remove what is too old or too much, now and then."""
        if self._db is not None and (time.monotonic() >= self._prune_at_s or self._fullness() > FULL_SHARE):
            self._prune_at_s = time.monotonic() + PRUNE_EVERY_S
            self._prune()

    def _fullness(self) -> float:
        assert self._db is not None
        pages = int(self._db.execute("PRAGMA page_count").fetchone()[0])
        free = int(self._db.execute("PRAGMA freelist_count").fetchone()[0])
        return (pages - free) * PAGE_BYTES / self._bytes_max

    def _prune(self) -> None:
        assert self._db is not None
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            times = {"now_s": time.time(), "trusted_after_s": CLOCK_TRUSTED_AFTER_S, "age_s_max": self._age_s_max}
            self._db.execute(_DELETE_OLD, times)
            if self._fullness() > FULL_SHARE:
                low, high = self._db.execute("SELECT min(id), max(id) FROM decisions").fetchone()
                if low is not None:
                    cut = low + max(1, int((high - low) * PRUNED_SHARE))
                    self._db.execute("DELETE FROM decisions WHERE id < ?", (cut,))

    def _give_up(self, batch: list[Entry], exc: Exception) -> None:
        self.dropped["storage"] += len(batch)
        if time.monotonic() >= self._retry_at_s:  # said once a pause, not once a batch
            hint = f"detail={str(exc)!r}" if isinstance(exc, Unsafe) else "hint=decisions_are_served_but_not_recorded"
            log.warning("event=ledger_dropped error=%s path=%s %s", type(exc).__name__, self.path, hint)
            self._retry_at_s = time.monotonic() + RETRY_AFTER_S
        if self._db is not None and isinstance(exc, sqlite3.DatabaseError) and _is_broken(exc):
            self._disconnect()
            with contextlib.suppress(OSError):  # a folder that may not be written to: tried again after the pause
                set_aside(self.path)
                self._retry_at_s = 0.0
        elif not isinstance(exc, sqlite3.OperationalError):
            self._disconnect()

    def _disconnect(self) -> None:
        if self._db is not None:
            with contextlib.suppress(sqlite3.Error):
                self._db.close()
            self._db = None


def open_database(path: Path, bytes_max: int) -> sqlite3.Connection:
    """Open or create the ledger for writing, private to this user.

    A file that is no ledger is set aside, never overwritten. Raises sqlite3.Error, OSError, or Unsafe.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(path)
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    try:
        return _connected(path, bytes_max)
    except sqlite3.DatabaseError as exc:
        if not _is_broken(exc):
            raise
        set_aside(path)
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        return _connected(path, bytes_max)


def check_private(path: Path) -> None:
    """Raise Unsafe unless ``path`` is missing, or a plain file of ours that nobody else may write."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISREG(found.st_mode):
        raise Unsafe(f"{path}: expected a plain file, got a link or another kind; remove it")
    if found.st_uid != os.geteuid():
        raise Unsafe(f"{path}: expected a file of user {os.geteuid()}, got one of user {found.st_uid}; chown it")
    if found.st_mode & 0o022:
        raise Unsafe(f"{path}: expected a file that only its owner may write; chmod 600 it")


def set_aside(path: Path) -> None:
    """Rename a broken ledger, drop the journal that belongs to it, and keep the last few set aside."""
    aside = path.with_name(f"{path.name}.broken-{int(time.time())}")
    n = 1
    while aside.exists():
        n += 1
        aside = path.with_name(f"{path.name}.broken-{int(time.time())}-{n}")
    os.replace(path, aside)
    for ending in ("-wal", "-shm"):
        path.with_name(path.name + ending).unlink(missing_ok=True)
    kept = sorted(path.parent.glob(f"{glob.escape(path.name)}.broken-*"), key=lambda one: one.lstat().st_mtime_ns)
    for old in kept[:-BROKEN_MAX]:
        # Each is as large as a ledger may be: a disk that breaks one a day must not fill up with them.
        old.unlink(missing_ok=True)
    log.warning("event=ledger_broken path=%s hint=set_aside_and_started_anew", path)


def _connected(path: Path, bytes_max: int) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    try:
        db.execute(f"PRAGMA page_size={PAGE_BYTES}")
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        db.execute(f"PRAGMA journal_size_limit={4 << 20}")
        db.execute(f"PRAGMA max_page_count={max(bytes_max // PAGE_BYTES, 16)}")
        version = int(db.execute("PRAGMA user_version").fetchone()[0])
        if version not in (0, SCHEMA_VERSION):
            raise sqlite3.NotSupportedError(f"ledger of schema {version}, expected {SCHEMA_VERSION}")
        for statement in _CREATE:
            db.execute(statement)
        if missing_columns(db):
            db.execute("BEGIN IMMEDIATE")  # another daemon of this user may be at it
            for name in missing_columns(db):
                db.execute(f"ALTER TABLE decisions ADD COLUMN {_COLUMN[name]}")
            db.execute("COMMIT")
        db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
    except BaseException:
        db.close()
        raise
    return db


def missing_columns(db: sqlite3.Connection) -> list[str]:
    """Names of ADDED that a ledger of before does not have."""
    present = {row[1] for row in db.execute("PRAGMA table_info(decisions)")}
    return [name for name in ADDED if name not in present]


def _is_broken(exc: sqlite3.DatabaseError) -> bool:
    """Not a database, malformed, or of another schema: waiting does not mend it."""
    code = getattr(exc, "sqlite_errorcode", 0) & 0xFF  # without what says more, such as which part is corrupt
    return code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT) or isinstance(exc, sqlite3.NotSupportedError)
