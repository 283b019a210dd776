"""First turns beside one or two tools, for the static stage: dialogues cut from larger lists, and public queries.

Many agents offer a single tool. A dialogue's first turn is cut only where its label stays right: where calls led to an
answer, it keeps all that were made, and where no tool of the list would do, no part of the list does either. Of the
public queries, see `convert.gate_public --few-tools`. All of it is deterministic, and for training only.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any, Final

from convert.gate_data import QUESTION_MARKS, Item, prefixes, read_dialogues

SIZES: Final = (1, 1, 1, 2)
OTHERS: Final = frozenset({"DECLINE", "ANSWER"})
"""Decisions that stay right whatever part of the tools is offered; an ASK needs its tool, and it is not known which."""


def called_for(items: Sequence[Item]) -> Iterator[tuple[Item, list[str]]]:
    """First turns that were served by calls, each once, with the names of all calls up to the answer.

    A dialogue that stops before its answer is left out: it may have needed more tools.
    """
    messages_of = {item["id"]: item["request"]["messages"] for item in items}
    gold_of = {item["id"]: item["gold"] for item in items}
    for item in prefixes(items):
        if item["gold"] != "ACT" or any(m["role"] in ("assistant", "tool") for m in item["request"]["messages"]):
            continue
        source, _, at = item["id"].rpartition("@")
        names: list[str] = []
        is_answered = gold_of[source] == "ANSWER"
        for message in messages_of[source][int(at) :]:
            if message["role"] == "assistant" and not message.get("tool_calls"):
                is_answered = not str(message.get("content") or "").strip().endswith(QUESTION_MARKS)
                break
            names += [call["function"]["name"] for call in message.get("tool_calls") or []]
        if is_answered:
            yield item, list(dict.fromkeys(names))


def cut(item: Item, kept: Sequence[str], size: int, rng: random.Random) -> Item | None:
    """The item beside ``size`` of its tools, ``kept`` among them; None where that is all of them or one is missing."""
    tools = [tool for tool in item["request"].get("tools") or [] if "function" in tool]
    own = [tool for tool in tools if tool["function"]["name"] in kept]
    rest = [tool for tool in tools if tool["function"]["name"] not in kept]
    if len(own) < len(set(kept)) or len(own) > size or len(tools) <= size:
        return None
    shown: list[Any] = own + rng.sample(rest, size - len(own))
    rng.shuffle(shown)
    return {**item, "id": f"{item['id']}/{size}", "request": {**item["request"], "tools": shown}, "kind": "few_tools"}


def cut_dialogues(items: Sequence[Item], seed: int = 0) -> list[Item]:
    """Cuts of ``items``: as many without a needed call as with one, of each author."""
    rng = random.Random(seed)
    found: dict[tuple[str, bool], list[Item]] = {}
    for item, names in called_for(items):
        one = cut(item, names, max(len(names), rng.choice(SIZES)), rng) if len(names) <= 2 else None
        if one is not None:
            found.setdefault((item["domain"], True), []).append(one)
    for item in items:
        if item["category"].startswith("first") and set(item["accept"]) <= OTHERS:
            one = cut(item, (), rng.choice(SIZES), rng)
            if one is not None:
                found.setdefault((item["domain"], False), []).append(one)
    chosen: list[Item] = []
    for domain in sorted({domain for domain, _ in found}):
        acts, others = found.get((domain, True), []), found.get((domain, False), [])
        chosen += acts + rng.sample(others, min(len(acts), len(others)))
    return chosen


def few_tools(items: Sequence[Item]) -> list[Item]:
    """Cuts of ``items`` and the public queries beside few tools, of the kind "few_tools"."""
    return [*cut_dialogues(items), *({**item, "kind": "few_tools"} for item in read_dialogues("gate_public_few"))]
