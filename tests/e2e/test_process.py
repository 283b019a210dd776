"""The daemon as a process, in front of a fake upstream: start, settings, signals, sockets, logs."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from tests.e2e.conftest import serving
from tests.fakes.client import Client, once, post
from tests.fakes.upstream import PATIENCE_S, FakeUpstream, Seen, Wire, completion, hang, reply

pytestmark = pytest.mark.e2e

TOOL = {"type": "function", "function": {"name": "search", "description": "Search the web for pages."}}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "PROMPTTEXT what is a lease?"}], "tools": [TOOL]}


@pytest.fixture
async def upstream():
    fake = await FakeUpstream().start()
    yield fake
    await fake.stop()


async def ended(process: subprocess.Popen) -> int:
    return await asyncio.to_thread(process.wait, PATIENCE_S)


async def test_the_shipped_gate_judges_real_requests(upstream, tmp_path):
    with serving("--upstream", upstream.url, "--upstream-kind", "openai", home=tmp_path) as daemon:
        answer = await post(daemon.url, CHAT)
        ready = await once(daemon.url, "GET", "/readyz")
    assert answer.status == 200
    assert answer.header("x-whetherman-engine") == "static"
    assert answer.header("x-whetherman-applied") == "no"
    assert answer.header("x-whetherman-decision") in ("ACT", "ANSWER", "ASK", "DECLINE")
    assert 0.0 < float(answer.header("x-whetherman-confidence") or 0) <= 1.0
    assert ready.status == 200, ready.body


async def test_o07_settings_only_in_the_file(upstream, tmp_path):
    config = tmp_path / "w.toml"
    config.write_text(f'upstream = "{upstream.url}"\nupstream_kind = "openai"\nmode = "off"\n')
    with serving("--config", str(config), home=tmp_path) as daemon:
        answer = await post(daemon.url, CHAT)
    assert answer.header("x-whetherman-reason") == "bypass:off"


async def test_sigterm_lets_a_running_request_finish_and_refuses_new_ones(upstream, tmp_path):
    go_on = asyncio.Event()

    async def wait(_seen: Seen, wire: Wire) -> None:
        await go_on.wait()
        await reply(completion("late"))(_seen, wire)

    upstream.script(wait)
    with serving("--upstream", upstream.url, "--upstream-kind", "openai", home=tmp_path) as daemon:
        async with Client(daemon.url) as client:
            arrived = asyncio.ensure_future(upstream.next_request())
            await client.start("POST", "/v1/chat/completions", b'{"model":"m","messages":[]}')
            await arrived
            daemon.process.send_signal(signal.SIGTERM)
            while True:  # the listener closes at once
                try:
                    await once(daemon.url, "GET", "/livez")
                except OSError:
                    break
                await asyncio.sleep(0.01)
            go_on.set()
            answer = await client.rest(await client.head())
        assert answer.json() == completion("late")
        assert answer.header("Connection") == "close" or answer.status == 200
        assert await ended(daemon.process) == 0


async def test_the_drain_ends_after_its_time(upstream, tmp_path):
    upstream.default = hang
    env = {"WHETHERMAN_DRAIN_TIMEOUT_S": "0.3"}
    with serving("--upstream", upstream.url, "--upstream-kind", "openai", home=tmp_path, env=env) as daemon:
        async with Client(daemon.url) as client:
            arrived = asyncio.ensure_future(upstream.next_request())
            await client.start("POST", "/v1/chat/completions", b'{"model":"m","messages":[]}')
            seen = await arrived
            daemon.process.send_signal(signal.SIGTERM)
            assert await ended(daemon.process) == 0
            await asyncio.wait_for(seen.closed.wait(), PATIENCE_S)
    assert any("event=drain_timeout" in line for line in daemon.log)


async def test_o09_unix_socket_is_private_and_gone_afterwards(upstream, tmp_path):
    path = tmp_path / "w.sock"
    command = [sys.executable, "-m", "whetherman_edge", "serve", "--listen", f"unix:{path}", "--upstream", upstream.url]
    environ = {**os.environ, "HOME": str(tmp_path)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ)  # noqa: ASYNC220
    try:
        line = await asyncio.to_thread(_first_listening_line, process)
        assert f"urls=unix:{path}" in line
        assert path.stat().st_mode & 0o777 == 0o600
        assert (await post(f"unix:{path}", CHAT)).status == 200
        process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(process.communicate, timeout=PATIENCE_S)
        assert process.returncode == 0
        assert not path.exists()
    finally:
        process.kill()
        process.communicate()


def _first_listening_line(process: subprocess.Popen) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if "event=listening" in line:
            return line
    raise AssertionError("the daemon ended before it listened")


async def test_an_upstream_that_is_not_up_yet_costs_a_warning_and_a_502(upstream, tmp_path):
    await upstream.stop()
    with serving("--upstream", upstream.url, home=tmp_path) as daemon:
        answer = await post(daemon.url, CHAT)
        live, ready = [await once(daemon.url, "GET", path) for path in ("/livez", "/readyz")]
    assert (answer.status, live.status, ready.status) == (502, 200, 503)
    assert any("event=upstream_unreachable" in line for line in daemon.log)


async def test_o10_debug_logs_hold_neither_keys_nor_prompts_and_are_one_line_each(upstream, tmp_path):
    env = {"WHETHERMAN_API_KEY": "OURKEY", "WHETHERMAN_UPSTREAM_API_KEY": "THEIRKEY"}
    flags = ("--upstream", upstream.url, "--upstream-kind", "openai", "--log-level", "debug")
    with serving(*flags, home=tmp_path, env=env) as daemon:
        await post(daemon.url, CHAT, "/v1/chat/completions?key=QUERYKEY", Authorization="Bearer OURKEY")
        await post(daemon.url, CHAT, Authorization="Bearer WRONGKEY", x_api_key="OTHERKEY")
        async with Client(daemon.url) as client:
            await client.send(b"POST /x HTTP/1.1\r\nHost: localhost\r\nBad\x01Header: HEADERKEY\r\n\r\n")
            assert (await client.head()).status == 400
        await upstream.stop()
        await post(daemon.url, CHAT, Authorization="Bearer OURKEY")
    text = "\n".join(daemon.log)
    assert "event=chat " in text
    for word in ("OURKEY", "THEIRKEY", "WRONGKEY", "QUERYKEY", "OTHERKEY", "HEADERKEY", "PROMPTTEXT"):
        assert word not in text
    assert all(line.startswith("ts=") and " level=" in line for line in daemon.log)


async def test_force_logs_a_warning(upstream, tmp_path):
    flags = ("--upstream", upstream.url, "--upstream-kind", "openai", "--force", "DECLINE")
    with serving(*flags, home=tmp_path) as daemon:
        answer = await post(daemon.url, CHAT)
    assert answer.header("x-whetherman-decision") == "DECLINE"
    assert answer.header("x-whetherman-applied") == "yes"
    assert any("level=warning" in line and "event=forced" in line for line in daemon.log)
