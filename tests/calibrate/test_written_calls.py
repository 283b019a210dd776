"""Calls written into the text, in the forms that small models use."""

from __future__ import annotations

import pytest

from whetherman_edge.calibrate.written_calls import parse_arguments, read_calls

TOOLS = ("get_weather", "search")


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "search", "arguments": {"q": "a"}}', [("search", {"q": "a"})]),
        ('```json\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n```', [("get_weather", {"city": "Oslo"})]),
        ('{{"name": "search", "arguments": {{"q": "x"}}}}', [("search", {"q": "x"})]),
        ('{"name": "search", "arguments": "{\\"q\\": 1}"}', [("search", {"q": 1})]),
        ('{"function": {"name": "search", "arguments": {"q": 2}}}', [("search", {"q": 2})]),
        ("{'name': 'search', 'parameters': {'q': None}}", [("search", {"q": None})]),
        (
            (
                '<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>\n<tool_call>\n'
                '{"name": "get_weather", "arguments": {"city": "Rom"}}\n</tool_call>'
            ),
            [("search", {}), ("get_weather", {"city": "Rom"})],
        ),
        ('<function=search>{"q": "b"}</function>', [("search", {"q": "b"})]),
        ('Action: search\nAction Input: {"q": "b"}', [("search", {"q": "b"})]),
        ('print(get_weather(city="Oslo (NO)"))', [("get_weather", {"city": "Oslo (NO)"})]),
        ('{"name": "search", "arguments": {"q": "cut', [("search", None)]),
        ("It is sunny in Oslo.", []),
        ("I could use search for that, but it is 4.", []),
        ('{"name": "delete_all", "arguments": {}}', []),
        ('{"answer": {"name": "Ann"}}', []),
    ],
)
def test_calls_are_read_as_an_agent_reads_them(text: str, calls: list[tuple[str, dict[str, object] | None]]) -> None:
    assert [(call.name, call.arguments) for call in read_calls(text, TOOLS)] == calls


def test_no_tools_no_calls() -> None:
    assert read_calls('{"name": "search", "arguments": {}}', ()) == ()


@pytest.mark.parametrize(("raw", "value"), [("", {}), ('{"a": 1}', {"a": 1}), ("[1]", None), ("{", None)])
def test_arguments_are_an_object_or_nothing(raw: str, value: object) -> None:
    assert parse_arguments(raw) == value
