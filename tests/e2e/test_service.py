"""The daemon as a service manager sees it, and what its logs never hold: real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import START_S, serving
from tests.fakes.client import Client, once, post
from tests.fakes.upstream import PATIENCE_S, FakeUpstream

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
TOOL = {"type": "function", "function": {"name": "search", "description": "Search the web for pages."}}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "PROMPTTEXT what is a lease?"}], "tools": [TOOL]}

# Becomes the daemon with the socket on descriptor 3, as systemd does it: LISTEN_PID is the process's own number.
PASS_ON = """
import os, sys
fd, pid = int(sys.argv[1]), sys.argv[2] or str(os.getpid())
os.dup2(fd, 3)
os.environ.update(LISTEN_FDS="1", LISTEN_PID=pid)
os.execv(sys.executable, [sys.executable, "-m", "whetherman_edge", "serve", *sys.argv[3:]])
"""


@pytest.fixture
async def upstream():
    fake = await FakeUpstream().start()
    yield fake
    await fake.stop()


@pytest.fixture
def manager(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(str(tmp_path / "notify"))
        end.settimeout(START_S)
        yield end


def environ(home: Path, **more: str) -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("WHETHERMAN_", "XDG_"))}
    return {**clean, "HOME": str(home), "PYTHONPATH": str(ROOT), **more}


async def test_o05_ready_comes_after_the_port_is_served_and_stopping_at_the_end(upstream, tmp_path, manager):
    env = {"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "200000"}
    flags = ("--upstream", upstream.url, "--upstream-kind", "openai", "--engine", "static")
    with serving(*flags, home=tmp_path, env=env) as daemon:
        messages = [await asyncio.to_thread(manager.recv, 4096)]
        assert (await once(daemon.url, "GET", "/livez")).status == 200
        messages += [await asyncio.to_thread(manager.recv, 4096) for _ in range(3)]
        daemon.process.send_signal(signal.SIGTERM)
        while b"STOPPING=1" not in messages:
            messages.append(await asyncio.to_thread(manager.recv, 4096))
        behind = await asyncio.to_thread(manager.recv, 4096)
        assert await asyncio.to_thread(daemon.process.wait, PATIENCE_S) == 0
    assert messages[0] == f"READY=1\nSTATUS=listening on {daemon.url}".encode() or messages[0] == b"WATCHDOG=1"
    assert sum(one.startswith(b"READY=1") for one in messages) == 1
    assert messages.count(b"WATCHDOG=1") >= 2
    assert behind == b"EXTEND_TIMEOUT_USEC=30000000", "what the unit's TimeoutStopSec= is by itself"


async def test_o05_a_daemon_that_cannot_start_never_says_ready(tmp_path, manager):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = [sys.executable, "-m", "whetherman_edge", "serve", "--port", str(taken.getsockname()[1])]
        env = environ(tmp_path, NOTIFY_SOCKET=manager.getsockname())
        done = await asyncio.to_thread(
            subprocess.run, command, env=env, capture_output=True, text=True, timeout=START_S, check=False
        )
    manager.setblocking(False)
    with pytest.raises(BlockingIOError):
        manager.recv(4096)
    # Field case O08: one line that says what to do, and an exit code of its own kind.
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1
    assert "is taken by another program" in done.stderr


@pytest.mark.parametrize("pid", ["", "1"], ids=["own", "wrong"])
async def test_o06_a_passed_socket_is_served_and_a_wrong_pid_is_ignored(upstream, tmp_path, pid):
    """The first request is sent before the daemon runs: the kernel keeps it until the gate is warm."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        flags = ["--port", "0", "--engine", "static", "--upstream", upstream.url, "--upstream-kind", "openai"]
        async with Client(url) as client:
            await client.start("GET", "/livez")
            process = subprocess.Popen(  # noqa: ASYNC220
                [sys.executable, "-c", PASS_ON, str(listener.fileno()), pid, *flags],
                pass_fds=[listener.fileno()],
                env=environ(tmp_path),
                stderr=subprocess.PIPE,
                text=True,
            )
            try:
                assert process.stderr is not None
                line = ""
                while "event=listening" not in line:
                    line = await asyncio.to_thread(process.stderr.readline)
                    assert line
                assert (f"urls={url} " in line) == (pid == "")
                if pid == "":
                    assert (await client.rest(await client.head())).status == 200
                process.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0
            finally:
                process.kill()
                process.wait()
                process.stderr.close()


