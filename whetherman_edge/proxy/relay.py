"""Bytes between client and upstream: which headers travel, how a response is framed, and the relay loop.

Bodies are never decoded or re-encoded here; chunks go out as they come in. What changes is hop-by-hop only
(RFC 9110 section 7.6.1): the connection headers, and the transfer framing that suits the client's HTTP version.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

import msgspec

from whetherman_edge.dialects.dialect import ErrorShape
from whetherman_edge.dialects.error_shapes import openai_error
from whetherman_edge.proxy.request import Request
from whetherman_edge.proxy.tally import Tally
from whetherman_edge.proxy.upstream import Headers, UpstreamResponse

# RFC 9110 section 7.6.1, and the older names that clients still send.
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer transfer-encoding "
    b"upgrade http2-settings".split()
)
# What Connection may not take away: without its length a body would be read as the next request on that socket, and
# without the others it is another request. These are end to end, whoever names them.
_NEVER_NAMED = frozenset(
    b"content-length content-type content-encoding host authorization x-api-key cookie set-cookie accept".split()
)
# Ours to set or to consume: Host is the upstream's own, Origin would make Ollama answer 403 (field case S19), Expect is
# answered here, x-session-id names a session of ours. Names under OUR_PREFIX are dropped as well.
NOT_FORWARDED = HOP_BY_HOP | {b"host", b"origin", b"expect", b"x-session-id"}
OUR_PREFIX = b"x-whetherman-"
_PREFIX_CHARS = len(OUR_PREFIX)
_NO_BODY_STATUS = frozenset({204, 304})
_LENGTH_CHARS = len(b"content-length")
_JSON = (b"Content-Type", b"application/json")


def forwardable(headers: Iterable[tuple[bytes, bytes]], body_bytes: int | None, secret: str = "") -> Headers:
    """The request headers that go upstream, in their order and spelling.

    ``body_bytes``: length of the body that will be sent, None when it is streamed as it comes. A Content-Length keeps
    its place. ``secret``: our own API key; a credential equal to it is dropped.
    """
    named: frozenset[bytes] = frozenset()
    kept: Headers = []
    has_length = False
    for name, value in headers:
        key = name.lower()
        if key == b"connection":
            named |= _tokens(value)
        if key in NOT_FORWARDED or key[:_PREFIX_CHARS] == OUR_PREFIX:
            continue
        if key == b"content-length":
            has_length = True
            if body_bytes is not None:
                value = b"%d" % body_bytes
        elif secret and key in (b"authorization", b"x-api-key") and _carries(value, secret):
            continue
        kept.append((name, value))
    kept = _without(kept, named)
    if body_bytes and not has_length:
        kept.append((b"Content-Length", b"%d" % body_bytes))
    return kept


def end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """The response headers that go to the client, in their order and spelling."""
    named: frozenset[bytes] = frozenset()
    kept: Headers = []
    for name, value in headers:
        key = name.lower()
        if key == b"connection":
            named |= _tokens(value)
        if key not in HOP_BY_HOP and key[:_PREFIX_CHARS] != OUR_PREFIX:
            kept.append((name, value))
    return _without(kept, named)


class Reply:
    """The response to one client request, written as it comes to be.

    ``extra``: headers of ours; ``cross_origin``: among them those that let a page of another origin read it.
    ``keep_alive``: whether the connection may serve another request after it.
    """

    __slots__ = (
        "_chunked",
        "_connection",
        "_framed",
        "_head",
        "_head_only",
        "_version",
        "cross_origin",
        "error_shape",
        "extra",
        "keep_alive",
        "status",
    )

    def __init__(self, request: Request, *, extra: Headers | None = None) -> None:
        self._connection = request.connection
        self._version = request.version
        self._chunked = False
        self._framed = True
        self._head = b""
        self._head_only = request.method == "HEAD"
        self.extra: Headers = extra or []
        self.cross_origin = False
        self.keep_alive = request.keep_alive
        self.status = 0
        self.error_shape: ErrorShape = openai_error

    @property
    def started(self) -> bool:
        """A head was made, so no other response can be."""
        return self.status != 0

    def passed_on(self, headers: Iterable[tuple[bytes, bytes]]) -> Headers:
        """The upstream's headers for this client: end to end, and without its own word on origins where we gave ours.

        It never saw this client's Origin, and a browser refuses a response with two Access-Control-Allow-Origin. What
        it exposes stays: that is a list, and ours adds to it.
        """
        kept = end_to_end(headers)
        if not self.cross_origin:
            return kept
        return [(name, value) for name, value in kept if not _is_cross_origin_word(name.lower())]

    def start(self, status: int, reason: str, headers: Headers, *, body_bytes: int | None) -> bool:
        """Make the head; it is written with the first body bytes, or by ``flush`` when these are not there yet.

        ``body_bytes``: the Content-Length if known and not among ``headers``. Returns whether a body follows.
        HTTP/1.0 clients without a length get a body that the close delimits.
        """
        bodyless = self._head_only or status in _NO_BODY_STATUS
        lines = [b"HTTP/1.1 %d %b" % (status, reason.encode("utf-8", "surrogateescape"))]
        sized = body_bytes is not None
        for name, value in headers:
            lines.append(name + b": " + value)
            if len(name) == _LENGTH_CHARS and name.lower() == b"content-length":
                sized = True
        lines += [name + b": " + value for name, value in self.extra]
        if body_bytes is not None and status not in _NO_BODY_STATUS:
            lines.append(b"Content-Length: %d" % body_bytes)
        if not sized and not bodyless:
            if self._version >= (1, 1):
                self._chunked = True
                lines.append(b"Transfer-Encoding: chunked")
            else:
                self.keep_alive = self._framed = False
        if not self.keep_alive:
            lines.append(b"Connection: close")
        elif self._version < (1, 1):
            lines.append(b"Connection: keep-alive")
        lines.append(b"\r\n")
        self.status = status
        self._head = b"\r\n".join(lines)
        return not bodyless

    async def flush(self) -> None:
        """Write the head now."""
        if self._head:
            head, self._head = self._head, b""
            await self._send(head)

    async def write(self, chunk: bytes) -> None:
        """Write body bytes, waiting while the client is slow. Raises ConnectionError when it has gone."""
        if self._chunked:
            chunk = b"%x\r\n%b\r\n" % (len(chunk), chunk)
        head, self._head = self._head, b""
        await self._send(head + chunk if head else chunk)

    async def end(self, chunk: bytes = b"") -> None:
        """Write the last body bytes and the end of the body, all in one system call."""
        if self._chunked:
            chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(chunk), chunk) if chunk else b"0\r\n\r\n"
        head, self._head = self._head, b""
        if head or chunk:
            await self._send(head + chunk if head else chunk)

    async def _send(self, data: bytes) -> None:
        self._connection.write(data)
        if self._connection.stalled:
            await self._connection.drain()

    def abort(self) -> None:
        """Break the connection so that the client cannot take what it has for a whole response (field case S11)."""
        self.keep_alive = False
        if self._framed:
            self._connection.close()  # what is written still arrives; the missing end of the framing tells
        else:
            self._connection.reset()

    async def send(self, status: int, reason: str, body: bytes, headers: Headers) -> Reply:
        """Write a whole response of our own."""
        has_body = self.start(status, reason, headers, body_bytes=len(body))
        await self.end(body if has_body else b"")
        return self

    async def send_json(self, status: int, reason: str, value: object, headers: Headers | None = None) -> Reply:
        """Write a whole JSON response of our own."""
        return await self.send(status, reason, msgspec.json.encode(value), [_JSON, *(headers or [])])

    async def send_error(
        self, status: int, reason: str, message: str, kind: str, code: str, *, src: str = "whetherman-edge"
    ) -> Reply:
        """Write an error in ``error_shape``; ``src`` says that it is ours, not the upstream's."""
        return await self.send_json(status, reason, self.error_shape(message, kind, code, src))


