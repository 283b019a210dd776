"""Mixed traffic for the reliability run: requests of all dialects, the replies to them, and a model server that fails.

A ``Plan`` says what one request is and what its reply will be, before it is sent; server and client both go by it, so
that every byte on either side of the daemon can be compared with what it must be.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field

from tests.fakes.upstream import FakeUpstream, Seen, Wire, _Protocol

SECRET = "PROMPTTEXT"
"""In every prompt; must never be in a log."""

# Share of requests in thousandths, by what the model server does with them. The rest is answered as it should be.
FAULTS = {
    "stall_head": 40,
    "stall_body": 40,
    "error_4xx": 40,
    "error_5xx": 40,
    "reset_head": 30,
    "reset_body": 30,
    "truncate": 30,
    "garbage": 10,
    "close_idle": 40,
}
STALL_S = (0.3, 2.5)
VANISH_SHARE = 0.08
UPLOAD_BROKEN_SHARE = 0.01
BIG_SHARE = 0.02
AGENTS = 1_000  # more than the daemon keeps
_OPEN = {"stall_head", "stall_body"}
_WORDS = ("lease", "tide", "copper", "harbour", "violet", "engine", "river", "salt", "ladder", "moon")
_PARAMETERS = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}


@dataclass
class Attempt:
    """One request at the model server. ``sent``: body bytes of the reply; ``whole``: all of it, in proper framing."""

    body: bytes
    status: int = 0
    sent: bytes = b""
    whole: bool = False


@dataclass
class Plan:
    """One request. ``vanish_s``: when its client leaves, after it has written it; None: it stays."""

    number: int
    dialect: str
    path: str
    body: bytes
    streams: bool
    fault: str
    reply: bytes
    pieces: list[bytes]
    chunked: bool
    stall_s: float
    vanish_s: float | None = None
    breaks_upload: bool = False
    left_at_s: float = 0.0
    attempts: list[Attempt] = field(default_factory=list)


class Planner:
    """Draws plans from one seed, in order."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._number = 0

    def draw(self) -> Plan:
        """The next plan."""
        rng = self._random
        self._number += 1
        dialect = rng.choice(tuple(_REQUESTS))
        streams = rng.random() < 0.5
        path, value = _REQUESTS[dialect](rng, streams)
        pieces = _REPLIES[dialect](rng, streams)
        roll, fault = rng.random() * 1000, "none"
        for name, share in FAULTS.items():
            roll -= share
            if roll < 0:
                fault = name
                break
        vanishes = rng.random() < VANISH_SHARE
        if fault == "error_4xx":
            pieces = [b'{"error":{"message":"no such thing","code":%d}}' % rng.randrange(1000)]
        elif fault == "error_5xx":
            pieces = [b'{"error":"out of memory %d"}' % rng.randrange(1000)]
        return Plan(
            number=self._number,
            dialect=dialect,
            path=path,
            body=_spaced(rng, value),
            streams=streams and not fault.startswith("error"),
            fault="stall_body" if vanishes and rng.random() < 0.5 else fault,
            reply=b"".join(pieces),
            pieces=pieces,
            chunked=streams or rng.random() < 0.3,
            stall_s=rng.uniform(*STALL_S),
            vanish_s=rng.uniform(0.0, 0.6) if vanishes else None,
            breaks_upload=rng.random() < UPLOAD_BROKEN_SHARE,
        )