SECRETS = ("sk-SECRETBEARER", "sk-SECRETXKEY", "sk-SECRETQUERY", "PROMPTTEXT", "sk-UPSTREAM", "sk-OWNKEY", "SESSIONID")


async def test_o10_a_debug_run_holds_no_secret_and_no_prompt(upstream, tmp_path):
    env = {"WHETHERMAN_UPSTREAM_API_KEY": "sk-UPSTREAM", "WHETHERMAN_API_KEY": "sk-OWNKEY"}
    flags = ("--upstream", upstream.url, "--upstream-kind", "openai", "--engine", "static", "--log-level", "debug")
    with serving(*flags, home=tmp_path, env=env) as daemon:
        ok = {"x_api_key": "sk-OWNKEY", "x_session_id": "SESSIONID"}
        assert (await post(daemon.url, CHAT, Authorization="Bearer sk-SECRETBEARER", **ok)).status == 200
        assert (await post(daemon.url, CHAT, x_api_key="sk-SECRETXKEY")).status == 401
        await once(daemon.url, "GET", "/v1/models?key=sk-SECRETQUERY", **ok)
        await once(daemon.url, "GET", "/whetherman/data.json?agent=sk-SECRETQUERY", **ok)
        await once(daemon.url, "GET", "/v1/models", Host="sk-SECRETQUERY.example")
        await post(daemon.url, b'{"messages": "PROMPTTEXT', **ok)
        async with Client(daemon.url) as client:
            await client.send(b"GET / HTTP/1.1\r\nHost: localhost\r\nsk-SECRETBEARER PROMPTTEXT\r\n\r\n")
            assert (await client.head()).status == 400
        await upstream.stop()
        assert (await post(daemon.url, CHAT, Authorization="Bearer sk-SECRETBEARER", **ok)).status == 502
    logs = "\n".join(daemon.log)
    assert logs.count("event=") > 3
    assert [secret for secret in SECRETS if secret in logs] == []
    state = b"".join(one.read_bytes() for one in tmp_path.rglob("ledger.sqlite3*"))
    assert state
    assert [secret for secret in SECRETS if secret.encode() in state] == []


@pytest.mark.parametrize("size", [100_000, 2_000_000])
async def test_oversize_heads_are_refused_not_kept(upstream, tmp_path, size):
    flags = ("--upstream", upstream.url, "--upstream-kind", "openai", "--engine", "static")
    with serving(*flags, home=tmp_path) as daemon:
        async with Client(daemon.url) as client:
            try:
                await client.send(b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"a" * size + b"\r\n\r\n")
                assert (await client.head()).status in (400, 431)
            except (ConnectionError, asyncio.IncompleteReadError):
                pass  # refused while we were still sending
        assert (await once(daemon.url, "GET", "/livez")).status == 200
        assert upstream.requests == []


async def test_slow_heads_do_not_keep_others_out(upstream, tmp_path):
    """Two hundred connections that send a byte of their head and no more; everybody else is served at once."""
    flags = ("--upstream", upstream.url, "--upstream-kind", "openai", "--engine", "static")
    with serving(*flags, home=tmp_path) as daemon:
        slow = [await Client(daemon.url).__aenter__() for _ in range(200)]
        for one in slow:
            await one.send(b"G")
        assert (await post(daemon.url, CHAT)).status == 200
        for one in slow:
            one.abort()
        assert (await post(daemon.url, CHAT)).status == 200


async def test_a_killed_daemon_leaves_a_sound_ledger(upstream, tmp_path):
    flags = ("--upstream", upstream.url, "--upstream-kind", "openai", "--engine", "static")
    with serving(*flags, home=tmp_path) as daemon:
        for _ in range(20):
            assert (await post(daemon.url, CHAT)).status == 200
        async with asyncio.timeout(PATIENCE_S):
            while (await once(daemon.url, "GET", "/whetherman/data.json")).json()["rows"] < 1:
                pass  # each look is a request, so nothing spins
        daemon.process.kill()
        await asyncio.to_thread(daemon.process.wait, PATIENCE_S)
    (path,) = tmp_path.rglob("ledger.sqlite3")
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert db.execute("SELECT count(*) FROM decisions").fetchone()[0] >= 1
