"""The server's side of HTTP/1.0 and 1.1, for TCP and Unix sockets.

llhttp parses every request (by way of httptools, as ``proxy.connection`` does for responses) and refuses what could be
read in two ways: two lengths, a length beside a transfer coding, bare line ends, folded lines. Ours is the rest: one
request at a time is served on a connection, those sent ahead wait; a client that leaves cancels what is served for it;
what is no HTTP gets a 400 that quotes nothing of it, as it may hold a key (field case O10).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Awaitable, Callable

import msgspec
from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from whetherman_edge.proxy.connection import Headers
from whetherman_edge.proxy.departure import DepartureWatch
from whetherman_edge.proxy.request import Request, Version
from whetherman_edge.proxy.sending import Sending

log = logging.getLogger(__name__)

# Long header lines (cookies, JWTs) are the client's and the upstream's business, but they are kept in memory.
HEAD_LINE_BYTES_MAX = 64 << 10
HEAD_LINES_MAX = 128
# The whole head; and what a chunked body has of extensions and trailers between two bytes of content.
HEAD_BYTES_MAX = 256 << 10
# What waits to be read or served before the client is asked to wait: bytes of bodies, requests sent ahead.
HELD_BYTES_MAX = 128 << 10
AHEAD_MAX = 16
# After a refused upload the rest is read and dropped for this long, so that the client sees the answer, not a reset.
LINGER_S = 120.0
# The same after what was no HTTP, of which nobody knows where it ends.
HANG_UP_S = 2.0
# A connection without a request is closed after this; longer than any proxy or client keeps one.
IDLE_S_MAX = 3_630.0
IDLE_LOOK_S = 30.0

# RFC 9110 has one of each; with two of them, one hop may go by the first and the next by the second.
_ONCE = frozenset(
    "host content-length content-type content-range content-location transfer-encoding max-forwards user-agent".split()
)
_VERSIONS: dict[str, Version] = {"1.1": (1, 1), "1.0": (1, 0)}

Handle = Callable[[Request], Awaitable[bool]]
"""Answers one request; returns whether the connection may serve another one."""


class BadRequest(ConnectionError):
    """What came is no HTTP, or none that is served. The text quotes nothing of it."""


class ClientConnection(Sending):
    """One client's socket. ``fresh``: no request has come yet. ``idle_since_s``: when it began to wait for one."""

    __slots__ = (
        "_ahead",
        "_answered",
        "_headers",
        "_keeps_alive",
        "_n_held",
        "_n_unproductive",
        "_over",
        "_parser",
        "_productive",
        "_receiving",
        "_refusal",
        "_resumes",
        "_server",
        "_serving",
        "_target",
        "_task",
        "_timer",
        "_watch",
        "fresh",
        "idle_since_s",
        "over_tcp",
    )

    def __init__(self, server: HttpServer, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._server = server
        self._parser: HttpRequestParser | None = HttpRequestParser(self)
        self._target = b""
        self._headers: Headers = []
        self._receiving: Request | None = None  # its body is still coming
        self._serving: Request | None = None
        self._ahead: deque[Request] = deque()  # sent before it is their turn
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._refusal = ""  # why what follows on the requests that came cannot be read
        self._over = False  # no further request will be read
        self._answered = False  # some of the response to the request that is served has been written
        self._keeps_alive = True
        self._resumes = False
        self._productive = False
        self._n_unproductive = 0
        self._n_held = 0
        self._watch: DepartureWatch | None = None  # nothing is read for now
        self.fresh = True
        self.idle_since_s = 0.0
        self.over_tcp = True

    # ---- for those who serve a request -------------------------------------------------------------------------------

    def new_future(self) -> asyncio.Future[None]:
        return self._loop.create_future()

    def write(self, data: bytes) -> None:
        """Send bytes of a response. Raises ConnectionResetError when the client has gone."""
        self._answered = True
        super().write(data)

    def proceed(self) -> None:
        """Ask for the body. Raises ConnectionResetError when the client has gone."""
        super().write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def taken(self, n_bytes: int) -> None:
        """Body bytes have been read."""
        self._n_held -= n_bytes
        if self._watch is not None and self._n_held <= HELD_BYTES_MAX and len(self._ahead) < AHEAD_MAX:
            self._watch.stop()
            self._watch = None
            if self.transport is not None and not self.transport.is_closing():
                self.transport.resume_reading()

    # ---- for the server ----------------------------------------------------------------------------------------------

    @property
    def waits(self) -> bool:
        """It waits for a request; none is being read or served."""
        return self._serving is None and self._receiving is None

    def stop(self) -> asyncio.Task[None] | None:
        """Close, whatever it does; returns the task that ends of it."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
        self.close()
        return task

    # ---- for the event loop --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.over_tcp = isinstance(transport.get_extra_info("sockname"), tuple)
        if self.over_tcp:
            connected = transport.get_extra_info("socket")
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.idle_since_s = self._loop.time()
        self._server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._server.connections.discard(self)
        self._parser = None  # it holds our bound methods: a cycle
        if self._timer is not None:
            self._timer.cancel()
        if self._watch is not None:
            self._watch.stop()
        if self._receiving is not None:
            self._receiving.fail(ConnectionResetError("the client has gone"))
        self._receiving = None
        self._ahead.clear()
        task, self._task = self._task, None
        if task is not None:
            task.cancel()

    def data_received(self, data: bytes) -> None:
        while data and not self._over and self._parser is not None:
            try:
                self._parser.feed_data(data)
            except HttpParserUpgrade as exc:
                self._pass_over()
                data = data[exc.args[0] :]
                continue
            except HttpParserError as exc:
                self._refuse(str(exc.__context__) if isinstance(exc.__context__, BadRequest) else type(exc).__name__)
            break
        if self._productive:
            self._productive = False
            self._n_unproductive = 0
        else:
            self._n_unproductive += len(data)
            if self._n_unproductive > HEAD_BYTES_MAX:
                self._refuse("HeadTooLong")
        full = self._n_held > HELD_BYTES_MAX or len(self._ahead) >= AHEAD_MAX
        if full and self._watch is None and self.transport is not None and not self.transport.is_closing():
            self._watch = DepartureWatch(self.transport, self._loop)
            self.transport.pause_reading()

    # ---- for the parser ------------------------------------------------------------------------------------------

    def on_url(self, part: bytes) -> None:
        self._target += part

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._receiving is None:  # else a trailer, which is hop-by-hop here
            self._headers.append((name, value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        if self._resumes or self._parser is None:
            return
        if self._over:
            raise BadRequest("TooLate")
        self._productive = True
        self.fresh = False
        raw_headers, self._headers = self._headers, []
        target, self._target = self._target, b""
        headers = _by_name(raw_headers)
        version = _VERSIONS.get(self._parser.get_http_version())
        if version is None:
            raise BadRequest("BadVersion")
        if "host" not in headers and version == (1, 1):
            raise BadRequest("HostMissing")
        method = self._parser.get_method().decode("ascii")
        target, path = _origin_form(target, method)
        length = headers.get("content-length")
        chunked = "transfer-encoding" in headers
        if chunked and headers["transfer-encoding"].lower() != "chunked":
            raise BadRequest("TransferCodingUnknown")
        self._receiving = request = Request(
            self,
            method,
            target,
            path,
            version,
            raw_headers,
            headers,
            keep_alive=self._parser.should_keep_alive() and not (chunked and version == (1, 0)),
            content_length=int(length) if length is not None else None,
            has_body=chunked or (length is not None and int(length) > 0),
        )
        if self._serving is None:
            self._serve(request)
        else:
            self._ahead.append(request)

    def on_body(self, data: bytes) -> None:
        self._productive = True
        if self._receiving is not None:
            self._n_held += self._receiving.feed(data)

    def on_message_complete(self) -> None:
        if self._parser is not None and not self._parser.should_upgrade():  # else ``_pass_over`` knows
            self._end()

    def _end(self) -> None:
        """A request has arrived whole."""
        self._productive = True
        request, self._receiving = self._receiving, None
        if request is None:
            return
        request.end()
        self._over = not request.keep_alive
        if request is not self._serving and not self._is_ahead(request):  # it has been answered, and was in the way
            self._go_on()

    def _is_ahead(self, request: Request) -> bool:
        """Whether the request that arrives waits for its turn; it is the last one then."""
        return bool(self._ahead) and self._ahead[-1] is request

    def _pass_over(self) -> None:
        """Read on after an offer to upgrade.

        llhttp takes such an offer for taken and what follows for another protocol. We take none, so that the body is
        read, by a new parser, as if there had been no offer (RFC 9110 section 7.8). CONNECT has no body.
        """
        request = self._receiving
        self._parser = HttpRequestParser(self)
        if request is None:
            return
        if request.method == "CONNECT" or not request.has_body:
            self._end()
            self._over = self._over or request.method == "CONNECT"
            return
        length = request.content_length
        framing = b"Transfer-Encoding: chunked" if length is None else b"Content-Length: %d" % length
        self._resumes = True
        self._parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n\r\n")
        self._resumes = False
        self._target = b""

    # ---- from one request to the next ----------------------------------------------------------------------------

    def _serve(self, request: Request) -> None:
        self._serving = request
        self._answered = False
        self._task = self._loop.create_task(self._run(request))

    async def _run(self, request: Request) -> None:
        try:
            self._keeps_alive = await self._server.handle(request)
        except Exception as exc:
            log.error("event=handler_failed", exc_info=exc)
            self.abort()
            return
        self._serving = self._task = None
        if self._lost:
            return
        if not request.at_end:
            request.discard()
        if request.received:
            self._go_on()
            return
        self._timer = self._loop.call_later(LINGER_S, self.close)

    def _go_on(self) -> None:
        """Nothing is served, and the last request is out of the way."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._keeps_alive:
            self._over = True
            self.close()
        elif self._ahead:
            self._serve(self._ahead.popleft())
            self.taken(0)
        elif self._refusal:
            self._answer_refusal()
        elif self._over:
            self.close()
        else:
            self.idle_since_s = self._loop.time()

    def _refuse(self, why: str) -> None:
        """What comes is no HTTP: answer so when all that came before is answered, and read nothing more."""
        if self._over:
            return
        self._over = True
        self._refusal = why
        request, self._receiving = self._receiving, None
        if request is None:
            if self._serving is None:
                self._answer_refusal()
        elif request is self._serving:
            self._answer_refusal()
        elif self._is_ahead(request):
            self._ahead.pop()
        else:  # it has been answered
            self.close()

    def _answer_refusal(self) -> None:
        """400, and the end of the connection; of a response that is under way nothing more is sent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
        self.fresh = False
        log.warning("event=bad_http status=400 kind=%s", self._refusal)
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        if self._serving is not None and self._answered:
            self.reset()
            return
        transport.write(_bad_http(self._refusal))
        # An end with bytes unread is a reset, which may overtake the answer: the client's end is waited for.
        transport.write_eof()
        self._timer = self._loop.call_later(HANG_UP_S, self.abort)


class HttpServer:
    """Makes a ClientConnection for each one accepted; hand it to ``loop.create_server``.

    ``connections``: those that are open.
    """

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.connections: set[ClientConnection] = set()
        self._loop = asyncio.get_running_loop()
        self._looking = self._loop.call_later(IDLE_LOOK_S, self._look)

    def __call__(self) -> ClientConnection:
        return ClientConnection(self, self._loop)

    @property
    def has_fresh(self) -> bool:
        """Whether there is a connection on which no request has come yet."""
        return any(one.fresh for one in self.connections)

    def close_waiting(self, *, fresh: bool) -> None:
        """Close the connections that wait for a request; ``fresh``: those that wait for their first one too.

        A request that is on its way to us on a new connection would be refused otherwise, which no client takes for a
        connection that had grown old.
        """
        for one in list(self.connections):
            if one.waits and (fresh or not one.fresh):
                one.close()

    async def shutdown(self, grace_s: float) -> None:
        """Close all connections; what is still served for them gets ``grace_s`` to clean up."""
        self._looking.cancel()
        tasks = [task for one in list(self.connections) if (task := one.stop()) is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=grace_s)

    def _look(self) -> None:
        oldest_s = self._loop.time() - IDLE_S_MAX
        for one in list(self.connections):
            if one.waits and one.idle_since_s < oldest_s:
                one.close()
        self._looking = self._loop.call_later(IDLE_LOOK_S, self._look)


def _by_name(raw_headers: Headers) -> dict[str, str]:
    """The first value of each header, by lower-case name. Raises BadRequest."""
    if len(raw_headers) > HEAD_LINES_MAX:
        raise BadRequest("HeadTooLong")
    headers: dict[str, str] = {}
    for name, value in raw_headers:
        if len(name) + len(value) > HEAD_LINE_BYTES_MAX:
            raise BadRequest("HeadLineTooLong")
        key = name.decode("ascii").lower()
        if key not in headers:
            headers[key] = value.decode("utf-8", "surrogateescape")
        elif key in _ONCE:
            raise BadRequest("HeaderRepeated")
    return headers


def _origin_form(target: bytes, method: str) -> tuple[bytes, str]:
    """A request target without scheme and authority, and the path of it. Raises BadRequest."""
    if len(target) > HEAD_LINE_BYTES_MAX:
        raise BadRequest("TargetTooLong")
    if not target.isascii():
        raise BadRequest("BadTarget")
    if not target.startswith(b"/"):
        _, scheme, rest = target.partition(b"://")
        if scheme:
            authority = rest.partition(b"/")[0].partition(b"?")[0].partition(b"#")[0]
            rest = rest[len(authority) :]
            target = rest if rest.startswith(b"/") else b"/" + rest
        elif (method, target) != ("OPTIONS", b"*") and method != "CONNECT":
            raise BadRequest("BadTarget")
    path = target.decode("ascii")
    if "?" in path or "#" in path:
        path = path.partition("?")[0].partition("#")[0]
    return target, path


def _bad_http(why: str) -> bytes:
    error = {
        "message": f"expected a proper HTTP/1.1 request, got one that cannot be read ({why}); raw spaces, control "
        "characters and letters beyond ASCII in the request target must be percent-encoded",
        "type": "invalid_request_error",
        "param": None,
        "code": "bad_http",
        "src": "whetherman-edge",
    }
    body = msgspec.json.encode({"error": error})
    head = (
        b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
    )
    return head % len(body) + body
