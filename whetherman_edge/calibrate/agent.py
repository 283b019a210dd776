"""The agent's model server, called as an agent calls it: chat completions, calls read from the reply and from its text.

Streams, because the time to the first token is one of the things measured; a server that answers in one piece all the
same is read too. 429 and 5xx are tried again, with jitter and as late as ``Retry-After`` says. Keys never reach a
message or a log.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from whetherman_edge.calibrate.written_calls import ToolCall, parse_arguments, read_calls
from whetherman_edge.dialects.sse import EventReader
from whetherman_edge.errors import UpstreamMissing, UsageError

RETRIES_MAX = 6
BACKOFF_S = 1.0
BACKOFF_MAX_S = 60.0
CONNECT_TIMEOUT_S = 10.0
ERROR_CHARS_MAX = 300
REPLY_BYTES_MAX = 8 << 20
"""A reply of a few thousand tokens is some hundred kilobytes of events; what goes on beyond this has no end."""
_TOKENS_MAX = 1e9
_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_OUR_HEADERS = "x-whetherman-"

Sleep = Callable[[float], Awaitable[None]]


class _TooLarge(Exception):
    """The reply is larger than REPLY_BYTES_MAX."""


def check_endpoint(endpoint: str) -> None:
    """Raise UsageError for what is no address of a model server."""
    if not re.match(r"https?://[^/\s]", endpoint):
        raise UsageError(f"--agent-endpoint: expected http://HOST:PORT or https://HOST, got {endpoint[:100]!r}")


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What came back for one request.

    ``calls``: structured ones, or those read out of the text (``from_content``). Tokens are the server's own counts, 0
    where it gives none; ``cached_tokens``: prompt tokens it did not evaluate again, None where it does not say.
    ``ttft_s``: seconds to the first token. ``finish``: its finish reason. ``headers``: those that begin with
    ``x-whetherman-``. ``error``: why there is no reply; "" when there is one. ``status``: of the last HTTP response.
    """

    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    from_content: bool = False
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    ttft_s: float = 0.0
    seconds: float = 0.0
    finish: str = ""
    headers: dict[str, str] = {}
    error: str = ""
    status: int = 0
    reasoning_chars: int = 0
    streamed: bool = False


