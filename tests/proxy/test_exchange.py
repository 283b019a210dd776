"""Gated chat requests over the wire: what goes upstream, what comes back, and what the headers say."""

from __future__ import annotations

import asyncio
import hashlib

import pytest

from tests.fakes.chats import CHAT, HEADERS, ODD, SEARCH, body_of, looping, metric, said
from tests.fakes.client import Client, Truncated, post
from tests.fakes.judge import verdict
from tests.fakes.upstream import (
    TIME_FACTOR,
    Seen,
    Wire,
    completion,
    delta,
    hang,
    reply,
    stream,
    text_stream,
    tool_call,
)
from whetherman_edge import composition
from whetherman_edge.service.logs import LineFormatter

# --- ACT and every bypass: the client's own bytes -------------------------------------------------------------------


async def test_act_is_byte_identical_and_says_so(upstream, serve, judge):
    async with serve() as url:
        answer = await post(url, ODD)
    assert upstream.last.sha256 == hashlib.sha256(ODD).hexdigest()
    assert said(answer) == ("ACT", "no", "need")
    assert all(answer.header(f"x-whetherman-{name}") for name in HEADERS)
    assert 0.0 <= float(answer.header("x-whetherman-confidence") or 9) <= 1.0
    assert answer.json() == completion()


BYPASSES = {
    "bypass:no_tools": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    "bypass:only_other_tools": {**CHAT, "tools": [{"type": "web_search"}]},
    "bypass:tool_choice_none": {**CHAT, "tool_choice": "none"},
    "bypass:forced_tool": {**CHAT, "tool_choice": "required"},
    "bypass:assistant_last": {**CHAT, "messages": [*CHAT["messages"], {"role": "assistant", "content": "It"}]},
    "view_error": {"model": "m", "messages": "hi", "tools": [SEARCH]},
}


@pytest.mark.parametrize("reason", BYPASSES)
async def test_every_bypass_is_byte_identical_with_its_own_reason(upstream, serve, judge, reason):
    judge.verdict = verdict("ANSWER")
    sent = body_of(BYPASSES[reason])
    async with serve(mode="enforce", force="ANSWER") as url:
        answer = await post(url, sent)
    assert upstream.last.body == sent
    assert said(answer) == ("ACT", "no", reason)
    assert judge.views == []


async def test_r02_required_and_named_tool_choice_pass_untouched(upstream, serve, judge):
    async with serve(force="ANSWER", intervention="strip") as url:
        for choice in ("required", {"type": "function", "function": {"name": "search"}}):
            sent = body_of({**CHAT, "tool_choice": choice, "parallel_tool_calls": False})
            answer = await post(url, sent)
            assert upstream.last.body == sent
            assert said(answer) == ("ACT", "no", "bypass:forced_tool")


async def test_r04_the_clients_own_empty_tools_pass_as_sent(upstream, serve, judge):
    sent = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"tools":[]}'
    async with serve(force="ANSWER") as url:
        answer = await post(url, sent)
    assert upstream.last.body == sent
    assert said(answer) == ("ACT", "no", "bypass:no_tools")


async def test_r09_nulls_make_no_error_of_ours(upstream, serve, judge):
    sent = (
        b'{"model":"m","tools":null,"tool_choice":null,"messages":[{"role":"user","content":"hi"},'
        b'{"role":"assistant","content":"hi","tool_calls":null},{"role":"assistant","content":""},'
        b'{"role":"user","content":"hi"}]}'
    )
    async with serve() as url:
        assert (await post(url, sent)).status == 200
    assert upstream.last.body == sent


@pytest.mark.parametrize("content", ['"content":null,', '"content":"",', ""])
async def test_r08_content_of_tool_turns_is_relayed_as_sent(upstream, serve, judge, content):
    sent = (
        b'{"model":"m","messages":[{"role":"user","content":"go"},{"role":"assistant",%s"tool_calls":[{"id":"c1","type":'
        b'"function","function":{"name":"search","arguments":"{}"}}]},{"role":"tool","tool_call_id":"c1","content":"x"}],'
        b'"tools":[{"type":"function","function":{"name":"search"}}]}'
    ) % content.encode()
    async with serve() as url:
        answer = await post(url, sent)
    assert said(answer)[0] == "ACT"
    assert upstream.last.body == sent
    assert judge.views[0].messages[1].calls[0].name == "search"
    assert judge.views[0].messages[2].tool_name == "search"


