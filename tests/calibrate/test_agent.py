"""The client against a server that answers in every way that servers do."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from whetherman_edge.calibrate import agent
from whetherman_edge.calibrate.agent import AgentClient
from whetherman_edge.errors import UpstreamMissing, UsageError

TOOL = {"type": "function", "function": {"name": "search", "description": "", "parameters": {"type": "object"}}}
ASKED = [{"role": "user", "content": "hi"}]
Handler = Callable[[web.Request], Any]


class Waits:
    """Stands in for sleep, and remembers."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


async def serve(handler: Handler) -> TestServer:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", handler)
    server = TestServer(app)
    await server.start_server()
    return server


def whole(message: dict[str, Any], **more: Any) -> web.Response:
    usage = {"prompt_tokens": 11, "completion_tokens": 3}
    return web.json_response({"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage, **more})


async def ask(handler: Handler, **settings: Any) -> tuple[Any, AgentClient]:
    server = await serve(handler)
    async with AgentClient(str(server.make_url("")), "m", **settings) as client:
        reply = await client.complete(ASKED, [TOOL])
    await server.close()
    return reply, client


async def test_a_stream_is_put_together() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert body["stream"]
        assert body["stream_options"] == {"include_usage": True}
        assert body["temperature"] == 0.0
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "x-whetherman-decision": "ACT"})
        await response.prepare(request)
        call = {"index": 0, "id": "a", "function": {"name": "search", "arguments": '{"q":'}}
        for event in (
            {"choices": [{"delta": {"role": "assistant", "content": None}}]},
            {"choices": [{"delta": {"tool_calls": [call]}}]},
            {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": ' "x"}'}}]}}]},
            {"choices": [{"delta": {}, "finish_reason": "tool_calls"}]},
            {
                "choices": [],
                "usage": {
                    "prompt_tokens": 20,
                    "completion_tokens": 5,
                    "prompt_tokens_details": {"cached_tokens": 12},
                },
            },
        ):
            await response.write(f": ping\n\ndata: {json.dumps(event)}\r\n\r\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    reply, _ = await ask(handler)
    assert [(call.id, call.name, call.arguments) for call in reply.calls] == [("a", "search", {"q": "x"})]
    assert (reply.prompt_tokens, reply.output_tokens, reply.cached_tokens) == (20, 5, 12)
    assert reply.streamed
    assert not reply.from_content
    assert reply.finish == "tool_calls"
    assert not reply.error
    assert reply.headers == {"x-whetherman-decision": "ACT"}
    assert 0.0 < reply.ttft_s <= reply.seconds


async def test_parallel_calls_that_all_have_index_0_stay_apart() -> None:  # S03
    calls = [
        {"index": 0, "id": "a", "function": {"name": "search", "arguments": {"q": 1}}},
        {"index": 0, "id": "b", "function": {"name": "search", "arguments": {"q": 2}}},
    ]

    async def handler(_request: web.Request) -> web.Response:
        return whole({"role": "assistant", "content": "", "tool_calls": calls})

    reply, _ = await ask(handler)
    assert [call.arguments for call in reply.calls] == [{"q": 1}, {"q": 2}]


async def test_a_reply_in_one_piece_with_a_call_in_its_text() -> None:
    async def handler(_request: web.Request) -> web.Response:
        return whole({"content": '```json\n{"name": "search", "arguments": {"q": "x"}}\n```'}, timings={"cache_n": 7})

    reply, _ = await ask(handler)
    assert reply.from_content
    assert reply.calls[0].arguments == {"q": "x"}
    assert (reply.prompt_tokens, reply.cached_tokens, reply.streamed) == (11, 7, False)


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_busy_servers_are_asked_again_as_late_as_they_say(status: int) -> None:
    answers = [web.Response(status=status, headers={"retry-after": "7"}), web.Response(status=status), None]
    waits = Waits()

    async def handler(_request: web.Request) -> web.Response:
        return answers.pop(0) or whole({"content": "hello"})

    reply, client = await ask(handler, pause=waits)
    assert reply.content == "hello"
    assert client.n_retried == 2
    assert waits.seconds[0] == 7.0
    assert 1.0 <= waits.seconds[1] <= 3.0  # 2 s, jittered


async def test_it_gives_up_and_says_why() -> None:
    waits = Waits()

    async def handler(_request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "overloaded"}}, status=503)

    reply, _ = await ask(handler, pause=waits, retries=3)
    assert "HTTP 503" in reply.error
    assert "overloaded" in reply.error
    assert len(waits.seconds) == 3


