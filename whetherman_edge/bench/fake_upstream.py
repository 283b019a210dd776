"""A model server that answers at once: what is left of a request's time is the way there and back.

``python -m whetherman_edge.bench.fake_upstream`` prints its port and serves until its stdin closes. One protocol class,
no framework, so that it costs the measurement as little as can be.
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import uvloop

_COMPLETION = (
    b'{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"bench","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"It is eleven degrees and raining."},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":900,"completion_tokens":9,"total_tokens":909}}'
)
_WHOLE = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
    len(_COMPLETION),
    _COMPLETION,
)
_EVENT = b'data: {"id":"1","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"word "}}]}\n\n'
_STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n" + b"".join(
    b"%x\r\n%b\r\n" % (len(event), event) for event in (*[_EVENT] * 20, b"data: [DONE]\n\n")
)
_STREAM += b"0\r\n\r\n"


class _Server(asyncio.Protocol):
    def __init__(self) -> None:
        self._buffer = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are not asyncio's by inheritance

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            at = head.find(b"content-length:")
            size = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._buffer) < end + 4 + size:
                return
            body = self._buffer[end + 4 : end + 4 + size]
            self._buffer = self._buffer[end + 4 + size :]
            self._transport.write(_STREAM if b'"stream":true' in body else _WHOLE)


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(_Server, "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await loop.run_in_executor(None, sys.stdin.read)  # the parent's end closes it
    server.close()


if __name__ == "__main__":
    uvloop.run(_serve())
