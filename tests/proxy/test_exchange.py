"""Gated chat requests over the wire: what goes upstream, what comes back, and what the headers say."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json

import pytest

from tests.fakes.client import Client, Truncated, once, post
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
from whetherman_edge.service.logs import LineFormatter

SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the web.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "What is a lease?"}], "tools": [SEARCH]}
HEADERS = ("decision", "applied", "reason", "confidence", "engine", "ms")


def said(answer) -> tuple[str | None, str | None, str | None]:
    return tuple(answer.header(f"x-whetherman-{name}") for name in ("decision", "applied", "reason"))  # type: ignore[return-value]


def body_of(value: object) -> bytes:
    return json.dumps(value).encode()


async def metric(url: str, name: str) -> float:
    text = (await once(url, "GET", "/metrics")).body.decode()
    lines = [line for line in text.splitlines() if line.startswith((f"whetherman_{name} ", f"whetherman_{name}{{"))]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


# --- ACT and every bypass: the client's own bytes -------------------------------------------------------------------

ODD = (
    b'{ "model":"m",\t"messages" : [{"role":"user","content":"h\\u00e9\\ud83d\\ude00"} ],\r\n "unknown":{"z":1e400,'
    b'"a":[1.0,10000000000000000000001]},"tools":[ {"type":"function","function":{"name":"search"}} ] }'
)


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


# --- interventions --------------------------------------------------------------------------------------------------


async def test_r02_strip_removes_all_that_belongs_to_tools(upstream, serve, judge):
    async with serve(force="ANSWER", intervention="strip") as url:
        answer = await post(url, {**CHAT, "tool_choice": "auto", "parallel_tool_calls": False, "seed": 7})
    assert upstream.last.json().keys() == {"model", "messages", "seed"}
    assert said(answer) == ("ANSWER", "yes", "forced")


@pytest.mark.parametrize("kind", ["openai", "anthropic"])
async def test_r03_none_drops_the_parallel_flag(upstream, serve, judge, kind):
    async with serve(force="ANSWER", upstream_kind=kind, intervention="none") as url:
        await post(url, {**CHAT, "parallel_tool_calls": True})
    sent = upstream.last.json()
    assert sent["tool_choice"] == "none"
    assert "parallel_tool_calls" not in sent
    assert sent["tools"] == [SEARCH]


async def test_r05_ollama_never_relies_on_none(upstream, serve, judge):
    async with serve(force="ANSWER", upstream_kind="ollama", intervention="none") as url:
        await post(url, CHAT)
        assert upstream.last.json().get("tool_choice") is None
        answer = await post(url, {**CHAT, "tool_choice": "none"}, x_whetherman_mode="enforce")
    assert "tools" not in upstream.last.json()
    assert said(answer) == ("ACT", "yes", "bypass:tool_choice_none")


@pytest.mark.parametrize("kind", ["openai", "anthropic", "ollama", "llamacpp", "vllm", "lmstudio", "unknown"])
async def test_r17_each_kind_is_withheld_in_its_way(upstream, serve, judge, kind):
    history = [
        {"role": "user", "content": "Another dialogue: what is a deed?"},
        {"role": "assistant", "content": None, "tool_calls": [tool_call()]},
        {"role": "tool", "tool_call_id": "call_1", "content": "nothing"},
    ]
    async with serve(force="ANSWER", upstream_kind=kind) as url:
        await post(url, CHAT)
        await post(url, {**CHAT, "messages": history})
    first, later = (seen.json() for seen in upstream.requests)
    ways = {
        (sent.get("tool_choice"), "tools" in sent, sent["messages"] != messages)
        for sent, messages in ((first, CHAT["messages"]), (later, history))
    }
    expected = {
        "openai": {("none", True, False)},
        "anthropic": {("none", True, False)},
        "ollama": {(None, False, True), (None, True, True)},
        "llamacpp": {(None, False, True), (None, True, True)},
        "lmstudio": {(None, False, True), (None, True, True)},
        "vllm": {("none", True, True)},
        "unknown": {(None, True, True)},
    }[kind]
    assert ways == expected
    assert later["messages"][1] == history[1]


async def test_note_is_a_splice_and_the_rest_keeps_its_bytes(upstream, serve, judge):
    async with serve(force="ANSWER", intervention="note") as url:
        answer = await post(url, ODD)
    head, tail = ODD.split(b'"} ]', 1)
    assert upstream.last.body.startswith(head)
    assert upstream.last.body.endswith(b'"} ]' + tail)
    assert said(answer) == ("ANSWER", "yes", "forced")


async def test_s07_an_edited_gzip_request_goes_out_plain(upstream, serve, judge):
    async with serve(force="ANSWER", intervention="strip") as url:
        answer = await post(url, gzip.compress(body_of(CHAT)), Content_Encoding="gzip")
    assert said(answer) == ("ANSWER", "yes", "forced")
    assert upstream.last.header("content-encoding") is None
    assert "tools" not in upstream.last.json()


async def test_s07_unknown_and_broken_encodings_are_relayed_ungated(upstream, serve, judge):
    async with serve(force="ANSWER") as url:
        for encoding, body in (
            ("br", b"\x0b\x02\x80hi\x03"),
            ("gzip", b"not gzip"),
            ("gzip", gzip.compress(b"\0" * (9 << 20))),
        ):
            answer = await post(url, body, Content_Encoding=encoding)
            assert said(answer) == ("ACT", "no", "bypass:encoding")
            assert upstream.last.body == body


async def test_prune_keeps_original_objects_in_order_and_pinned_ones(upstream, serve, judge):
    tools = [{"type": "function", "function": {"name": f"t{n}", "strict": True}} for n in range(9)]
    tools += [{"type": "function", "function": {"name": "memory_read"}}, {"type": "web_search"}]
    judge.probabilities = {"t7": 0.6, "t1": 0.3}
    async with serve(mode="enforce", intervention="prune", always_keep=("memory_*",)) as url:
        answer = await post(url, {**CHAT, "tools": tools})
    kept = upstream.last.json()["tools"]
    assert answer.header("x-whetherman-decision") == "ACT"
    assert [tool for tool in tools if tool in kept] == kept
    names = [tool.get("function", tool).get("name") for tool in kept]
    assert {"t7", "t1", "memory_read", None} <= set(names)
    assert len(kept) < len(tools)


# --- withholding that does not work (R06, R13) ----------------------------------------------------------------------

MARKUP = '<tool_call>\n{"name": "search", "arguments": {"query": "lease"}}\n</tool_call>'
BARE = '{"name": "search", "arguments": {"query": "lease"}}'


def pieces(text: str, size: int = 7) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


@pytest.mark.parametrize("way", ["strip", "none"])
@pytest.mark.parametrize("text", [MARKUP, BARE, f"```json\n{BARE}\n```"])
@pytest.mark.parametrize("streaming", [False, True])
async def test_r06_a_leaked_call_is_never_shown_and_sent_once_more_unmodified(
    upstream, serve, judge, way, text, streaming
):
    sent = body_of({**CHAT, "stream": streaming})
    upstream.script(stream(text_stream(*pieces(text))) if streaming else reply(completion(text)))
    events = [delta(role="assistant", tool_calls=[tool_call(index=0)]), delta(finish="tool_calls"), b"data: [DONE]\n\n"]
    upstream.script(stream(events) if streaming else reply(completion(None, tool_calls=[tool_call()])))
    async with serve(force="ANSWER", intervention=way) as url:
        answer = await post(url, sent)
        assert await metric(url, "leaked_call_total") == 1
    assert len(upstream.requests) == 2
    assert upstream.requests[0].body != sent
    assert upstream.requests[1].body == sent
    assert b"<tool_call>" not in answer.body
    if streaming:
        assert answer.body == b"".join(events)
    else:
        assert answer.json() == completion(None, tool_calls=[tool_call()])
    assert said(answer) == ("ANSWER", "no", "leaked_call")


async def test_r06_a_structured_call_despite_withholding_is_a_leak_too(upstream, serve, judge):
    upstream.script(reply(completion(None, tool_calls=[tool_call()])))
    async with serve(force="ANSWER", intervention="none") as url:
        answer = await post(url, CHAT)
    assert len(upstream.requests) == 2
    assert answer.json() == completion()


async def test_r06_an_agent_that_keeps_leaking_is_left_alone(upstream, serve, judge):
    upstream.default = reply(completion(MARKUP))
    async with serve(force="ANSWER", intervention="strip") as url:
        answers = [await post(url, CHAT) for _ in range(5)]
    assert [said(answer)[2] for answer in answers] == ["leaked_call"] * 3 + ["backed_off"] * 2
    assert len(upstream.requests) == 3 * 2 + 2


@pytest.mark.parametrize("streaming", [False, True])
async def test_an_answer_in_words_is_relayed_untouched(upstream, serve, judge, streaming):
    words = "A lease is a contract. For example, {rent} is due monthly; see `search` for more."
    events = text_stream(*pieces(words))
    upstream.script(stream(events) if streaming else reply(completion(words)))
    async with serve(force="ANSWER", intervention="strip") as url:
        answer = await post(url, {**CHAT, "stream": streaming})
    assert len(upstream.requests) == 1
    assert answer.body == (b"".join(events) if streaming else body_of(completion(words)))
    assert said(answer) == ("ANSWER", "yes", "forced")


async def test_held_events_go_out_as_soon_as_it_is_clear(upstream, serve, judge):
    go_on = asyncio.Event()
    first, rest = (
        text_stream("A lease is a contract by which one party conveys land to another for a term. ", "More."),
        b"",
    )

    async def slow(_seen: Seen, wire: Wire) -> None:
        await wire.head(Content_Type="text/event-stream", Transfer_Encoding="chunked")
        for event in first[:2]:
            await wire.chunk(event)
        await go_on.wait()
        for event in first[2:]:
            await wire.chunk(event)
        await wire.last_chunk()

    upstream.script(slow)
    async with serve(force="ANSWER", intervention="strip") as url, Client(url) as client:
        await client.start("POST", "/v1/chat/completions", body_of({**CHAT, "stream": True}))
        answer = await client.head()
        answer.body = await client.chunk()  # arrives although the upstream has not gone on
        go_on.set()
        answer = await client.rest(answer)
    assert answer.body == b"".join(first) + rest


async def test_r13_a_refused_prefill_is_sent_once_more_and_remembered(upstream, serve, judge):
    error = {"error": {"message": "Assistant response prefill is incompatible with enable_thinking."}}
    upstream.script(reply(error, status="400 Bad Request"))
    async with serve(force="ANSWER", upstream_kind="llamacpp", intervention="prefill") as url:
        first = await post(url, CHAT)
        second = await post(url, CHAT)
    refused, again, later = (seen.json() for seen in upstream.requests)
    assert refused["messages"][-1]["role"] == "assistant"
    assert again == CHAT
    assert later["messages"][-1]["role"] == "user"
    assert (first.status, second.status) == (200, 200)
    assert said(first) == ("ANSWER", "no", "refused")


async def test_r13_no_prefill_on_thinking_models_nor_unknown_upstreams(upstream, serve, judge):
    async with serve(force="ANSWER", upstream_kind="llamacpp", intervention="prefill") as url:
        await post(url, {**CHAT, "model": "deepseek-r1:7b"})
    async with serve(force="ANSWER", upstream_kind="unknown", intervention="prefill") as url:
        await post(url, CHAT)
    assert [seen.json()["messages"][-1]["role"] for seen in upstream.requests] == ["user", "user"]


async def test_an_error_that_the_original_has_too_is_the_upstreams_own(upstream, serve, judge):
    upstream.default = reply({"error": "no such model"}, status="400 Bad Request")
    async with serve(force="ANSWER", intervention="strip") as url:
        answer = await post(url, CHAT)
    assert (answer.status, answer.json()) == (400, {"error": "no such model"})
    assert len(upstream.requests) == 2


@pytest.mark.parametrize("status", ["401 Unauthorized", "429 Too Many Requests", "503 Service Unavailable"])
async def test_errors_that_are_not_about_the_edit_cost_no_second_request(upstream, serve, judge, status):
    upstream.default = reply({"error": "x"}, status=status, Retry_After="7")
    async with serve(force="ANSWER", intervention="strip") as url:
        answer = await post(url, CHAT)
    assert answer.status == int(status[:3])
    assert answer.header("Retry-After") == "7"
    assert len(upstream.requests) == 1


async def test_s11_a_reset_while_a_stream_is_held_is_a_502(upstream, serve, judge):
    async def broken(_seen: Seen, wire: Wire) -> None:
        await wire.head(Content_Type="text/event-stream", Transfer_Encoding="chunked")
        await wire.chunk(text_stream("<tool")[0])
        await asyncio.sleep(0.02)
        wire.reset()

    upstream.script(broken)
    async with serve(force="ANSWER", intervention="strip") as url:
        answer = await post(url, {**CHAT, "stream": True})
    assert answer.status == 502
    assert said(answer)[0] == "ANSWER"


async def test_s13_a_steered_stream_is_the_models_own(upstream, serve, judge):
    usage = b'data: {"id":"x","model":"qwen3:4b","choices":[],"usage":{"total_tokens":9}}\n\n'
    events = [*text_stream("I cannot switch lights.")[:-1], usage, b"data: [DONE]\n\n"]
    upstream.script(stream(events))
    chat = {**CHAT, "model": "qwen3:4b", "stream": True, "stream_options": {"include_usage": True}, "n": 1}
    async with serve(force="DECLINE", intervention="strip") as url:
        answer = await post(url, chat)
    assert answer.body == b"".join(events)
    assert upstream.last.json()["stream_options"] == {"include_usage": True}
    assert said(answer) == ("DECLINE", "yes", "forced")


# --- guards and the loop guard --------------------------------------------------------------------------------------


async def test_r15_no_ask_nor_decline_where_the_answer_must_be_json(upstream, serve, judge):
    chat = {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}}
    for label in ("ASK", "DECLINE"):
        async with serve(force=label, intervention="strip") as url:
            assert said(await post(url, chat)) == ("ACT", "no", "guard:structured_output")
        assert upstream.last.body == body_of(chat)
    async with serve(force="ANSWER", intervention="strip") as url:
        assert said(await post(url, chat)) == ("ANSWER", "yes", "forced")
    assert upstream.last.json()["messages"] == chat["messages"]


async def test_d11_ask_never_twice_in_a_row(upstream, serve, judge):
    upstream.default = reply(completion("Which order do you mean?"))
    chat = {**CHAT, "messages": [{"role": "user", "content": "Look it up"}]}
    async with serve(force="ASK", intervention="note") as url:
        first = await post(url, chat)
        turns = [*chat["messages"], {"role": "assistant", "content": "ok."}, {"role": "user", "content": "That one"}]
        second = await post(url, {**chat, "messages": turns})
    assert said(first) == ("ASK", "yes", "forced")
    assert said(second) == ("ACT", "no", "guard:ask_twice")


def looping(n: int) -> dict:
    turns: list = [{"role": "user", "content": "find the price"}]
    for number in range(n):
        call = {**tool_call(arguments='{"query": "price"}'), "id": f"c{number}"}
        turns.append({"role": "assistant", "content": None, "tool_calls": [call]})
        turns.append({"role": "tool", "tool_call_id": f"c{number}", "content": "no results"})
    return {**CHAT, "messages": turns}


async def test_d13_the_loop_guard_steers_in_enforce_without_a_profile(upstream, serve, judge):
    chat = looping(4)
    async with serve(mode="enforce", upstream_kind="llamacpp") as url:
        answer = await post(url, chat)
        assert await metric(url, "repeat_call_total") == 1
    assert said(answer) == ("ANSWER", "yes", "loop_guard")
    sent = upstream.last.json()
    assert len(sent["messages"]) == len(chat["messages"])  # pairs of calls and results stay as they are
    assert [turn.get("tool_calls") for turn in sent["messages"]] == [t.get("tool_calls") for t in chat["messages"]]


async def test_d13_the_loop_guard_is_visible_in_shadow_and_can_be_switched_off(upstream, serve, judge):
    async with serve() as url:
        assert said(await post(url, looping(4))) == ("ANSWER", "no", "loop_guard")
        assert await metric(url, "repeat_call_total") == 1
    async with serve(mode="enforce", loop_guard=False) as url:
        assert said(await post(url, looping(4))) == ("ACT", "no", "need")
    assert all(seen.body == body_of(looping(4)) for seen in upstream.requests)


# --- the gate fails open (O01, O02) ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "reason"),
    [("hang", "gate_timeout"), ("raise", "gate_error"), ("invalid", "gate_error"), ("missing", "model_missing")],
)
async def test_o01_o02_a_gate_that_fails_passes_the_bytes_with_its_own_reason(
    upstream, serve, judge, mode, reason, caplog
):
    caplog.set_level("DEBUG", logger="whetherman_edge")
    judge.mode = mode
    async with serve(gate_deadline_ms=100, breaker_failures=2) as url:
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
    async with serve(gate_deadline_ms=3000) as url, Client(url) as client:
        await client.start("POST", "/v1/chat/completions", body_of(CHAT))
        await judge.entered.wait()
        client.abort()
        async with asyncio.timeout(0.5 * TIME_FACTOR):
            await judge.cancelled.wait()
        await asyncio.sleep(0)
        assert "event=client_closed" in caplog.text
    assert upstream.requests == []


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
