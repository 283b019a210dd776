"""The official clients of Ollama, Responses and Messages against the daemon, in front of recorded reply shapes.

A forced verdict stands for the gate; each dialogue is checked at both ends: what reached the upstream, byte for byte,
and what the client made of the reply.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anthropic
import ollama
import openai
import pytest

from tests.fakes.chats import metric, said
from tests.fakes.client import Client, once, post
from tests.fakes.upstream import PATIENCE_S, Script, Seen, Wire, reply, stream

SCHEMA = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
NESTED = {"type": "function", "function": {"name": "search", "description": "Search.", "parameters": SCHEMA}}
FLAT = {"type": "function", "name": "search", "description": "Search.", "parameters": SCHEMA, "strict": True}
BLOCK = {"name": "search", "description": "Search.", "input_schema": SCHEMA}
HI = [{"role": "user", "content": "What is a lease?"}]
ARGUMENTS = {"query": "lease"}
MARKUP = '<tool_call>\n{"name": "search", "arguments": {"query": "lease"}}\n</tool_call>'


# --- recorded shapes ------------------------------------------------------------------------------------------------


def line(content: str = "", *, done: bool = False, **message) -> bytes:
    """One line of Ollama's stream."""
    value = {
        "model": "qwen3:4b",
        "created_at": "2026-01-01T00:00:00.000000001Z",
        "message": {"role": "assistant", "content": content, **message},
        "done": done,
    }
    if done:
        value |= {"done_reason": "stop", "total_duration": 5, "prompt_eval_count": 12, "eval_count": 3}
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def native_call(name: str = "search", index: int = 0) -> dict:
    return {"id": f"call_{name}", "function": {"index": index, "name": name, "arguments": ARGUMENTS}}


def lines(*parts: bytes, **headers: str) -> Script:
    """Ollama's stream, one chunk a line."""

    async def run(_seen: Seen, wire: Wire) -> None:
        await wire.head(Content_Type="application/x-ndjson", Transfer_Encoding="chunked", **headers)
        for part in parts:
            await wire.chunk(part)
        await wire.last_chunk()

    return run


def event(kind: str, **fields) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


def response_object(*output: dict) -> dict:
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "status": "completed",
        "error": None,
        "model": "m",
        "output": list(output),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [FLAT],
    }


def output_text(text: str) -> dict:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [part]}


FUNCTION_CALL = {
    "id": "fc_1",
    "type": "function_call",
    "status": "completed",
    "call_id": "call_1",
    "name": "search",
    "arguments": '{"query": "lease"}',
}


def response_events(*items: dict) -> list[bytes]:
    empty = {**response_object(), "status": "in_progress"}
    events = [event("response.created", response=empty, sequence_number=0)]
    for index, item in enumerate(items):
        events.append(event("response.output_item.added", output_index=index, item=item, sequence_number=1))
        for part in item.get("content", ()):
            for at in range(0, len(part["text"]), 5):
                fields = {"item_id": "msg_1", "output_index": index, "content_index": 0, "logprobs": []}
                text = part["text"][at : at + 5]
                events.append(event("response.output_text.delta", delta=text, sequence_number=2, **fields))
        events.append(event("response.output_item.done", output_index=index, item=item, sequence_number=3))
    return [*events, event("response.completed", response=response_object(*items), sequence_number=4)]


def message(*content: dict) -> dict:
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": list(content),
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 9, "output_tokens": 3},
    }


def text_block(text: str) -> dict:
    return {"type": "text", "text": text}


TOOL_USE = {"type": "tool_use", "id": "toolu_1", "name": "search", "input": ARGUMENTS}


def message_events(*blocks: dict) -> list[bytes]:
    events = [event("message_start", message={**message(), "stop_reason": None}), event("ping")]
    for index, block in enumerate(blocks):
        if block["type"] == "text":
            events.append(event("content_block_start", index=index, content_block=text_block("")))
            for at in range(0, len(block["text"]), 5):
                delta = {"type": "text_delta", "text": block["text"][at : at + 5]}
                events.append(event("content_block_delta", index=index, delta=delta))
        else:
            events.append(event("content_block_start", index=index, content_block={**block, "input": {}}))
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            events.append(event("content_block_delta", index=index, delta=delta))
        events.append(event("content_block_stop", index=index))
    usage = {"output_tokens": 3}
    events.append(event("message_delta", delta={"stop_reason": "end_turn", "stop_sequence": None}, usage=usage))
    return [*events, event("message_stop")]


