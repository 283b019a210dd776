"""The daemon under a supervisor that holds its listening socket, reads its log, and takes its disk away."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from tests.fakes.client import once
from tests.isolated.traffic import SECRET
from whetherman_edge.gate.verdict import LABELS
from whetherman_edge.ledger import records

ROOT = Path(__file__).resolve().parents[2]
DRAIN_S = 60.0
# More than the ledger may take (64 MB) and its journal.
DISK_BYTES = 96 << 20
# From when the ledger tries a disk again (15 s), with its flush and the next look at the metrics.
RETRY_S = records.RETRY_AFTER_S + 5.0
KEY = "sk-KEY"
BAD_LINES_MAX = 20
# Errors that the run provokes.
_PROVOKED = ("event=reload_refused", "event=backbone")

# Becomes the daemon with the socket on descriptor 3, as systemd does it: LISTEN_PID is the process's own number.
_PASS_ON = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ.update(LISTEN_FDS="1", LISTEN_PID=str(os.getpid()))
os.execv(sys.executable, [sys.executable, "-m", "tests.isolated.faulty_daemon", "serve", *sys.argv[2:]])
"""


class Supervised:
    """One daemon at a time, several in a row.

    ``life``: their number. ``kills``: (from, to) of the times around a kill -9. ``bad_lines``: of the log.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._state = folder / "state"
        self._state.mkdir()
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(4096)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.disk = "tmpfs" if self._mounted() else "RLIMIT_FSIZE"
        self.process: subprocess.Popen[str] | None = None
        self.life = 0
        self.ready = asyncio.Event()
        self.kills: list[tuple[float, float]] = []
        self.fds_at_start = 0
        self.bad_lines: list[str] = []
        self.events: Counter[str] = Counter()
        self.ledger_totals: Counter[str] = Counter()
        self.recorded_again = True
        self._freed: tuple[float, int, float] | None = None
        self._written = 0.0
        self._id_before = 0
        self._reader: threading.Thread | None = None

    def configure(self, upstream: str, settings: str) -> None:
        """Write the configuration file, whole or not at all."""
        new = self._folder / "w.toml.new"
        new.write_text(f'upstream = "{upstream}"\nupstream_kind = "openai"\nengine = "gemma"\n{settings}\n')
        new.replace(self._folder / "w.toml")

    async def start(self) -> None:
        """The next one; returns when it serves."""
        self.life += 1
        self._written = 0.0
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("WHETHERMAN_", "XDG_"))}
        self.process = subprocess.Popen(  # noqa: ASYNC220 - returns at once
            [sys.executable, "-c", _PASS_ON, str(self._listener.fileno()), "--config", str(self._folder / "w.toml")],
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=[self._listener.fileno()],
            cwd=ROOT,
            env={**clean, "HOME": str(self._folder), "XDG_STATE_HOME": str(self._state)},
        )
        loop = asyncio.get_running_loop()
        self._reader = threading.Thread(target=self._read, args=(self.process, loop), daemon=True)
        self._reader.start()
        async with asyncio.timeout(DRAIN_S * 2):
            await self.ready.wait()
        if self.kills and self.kills[-1][1] == float("inf"):
            self.kills[-1] = (self.kills[-1][0], time.monotonic())
        self.fds_at_start = (self.looked_at() or (0, 0))[1]

    async def terminate(self) -> None:
        """SIGTERM; returns when it has gone."""
        await self._end(signal.SIGTERM)

    async def kill(self) -> None:
        """SIGKILL; what it was doing is lost."""
        self.kills.append((time.monotonic(), float("inf")))
        await self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Whatever happened: no process and no mount is left."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self._reader is not None:
            self._reader.join()
        self._listener.close()
        if self.disk == "tmpfs":
            subprocess.run(["umount", str(self._state)], check=True)

    async def reload(self, event: str) -> bool:
        """SIGHUP; True once the log says ``event``, False when the daemon ended first."""
        process, before = self.process, self.events[event]
        assert process is not None
        process.send_signal(signal.SIGHUP)
        async with asyncio.timeout(DRAIN_S):
            while self.events[event] == before:
                if process.poll() is not None or self.process is not process:
                    return False
                await asyncio.sleep(0.02)
        return True

    async def fail_backbone(self, *, wedge: bool) -> bool:
        """Kill the backbone's worker, or stop it for two seconds; False while no daemon is up."""
        process = self.process
        if not self.ready.is_set() or process is None:
            return False
        process.send_signal(signal.SIGUSR2 if wedge else signal.SIGUSR1)
        if wedge:
            await asyncio.sleep(2.0)
            if self.process is process:
                process.send_signal(signal.SIGUSR2)
        return True

    def fill_disk(self) -> None:
        """From now on not a byte more can be written where the ledger is."""
        self.recorded_again = False
        self._freed = None
        if self.disk != "tmpfs":
            assert self.process is not None
            self._limit(self.process.pid, 0)
            return
        with contextlib.suppress(OSError), (self._state / "filler").open("wb", buffering=0) as filler:
            while filler.write(b"\0" * 4096):
                pass

    def free_disk(self) -> None:
        """Undo that."""
        if self.disk == "tmpfs":
            (self._state / "filler").unlink(missing_ok=True)
        elif self.process is not None and self.process.poll() is None:
            self._limit(self.process.pid, resource.RLIM_INFINITY)
        self._freed = (time.monotonic(), self.life, self._written)

    def looked_at(self) -> tuple[int, int] | None:
        """Resident memory in KB and the number of descriptors; None when it has just gone."""
        assert self.process is not None
        proc = Path("/proc") / str(self.process.pid)
        try:
            status = (proc / "status").read_text()
            rss_kb = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))
            return rss_kb, len(list((proc / "fd").iterdir()))
        except (OSError, StopIteration):
            return None

    async def read_metrics(self) -> None:
        """What the ledger says that it wrote and dropped."""
        life = self.life
        try:
            text = (await once(self.url, "GET", "/metrics")).body.decode()
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            return  # it is being killed
        if life != self.life:
            return
        found: Counter[str] = Counter()
        for line in text.splitlines():
            name, _, value = line.rpartition(" ")
            if name.startswith(("whetherman_ledger_written_total", "whetherman_ledger_dropped_total")):
                found[name.removeprefix("whetherman_ledger_")] += int(float(value))
        self._written = found["written_total"]
        self.ledger_totals["seen_written_in_this_life"] = int(self._written)
        for name, value in found.items():
            if name.startswith("dropped") and value:
                self.ledger_totals[f"life_{self.life}_{name}"] = value
        if self._freed is not None:
            _, freed_life, written = self._freed
            self.recorded_again |= self._written > (written if freed_life == life else 0.0)
            self.recorded_again |= time.monotonic() - self._freed[0] < RETRY_S  # it need not have tried yet

    def ledger_faults(self) -> list[str]:
        """What is wrong with the ledger, now that nobody writes it."""
        path = self._state / "whetherman" / records.NAME
        if not path.exists():
            return ["there is none"]
        self.free_disk()
        faults = []
        with contextlib.closing(sqlite3.connect(path)) as db:
            if (said := db.execute("PRAGMA integrity_check").fetchone()) != ("ok",):
                faults.append(f"integrity_check says {said}")
            n, last = db.execute("SELECT count(*), coalesce(max(id), 0) FROM decisions").fetchone()
            odd = db.execute(
                f"SELECT count(*) FROM decisions WHERE at_s < 1e9 OR decision NOT IN {LABELS!r}"
            ).fetchone()[0]
        if odd:
            faults.append(f"{odd} of {n} rows are no decisions")
        if last - self._id_before < self._written:
            faults.append(f"{self._written:.0f} were written in this life, {last - self._id_before} are there")
        if list(path.parent.glob("*.broken-*")):
            faults.append("it was set aside as broken")
        self.ledger_totals["rows"] = n
        self.ledger_totals["highest_id"] = self._id_before = last
        return faults

    async def _end(self, number: signal.Signals) -> None:
        process = self.process
        assert process is not None
        assert self._reader is not None
        self.ready.clear()
        process.send_signal(number)
        code = await asyncio.to_thread(process.wait, DRAIN_S)
        await asyncio.to_thread(self._reader.join)
        if code != (0 if number == signal.SIGTERM else -number):
            self.bad_lines.append(f"exit code {code} after {number.name}")

    def _read(self, process: subprocess.Popen[str], loop: asyncio.AbstractEventLoop) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            event = line.partition(" event=")[2].split(" ", 1)[0].strip()
            self.events[event] += 1
            if event == "listening":
                loop.call_soon_threadsafe(self.ready.set)
            wrong = " level=error " in line and not any(part in line for part in _PROVOKED)
            if (wrong or not event or SECRET in line or KEY in line) and len(self.bad_lines) < BAD_LINES_MAX:
                self.bad_lines.append(line.strip()[:300])
        process.stderr.close()

    def _mounted(self) -> bool:
        """A small disk of its own, where this user may have one."""
        if os.geteuid() != 0:
            return False
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(self._state)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def _limit(self, pid: int, size: int) -> None:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