class HostileUpstream(FakeUpstream):
    """Answers by the plans in ``plans``; can die and come back on the same port.

    ``dead``: (from, to) of every time it was away, monotonic seconds. ``gone_ms``: how long after a client had left
    the daemon's connection ended here.
    """

    def __init__(self, plans: dict[int, Plan]) -> None:
        super().__init__(self._answer)
        self._plans = plans
        self._port = 0
        self.dead: list[tuple[float, float]] = []
        self.gone_ms: list[float] = []
        self.never_gone = 0
        self.seen: Counter[str] = Counter()

    async def start(self, unix_path: str = "") -> HostileUpstream:
        """Listen, on the same port as before where there was one."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Protocol(self._serve), "127.0.0.1", self._port, reuse_address=True, backlog=512
        )
        self._port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        if self.dead:
            self.dead[-1] = (self.dead[-1][0], time.monotonic())
        return self

    async def die(self) -> None:
        """Stop listening and drop every connection."""
        self.dead.append((time.monotonic(), float("inf")))
        await self.stop()

    async def _answer(self, seen: Seen, wire: Wire) -> None:
        self.requests.clear()
        number = seen.header("x-number")
        if number is None:
            await self._other(seen, wire)
            return
        plan = self._plans.get(int(number))
        if plan is None:  # its client has been judged and forgotten
            wire.reset()
            return
        attempt = Attempt(seen.body)
        plan.attempts.append(attempt)
        self.seen[plan.fault] += 1
        if plan.vanish_s is not None:
            await self._until_gone(plan, attempt, wire)
            return
        await _FAULTS.get(plan.fault, _proper)(plan, attempt, wire)

    async def _other(self, seen: Seen, wire: Wire) -> None:
        """What is no chat: the daemon asking what we are, a client asking for models."""
        body = b'{"object":"list","data":[{"id":"m"}]}' if b"/models" in seen.target else b"{}"
        await wire.head("200 OK", Content_Type="application/json", Content_Length=str(len(body)))
        await wire.send(body)

    async def _until_gone(self, plan: Plan, attempt: Attempt, wire: Wire) -> None:
        """Begin a reply or none, and wait for the end of the connection.

        Never a whole reply: the daemon would rightly keep such a connection, and the next request on it find nobody.
        """
        arrived_s = time.monotonic()
        if plan.fault == "stall_body":
            await _head(plan, attempt, wire)
            await _piece(plan, attempt, wire, plan.pieces[0][: len(plan.pieces[0]) // 2])
        if not await wire.until_closed(30.0):
            self.never_gone += 1
        elif plan.left_at_s:
            # It may have left while the daemon was being started, and have waited in the kernel's queue.
            self.gone_ms.append((time.monotonic() - max(plan.left_at_s, arrived_s)) * 1e3)


async def _proper(plan: Plan, attempt: Attempt, wire: Wire) -> None:
    status = {"error_4xx": 404, "error_5xx": 500}.get(plan.fault, 200)
    if plan.fault == "stall_head":
        await asyncio.sleep(plan.stall_s)
    await _head(plan, attempt, wire, status)
    for index, piece in enumerate(plan.pieces):
        if plan.fault == "stall_body" and index == len(plan.pieces) // 2:
            await asyncio.sleep(plan.stall_s)
        await _piece(plan, attempt, wire, piece)
    if plan.chunked:
        await wire.last_chunk()
    attempt.whole = True
    if plan.fault == "close_idle":
        await asyncio.sleep(0.005)
        wire.fin()


async def _reset_head(plan: Plan, attempt: Attempt, wire: Wire) -> None:
    wire.reset()


async def _garbage(plan: Plan, attempt: Attempt, wire: Wire) -> None:
    await wire.send(b"HTTQ/9 hello\r\n\r\n")
    wire.fin()


async def _broken(plan: Plan, attempt: Attempt, wire: Wire) -> None:
    """Part of a reply, then a reset or an end that comes too early."""
    await _head(plan, attempt, wire)
    half = plan.pieces[: max(1, len(plan.pieces) // 2)]
    for piece in half[:-1]:
        await _piece(plan, attempt, wire, piece)
    last = half[-1]
    attempt.sent += last
    if plan.chunked:
        await wire.send(b"%x\r\n%b" % (len(last) + 5, last))
    else:
        await wire.send(last[: max(0, len(last) - 1)])
    await asyncio.sleep(0.01)
    (wire.reset if plan.fault == "reset_body" else wire.fin)()


_FAULTS = {
    "reset_head": _reset_head,
    "reset_body": _broken,
    "truncate": _broken,
    "garbage": _garbage,
}


async def _head(plan: Plan, attempt: Attempt, wire: Wire, status: int = 200) -> None:
    attempt.status = status
    names = {404: "404 Not Found", 500: "500 Internal Server Error"}
    kind = "application/json"
    if plan.streams:
        kind = "application/x-ndjson" if plan.dialect == "ollama" else "text/event-stream"
    framing = {"Transfer_Encoding": "chunked"} if plan.chunked else {"Content_Length": str(len(plan.reply))}
    await wire.head(names.get(status, "200 OK"), Content_Type=kind, **framing)


async def _piece(plan: Plan, attempt: Attempt, wire: Wire, piece: bytes) -> None:
    attempt.sent += piece
    await (wire.chunk(piece) if plan.chunked else wire.send(piece))


def _spaced(rng: random.Random, value: dict) -> bytes:
    """JSON in one of the spellings that clients have."""
    separators = rng.choice(((",", ":"), (", ", ": "), (" ,", " :  ")))
    return json.dumps(value, separators=separators, ensure_ascii=rng.random() < 0.5).encode()


def _text(rng: random.Random, n: int) -> str:
    return f"{SECRET} " + " ".join(rng.choice(_WORDS) for _ in range(n)) + " – ü?"


def _model(rng: random.Random) -> str:
    """An agent is known by its model. One alone is soon steered no more, since its replies are drawn blindly."""
    return f"m{rng.randrange(AGENTS)}"


def _prompt(rng: random.Random) -> str:
    return _text(rng, 40_000 if rng.random() < BIG_SHARE else rng.randrange(3, 60))


def _names(rng: random.Random) -> list[str]:
    return [f"{rng.choice(('search', 'read', 'send'))}_{rng.choice(_WORDS)}_{i}" for i in range(rng.choice((0, 1, 4)))]


def _nested(rng: random.Random) -> list[dict]:
    return [
        {"type": "function", "function": {"name": name, "description": "Does it.", "parameters": _PARAMETERS}}
        for name in _names(rng)
    ]


def _chat(rng: random.Random, streams: bool) -> tuple[str, dict]:
    turns: list[dict] = [{"role": "user", "content": _prompt(rng)}]
    if rng.random() < 0.3:
        call = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": '{"query":"x"}'}}
        turns += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": _text(rng, 20)},
        ]
    return "/v1/chat/completions", {"model": _model(rng), "messages": turns, "tools": _nested(rng), "stream": streams}


def _ollama(rng: random.Random, streams: bool) -> tuple[str, dict]:
    value = {"model": _model(rng), "messages": [{"role": "user", "content": _prompt(rng)}], "tools": _nested(rng)}
    return "/api/chat", value if streams else {**value, "stream": False}  # it streams unless told otherwise


def _responses(rng: random.Random, streams: bool) -> tuple[str, dict]:
    tools = [{"type": "function", "name": name, "parameters": _PARAMETERS} for name in _names(rng)]
    return "/v1/responses", {"model": _model(rng), "input": _prompt(rng), "tools": tools, "stream": streams}


def _messages(rng: random.Random, streams: bool) -> tuple[str, dict]:
    tools = [{"name": name, "description": "Does it.", "input_schema": _PARAMETERS} for name in _names(rng)]
    turns = [{"role": "user", "content": [{"type": "text", "text": _prompt(rng)}]}]
    value = {"model": _model(rng), "max_tokens": 64, "messages": turns, "tools": tools, "stream": streams}
    return "/v1/messages", value


_REQUESTS = {"chat": _chat, "ollama": _ollama, "responses": _responses, "messages": _messages}


def _said(rng: random.Random) -> list[str]:
    return [rng.choice(_WORDS) + " " for _ in range(rng.randrange(2, 40))]


def _sse(values: list[tuple[str, dict]], *, named: bool) -> list[bytes]:
    return [
        (b"event: %b\n" % name.encode() if named else b"") + b"data: " + json.dumps(value).encode() + b"\n\n"
        for name, value in values
    ]


def _chat_reply(rng: random.Random, streams: bool) -> list[bytes]:
    words = _said(rng)
    call = {"id": "c", "type": "function", "function": {"name": "search", "arguments": "{}"}}
    calls = rng.random() < 0.3
    if not streams:
        message = {"role": "assistant", "content": None, "tool_calls": [call]} if calls else {"content": "".join(words)}
        return [json.dumps({"id": "x", "choices": [{"index": 0, "message": message}]}).encode()]
    deltas = [{"tool_calls": [{"index": 0, **call}]}] if calls else [{"content": word} for word in words]
    events = [
        ("", {"id": "x", "choices": [{"index": 0, "delta": delta}]}) for delta in [{"role": "assistant"}, *deltas]
    ]
    return [b": hello\n\n", *_sse(events, named=False), b"data: [DONE]\n\n"]


def _ollama_reply(rng: random.Random, streams: bool) -> list[bytes]:
    calls = [{"function": {"name": "search", "arguments": {"query": "x"}}}]
    lines: list[dict] = [{"message": {"role": "assistant", "content": word}, "done": False} for word in _said(rng)]
    if rng.random() < 0.3:
        lines = [{"message": {"role": "assistant", "content": "", "tool_calls": calls}, "done": False}]
    lines.append({"message": {"role": "assistant", "content": ""}, "done": True})
    return [json.dumps(line).encode() + b"\n" for line in (lines if streams else lines[:1])]


def _responses_reply(rng: random.Random, streams: bool) -> list[bytes]:
    words = _said(rng)
    item = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "".join(words)}]}
    if not streams:
        return [json.dumps({"id": "r", "object": "response", "output": [item]}).encode()]
    parts = [("response.output_text.delta", {"type": "response.output_text.delta", "delta": word}) for word in words]
    done = ("response.completed", {"type": "response.completed", "response": {"id": "r", "output": [item]}})
    return _sse([*parts, done], named=True)


def _messages_reply(rng: random.Random, streams: bool) -> list[bytes]:
    words = _said(rng)
    if not streams:
        return [json.dumps({"type": "message", "content": [{"type": "text", "text": "".join(words)}]}).encode()]
    start = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    parts = [
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": word}} for word in words
    ]
    values = [{"type": "message_start", "message": {"content": []}}, start, *parts, {"type": "message_stop"}]
    return _sse([(str(value["type"]), value) for value in values], named=True)


_REPLIES = {
    "chat": _chat_reply,
    "ollama": _ollama_reply,
    "responses": _responses_reply,
    "messages": _messages_reply,
}