# --- Ollama ---------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def ollama_client(url: str, **headers: str) -> AsyncIterator[ollama.AsyncClient]:
    client = ollama.AsyncClient(host=url, timeout=PATIENCE_S, headers=headers)
    yield client
    await client._client.aclose()


async def test_s15_the_ollama_client_streams_and_its_options_arrive(upstream, serve, judge):
    upstream.script(lines(line("A "), line("deed."), line(done=True)))
    async with serve(force="ANSWER", upstream_kind="ollama") as url, ollama_client(url) as client:
        parts = [
            part
            async for part in await client.chat(
                model="qwen3:4b",
                messages=HI,
                tools=[NESTED],
                think=True,
                stream=True,
                keep_alive=-1,
                options={"num_ctx": 16384},
            )
        ]
    assert "".join(part.message.content or "" for part in parts) == "A deed."
    assert parts[-1].done_reason == "stop"
    sent = upstream.last.json()
    assert "tools" not in sent
    assert (sent["think"], sent["keep_alive"], sent["options"]) == (True, -1, {"num_ctx": 16384})
    assert sent["messages"][0]["content"].startswith("What is a lease?\n\n")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("engine", ["act", "off"])
async def test_ollama_act_and_bypass_change_no_byte(upstream, serve, judge, streaming, engine):
    body = b'{ "model":"m", "messages":[{"role":"user","content":"h\\u00e9"}],\t"tools":[%b],"unknown":1e400' % (
        json.dumps(NESTED).encode()
    )
    body += b"}" if streaming else b',"stream":false}'
    parts = (line(tool_calls=[native_call()]), line(done=True))
    upstream.script(lines(*parts) if streaming else reply(parts[0], chunked=True))
    async with serve(force="ACT", mode="enforce", upstream_kind="ollama") as url:
        answer = await post(url, body, "/api/chat", **({"x_whetherman_mode": "off"} if engine == "off" else {}))
    assert upstream.last.body == body
    assert answer.body == (b"".join(parts) if streaming else parts[0])
    assert said(answer) == ("ACT", "no", "forced" if engine == "act" else "bypass:off")


async def test_s15_lines_are_flushed_one_by_one(upstream, serve, judge):
    async def slow(_seen: Seen, wire: Wire) -> None:
        await wire.head(Content_Type="application/x-ndjson", Transfer_Encoding="chunked")
        await wire.chunk(line("A "))
        await wire.until_closed()

    upstream.script(slow)
    async with serve(force="ACT", upstream_kind="ollama") as url, Client(url) as client:
        body = json.dumps({"model": "m", "messages": HI, "tools": [NESTED]}).encode()
        await client.start("POST", "/api/chat", body)
        await client.head()
        assert await client.chunk() == line("A ")
        client.abort()
        async with asyncio.timeout(PATIENCE_S):
            await upstream.last.closed.wait()


async def test_s03_parallel_calls_of_index_0_and_done_in_its_own_chunk(upstream, serve, judge):
    parts = [
        line(tool_calls=[native_call("search")]),
        line(tool_calls=[native_call("search"), native_call("other")]),
        line(done=True),
    ]
    upstream.script(lines(*parts))
    async with serve(mode="shadow", upstream_kind="ollama") as url, ollama_client(url) as client:
        calls = [
            call.function
            async for part in await client.chat(model="m", messages=HI, tools=[NESTED], stream=True)
            for call in part.message.tool_calls or ()
        ]
        text = (await once(url, "GET", "/metrics")).body.decode()
    assert [(call.name, call.arguments) for call in calls] == [
        ("search", ARGUMENTS),
        ("search", ARGUMENTS),
        ("other", ARGUMENTS),
    ]
    assert 'called="yes"' in text


