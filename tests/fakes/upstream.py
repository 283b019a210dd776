"""A programmable model server on a real socket: it records exact bytes and answers what a script says.

A script is a coroutine ``(Seen, Wire) -> None`` for one request; ``FakeUpstream.script(...)`` queues one for the next
request, ``FakeUpstream.default`` serves the rest. Everything that goes out is written byte by byte by the script, so
odd framing, garbage and resets are one line each.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import json
import os
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

# One unit for every wait in these tests; slow machines set WHETHERMAN_TEST_TIME_FACTOR.
TIME_FACTOR = float(os.environ.get("WHETHERMAN_TEST_TIME_FACTOR", "1"))
PATIENCE_S = 10.0 * TIME_FACTOR


@dataclass
class Seen:
    """One request as it came over the wire. ``head``: request line and header bytes; ``body``: unframed bytes."""

    head: bytes
    body: bytes
    method: str
    target: bytes
    headers: list[tuple[bytes, bytes]]
    connection: int
    closed: asyncio.Event

    def header(self, name: str) -> bytes | None:
        """First value of a header, by any case."""
        return next((value for key, value in self.headers if key.lower() == name.lower().encode()), None)

    def names(self) -> set[str]:
        return {key.decode().lower() for key, _ in self.headers}

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.body).hexdigest()

    def json(self):
        return json.loads(self.body)


class Wire:
    """The response side of one connection."""

    def __init__(self, writer: asyncio.StreamWriter, closed: asyncio.Event) -> None:
        self._writer = writer
        self.closed = closed

    async def send(self, data: bytes) -> None:
        """Write bytes as they are; quiet when the peer has gone."""
        with contextlib.suppress(ConnectionError):
            self._writer.write(data)
            await self._writer.drain()

    async def head(self, status: str = "200 OK", **headers: str) -> None:
        lines = [f"HTTP/1.1 {status}", *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())]
        await self.send("\r\n".join([*lines, "", ""]).encode("latin-1"))

    async def chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    async def last_chunk(self) -> None:
        await self.send(b"0\r\n\r\n")

    async def until_closed(self, timeout_s: float = PATIENCE_S) -> bool:
        """Wait for the peer to close; False when it did not in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.closed.wait()
        except TimeoutError:
            return False
        return True

    def reset(self) -> None:
        """End the connection with a TCP reset."""
        sock = self._writer.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    def fin(self) -> None:
        """End the connection the polite way, after what was written."""
        self._writer.close()


Script = Callable[[Seen, Wire], Awaitable[None]]


def completion(content: str | None = "Hello.", *, tool_calls: list | None = None, model: str = "m") -> dict:
    """A chat completion as servers write it."""
    message: dict = {"role": "assistant", "content": content}
    if tool_calls:
        message["tool_calls"] = tool_calls
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if tool_calls else "stop"}
    return {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": model, "choices": [choice]}


def tool_call(name: str = "search", arguments: str = "{}", index: int | None = None) -> dict:
    call: dict = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}
    if index is not None:
        call["index"] = index
    return call


def delta(index: int = 0, finish: str | None = None, **fields) -> bytes:
    """One streamed chunk."""
    choice = {"index": index, "delta": fields, "finish_reason": finish}
    value = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def text_stream(*pieces: str) -> list[bytes]:
    """The events of a streamed text answer."""
    events = [delta(role="assistant", content="")]
    events += [delta(content=piece) for piece in pieces]
    return [*events, delta(finish="stop"), b"data: [DONE]\n\n"]


