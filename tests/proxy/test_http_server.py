"""The server's side of HTTP/1.x: what is a request, in which order they are served, and what is refused."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.upstream import PATIENCE_S
from whetherman_edge.proxy import http_server
from whetherman_edge.proxy.http_server import AHEAD_MAX, HEAD_BYTES_MAX, HELD_BYTES_MAX, ClientConnection, HttpServer
from whetherman_edge.proxy.request import Request

HOST = b"Host: localhost\r\n"
GET = b"GET /a HTTP/1.1\r\n" + HOST + b"\r\n"
POST = b"POST /a HTTP/1.1\r\n" + HOST
HELLO = POST + b"Content-Length: 5\r\n\r\nhello"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n3;x=y\r\nhel\r\n2\r\nlo\r\n0\r\nHost: trailer\r\n\r\n"
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n"


class FakeTransport(asyncio.Transport):
    """A Unix socket: records what is done to it, and ends the protocol in the loop's next turn, as a real one does."""

    def __init__(self, protocol: ClientConnection, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._protocol = protocol
        self._loop = loop
        self.written = b""
        self.closing = self.half_closed = self.aborted = False
        self.reading = True

    def get_extra_info(self, name, default=None):
        return "/run/x.sock" if name == "sockname" else default

    def write(self, data) -> None:
        assert not self.half_closed
        self.written += data

    def write_eof(self) -> None:
        self.half_closed = True

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None:
        assert not self.closing
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.closing
        self.reading = True

    def close(self) -> None:
        if not self.closing:
            self.closing = True
            self._loop.call_soon(self._protocol.connection_lost, None)

    def abort(self) -> None:
        self.aborted = True
        self.close()


class Talk:
    """One connection to a server that answers each request with its body. ``seen``: (method, target, body) of each.

    ``reads`` False: it answers without reading the body. ``go_on``: cleared, it waits before it answers.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.faults: list[dict] = []
        self.loop.set_exception_handler(lambda _loop, context: self.faults.append(context))
        self.server = HttpServer(self._handle)
        self.connection = self.server()
        self.transport = FakeTransport(self.connection, self.loop)
        self.connection.connection_made(self.transport)
        self.seen: list[tuple[str, bytes, bytes]] = []
        self.requests: list[Request] = []
        self.cancelled = 0
        self.reads = True
        self.keeps = True
        self.begins = False
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def _handle(self, request: Request) -> bool:
        self.requests.append(request)
        try:
            body = b""
            if self.begins:
                request.connection.write(b"HTTP/1.1 200 OK\r\n")
            while self.reads and (part := await request.chunk()):
                body += part
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        self.seen.append((request.method, request.target, body))
        request.connection.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        return self.keeps and request.keep_alive

    async def say(self, *pieces: bytes) -> None:
        """Send bytes, and let everything happen that follows of them."""
        for piece in pieces:
            if not self.transport.closing:
                self.connection.data_received(piece)
            await self.settle()

    async def settle(self) -> None:
        for _ in range(6):
            await asyncio.sleep(0)

    async def end(self) -> None:
        """The client leaves."""
        self.transport.close()
        await self.settle()
        await self.server.shutdown(PATIENCE_S)
        assert self.faults == []
        assert not self.server.connections

    @property
    def statuses(self) -> list[int]:
        """Of the whole responses that were written; an error's body is checked."""
        found, rest = [], self.transport.written
        while rest:
            head, _, rest = rest.partition(b"\r\n\r\n")
            length = int(re.search(rb"(?i)content-length: (\d+)", head).group(1))
            body, rest = rest[:length], rest[length:]
            found.append(int(head.split(b" ")[1]))
            if found[-1] != 200:
                assert json.loads(body)["error"]["code"] == "bad_http"
        return found


def talk(*pieces: bytes) -> Talk:
    """A whole conversation in a loop of its own."""

    async def run() -> Talk:
        one = Talk()
        await one.say(*pieces)
        one.open = not one.transport.closing and not one.transport.half_closed
        await one.end()
        return one

    return asyncio.run(run())


def cut(data: bytes, at: list[int]) -> list[bytes]:
    marks = [0, *sorted({min(one, len(data)) for one in at}), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(marks) if end > start]


# name, bytes, requests, whether the connection stays open
GOOD = [
    ("get", GET, [("GET", b"/a", b"")], True),
    ("length", HELLO, [("POST", b"/a", b"hello")], True),
    ("chunked", CHUNKED, [("POST", b"/a", b"hello")], True),
    ("empty lines first", b"\r\n\r\n" + GET, [("GET", b"/a", b"")], True),
    (
        "sent ahead",
        HELLO + GET + CHUNKED,
        [("POST", b"/a", b"hello"), ("GET", b"/a", b""), ("POST", b"/a", b"hello")],
        True,
    ),
    ("get with a body", GET[:-2] + b"Content-Length: 2\r\n\r\nhi", [("GET", b"/a", b"hi")], True),
    ("close", GET[:-2] + b"Connection: close\r\n\r\n" + GET, [("GET", b"/a", b"")], False),
    ("close, then anything", GET[:-2] + b"Connection: close\r\n\r\n\x00\x01", [("GET", b"/a", b"")], False),
    ("1.0", b"GET /a HTTP/1.0\r\n\r\n", [("GET", b"/a", b"")], False),
    ("1.0 kept", b"GET /a HTTP/1.0\r\nConnection: keep-alive\r\n\r\n" + GET, [("GET", b"/a", b"")] * 2, True),
    (
        "1.0 and chunked",
        b"POST /a HTTP/1.0\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n" + GET,
        [("POST", b"/a", b"x")],
        False,
    ),
    ("upgrade offered", (GET[:-2] + H2C + b"\r\n") * 2, [("GET", b"/a", b"")] * 2, True),
    ("upgrade, length", (POST + H2C + b"Content-Length: 5\r\n\r\nhello") * 2, [("POST", b"/a", b"hello")] * 2, True),
    (
        "upgrade, empty",
        POST + H2C + b"Content-Length: 0\r\n\r\n" + GET,
        [("POST", b"/a", b""), ("GET", b"/a", b"")],
        True,
    ),
    (
        "upgrade, chunked",
        POST + H2C + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n" + GET,
        [("POST", b"/a", b"hello"), ("GET", b"/a", b"")],
        True,
    ),
    ("upgrade, last", GET[:-2] + b"Connection: upgrade, close\r\nUpgrade: h2c\r\n\r\n", [("GET", b"/a", b"")], False),
    ("absolute", b"GET http://h:1/b?c=http://d HTTP/1.1\r\n" + HOST + b"\r\n", [("GET", b"/b?c=http://d", b"")], True),
    ("absolute, no path", b"GET http://h?c HTTP/1.1\r\n" + HOST + b"\r\n", [("GET", b"/?c", b"")], True),
    ("asterisk", b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n", [("OPTIONS", b"*", b"")], True),
]


@pytest.mark.parametrize("bytewise", [False, True])
@pytest.mark.parametrize(("data", "requests", "stays"), [pytest.param(*one[1:], id=one[0]) for one in GOOD])
def test_a_request_is_read_and_its_connection_serves_again_or_not(data, requests, stays, bytewise):
    one = talk(*(cut(data, list(range(len(data)))) if bytewise else [data]))
    assert one.seen == requests
    assert one.statuses == [200] * len(requests)
    assert one.open == stays


def test_what_follows_a_connect_is_nobodys():
    one = talk(b"CONNECT h:1 HTTP/1.1\r\n" + HOST + b"\r\n" + GET)
    assert one.seen == [("CONNECT", b"h:1", b"")]
    assert not one.open


BAD = {
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "response": b"HTTP/1.1 200 OK\r\n\r\n",
    "no version": b"GET /a\r\n\r\n",
    "2.0": b"GET /a HTTP/2.0\r\n" + HOST + b"\r\n",
    "h2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no host": b"GET /a HTTP/1.1\r\n\r\n",
    "two hosts": GET[:-2] + HOST + b"\r\n",
    "two types": HELLO.replace(b"\r\n\r\n", b"\r\nContent-Type: a/b\r\nContent-Type: c/d\r\n\r\n"),
    "lone LF": GET.replace(b"\r\n", b"\n"),
    "lone CR": GET[:-2] + b"X: a\rb\r\n\r\n",
    "folded": GET[:-2] + b"X: a\r\n b\r\n\r\n",
    "space before the colon": b"GET /a HTTP/1.1\r\nHost : x\r\n\r\n",
    "NUL": GET[:-2] + b"X: a\x00\r\n\r\n",
    "letters in the name": GET[:-2] + b"X\xc3\xbc: a\r\n\r\n",
    "letters in the target": b"GET /\xc3\xbc HTTP/1.1\r\n" + HOST + b"\r\n",
    "space in the target": b"GET /a b HTTP/1.1\r\n" + HOST + b"\r\n",
    "relative target": b"GET a HTTP/1.1\r\n" + HOST + b"\r\n",
    "asterisk": b"GET * HTTP/1.1\r\n" + HOST + b"\r\n",
    "unknown method": b"FOO /a HTTP/1.1\r\n" + HOST + b"\r\n",
    "two lengths": POST + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    "length list": POST + b"Content-Length: 5, 5\r\n\r\nhello",
    "length with a sign": POST + b"Content-Length: +5\r\n\r\nhello",
    "length beyond numbers": POST + b"Content-Length: 99999999999999999999\r\n\r\nhello",
    "no length": POST + b"Content-Length:\r\n\r\nhello",
    "length and coding": POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "coding and length": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "coding twice": POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "two codings": POST + b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "gzip, chunked": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "gzip": POST + b"Transfer-Encoding: gzip\r\n\r\n",
    "no coding": POST + b"Transfer-Encoding:\r\n\r\n",
    "long line": GET[:-2] + b"X: " + b"x" * (64 << 10) + b"\r\n\r\n",
    "long target": b"GET /" + b"x" * (64 << 10) + b" HTTP/1.1\r\n" + HOST + b"\r\n",
    "many lines": GET[:-2] + b"X: 1\r\n" * 128 + b"\r\n",
}


@pytest.mark.parametrize("before", [b"", HELLO], ids=["first", "second"])
@pytest.mark.parametrize("name", BAD)
def test_what_is_no_request_gets_a_400_and_the_end(name, before, caplog):
    one = talk(before + BAD[name], GET)
    assert one.seen == [("POST", b"/a", b"hello")] * bool(before)
    assert one.statuses == [200] * bool(before) + [400]
    assert one.transport.half_closed
    assert b"Connection: close" in one.transport.written
    assert caplog.text.count("event=bad_http") == 1


@pytest.mark.parametrize("piece", [1, 4096])
@pytest.mark.parametrize(
    "endless",
    [
        GET[:-2] + b"X: ",
        b"GET /",
        CHUNKED.partition(b"\r\n\r\n")[0] + b"\r\n\r\n1;",
        CHUNKED.removesuffix(b"\r\n") + b"X: ",
    ],
    ids=["header", "target", "chunk extension", "trailer"],
)
def test_a_head_without_an_end_is_refused(endless, piece, monkeypatch):
    if piece == 1:
        monkeypatch.setattr(http_server, "HEAD_BYTES_MAX", 4096)
    size = http_server.HEAD_BYTES_MAX
    one = talk(endless, *[b"x" * piece] * (size // piece + 2))
    assert one.statuses == [400]
    assert one.seen == []


def test_a_long_head_within_the_limits_is_served():
    lines = [b"X-%d: %b\r\n" % (n, b"x" * 60_000) for n in range(4)]
    assert sum(map(len, lines)) < HEAD_BYTES_MAX
    assert talk(GET[:-2] + b"".join(lines) + b"\r\n").statuses == [200]
    assert talk(GET[:-2] + b"X: 1\r\n" * 127 + b"\r\n").statuses == [200]


async def test_requests_sent_ahead_are_served_one_after_another():
    one = Talk()
    one.go_on.clear()
    await one.say(HELLO * 3)
    assert (len(one.requests), one.transport.written) == (1, b"")
    one.go_on.set()
    await one.settle()
    await one.settle()
    assert one.statuses == [200] * 3
    await one.end()


async def test_garbage_behind_a_request_that_is_served_waits_for_its_turn():
    one = Talk()
    one.go_on.clear()
    await one.say(HELLO, b"\x00garbage\r\n\r\n", GET)
    assert one.transport.written == b""
    one.go_on.set()
    await one.settle()
    assert one.statuses == [200, 400]
    await one.end()
    assert len(one.requests) == 1


@pytest.mark.parametrize("begun", [False, True])
async def test_a_body_that_breaks_ends_what_is_served(begun):
    one = Talk()
    one.begins = begun
    await one.say(POST + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", b"ZZ\r\n")
    assert one.cancelled == 1
    if begun:
        assert one.transport.written == b"HTTP/1.1 200 OK\r\n"
        assert one.transport.aborted
    else:
        assert one.statuses == [400]
    await one.end()
    assert one.seen == []


async def test_a_body_that_breaks_before_its_turn_is_never_served():
    one = Talk()
    one.go_on.clear()
    await one.say(HELLO, POST + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\nZZ\r\n")
    one.go_on.set()
    await one.settle()
    assert one.statuses == [200, 400]
    await one.end()
    assert len(one.requests) == 1


async def test_a_client_that_leaves_cancels_what_is_served_and_what_waits():
    one = Talk()
    one.go_on.clear()
    await one.say(HELLO + GET)
    await one.end()
    assert (one.cancelled, len(one.requests), one.seen) == (1, 1, [])


async def test_a_reader_of_a_body_learns_that_its_client_left():
    one = Talk()
    await one.say(POST + b"Content-Length: 5\r\n\r\nhe")
    (request,) = one.requests
    one.reads = False
    one.connection._task.cancel()
    await one.settle()
    reading = asyncio.create_task(request.chunk())
    await one.end()
    with pytest.raises(ConnectionResetError):
        await reading


async def test_a_body_that_nobody_reads_makes_the_client_wait():
    one = Talk()
    one.reads = False
    one.go_on.clear()
    size = HELD_BYTES_MAX * 2
    await one.say(POST + b"Content-Length: %d\r\n\r\n" % (size + 5), b"x" * size)
    assert not one.transport.reading
    (request,) = one.requests
    assert await request.chunk() == b"x" * size
    assert one.transport.reading
    one.go_on.set()
    await one.say(b"hello" + GET)
    assert one.statuses == [200, 200]
    await one.end()


async def test_many_requests_sent_ahead_make_the_client_wait():
    one = Talk()
    one.go_on.clear()
    await one.say(GET * (AHEAD_MAX + 1))
    assert not one.transport.reading
    one.go_on.set()
    for _ in range(AHEAD_MAX + 1):
        await one.settle()
    assert one.statuses == [200] * (AHEAD_MAX + 1)
    assert one.transport.reading
    await one.end()


async def test_a_request_sent_ahead_costs_no_look_at_those_before_it(monkeypatch):
    """Thousands fit into one read from the socket."""
    looks = []
    monkeypatch.setattr(Request, "__eq__", lambda one, other: looks.append(other) or one is other)
    one = Talk()
    one.go_on.clear()
    await one.say(HELLO * 50, POST + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n")
    one.go_on.set()
    for _ in range(50):
        await one.settle()
    assert one.statuses == [200] * 50 + [400]
    assert looks == []
    await one.end()


@pytest.mark.parametrize("keeps", [True, False])
async def test_the_rest_of_a_body_that_was_not_read_is_dropped(keeps):
    one = Talk()
    one.reads, one.keeps = False, keeps
    size = HELD_BYTES_MAX * 2
    await one.say(POST + b"Content-Length: %d\r\n\r\n" % (size + 1), b"x" * size)
    assert one.statuses == [200]
    assert one.transport.reading
    assert not one.transport.closing
    await one.say(b"x" + GET)
    assert one.statuses == ([200, 200] if keeps else [200])
    assert one.transport.closing is not keeps
    await one.end()


async def test_behind_a_refused_upload_nothing_more_is_served():
    one = Talk()
    one.reads = one.keeps = False
    await one.say(POST + b"Content-Length: 5\r\n\r\n", b"hello" + GET)
    assert one.statuses == [200]
    assert one.transport.closing
    await one.end()
    assert len(one.requests) == 1


async def test_what_breaks_behind_an_answer_is_not_answered_again():
    one = Talk()
    one.reads = False
    await one.say(POST + b"Transfer-Encoding: chunked\r\n\r\n", b"ZZ\r\n")
    assert one.statuses == [200]
    assert one.transport.closing
    await one.end()


async def test_what_was_not_read_takes_no_room_from_the_next_request():
    one = Talk()
    one.reads = False
    body = b"x" * (HELD_BYTES_MAX // 2)
    for _ in range(4):
        await one.say(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    assert one.transport.reading
    await one.end()


async def test_100_continue_is_no_answer_yet():
    one = Talk()
    one.go_on.clear()
    await one.say(POST + b"Expect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n")
    one.requests[0].connection.proceed()
    assert one.transport.written == b"HTTP/1.1 100 Continue\r\n\r\n"
    one.transport.written = b""
    await one.say(b"ZZ\r\n")
    assert one.statuses == [400]
    await one.end()


async def test_a_connection_that_waits_too_long_is_closed(monkeypatch):
    one = Talk()
    one.go_on.clear()
    await one.say(GET)
    monkeypatch.setattr(http_server, "IDLE_S_MAX", -1.0)
    one.server._look()
    assert not one.transport.closing
    one.go_on.set()
    await one.settle()
    one.server._look()
    assert one.transport.closing
    await one.end()


async def test_the_query_is_read_and_a_header_has_all_its_values():
    one = Talk()
    await one.say(b"GET /p/%41?a=%20b+c&a=d&e HTTP/1.1\r\n" + HOST + b"X-A: 1 \t\r\nx-a: 2\r\n\r\n")
    (request,) = one.requests
    assert (request.path, request.query) == ("/p/%41", {"a": "d", "e": ""})
    assert (request.headers["x-a"], request.all_of("x-a")) == ("1", ["1", "2"])
    assert request.raw_headers == [(b"Host", b"localhost"), (b"X-A", b"1"), (b"x-a", b"2")]
    await one.end()


@st.composite
def requests(draw: Callable) -> tuple[bytes, tuple[str, bytes, bytes]]:
    """A request as bytes, and what is to be seen of it."""
    body = draw(st.binary(max_size=40))
    target = b"/" + draw(st.text("ab/?=&%41", max_size=8)).encode()
    head = b"POST " + target + b" HTTP/1.1\r\n" + HOST + draw(st.sampled_from([b"", b"X: \r\n", H2C]))
    if draw(st.booleans()):
        parts = cut(body, draw(st.lists(st.integers(0, 40), max_size=3)))
        framed = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
        data = head + b"Transfer-Encoding: chunked\r\n\r\n" + framed + b"0\r\n\r\n"
    else:
        data = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    return data, ("POST", target, body)


@settings(max_examples=60, deadline=None)
@given(st.lists(requests(), min_size=1, max_size=4), st.lists(st.integers(0, 900), max_size=12))
def test_requests_on_one_connection_never_mix_however_they_are_cut(given_requests, at):
    data = b"".join(one for one, _ in given_requests)
    one = talk(*cut(data, at))
    assert one.seen == [seen for _, seen in given_requests]
    assert one.open


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([one[1] for one in GOOD] + list(BAD.values())[:-3]),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4),
    st.lists(st.integers(0, 400), max_size=6),
)
def test_damaged_requests_are_answered_as_such_or_refused(data, damage, at):
    damaged = bytearray(data + GET)
    for place, value in damage:
        damaged[place % len(damaged)] = value
    one = talk(*cut(bytes(damaged), at))
    assert one.statuses in ([200] * len(one.seen), [200] * len(one.seen) + [400])


def test_noise_is_refused_or_waited_for():
    chance = random.Random(3)
    for _ in range(50):
        one = talk(chance.randbytes(200), b"\r\n\r\n")
        assert one.statuses == [400]
        assert one.seen == []