async def test_s14_a_chunked_reply_to_a_non_stream_request(upstream, serve, judge):
    long = "word " * 40_000
    upstream.script(reply(line(long, done=True), chunked=True))
    async with serve(force="ANSWER", upstream_kind="ollama") as url, ollama_client(url) as client:
        answer = await client.chat(model="m", messages=HI, tools=[NESTED])
    assert answer.message.content == long
    assert upstream.last.json()["stream"] is False


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("leak", [MARKUP, "structured"])
async def test_r06_ollama_leak_is_sent_once_more_unmodified(upstream, serve, judge, streaming, leak):
    if leak == MARKUP:
        leaked = [*(line(MARKUP[at : at + 7]) for at in range(0, len(MARKUP), 7)), line(done=True)]
    else:
        leaked = [line(tool_calls=[native_call()]), line(done=True)]
    whole = line(MARKUP, done=True) if leak == MARKUP else line(tool_calls=[native_call()], done=True)
    called = (line(tool_calls=[native_call()]), line(done=True))
    upstream.script(lines(*leaked) if streaming else reply(whole))
    upstream.script(lines(*called) if streaming else reply(called[0]))
    body = json.dumps({"model": "m", "messages": HI, "tools": [NESTED], "stream": streaming}).encode()
    async with serve(force="ANSWER", upstream_kind="ollama") as url:
        answer = await post(url, body, "/api/chat")
        assert await metric(url, "leaked_call_total") == 1
    assert [seen.body == body for seen in upstream.requests] == [False, True]
    assert answer.body == (b"".join(called) if streaming else called[0])
    assert said(answer) == ("ANSWER", "no", "leaked_call")


async def test_an_error_in_the_middle_of_an_ollama_stream_reaches_the_client(upstream, serve, judge):
    upstream.script(lines(b'{"error":"model runner has unexpectedly stopped"}\n'))
    async with serve(force="ANSWER", upstream_kind="ollama") as url, ollama_client(url) as client:
        with pytest.raises(ollama.ResponseError, match="unexpectedly stopped"):
            async for _ in await client.chat(model="m", messages=HI, tools=[NESTED], stream=True):
                pass
    assert len(upstream.requests) == 1


async def test_c11_a_model_without_tools_is_the_upstreams_400(upstream, serve, judge):
    refusal = {"error": "registry.ollama.ai/library/gemma3:1b does not support tools"}
    upstream.default = reply(refusal, status="400 Bad Request")
    async with serve(force="ACT", upstream_kind="ollama") as url, ollama_client(url) as client:
        with pytest.raises(ollama.ResponseError, match="does not support tools") as caught:
            await client.chat(model="gemma3:1b", messages=HI, tools=[NESTED])
    assert caught.value.status_code == 400
    assert len(upstream.requests) == 1


async def test_ollama_without_an_upstream_says_so_in_ollamas_shape(serve, judge, unused_tcp_port):
    async with serve(upstream=f"http://127.0.0.1:{unused_tcp_port}") as url, ollama_client(url) as client:
        with pytest.raises(ollama.ResponseError, match="the model server did not answer"):
            await client.chat(model="m", messages=HI, tools=[NESTED])


@pytest.mark.parametrize(
    ("method", "target"),
    [("POST", "/api/generate"), ("POST", "/api/show"), ("POST", "/api/embed"), ("GET", "/api/tags"), ("HEAD", "/")],
)
async def test_the_rest_of_ollamas_api_is_relayed(upstream, serve, judge, method, target):
    body = b'{"model":"m", "tools":[1]}' if method == "POST" else b""
    if method == "HEAD":
        upstream.script(reply(b""))
    async with serve(force="ANSWER", upstream_kind="ollama") as url:
        answer = await once(url, method, target, body)
    assert answer.status == 200
    assert (upstream.last.method, upstream.last.target, upstream.last.body) == (method, target.encode(), body)
    assert answer.header("x-whetherman-decision") is None


# --- Responses ------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def openai_client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="sk-1", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


