"""The decision socket: framing, operations, order, back-pressure, and what happens to bad bytes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whetherman_edge.client import DecisionClient, DecisionError
from whetherman_edge.errors import RequestError, ViewError
from whetherman_edge.router.decision import Choice
from whetherman_edge.service import decision_socket as ds
from whetherman_edge.service.frames import FRAME_BYTES_MAX, FrameError, FrameParser, frame
from whetherman_edge.service.sockets import bind_unix

# --- framing -------------------------------------------------------------------------------------------------------

STREAMS = [
    (b"", []),
    (frame(b"a"), [b"a"]),
    (frame(b"one") + frame(b"two") + frame(b"\x00" * 300), [b"one", b"two", b"\x00" * 300]),
    (frame(b"x" * 70_000), [b"x" * 70_000]),
]


@pytest.mark.parametrize(("stream", "payloads"), STREAMS)
def test_frames_whole_and_byte_by_byte(stream: bytes, payloads: list[bytes]) -> None:
    whole = FrameParser()
    assert list(whole.feed(stream)) == payloads
    assert whole.is_between_frames
    slow = FrameParser()
    got = [payload for i in range(len(stream)) for payload in slow.feed(stream[i : i + 1])]
    assert got == payloads


@pytest.mark.parametrize(("stream", "payloads"), STREAMS[1:])
def test_frames_with_trailing_data(stream: bytes, payloads: list[bytes]) -> None:
    parser = FrameParser()
    assert list(parser.feed(stream + b"\x00\x00")) == payloads
    assert not parser.is_between_frames
    assert list(parser.feed(b"\x00\x01z")) == [b"z"]


@pytest.mark.parametrize("length", [0, FRAME_BYTES_MAX + 1, 0xFFFFFFFF, int.from_bytes(b"GET ", "big")])
def test_a_length_that_cannot_be_ends_the_stream_after_the_frames_before_it(length: int) -> None:
    parser = FrameParser()
    frames = parser.feed(frame(b"fine") + struct.pack(">I", length) + b"rest")
    assert next(frames) == b"fine"
    with pytest.raises(FrameError, match="length"):
        next(frames)


@pytest.mark.parametrize("payload", [b"", b"x" * (FRAME_BYTES_MAX + 1)])
def test_what_cannot_be_framed(payload: bytes) -> None:
    with pytest.raises(FrameError):
        frame(payload)


@given(st.lists(st.binary(min_size=1, max_size=50)), st.lists(st.integers(1, 20), min_size=1))
def test_fuzz_any_cut_gives_the_same_frames(payloads: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(map(frame, payloads))
    parser, got, at, turn = FrameParser(), [], 0, 0
    while at < len(stream):
        size = cuts[turn % len(cuts)]
        got += parser.feed(stream[at : at + size])
        at, turn = at + size, turn + 1
    assert got == payloads


@given(st.lists(st.binary(max_size=64), max_size=10))
def test_fuzz_any_bytes_are_frames_or_a_frame_error(portions: list[bytes]) -> None:
    parser = FrameParser(frame_bytes_max=1024)
    try:
        for portion in portions:
            for payload in parser.feed(portion):
                assert 0 < len(payload) <= 1024
    except FrameError:
        pass


# --- the server ----------------------------------------------------------------------------------------------------


class Recorder:
    """Handlers that say what they were asked. ``gate``: holds ``decide`` until it is set."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.decided: list[tuple[bytes, str]] = []

    async def route(self, query: str, options: Any) -> Choice:
        if not query:
            raise RequestError("query must not be empty", ("body", "query"))
        if query == "bug":
            raise ZeroDivisionError
        return Choice(next(iter(options)), dict.fromkeys(options, 1.0 / len(options)), 0.5)

    async def decide(self, body: bytes, profile: str) -> dict[str, Any]:
        self.decided.append((body, profile))
        await self.gate.wait()
        if body == b"no":
            raise ViewError("expected a chat body")
        return {"decision": "ACT", "size": len(body)}


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
async def path(recorder: Recorder, tmp_path) -> AsyncIterator[str]:
    name = str(tmp_path / "d.sock")
    server = ds.DecisionSocket(ds.Handlers(recorder.route, recorder.decide), connections_max=8)
    await server.start(bind_unix(name))
    yield name
    await server.stop()


