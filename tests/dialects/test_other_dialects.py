"""Views and edits of Ollama, Responses and Messages: what the gate reads, and that the rest of the body stays."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whetherman_edge.dialects import registry
from whetherman_edge.dialects.anthropic import subscription
from whetherman_edge.dialects.chat import ChatView, Intervention, ToolCall
from whetherman_edge.dialects.dialect import Dialect
from whetherman_edge.dialects.openai_chat import bypass_reason
from whetherman_edge.dialects.registry import ANTHROPIC, OLLAMA, OPENAI_CHAT, OPENAI_RESPONSES
from whetherman_edge.dialects.tool_cache import ToolCache
from whetherman_edge.errors import ViewError

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NESTED = {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": SCHEMA}}
FLAT = {"type": "function", "name": "get_weather", "description": "Weather.", "parameters": SCHEMA, "strict": True}
INPUT_SCHEMA = {"name": "get_weather", "description": "Weather.", "input_schema": SCHEMA}
ARGUMENTS = {"city": "Oslo"}
CALL = ToolCall("c1", "get_weather", '{"city":"Oslo"}')


def seen(dialect: Dialect, **body: Any) -> ChatView:
    return dialect.view(json.dumps(body).encode(), ToolCache())


def edited(dialect: Dialect, body: dict[str, Any], **change: Any) -> dict[str, Any]:
    raw = json.dumps(body).encode()
    return json.loads(registry.apply(raw, dialect.view(raw, ToolCache()), Intervention(**change)))


# --- Ollama ---------------------------------------------------------------------------------------------------------

OLLAMA_CHAT: dict[str, Any] = {
    "model": "qwen3:4b",
    "messages": [
        {"role": "user", "content": "weather?", "images": ["aGVsbG8="]},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "get_weather", "arguments": ARGUMENTS}}],
        },
        {"role": "tool", "tool_name": "get_weather", "content": "sunny"},
    ],
    "tools": [NESTED],
    "options": {"num_ctx": 16384},
    "keep_alive": -1,
    "think": True,
}


def test_R10_S15_ollama_view() -> None:
    chat = seen(OLLAMA, **OLLAMA_CHAT)
    assert (chat.dialect, chat.stream, chat.thinking, chat.tools[0].name) == ("ollama", True, True, "get_weather")
    user, assistant, tool = chat.messages
    assert (user.text, user.n_media) == ("weather?", 1)
    assert assistant.calls == (ToolCall("", "get_weather", '{"city":"Oslo"}'),)
    assert (tool.role, tool.tool_name, tool.text) == ("tool", "get_weather", "sunny")
    assert not seen(OLLAMA, **OLLAMA_CHAT, stream=False).stream
    assert seen(OLLAMA, **OLLAMA_CHAT, format="json").structured_output


def test_a_body_that_loads_a_model_is_no_view_error() -> None:
    chat = seen(OLLAMA, model="m", keep_alive=0)
    assert bypass_reason(chat) == "bypass:no_tools"


def test_R05_ollama_has_no_tool_choice() -> None:
    sent = edited(OLLAMA, OLLAMA_CHAT, mode="strip", strip=True, sentence="Answer now.", note_at=(2, 0))
    assert "tools" not in sent
    assert sent["messages"][2]["content"] == "sunny\n\nAnswer now."
    assert {key: sent[key] for key in ("options", "keep_alive", "think")} == {
        key: OLLAMA_CHAT[key] for key in ("options", "keep_alive", "think")
    }
    with pytest.raises(ViewError, match="tool choice"):
        edited(OLLAMA, OLLAMA_CHAT, mode="none", forbid=True)


# --- Responses ------------------------------------------------------------------------------------------------------

RESPONSE: dict[str, Any] = {
    "model": "gpt-5-nano",
    "instructions": "Be brief.",
    "input": [
        {"role": "developer", "content": "never browse"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Oslo"}'},
        {"type": "function_call", "call_id": "c2", "name": "get_weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "rain"}]},
    ],
    "tools": [FLAT],
}


def test_R10_R12_responses_view() -> None:
    chat = seen(OPENAI_RESPONSES, **RESPONSE, stream=True)
    assert [(m.role, m.text) for m in chat.messages] == [
        ("system", "Be brief."),
        ("system", "never browse"),
        ("user", "weather?"),
        ("assistant", ""),
        ("tool", "sunny"),
        ("tool", "rain"),
    ]
    assert chat.messages[3].calls == (CALL, ToolCall("c2", "get_weather", '{"city":"Rome"}'))
    assert [m.tool_name for m in chat.messages[4:]] == ["get_weather", "get_weather"]
    assert chat.stream
    assert bypass_reason(chat) is None
    assert seen(OPENAI_RESPONSES, input="hi", tools=[FLAT]).messages[0].text == "hi"


def test_R07_S17_only_function_tools_are_counted() -> None:
    others = [{"type": "web_search"}, {"type": "mcp", "server_label": "s"}, {"type": "custom", "name": "shell"}]
    chat = seen(OPENAI_RESPONSES, input="hi", tools=[others[0], FLAT, *others[1:]])
    assert [tool.name for tool in chat.tools] == ["get_weather"]
    assert chat.n_other_tools == 3
    sent = edited(
        OPENAI_RESPONSES,
        {"input": "hi", "tools": [FLAT, *others]},
        mode="prune",
        drop_tools=frozenset([chat.tools[0].key]),
    )
    assert sent["tools"] == others


@pytest.mark.parametrize(
    "extra",
    [{"previous_response_id": "resp_1"}, {"conversation": "conv_1"}, {"prompt": {"id": "p"}}],
    ids=lambda extra: next(iter(extra)),
)
def test_a_dialogue_that_the_server_keeps_is_not_judged(extra: dict[str, Any]) -> None:
    assert bypass_reason(seen(OPENAI_RESPONSES, input="hi", tools=[FLAT], **extra)) == "bypass:stored_dialogue"
    referred = [{"type": "item_reference", "id": "x"}, {"role": "user", "content": "hi"}]
    assert bypass_reason(seen(OPENAI_RESPONSES, input=referred, tools=[FLAT])) == "bypass:stored_dialogue"


def test_a_dialogue_that_only_the_server_can_read_is_not_judged() -> None:
    packed = [{"type": "compaction", "encrypted_content": "x"}, {"role": "user", "content": "and now?"}]
    assert bypass_reason(seen(OPENAI_RESPONSES, input=packed, tools=[FLAT])) == "bypass:stored_dialogue"
    stored = seen(OPENAI_RESPONSES, prompt={"id": "p"}, tools=[FLAT])
    assert bypass_reason(stored) == "bypass:no_messages"
    with pytest.raises(ViewError, match="input"):
        seen(OPENAI_RESPONSES, tools=[FLAT])


HOSTED_CALLS = [
    {"type": "local_shell_call", "call_id": "c1", "action": {"type": "exec", "command": ["ls"]}},
    {"type": "local_shell_call_output", "call_id": "c1", "output": '{"output":"","exit_code":0}'},
    {"type": "shell_call", "call_id": "c2", "action": {"commands": ["ls"]}},
    {"type": "shell_call_output", "call_id": "c2", "output": [{"stdout": "a", "stderr": "b", "outcome": {}}]},
    {"type": "apply_patch_call", "call_id": "c3", "operation": {"type": "delete_file", "path": "x"}},
    {"type": "apply_patch_call_output", "call_id": "c3", "status": "completed"},
    {"type": "computer_call", "call_id": "c4", "action": {"type": "click", "x": 1, "y": 2}},
    {"type": "computer_call_output", "call_id": "c4", "output": {"type": "computer_screenshot", "image_url": "data:"}},
]


def test_calls_of_hosted_tools_tell_what_they_did() -> None:
    turns = [{"role": "user", "content": "tidy up"}, *HOSTED_CALLS]
    chat = seen(OPENAI_RESPONSES, input=turns, tools=[FLAT, {"type": "local_shell"}])
    arguments = [call.arguments for message in chat.messages for call in message.calls]
    assert arguments[:2] == ['{"command":["ls"],"type":"exec"}', '{"commands":["ls"]}']
    assert arguments[2:] == ['{"path":"x","type":"delete_file"}', '{"type":"click","x":1,"y":2}']
    results = [(message.text, message.n_media) for message in chat.messages if message.role == "tool"]
    assert results == [('{"output":"","exit_code":0}', 0), ("a\nb", 0), ("", 0), ("", 1)]


@pytest.mark.parametrize("last", [2, 4, 6, 8])
def test_a_result_with_a_form_of_its_own_takes_no_sentence(last: int) -> None:
    body = {"input": [{"role": "user", "content": "tidy up"}, *HOSTED_CALLS[:last]], "tools": [FLAT]}
    sent = edited(OPENAI_RESPONSES, body, mode="note", sentence="Now.", note_at=(last, 0))
    assert sent["input"][1:] == body["input"][1:]
    assert sent["input"][0]["content"] == "tidy up\n\nNow."


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("auto", None),
        ("none", "bypass:tool_choice_none"),
        ("required", "bypass:forced_tool"),
        ({"type": "function", "name": "get_weather"}, "bypass:forced_tool"),
        ({"type": "web_search"}, "bypass:forced_tool"),
    ],
)
def test_R02_responses_tool_choice(choice: Any, expected: str | None) -> None:
    assert bypass_reason(seen(OPENAI_RESPONSES, input="hi", tools=[FLAT], tool_choice=choice)) == expected


def test_R03_responses_edits() -> None:
    body = {**RESPONSE, "parallel_tool_calls": True, "tool_choice": "auto"}
    sent = edited(OPENAI_RESPONSES, body, mode="none", forbid=True, sentence="Now.", note_at=(5, 2))
    assert sent["tool_choice"] == "none"
    assert "parallel_tool_calls" not in sent
    assert sent["input"][6]["output"] == [{"type": "input_text", "text": "rain\n\nNow."}]
    assert sent["input"][:6] == body["input"][:6]
    sent = edited(OPENAI_RESPONSES, body, mode="strip", strip=True)
    assert sent.keys() == {"model", "instructions", "input"}
    asked = edited(OPENAI_RESPONSES, {"input": "hi", "tools": [FLAT]}, mode="note", sentence="Now.", note_at=(0,))
    assert asked["input"] == "hi\n\nNow."


# --- Messages -------------------------------------------------------------------------------------------------------

MESSAGE: dict[str, Any] = {
    "model": "claude",
    "max_tokens": 100,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cch=1a2b;"},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
    ],
    "messages": [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "c1", "name": "get_weather", "input": ARGUMENTS},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "text", "text": "<system-reminder>todo list is empty</system-reminder>"},
            ],
        },
    ],
    "tools": [INPUT_SCHEMA],
}


def test_R10_C02_messages_view() -> None:
    chat = seen(ANTHROPIC, **MESSAGE)
    assert [(m.role, m.text) for m in chat.messages] == [
        ("system", "Be brief."),
        ("user", "weather?"),
        ("assistant", "I look."),
        ("system", "<system-reminder>todo list is empty</system-reminder>"),
        ("tool", "sunny"),
    ]
    assert chat.messages[2].calls == (CALL,)
    assert chat.messages[4].tool_name == "get_weather"
    (tool,) = chat.tools
    assert (tool.name, tool.parameters[0].name, tool.parameters[0].required) == ("get_weather", "city", True)
    assert bypass_reason(chat) is None
    other = json.loads(json.dumps(MESSAGE).replace("cch=1a2b", "cch=9z9z"))
    assert seen(ANTHROPIC, **other) == chat


def test_a_users_words_behind_a_reminder_in_one_block_are_the_users() -> None:
    text = "<system-reminder>be brief</system-reminder>\n\nFix the bug."
    turn = {"role": "user", "content": [{"type": "text", "text": text}]}
    chat = seen(ANTHROPIC, messages=[turn], tools=[INPUT_SCHEMA])
    assert [(m.role, m.text) for m in chat.messages] == [("user", text)]


def test_R03_messages_edits() -> None:
    body = {**MESSAGE, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    sent = edited(ANTHROPIC, body, mode="none", forbid=True)
    assert sent == {**body, "tool_choice": {"type": "none"}}
    sent = edited(ANTHROPIC, body, mode="note", sentence="Now.", note_at=(4, 1))
    assert sent["messages"][2]["content"][0]["content"] == [{"type": "text", "text": "sunny\n\nNow."}]
    assert sent["messages"][:2] == body["messages"][:2]
    assert sent["system"] == body["system"]
    sent = edited(ANTHROPIC, body, mode="strip", strip=True, sentence="Now.", note_at=(1,))
    assert sent.keys() == {"model", "max_tokens", "system", "messages"}
    assert sent["messages"][0]["content"] == "weather?\n\nNow."


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, None),
        ({"type": "none"}, "bypass:tool_choice_none"),
        ({"type": "any"}, "bypass:forced_tool"),
        ({"type": "tool", "name": "get_weather"}, "bypass:forced_tool"),
    ],
)
def test_R02_messages_tool_choice(choice: Any, expected: str | None) -> None:
    chat = seen(ANTHROPIC, messages=[{"role": "user", "content": "hi"}], tools=[INPUT_SCHEMA], tool_choice=choice)
    assert bypass_reason(chat) == expected


def test_R07_R18_server_tools_and_images() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJD"}}
    tools = [{"type": "web_search_20250305", "name": "web_search"}, INPUT_SCHEMA, {**INPUT_SCHEMA, "type": "custom"}]
    turn = {"role": "user", "content": [image, {"type": "text", "text": "what?"}]}
    chat = seen(ANTHROPIC, messages=[turn], tools=tools)
    assert (chat.messages[0].text, chat.messages[0].n_media) == ("what?", 1)
    assert (len(chat.tools), chat.n_other_tools) == (2, 1)
    alone = {"messages": [{"role": "user", "content": [image]}], "tools": [INPUT_SCHEMA]}
    sent = edited(ANTHROPIC, alone, mode="note", sentence="Now.", note_at=(0,))
    assert sent["messages"][0]["content"] == [image, {"type": "text", "text": "Now."}]


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"authorization": "Bearer sk-ant-oat01-abc"}, True),
        ({"authorization": "bearer eyJhbGciOi.eyJzdWIiOi.c2ln"}, True),
        ({"anthropic-beta": "claude-code-20250219,oauth-2025-04-20"}, True),
        ({"chatgpt-account-id": "a"}, True),
        ({"authorization": "Bearer sk-proj-1", "anthropic-beta": "context-1m"}, False),
        ({"x-api-key": "sk-ant-api03"}, False),
        ({}, False),
    ],
)
def test_subscription_credentials(headers: dict[str, str], expected: bool) -> None:
    assert subscription(headers) is expected


# --- all ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "dialect"),
    [
        (MESSAGE, ANTHROPIC),
        (RESPONSE, OPENAI_RESPONSES),
        (OLLAMA_CHAT, OPENAI_CHAT),
        ({"messages": [], "system": "x"}, ANTHROPIC),
        ([], OPENAI_CHAT),
        ({}, OPENAI_CHAT),
    ],
)
def test_a_body_says_its_dialect(body: Any, dialect: Dialect) -> None:
    assert registry.of_body(json.dumps(body).encode()) is dialect


_OTHERS = st.sampled_from([OLLAMA, OPENAI_RESPONSES, ANTHROPIC])
_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.text(max_size=6)
    | st.sampled_from(["user", "tool_result", "text"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                "role content type text name tool_calls input call_id output function arguments id".split()
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)
_KEYS = "model messages input system instructions tools tool_choice stream text think format".split()
_bodies = st.dictionaries(st.sampled_from(_KEYS), _json, max_size=7)
_plans = st.sampled_from(
    [
        Intervention(mode="strip", strip=True),
        Intervention(mode="none", forbid=True),
        Intervention(mode="note", sentence='N\u00e4\u2028"\\', note_at=(0,)),
        Intervention(mode="note", sentence="x", note_at=(2, 1, 0)),
    ]
)


def _check(dialect: Dialect, raw: bytes, plan: Intervention) -> None:
    """Accepted, and then the edit is JSON in which only what the plan names differs; or ViewError."""
    try:
        chat = dialect.view(raw, ToolCache())
        plan = Intervention(
            mode=plan.mode,
            strip=plan.strip,
            forbid=plan.forbid,
            sentence=plan.sentence,
            note_at=tuple(index for index in plan.note_at if index < len(chat.messages)),
        )
        out = json.loads(registry.apply(raw, chat, plan))
    except ViewError:
        return
    before = json.loads(raw)
    changed = {key for key in before.keys() | out.keys() if before.get(key, ...) != out.get(key, ...)}
    allowed = (
        {"tools", "tool_choice", "parallel_tool_calls"}
        if not plan.sentence
        else {"messages", "input", "instructions", "system"}
    )
    assert changed <= allowed


@given(_OTHERS, _bodies, _plans)
def test_any_json_is_viewed_and_edited_or_refused(dialect: Dialect, body: dict[str, Any], plan: Intervention) -> None:
    _check(dialect, json.dumps(body).encode(), plan)


@given(st.sampled_from([(OLLAMA, OLLAMA_CHAT), (OPENAI_RESPONSES, RESPONSE), (ANTHROPIC, MESSAGE)]), st.data(), _plans)
def test_damaged_bodies_are_viewed_and_edited_or_refused(
    given_body: Any, data: st.DataObject, plan: Intervention
) -> None:
    dialect, body = given_body
    raw = json.dumps(body).encode()
    at = data.draw(st.integers(0, len(raw)))
    _check(dialect, raw[:at] + data.draw(st.binary(max_size=3)) + raw[at + data.draw(st.integers(0, 4)) :], plan)


@given(_OTHERS, st.lists(st.binary(max_size=30)), st.integers(0, 40))
def test_any_reply_bytes_are_read(dialect: Dialect, parts: list[bytes], cut: int) -> None:
    splitter, reader = dialect.splitter(), dialect.reader()
    for value in [v for part in parts for v in splitter.feed(part)] + splitter.close():
        reader.read(value)
    assert reader.n_calls == 0


def test_ndjson_is_read_however_it_is_cut() -> None:
    stream = b'{"a":1}\r\n\n{"b":2}\n{"c":3}'
    for size in range(1, len(stream) + 1):
        reader = OLLAMA.splitter()
        found = [line for at in range(0, len(stream), size) for line in reader.feed(stream[at : at + size])]
        assert found + reader.close() == [b'{"a":1}', b'{"b":2}', b'{"c":3}']


_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2)
    | st.sampled_from(
        ["message", "function_call", "tool_use", "text", "response", "response.output_item.added", "error"]
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                "type object output content item output_index content_block delta text message tool_calls".split()
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)


@given(_OTHERS, st.lists(_values, max_size=3))
def test_any_json_is_read_as_a_reply(dialect: Dialect, values: list[Any]) -> None:
    reader = dialect.reader()
    for value in values:
        before = reader.n_calls
        pieces = reader.read(json.dumps(value).encode())
        assert reader.n_calls - before == sum(piece.n_calls for piece in pieces or ())


@pytest.mark.parametrize("kind", [[], {}, 1, None])
def test_types_that_are_no_words(kind: Any) -> None:
    block = {"type": kind, "text": 1, "content": [{"type": kind}]}
    assert seen(ANTHROPIC, system=[block], messages=[{"role": kind, "content": [block]}]).messages
    assert not seen(OPENAI_RESPONSES, input=[{"type": kind, "role": kind, "content": [block]}]).messages[0].text
    whole = {"object": "response", "output": [block]}
    assert OPENAI_RESPONSES.reader().read(json.dumps(whole).encode()) is not None
    message = {"type": "message", "content": [block]}
    assert ANTHROPIC.reader().read(json.dumps(message).encode()) == []
