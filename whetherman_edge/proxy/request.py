"""One client's request: the head as it was parsed, and the body as it arrives."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from whetherman_edge.proxy.connection import Headers

if TYPE_CHECKING:
    from whetherman_edge.proxy.http_server import ClientConnection

Version = tuple[int, int]


class Request:
    """Made by ``http_server`` when a head is complete.

    ``target``: origin form ("/v1/models?x=1"), byte for byte as the client wrote it. ``path``: of it, without the
    query, its escapes as they came. ``raw_headers``: in order, as received. ``headers``: the first value of each, by
    name in lower case. ``keep_alive``: what the client wishes of the connection. ``content_length``: None where there
    is none, also for a chunked body. ``has_body``: it may have one, of no bytes perhaps. ``received``: all of the body
    has arrived.
    """

    __slots__ = (
        "_chunks",
        "_discards",
        "_failure",
        "_waiter",
        "connection",
        "content_length",
        "has_body",
        "headers",
        "keep_alive",
        "method",
        "path",
        "raw_headers",
        "received",
        "target",
        "version",
    )

    def __init__(
        self,
        connection: ClientConnection,
        method: str,
        target: bytes,
        path: str,
        version: Version,
        raw_headers: Headers,
        headers: dict[str, str],
        *,
        keep_alive: bool,
        content_length: int | None,
        has_body: bool,
    ) -> None:
        self.connection = connection
        self.method = method
        self.target = target
        self.path = path
        self.version = version
        self.raw_headers = raw_headers
        self.headers = headers
        self.keep_alive = keep_alive
        self.content_length = content_length
        self.has_body = has_body
        self.received = False
        self._chunks: list[bytes] = []
        self._discards = False
        self._failure: ConnectionError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def query(self) -> dict[str, str]:
        """The parameters of the URL; of a repeated one the last."""
        return dict(parse_qsl(self.target.partition(b"?")[2].decode("ascii"), keep_blank_values=True))

    def all_of(self, name: str) -> list[str]:
        """All values of a header, by lower-case name."""
        key = name.encode("ascii")
        return [value.decode("utf-8", "surrogateescape") for given, value in self.raw_headers if given.lower() == key]

    @property
    def at_end(self) -> bool:
        """All of the body has arrived and been read."""
        return self.received and not self._chunks

    async def chunk(self) -> bytes:
        """Whatever has arrived of the body, waiting for at least one byte; ``b""`` at its end.

        Raises ConnectionResetError when the client has gone.
        """
        while not self._chunks:
            if self.received:
                return b""
            if self._failure is not None:
                raise self._failure
            self._waiter = self.connection.new_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        chunks, self._chunks = self._chunks, []
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        self.connection.taken(len(data))
        return data

    # ---- for the connection --------------------------------------------------------------------------------------

    def feed(self, data: bytes) -> int:
        """More of the body; returns how many of its bytes wait to be read."""
        if self._discards:
            return 0
        self._chunks.append(data)
        self._wake()
        return len(data)

    def end(self) -> None:
        """The body is complete."""
        self.received = True
        self._wake()

    def fail(self, failure: ConnectionError) -> None:
        """The body will never be complete."""
        self._failure = failure
        self._wake()

    def discard(self) -> None:
        """Nobody will read the rest of the body."""
        self._discards = True
        chunks, self._chunks = self._chunks, []
        self.connection.taken(sum(map(len, chunks)))

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