async def relay(response: UpstreamResponse, reply: Reply, held: bytes = b"", tally: Tally | None = None) -> None:
    """Send an upstream response to the client, chunk by chunk, then return its connection to the pool.

    ``held``: body bytes that were read already. ``tally``: looks at the bytes that pass.

    Raises UpstreamReset when the upstream broke off, ConnectionError when the client did; either way the caller
    aborts. What is already here goes out with the head in one write: a system call is the dearest thing on this way.
    """
    if reply.start(response.status, response.reason, reply.passed_on(response.headers), body_bytes=None):
        chunk, complete = response.buffered()
        chunk = held + chunk if held else chunk
        if not chunk and not complete:
            await reply.flush()
        while not complete:
            if chunk:
                if tally is not None:
                    tally.feed(chunk)
                await reply.write(chunk)
            chunk = await response.chunk()
            complete = response.complete
        if tally is not None:
            tally.feed(chunk)
        await reply.end(chunk)
    else:
        await reply.end()
    response.release()


async def read_body(request: Request, bytes_max: int) -> tuple[bytes, bool]:
    """Read the request body up to ``bytes_max``; returns what was read and whether that is all of it."""
    parts: list[bytes] = []
    size = 0
    while not request.at_end:
        part = await request.chunk()
        parts.append(part)
        size += len(part)
        if size > bytes_max:
            return b"".join(parts), False
    return parts[0] if len(parts) == 1 else b"".join(parts), True


class BodyStream:
    """A request body passed on as it arrives: what was read already, then the rest. ``too_large``: it hit the cap."""

    def __init__(self, request: Request, head: bytes = b"", bytes_max: int | None = None) -> None:
        self._request = request
        self._head = head
        self._bytes_max = bytes_max
        self.too_large = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = len(self._head)
        part, self._head = self._head, b""
        while True:
            if part:
                yield part
            if self._request.at_end:
                return
            part = await self._request.chunk()
            size += len(part)
            if self._bytes_max is not None and size > self._bytes_max:
                self.too_large = True
                raise OverflowError("request body over the cap")


def _is_cross_origin_word(key: bytes) -> bool:
    return key.startswith(b"access-control-") and key != b"access-control-expose-headers"


def _without(headers: Headers, named: frozenset[bytes]) -> Headers:
    """Headers less those that Connection named."""
    dropped = named - HOP_BY_HOP - _NEVER_NAMED - {b"close"}
    return [(name, value) for name, value in headers if name.lower() not in dropped] if dropped else headers


def _tokens(value: bytes) -> frozenset[bytes]:
    return frozenset(token.strip().lower() for token in value.split(b","))


def _carries(value: bytes, secret: str) -> bool:
    text = value.strip()
    if text[:7].lower() == b"bearer ":
        text = text[7:].strip()
    return text == secret.encode("utf-8")
