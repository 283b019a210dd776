"""The client's side of HTTP/1.1: what is read, and above all when a connection may serve again."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whetherman_edge.proxy.connection import BUFFERED_BYTES_MAX, HEAD_BYTES_MAX, BadResponse, Connection

OK = b"HTTP/1.1 200 OK\r\n"
LENGTH_5 = OK + b"Content-Length: 5\r\n\r\nhello"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n3;x=y\r\nhel\r\n2 \r\nlo\r\n0\r\nX-Trailer: 1\r\n\r\n"
BY_CLOSE = OK + b"Server: x\r\n\r\nhello"


class FakeTransport(asyncio.Transport):
    """Records what is done to it; ends the protocol at once, as no test here needs the loop for that."""

    def __init__(self, protocol: Connection) -> None:
        super().__init__()
        self.protocol = protocol
        self.written = b""
        self.ended = False
        self.reading = True

    def write(self, data) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.ended

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def end(self, exc: Exception | None = None) -> None:
        if not self.ended:
            self.ended = True
            self.protocol.connection_lost(exc)

    def close(self) -> None:
        self.end()

    def abort(self) -> None:
        self.end()


class Peer:
    """A connection with its fake socket."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.connection = Connection(self.loop)
        self.transport = FakeTransport(self.connection)
        self.connection.connection_made(self.transport)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_exc) -> None:
        self.transport.end()
        self.loop.close()

    def ask(self, *pieces: bytes, head_only: bool = False, eof: bool = False, lost: Exception | None = None) -> bytes:
        """One exchange; the response comes in these pieces. Returns its body, or raises what the reader gets."""
        self.connection.begin(head_only=head_only, idle_timeout_s=None)
        for piece in pieces:
            if piece and not self.transport.ended:
                self.connection.data_received(piece)
        if eof or lost is not None:
            self.transport.end(lost)
        return self.loop.run_until_complete(self._read())

    async def _read(self) -> bytes:
        async with asyncio.timeout(5):
            await self.connection.head()
            body = b""
            while data := await self.connection.read():
                body += data
            return body


def cut(data: bytes, at: list[int]) -> list[bytes]:
    marks = [0, *sorted({min(one, len(data)) for one in at}), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(marks) if end > start]


