"""``bench socket``: one decision over the decision socket and over ``POST /v1/systemone``, same daemon, same questions.

The daemon runs as ``serve`` runs it, in a process of its own; this process is the client, with raw sockets and prepared
requests, so that little but the daemon is measured. One request at a time gives latency, eight connections with one
request in flight each give requests/s. ``in process`` is the same routing without any socket: the difference to a row
is what the way there and back costs. The daemon's own CPU time per request tells more than the clock on a busy machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from whetherman_edge.bench import workload
from whetherman_edge.errors import EnvironmentFault

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]

REQUESTS = 3_000
WARM_REQUESTS = 300
CONNECTIONS = 8
N_OPTIONS = 10
RECEIVE_BYTES = 1 << 16
PATIENCE_S = 60.0

QUERIES = (
    "will it rain in Oslo tomorrow",
    "send the invoice from last week to Priya",
    "find my notes about the budget meeting",
    "which song is playing right now",
    "list open tickets for the printer",
    "create a calendar entry for the dentist",
    "export all contacts to a file",
    "how long is the route to the airport",
)

Whole = Callable[[bytes], bool]
Connect = Callable[[], socket.socket]


def register(verbs: Verbs) -> None:
    """Add ``bench socket``."""
    parser = verbs.add_parser("socket", help="decision socket and /v1/systemone: round trip and requests/s")
    parser.add_argument("--json", metavar="FILE", help="also write all figures to FILE")
    parser.add_argument("--requests", type=int, default=REQUESTS, metavar="N", help="requests of each row")
    parser.set_defaults(run=_run)


def _run(parsed: argparse.Namespace) -> int:
    options = {tool["name"]: tool["description"] for tool in (workload.tool(n)["function"] for n in range(N_OPTIONS))}
    with tempfile.TemporaryDirectory() as folder, _daemon(folder) as (pid, port, path):

        def row(connect: Connect, requests: list[bytes], whole: Whole) -> dict[str, Any]:
            return _row(connect, requests, whole, parsed.requests, pid)

        rows = {
            "in process, route": _in_process(options, parsed.requests),
            "socket, ping": row(_unix(path), _frames([{"op": "ping"}]), _whole_frame),
            "socket, route": row(_unix(path), _frames(_routes(options)), _whole_frame),
            "socket, decide": row(_unix(path), _frames(_decides()), _whole_frame),
            "HTTP /v1/systemone": row(_tcp(port), _posts(port, options), _whole_response),
        }
    figures = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cpus, Python {platform.python_version()}",
        "workload": f"{N_OPTIONS} known options, {len(QUERIES)} queries; decide: 8 tools, 20-turn history",
        "connections": CONNECTIONS,
        "rows": rows,
    }
    _report(figures)
    if parsed.json:
        Path(parsed.json).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0 if not any(row["errors"] for row in rows.values()) else 1


def _in_process(options: dict[str, str], requests: int) -> dict[str, Any]:
    from whetherman_edge.router.scorer import Scorer
    from whetherman_edge.router.table import RouterTable

    scorer = Scorer(RouterTable.open())
    times_us = []
    for n in range(WARM_REQUESTS + requests):
        started_s = time.perf_counter()
        scorer.route(QUERIES[n % len(QUERIES)], options)
        times_us.append((time.perf_counter() - started_s) * 1e6)
    return {**_quantiles(times_us[WARM_REQUESTS:]), "errors": 0}


def _row(connect: Connect, requests: list[bytes], whole: Whole, count: int, pid: int) -> dict[str, Any]:
    """Latency and the daemon's CPU time over one connection, then requests/s over several."""
    _drive([connect()], requests, whole, WARM_REQUESTS)
    cpu_before_s = _cpu_s(pid)
    times_us, _, errors = _drive([connect()], requests, whole, count)
    cpu_us = (_cpu_s(pid) - cpu_before_s) / count * 1e6
    _, wall_s, more_errors = _drive([connect() for _ in range(CONNECTIONS)], requests, whole, count * 2)
    return {
        **_quantiles(times_us),
        "daemon_cpu_us": round(cpu_us, 1),
        "requests_per_s": round(count * 2 / wall_s),
        "errors": errors + more_errors,
    }


def _drive(
    connections: list[socket.socket], requests: list[bytes], whole: Whole, count: int
) -> tuple[list[float], float, int]:
    """Round trips in microseconds, wall time in seconds, and how many answers were errors."""
    times_us: list[float] = []
    errors = n_sent = 0
    sent_at_s: dict[socket.socket, float] = {}
    received = dict.fromkeys(connections, b"")
    started_s = time.perf_counter()
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ, connection)
            sent_at_s[connection] = time.perf_counter()
            connection.sendall(requests[n_sent % len(requests)])
            n_sent += 1
        alone = connections[0] if len(connections) == 1 else None
        while len(times_us) < count:
            ready = [alone] if alone is not None else [key.data for key, _ in selector.select(PATIENCE_S)]
            for connection in ready:
                data = connection.recv(RECEIVE_BYTES)
                if not data:
                    raise EnvironmentFault("bench: the daemon closed the connection")
                received[connection] += data
                if not whole(received[connection]):
                    continue
                times_us.append((time.perf_counter() - sent_at_s[connection]) * 1e6)
                errors += b"error" in received[connection]
                received[connection] = b""
                if n_sent < count:
                    sent_at_s[connection] = time.perf_counter()
                    connection.sendall(requests[n_sent % len(requests)])
                    n_sent += 1
    wall_s = time.perf_counter() - started_s
    for connection in connections:
        connection.close()
    return times_us, wall_s, errors


