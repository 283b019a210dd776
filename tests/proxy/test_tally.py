"""Calls are counted as the bytes pass, however they are cut (field case S03)."""

from __future__ import annotations

import json

import pytest

from tests.fakes.upstream import completion, delta, text_stream, tool_call
from whetherman_edge.proxy.reply_watch import StreamWatch, judge_reply
from whetherman_edge.proxy.tally import BODY_BYTES_MAX, Tally

DONE = b"data: [DONE]\n\n"


def count(body: bytes, *, stream: bool, size: int) -> int:
    tally = Tally(stream=stream)
    for start in range(0, len(body), size):
        tally.feed(body[start : start + size])
    return tally.end()


ARGUMENTS = {"index": 0, "function": {"arguments": '{"a"'}}
FIRST = {**tool_call(index=0), "id": "a"}
STREAMS = {
    "words": (b"".join(text_stream('I said "tool_calls" to nobody')), 0),
    "one": (delta(tool_calls=[tool_call(index=0)]) + delta(tool_calls=[ARGUMENTS]) + DONE, 1),
    "parallel": (delta(tool_calls=[tool_call(index=0)]) + delta(tool_calls=[tool_call(index=1)]) + DONE, 2),
    "all index 0": (delta(tool_calls=[FIRST]) + delta(tool_calls=[{**FIRST, "id": "b"}]) + DONE, 2),
    "arguments as object": (delta(tool_calls=[{"index": 0, "function": {"name": "f", "arguments": {}}}]) + DONE, 1),
    "legacy": (delta(function_call={"name": "f"}) + delta(function_call={"arguments": "{}"}) + DONE, 1),
    "cut off before the blank line": (delta(tool_calls=[tool_call(index=0)]).rstrip(b"\n"), 1),
    "crlf and comments": (b": hi\r\n\r\n" + delta(tool_calls=[tool_call(index=0)]).replace(b"\n", b"\r\n"), 1),
    "empty": (b"", 0),
}


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_s03_streams(name, size):
    body, expected = STREAMS[name]
    assert count(body, stream=True, size=size) == expected


@pytest.mark.parametrize("size", [1, 100, 1 << 20])
def test_whole_replies(size):
    calls = [tool_call("a"), {**tool_call("b"), "id": "call_2"}]
    assert count(json.dumps(completion(None, tool_calls=calls)).encode(), stream=False, size=size) == 2
    assert count(json.dumps(completion("no")).encode(), stream=False, size=size) == 0
    assert count(b'{"tool_calls": broken', stream=False, size=size) == 0


def test_a_huge_reply_is_not_kept():
    tally = Tally(stream=False)
    for _ in range(3):
        tally.feed(b'"tool_calls"' + b"x" * BODY_BYTES_MAX)
    assert tally.end() == 0


def test_alternatives_are_watched_one_by_one():
    watch = StreamWatch(["search"])
    assert watch.feed(delta(index=0, content="A lease is")) == "CLEAR"
    watch = StreamWatch(["search"])
    assert watch.feed(delta(index=0, content="<tool")) == "HOLD"
    assert watch.feed(delta(index=1, content="A lease is a contract.")) == "HOLD"
    assert watch.feed(delta(index=0, content="_call>")) == "LEAK"


def test_what_is_no_reply_is_released():
    assert StreamWatch([]).feed(b'data: {"error": {"message": "out of memory"}}\n\n') == "CLEAR"
    assert StreamWatch([]).close() == "CLEAR"
    for body in (b"", b"<html>", b'{"error": "x"}', b"[]", b'{"choices": null}'):
        assert judge_reply(body, ["search"]) == "CLEAR"
