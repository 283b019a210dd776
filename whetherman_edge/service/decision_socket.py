"""The decision socket: ``decide`` and ``route`` in microseconds, framed msgpack over a Unix stream (DESIGN section 6).

    request  {"op": "ping" | "route" | "decide", "id": int | str | nil, …}
               route   "query": text, "options": {name: description | {"description", "examples", "parameters"} | nil}
               decide  "request": a chat body as a map, or its JSON as bytes; "profile": name (optional)
    reply    {"id": …, "result": {…}}  or  {"id": …, "error": {"type", "message"}}

Replies come in the order of the requests, so a client may send several before it reads. A request that breaks the
contract gets an error reply and the connection goes on; bytes that are no frames, or a frame that is no request, get an
error reply with ``id`` nil, and the connection is closed, since what follows cannot be trusted. Who may connect is
decided by the socket file: mode 0600, so the user who runs the daemon.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

import msgspec

from whetherman_edge.errors import UsageError, ViewError
from whetherman_edge.service.frames import FrameError, FrameParser, frame

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 64
"""Each may hold one frame of 4 MiB; more callers than this on one machine should share connections."""

READ_BYTES = 64 * 1024

UNSENT_BYTES_MAX = 256 * 1024
"""Replies a client has not read. Above this its requests are not read either, until it catches up."""

STALL_S_MAX = 30.0
"""A client that sends half a frame, or reads nothing, for this long is cut off. Between frames it may rest for ever."""

LOOP_HELD_S_MAX = 0.001
"""A client that pipelines gives way to the rest of the daemon after this long."""

Id: TypeAlias = int | str | None


class Ping(msgspec.Struct, frozen=True, tag="ping", tag_field="op"):
    id: Id = None


class Route(msgspec.Struct, frozen=True, tag="route", tag_field="op"):
    query: str
    options: dict[str, Any]
    id: Id = None


class Decide(msgspec.Struct, frozen=True, tag="decide", tag_field="op"):
    request: Any
    profile: str = ""
    id: Id = None


class _Envelope(msgspec.Struct, frozen=True):
    """As much of a faulty request as is needed to answer it."""

    op: str
    id: Id = None


class Fault(msgspec.Struct, frozen=True):
    type: str
    message: str


class Reply(msgspec.Struct, frozen=True, omit_defaults=True):
    id: Id
    result: Any = msgspec.UNSET
    error: Fault | msgspec.UnsetType = msgspec.UNSET


class Handlers(msgspec.Struct, frozen=True):
    """What the operations do. Results are msgpack-encodable; UsageError and ViewError become error replies.

    ``route``: query and options to a Choice. ``decide``: JSON bytes of a chat body and a profile name ("" = the usual
    one) to the same object as ``POST /v1/decide``.
    """

    route: Callable[[str, Mapping[str, Any]], Awaitable[Any]]
    decide: Callable[[bytes, str], Awaitable[Any]]


_DECODER = msgspec.msgpack.Decoder(Ping | Route | Decide)
_ENVELOPE = msgspec.msgpack.Decoder(_Envelope)
_ENCODER = msgspec.msgpack.Encoder()


class DecisionSocket:
    """Serves one listening socket. ``start`` and ``stop`` once each, on the event loop's thread."""

    def __init__(self, handlers: Handlers, *, connections_max: int = CONNECTIONS_MAX) -> None:
        self._handlers = handlers
        self._connections_max = connections_max
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self, listener: socket.socket) -> None:
        """Accept connections on ``listener``, which ``service.sockets.bind_unix`` made."""
        self._server = await asyncio.start_unix_server(self._connected, sock=listener, limit=READ_BYTES)

    async def stop(self) -> None:
        """Accept no more, end all connections."""
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            if len(self._connections) >= self._connections_max:
                message = f"expected at most {self._connections_max} connections; close or share some"
                writer.write(_fault(None, "busy", message))
                return
            self._connections.add(task)
            writer.transport.set_write_buffer_limits(high=UNSENT_BYTES_MAX)
            await self._converse(reader, writer)
        except (ConnectionError, TimeoutError) as exc:
            log.debug("event=decision_socket_closed kind=%s", type(exc).__name__)
            writer.transport.abort()
        finally:
            self._connections.discard(task)
            with contextlib.suppress(ConnectionError):
                writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parser = FrameParser()
        held_since_s = time.monotonic()
        while data := await _read(reader, parser):
            try:
                for payload in parser.feed(data):
                    writer.write(await self._answer(payload))
                    if writer.transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
                        async with asyncio.timeout(STALL_S_MAX):
                            await writer.drain()
                    if time.monotonic() - held_since_s > LOOP_HELD_S_MAX:
                        await asyncio.sleep(0)
                        held_since_s = time.monotonic()
            except FrameError as exc:
                log.info("event=decision_socket_bad_frame")
                writer.write(_fault(None, "bad_frame", str(exc)))
                return
            held_since_s = time.monotonic()

    async def _answer(self, payload: bytes) -> bytes:
        """The reply frame to one request. Raises FrameError when the payload is no request at all."""
        try:
            request = _DECODER.decode(payload)
        except (msgspec.MsgspecError, RecursionError) as exc:
            return _malformed(payload, exc)
        try:
            result = await self._result(request)
            return frame(_ENCODER.encode(Reply(request.id, result=result)))
        except (UsageError, ViewError) as exc:
            return _fault(request.id, "invalid_request", str(exc))
        except Exception as exc:
            log.exception(
                "event=decision_socket_error op=%s kind=%s", type(request).__name__.lower(), type(exc).__name__
            )
            return _fault(request.id, "internal_error", "internal error; the daemon's log has it")

    async def _result(self, request: Ping | Route | Decide) -> Any:
        started_s = time.perf_counter()
        match request:
            case Ping():
                return {"pong": True}
            case Route():
                choice = msgspec.structs.asdict(await self._handlers.route(request.query, request.options))
                return {**choice, "ms": round((time.perf_counter() - started_s) * 1e3, 4)}
            case Decide():
                return await self._handlers.decide(_chat_body(request.request), request.profile)


def _chat_body(request: Any) -> bytes:
    """A chat body as JSON bytes. Raises ViewError."""
    if isinstance(request, bytes):
        return request
    if not isinstance(request, dict):
        raise ViewError(f"expected request to be a chat body (a map, or JSON as bytes), got {type(request).__name__}")
    try:
        return msgspec.json.encode(request)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as exc:
        raise ViewError(f"expected a chat body that can be written as JSON: {str(exc)[:120]}") from exc


def _malformed(payload: bytes, cause: Exception) -> bytes:
    """The reply to a request that does not fit its operation. Raises FrameError when it is not even a request."""
    try:
        envelope = _ENVELOPE.decode(payload)
    except (msgspec.MsgspecError, RecursionError) as exc:
        raise FrameError(
            f'expected a msgpack map with "op" in each frame, got something else: {str(exc)[:120]}'
        ) from exc
    return _fault(envelope.id, "invalid_request", f"{envelope.op[:40]!r}: {str(cause)[:200]}")


def _fault(request_id: Id, kind: str, message: str) -> bytes:
    return frame(_ENCODER.encode(Reply(request_id, error=Fault(kind, message))))


async def _read(reader: asyncio.StreamReader, parser: FrameParser) -> bytes:
    """What has arrived; b"" at the end. Raises TimeoutError when the rest of a frame does not come."""
    if parser.is_between_frames:
        return await reader.read(READ_BYTES)
    async with asyncio.timeout(STALL_S_MAX):
        return await reader.read(READ_BYTES)
