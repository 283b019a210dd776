"""The chat request that most wire tests send, and what they read from the answer."""

from __future__ import annotations

import json

from tests.fakes.client import Answer, once
from tests.fakes.upstream import tool_call

SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the web.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "What is a lease?"}], "tools": [SEARCH]}
# Spacing, escapes, numbers and key order that no JSON library writes back as they were.
ODD = (
    b'{ "model":"m",\t"messages" : [{"role":"user","content":"h\\u00e9\\ud83d\\ude00"} ],\r\n "unknown":{"z":1e400,'
    b'"a":[1.0,10000000000000000000001]},"tools":[ {"type":"function","function":{"name":"search"}} ] }'
)

HEADERS = ("decision", "applied", "reason", "confidence", "engine", "ms")


def said(answer: Answer) -> tuple[str | None, str | None, str | None]:
    return tuple(answer.header(f"x-whetherman-{name}") for name in ("decision", "applied", "reason"))  # type: ignore[return-value]


def body_of(value: object) -> bytes:
    return json.dumps(value).encode()


async def metric(url: str, name: str) -> float:
    text = (await once(url, "GET", "/metrics")).body.decode()
    lines = [line for line in text.splitlines() if line.startswith((f"whetherman_{name} ", f"whetherman_{name}{{"))]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def looping(n: int) -> dict:
    turns: list = [{"role": "user", "content": "find the price"}]
    for number in range(n):
        call = {**tool_call(arguments='{"query": "price"}'), "id": f"c{number}"}
        turns.append({"role": "assistant", "content": None, "tool_calls": [call]})
        turns.append({"role": "tool", "tool_call_id": f"c{number}", "content": "no results"})
    return {**CHAT, "messages": turns}
