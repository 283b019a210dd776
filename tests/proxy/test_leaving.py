"""Whoever leaves, whenever: a client that vanishes, or a daemon that is told to end, in every state of a request.

Each state is reached by events. A client that left must cost nothing more: what the daemon had begun for it, upstream
or in the gate, ends. A drain lets the request end as it would have; one whose time is over cuts it, visibly.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.fakes.chats import CHAT, body_of, metric
from tests.fakes.client import Client, Truncated
from tests.fakes.judge import ScriptedJudge
from tests.fakes.upstream import (
    PATIENCE_S,
    FakeUpstream,
    Seen,
    Wire,
    _Protocol,
    completion,
    delta,
    hang,
    reply,
    text_stream,
    tool_call,
)
from whetherman_edge.proxy.http_server import AHEAD_MAX

PATH = "/v1/chat/completions"
STREAM = body_of({**CHAT, "stream": True})
ANSWER = {"force": "ANSWER", "intervention": "strip"}
# More megabytes than the kernel takes on both sides of the daemon.
REPLY_PIECES = 16
LOOK_S = 0.02
SETTLED_LOOKS = 10
SYN_SENT = "02"


@dataclass
class Case:
    """One request on its way to a state. ``go_on``: set to let the upstream finish it."""

    url: str
    upstream: FakeUpstream
    judge: ScriptedJudge
    client: Client
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    body: bytes = b""  # what is still to be sent
    listener: socket.socket | None = None
    fillers: list[socket.socket] = field(default_factory=list)
    server: asyncio.Server | None = None  # on ``listener``

    async def asks(self, body: bytes) -> Seen:
        """Send the request; returns when it has reached the upstream."""
        arrived = asyncio.ensure_future(self.upstream.next_request())
        await asyncio.sleep(0)  # it listens
        await self.client.start("POST", PATH, body)
        return await arrived

    async def finishes(self, _seen: Seen, wire: Wire) -> None:
        """A script: nothing until told to go on."""
        while not self.go_on.is_set() and not wire.closed.is_set():
            await _first(self.go_on, wire.closed)
        await reply(completion())(_seen, wire)


async def _first(*events: asyncio.Event) -> None:
    tasks = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


async def _seen_to(holds: Callable[[], bool | Awaitable[bool]]) -> None:
    """Wait for what nobody tells."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found = holds()
            if found if isinstance(found, bool) else await found:
                return
            await asyncio.sleep(LOOK_S)


# --- the states: each returns what must come to an end when the client leaves ---------------------------------------

Ends = Callable[[], Awaitable[object]]


async def uploading(case: Case) -> Ends:
    """Half of the body is there."""
    body = body_of({**CHAT, "padding": "x" * 300_000})
    case.upstream.script(case.finishes)
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\nExpect: 100-continue\r\n\r\n"
    await case.client.send(head.encode())
    assert await case.client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    await case.client.send(body[:1000])
    case.body = body[1000:]

    async def counted() -> bool:
        return await metric(case.url, "client_closed_total") == 1

    return lambda: _seen_to(counted)


async def judged(case: Case) -> Ends:
    """In the gate, which may change it; nothing has been sent."""
    case.judge.mode = "held"
    case.upstream.script(case.finishes)
    await case.client.start("POST", PATH, body_of(CHAT))
    await case.judge.entered.wait()
    return case.judge.cancelled.wait


async def connecting(case: Case) -> Ends:
    """The upstream's queue of connections is full: ours is not made."""
    assert case.listener is not None
    address = case.listener.getsockname()
    while len(case.fillers) < 2:
        filler = socket.socket()
        filler.setblocking(False)
        filler.connect_ex(address)
        case.fillers.append(filler)
    case.upstream.script(case.finishes)
    before = _connecting_to(address[1])
    await case.client.start("POST", PATH, body_of(CHAT))
    await _seen_to(lambda: _connecting_to(address[1]) > before)
    return lambda: _seen_to(lambda: _connecting_to(address[1]) <= before)


async def waiting(case: Case) -> Ends:
    """Sent; not a byte has come."""
    case.upstream.script(case.finishes)
    return (await case.asks(body_of(CHAT))).closed.wait


async def waiting_on_a_kept_connection(case: Case) -> Ends:
    """The same, as the second request of its connection."""
    assert (await case.client.post(CHAT)).status == 200
    return await waiting(case)


