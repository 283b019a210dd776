"""What an upstream, a model or a web page could try: extra headers, a second response, a request of a browser."""

from __future__ import annotations

import json

import pytest

from tests.fakes.chats import CHAT, body_of, said
from tests.fakes.client import Client, Truncated, post
from tests.fakes.upstream import completion, delta, reply, stream, tool_call

EVIL = "x\r\nX-Evil: 1\r\n\r\nHTTP/1.1 200 OK\r\n"
OURS = {"x-whetherman-" + name for name in ("decision", "applied", "reason", "confidence", "engine", "ms")}


def names(answer) -> set[str]:
    return {name.lower() for name, _ in answer.raw_headers}


@pytest.mark.parametrize("force", ["ACT", "ANSWER", "DECLINE"])
@pytest.mark.parametrize("streams", [False, True])
async def test_a_models_words_and_a_clients_names_make_no_header(upstream, serve, judge, force, streams):
    call = tool_call(EVIL, json.dumps({"q": EVIL}), 0 if streams else None)
    upstream.default = (
        stream([delta(content=EVIL), delta(tool_calls=[call]), b"data: [DONE]\n\n"])
        if streams
        else reply(completion(EVIL, tool_calls=[call]))
    )
    evil_tool = {"type": "function", "function": {"name": EVIL, "description": EVIL}}
    chat = {**CHAT, "model": EVIL, "tools": [evil_tool], "stream": streams}
    async with serve(mode="enforce", force=force) as url, Client(url) as client:
        first = await client.post(chat)
        second = await client.post(CHAT, x_whetherman_profile="no%0d%0ax-evil:1", x_session_id="a%0d%0ab")
    framing = {"content-type", "content-length", "transfer-encoding"}
    for answer in (first, second):
        assert names(answer) - framing == OURS
        assert all("\r" not in value and "\n" not in value for _, value in answer.raw_headers)
    assert first.status == second.status == 200


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-A: a\rX-Evil: 1\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-A: a\nX-Evil: 1\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-A: a\x00b\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 40\r\n\r\n{}HTTP/1.1 200 OK\r\nX-Evil: 1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -2\r\n\r\n{}",
        b"HTTP/1.1 200 O\rK\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nX-Evil : 1\r\nContent-Length: 2\r\n\r\n{}",
    ],
)
async def test_an_upstreams_head_splits_no_response(upstream, serve, judge, head):
    """Refused as a whole, or framed by us so that its client reads one response and no byte of another."""

    async def odd(_seen, wire):
        await wire.send(head)
        wire.fin()

    upstream.script(odd)
    async with serve() as url, Client(url) as client:
        await client.start("POST", "/v1/chat/completions", body_of(CHAT))
        answer = await client.head()
        try:
            await client.rest(answer)
        except Truncated:
            return  # an abort is no second response
        assert not any("\r" in value or "\n" in value or "\0" in value for _, value in answer.raw_headers)
        assert answer.status == 502 or answer.body == b"{}"
        if (answer.header("Connection") or "") != "close":
            again = await client.post(CHAT)
            assert (again.status, again.json()) == (200, completion())
        else:
            assert await client.reader.read() == b""


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "https://evil.example", "Content_Type": "text/plain"}, 403),
        ({"Origin": "null", "Content_Type": "text/plain"}, 403),
        ({"Origin": "http://localhost.evil.example"}, 403),
        ({"Origin": "http://127.0.0.1:1@evil.example"}, 403),
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example:8088"}, 403),
        ({"Host": "localhost@evil.example"}, 403),
        ({"Host": "[::1].evil.example"}, 403),
        ({"Host": "127.0.0.1:8088"}, 200),
    ],
)
async def test_s19_a_web_page_reaches_no_model(upstream, serve, judge, headers, status):
    """A form's or fetch's "simple" request needs no preflight, so that the answer alone decides."""
    async with serve() as url:
        answer = await post(url, CHAT, **headers)
    assert answer.status == status
    assert len(upstream.requests) == (status == 200)
    assert answer.header("Access-Control-Allow-Origin") is None


async def test_a_preflight_of_a_foreign_page_gets_no_permission(upstream, serve, judge):
    async with serve() as url, Client(url) as client:
        answer = await client.request(
            "OPTIONS", "/v1/chat/completions", Origin="https://evil.example", Access_Control_Request_Method="POST"
        )
    assert answer.status == 403
    assert not any(name.startswith("access-control") for name in names(answer))
    assert upstream.requests == []


async def test_two_framings_of_one_request_are_refused(upstream, serve, judge):
    """Content-Length beside Transfer-Encoding: the classic way to hide a second request in a first."""
    async with serve() as url, Client(url) as client:
        await client.send(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /v1/evil HTTP/1.1\r\nHost: localhost\r\n\r\n"
        )
        answer = await client.head()
    assert answer.status == 400
    assert not any(b"evil" in seen.target for seen in upstream.requests)


async def test_o10_our_reason_headers_are_from_closed_sets(upstream, serve, judge):
    async with serve() as url:
        answer = await post(url, {**CHAT, "model": EVIL}, x_whetherman_mode="shadow;x-evil")
    assert said(answer) == ("ACT", "no", "bypass:unknown_mode")