@pytest.mark.parametrize("streaming", [False, True])
async def test_responses_are_steered_and_read(upstream, serve, judge, streaming):
    said_text = output_text("A contract for use.")
    upstream.script(stream(response_events(said_text)) if streaming else reply(response_object(said_text)))
    async with serve(force="ANSWER", upstream_kind="openai") as url, openai_client(url) as client:
        asked = {"model": "m", "instructions": "Be brief.", "input": HI, "tools": [FLAT], "parallel_tool_calls": True}
        if streaming:
            events = [event async for event in await client.responses.create(**asked, stream=True)]
            text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
            assert events[-1].type == "response.completed"
        else:
            text = (await client.responses.create(**asked)).output_text
    assert text == "A contract for use."
    sent = upstream.last.json()
    assert sent["tool_choice"] == "none"
    assert "parallel_tool_calls" not in sent
    assert (sent["input"], sent["tools"]) == (HI, [FLAT])


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("leaked", [output_text(MARKUP), FUNCTION_CALL], ids=["markup", "structured"])
async def test_r06_responses_leak_is_sent_once_more_unmodified(upstream, serve, judge, streaming, leaked):
    called = response_object(FUNCTION_CALL)
    for item in (leaked, FUNCTION_CALL):
        upstream.script(stream(response_events(item)) if streaming else reply(response_object(item)))
    body = json.dumps({"model": "m", "input": "What is a lease?", "tools": [FLAT], "stream": streaming}).encode()
    async with serve(force="ANSWER", upstream_kind="openai") as url:
        answer = await post(url, body, "/v1/responses")
        assert await metric(url, "leaked_call_total") == 1
        assert 'called="yes"' in (await once(url, "GET", "/metrics")).body.decode()
    assert [seen.body == body for seen in upstream.requests] == [False, True]
    assert answer.body == (b"".join(response_events(FUNCTION_CALL)) if streaming else json.dumps(called).encode())
    assert said(answer) == ("ANSWER", "no", "leaked_call")


async def test_s17_hosted_tools_stay_and_the_upstreams_error_is_relayed(upstream, serve, judge):
    tools = [FLAT, {"type": "custom", "name": "patch"}, {"type": "web_search"}]
    refusal = {"error": {"message": "'type' of tool must be 'function'", "type": "invalid_request_error"}}
    upstream.default = reply(refusal, status="400 Bad Request")
    body = json.dumps({"model": "m", "input": HI, "tools": tools}).encode()
    async with serve(force="ACT", upstream_kind="llamacpp") as url:
        answer = await post(url, body, "/v1/responses")
    assert (answer.status, answer.json()) == (400, refusal)
    assert upstream.last.body == body
    assert [[tool.name for tool in chat.tools] for chat in judge.views] == [["search"]]
    async with serve(force="ANSWER", upstream_kind="llamacpp") as url:
        upstream.default = reply(response_object(output_text("Ok.")))
        await post(url, body, "/v1/responses")
    sent = upstream.last.json()
    assert sent["tools"] == tools
    assert "tool_choice" not in sent
    assert sent["input"][0]["content"].startswith("What is a lease?\n\n")


async def test_s16_a_websocket_is_refused_at_once_and_the_post_works(upstream, serve, judge):
    upstream.default = reply(response_object(output_text("Ok.")))
    async with serve(force="ACT") as url:
        upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec_WebSocket_Version": "13"}
        answer = await once(url, "GET", "/v1/responses", **upgrade, Sec_WebSocket_Key="dGhlIHNhbXBsZSBub25jZQ==")
        assert answer.status == 426
        assert not upstream.requests
        assert (await once(url, "GET", "/v1/responses")).status == 200
        async with openai_client(url) as client:
            assert (await client.responses.create(model="m", input="hi", tools=[FLAT])).output_text == "Ok."


async def test_a_dialogue_kept_by_the_server_goes_out_as_it_came(upstream, serve, judge):
    body = json.dumps({"model": "m", "input": "and now?", "previous_response_id": "r", "tools": [FLAT]}).encode()
    async with serve(force="ANSWER") as url:
        answer = await post(url, body, "/v1/responses")
    assert upstream.last.body == body
    assert said(answer) == ("ACT", "no", "bypass:stored_dialogue")


# --- Messages -------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def anthropic_client(url: str) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=url, api_key="sk-ant-api", max_retries=0, timeout=PATIENCE_S
    ) as client:
        yield client


