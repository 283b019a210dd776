"""Bodies of many small things: a size limit does not bound what walking them costs, and the event loop waits for it."""

from __future__ import annotations

import json

import pytest

from whetherman_edge.dialects.chat import OPEN_CALLS_MAX, TURNS_MAX
from whetherman_edge.dialects.dialect import Dialect
from whetherman_edge.dialects.json_spans import MEMBERS_MAX, VALUES_MAX, refuse_crowded
from whetherman_edge.dialects.openai_chat import ARGUMENTS_BYTES_MAX, canonical_arguments
from whetherman_edge.dialects.registry import ANTHROPIC, OLLAMA, OPENAI_CHAT, OPENAI_RESPONSES
from whetherman_edge.dialects.tool_cache import TOOLS_MAX, ToolCache
from whetherman_edge.errors import OverLimit

USER = {"role": "user", "content": "hi"}
USE = {"type": "tool_use", "id": "c", "name": "find", "input": {}}
CALL = {"id": "c", "type": "function", "function": {"name": "find", "arguments": "{}"}}
DIALOGUE = {OPENAI_CHAT.name: "messages", OLLAMA.name: "messages", ANTHROPIC.name: "messages"}


def body(dialect: Dialect, turns: list[object], n_tools: int = 1, **extra: object) -> bytes:
    tools = [
        {"name": f"tool_{index}", "type": "function", "function": {"name": f"t{index}"}} for index in range(n_tools)
    ]
    return json.dumps({"model": "m", "tools": tools, DIALOGUE.get(dialect.name, "input"): turns, **extra}).encode()


@pytest.mark.parametrize("dialect", [OPENAI_CHAT, OLLAMA, OPENAI_RESPONSES, ANTHROPIC], ids=lambda one: one.name)
def test_turns_tools_and_keys_have_a_limit(dialect):
    assert len(dialect.view(body(dialect, [USER] * TURNS_MAX, TOOLS_MAX), ToolCache()).messages) == TURNS_MAX
    too_much = [
        body(dialect, [USER] * (TURNS_MAX + 1)),
        body(dialect, [USER], TOOLS_MAX + 1),
        body(dialect, [USER], **{f"key_{index}": 1 for index in range(MEMBERS_MAX)}),
    ]
    for one in too_much:
        with pytest.raises(OverLimit, match="expected at most"):
            dialect.view(one, ToolCache())


@pytest.mark.parametrize(
    ("dialect", "turns"),
    [
        (OPENAI_CHAT, [USER, {"role": "assistant", "tool_calls": [CALL] * (OPEN_CALLS_MAX + 1)}]),
        (OLLAMA, [USER, {"role": "assistant", "tool_calls": [CALL] * (OPEN_CALLS_MAX + 1)}]),
        (OPENAI_RESPONSES, [{"type": "function_call", "call_id": "c", "name": "find"}] * (OPEN_CALLS_MAX + 1)),
        (ANTHROPIC, [USER, {"role": "assistant", "content": [USE] * (OPEN_CALLS_MAX + 1)}]),
        (ANTHROPIC, [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}] * (TURNS_MAX + 1)}]),
    ],
    ids=["openai_chat", "ollama", "openai_responses", "anthropic", "anthropic_results"],
)
def test_calls_and_results_have_a_limit(dialect, turns):
    with pytest.raises(OverLimit, match="expected at most"):
        dialect.view(body(dialect, turns), ToolCache())


CROWDED = {
    "objects": b'{"messages":[' + b"{}," * VALUES_MAX + b"{}]}",
    "numbers": b'{"messages":[{"role":"user","content":[' + b"1," * VALUES_MAX + b"1]}]}",
    "spaced": b'{"messages":[' + b"1 , " * VALUES_MAX + b"1]}",
    "lists": b'{"tools":[' + b"[" * VALUES_MAX + b"]" * VALUES_MAX + b"]}",
    "strings": b'{"tools":[{"x":[' + b'"",' * VALUES_MAX + b'""]}]}',
    "members": b'{"tools":[{"x":{' + b",".join(b'"%x":1' % n for n in range(VALUES_MAX + 1)) + b"}}]}",
    "escapes": b'{"x":"' + b'\\",' * 4 * VALUES_MAX + b'"}',  # may be text; it would cost too much to find out
}


@pytest.mark.parametrize("crowded", CROWDED.values(), ids=CROWDED)
def test_a_body_of_very_many_values_is_not_decoded(crowded):
    with pytest.raises(OverLimit, match="JSON values"):
        refuse_crowded(crowded)


@pytest.mark.parametrize("text", ["one, two [3] {4} ", 'he said, "so, [then]" ', "\\,[{"])
def test_commas_and_brackets_in_a_text_are_no_values(text):
    long = json.dumps({"messages": [{"role": "user", "content": text * (VALUES_MAX // 2)}]}).encode()
    assert long.count(b",") > VALUES_MAX // 2
    refuse_crowded(long)


def test_what_agents_send_is_far_from_the_limit():
    schema = {"type": "object", "properties": {f"p{n}": {"type": "string", "enum": ["a", "b"]} for n in range(10)}}
    tools = [{"type": "function", "function": {"name": f"t{n}", "parameters": schema}} for n in range(TOOLS_MAX)]
    large = json.dumps({"messages": [USER] * TURNS_MAX, "tools": tools}).encode()
    assert len(large) > 2 * VALUES_MAX
    refuse_crowded(large)


def test_long_arguments_are_compared_as_they_were_spelled():
    long = '{"b": "' + "x" * ARGUMENTS_BYTES_MAX + '", "a": 1}'
    assert canonical_arguments(json.dumps(long).encode()) == long
    assert canonical_arguments(long.encode()) == long
    assert canonical_arguments(b'{"b": 1, "a": 2}') == '{"a":2,"b":1}'
