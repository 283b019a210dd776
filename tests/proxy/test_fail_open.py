"""What breaks on our side of a request, or only because of our edit, costs the client nothing."""

from __future__ import annotations

import pytest

from tests.fakes.chats import CHAT, body_of, said
from tests.fakes.client import Client, post
from tests.fakes.upstream import Seen, Wire, completion, delta, hang, reply, stream, tool_call
from whetherman_edge.dialects.openai_reply import ReplyReader
from whetherman_edge.errors import ConfigError
from whetherman_edge.proxy.upstream import Target


async def reset(_seen: Seen, wire: Wire) -> None:
    wire.reset()


async def test_silence_on_a_reused_connection_is_no_reason_to_send_again(upstream, serve, judge):
    async with serve(idle_timeout_s=0.1) as url, Client(url) as client:
        await client.start("POST", "/v1/chat/completions", body_of(CHAT))
        assert (await client.rest(await client.head())).status == 200
        upstream.default = hang
        await client.start("POST", "/v1/chat/completions", body_of(CHAT))
        assert (await client.rest(await client.head())).status == 502
    assert len({seen.connection for seen in upstream.requests}) == 1
    assert len(upstream.requests) == 2


async def test_an_edit_that_breaks_the_upstream_is_taken_back(upstream, serve, judge):
    upstream.script(reset)
    async with serve(force="ANSWER") as url:
        answer = await post(url, CHAT)
    assert answer.status == 200
    assert said(answer) == ("ANSWER", "no", "refused")
    assert [seen.body == body_of(CHAT) for seen in upstream.requests] == [False, True]


async def test_an_edited_request_that_is_not_answered_in_time_is_not_sent_again(upstream, serve, judge):
    upstream.default = hang
    async with serve(force="ANSWER", idle_timeout_s=0.1) as url:
        assert (await post(url, CHAT)).status == 502
    assert len(upstream.requests) == 1


@pytest.mark.parametrize("keys", [{}, {"force": "ANSWER"}], ids=["as it came", "steered"])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_reply_that_cannot_be_looked_at_is_passed_on(upstream, serve, judge, monkeypatch, keys, streamed):
    def broken(_self: ReplyReader, _data: bytes) -> None:
        raise KeyError("a fault of ours")

    monkeypatch.setattr(ReplyReader, "read", broken)
    events = [delta(tool_calls=[tool_call()]), delta(finish="tool_calls"), b"data: [DONE]\n\n"]
    upstream.default = stream(events) if streamed else reply(completion(None, tool_calls=[tool_call()]))
    async with serve(**keys) as url:
        answer = await post(url, {**CHAT, "stream": streamed})
    assert answer.status == 200
    assert answer.body == b"".join(events) if streamed else answer.json()["choices"]


def test_a_host_that_is_no_name_is_a_usage_error():
    for host in ("a..b", "x" * 64 + ".example", "ü" * 80):
        with pytest.raises(ConfigError, match="no name"):
            Target.parse(f"http://{host}:8080")