async def test_r12_developer_is_read_as_system_and_relayed_unchanged(upstream, serve, judge):
    sent = body_of({**CHAT, "messages": [{"role": "developer", "content": "never browse"}, *CHAT["messages"]]})
    async with serve() as url:
        await post(url, sent)
    assert upstream.last.body == sent
    assert judge.views[0].messages[0].role == "system"


async def test_r14_reasoning_survives_both_ways_and_is_not_fed_to_the_gate(upstream, serve, judge):
    call = {"role": "assistant", "content": "", "reasoning_content": "SECRETTHOUGHT", "tool_calls": [tool_call()]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "x"}
    sent = body_of({**CHAT, "messages": [*CHAT["messages"], call, result], "stream": True})
    events = [delta(role="assistant", reasoning_content="hm"), *text_stream("ok")]
    upstream.script(stream(events))
    async with serve() as url:
        answer = await post(url, sent)
    assert answer.body == b"".join(events)
    assert upstream.last.body == sent
    assert "SECRETTHOUGHT" not in repr(judge.views[0])


async def test_r18_an_image_is_a_marker_and_never_logged(upstream, serve, judge, caplog):
    caplog.set_level("DEBUG", logger="whetherman_edge")
    data = "QUJD" * 500_000
    parts = [{"type": "text", "text": "what is this?"}, {"type": "image_url", "image_url": {"url": f"data:;{data}"}}]
    sent = body_of({**CHAT, "messages": [{"role": "user", "content": parts}]})
    async with serve() as url:
        answer = await post(url, sent)
    assert answer.status == 200
    assert upstream.last.body == sent
    assert judge.views[0].messages[0].n_media == 1
    assert "QUJDQUJD" not in repr(judge.views[0]) + caplog.text


async def test_r19_legacy_functions_are_gated_and_a_forced_one_passes(upstream, serve, judge):
    legacy = {"model": "m", "messages": CHAT["messages"], "functions": [SEARCH["function"]], "function_call": "auto"}
    answer_value = completion(None)
    answer_value["choices"][0] |= {"finish_reason": "function_call"}
    answer_value["choices"][0]["message"]["function_call"] = {"name": "search", "arguments": "{}"}
    upstream.default = reply(answer_value)
    async with serve() as url:
        gated = await post(url, legacy)
        forced = await post(url, {**legacy, "function_call": {"name": "search"}})
    assert said(gated) == ("ACT", "no", "need")
    assert said(forced) == ("ACT", "no", "bypass:forced_tool")
    assert gated.json() == answer_value


async def test_c03_requests_without_tools_skip_the_gate(upstream, serve, judge):
    async with serve() as url:
        answer = await post(url, {"model": "m", "messages": [{"role": "user", "content": "Write a title"}]})
    assert said(answer) == ("ACT", "no", "bypass:no_tools")
    assert judge.views == []


# --- modes ----------------------------------------------------------------------------------------------------------


async def test_o13_shadow_decides_reports_and_changes_nothing(upstream, serve, judge):
    sent = body_of(CHAT)
    judge.verdict = verdict("ANSWER", 0.99)
    async with serve(mode="shadow", force="ANSWER") as url:
        answer = await post(url, sent)
        assert await metric(url, "outcomes_total") == 1
    assert said(answer) == ("ANSWER", "no", "forced")
    assert upstream.last.body == sent


async def test_o14_off_by_header_and_by_configuration(upstream, serve, judge):
    async with serve(force="ANSWER") as url:
        answer = await post(url, CHAT, x_whetherman_mode="off")
    assert said(answer) == ("ACT", "no", "bypass:off")
    async with serve(mode="off", force="ANSWER") as url:
        answer = await post(url, CHAT, x_whetherman_mode="enforce")
    assert said(answer) == ("ACT", "no", "bypass:off")
    assert all(seen.body == body_of(CHAT) for seen in upstream.requests)
    assert not any(name.startswith("x-whetherman") for seen in upstream.requests for name in seen.names())


async def test_o14_never_gate_models_by_glob(upstream, serve, judge):
    async with serve(force="ANSWER", never_gate_models=("gpt-*",)) as url:
        assert said(await post(url, {**CHAT, "model": "gpt-5"})) == ("ACT", "no", "bypass:model")
        assert said(await post(url, {**CHAT, "model": "qwen"}))[0] == "ANSWER"


