"""One keep-alive connection to the upstream, from the client's side of HTTP/1.1.

llhttp parses every response (by way of httptools); what is ours is what a connection may be used for next. It serves
again only when the response ended exactly where its framing says, so that no byte of one response can be read as part
of another: a body that only the close delimits, a byte too many, a byte that nobody asked for, a head that is no HTTP,
each ends the connection.
"""

from __future__ import annotations

import asyncio

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from whetherman_edge.proxy.sending import Sending

Headers = list[tuple[bytes, bytes]]

# Long header lines (cookies, JWTs) are the client's and the upstream's business, but they are kept in memory: the whole
# head with its informational ones, and what a chunked body has of extensions and trailers between two bytes of content.
HEAD_BYTES_MAX = 256 << 10
# Body bytes that wait for a slow client before the upstream is asked to wait as well.
BUFFERED_BYTES_MAX = 128 << 10


class BadResponse(ConnectionError):
    """The upstream sent what is no HTTP response, or none that can be passed on. The text quotes nothing of it."""


class Connection(Sending):
    """One socket to the upstream.

    ``begin``, write the request, ``head``, then ``read`` until ``complete``; then ``begin`` again if ``reusable``.

    ``answered``: a byte arrived since the request began. ``status`` (0 until the final head is there), ``reason``,
    ``headers`` (raw, in order, as received): the response's head. ``complete``: the body ended properly.
    """

    __slots__ = (
        "_busy",
        "_chunks",
        "_failure",
        "_head_only",
        "_idle_timeout_s",
        "_n_buffered",
        "_n_unproductive",
        "_parser",
        "_paused",
        "_refusal",
        "_should_close",
        "_until_close",
        "_waiter",
        "answered",
        "complete",
        "headers",
        "idle_since_s",
        "reason",
        "status",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._parser: HttpResponseParser | None = HttpResponseParser(self)
        # What llhttp forgives here changes no framing: a lone LF ends a line, blanks may follow a chunk's size.
        self._parser.set_dangerous_leniencies(lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True)
        self._waiter: asyncio.Future[None] | None = None
        self._should_close = False
        self.idle_since_s = 0.0
        self._reset_state()
        self._busy = False

    def _reset_state(self) -> None:
        self._busy = True
        self._chunks: list[bytes] = []
        self._failure: OSError | None = None
        self._refusal = ""
        self._head_only = False
        self._idle_timeout_s: float | None = None
        self._n_buffered = 0
        self._n_unproductive = 0
        self._paused = False
        self._until_close = False
        self.answered = False
        self.complete = False
        self.headers: Headers = []
        self.reason = b""
        self.status = 0

    # ---- for whoever sends a request ---------------------------------------------------------------------------------

    def begin(self, *, head_only: bool, idle_timeout_s: float | None) -> None:
        """Expect a response. ``head_only``: to a HEAD request, so it has no body whatever its headers say.

        Raises ConnectionResetError when the connection has gone.
        """
        if not self.connected:
            raise ConnectionResetError("the connection was closed")
        self._reset_state()
        self._head_only = head_only
        self._idle_timeout_s = idle_timeout_s

    def park(self, now_s: float) -> None:
        """Keep the connection for another request; a byte that comes before that one ends it."""
        self._busy = False
        self.idle_since_s = now_s

    @property
    def reusable(self) -> bool:
        """The last response ended exactly where it had to, and both sides are willing to go on."""
        transport = self.transport
        return (
            self.complete
            and not self._chunks
            and not self._should_close
            and not self._lost
            and transport is not None
            and not transport.is_closing()
            and not transport.get_write_buffer_size()
        )

    @property
    def at_end(self) -> bool:
        """The body ended properly and all of it has been read."""
        return self.complete and not self._chunks

    async def head(self) -> None:
        """Wait for the final response head, past informational ones.

        Raises OSError: BadResponse, a connection that ended, or no byte within ``idle_timeout_s``.
        """
        while not self.status:
            if self._failure is not None:
                raise self._failure
            await self._wait()

    async def read(self) -> bytes:
        """Whatever has arrived of the body, at least one byte; ``b""`` at its proper end. Raises as ``head`` does."""
        while not self._chunks:
            if self.complete:
                return b""
            if self._failure is not None:
                raise self._failure
            await self._wait()
        return self.read_nowait()

    def read_nowait(self) -> bytes:
        """Whatever has arrived of the body, without waiting."""
        chunks = self._chunks
        if not chunks:
            return b""
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        self._chunks = []
        self._n_buffered = 0
        if self._paused:
            self._paused = False
            if self.transport is not None:
                self.transport.resume_reading()
        return data

    async def _wait(self) -> None:
        """Wait for the next news. Raises TimeoutError when none comes within ``idle_timeout_s``."""
        waiter = self._waiter = self._loop.create_future()
        try:
            if self._idle_timeout_s is None:
                await waiter
            else:
                async with asyncio.timeout(self._idle_timeout_s):
                    await waiter
        except TimeoutError as exc:
            self._fail(TimeoutError(f"no byte within {self._idle_timeout_s:g} s"))
            raise TimeoutError(f"no byte within {self._idle_timeout_s:g} s") from exc
        finally:
            self._waiter = None

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _fail(self, failure: OSError) -> None:
        """The response cannot be completed."""
        self._failure = failure
        self.abort()
        self._wake()

    # ---- for the event loop --------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if not self._busy or self._parser is None:  # nothing was asked
            self._should_close = True
            self.close()
            return
        self.answered = True
        if self._failure is not None:
            return
        n_buffered = self._n_buffered
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as exc:
            if not self.complete:
                self._fail(BadResponse(f"bad HTTP ({self._refusal or _reason(exc)})"))
                return
            self._should_close = True  # what follows a whole response is nobody's
        if self._n_buffered == n_buffered and not self.complete:
            self._n_unproductive += len(data)
            if self._n_unproductive > HEAD_BYTES_MAX:
                self._fail(BadResponse(f"bad HTTP (more than {HEAD_BYTES_MAX} bytes without content)"))
                return
        else:
            self._n_unproductive = 0
        if self._n_buffered > BUFFERED_BYTES_MAX and not self._paused and self.transport is not None:
            self._paused = True
            self.transport.pause_reading()
        if self.status:
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._parser = None  # it holds our bound methods: a cycle
        if not self.complete and self._failure is None:
            if self._until_close and exc is None:  # a reset is not an end (field case S11)
                self.complete = True
                self._should_close = True
            else:
                cause = exc if isinstance(exc, OSError) else None
                self._failure = cause or ConnectionResetError("the connection was closed")
        self._wake()

    # ---- for the parser ------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.complete:  # another response on the heels of this one, which nobody asked for
            self._should_close = True

    def on_status(self, part: bytes) -> None:
        if not self.status:
            self.reason += part

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:  # else a trailer, which is hop-by-hop here
            self.headers.append((name, value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        if self.complete or self._parser is None:
            return
        status = self._parser.get_status_code()
        if status < 200:
            if status == 101:
                self._refuse("switched protocols, which nobody asked for")
            if status < 100:
                self._refuse("status below 100")
            return  # informational: the final head follows (RFC 9110 section 15.2)
        codings = [value.lower() for name, value in self.headers if name.lower() == b"transfer-encoding"]
        if codings and codings != [b"chunked"]:
            self._refuse("a transfer coding other than chunked")
        self.status = status
        if self._head_only:
            self.complete = self._should_close = True  # the parser waits for a body that does not come
        else:
            self._until_close = not codings and not any(name.lower() == b"content-length" for name, _ in self.headers)

    def on_body(self, data: bytes) -> None:
        if self.complete:
            return
        self._chunks.append(data)
        self._n_buffered += len(data)

    def on_message_complete(self) -> None:
        if self.complete or self._parser is None:
            return
        if not self.status:
            self.headers = []
            self.reason = b""
            return
        self.complete = True
        if not self._parser.should_keep_alive():
            self._should_close = True

    def _refuse(self, why: str) -> None:
        """Stop the parser. Raises BadResponse."""
        self._refusal = why
        raise BadResponse(why)


def _reason(exc: Exception) -> str:
    """The reason that llhttp gives, which is one of its own sentences and quotes nothing."""
    return str(exc) if isinstance(exc, HttpParserError) else "switched protocols, which nobody asked for"
