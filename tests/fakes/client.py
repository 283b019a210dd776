"""A client that writes requests byte for byte and reads responses as they are framed."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

from tests.fakes.upstream import PATIENCE_S


class Truncated(Exception):
    """The connection ended before the response did."""


@dataclass
class Answer:
    """One response. ``raw_headers``: in order; ``body``: unframed, still content-encoded."""

    status: int
    version: str
    raw_headers: list[tuple[str, str]]
    body: bytes = b""

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.raw_headers if key.lower() == name.lower()), None)

    def json(self):
        return json.loads(self.body)


class Client:
    """One connection to ``url`` (http://HOST:PORT or unix:PATH)."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter

    async def __aenter__(self) -> Client:
        if self.url.startswith("unix:"):
            self.reader, self.writer = await asyncio.open_unix_connection(self.url.removeprefix("unix:"))
        else:
            host, _, port = self.url.removeprefix("http://").partition(":")
            self.reader, self.writer = await asyncio.open_connection(host, int(port))
        return self

    async def __aexit__(self, *_exc) -> None:
        self.writer.close()

    def abort(self) -> None:
        self.writer.transport.abort()

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def start(self, method: str, target: str, body: bytes = b"", version: str = "1.1", **headers: str) -> None:
        """Write a request."""
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        given.setdefault("Host", "localhost")
        if body or method == "POST":
            given.setdefault("Content-Length", str(len(body)))
        lines = [f"{method} {target} HTTP/{version}", *(f"{name}: {value}" for name, value in given.items())]
        await self.send("\r\n".join([*lines, "", ""]).encode("latin-1") + body)

    async def head(self) -> Answer:
        """Read a response head, past any 100 Continue."""
        async with asyncio.timeout(PATIENCE_S):
            raw = await self.reader.readuntil(b"\r\n\r\n")
        line, *fields = raw[:-4].decode("latin-1").split("\r\n")
        version, status, _ = (line + " ").split(" ", 2)
        pairs = [(name, value.lstrip(" ")) for name, _, value in (one.partition(":") for one in fields)]
        return Answer(int(status), version, pairs)

    async def rest(self, answer: Answer, method: str = "POST") -> Answer:
        """Read the body. Raises Truncated when the connection ends too early."""
        if method == "HEAD" or answer.status in (204, 304):
            return answer
        try:
            async with asyncio.timeout(PATIENCE_S):
                if (answer.header("Transfer-Encoding") or "").lower() == "chunked":
                    while part := await self.chunk():
                        answer.body += part
                elif (length := answer.header("Content-Length")) is not None:
                    answer.body = await self.reader.readexactly(int(length))
                else:
                    answer.body = await self.reader.read()
        except (asyncio.IncompleteReadError, ConnectionError) as exc:
            raise Truncated(answer.body) from exc
        return answer

    async def chunk(self) -> bytes:
        """One chunk of a chunked body; b"" for the last."""
        async with asyncio.timeout(PATIENCE_S):
            size = int((await self.reader.readuntil(b"\r\n"))[:-2], 16)
            part = await self.reader.readexactly(size)
            await self.reader.readexactly(2)
        return part

    async def request(self, method: str, target: str, body: bytes = b"", version: str = "1.1", **headers) -> Answer:
        await self.start(method, target, body, version, **headers)
        return await self.rest(await self.head(), method)

    async def post(self, value: object, target: str = "/v1/chat/completions", **headers: str) -> Answer:
        """POST JSON (or bytes as they are)."""
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        headers.setdefault("Content_Type", "application/json")
        return await self.request("POST", target, body, **headers)


async def once(url: str, method: str, target: str, body: bytes = b"", version: str = "1.1", **headers: str) -> Answer:
    """One request on a connection of its own."""
    async with Client(url) as client:
        return await client.request(method, target, body, version, **headers)


async def post(url: str, value: object, target: str = "/v1/chat/completions", **headers: str) -> Answer:
    """POST JSON on a connection of its own."""
    async with Client(url) as client:
        return await client.post(value, target, **headers)
