"""The end of a daemon under load: what has been sent is answered, whatever state its connection was in."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from tests.fakes.chats import CHAT, body_of
from tests.fakes.client import Client
from tests.fakes.upstream import PATIENCE_S, Seen, Wire, completion, reply, text_stream
from whetherman_edge import daemon
from whetherman_edge.proxy.app import App
from whetherman_edge.service.sockets import bind_unix


@contextlib.asynccontextmanager
async def ending(serving, monkeypatch):
    """``async with ending(serve(...)) as (url, end)``: ``await end()`` begins the drain, the block's end awaits it."""
    monkeypatch.setattr(daemon, "FRESH_S", PATIENCE_S)
    stack = contextlib.AsyncExitStack()
    url = await stack.enter_async_context(serving)
    closing: asyncio.Task[None] | None = None

    async def end() -> None:
        nonlocal closing
        closing = asyncio.create_task(stack.aclose())
        host, _, port = url.removeprefix("http://").partition(":")
        with contextlib.suppress(ConnectionRefusedError):
            while True:
                _, writer = await asyncio.open_connection(host, int(port))
                writer.close()

    yield url, end
    assert closing is not None
    async with asyncio.timeout(PATIENCE_S):
        await closing


async def test_a_connection_made_just_before_the_drain_is_served(upstream, serve, judge, monkeypatch):
    async with ending(serve(drain_timeout_s=PATIENCE_S), monkeypatch) as (url, end), Client(url) as client:
        await client.request("OPTIONS", "/livez")  # accepted, and known to the server
        async with Client(url) as fresh:
            await asyncio.sleep(0)
            await end()
            answer = await fresh.post(CHAT)
    assert (answer.status, answer.json()) == (200, completion())
    assert answer.header("Connection") == "close"


async def test_an_upload_under_way_is_taken_to_its_end(upstream, serve, judge, monkeypatch):
    body = body_of({**CHAT, "padding": "x" * 300_000})
    async with ending(serve(drain_timeout_s=PATIENCE_S), monkeypatch) as (url, end), Client(url) as client:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        await client.send(head.encode() + b"Expect: 100-continue\r\n\r\n")
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(body[:1000])
        await end()
        await client.send(body[1000:])
        answer = await client.rest(await client.head())
    assert (answer.status, answer.header("Connection")) == (200, "close")
    assert upstream.last.body == body


async def test_a_stream_under_way_ends_as_it_should_and_takes_its_connection_along(upstream, serve, judge, monkeypatch):
    go_on = asyncio.Event()
    events = text_stream("one", "two")

    async def slow(_seen: Seen, wire: Wire) -> None:
        await wire.head(Content_Type="text/event-stream", Transfer_Encoding="chunked")
        await wire.chunk(events[0])
        await go_on.wait()
        for event in events[1:]:
            await wire.chunk(event)
        await wire.last_chunk()

    upstream.script(slow)
    async with ending(serve(drain_timeout_s=PATIENCE_S), monkeypatch) as (url, end), Client(url) as client:
        await client.start("POST", "/v1/chat/completions", body_of({**CHAT, "stream": True}))
        answer = await client.head()
        answer.body += await client.chunk()
        await end()
        go_on.set()
        await client.rest(answer)
        assert await client.reader.read() == b""
    assert answer.body == b"".join(events)


@pytest.mark.parametrize("used", [True, False])
async def test_waiting_connections_do_not_hold_up_the_end(upstream, serve, judge, used):
    upstream.script(reply(completion()))
    async with contextlib.AsyncExitStack() as stack:
        url = await stack.enter_async_context(serve(drain_timeout_s=60.0))
        client = await Client(url).__aenter__()
        if used:
            assert (await client.post(CHAT)).status == 200
        async with asyncio.timeout(PATIENCE_S):
            await stack.aclose()
        assert await client.reader.read() == b""
        client.abort()


async def test_a_socket_that_another_daemon_made_while_we_drained_stays(serve, judge, monkeypatch, tmp_path):
    paths = [str(tmp_path / "w.sock"), str(tmp_path / "d.sock")]
    made = []

    async def drained(_app, _timeout_s):
        made.extend(bind_unix(path) for path in paths)

    monkeypatch.setattr(App, "drained", drained)
    async with serve(listen=f"unix:{paths[0]}", decision_socket=f"unix:{paths[1]}"):
        pass
    for path, listener in zip(paths, made, strict=True):
        with listener:
            _, writer = await asyncio.open_unix_connection(path)
            writer.close()
