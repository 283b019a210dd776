"""Chat bodies as an agent sends them: a system text, a history with tool turns, and tools with schemas."""

from __future__ import annotations

import json
from typing import Any

_TOPICS = (
    "weather",
    "calendar",
    "mail",
    "file",
    "order",
    "invoice",
    "ticket",
    "contact",
    "route",
    "note",
    "photo",
    "song",
)
_ACTIONS = ("search", "read", "create", "update", "list", "send", "delete", "export")
_QUESTIONS = (
    "What is the difference between a lease and a licence?",
    "Could you look up the latest {topic} for order {n} and tell me what changed?",
    "Thanks, that helps. Why did you pick the second one of the {n} results?",
    "Please {action} the {topic} from last Tuesday and keep the old one.",
    "How would you explain compound interest to a child of {n}?",
)


# Users write in other scripts, and with accents, emoji and dashes.
_OTHERS = (
    "今天北京的天气怎么样？请帮我查一下明天的航班。",
    "日本語のテキスト、カタカナと ひらがな",
    "안녕하세요, 오늘 서울 날씨를 알려 주세요",
    "ما هو الطقس في القاهرة اليوم؟",
    "आज दिल्ली में मौसम कैसा है?",
    "วันนี้อากาศที่กรุงเทพเป็นอย่างไร",
    "Quelle est la météo à Zürich ? L’été coûte cher",
    "👩‍👩‍👧‍👦 “quoted” — a dash, ✌🏽 🇳🇴",
)


def tool(number: int, family: int = 0) -> dict[str, Any]:
    """One function tool; another ``family`` gives other bytes, so a tool the gate has never seen."""
    topic, action = _TOPICS[number % len(_TOPICS)], _ACTIONS[(number // len(_TOPICS) + number) % len(_ACTIONS)]
    suffix = f"_{family}" if family else ""
    return {
        "type": "function",
        "function": {
            "name": f"{action}_{topic}{suffix}",
            "description": f"{action.capitalize()} the user's {topic} items by free text, date range or identifier.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": f"What to look for among the {topic} items"},
                    "limit": {"type": "integer", "minimum": 1, "maximum": 100},
                    "since": {"type": "string", "format": "date", "description": "First day, inclusive"},
                },
                "required": ["query"],
            },
        },
    }


def chat(
    number: int, *, n_tools: int = 8, n_turns: int = 20, family: int = 0, stream: bool = False, model: str = "bench"
) -> dict[str, Any]:
    """One request: ``n_turns`` earlier messages, then a user message that differs with ``number``."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You are a careful assistant. " * 12}]
    for turn in range(n_turns // 2):
        messages.append(
            {"role": "user", "content": f"Turn {turn}: {_question(turn)} " + "Some more context here. " * 4}
        )
        if turn % 3 == 2:
            arguments = json.dumps({"query": f"item {turn}", "limit": 5})
            name = tool(turn % max(n_tools, 1), family)["function"]["name"]
            call = {"id": f"call_{turn}", "type": "function", "function": {"name": name, "arguments": arguments}}
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": f"call_{turn}", "content": '{"items":[1,2,3]}' * 5})
        else:
            messages.append({"role": "assistant", "content": "Here is what I found about that. " * 8})
    messages.append({"role": "user", "content": _question(number) + f" (case {number})"})
    body: dict[str, Any] = {"model": model, "messages": messages}
    if n_tools:
        body["tools"] = [tool(index, family) for index in range(n_tools)]
    if stream:
        body["stream"] = True
    return body


def encoded(body: dict[str, Any]) -> str:
    """As clients write JSON."""
    return json.dumps(body, separators=(",", ":"))


def mixed(count: int) -> list[str]:
    """Bodies of all sorts for a soak: streams, other tool sets, no tools, long and short histories, other scripts."""
    bodies = []
    for number in range(count):
        n_tools, n_turns = (8, 0, 3, 20, 1)[number % 5], (20, 2, 0, 8)[number % 4]
        body = chat(number, n_tools=n_tools, n_turns=n_turns, family=number % 150, stream=number % 3 == 0)
        if number % 7 == 0:
            body["messages"][-1]["content"] += " " + _OTHERS[number // 7 % len(_OTHERS)]
        bodies.append(encoded(body))
    return bodies


def _question(number: int) -> str:
    text = _QUESTIONS[number % len(_QUESTIONS)]
    return text.format(topic=_TOPICS[number % len(_TOPICS)], action=_ACTIONS[number % len(_ACTIONS)], n=3 + number % 40)