def _whole_frame(data: bytes) -> bool:
    return len(data) >= 4 and len(data) >= 4 + int.from_bytes(data[:4], "big")


def _whole_response(data: bytes) -> bool:
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return False
    head = data[:end].lower()
    if not head.startswith(b"http/1.1 200"):
        raise EnvironmentFault(f"bench: expected status 200 from /v1/systemone, got {head[:40]!r}")
    length = head.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0]
    return len(data) >= end + 4 + int(length)


def _frames(values: list[dict[str, Any]]) -> list[bytes]:
    payloads = [msgspec.msgpack.encode(value) for value in values]
    return [len(payload).to_bytes(4, "big") + payload for payload in payloads]


def _routes(options: dict[str, str]) -> list[dict[str, Any]]:
    return [{"op": "route", "query": query, "options": options} for query in QUERIES]


def _decides() -> list[dict[str, Any]]:
    return [{"op": "decide", "request": workload.chat(n, n_tools=8, n_turns=20)} for n in range(16)]


def _posts(port: int, options: dict[str, str]) -> list[bytes]:
    requests = []
    for query in QUERIES:
        questions = {"tool": {"type": "choice", "criteria": options}}
        body = msgspec.json.encode({"model": "jev-latest", "state": query, "questions": questions})
        requests.append(
            b"POST /v1/systemone HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (port, len(body), body)
        )
    return requests


def _unix(path: str) -> Connect:
    def connect() -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(PATIENCE_S)
        connection.connect(path)
        return connection

    return connect


def _tcp(port: int) -> Connect:
    def connect() -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    return connect


@contextlib.contextmanager
def _daemon(folder: str) -> Iterator[tuple[int, int, str]]:
    """The daemon with a decision socket; its upstream is never asked. Yields process id, TCP port and socket path."""
    path = str(Path(folder) / "decide.sock")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("WHETHERMAN_")}
    environ["WHETHERMAN_DECISION_SOCKET"] = f"unix:{path}"
    command = [sys.executable, "-m", "whetherman_edge", "serve", "--port", "0", "--engine", "static"]
    command += ["--upstream", "http://127.0.0.1:9", "--upstream-kind", "openai"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stderr=log, env=environ)
        try:
            yield process.pid, _port(process, log), path
        finally:
            process.terminate()
            process.wait()


def _port(process: subprocess.Popen[bytes], log: Any) -> int:
    """The port from the daemon's log. Raises EnvironmentFault when it ends instead of listening."""
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        log.seek(0)
        written = str(log.read())
        if "event=listening" in written:
            return int(written.split("urls=http://127.0.0.1:", 1)[1].split()[0].split(",")[0])
        if process.poll() is not None:
            raise EnvironmentFault(f"bench: expected the daemon to start, it ended: {written[-300:].strip()}")
        time.sleep(0.05)
    raise EnvironmentFault(f"bench: expected the daemon to listen within {PATIENCE_S:g} s")


def _cpu_s(pid: int) -> float:
    """CPU time of a process in seconds; from /proc, 0.0 where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(") ", 1)[1].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _quantiles(times_us: list[float]) -> dict[str, float]:
    ordered = sorted(times_us)
    return {
        "us_p50": round(statistics.median(ordered), 1),
        "us_p99": round(ordered[min(int(len(ordered) * 0.99), len(ordered) - 1)], 1),
    }


def _report(figures: dict[str, Any]) -> None:
    sys.stdout.write(f"{figures['machine']}\n{figures['workload']}\n\n")
    columns = ("p50 us", "p99 us", "daemon CPU us", f"requests/s, {CONNECTIONS} clients")
    sys.stdout.write(" " * 22 + "".join(f"{name:>{len(name) + 4}}" for name in columns) + "\n")
    for name, row in figures["rows"].items():
        if row["errors"]:
            sys.stdout.write(f"{name}: {row['errors']} of the answers were errors, its figures mean nothing\n")
        values = (row["us_p50"], row["us_p99"], row.get("daemon_cpu_us", ""), row.get("requests_per_s", ""))
        cells = (f"{value:>{len(column) + 4}}" for value, column in zip(values, columns, strict=True))
        sys.stdout.write(f"{name:<22}{''.join(cells)}\n")
