"""The view: what the gate reads of a chat-completions body, and what it must survive."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whetherman_edge.dialects.chat import ChatView, Parameter
from whetherman_edge.dialects.openai_chat import bypass_reason, canonical_arguments, view
from whetherman_edge.dialects.tool_cache import ToolCache
from whetherman_edge.errors import ViewError

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather for a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "City name"}, "units": {"type": "string"}},
            "required": ["city"],
        },
    },
}
HELLO: dict[str, Any] = {"role": "user", "content": "hello"}


def seen(body: Any, cache: ToolCache | None = None) -> ChatView:
    return view(body if isinstance(body, bytes) else json.dumps(body).encode(), cache or ToolCache())


def chat_with(*messages: dict[str, Any], **fields: Any) -> ChatView:
    return seen({"model": "m", "messages": list(messages), "tools": [WEATHER]} | fields)


def test_reads_the_fields_the_gate_needs() -> None:
    chat = chat_with({"role": "system", "content": "be brief"}, HELLO, stream=True)
    assert (chat.model, chat.stream, chat.dialect) == ("m", True, "openai_chat")
    assert [(m.role, m.text) for m in chat.messages] == [("system", "be brief"), ("user", "hello")]
    (tool,) = chat.tools
    assert (tool.name, tool.description) == ("get_weather", "Current weather for a city.")
    assert tool.parameters == (
        Parameter("city", "string", "City name", required=True),
        Parameter("units", "string"),
    )
    assert len(tool.key) == 16
    assert len(chat.toolset_key) == 16
    assert bypass_reason(chat) is None


@pytest.mark.parametrize("content", [None, "", ...], ids=["null", "empty", "absent"])
def test_R08_content_null_empty_or_absent_on_tool_turns(content: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Oslo"}'}}
    turn: dict[str, Any] = {"role": "assistant", "tool_calls": [call]}
    if content is not ...:
        turn["content"] = content
    chat = chat_with(HELLO, turn, {"role": "tool", "tool_call_id": "c1", "content": "sunny"})
    assert chat.messages[1].text == ""
    assert chat.messages[1].calls[0].name == "get_weather"
    assert chat.messages[1].calls[0].arguments == '{"city":"Oslo"}'


def test_R09_nulls_where_lists_are_expected_mean_none() -> None:
    body = {
        "tools": None,
        "tool_choice": None,
        "messages": [HELLO, {"role": "assistant", "content": "hi", "tool_calls": None}, {"role": "assistant"}, HELLO],
    }
    chat = seen(body)
    assert chat.tools == ()
    assert bypass_reason(chat) == "bypass:no_tools"


@pytest.mark.parametrize(
    "result",
    [
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "tool", "name": "get_weather", "content": "sunny"},
        {"role": "tool", "tool_name": "get_weather", "content": "sunny"},
        {"role": "function", "name": "get_weather", "content": "sunny"},
        {"role": "tool", "content": "sunny"},
    ],
)
def test_R10_a_result_gets_its_name_through_the_call(result: dict[str, Any]) -> None:
    calls = [{"id": "c1", "function": {"name": "get_weather", "arguments": "{}"}}]
    chat = chat_with(HELLO, {"role": "assistant", "tool_calls": calls}, result)
    assert chat.messages[2].role == "tool"
    assert chat.messages[2].tool_name == "get_weather"


def test_R12_developer_text_is_read_as_instructions() -> None:
    chat = chat_with({"role": "developer", "content": "never browse"}, HELLO)
    assert (chat.messages[0].role, chat.messages[0].text) == ("system", "never browse")


def test_R14_reasoning_never_becomes_text() -> None:
    turn = {
        "role": "assistant",
        "content": [{"type": "thinking", "thinking": "SECRET", "text": "SECRET"}, {"type": "text", "text": "done"}],
        "reasoning_content": "SECRET",
    }
    chat = chat_with(HELLO, turn, HELLO)
    assert chat.messages[1].text == "done"
    assert "SECRET" not in repr(chat)
    assert chat.thinking  # but that the agent thinks is known: it rules prefill out


def test_R18_images_are_counted_and_their_bytes_never_kept() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "QUJD" * 500_000}}
    turn = {"role": "user", "content": [{"type": "text", "text": "what is"}, image, {"type": "text", "text": "this?"}]}
    chat = chat_with(turn)
    assert (chat.messages[0].text, chat.messages[0].n_media) == ("what is\nthis?", 1)
    assert "QUJD" not in repr(chat)


def test_R19_legacy_functions_are_tools_and_a_forced_call_bypasses() -> None:
    legacy: dict[str, Any] = {"messages": [HELLO], "functions": [WEATHER["function"]], "function_call": "auto"}
    chat = seen(legacy)
    assert [t.name for t in chat.tools] == ["get_weather"]
    assert bypass_reason(chat) is None
    forced = seen(legacy | {"function_call": {"name": "get_weather"}})
    assert (forced.tool_choice, forced.tool_choice_name) == ("named", "get_weather")
    assert bypass_reason(forced) == "bypass:forced_tool"
    history = seen({"messages": [HELLO, {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}]})
    assert history.messages[1].calls[0].name == "f"


def test_R04_an_empty_tools_array_skips_the_gate() -> None:
    assert bypass_reason(chat_with(HELLO, tools=[])) == "bypass:no_tools"


def test_R07_nested_and_flat_tools_read_alike_and_others_are_counted() -> None:
    flat = {"type": "function", "strict": True} | WEATHER["function"]
    others = [{"type": "web_search"}, {"type": "mcp", "server_label": "x"}, {"type": "custom", "custom": {"name": "y"}}]
    chat = chat_with(HELLO, tools=[flat, *others, WEATHER])
    assert [t.name for t in chat.tools] == ["get_weather", "get_weather"]
    assert chat.tools[0].parameters == chat.tools[1].parameters
    assert chat.n_other_tools == 3
    assert bypass_reason(chat_with(HELLO, tools=others)) == "bypass:only_other_tools"


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("auto", None),
        (None, None),
        ({"type": "auto"}, None),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, None),
        ("none", "bypass:tool_choice_none"),
        ("required", "bypass:forced_tool"),
        ("any", "bypass:forced_tool"),
        ("something new", "bypass:forced_tool"),
        ({"type": "function", "function": {"name": "get_weather"}}, "bypass:forced_tool"),
        ({"type": "function", "name": "get_weather"}, "bypass:forced_tool"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}, "bypass:forced_tool"),
        ({"type": "web_search_preview"}, "bypass:forced_tool"),
        (7, "bypass:forced_tool"),
    ],
)
def test_tool_choice(choice: Any, expected: str | None) -> None:
    assert bypass_reason(chat_with(HELLO, tool_choice=choice)) == expected


def test_a_client_that_continues_its_own_text_is_left_alone() -> None:
    assert bypass_reason(chat_with(HELLO, {"role": "assistant", "content": "The"})) == "bypass:assistant_last"
    assert bypass_reason(chat_with()) == "bypass:no_messages"


def test_C07_an_80_kb_schema_adds_its_first_level_only() -> None:
    deep: dict[str, Any] = {"type": "object", "properties": {f"field_{i}": {"type": "string"} for i in range(3000)}}
    fat = {"type": "object", "properties": {"query": {"type": "string"}, "filter": deep}, "required": ["query"]}
    tool = {"type": "function", "function": {"name": "fat", "description": "x" * 90_000, "parameters": fat}}
    chat = chat_with(HELLO, tools=[tool, WEATHER])
    assert [p.name for p in chat.tools[0].parameters] == ["query", "filter"]
    assert len(repr(chat.tools[0])) < 5000


def test_the_tool_cache_parses_each_tool_once_and_stays_bounded() -> None:
    cache = ToolCache(sets_max=2, tools_max=3)
    first = seen({"messages": [HELLO], "tools": [WEATHER]}, cache)
    again = seen({"messages": [HELLO, HELLO], "tools": [WEATHER]}, cache)
    assert first.tools is again.tools
    for i in range(9):
        other = {"type": "function", "function": {"name": f"t{i}"}}
        grown = seen({"messages": [HELLO], "tools": [WEATHER, other, {"type": "web_search"}]}, cache)
        assert [t.name for t in grown.tools] == ["get_weather", f"t{i}"]
        assert grown.n_other_tools == 1
    assert cache.n_tools == 3


def test_C08_a_shuffled_list_gives_the_same_tools_with_the_same_keys() -> None:
    tools = [{"type": "function", "function": {"name": f"t{i}", "description": "d"}} for i in range(12)]
    one, other = chat_with(HELLO, tools=tools), chat_with(HELLO, tools=tools[::-1])
    assert one.toolset_key != other.toolset_key
    assert {t.key for t in one.tools} == {t.key for t in other.tools}


def test_arguments_as_string_or_object_have_one_canonical_form() -> None:
    as_object = {"id": "1", "function": {"name": "f", "arguments": {"b": 1, "a": [1, {"d": 2, "c": 3}]}}}
    as_string = {"id": "2", "function": {"name": "f", "arguments": '{"a": [1, {"c":3,"d": 2}],  "b":1}'}}
    broken = {"id": "3", "function": {"name": "f", "arguments": '{"a": '}}
    nothing = {"id": "4", "function": {"name": "f", "arguments": ""}}
    (turn,) = chat_with({"role": "assistant", "tool_calls": [as_object, as_string, broken, nothing]}).messages
    assert turn.calls[0].arguments == turn.calls[1].arguments == '{"a":[1,{"c":3,"d":2}],"b":1}'
    assert turn.calls[2].arguments == '{"a": '
    assert turn.calls[3].arguments == "{}"
    assert canonical_arguments(b"null") == "{}"


def test_S03_repeated_and_missing_ids_pair_by_order() -> None:
    calls = [{"id": "call_0", "index": 0, "function": {"name": name, "arguments": {}}} for name in ("one", "two")]
    results = [{"role": "tool", "tool_call_id": "call_0", "content": c} for c in "ab"]
    chat = chat_with(HELLO, {"role": "assistant", "tool_calls": calls}, *results)
    assert [m.tool_name for m in chat.messages[2:]] == ["one", "two"]


@pytest.mark.parametrize(
    ("fields", "structured"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, True),
        ({"response_format": {"type": "json_object"}}, True),
        ({"response_format": {"type": "text"}}, False),
        ({"response_format": None}, False),
        ({"format": "json"}, True),
        ({"grammar": "root ::= x"}, True),
        ({}, False),
    ],
)
def test_R15_structured_output_is_seen(fields: dict[str, Any], structured: bool) -> None:
    assert chat_with(HELLO, **fields).structured_output is structured


@pytest.mark.parametrize(
    ("fields", "thinking"),
    [
        ({"reasoning_effort": "low"}, True),
        ({"reasoning_effort": "none"}, False),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, True),
        ({"thinking": {"type": "disabled"}}, False),
        ({"think": False}, False),
        ({"think": "high"}, True),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        ({}, False),
    ],
)
def test_thinking_is_seen(fields: dict[str, Any], thinking: bool) -> None:
    assert chat_with(HELLO, **fields).thinking is thinking


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"messages":null}',
        b'{"messages":{}}',
        b'{"messages":["hi"]}',
        b'{"messages":[]} x',
        b'{"messages":[],',
        b'\xef\xbb\xbf{"messages":[]}',
        b'{"messages":[{"content":"\xff"}]}',
        b'{"messages":[],"tools":{}}',
        b'{"messages":[],"tools":"x"}',
        b'{"messages":[],"messages":[]}',
        b'{"messages":[],"tools":[],"tools":[{"type":"function","function":{"name":"f"}}]}',
        b'{"messages":[], "tools":null, "too\\u006cs":null}',
        b'{"stream":12,"messages":[],"stream":1}',
        b'{"messages":[{"content":"\\ud800"}]}',
        b'{"messages":' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)
def test_what_cannot_be_viewed_is_a_view_error(body: bytes) -> None:
    with pytest.raises(ViewError, match="relayed as it came"):
        seen(body)


def test_pretty_printed_bodies_are_viewed() -> None:
    body = json.dumps({"messages": [HELLO], "tools": [WEATHER], "x": {"tools": 1}}, indent=2).encode() + b"\n"
    assert bypass_reason(seen(body)) is None


_scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()
)
_anything = st.recursive(_scalars, lambda c: st.lists(c, max_size=3) | st.dictionaries(st.text(), c, max_size=3))
_call = st.fixed_dictionaries(
    {}, optional={"id": _anything, "type": _anything, "function": _anything, "custom": _anything, "name": _anything}
)
_turn = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant", "tool", "system", "x"]) | _anything,
        "content": _anything | st.lists(st.fixed_dictionaries({"type": _anything, "text": _anything}), max_size=2),
        "tool_calls": _anything | st.lists(_call, max_size=2),
        "tool_call_id": _anything,
        "function_call": _anything | _call,
        "name": _anything,
        "reasoning_content": _anything,
    },
)
OPTIONAL_KEYS = """model tools functions tool_choice function_call stream response_format format grammar thinking think
reasoning_effort chat_template_kwargs"""
_body = st.fixed_dictionaries(
    {"messages": st.lists(_turn, max_size=4)},
    optional=dict.fromkeys(OPTIONAL_KEYS.split(), _anything),
)


@given(_body)
def test_fuzz_any_well_formed_body_is_viewed_or_refused(body: dict[str, Any]) -> None:
    raw = json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")
    try:
        chat = seen(raw)
    except ViewError:
        return
    assert len(chat.messages) == len(body["messages"])
    bypass_reason(chat)


@given(st.binary(max_size=60), st.integers(0, 200), st.binary(max_size=4))
def test_fuzz_any_bytes_are_viewed_or_refused(noise: bytes, position: int, patch: bytes) -> None:
    good = json.dumps({"messages": [HELLO], "tools": [WEATHER], "tool_choice": "auto"}).encode()
    for body in (noise, good[:position] + patch + good[position + len(patch) :], good[:position]):
        try:
            seen(body)
        except ViewError:
            continue