def reply(
    value: object | bytes,
    *,
    status: str = "200 OK",
    content_type: str = "application/json",
    encoding: str | None = None,
    chunked: bool = False,
    **headers: str,
) -> Script:
    """A whole response; ``encoding="gzip"`` compresses it."""
    body = value if isinstance(value, bytes) else json.dumps(value).encode()

    async def run(_seen: Seen, wire: Wire) -> None:
        data = gzip.compress(body, mtime=0) if encoding == "gzip" else body
        extra = {"Content_Type": content_type, **headers}
        if encoding:
            extra["Content_Encoding"] = encoding
        if chunked:
            await wire.head(status, Transfer_Encoding="chunked", **extra)
            for start in range(0, len(data), 1000):
                await wire.chunk(data[start : start + 1000])
            await wire.last_chunk()
        else:
            await wire.head(status, Content_Length=str(len(data)), **extra)
            await wire.send(data)

    return run


def stream(events: list[bytes], *, pause_s: float = 0.0, **headers: str) -> Script:
    """A chunked event stream, one chunk an event."""

    async def run(_seen: Seen, wire: Wire) -> None:
        await wire.head(Content_Type="text/event-stream", Transfer_Encoding="chunked", **headers)
        for event in events:
            await wire.chunk(event)
            if pause_s:
                await asyncio.sleep(pause_s * TIME_FACTOR)
        await wire.last_chunk()

    return run


async def hang(_seen: Seen, wire: Wire) -> None:
    """Never answer; end when the peer closes."""
    await wire.until_closed()


class FakeUpstream:
    """The server. ``requests``: all that was seen, in order of arrival. ``url``: its base URL."""

    def __init__(self, default: Script | None = None) -> None:
        self.requests: list[Seen] = []
        self.default: Script = default or reply(completion())
        self.n_connections = 0
        self.url = ""
        self.arrived = asyncio.Event()
        self._scripts: deque[Script] = deque()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task] = set()

    def script(self, *scripts: Script) -> None:
        """Queue scripts for the next requests."""
        self._scripts.extend(scripts)

    @property
    def last(self) -> Seen:
        return self.requests[-1]

    async def start(self, unix_path: str = "") -> FakeUpstream:
        loop = asyncio.get_running_loop()
        if unix_path:
            self._server = await loop.create_unix_server(lambda: _Protocol(self._serve), unix_path)
            self.url = f"unix:{unix_path}"
        else:
            self._server = await loop.create_server(lambda: _Protocol(self._serve), "127.0.0.1", 0)
            self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def next_request(self) -> Seen:
        """The next request that arrives from now on."""
        self.arrived.clear()
        async with asyncio.timeout(PATIENCE_S):
            await self.arrived.wait()
        return self.last

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, closed: asyncio.Event) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        number = self.n_connections
        self.n_connections += 1
        try:
            await self._requests(reader, writer, number, closed)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _requests(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int, closed: asyncio.Event
    ) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            line, *raw = head[:-4].split(b"\r\n")
            method, target, _ = line.split(b" ")
            headers = [(name, value.lstrip(b" ")) for name, _, value in (one.partition(b":") for one in raw)]
            body = await _read_body(reader, {name.lower(): value for name, value in headers})
            seen = Seen(head, body, method.decode(), target, headers, number, closed)
            self.requests.append(seen)
            self.arrived.set()
            script = self._scripts.popleft() if self._scripts else self.default
            await script(seen, Wire(writer, closed))
            if writer.is_closing() or closed.is_set():
                return


class _Protocol(asyncio.StreamReaderProtocol):
    """Streams that say when the peer ended the connection, also while nobody reads."""

    def __init__(self, serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter, asyncio.Event], Awaitable]) -> None:
        self.closed = asyncio.Event()
        reader = asyncio.StreamReader()
        super().__init__(reader, lambda reader, writer: serve(reader, writer, self.closed))

    def eof_received(self) -> bool | None:
        self.closed.set()
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()
        super().connection_lost(exc)


async def _read_body(reader: asyncio.StreamReader, headers: dict[bytes, bytes]) -> bytes:
    if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
        parts = []
        while True:
            size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
            part = await reader.readexactly(size)
            await reader.readexactly(2)
            if not size:
                return b"".join(parts)
            parts.append(part)
    return await reader.readexactly(int(headers.get(b"content-length", b"0")))