async def held_back(case: Case) -> Ends:
    """Steered; the reply has begun, and may still become a call."""

    async def begins(seen: Seen, wire: Wire) -> None:
        await wire.head(Content_Type="text/event-stream", Transfer_Encoding="chunked")
        await wire.chunk(delta(role="assistant", content=""))
        await _first(case.go_on, wire.closed)
        for event in text_stream("It is one.", " Yes.")[1:]:
            await wire.chunk(event)
        await wire.last_chunk()

    case.upstream.script(begins)
    return (await case.asks(STREAM)).closed.wait


async def sent_again(case: Case) -> Ends:
    """Steered; the model called all the same, and is asked once more with the client's own bytes."""
    case.upstream.script(reply(completion(None, tool_calls=[tool_call()])), case.finishes)
    seen = await case.asks(body_of(CHAT))
    while seen.body != body_of(CHAT):
        seen = await case.upstream.next_request()
    return seen.closed.wait


async def judged_beside(case: Case) -> Ends:
    """In shadow: the model has answered, the gate has not."""
    case.judge.mode = "held"
    seen = await case.asks(body_of(CHAT))
    await case.judge.entered.wait()

    async def both() -> None:
        await case.judge.cancelled.wait()
        await seen.closed.wait()

    return both


async def read_slowly(case: Case) -> Ends:
    """The client takes no more of a reply, and so the daemon no more of it from the upstream."""
    wires: list[Wire] = []

    async def much(_seen: Seen, wire: Wire) -> None:
        wires.append(wire)
        await wire.head(Content_Type="text/event-stream", Transfer_Encoding="chunked")
        for _ in range(REPLY_PIECES):
            await wire.chunk(delta(content="x" * (1 << 20)))
        await wire.last_chunk()

    case.upstream.script(much)
    seen = await case.asks(STREAM)
    looks: list[int] = []

    def settled() -> bool:
        looks.append(wires[0]._writer.transport.get_write_buffer_size())
        return looks[-1] > 0 and len(set(looks[-SETTLED_LOOKS:])) == 1 and len(looks) >= SETTLED_LOOKS

    await _seen_to(settled)
    return seen.closed.wait


STATES: dict[Callable[[Case], Awaitable[Ends]], dict] = {
    uploading: {},
    judged: {"mode": "enforce", "gate_deadline_ms": 3000},
    connecting: {},
    waiting: {},
    waiting_on_a_kept_connection: {},
    held_back: ANSWER,
    sent_again: ANSWER,
    judged_beside: {"gate_deadline_ms": 3000},
    read_slowly: {},
}
ALL = pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)


@contextlib.asynccontextmanager
async def at(state, upstream, serve, judge, /, listen: str = "", **keys) -> AsyncIterator[tuple[Case, Ends, Callable]]:
    """One request in that state; ``end()`` begins and awaits the daemon's end."""
    keys = {**STATES[state], **keys}
    listener = None
    if state is connecting:
        listener = socket.create_server(("127.0.0.1", 0), backlog=0)
        listener.setblocking(False)
        keys["upstream"] = f"http://127.0.0.1:{listener.getsockname()[1]}"
    if listen:
        keys["listen"] = listen
    async with contextlib.AsyncExitStack() as stack:
        url = await stack.enter_async_context(serve(**keys))
        client = await Client(url).__aenter__()
        case = Case(url, upstream, judge, client, listener=listener)
        if listener is not None:
            listener.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:  # the daemon looked whether the upstream is there
                    listener.accept()[0].close()
        try:
            async with asyncio.timeout(PATIENCE_S * 12):  # a guard; nothing is measured
                yield case, await state(case), stack.aclose
        finally:
            client.abort()
            case.go_on.set()
            judge.released.set()
            if case.server is not None:
                case.server.close()
            for one in (*case.fillers, *([listener] if listener is not None else [])):
                one.close()


def _connecting_to(port: int) -> int:
    """Connections to a port of this machine that are being made."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[3] == SYN_SENT and row[2].endswith(f":{port:04X}") for row in rows)


def leave(client: Client, how: str) -> None:
    """Close, or reset, the client's connection."""
    connected = client.writer.get_extra_info("socket")
    if how == "reset":
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.abort()