SYSTEM = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["anthropic", "ollama", "unknown"])
async def test_r03_messages_are_steered_and_read(upstream, serve, judge, streaming, kind):
    block = text_block("A contract for use.")
    upstream.script(stream(message_events(block)) if streaming else reply(message(block)))
    asked = {
        "model": "m",
        "max_tokens": 64,
        "system": SYSTEM,
        "messages": HI,
        "tools": [BLOCK],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    }
    async with serve(force="ANSWER", upstream_kind=kind) as url, anthropic_client(url) as client:
        if streaming:
            async with client.messages.stream(**asked) as events:
                text = await events.get_final_text()
        else:
            text = (await client.messages.create(**asked)).content[0].text
    assert text == "A contract for use."
    sent = upstream.last.json()
    noted = [{"role": "user", "content": sent["messages"][0]["content"]}]
    assert sent["system"] == SYSTEM
    if kind == "anthropic":
        assert (sent["tool_choice"], sent["tools"], sent["messages"]) == ({"type": "none"}, [BLOCK], HI)
    else:
        assert noted[0]["content"].startswith("What is a lease?\n\n")
        assert ("tools" in sent, "tool_choice" in sent) == ((False, False) if kind == "ollama" else (True, True))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("leaked", [text_block(MARKUP), TOOL_USE], ids=["markup", "structured"])
async def test_r06_messages_leak_is_sent_once_more_unmodified(upstream, serve, judge, streaming, leaked):
    for block in (leaked, TOOL_USE):
        upstream.script(stream(message_events(block)) if streaming else reply(message(block)))
    body = json.dumps({"model": "m", "max_tokens": 9, "messages": HI, "tools": [BLOCK], "stream": streaming}).encode()
    async with serve(force="ANSWER", upstream_kind="anthropic") as url:
        answer = await post(url, body, "/v1/messages")
        assert await metric(url, "leaked_call_total") == 1
        assert 'called="yes"' in (await once(url, "GET", "/metrics")).body.decode()
    assert [seen.body == body for seen in upstream.requests] == [False, True]
    assert answer.body == (b"".join(message_events(TOOL_USE)) if streaming else json.dumps(message(TOOL_USE)).encode())
    assert said(answer) == ("ANSWER", "no", "leaked_call")


async def test_s02_pings_and_errors_of_a_messages_stream_pass(upstream, serve, judge):
    events = [event("ping"), event("error", error={"type": "overloaded_error", "message": "Overloaded"})]
    upstream.script(stream(events))
    body = json.dumps({"model": "m", "messages": HI, "tools": [BLOCK], "stream": True}).encode()
    async with serve(force="ANSWER", upstream_kind="anthropic") as url:
        answer = await post(url, body, "/v1/messages")
    assert answer.body == b"".join(events)
    assert len(upstream.requests) == 1


async def test_s18_count_tokens_is_relayed_whatever_it_answers(upstream, serve, judge):
    upstream.script(reply({"type": "error", "error": {"type": "not_found_error"}}, status="404 Not Found"))
    upstream.default = reply(message(text_block("Ok.")))
    async with serve(force="ANSWER", upstream_kind="anthropic") as url, anthropic_client(url) as client:
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.count_tokens(model="m", messages=HI, tools=[BLOCK])
        assert upstream.last.target == b"/v1/messages/count_tokens"
        answer = await client.messages.create(model="m", max_tokens=9, messages=HI, tools=[BLOCK])
        assert answer.content[0].text == "Ok."
        answer = await once(url, "POST", "/v1/messages/batches?beta=true&x=%20", b"{}")
        assert upstream.last.target == b"/v1/messages/batches?beta=true&x=%20"


@pytest.mark.parametrize(
    ("target", "headers"),
    [
        ("/v1/messages", {"Authorization": "Bearer sk-ant-oat01-x"}),
        ("/v1/messages?beta=true", {"Authorization": "Bearer x", "anthropic_beta": "oauth-2025-04-20"}),
        ("/v1/responses", {"Authorization": "Bearer x", "chatgpt_account_id": "a"}),
    ],
)
async def test_a_subscription_is_never_edited(upstream, serve, judge, target, headers):
    body = json.dumps({"model": "m", "messages": HI, "input": HI, "tools": [BLOCK]}).encode()
    async with serve(force="ANSWER", upstream_kind="anthropic") as url:
        answer = await post(url, body, target, **headers)
    assert (upstream.last.body, upstream.last.target) == (body, target.encode())
    assert upstream.last.header("authorization") == headers["Authorization"].encode()
    assert said(answer) == ("ACT", "no", "bypass:subscription")


