"""How a decision is carried out on the wire, and what happens when the model or the upstream does not go along."""

from __future__ import annotations

import asyncio
import gzip

import pytest

from tests.fakes.chats import CHAT, ODD, SEARCH, body_of, looping, metric, said
from tests.fakes.client import Client, post
from tests.fakes.upstream import (
    Seen,
    Wire,
    completion,
    delta,
    reply,
    stream,
    text_stream,
    tool_call,
)

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


async def test_a_refused_prune_is_remembered_and_a_failed_gate_prunes_nothing(upstream, serve, judge):
    tools = [{"type": "function", "function": {"name": f"t{n}"}} for n in range(9)]
    chat = {**CHAT, "tools": tools}
    upstream.script(reply({"error": "no tool t8"}, status="400 Bad Request"))
    async with serve(mode="enforce", intervention="prune") as url:
        assert said(await post(url, chat))[1:] == ("no", "refused")
        assert said(await post(url, chat))[1] == "no"
    assert len(upstream.requests) == 3, "the second request is not pruned, refused and sent again as well"
    judge.mode = "missing"
    async with serve(mode="enforce", intervention="prune") as url:
        assert said(await post(url, chat)) == ("ACT", "no", "model_missing")
    assert upstream.last.body == body_of(chat)


@pytest.mark.parametrize("content", [None, {}, {"text": "odd"}])
async def test_r09_a_turn_without_text_is_no_view_error(upstream, serve, judge, content):
    chat = {**CHAT, "messages": [{"role": "user", "content": content}]}
    call = {"role": "assistant", "content": None, "tool_calls": [tool_call()]}
    later = {**CHAT, "messages": [*chat["messages"], call, {"role": "tool", "tool_call_id": "call_1", "content": None}]}
    async with serve(force="ANSWER", intervention="note", upstream_kind="unknown") as url:
        assert said(await post(url, chat)) == ("ANSWER", "yes", "forced")
        assert upstream.last.json() == {key: chat[key] for key in ("model", "messages")}
        assert said(await post(url, later)) == ("ANSWER", "no", "no_intervention")
        assert upstream.last.body == body_of(later)
    async with serve(force="DECLINE", intervention="strip") as url:
        assert said(await post(url, chat)) == ("DECLINE", "no", "no_intervention")
        assert upstream.last.body == body_of(chat)


# --- withholding that does not work (R06, R13) ----------------------------------------------------------------------

MARKUP = '<tool_call>\n{"name": "search", "arguments": {"query": "lease"}}\n</tool_call>'
BARE = '{"name": "search", "arguments": {"query": "lease"}}'


def pieces(text: str, size: int = 7) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


@pytest.mark.parametrize("way", ["strip", "none", "note"])
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


@pytest.mark.parametrize("kind", ["unknown", "ollama", "llamacpp", "lmstudio"])
@pytest.mark.parametrize("streaming", [False, True])
async def test_r06_markup_behind_a_note_is_never_the_answer(upstream, serve, judge, kind, streaming):
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello."}, *CHAT["messages"]]
    chat = {**CHAT, "messages": turns, "stream": streaming}
    upstream.script(stream(text_stream(*pieces(MARKUP))) if streaming else reply(completion(MARKUP)))
    upstream.script(stream(text_stream("A contract.")) if streaming else reply(completion("A contract.")))
    async with serve(force="ANSWER", upstream_kind=kind) as url:
        answer = await post(url, chat)
        assert await metric(url, "leaked_call_total") == 1
    noted, again = (seen.json() for seen in upstream.requests)
    assert noted["tools"] == chat["tools"]
    assert noted["messages"] != turns
    assert again == chat
    assert b"tool_call>" not in answer.body
    assert b"A contract." in answer.body
    assert said(answer) == ("ANSWER", "no", "leaked_call")


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_structured_call_in_spite_of_a_note_is_the_clients_to_take(upstream, serve, judge, streaming):
    call = tool_call(index=0)
    events = [delta(role="assistant", content=""), delta(tool_calls=[call]), delta(finish="tool_calls")]
    value = completion(BARE, tool_calls=[tool_call()])
    upstream.script(stream(events) if streaming else reply(value))
    async with serve(force="ANSWER", intervention="note") as url:
        answer = await post(url, {**CHAT, "stream": streaming})
        assert await metric(url, "leaked_call_total") == 0
    assert len(upstream.requests) == 1
    assert answer.body == (b"".join(events) if streaming else body_of(value))
    assert said(answer) == ("ANSWER", "yes", "forced")


@pytest.mark.parametrize("coding", ["identity", "gzip"])
@pytest.mark.parametrize("streaming", [False, True])
async def test_r06_a_content_coding_nobody_asked_for_hides_no_call(upstream, serve, judge, coding, streaming):
    def coded(text: str):
        plain = b"".join(text_stream(*pieces(text))) if streaming else body_of(completion(text))
        kind = "text/event-stream" if streaming else "application/json"
        return reply(plain, content_type=kind, encoding=coding, chunked=True)

    upstream.script(coded(MARKUP), coded("A deed."), coded("Land."))
    async with serve(force="ANSWER", intervention="strip") as url:
        leaked = await post(url, {**CHAT, "stream": streaming}, Accept_Encoding="gzip")
        clear = await post(url, {**CHAT, "stream": streaming}, Accept_Encoding="gzip")
    asked = [seen.header("accept-encoding") for seen in upstream.requests]
    assert asked == [None, b"gzip", None]
    assert said(leaked) == ("ANSWER", "no", "leaked_call")
    assert said(clear) == ("ANSWER", "yes", "forced")
    for answer, word in ((leaked, b"A deed."), (clear, b"Land.")):
        assert answer.header("content-encoding") == coding
        assert word in (gzip.decompress(answer.body) if coding == "gzip" else answer.body)


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_held_reply_that_cannot_be_unpacked_is_passed_on(upstream, serve, judge, streaming):
    kind = "text/event-stream" if streaming else "application/json"
    bodies = (b"no gzip", gzip.compress(b"data: 1\n\n" * (1 << 18)))
    upstream.script(*(reply(body, content_type=kind, Content_Encoding="gzip") for body in bodies))
    upstream.script(reply(b"?", content_type=kind, Content_Encoding="br"))
    async with serve(force="ANSWER", intervention="strip") as url:
        answers = [await post(url, {**CHAT, "stream": streaming}) for _ in range(3)]
    assert [answer.body for answer in answers] == [*bodies, b"?"]
    assert len(upstream.requests) == 3


async def test_r06_an_agent_that_keeps_leaking_is_left_alone(upstream, serve, judge):
    upstream.default = reply(completion(MARKUP))
    async with serve(force="ANSWER", intervention="strip") as url:
        answers = [await post(url, CHAT) for _ in range(5)]
    assert [said(answer)[2] for answer in answers] == ["leaked_call"] * 3 + ["backed_off"] * 2
    assert len(upstream.requests) == 3 * 2 + 2


@pytest.mark.parametrize("way", ["strip", "note"])
@pytest.mark.parametrize("streaming", [False, True])
async def test_an_answer_in_words_is_relayed_untouched(upstream, serve, judge, way, streaming):
    words = "A lease is a contract. For example, {rent} is due monthly; see `search` for more."
    events = text_stream(*pieces(words))
    upstream.script(stream(events) if streaming else reply(completion(words)))
    async with serve(force="ANSWER", intervention=way) as url:
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
