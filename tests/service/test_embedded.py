"""Start, crash, restart and end of the embedded server's process. The wheel is replaced by tests/service/fake_llama;
tests/e2e/test_real_server.py has the real one."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from whetherman_edge.errors import EnvironmentFault
from whetherman_edge.service import embedded, embedded_server

LIMIT_S = 60.0
FAKE = str(Path(__file__).with_name("fake_llama"))
ROOT = str(Path(__file__).resolve().parents[2])
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="parent-death signal and pidfd are Linux's")


@pytest.fixture
def fake(monkeypatch):
    """Chooses what the child does; restarts come at once."""

    def choose(mode: str) -> None:
        monkeypatch.setenv("FAKE_LLAMA", mode)

    monkeypatch.setenv("PYTHONPATH", f"{FAKE}{os.pathsep}{ROOT}")
    monkeypatch.syspath_prepend(FAKE)
    monkeypatch.setattr(embedded, "BACKOFF_FIRST_S", 0.01)
    choose("serve")
    return choose


async def until(condition: Callable[[], bool]) -> None:
    """Looks at a state that another process drives; there is no event of ours to wait for."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def health(url: str) -> dict[str, object]:
    def get() -> bytes:
        with urllib.request.urlopen(f"{url}/health", timeout=LIMIT_S) as response:
            return response.read()

    return json.loads(await asyncio.to_thread(get))


def gone(pid: int) -> bool:
    """Waits until a process ends, with the kernel telling us."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], LIMIT_S)[0])
    finally:
        os.close(descriptor)


async def test_start_and_stop(fake):
    server = embedded.EmbeddedServer(Path("x.gguf"), "x")
    url = await server.start()
    pid = server.pid
    assert pid is not None
    assert server.ready
    assert url.startswith("http://127.0.0.1:")
    assert (await health(url))["pid"] == pid
    assert os.getsid(pid) != os.getsid(0)  # a Ctrl-C in our terminal does not reach it
    await server.stop()
    assert not server.ready
    assert server.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    await server.stop()  # twice is fine


async def test_a_crash_brings_it_back_on_the_same_port(fake):
    server = embedded.EmbeddedServer(Path("x.gguf"), "x")
    url = await server.start()
    try:
        for count in (1, 2):
            first = server.pid
            assert first is not None
            os.kill(first, signal.SIGKILL)
            await until(lambda expected=count: server.restarts == expected and server.ready)
            assert server.url == url
            assert (await health(url))["pid"] == server.pid != first
    finally:
        await server.stop()


async def test_it_keeps_trying_when_the_restart_fails(fake):
    server = embedded.EmbeddedServer(Path("x.gguf"), "x")
    await server.start()
    try:
        fake("fail")
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        await until(lambda: server.restarts >= 2)
        assert not server.ready
        fake("serve")
        async with asyncio.timeout(LIMIT_S):
            await server.wait_ready()
    finally:
        await server.stop()


async def test_stop_while_it_is_down(fake, monkeypatch):
    monkeypatch.setattr(embedded, "BACKOFF_FIRST_S", 3600.0)
    server = embedded.EmbeddedServer(Path("x.gguf"), "x")
    await server.start()
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    await until(lambda: not server.ready)
    async with asyncio.timeout(LIMIT_S):
        await server.stop()


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("fail", r"ended \(exit 1\).*what llama\.cpp says while it loads.*Failed to init server"),
        ("SIGABRT", r"ended \(SIGABRT\)"),
        ("SIGILL", r"expected a CPU.*--upstream URL"),
    ],
)
async def test_a_failed_start_says_why(fake, mode, message):
    fake(mode)
    server = embedded.EmbeddedServer(Path("x.gguf"), "x")
    with pytest.raises(EnvironmentFault, match=message):
        await server.start()
    assert server.pid is None
    await server.stop()


async def test_cancelled_while_it_loads(fake):
    fake("hang")
    server = embedded.EmbeddedServer(Path("x.gguf"), "x")
    starting = asyncio.create_task(server.start())
    await until(lambda: server.pid is not None)
    pid = server.pid
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert server.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_loading_forever_is_an_error(fake, monkeypatch):
    fake("hang")
    monkeypatch.setattr(embedded, "SAY_EVERY_S", 0.01)
    monkeypatch.setattr(embedded, "READY_TIMEOUT_S", 0.05)
    server = embedded.EmbeddedServer(Path("big.gguf"), "x")
    with pytest.raises(EnvironmentFault, match=r"to load big\.gguf within"):
        await server.start()
    assert server.pid is None


async def test_without_the_wheel(monkeypatch):
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentFault, match=r"xllamacpp.*pip install 'whetherman-edge\[embedded\]'.*--upstream URL"):
        await embedded.EmbeddedServer(Path("x.gguf"), "x").start()


DAEMON = textwrap.dedent(
    """
    import asyncio, os, signal, sys
    from pathlib import Path
    from whetherman_edge.service import embedded

    async def main(wait_ready):
        server = embedded.EmbeddedServer(Path("x.gguf"), "x")
        starting = asyncio.create_task(server.start())
        while server.pid is None or (wait_ready and not server.ready):
            await asyncio.sleep(0.01)
        print(server.pid, flush=True)
        if wait_ready:
            sys.stdin.read()
        await asyncio.sleep(3600)

    asyncio.run(main(sys.argv[1] == "ready"))
    """
)


@linux_only
@pytest.mark.parametrize(("mode", "when"), [("serve", "ready"), ("hang", "loading")])
def test_no_orphan_when_the_daemon_is_killed(fake, mode, when):
    fake(mode)
    with subprocess.Popen(
        [sys.executable, "-c", DAEMON, when], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as daemon:
        assert daemon.stdout is not None
        pid = int(daemon.stdout.readline())
        os.kill(pid, 0)
        daemon.kill()
        assert gone(pid)


@linux_only
def test_the_child_ends_when_its_parent_is_already_gone(fake):
    command = [sys.executable, "-m", "whetherman_edge.service.embedded_server", "--weights", "x", "--alias", "x"]
    done = subprocess.run([*command, "--parent", "1"], capture_output=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 0
    assert done.stdout == b""


def test_usable_cores_respects_affinity():
    assert 1 <= embedded_server.usable_cores() <= (os.cpu_count() or 1)