async def test_a_refusal_is_not_repeated() -> None:
    waits = Waits()

    async def handler(_request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "no tools here"}}, status=400)

    reply, _ = await ask(handler, pause=waits)
    assert reply.status == 400
    assert waits.seconds == []


@pytest.mark.parametrize("body", [b"\x00\xff", b"[]", b'{"choices": []}', b'{"error": {"message": "x"}}'])
async def test_garbage_is_an_error_and_not_a_reply(body: bytes) -> None:
    async def handler(_request: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    reply, _ = await ask(handler, pause=Waits(), retries=1)
    assert reply.error
    assert not reply.content
    assert not reply.calls


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"choices": [], "usage": ' + b'{"a":' * 100_000])
async def test_a_body_that_is_nested_without_end_is_garbage_too(body: bytes) -> None:
    async def handler(_request: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    reply, _ = await ask(handler, pause=Waits(), retries=0)
    assert "broke off" in reply.error


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_reply_without_end_is_left_and_not_asked_for_again(
    streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "REPLY_BYTES_MAX", 1 << 20)
    waits = Waits()

    async def handler(request: web.Request) -> web.StreamResponse:
        kind = "text/event-stream" if streamed else "application/json"
        response = web.StreamResponse(headers={"content-type": kind})
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            for _ in range(64):
                await response.write(b"data: {}\n\n" * 5000)
        return response

    reply, _ = await ask(handler, pause=waits)
    assert "at most 1 MiB" in reply.error
    assert waits.seconds == []


@pytest.mark.parametrize("count", [-5, -1e300, 1e300, 1 << 70, True, "12", None, [3]])
async def test_counts_that_cannot_be_are_no_counts(count: object) -> None:
    async def handler(_request: web.Request) -> web.Response:
        usage = {"prompt_tokens": count, "completion_tokens": count, "prompt_tokens_details": {"cached_tokens": count}}
        return web.json_response({"choices": [{"message": {"content": "hi"}}], "usage": usage})

    reply, _ = await ask(handler)
    assert not reply.error
    assert (reply.prompt_tokens, reply.output_tokens, reply.cached_tokens) == (0, 0, None)


@pytest.mark.parametrize("value", ["nan", "-3", "soon", "Mon, 01 Jan 0001 00:00:00 GMT", ""])
async def test_a_retry_after_that_is_no_time_is_none(value: str) -> None:
    answers = [web.Response(status=429, headers={"retry-after": value}), None]
    waits = Waits()

    async def handler(_request: web.Request) -> web.Response:
        return answers.pop(0) or whole({"content": "hello"})

    reply, _ = await ask(handler, pause=waits)
    assert reply.content == "hello"
    assert 0.5 <= waits.seconds[0] <= 1.5


async def test_replies_that_are_asked_for_again_are_paid_for_too() -> None:
    answers = [web.json_response({"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 3}}), None]
    paid: list[int] = []

    async def handler(_request: web.Request) -> web.Response:
        return answers.pop(0) or whole({"content": "hello"})

    server = await serve(handler)
    async with AgentClient(str(server.make_url("")), "m", pause=Waits()) as client:
        client.on_reply = lambda reply: paid.append(reply.prompt_tokens)
        await client.complete(ASKED)
    await server.close()
    assert paid == [11, 11]


def test_an_address_without_a_scheme_is_told_apart_from_a_server_that_is_down() -> None:
    with pytest.raises(UsageError, match="http://HOST:PORT"):
        agent.check_endpoint("localhost:8080")
    agent.check_endpoint("http://localhost:8080/v1")


async def test_the_key_goes_into_the_header_and_nowhere_else() -> None:
    async def handler(request: web.Request) -> web.Response:
        assert request.headers["authorization"] == "Bearer s3cret"
        return web.json_response({"error": {"message": "denied"}}, status=401)

    reply, _ = await ask(handler, key="s3cret")
    assert "denied" in reply.error
    assert "s3cret" not in repr(reply)


async def test_nothing_listens() -> None:
    async with AgentClient("http://127.0.0.1:9", "m") as client:
        with pytest.raises(UpstreamMissing, match="--agent-endpoint"):
            await client.complete(ASKED)
