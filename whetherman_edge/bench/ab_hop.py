"""The last hop of ``bench ab`` before the agent's model server: it counts what a run costs and remembers replies.

Two gates that send the very same bytes for the same task and repeat get the same reply; it is asked for once, and its
tokens and its time, as measured then, count for both. Every reply is written to a file as it ends, so a bench that was
killed asks for nothing twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec
from aiohttp import web

from whetherman_edge.bench.ab_log import Journal

CHAT: Final = "/chat/completions"
_BODY_BYTES_MAX: Final = 64 << 20
_TOKENS_MAX: Final = 1e9
_PASSED: Final = frozenset({"authorization", "content-type", "accept", "x-api-key"})


class Stored(msgspec.Struct, frozen=True):
    """One whole reply. ``key``: of scope and request bytes. ``seconds``: from the request to the reply's end."""

    key: str
    content_type: str
    body: str
    seconds: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0


class Spent(msgspec.Struct):
    """What one run cost at the model server; of ``requests``, ``reused`` were answered from memory.

    ``seconds``: of the model server, as measured when each reply was made. ``saved_s``: what of it did not pass now.
    """

    requests: int = 0
    reused: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0
    saved_s: float = 0.0


class Hop:
    """A server on a free port in front of ``endpoint`` (a root or its ``/v1``).

    ``replies``: where replies are kept; None: nothing is reused. One run at a time: ``begin``, requests, ``spent``.
    """

    def __init__(self, endpoint: str, replies: Path | None) -> None:
        root = endpoint.rstrip("/")
        self._upstream = root if root.endswith("/v1") else root + "/v1"
        self._journal = Journal(replies) if replies is not None else None
        self._stored: dict[str, Stored] = {}
        self._scope = ""
        self._session: aiohttp.ClientSession | None = None
        self.spent = Spent()
        self.url = ""

    def begin(self, scope: str) -> None:
        """Start to count a new run. Replies are shared between runs of the same scope (task and repeat)."""
        self._scope = scope
        self.spent = Spent()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Accept requests inside the block; ``url`` is set then."""
        if self._journal is not None:
            self._stored = {row["key"]: msgspec.convert(row, Stored) for row in self._journal.rows()}
        application = web.Application(client_max_size=_BODY_BYTES_MAX)
        application.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        timeout = aiohttp.ClientTimeout(total=None)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(runner.cleanup)
            # A kept connection that the server closes in between would be an error of ours in somebody's run.
            connector = aiohttp.TCPConnector(force_close=True)
            self._session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout, connector=connector))
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if request.method != "POST" or not request.path.endswith(CHAT):
            return await self._relay(request, body, None)
        key = hashlib.sha256(self._scope.encode() + b"\0" + body).hexdigest()
        kept = self._stored.get(key)
        if kept is None:
            return await self._relay(request, body, key)
        self._count(kept)
        self.spent.reused += 1
        self.spent.saved_s += kept.seconds
        return web.Response(body=kept.body.encode(), headers={"content-type": kept.content_type})

    async def _relay(self, request: web.Request, body: bytes, key: str | None) -> web.StreamResponse:
        """Pass a request on and its reply back as it comes; a whole good reply to a chat is kept under ``key``."""
        assert self._session is not None
        headers = {name: value for name, value in request.headers.items() if name.lower() in _PASSED}
        url = self._upstream + request.path_qs.removeprefix("/v1")
        started = time.monotonic()
        try:
            async with self._session.request(request.method, url, data=body, headers=headers) as response:
                kind = response.headers.get("content-type", "application/json")
                passed = {"content-type": kind}
                if "retry-after" in response.headers:
                    passed["retry-after"] = response.headers["retry-after"]
                reply = web.StreamResponse(status=response.status, headers=passed)
                await reply.prepare(request)
                parts = []
                async for part in response.content.iter_any():
                    parts.append(part)
                    await reply.write(part)
                await reply.write_eof()
        except aiohttp.ClientConnectorError:
            return web.json_response({"error": {"message": "the agent's model server does not answer"}}, status=502)
        if key is not None and response.status == 200 and is_reply(b"".join(parts)):
            self._keep(key, kind, b"".join(parts), time.monotonic() - started)
        return reply

    def _keep(self, key: str, kind: str, body: bytes, seconds: float) -> None:
        usage = usage_of(body)
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else usage.get("cache_n")
        stored = Stored(
            key=key,
            content_type=kind,
            body=body.decode("utf-8", "replace"),
            seconds=round(seconds, 4),
            prompt_tokens=_whole(usage.get("prompt_tokens")),
            output_tokens=_whole(usage.get("completion_tokens")),
            cached_tokens=_whole(cached),
        )
        self._count(stored)
        if self._journal is not None:
            self._stored[key] = stored
            self._journal.append(msgspec.to_builtins(stored))

    def _count(self, stored: Stored) -> None:
        spent = self.spent
        spent.requests += 1
        spent.prompt_tokens += stored.prompt_tokens
        spent.output_tokens += stored.output_tokens
        spent.cached_tokens += stored.cached_tokens
        spent.seconds += stored.seconds


def is_reply(body: bytes) -> bool:
    """Whether a 200 holds a choice and no error. Anything else is not kept, or it would be the answer for ever."""
    events = list(_events(body))
    return any(event.get("choices") for event in events) and not any(event.get("error") for event in events)


def usage_of(body: bytes) -> dict[str, Any]:
    """``usage`` of a reply, whole or streamed, with llama.cpp's ``cache_n`` beside it; {} where the server counts not.

    A stream may state it in any event; the last one holds.
    """
    found: dict[str, Any] = {}
    for value in _events(body):
        if isinstance(value.get("usage"), dict):
            found |= value["usage"]
        if isinstance(value.get("timings"), dict) and "cache_n" in value["timings"]:
            found["cache_n"] = value["timings"]["cache_n"]
    return found


def _events(body: bytes) -> Iterator[dict[str, Any]]:
    """The JSON objects of a reply, whole or streamed."""
    pieces = body.splitlines() if body.lstrip().startswith((b"data:", b":", b"event:")) else [body]
    for piece in pieces:
        try:
            value = msgspec.json.decode(piece.removeprefix(b"data:").strip())
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        if isinstance(value, dict):
            yield value


def _whole(value: Any) -> int:
    """A count of tokens; 0 for what cannot be one."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _TOKENS_MAX
    return int(value) if good else 0
