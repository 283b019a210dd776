"""``bench proxy``: what the daemon adds to a request, in one run against the same server reached directly.

Three processes: a fake model server that answers at once, the daemon as ``serve`` runs it, a load client with raw
sockets. Direct and proxied rounds alternate, so that a noisy machine disturbs both alike; the added latency is the
difference of the medians of each pair of rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from whetherman_edge.bench import workload
from whetherman_edge.errors import EnvironmentFault

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]

ROUNDS = 5
ROUND_REQUESTS = 400
THROUGHPUT_REQUESTS = 5_000
THROUGHPUT_CONNECTIONS = 8
MIXED_REQUESTS = 10_000
MIXED_BATCH = 500
READY_S_MAX = 20.0
N_TOOLS = 8
N_TURNS = 20


def register(verbs: Verbs) -> None:
    """Add ``bench proxy``."""
    parser = verbs.add_parser("proxy", help="latency and requests/s added by the daemon, against direct; memory")
    parser.add_argument("--json", metavar="FILE", help="also write all figures to FILE")
    parser.add_argument("--mixed", type=int, default=MIXED_REQUESTS, metavar="N", help="requests of the memory part")
    parser.add_argument(
        "--mode", choices=("off", "shadow"), default="shadow", help="off: the relay alone (default: %(default)s)"
    )
    parser.set_defaults(run=_run)


def _run(parsed: argparse.Namespace) -> int:
    with contextlib.ExitStack() as stack:
        upstream_port = _started_port(stack.enter_context(_process("-m", "whetherman_edge.bench.fake_upstream")))
        daemon, port, ready_s = stack.enter_context(_daemon(upstream_port, parsed.mode))
        client = stack.enter_context(_process("-m", "whetherman_edge.bench.load_client"))
        figures: dict[str, Any] = {
            "machine": f"{platform.machine()}, {os.cpu_count()} cpus, Python {platform.python_version()}",
            "workload": f"{N_TOOLS} tools, {N_TURNS}-turn history, static engine, {parsed.mode}",
            "ready_s": round(ready_s, 3),
            "rss_mb_at_start": _rss_mb(daemon.pid),
        }
        figures |= _latency(client, upstream_port, port)
        figures |= _throughput(client, upstream_port, port, daemon.pid)
        figures |= _memory(client, port, daemon.pid, parsed.mixed)
    _report(figures)
    if parsed.json:
        Path(parsed.json).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


def _latency(client: subprocess.Popen[str], upstream_port: int, port: int) -> dict[str, Any]:
    """One request at a time, rounds of direct and proxied in turn; then tools that the gate has never seen."""
    bodies = [workload.encoded(workload.chat(n, n_tools=N_TOOLS, n_turns=N_TURNS)) for n in range(64)]
    _job(client, port, bodies, 200, 1)
    rounds = [
        (_job(client, upstream_port, bodies, ROUND_REQUESTS, 1), _job(client, port, bodies, ROUND_REQUESTS, 1))
        for _ in range(ROUNDS)
    ]
    cold = [workload.encoded(workload.chat(n, n_tools=N_TOOLS, n_turns=N_TURNS, family=1000 + n)) for n in range(40)]
    cold_ms = _job(client, port, cold, len(cold), 1)["latency_ms"]
    direct = sorted(ms for one, _ in rounds for ms in one["latency_ms"])
    proxied = sorted(ms for _, one in rounds for ms in one["latency_ms"])
    added = [statistics.median(two["latency_ms"]) - statistics.median(one["latency_ms"]) for one, two in rounds]
    return {
        "body_bytes": len(bodies[0]),
        "direct_ms_p50": round(_quantile(direct, 0.5), 3),
        "direct_ms_p99": round(_quantile(direct, 0.99), 3),
        "proxied_ms_p50": round(_quantile(proxied, 0.5), 3),
        "proxied_ms_p99": round(_quantile(proxied, 0.99), 3),
        "added_ms_p50": round(statistics.median(added), 3),
        "added_ms_p50_rounds": [round(ms, 3) for ms in added],
        "cold_ms_p50": round(statistics.median(cold_ms), 3),
        "errors": sum(one["errors"] + two["errors"] for one, two in rounds),
    }


def _throughput(client: subprocess.Popen[str], upstream_port: int, port: int, pid: int) -> dict[str, Any]:
    """Several requests in flight. ``daemon_cpu_us`` is what one costs the daemon; its inverse is one core's limit."""
    bodies = [workload.encoded(workload.chat(n, n_tools=N_TOOLS, n_turns=N_TURNS)) for n in range(64)]
    direct = _job(client, upstream_port, bodies, THROUGHPUT_REQUESTS, THROUGHPUT_CONNECTIONS)
    before_s = _cpu_s(pid)
    proxied = _job(client, port, bodies, THROUGHPUT_REQUESTS, THROUGHPUT_CONNECTIONS)
    cpu_us = (_cpu_s(pid) - before_s) / THROUGHPUT_REQUESTS * 1e6
    return {
        "direct_requests_per_s": round(THROUGHPUT_REQUESTS / direct["wall_s"]),
        "proxied_requests_per_s": round(THROUGHPUT_REQUESTS / proxied["wall_s"]),
        "daemon_cpu_us_per_request": round(cpu_us),
        "throughput_errors": proxied["errors"],
    }


