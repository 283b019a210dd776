"""Short ways to write the dialogues that gate tests read."""

from __future__ import annotations

import json
from typing import Any

from whetherman_edge.dialects.chat import ChatView
from whetherman_edge.dialects.openai_chat import view
from whetherman_edge.dialects.tool_cache import ToolCache
from whetherman_edge.gate.verdict import LABELS, Label, Verdict


def tool(name: str, description: str = "", required: tuple[str, ...] = (), **types: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in types.items()} | {key: {"type": "string"} for key in required}
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


WEATHER = tool("get_weather", "Current weather for a city.", city="string")


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def calls(name: str, arguments: Any = None, call_id: str = "c1") -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments or {})}
    call = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def result(text: str, call_id: str = "c1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def body_of(*messages: dict[str, Any], tools: list[dict[str, Any]] | None = None, **fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": list(messages), "tools": tools or [WEATHER]} | fields).encode()


def chat_of(*messages: dict[str, Any], tools: list[dict[str, Any]] | None = None, **fields: Any) -> ChatView:
    return view(body_of(*messages, tools=tools, **fields), ToolCache())


def verdict_of(label: Label, probability: float = 0.94, fused: tuple[float, ...] = ()) -> Verdict:
    rest = (1.0 - probability) / 3
    p = [probability if other == label else rest for other in LABELS]
    return Verdict(probabilities=(p[0], p[1], p[2], p[3]), engine="static", fused=fused)