# name, bytes, body, status, headers, whether the connection serves again; closed by the peer at its end when eof
WHOLE = [
    ("length", LENGTH_5, b"hello", 200, [(b"Content-Length", b"5")], True),
    ("empty", OK + b"content-length: 0\r\n\r\n", b"", 200, [(b"content-length", b"0")], True),
    ("chunked", CHUNKED, b"hello", 200, [(b"Transfer-Encoding", b"chunked")], True),
    ("no reason", b"HTTP/1.1 201\r\nContent-Length: 0\r\n\r\n", b"", 201, [(b"Content-Length", b"0")], True),
    ("204", b"HTTP/1.1 204 No Content\r\n\r\n", b"", 204, [], True),
    ("304", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n", b"", 304, [(b"Content-Length", b"9")], True),
    ("lone LF", b"HTTP/1.1 200 OK\nContent-Length: 5\n\nhello", b"hello", 200, [(b"Content-Length", b"5")], True),
    (
        "odd headers",
        OK + b"x-a:\r\nX-A:  b c \t\r\nX-Latin: \xe9\xff\r\nContent-Length: 0\r\n\r\n",
        b"",
        200,
        [(b"x-a", b""), (b"X-A", b"b c"), (b"X-Latin", b"\xe9\xff"), (b"Content-Length", b"0")],
        True,
    ),
    (
        "informational first",
        b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n" + LENGTH_5,
        b"hello",
        200,
        [(b"Content-Length", b"5")],
        True,
    ),
    (
        "close",
        OK + b"Connection: Keep-Alive, close\r\nContent-Length: 5\r\n\r\nhello",
        b"hello",
        200,
        [(b"Connection", b"Keep-Alive, close"), (b"Content-Length", b"5")],
        False,
    ),
    ("1.0", b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello", b"hello", 200, [(b"Content-Length", b"5")], False),
    (
        "1.0 keep-alive",
        b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 5\r\n\r\nhello",
        b"hello",
        200,
        [(b"Connection", b"keep-alive"), (b"Content-Length", b"5")],
        True,
    ),
]


@pytest.mark.parametrize("bytewise", [False, True])
@pytest.mark.parametrize(
    ("data", "body", "status", "headers", "again"), [one[1:] for one in WHOLE], ids=[one[0] for one in WHOLE]
)
def test_a_response_is_read_and_says_whether_the_connection_serves_again(data, body, status, headers, again, bytewise):
    pieces = [bytes([byte]) for byte in data] if bytewise else [data]
    with Peer() as peer:
        assert peer.ask(*pieces) == body
        connection = peer.connection
        assert (connection.status, connection.headers, connection.reusable) == (status, headers, again)
        if again:
            connection.park(0.0)
            assert peer.ask(LENGTH_5) == b"hello"
            assert connection.headers == [(b"Content-Length", b"5")]


@pytest.mark.parametrize(
    "surplus",
    [b"x", b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nbad", b"\x00", b"H", LENGTH_5 * 3],
)
@pytest.mark.parametrize("first", [LENGTH_5, CHUNKED, b"HTTP/1.1 204 No Content\r\n\r\n"])
@pytest.mark.parametrize("apart", [False, True])
def test_bytes_after_a_whole_response_are_nobodys_and_end_the_connection(first, surplus, apart):
    with Peer() as peer:
        body = b"" if b"204" in first else b"hello"
        assert peer.ask(*([first, surplus] if apart else [first + surplus])) == body
        assert not peer.connection.reusable


@pytest.mark.parametrize("unasked", [LENGTH_5, b"\r\n", b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n"])
def test_bytes_that_nobody_asked_for_end_the_connection(unasked):
    with Peer() as peer:
        peer.ask(LENGTH_5)
        peer.connection.park(0.0)
        peer.connection.data_received(unasked)
        assert not peer.connection.reusable
        with pytest.raises(ConnectionResetError):
            peer.connection.begin(head_only=False, idle_timeout_s=None)


def test_bytes_before_the_first_request_end_the_connection():
    with Peer() as peer:
        peer.connection.data_received(LENGTH_5)
        assert not peer.connection.connected


@pytest.mark.parametrize("data", [OK + b"Content-Length: 17\r\n\r\n", OK + b"Transfer-Encoding: chunked\r\n\r\n"])
@pytest.mark.parametrize("surplus", [b"", b"17 bytes of a body"])
def test_a_response_to_head_has_no_body_and_its_connection_serves_nobody_else(data, surplus):
    with Peer() as peer:
        assert peer.ask(data + surplus, head_only=True) == b""
        assert not peer.connection.reusable


BAD = {
    "length and chunked": OK + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked and length": OK + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "two lengths": OK + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    "list of lengths": OK + b"Content-Length: 5, 5\r\n\r\nhello",
    "signed length": OK + b"Content-Length: +5\r\n\r\nhello",
    "length beyond 64 bits": OK + b"Content-Length: 99999999999999999999\r\n\r\nhello",
    "blank before the colon": OK + b"Content-Length : 5\r\n\r\nhello",
    "chunked twice": OK + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "gzip, chunked": OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunked, gzip": OK + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    "xchunked": OK + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunk size": OK + b"Transfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n0\r\n\r\n",
    "end of a chunk": OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhelloX\r\n0\r\n\r\n",
    "bare CR": OK + b"X: a\rSet-Cookie: b\r\nContent-Length: 0\r\n\r\n",
    "NUL": OK + b"X: a\x00b\r\nContent-Length: 0\r\n\r\n",
    "folded": OK + b"X: a\r\n b\r\nContent-Length: 0\r\n\r\n",
    "101": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nraw",
    "bare 101": b"HTTP/1.1 101 Switching Protocols\r\n\r\nraw",
    "099": b"HTTP/1.1 099 Low\r\nContent-Length: 0\r\n\r\n",
    "no HTTP": b"\x16\x03\x01\r\n\r\n",
    "endless head": OK + b"X: " + b"a" * HEAD_BYTES_MAX,
    "endless informational": b"HTTP/1.1 100 Continue\r\n\r\n" * (HEAD_BYTES_MAX // 25 + 1),
    "endless trailer": OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: " + b"a" * HEAD_BYTES_MAX,
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("size", [1_000, 1 << 30])
def test_what_is_no_proper_response_is_refused_and_ends_the_connection(data, size):
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    with Peer() as peer:
        with pytest.raises(BadResponse) as caught:
            peer.ask(*pieces)
        assert not peer.connection.connected
        assert "Set-Cookie" not in str(caught.value)


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_a_body_that_the_close_delimits_ends_with_it_and_not_with_a_reset(size):
    pieces = [BY_CLOSE[start : start + size] for start in range(0, len(BY_CLOSE), size)]
    with Peer() as peer:
        assert peer.ask(*pieces, eof=True) == b"hello"
        assert not peer.connection.reusable
    with Peer() as peer, pytest.raises(ConnectionResetError):
        peer.ask(*pieces, lost=ConnectionResetError("reset by peer"))


@pytest.mark.parametrize("data", [LENGTH_5, CHUNKED, b"HTTP/1.1 100 Continue\r\n\r\n" + LENGTH_5])
def test_a_response_cut_anywhere_is_never_whole(data):
    for end in range(len(data)):
        with Peer() as peer:
            with pytest.raises(ConnectionError):
                peer.ask(data[:end], eof=True)
            assert not peer.connection.reusable
            assert peer.connection.answered == (end > 0)


def test_a_slow_reader_makes_the_upstream_wait():
    body = b"x" * (BUFFERED_BYTES_MAX + 1)
    with Peer() as peer:
        peer.connection.begin(head_only=False, idle_timeout_s=None)
        peer.connection.data_received(OK + b"Content-Length: %d\r\n\r\n" % (len(body) + 1) + body)
        assert not peer.transport.reading
        assert peer.connection.read_nowait() == body
        assert peer.transport.reading
        assert not peer.connection.complete


def test_silence_longer_than_the_idle_timeout_is_an_error():
    with Peer() as peer:
        peer.connection.begin(head_only=False, idle_timeout_s=0.01)
        with pytest.raises(TimeoutError, match="no byte within"):
            peer.loop.run_until_complete(peer.connection.head())
        assert not peer.connection.connected


def test_a_writer_waits_while_the_upstream_takes_nothing_and_learns_of_its_end():
    async def drain(peer: Peer) -> None:
        peer.connection.pause_writing()
        waiting = asyncio.ensure_future(peer.connection.drain())
        await asyncio.sleep(0)
        assert not waiting.done()
        peer.connection.resume_writing()
        await waiting
        peer.connection.pause_writing()
        waiting = asyncio.ensure_future(peer.connection.drain())
        await asyncio.sleep(0)
        peer.transport.end()
        with pytest.raises(ConnectionResetError):
            await waiting
        with pytest.raises(ConnectionResetError):
            peer.connection.write(b"more")

    with Peer() as peer:
        peer.loop.run_until_complete(drain(peer))


_NAMES = st.text("abcXYZ-", min_size=1, max_size=8).map(lambda name: b"x-" + name.encode())
_VALUES = st.binary(max_size=20).map(lambda value: bytes(b for b in value if b > 32 and b != 127))


@st.composite
def responses(draw) -> tuple[bytes, bytes, list[tuple[bytes, bytes]]]:
    """A proper response that ends by its own framing, its body, its headers."""
    headers = draw(st.lists(st.tuples(_NAMES, _VALUES), max_size=5))
    parts = draw(st.lists(st.binary(min_size=1, max_size=30), max_size=4))
    body = b"".join(parts)
    if draw(st.booleans()):
        framing = (b"Content-Length", b"%d" % len(body))
        framed = body
    else:
        framing = (b"Transfer-Encoding", b"chunked")
        framed = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    headers.insert(draw(st.integers(0, len(headers))), framing)
    head = OK + b"".join(b"%b: %b\r\n" % header for header in headers) + b"\r\n"
    return head + framed, body, headers


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(responses(), st.lists(st.integers(0, 300), max_size=6)), min_size=1, max_size=4))
def test_responses_on_one_connection_never_mix_however_they_are_cut(exchanges):
    with Peer() as peer:
        for (data, body, headers), marks in exchanges:
            assert peer.ask(*cut(data, marks)) == body
            assert peer.connection.headers == headers
            assert peer.connection.reusable
            peer.connection.park(0.0)


@settings(max_examples=300, deadline=None)
@given(responses(), st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4), st.data())
def test_damaged_responses_are_read_as_such_or_refused(response, damage, more):
    """Whatever comes: a response or a ConnectionError; and no connection serves again after a byte too many."""
    data = bytearray(response[0])
    for at, byte in damage:
        data[at % len(data)] = byte
    pieces = cut(bytes(data), more.draw(st.lists(st.integers(0, 400), max_size=4)))
    with Peer() as peer:
        try:
            peer.ask(*pieces, eof=True)
        except ConnectionError:
            pass
    with Peer() as peer:  # a byte more, and it is no response's end any longer
        peer.connection.begin(head_only=False, idle_timeout_s=None)
        peer.connection.data_received(bytes(data) + b"\x01")
        assert not peer.connection.reusable