def _memory(client: subprocess.Popen[str], port: int, pid: int, count: int) -> dict[str, Any]:
    """Resident memory over mixed requests: after half of them and after all."""
    bodies = workload.mixed(min(count, 1_500))
    half_mb = 0.0
    for done in range(0, count, MIXED_BATCH):
        if done >= count // 2 and not half_mb:
            half_mb = _rss_mb(pid)
        start = done % len(bodies)
        batch = (bodies + bodies)[start : start + MIXED_BATCH]
        _job(client, port, batch, min(MIXED_BATCH, count - done), 4)
    return {"mixed_requests": count, "rss_mb_at_half": half_mb, "rss_mb_at_end": _rss_mb(pid)}


def _report(figures: dict[str, Any]) -> None:
    rows = [
        ("machine", figures["machine"]),
        ("workload", f"{figures['workload']}, {figures['body_bytes']} bytes"),
        ("ready", f"{figures['ready_s']} s"),
        ("direct", f"p50 {figures['direct_ms_p50']} ms, p99 {figures['direct_ms_p99']} ms"),
        ("through the daemon", f"p50 {figures['proxied_ms_p50']} ms, p99 {figures['proxied_ms_p99']} ms"),
        ("added", f"p50 {figures['added_ms_p50']} ms (rounds {figures['added_ms_p50_rounds']})"),
        ("8 unseen tools", f"p50 {figures['cold_ms_p50']} ms"),
        (
            "requests/s",
            f"{figures['proxied_requests_per_s']} (direct {figures['direct_requests_per_s']})",
        ),
        (
            "daemon's CPU time",
            f"{figures['daemon_cpu_us_per_request']} us a request",
        ),
        (
            "resident memory",
            (
                f"{figures['rss_mb_at_start']} MB at start, {figures['rss_mb_at_half']} MB after half of "
                f"{figures['mixed_requests']} mixed requests, {figures['rss_mb_at_end']} MB at the end"
            ),
        ),
        ("errors", figures["errors"] + figures["throughput_errors"]),
    ]
    for name, value in rows:
        sys.stdout.write(f"{name:<20}{value}\n")


@contextlib.contextmanager
def _process(*args: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate()


@contextlib.contextmanager
def _daemon(upstream_port: int, mode: str) -> Iterator[tuple[subprocess.Popen[str], int, float]]:
    """The daemon on a free port; yields process, port, and seconds from start to ready."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("WHETHERMAN_") or name == "WHETHERMAN_ROUTER"
    }
    state = tempfile.TemporaryDirectory(prefix="whetherman-bench-")
    environ["STATE_DIRECTORY"] = state.name  # recorded as for a user, and not among the user's own decisions
    command = [sys.executable, "-m", "whetherman_edge", "serve", "--port", "0", "--engine", "static", "--mode", mode]
    command += ["--upstream", f"http://127.0.0.1:{upstream_port}", "--upstream-kind", "openai", "--log-level", "info"]
    started_s = time.perf_counter()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ)
    try:
        port = _listening_port(process)
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=READY_S_MAX).close()
        except urllib.error.HTTPError as exc:
            raise EnvironmentFault(f"expected the daemon to be ready, it says {exc.read().decode()}") from exc
        ready_s = time.perf_counter() - started_s
        drain = subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)
        yield process, port, ready_s
        process.terminate()
        process.wait()
        drain.wait()
    finally:
        process.kill()
        process.wait()
        state.cleanup()


def _listening_port(process: subprocess.Popen[str]) -> int:
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if "event=listening" in line:
            return int(line.split("urls=http://127.0.0.1:", 1)[1].split()[0])
    raise EnvironmentFault("expected the daemon to start, it ended: " + " | ".join(seen[-3:]).strip())


def _started_port(process: subprocess.Popen[str]) -> int:
    return int(_stream(process.stdout).readline())


def _job(
    client: subprocess.Popen[str], port: int, bodies: list[str], requests: int, connections: int
) -> dict[str, Any]:
    job = {"port": port, "bodies": bodies, "requests": requests, "connections": connections}
    stdin = _stream(client.stdin)
    stdin.write(json.dumps(job) + "\n")
    stdin.flush()
    result: dict[str, Any] = json.loads(_stream(client.stdout).readline())
    return result


def _stream(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def _rss_mb(pid: int) -> float:
    """Resident memory now; from ``ps``, which Linux and macOS both have."""
    listed = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=True)
    return round(int(listed.stdout) / 1024, 1)


def _cpu_s(pid: int) -> float:
    """CPU time of a process in seconds; from /proc, 0.0 where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(") ", 1)[1].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
