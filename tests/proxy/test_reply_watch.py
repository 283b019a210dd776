"""Replies to requests whose tools were withheld: what is held, what is released, what is counted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from whetherman_edge.proxy.reply_watch import StreamWatch, judge_reply

OFFERED = ("search", "get_weather")
CALL = '{"name": "search", "arguments": {"q": "x"}}'


def reply(**message: Any) -> bytes:
    return json.dumps({"choices": [{"index": 0, "message": {"role": "assistant"} | message}]}).encode()


def chunk(index: int = 0, **delta: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": index, "delta": delta}]}).encode() + b"\n\n"


def call(name: str, index: int = 0, call_id: str | None = "c1", arguments: Any = "{}") -> dict[str, Any]:
    entry: dict[str, Any] = {"index": index, "function": {"name": name, "arguments": arguments}}
    return entry if call_id is None else entry | {"id": call_id}


@pytest.mark.parametrize(
    ("body", "state"),
    [
        (reply(content="It is sunny."), "CLEAR"),
        (reply(content=None, tool_calls=[call("search")]), "LEAK"),
        (reply(content=None, function_call={"name": "search", "arguments": "{}"}), "LEAK"),
        (reply(content=f"<tool_call>{CALL}</tool_call>"), "LEAK"),
        (reply(content=f"Let me look.\n```json\n{CALL}\n```"), "LEAK"),
        (reply(content=CALL), "LEAK"),
        (reply(content=[{"type": "text", "text": CALL}]), "LEAK"),
        (reply(content="Fine.", tool_calls=[]), "CLEAR"),
        (reply(content="Fine.", tool_calls=None, reasoning_content=CALL), "CLEAR"),
        (b'{"error": {"message": "no"}}', "CLEAR"),
        (b'{"choices": []}', "CLEAR"),
        (b"<html>", "CLEAR"),
        (b"", "CLEAR"),
        (b'{"choices": [{"message": {"content": "\xff"}}]}', "CLEAR"),
    ],
)
def test_R06_a_whole_reply(body: bytes, state: str) -> None:
    assert judge_reply(body, OFFERED) == state


def pieces(text: str, size: int = 3) -> list[bytes]:
    return [
        chunk(role="assistant", content=""),
        *(chunk(content=text[i : i + size]) for i in range(0, len(text), size)),
    ]


@pytest.mark.parametrize("text", [f"<tool_call>{CALL}</tool_call>", CALL, f"```json\n{CALL}\n```"])
@pytest.mark.parametrize("step", [1, 7, 1000])
def test_R06_a_stream_is_held_until_the_call_shows(text: str, step: int) -> None:
    stream = b": ping\n\n" + b"".join(pieces(text)) + b"data: [DONE]\n\n"
    watch = StreamWatch(OFFERED)
    states = [watch.feed(stream[i : i + step]) for i in range(0, len(stream), step)]
    assert "CLEAR" not in states
    assert states[-1] == "LEAK"


def test_an_answer_is_released_with_its_first_word() -> None:
    watch = StreamWatch(OFFERED)
    stream = pieces("Hello, it is sunny.")
    assert watch.feed(stream[0]) == "HOLD"
    assert watch.feed(stream[1]) == "CLEAR"
    for piece in stream[2:]:
        assert watch.feed(piece) == "CLEAR"
    assert watch.close() == "CLEAR"


def test_R14_reasoning_is_held_for_a_while_and_never_read() -> None:
    watch = StreamWatch(OFFERED)
    assert watch.feed(chunk(reasoning_content=CALL)) == "HOLD"
    assert watch.feed(chunk(content="Sunny.")) == "CLEAR"
    long = StreamWatch(OFFERED)
    assert long.feed(chunk(reasoning_content="x" * 3000)) == "CLEAR"


def test_every_choice_must_be_clear() -> None:
    watch = StreamWatch(OFFERED)
    assert watch.feed(chunk(0, content="<tool") + chunk(1, content="Hello")) == "HOLD"
    assert watch.feed(chunk(0, content="_call>")) == "LEAK"


@pytest.mark.parametrize("stream", [b'data: {"error": {"message": "no"}}\n\n', b"data: oops\n\n"])
def test_what_is_no_reply_is_released(stream: bytes) -> None:
    assert StreamWatch(OFFERED).feed(stream) == "CLEAR"


@pytest.mark.parametrize("stream", [b"", b"data: [DONE]\n\n", b": ping\n\n", chunk(role="assistant")])
def test_a_stream_that_ends_without_text_is_released(stream: bytes) -> None:
    watch = StreamWatch(OFFERED)
    assert watch.feed(stream) == "HOLD"
    assert watch.close() == "CLEAR"