async def test_a_request_cannot_enforce_what_no_profile_allows(upstream, serve, judge):
    judge.verdict = verdict("ANSWER", 0.99)
    async with serve() as url:
        answer = await post(url, CHAT, x_whetherman_mode="enforce")
    assert answer.header("x-whetherman-applied") == "no"
    assert upstream.last.body == body_of(CHAT)


async def test_an_unknown_profile_by_header_passes_with_its_reason(upstream, serve, judge):
    async with serve() as url:
        answer = await post(url, CHAT, x_whetherman_profile="no-such")
    assert said(answer) == ("ACT", "no", "profile_unknown")
    assert upstream.last.body == body_of(CHAT)


# --- the gate fails open (O01, O02) ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "reason"),
    [("hang", "gate_timeout"), ("raise", "gate_error"), ("invalid", "gate_error"), ("missing", "model_missing")],
)
async def test_o01_o02_a_gate_that_fails_passes_the_bytes_with_its_own_reason(
    upstream, serve, judge, mode, reason, caplog, monkeypatch
):
    caplog.set_level("DEBUG", logger="whetherman_edge")
    monkeypatch.setattr(composition, "FAILURES_MAX", 2)
    judge.mode = mode
    async with serve(gate_deadline_ms=100) as url:
        answers = [await post(url, CHAT) for _ in range(3)]
        assert await metric(url, "gate_failures_total") == 2
    assert [said(answer) for answer in answers] == [("ACT", "no", reason)] * 2 + [("ACT", "no", "breaker_open")]
    assert all(seen.body == body_of(CHAT) for seen in upstream.requests)
    assert answers[0].header("x-whetherman-engine") == "none"
    assert not any("PROMPTTEXT" in LineFormatter().format(record) for record in caplog.records)


async def test_o01_the_loop_guard_needs_no_gate(upstream, serve, judge):
    judge.mode = "raise"
    async with serve(mode="enforce") as url:
        assert said(await post(url, looping(3))) == ("ANSWER", "yes", "loop_guard")


async def test_s05_client_gone_while_the_gate_runs(upstream, serve, judge, caplog):
    caplog.set_level("INFO", logger="whetherman_edge")
    judge.mode = "hang"
    async with serve(gate_deadline_ms=3000, mode="enforce") as url, Client(url) as client:
        await client.start("POST", "/v1/chat/completions", body_of(CHAT))
        await judge.entered.wait()
        client.abort()
        async with asyncio.timeout(0.5 * TIME_FACTOR):
            await judge.cancelled.wait()
        await asyncio.sleep(0)
        assert "event=client_closed" in caplog.text
    assert upstream.requests == []


async def test_in_shadow_the_model_does_not_wait_for_the_gate(upstream, serve, judge):
    judge.mode = "held"
    async with serve(gate_deadline_ms=3000) as url, Client(url) as client:
        arrived = asyncio.ensure_future(upstream.next_request())
        await client.start("POST", "/v1/chat/completions", body_of(CHAT))
        seen = await arrived
        assert not judge.released.is_set()
        judge.verdict = verdict("DECLINE", 0.99)
        judge.released.set()
        answer = await client.rest(await client.head())
    assert seen.body == body_of(CHAT)
    assert said(answer) == ("ACT", "no", "low_confidence")
    assert answer.header("x-whetherman-confidence") == "0.0033"


@pytest.mark.parametrize("reason", ["gate_timeout", "gate_error"])
async def test_in_shadow_a_gate_that_fails_beside_the_model_says_why(upstream, serve, judge, reason):
    judge.mode = {"gate_timeout": "hang", "gate_error": "raise"}[reason]
    async with serve(gate_deadline_ms=50) as url:
        answer = await post(url, CHAT)
    assert said(answer) == ("ACT", "no", reason)
    assert [seen.body for seen in upstream.requests] == [body_of(CHAT)]


async def test_s05_client_gone_in_shadow_ends_both(upstream, serve, judge):
    judge.mode = "hang"
    upstream.default = hang
    async with serve(gate_deadline_ms=3000) as url, Client(url) as client:
        arrived = asyncio.ensure_future(upstream.next_request())
        await client.start("POST", "/v1/chat/completions", body_of(CHAT))
        seen = await arrived
        client.abort()
        async with asyncio.timeout(0.5 * TIME_FACTOR):
            await seen.closed.wait()
            await judge.cancelled.wait()


async def test_in_shadow_a_dead_upstream_is_reported_with_the_decision(upstream, serve, judge):
    await upstream.stop()
    async with serve() as url:
        answer = await post(url, CHAT)
    assert answer.status == 502
    assert said(answer) == ("ACT", "no", "need")


