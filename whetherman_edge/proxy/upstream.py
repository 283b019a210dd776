"""The upstream: one model server, its address, and a small pool of keep-alive connections to it.

Request heads are written here, for what no general HTTP client gives: the request target and header bytes exactly as
the client sent them, the knowledge whether a socket was reused and whether any response byte arrived (the only safe
ground for a retry, RFC 9112 section 9.3.1), and a fraction of the cost. ``proxy.connection`` reads the responses.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterable, Callable
from urllib.parse import urlsplit

import msgspec

from whetherman_edge.errors import ConfigError, UpstreamMissing, UpstreamReset
from whetherman_edge.proxy.connection import BadResponse, Connection
from whetherman_edge.proxy.connection import Headers as Headers

# An idle socket older than this is not reused: Node's default keep-alive is 5 s, Go and llama.cpp keep longer, and a
# wrong guess costs one retry (field case S06), so the pool sits between.
IDLE_S_MAX = 15.0
IDLE_CONNECTIONS_MAX = 64
# Below this, head and body are joined into one write; above, joining would copy for nothing.
JOIN_BYTES_MAX = 64 << 10


class Target(msgspec.Struct, frozen=True):
    """Where the upstream listens.

    ``prefix`` goes before the client's path: the path of the base URL without a trailing slash and without a trailing
    ``/v1``, because clients of ours already say ``/v1/…``. So ``http://127.0.0.1:11434`` and
    ``http://127.0.0.1:11434/v1`` mean the same, and ``https://openrouter.ai/api/v1`` has the prefix ``/api``.
    """

    url: str
    host: str
    port: int
    prefix: bytes
    authority: bytes
    unix_path: str = ""
    tls: bool = False

    @classmethod
    def parse(cls, url: str) -> Target:
        """Read ``http(s)://HOST[:PORT][/PATH]`` or ``unix:PATH``. Raises ConfigError."""
        if url.startswith("unix:"):
            path = url.removeprefix("unix:")
            path = "/" + path.lstrip("/") if path.startswith("//") else path
            if not path:
                raise ConfigError("upstream: expected unix:PATH, got an empty path")
            return cls(url=url, host="localhost", port=0, prefix=b"", authority=b"localhost", unix_path=path)
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as exc:
            raise ConfigError(f"upstream: expected http://HOST:PORT, got {url!r}: {exc}") from exc
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"upstream: expected http://HOST:PORT, https://HOST or unix:PATH, got {url!r}")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ConfigError("upstream: expected a URL without user, query or fragment; keys go into upstream_api_key")
        try:
            parts.hostname.encode("idna")
            authority = parts.netloc.encode("idna" if not parts.netloc.isascii() else "ascii")
        except UnicodeError as exc:
            raise ConfigError(f"upstream: expected http://HOST:PORT, got {url!r}, whose host is no name") from exc
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
        return cls(
            url=url,
            host=parts.hostname,
            port=port or (443 if tls else 80),
            prefix=prefix.encode("ascii", "ignore"),
            authority=authority,
            tls=tls,
        )