class Peer:
    """A raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()

    def send(self, *requests: Any) -> None:
        self.writer.write(b"".join(frame(msgspec.msgpack.encode(request)) for request in requests))

    async def reply(self) -> Any:
        async with asyncio.timeout(10):
            (length,) = struct.unpack(">I", await self.reader.readexactly(4))
            return msgspec.msgpack.decode(await self.reader.readexactly(length))

    async def ended(self) -> bool:
        async with asyncio.timeout(10):
            return await self.reader.read() == b""


Connect = Callable[[str], Awaitable[Peer]]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    peers: list[Peer] = []

    async def opened(path: str) -> Peer:
        peers.append(Peer(*await asyncio.open_unix_connection(path)))
        return peers[-1]

    yield opened
    for peer in peers:
        await peer.close()


async def ask(path: str, request: Any) -> Any:
    peer = Peer(*await asyncio.open_unix_connection(path))
    peer.send(request)
    reply = await peer.reply()
    await peer.close()
    return reply


async def test_the_socket_file_is_private(path: str) -> None:
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


async def test_ping(path: str) -> None:
    assert await ask(path, {"op": "ping", "id": 7}) == {"id": 7, "result": {"pong": True}}


async def test_route(path: str) -> None:
    reply = await ask(
        path, {"op": "route", "id": "a", "query": "q", "options": {"x": None, "환불": {"description": "d"}}}
    )
    assert reply["id"] == "a"
    assert reply["result"].pop("ms") >= 0
    assert reply["result"] == {"choice": "x", "probabilities": {"x": 0.5, "환불": 0.5}, "confidence": 0.5}


@pytest.mark.parametrize(
    ("request_value", "body"),
    [({"model": "m", "messages": []}, b'{"model":"m","messages":[]}'), (b'{"model": "m"}', b'{"model": "m"}')],
)
async def test_decide_takes_a_map_or_json(path: str, recorder: Recorder, request_value: Any, body: bytes) -> None:
    reply = await ask(path, {"op": "decide", "request": request_value, "profile": "p"})
    assert reply == {"id": None, "result": {"decision": "ACT", "size": len(body)}}
    assert recorder.decided == [(body, "p")]


@pytest.mark.parametrize(
    ("request_value", "message"),
    [
        ({"op": "route", "query": "", "options": {}}, "query must not be empty"),
        ({"op": "route", "query": 5, "options": {}}, "route"),
        ({"op": "route", "query": "q"}, "options"),
        ({"op": "decide", "request": b"no"}, "chat body"),
        ({"op": "decide", "request": 7}, "chat body"),
        ({"op": "decide", "request": {"f": msgspec.msgpack.Ext(5, b"x")}}, "JSON"),
        ({"op": "reboot"}, "reboot"),
    ],
)
async def test_a_request_that_does_not_fit_is_answered_and_the_connection_goes_on(
    connect: Connect, path: str, request_value: dict[str, Any], message: str
) -> None:
    peer = await connect(path)
    peer.send({**request_value, "id": 1}, {"op": "ping", "id": 2})
    reply = await peer.reply()
    assert reply["id"] == 1
    assert reply["error"]["type"] == "invalid_request"
    assert message in reply["error"]["message"]
    assert (await peer.reply())["id"] == 2


async def test_a_bug_is_an_internal_error_and_its_text_stays_here(path: str, caplog: pytest.LogCaptureFixture) -> None:
    reply = await ask(path, {"op": "route", "id": 1, "query": "bug", "options": {"a": None}})
    assert reply["error"]["type"] == "internal_error"
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize(
    "stream",
    [
        struct.pack(">I", 0),
        struct.pack(">I", FRAME_BYTES_MAX + 1),
        b"GET / HTTP/1.1\r\n\r\n",
        frame(b"\xc1"),
        frame(msgspec.msgpack.encode([1, 2])),
        frame(msgspec.msgpack.encode({"id": 4})),
        frame(msgspec.msgpack.encode({"op": 9})),
        frame(msgspec.msgpack.encode({"op": "ping"}) + b"x"),
        frame(b"\x91" * 50_000),
    ],
)
async def test_bad_bytes_get_an_error_and_the_end(connect: Connect, path: str, stream: bytes) -> None:
    peer = await connect(path)
    peer.send({"op": "ping", "id": 1})
    peer.writer.write(stream)
    peer.send({"op": "ping", "id": 2})
    assert (await peer.reply())["id"] == 1
    reply = await peer.reply()
    assert reply["id"] is None
    assert reply["error"]["type"] == "bad_frame"
    assert await peer.ended()


async def test_pipelined_requests_are_answered_in_order(connect: Connect, path: str) -> None:
    peer = await connect(path)
    wanted = list(range(500))
    peer.send(*({"op": "ping", "id": i} for i in wanted))
    assert [(await peer.reply())["id"] for _ in wanted] == wanted


async def test_a_slow_decision_holds_its_own_connection_only(connect: Connect, path: str, recorder: Recorder) -> None:
    recorder.gate.clear()
    slow = await connect(path)
    slow.send({"op": "decide", "id": 1, "request": {}}, {"op": "ping", "id": 2})
    assert (await ask(path, {"op": "ping", "id": 3}))["id"] == 3
    assert len(recorder.decided) == 1
    recorder.gate.set()
    assert [(await slow.reply())["id"], (await slow.reply())["id"]] == [1, 2]


async def test_one_request_of_a_connection_is_in_flight_at_a_time(
    connect: Connect, path: str, recorder: Recorder
) -> None:
    recorder.gate.clear()
    peer = await connect(path)
    peer.send(*({"op": "decide", "id": i, "request": {}} for i in range(50)))
    await ask(path, {"op": "ping"})
    assert len(recorder.decided) == 1
    recorder.gate.set()
    assert [(await peer.reply())["id"] for _ in range(50)] == list(range(50))


async def test_a_client_that_does_not_read_is_not_read(connect: Connect, path: str, recorder: Recorder) -> None:
    """Replies pile up to a bound, then the server stops; once the client reads, all of them come."""
    peer = await connect(path)
    options = {f"option {i}": None for i in range(200)}
    request = frame(msgspec.msgpack.encode({"op": "route", "query": "q", "options": options}))
    n = 2000
    sending = asyncio.ensure_future(_send_all(peer, request * n))
    for _ in range(200):
        await ask(path, {"op": "ping"})
    assert not sending.done()
    replies = [await peer.reply() for _ in range(n)]
    await sending
    assert all(reply["result"]["choice"] == "option 0" for reply in replies)


async def _send_all(peer: Peer, data: bytes) -> None:
    peer.writer.write(data)
    await peer.writer.drain()


async def test_half_a_frame_is_waited_for_and_then_cut_off(
    connect: Connect, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ds, "STALL_S_MAX", 0.05)
    peer = await connect(path)
    peer.send({"op": "ping", "id": 1})
    await peer.reply()
    peer.writer.write(frame(msgspec.msgpack.encode({"op": "ping"}))[:6])
    assert await peer.ended()


async def test_too_many_connections_are_told_so(connect: Connect, path: str) -> None:
    peers = [await connect(path) for _ in range(8)]
    for peer in peers:
        peer.send({"op": "ping"})
        await peer.reply()
    extra = await connect(path)
    assert (await extra.reply())["error"]["type"] == "busy"
    assert await extra.ended()
    await peers[0].close()
    await ask(path, {"op": "ping"})


async def test_stopping_ends_open_connections(connect: Connect, tmp_path, recorder: Recorder) -> None:
    name = str(tmp_path / "s.sock")
    server = ds.DecisionSocket(ds.Handlers(recorder.route, recorder.decide))
    await server.start(bind_unix(name))
    peer = await connect(name)
    peer.send({"op": "ping"})
    await peer.reply()
    await server.stop()
    assert await peer.ended()


# --- the client ----------------------------------------------------------------------------------------------------


async def test_the_documented_client(path: str) -> None:
    def use() -> tuple[Any, Any, str]:
        with DecisionClient(f"unix:{path}") as client:
            choice = client.route("q", {"a": "first", "b": None})["choice"]
            decision = client.decide({"messages": []}, profile="p")["decision"]
            with pytest.raises(DecisionError) as caught:
                client.route("", {})
            assert client.call("ping") == {"pong": True}
            return choice, decision, caught.value.kind

    assert await asyncio.to_thread(use) == ("a", "ACT", "invalid_request")


async def test_the_client_gives_up_in_time_and_is_closed_then(path: str, recorder: Recorder) -> None:
    recorder.gate.clear()

    def use() -> None:
        with DecisionClient(path, timeout_s=0.05) as client:
            with pytest.raises(TimeoutError):
                client.decide({})
            with pytest.raises(OSError, match=r"."):
                client.call("ping")

    await asyncio.to_thread(use)
    recorder.gate.set()


async def test_the_client_notices_a_daemon_that_went_away(tmp_path, recorder: Recorder) -> None:
    name = str(tmp_path / "s.sock")
    server = ds.DecisionSocket(ds.Handlers(recorder.route, recorder.decide))
    await server.start(bind_unix(name))
    client = await asyncio.to_thread(DecisionClient, name)
    assert await asyncio.to_thread(client.call, "ping") == {"pong": True}
    await server.stop()
    with pytest.raises(OSError, match=r"."):
        await asyncio.to_thread(client.call, "ping")


def test_a_missing_socket_is_an_os_error(tmp_path) -> None:
    with pytest.raises(FileNotFoundError):
        DecisionClient(str(tmp_path / "none.sock"))