async def test_messages_without_an_upstream_says_so_in_anthropics_shape(serve, judge, unused_tcp_port):
    async with serve(upstream=f"http://127.0.0.1:{unused_tcp_port}") as url, anthropic_client(url) as client:
        with pytest.raises(anthropic.InternalServerError, match="the model server did not answer") as caught:
            await client.messages.create(model="m", max_tokens=9, messages=HI, tools=[BLOCK])
    assert caught.value.body["type"] == "error"  # type: ignore[index]


# --- all of them ----------------------------------------------------------------------------------------------------

BODIES = {
    "/api/chat": {"model": "m", "messages": HI, "tools": [NESTED]},
    "/v1/responses": {"model": "m", "input": HI, "tools": [FLAT]},
    "/v1/messages": {"model": "m", "max_tokens": 9, "messages": HI, "tools": [BLOCK]},
}


@pytest.mark.parametrize("target", BODIES)
async def test_act_shadow_and_odd_bodies_are_byte_identical(upstream, serve, judge, target):
    body = json.dumps(BODIES[target], indent=1).encode() + b"\r\n "
    odd = [body, b"not json", b'{"messages":1,"input":1}', b"", body.replace(b'"model"', b'"model": "n", "model"')]
    async with serve(force="ACT", mode="enforce") as url:
        for one in odd:
            await post(url, one, target)
            assert upstream.last.body == one
    async with serve(mode="shadow") as url:
        answer = await post(url, body, target)
    assert upstream.last.body == body
    assert said(answer)[1] == "no"
    assert judge.views[-1].messages[-1].text == "What is a lease?"


@pytest.mark.parametrize("target", BODIES)
async def test_a_refused_edit_is_sent_once_more_unmodified(upstream, serve, judge, target):
    upstream.script(reply({"error": "bad"}, status="400 Bad Request"), reply(b'{"ok":1}'))
    body = json.dumps(BODIES[target]).encode()
    async with serve(force="ANSWER", upstream_kind="openai") as url:
        answer = await post(url, body, target)
    assert [seen.body == body for seen in upstream.requests] == [False, True]
    assert answer.body == b'{"ok":1}'
    assert said(answer) == ("ANSWER", "no", "refused")


@pytest.mark.parametrize("status", ["429 Too Many Requests", "529 Overloaded"])
async def test_a_full_server_is_not_asked_twice(upstream, serve, judge, status):
    overloaded = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
    upstream.default = reply(overloaded, status=status)
    async with serve(force="ANSWER", upstream_kind="anthropic") as url:
        answer = await post(url, BODIES["/v1/messages"], "/v1/messages")
    assert (str(answer.status), answer.json()) == (status[:3], overloaded)
    assert len(upstream.requests) == 1


@pytest.mark.parametrize(
    ("target", "expected"), [("/api/show", str), ("/v1/messages/count_tokens", dict), ("/v1/embeddings", dict)]
)
async def test_our_errors_on_relayed_paths_have_the_shape_of_their_clients(
    serve, judge, unused_tcp_port, target, expected
):
    async with serve(upstream=f"http://127.0.0.1:{unused_tcp_port}") as url:
        answer = await post(url, {}, target)
    assert answer.status == 502
    assert isinstance(answer.json()["error"], expected)
    assert answer.json().get("type") == ("error" if "messages" in target else None)


@pytest.mark.parametrize("target", ["/v1/responses", "/v1/messages"])
async def test_decide_reads_the_dialects_own_shapes(upstream, serve, judge, target):
    async with serve(force="ANSWER") as url:
        answer = await post(url, BODIES[target], "/v1/decide")
    assert (answer.status, answer.json()["decision"]) == (200, "ANSWER")
    assert not upstream.requests
