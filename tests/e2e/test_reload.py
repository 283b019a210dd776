"""SIGHUP: settings are read again while the daemon serves, and nothing that a client has is touched."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.e2e.conftest import Daemon, serving
from tests.fakes.client import Client, once, post
from tests.fakes.upstream import PATIENCE_S, FakeUpstream, Seen, Wire, completion, reply
from tests.profiles.samples import profile_of
from whetherman_edge.profiles.schema import serialize_profile

pytestmark = pytest.mark.e2e

TOOL = {"type": "function", "function": {"name": "search", "description": "Search the web for pages."}}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "what is a lease?"}], "tools": [TOOL]}


@pytest.fixture
async def upstream():
    fake = await FakeUpstream().start()
    yield fake
    await fake.stop()


@pytest.fixture
def settings(tmp_path, upstream) -> Callable[..., list[str]]:
    """Writes the configuration file, the upstream's lines and those given; returns the flags that name it."""
    path = tmp_path / "w.toml"

    def write(*lines: str, url: str = upstream.url) -> list[str]:
        first = f'upstream = "{url}"\nupstream_kind = "openai"\nengine = "static"\n'
        path.write_text(first + "\n".join(lines) + "\n")
        return ["--config", str(path)]

    return write


async def logged(daemon: Daemon, event: str, n: int = 1) -> str:
    """The n-th line with that event, once it is there."""
    async with asyncio.timeout(PATIENCE_S):
        while len(found := [line for line in daemon.log if f"event={event} " in line]) < n:  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # lines come from a thread
    return found[n - 1]


async def hup(daemon: Daemon, event: str = "reloaded", n: int = 1) -> str:
    daemon.process.send_signal(signal.SIGHUP)
    return await logged(daemon, event, n)


async def reason(url: str) -> str | None:
    return (await post(url, CHAT)).header("x-whetherman-reason")


async def test_new_settings_hold_for_new_requests_and_running_ones_finish(upstream, settings, tmp_path):
    go_on = asyncio.Event()

    async def wait(seen: Seen, wire: Wire) -> None:
        await go_on.wait()
        await reply(completion("late"))(seen, wire)

    upstream.script(wait)
    with serving(*settings('mode = "off"'), home=tmp_path) as daemon:
        async with Client(daemon.url) as running, Client(daemon.url) as idle:
            arrived = asyncio.ensure_future(upstream.next_request())
            await running.start("POST", "/v1/chat/completions", b'{"model":"m","messages":[]}')
            await arrived
            assert (await idle.post(CHAT)).header("x-whetherman-reason") == "bypass:off"
            settings('mode = "enforce"', 'force = "ANSWER"', 'log_level = "debug"')
            assert "changed=mode,force,log_level" in await hup(daemon)
            steered = await idle.post(CHAT)  # the same connection as before
            go_on.set()
            late = await running.rest(await running.head())
        assert (steered.header("x-whetherman-decision"), steered.header("x-whetherman-applied")) == ("ANSWER", "yes")
        assert (late.status, late.json()) == (200, completion("late"))
        assert late.header("x-whetherman-reason") == "bypass:off"
        assert daemon.process.poll() is None


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ('mode = "of', "syntax error"),
        ("mode = 7", "key 'mode'"),
        ("mood = 1", "did you mean 'mode'?"),
        ('profile = "nobody"', "no profile named 'nobody'"),
        ('upstream = "ftp://x"', "Cannot overwrite a value"),
        ('allowed_hosts = "sesame"', "a list of strings"),
    ],
)
async def test_what_is_broken_is_refused_in_one_line_and_the_old_settings_stay(settings, tmp_path, lines, said):
    with serving(*settings('mode = "off"'), home=tmp_path) as daemon:
        settings(lines)
        before = len(daemon.log)
        assert said in await hup(daemon, "reload_refused")
        assert await reason(daemon.url) == "bypass:off"
        assert [line for line in daemon.log[before:] if "level=error" in line or "level=warning" in line] == [
            daemon.log[before]
        ]
        settings('mode = "shadow"')
        await hup(daemon)
        assert await reason(daemon.url) != "bypass:off"


async def test_a_missing_file_is_refused(settings, tmp_path):
    with serving(*settings('mode = "off"'), home=tmp_path) as daemon:
        (tmp_path / "w.toml").unlink()
        assert "found none there" in await hup(daemon, "reload_refused")
        assert await reason(daemon.url) == "bypass:off"