class AgentClient:
    """One model behind one endpoint.

    ``endpoint``: the server's root or its ``/v1``. ``temperature``: sent with every request that names no other.
    ``max_tokens``: of one reply. ``timeout_s``: of one reply, None for no limit. ``pause``: how a retry waits.
    ``on_reply``: told of every reply, those that are asked for again among them, since they are paid for too;
    ``on_wait``: told how many seconds a retry waits, before it does. What either raises ends the call.
    """

    def __init__(
        self,
        endpoint: str,
        model: str,
        key: str = "",
        *,
        temperature: float = 0.0,
        max_tokens: int = 512,
        timeout_s: float | None = 600.0,
        retries: int = RETRIES_MAX,
        headers: Mapping[str, str] | None = None,
        pause: Sleep = asyncio.sleep,
        rng: random.Random | None = None,
    ) -> None:
        root = endpoint.rstrip("/").removesuffix("/chat/completions").rstrip("/")
        self.endpoint = root
        self.url = (root if root.endswith("/v1") else root + "/v1") + "/chat/completions"
        self.model = model
        self.temperature = temperature
        self.max_tokens = max_tokens
        self.n_retried = 0
        self.on_reply: Callable[[Reply], None] = lambda _reply: None
        self.on_wait: Callable[[float], None] = lambda _seconds: None
        self._retries = retries
        self._pause = pause
        self._rng = rng or random.Random()  # jitter, no secret
        self._headers = {"content-type": "application/json", **(headers or {})}
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, connect=CONNECT_TIMEOUT_S)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; may be called twice."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def body(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], **extra: Any) -> bytes:
        """The request's bytes. tools: entries of the ``tools`` array, left out when empty. extra: further fields."""
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": list(messages),
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if tools:
            fields["tools"] = list(tools)
        fields |= extra
        if not fields["stream"]:
            fields.pop("stream_options", None)
        return msgspec.json.encode(fields)

    async def complete(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), **extra: Any
    ) -> Reply:
        """One reply. Never raises for what the server does: ``Reply.error`` says it.

        Raises UpstreamMissing when nothing listens there.
        """
        return await self.send(self.body(messages, tools, **extra), tool_names(tools))

    async def send(self, body: bytes, offered: Sequence[str] = (), headers: Mapping[str, str] | None = None) -> Reply:
        """Send a body as it is. offered: names that a call written in the text may have. headers: of this request.

        Raises UpstreamMissing when nothing listens there.
        """
        tries = 0
        while True:
            reply, wait_s = await self._once(body, offered, headers or {})
            self.on_reply(reply)
            if wait_s is None or tries >= self._retries:
                return reply
            tries += 1
            self.n_retried += 1
            backoff = min(BACKOFF_MAX_S, BACKOFF_S * 2.0 ** (tries - 1)) * (0.5 + self._rng.random())
            self.on_wait(max(wait_s, backoff))
            await self._pause(max(wait_s, backoff))

    async def _once(
        self, body: bytes, offered: Sequence[str], headers: Mapping[str, str]
    ) -> tuple[Reply, float | None]:
        """One try: the reply, and the least seconds to wait before another one; None for no other."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(connector=connector, timeout=self._timeout, auto_decompress=True)
        started = time.monotonic()
        try:
            async with self._session.post(self.url, data=body, headers=self._headers | dict(headers)) as response:
                if response.status != 200:
                    text = (await _body(response, ERROR_CHARS_MAX)).decode("utf-8", "replace")
                    error = Reply(
                        error=f"HTTP {response.status}: {text}",
                        status=response.status,
                        seconds=time.monotonic() - started,
                        headers=_ours(response.headers),
                    )
                    return error, _retry_after(response.headers) if response.status in _RETRIED else None
                reply = await _read(response, offered, started)
        except aiohttp.ClientConnectorError as exc:
            raise UpstreamMissing(
                f"expected a model server at {self.url}, but nothing answers ({exc.strerror or 'no connection'}); "
                "start it, or correct --agent-endpoint"
            ) from exc
        except _TooLarge:
            told = f"expected at most {REPLY_BYTES_MAX >> 20} MiB in a reply, got more"
            return Reply(error=told, seconds=time.monotonic() - started), None
        except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError) as exc:
            kind = type(exc).__name__
            return Reply(error=f"{kind}: the reply broke off", seconds=time.monotonic() - started), 0.0
        return reply, (0.0 if reply.error else None)


def tool_names(tools: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Names of the function tools of a ``tools`` array."""
    functions = (tool.get("function") for tool in tools)
    return tuple(str(function["name"]) for function in functions if isinstance(function, Mapping))