class UpstreamResponse:
    """A response whose head has arrived and whose body is still coming.

    ``headers``: raw, in order, as received. Body bytes are handed out as they came, still encoded.
    Call exactly one of ``release`` (body read to its end) and ``abort``; both are safe to repeat.
    """

    __slots__ = ("_connection", "_pump", "_upstream", "headers", "reason", "status")

    def __init__(self, connection: Connection, upstream: Upstream, pump: asyncio.Task[None] | None) -> None:
        self.status = connection.status
        self.reason = connection.reason.decode("utf-8", "surrogateescape")
        self.headers = connection.headers
        self._connection: Connection | None = connection  # until released
        self._upstream = upstream
        self._pump = pump

    def header(self, name: bytes) -> bytes | None:
        """First value of a header, by lower-case name."""
        for key, value in self.headers:
            if key.lower() == name:
                return value
        return None

    @property
    def complete(self) -> bool:
        """The body ended properly and all of it has been handed out."""
        return self._connection is None or self._connection.at_end

    def buffered(self) -> tuple[bytes, bool]:
        """What has arrived of the body so far, without waiting, and whether that is the rest of it."""
        if self._connection is None:
            return b"", True
        return self._connection.read_nowait(), self._connection.complete

    async def chunk(self) -> bytes:
        """Whatever has arrived of the body, waiting for at least one byte; ``b""`` at its proper end.

        Raises UpstreamReset when the body ended early (also for a body that only a close delimits: a TCP reset there
        is not an end), and when ``idle_timeout_s`` passed without a byte.
        """
        if self._connection is None:
            return b""
        try:
            return await self._connection.read()
        except OSError as exc:
            raise UpstreamReset(f"{self._upstream.target.url} broke off inside a response: {_why(exc)}") from exc

    async def read(self, bytes_max: int) -> tuple[bytes, bool]:
        """Read up to ``bytes_max`` bytes; returns them and whether the body is complete."""
        parts: list[bytes] = []
        size = 0
        while size <= bytes_max:
            data = await self.chunk()
            if not data:
                return b"".join(parts), True
            parts.append(data)
            size += len(data)
        return b"".join(parts), False

    def release(self) -> None:
        """Give the connection back to the pool, or close it when it cannot serve another request."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if self._pump is not None and not self._pump.done():
            self._pump.cancel()
            connection.abort()
        elif connection.reusable:
            self._upstream.keep(connection)
        else:
            connection.close()

    def abort(self) -> None:
        """Close the connection at once; the upstream sees it and can stop generating."""
        connection, self._connection = self._connection, None
        sending = self._pump is not None and not self._pump.done()
        if self._pump is not None:
            self._pump.cancel()
        if connection is not None:
            connection.reset() if sending else connection.abort()


class Upstream:
    """Sends requests to one Target. Owned by the daemon; all methods on the event loop's thread.

    ``connect_timeout_s`` bounds connecting only. ``idle_timeout_s`` 0 means: no read timeout at all (field case S10).
    """

    def __init__(self, target: Target, *, connect_timeout_s: float = 10.0, idle_timeout_s: float = 0.0) -> None:
        self.target = target
        self._connect_timeout_s = connect_timeout_s or None
        self._idle_timeout_s = idle_timeout_s or None
        self._idle: deque[Connection] = deque()
        self._closed = False
        self._tls: ssl.SSLContext | None = None

    async def send(
        self,
        method: str,
        path: bytes,
        headers: Headers,
        body: bytes | AsyncIterable[bytes],
        *,
        chunked: bool = False,
        meanwhile: Callable[[], None] | None = None,
    ) -> UpstreamResponse:
        """Send one request and wait for the response head.

        ``path``: the client's request target, byte for byte. ``headers``: what ``relay.forwardable`` returns, so with
        Content-Length where one belongs and without Host, which is ours. ``body`` as an iterator is streamed
        (``chunked`` when no Content-Length is among ``headers``) and never retried.

        A request on a reused socket that ended before a single response byte is sent once more on a fresh one:
        the upstream had closed it while idle. ``meanwhile`` is called when a request has gone out, before its response
        is waited for, so twice for one sent again. Raises UpstreamMissing (cannot connect) and UpstreamReset.
        """
        head = self._head(method, path, headers, chunked)
        connection = self._take() if isinstance(body, bytes) else None
        if connection is not None:
            try:
                return await self._exchange(connection, method, head, body, chunked, meanwhile)
            except UpstreamReset as exc:
                if connection.answered or isinstance(exc.__cause__, TimeoutError):  # silent is not closed
                    raise
        return await self._exchange(await self._connect(), method, head, body, chunked, meanwhile)

    def keep(self, connection: Connection) -> None:
        """Put a connection that can serve again into the pool."""
        if self._closed:
            connection.close()
            return
        if len(self._idle) >= IDLE_CONNECTIONS_MAX:
            self._idle.popleft().close()
        connection.park(asyncio.get_running_loop().time())
        self._idle.append(connection)

    def close(self) -> None:
        """Close all idle connections, and from now on each one as its response ends."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    async def reachable(self, timeout_s: float) -> bool:
        """Whether a connection can be opened; sends no request, so it never wakes a model."""
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self._connect()
        except (UpstreamMissing, TimeoutError):
            return False
        connection.close()
        return True

    def _head(self, method: str, path: bytes, headers: Headers, chunked: bool) -> bytes:
        target = self.target
        lines = [method.encode("ascii") + b" " + target.prefix + path + b" HTTP/1.1", b"Host: " + target.authority]
        lines += [name + b": " + value for name, value in headers]
        if chunked:
            lines.append(b"Transfer-Encoding: chunked")
        lines.append(b"\r\n")
        return b"\r\n".join(lines)

    def _take(self) -> Connection | None:
        now_s = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()  # the youngest first, so that the others age out
            if connection.reusable and now_s - connection.idle_since_s < IDLE_S_MAX:
                return connection
            connection.close()
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        target = self.target
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                if target.unix_path:
                    _, connection = await loop.create_unix_connection(lambda: Connection(loop), target.unix_path)
                else:
                    context = self._tls_context() if target.tls else None
                    _, connection = await loop.create_connection(
                        lambda: Connection(loop), target.host, target.port, ssl=context
                    )
        except TimeoutError as exc:
            raise UpstreamMissing(f"no connection to {target.url} within {self._connect_timeout_s:g} s") from exc
        except OSError as exc:
            raise UpstreamMissing(f"cannot connect to {target.url}: {exc.strerror or exc}") from exc
        return connection

    def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls

    async def _exchange(
        self,
        connection: Connection,
        method: str,
        head: bytes,
        body: bytes | AsyncIterable[bytes],
        chunked: bool,
        meanwhile: Callable[[], None] | None,
    ) -> UpstreamResponse:
        pump: asyncio.Task[None] | None = None
        try:
            connection.begin(head_only=method == "HEAD", idle_timeout_s=self._idle_timeout_s)
            if not isinstance(body, bytes):
                connection.write(head)
                pump = asyncio.get_running_loop().create_task(_pump(connection, body, chunked))
            elif len(body) <= JOIN_BYTES_MAX:
                connection.write(head + body)
            else:
                connection.write(head)
                connection.write(body)
            if meanwhile is not None:
                meanwhile()
            await connection.head()
        except BaseException as exc:
            if pump is not None and not pump.done():
                pump.cancel()
                connection.reset()
            connection.abort()
            if isinstance(exc, OSError):
                raise UpstreamReset(f"{self.target.url} gave no proper response: {_why(exc)}") from exc
            raise
        return UpstreamResponse(connection, self, pump)


async def _pump(connection: Connection, chunks: AsyncIterable[bytes], chunked: bool) -> None:
    """Stream a request body. A broken upstream ends it quietly: its response, or the reset, is what counts.

    When ``chunks`` itself fails (the client broke off, the body is over the cap) the connection is aborted, so that
    half a request never looks whole; the iterator's owner knows why.
    """
    try:
        async for chunk in chunks:
            if chunk:
                connection.write(b"%x\r\n%b\r\n" % (len(chunk), chunk) if chunked else chunk)
                await connection.drain()
        if chunked:
            connection.write(b"0\r\n\r\n")
    except asyncio.CancelledError:
        connection.reset()
        raise
    except Exception:
        connection.abort()


def _why(exc: BaseException) -> str:
    """A cause in a few words, without header or body text (field case O10)."""
    if isinstance(exc, BadResponse):
        return str(exc)
    return str(exc).split("\n", 1)[0][:80] or type(exc).__name__