async def test_what_needs_a_restart_is_named_and_the_rest_holds(settings, tmp_path):
    with serving(*settings('listen = "unix:a"'), home=tmp_path) as daemon:
        settings('listen = "unix:b"', 'decision_socket = "unix:c"', 'mode = "off"')
        line = await hup(daemon, "reload_needs_restart")
        assert "keys=listen,decision_socket" in line
        assert "changed=mode" in await logged(daemon, "reloaded")
        assert await reason(daemon.url) == "bypass:off"
        assert (tmp_path / "a").is_socket()


async def test_a_flag_still_beats_the_file(settings, tmp_path):
    with serving(*settings(), "--mode", "off", home=tmp_path) as daemon:
        settings('mode = "shadow"')
        assert "changed=nothing" in await hup(daemon)
        assert await reason(daemon.url) == "bypass:off"


async def test_another_upstream_takes_over_and_the_key_with_it(upstream, settings, tmp_path):
    other = await FakeUpstream(reply(completion("other"))).start()
    try:
        with serving(*settings(), home=tmp_path) as daemon:
            async with Client(daemon.url) as client:
                assert (await client.post(CHAT)).json() == completion()
                settings('upstream_api_key = "k"', url=other.url)
                assert "changed=upstream,upstream_api_key" in await hup(daemon)
                assert (await client.post(CHAT)).json() == completion("other")
            assert other.last.header("Authorization") == b"Bearer k"
            assert len(upstream.requests) == 1
    finally:
        await other.stop()


async def test_without_a_key_a_public_socket_stays_with_the_old_settings(settings, tmp_path):
    key = {"x_api_key": "sesame"}
    with serving(*settings('api_key = "sesame"'), "--host", "0.0.0.0", home=tmp_path) as daemon:
        url = daemon.url.replace("0.0.0.0", "127.0.0.1")
        settings()
        await hup(daemon, "reload_refused")
        assert (await post(url, CHAT)).status == 401
        assert (await post(url, CHAT, **key)).status == 200


async def test_a_profile_is_read_again_and_a_broken_one_is_refused(settings, tmp_path):
    folder = tmp_path / ".config" / "whetherman" / "profiles"
    folder.mkdir(parents=True)
    with serving(*settings(), home=tmp_path) as daemon:
        (folder / "mine.json").write_bytes(serialize_profile(profile_of()))
        settings('profile = "mine"')
        assert "calibrate again with this version" in await hup(daemon, "reload_refused")
        (folder / "mine.json").write_text("{")
        assert "mine" in await hup(daemon, "reload_refused", 2)
        assert await reason(daemon.url) != "profile_unknown"


async def test_the_manager_hears_of_a_reload(settings, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(PATIENCE_S)
        with serving(*settings(), home=tmp_path, env={"NOTIFY_SOCKET": str(tmp_path / "notify")}) as daemon:
            assert (await asyncio.to_thread(manager.recv, 4096)).startswith(b"READY=1\n")
            settings("drain_timeout_s = 120.5")
            await hup(daemon)
            said = [await asyncio.to_thread(manager.recv, 4096) for _ in range(2)]
        said += [await asyncio.to_thread(manager.recv, 4096) for _ in range(2)]
    assert said[0].startswith(b"RELOADING=1\nMONOTONIC_USEC=")
    assert said[1].startswith(b"READY=1\n")
    assert said[2:] == [b"STOPPING=1", b"EXTEND_TIMEOUT_USEC=140500000"], "it waits as long as the new setting says"


async def test_a_terminal_that_is_closed_ends_the_daemon(upstream, settings, tmp_path):
    command = [sys.executable, "-m", "whetherman_edge", "serve", "--port", "0", *settings()]
    ours, theirs = pty.openpty()
    process = subprocess.Popen(  # noqa: ASYNC220
        command,
        stdin=theirs,
        stderr=subprocess.PIPE,
        env={**os.environ, "HOME": str(tmp_path)},
        start_new_session=True,
    )
    try:
        os.close(theirs)
        assert process.stderr is not None
        while b"event=listening" not in (line := await asyncio.to_thread(process.stderr.readline)):
            assert line
        os.close(ours)
        process.send_signal(signal.SIGHUP)
        assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0
    finally:
        process.kill()
        process.communicate()


async def test_reloads_under_load_cost_no_request(upstream, settings, tmp_path):
    async def ask(url: str) -> list[int]:
        async with Client(url) as client:
            return [(await client.post(CHAT)).status for _ in range(40)]

    with serving(*settings(), home=tmp_path) as daemon:
        asking = [asyncio.create_task(ask(daemon.url)) for _ in range(4)]
        for n in range(10):
            settings(f'mode = "{("off", "shadow")[n % 2]}"', f"idle_timeout_s = {60 + n}.0")
            await hup(daemon, n=n + 1)
        statuses = [status for task in asking for status in await task]
        assert statuses == [200] * 160
        assert (await once(daemon.url, "GET", "/livez")).status == 200