class _Gathered:
    """A reply put together from its pieces; both the streamed and the whole form are read by ``take``."""

    def __init__(self, started: float) -> None:
        self.started = started
        self.first: float | None = None
        self.content: list[str] = []
        self.calls: dict[int, dict[str, str]] = {}
        self.finish = ""
        self.usage: dict[str, Any] = {}
        self.timings: dict[str, Any] = {}
        self.reasoning_chars = 0
        self.n_choices = 0
        self.error = ""

    def take_event(self, data: bytes) -> None:
        """The data of one event of a stream. Raises ValueError (DecodeError) for what is no JSON."""
        if data.strip() != b"[DONE]":
            self.take(msgspec.json.decode(data))

    def take(self, value: Any) -> None:
        """One event of a stream, or the whole reply."""
        if not isinstance(value, dict):
            self.error = self.error or "expected a JSON object in the reply"
            return
        if value.get("error"):
            self.error = f"in the reply: {str(value['error'])[:ERROR_CHARS_MAX]}"
        for key, kept in (("usage", self.usage), ("timings", self.timings)):
            if isinstance(value.get(key), dict):
                kept.update(value[key])
        choices = value.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            return
        choice = choices[0]
        self.n_choices += 1
        delta = choice.get("delta", choice.get("message"))
        if isinstance(delta, dict):
            self._take_delta(delta)
        if isinstance(choice.get("finish_reason"), str):
            self.finish = choice["finish_reason"]

    def _take_delta(self, delta: dict[str, Any]) -> None:
        content, calls = delta.get("content"), delta.get("tool_calls")
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        if isinstance(content, str) and content:
            self.content.append(content)
        if isinstance(reasoning, str):
            self.reasoning_chars += len(reasoning)
        if isinstance(calls, list):
            for place, call in enumerate(calls):
                if isinstance(call, dict):
                    self._take_call(call, place)
        if self.first is None and (content or reasoning or calls):
            self.first = time.monotonic()

    def _take_call(self, call: dict[str, Any], place: int) -> None:
        function = call.get("function")
        index = call.get("index")
        if not isinstance(index, int):
            index = place
        kept = self.calls.get(index)
        known = kept is not None and (not call.get("id") or str(call["id"]) == kept["id"])
        if kept is None or not known:
            index = index if kept is None else max(self.calls) + 1  # some servers give every call index 0 (S03)
            kept = self.calls[index] = {"id": str(call.get("id") or f"call_{index}"), "name": "", "raw": ""}
        if isinstance(function, dict):
            kept["name"] += str(function.get("name") or "")
            arguments = function.get("arguments")
            if isinstance(arguments, dict):
                kept["raw"] = msgspec.json.encode(arguments).decode()
            elif isinstance(arguments, str):
                kept["raw"] += arguments

    def reply(self, offered: Sequence[str], headers: dict[str, str], *, streamed: bool) -> Reply:
        """All of it as one value."""
        now = time.monotonic()
        content = "".join(self.content)
        calls = tuple(
            ToolCall(kept["id"], kept["name"], parse_arguments(kept["raw"]), kept["raw"])
            for _, kept in sorted(self.calls.items())
            if kept["name"]
        )
        written = () if calls else read_calls(content, offered)
        error = self.error or ("" if self.n_choices else "expected a choice in the reply, got none")
        details = self.usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        if cached is None:
            cached = self.timings.get("cache_n")
        return Reply(
            content=content,
            calls=calls or written,
            from_content=bool(written),
            prompt_tokens=_count(self.usage.get("prompt_tokens")) or 0,
            output_tokens=_count(self.usage.get("completion_tokens")) or 0,
            cached_tokens=_count(cached),
            ttft_s=(self.first or now) - self.started,
            seconds=now - self.started,
            finish=self.finish,
            headers=headers,
            error=error,
            status=200,
            reasoning_chars=self.reasoning_chars,
            streamed=streamed,
        )


async def _read(response: aiohttp.ClientResponse, offered: Sequence[str], started: float) -> Reply:
    """The whole of a 200. Raises ValueError for bytes that are no JSON."""
    gathered = _Gathered(started)
    streamed = response.content_type == "text/event-stream"
    if not streamed:
        body = await _body(response, REPLY_BYTES_MAX + 1)
        if len(body) > REPLY_BYTES_MAX:
            raise _TooLarge
        gathered.take(msgspec.json.decode(body))
        return gathered.reply(offered, _ours(response.headers), streamed=False)
    reader = EventReader()
    n_bytes = 0
    async for piece in response.content.iter_any():
        n_bytes += len(piece)
        if n_bytes > REPLY_BYTES_MAX:
            raise _TooLarge
        for event in reader.feed(piece):
            gathered.take_event(event)
    for event in reader.close():
        gathered.take_event(event)
    return gathered.reply(offered, _ours(response.headers), streamed=True)


async def _body(response: aiohttp.ClientResponse, most: int) -> bytes:
    """The first ``most`` bytes of a body."""
    parts = bytearray()
    while len(parts) < most and (piece := await response.content.read(most - len(parts))):
        parts += piece
    return bytes(parts)


def _count(value: Any) -> int | None:
    """A number of tokens; None for what cannot be one, which must not lower what was spent, nor break the log."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _TOKENS_MAX:
        return None
    return int(value)


def _ours(headers: Mapping[str, str]) -> dict[str, str]:
    return {key.lower(): value for key, value in headers.items() if key.lower().startswith(_OUR_HEADERS)}


def _retry_after(headers: Mapping[str, str]) -> float:
    """Seconds that the server asks for; 0 where it says nothing that can be read. Bounded: it is not our clock."""
    value = headers.get("retry-after", "")
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return 0.0
    return min(max(0.0, seconds), 600.0)  # in this order: NaN is no time to wait