async def test_s05_client_gone_while_a_reply_is_held(upstream, serve, judge):
    upstream.default = hang
    async with serve(force="ANSWER", intervention="strip") as url, Client(url) as client:
        arrived = asyncio.ensure_future(upstream.next_request())
        await client.start("POST", "/v1/chat/completions", body_of(CHAT))
        seen = await arrived
        client.abort()
        async with asyncio.timeout(0.5 * TIME_FACTOR):
            await seen.closed.wait()


async def test_o15_no_verdict_is_taken_from_another_request(upstream, serve, judge):
    other = {"type": "function", "function": {"name": "other", "description": "Other."}}
    system = {"role": "system", "content": "s"}
    chats = [
        CHAT,
        {**CHAT, "tools": [other]},
        {**CHAT, "messages": [system, *CHAT["messages"]]},
        {**CHAT, "model": "n"},
    ]
    async with serve() as url:
        for chat in chats:
            await post(url, chat)
    assert len(judge.views) == 4
    assert len({(v.model, v.toolset_key, v.messages) for v in judge.views}) == 4


# --- sizes ----------------------------------------------------------------------------------------------------------


async def send_chunked(client: Client, size: int) -> bytes:
    part = b"x" * 65_536
    await client.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(size // len(part)):
        await client.send(b"%x\r\n%b\r\n" % (len(part), part))
    await client.send(b"0\r\n\r\n")
    return part * (size // len(part))


async def test_s09_chunked_12_mb_passes_ungated(upstream, serve, judge):
    async with serve() as url, Client(url) as client:
        sent = await send_chunked(client, 12 << 20)
        answer = await client.rest(await client.head())
    assert answer.status == 200
    assert said(answer) == ("ACT", "no", "bypass:oversize")
    assert upstream.last.body == sent


async def test_s09_chunked_over_the_cap_is_a_clean_413(upstream, serve, judge):
    async with serve(body_bytes_max=34 << 20) as url, Client(url) as client:
        await send_chunked(client, 80 << 20)
        answer = await client.rest(await client.head())
    assert answer.status == 413
    error = answer.json()["error"]
    assert error["code"] == "request_too_large"
    assert "body_bytes_max" in error["message"]
    assert said(answer) == ("ACT", "no", "bypass:oversize")


async def test_s09_a_declared_length_over_the_cap_is_refused_before_the_body(upstream, serve, judge):
    async with serve(body_bytes_max=1 << 20) as url, Client(url) as client:
        await client.send(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
            b"Content-Length: 999999999\r\n\r\n"
        )
        answer = await client.rest(await client.head())
    assert answer.status == 413
    assert upstream.requests == []


# --- errors of the upstream keep our headers ------------------------------------------------------------------------


async def test_headers_stand_on_upstream_errors_and_on_502(upstream, serve, judge):
    upstream.script(reply({"error": "x"}, status="500 Internal Server Error"))
    async with serve() as url:
        assert said(await post(url, CHAT)) == ("ACT", "no", "need")
        await upstream.stop()
        answer = await post(url, CHAT)
    assert answer.status == 502
    assert said(answer) == ("ACT", "no", "need")


async def test_s11_reset_is_logged_and_counted(upstream, serve, judge, caplog):
    caplog.set_level("INFO", logger="whetherman_edge")

    async def broken(_seen: Seen, wire: Wire) -> None:
        await wire.head(Content_Type="text/event-stream", Transfer_Encoding="chunked")
        await wire.chunk(delta(content="a"))
        await asyncio.sleep(0.02)
        wire.reset()

    upstream.script(broken)
    async with serve() as url:
        with pytest.raises(Truncated):
            await post(url, {**CHAT, "stream": True})
        assert await metric(url, "upstream_failures_total") == 1
    assert "fault=upstream_reset" in caplog.text


async def test_s03_calls_are_counted_without_finish_reason(upstream, serve, judge, caplog):
    caplog.set_level("INFO", logger="whetherman_edge")
    call = {"index": 0, "function": {"name": "search", "arguments": {"query": "a"}}}
    events = [delta(tool_calls=[{**call, "id": "a"}]), delta(tool_calls=[{**call, "id": "b"}]), b"data: [DONE]\n\n"]
    upstream.script(stream(events))
    async with serve() as url:
        await post(url, {**CHAT, "stream": True})
    assert " calls=2 " in caplog.text