@ALL
@pytest.mark.parametrize("how", ["close", "reset"])
async def test_s05_a_client_that_leaves_costs_nothing_more(upstream, serve, judge, state, how):
    async with at(state, upstream, serve, judge) as (case, ends, _end):
        n_asked = len(upstream.requests)
        leave(case.client, how)
        await ends()
        assert len(upstream.requests) == n_asked


@ALL
async def test_s05_a_client_on_a_unix_socket_that_leaves_costs_nothing_more(upstream, serve, judge, state, tmp_path):
    async with at(state, upstream, serve, judge, listen=f"unix:{tmp_path}/s") as (case, ends, _end):
        case.client.abort()
        await ends()


@ALL
async def test_a_drain_lets_a_request_end_as_it_would_have(upstream, serve, judge, state):
    async with at(state, upstream, serve, judge, drain_timeout_s=4 * PATIENCE_S) as (case, _ends, end):
        ending = asyncio.create_task(end())
        await _seen_to(lambda: not _listens(case.url))
        if case.body:
            await case.client.send(case.body)
        case.go_on.set()
        judge.released.set()
        if case.listener is not None:
            loop = asyncio.get_running_loop()
            case.server = await loop.create_server(lambda: _Protocol(upstream._serve), sock=case.listener.dup())
        answer = await case.client.head()
        begun = state is read_slowly  # its head was written before the drain, and the connection ends all the same
        assert (answer.status, answer.header("Connection")) == (200, None if begun else "close")
        rest = await case.client.reader.read()
        if answer.header("Transfer-Encoding") == "chunked":
            assert rest.endswith(b"\r\n0\r\n\r\n")
            assert state is held_back or len(rest) > REPLY_PIECES << 20
        else:
            assert json.loads(rest) == completion()
        await ending


@ALL
async def test_a_drain_whose_time_is_over_cuts_what_is_left_and_ends(upstream, serve, judge, state):
    async with at(state, upstream, serve, judge, drain_timeout_s=0.0) as (case, ends, end):
        await end()
        if state is not uploading:
            await ends()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError, Truncated)):
            await case.client.rest(await case.client.head())


def _listens(url: str) -> bool:
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


async def test_s05_a_client_that_leaves_with_pipelined_requests_behind_it_is_seen(upstream, serve, judge):
    upstream.default = hang
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(STREAM)}\r\n\r\n"
    async with serve() as url, Client(url) as client:
        arrived = asyncio.ensure_future(upstream.next_request())
        await asyncio.sleep(0)
        await client.send((head.encode() + STREAM) * 3)
        seen = await arrived
        client.abort()
        async with asyncio.timeout(PATIENCE_S):
            await seen.closed.wait()
        assert await metric(url, "client_closed_total") == 1
    assert len(upstream.requests) == 1


@pytest.mark.skipif(not hasattr(select, "POLLRDHUP"), reason="the kernel does not tell")
@pytest.mark.parametrize("how", ["close", "reset"])
async def test_s05_a_client_that_leaves_with_more_sent_ahead_than_is_read_is_seen(upstream, serve, judge, how):
    """Nothing is read from it then, so its end is looked for."""
    upstream.default = hang
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(STREAM)}\r\n\r\n"
    async with serve() as url, Client(url) as client:
        arrived = asyncio.ensure_future(upstream.next_request())
        await asyncio.sleep(0)
        await client.send((head.encode() + STREAM) * (AHEAD_MAX + 4))
        seen = await arrived
        leave(client, how)
        async with asyncio.timeout(PATIENCE_S):
            await seen.closed.wait()
        assert await metric(url, "client_closed_total") == 1
    assert len(upstream.requests) == 1


async def test_s05_a_client_that_leaves_ends_the_request_to_an_upstream_on_a_unix_socket(serve, judge, tmp_path):
    upstream = await FakeUpstream(hang).start(f"{tmp_path}/u")
    async with at(waiting, upstream, serve, judge, upstream=upstream.url) as (case, ends, _end):
        case.client.abort()
        await ends()
    await upstream.stop()


async def test_s05_a_client_that_ends_its_side_has_left(upstream, serve, judge):
    """Nothing but a later write tells it from one that closed, and a model would compute for minutes until then."""
    async with at(waiting, upstream, serve, judge) as (case, ends, _end):
        case.client.writer.write_eof()
        await ends()
