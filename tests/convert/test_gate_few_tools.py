"""First turns cut to few tools: the label stays right."""

from __future__ import annotations

import json
from typing import Any

import pytest

from convert.gate_data import Item, read_dialogues
from convert.gate_few_tools import cut_dialogues

NAMES = ("find_order", "cancel_order", "send_mail", "list_events")
TOOLS = [{"type": "function", "function": {"name": name, "description": name}} for name in NAMES]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def calls(*names: str) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": "{}"}} for name in names]}


def dialogue(name: str, messages: list[dict[str, Any]], gold: str, *, category: str = "first", **other: Any) -> Item:
    request = {"model": "agent", "messages": messages, "tools": other.get("tools", TOOLS)}
    return {
        "id": name,
        "request": request,
        "gold": gold,
        "accept": other.get("accept", [gold]),
        "category": category,
        "domain": other.get("domain", "shop"),
        "set": name,
        "kind": "dialogue",
    }


def names_of(item: Item) -> set[str]:
    return {tool["function"]["name"] for tool in item["request"]["tools"]}


def later(n: int, *called: str) -> Item:
    messages = [user(f"where is order {n}"), calls(*called), {"role": "tool", "content": "{}"}]
    return dialogue(f"later-{n}", messages, "ANSWER", category="multi")


def test_a_needed_call_keeps_what_was_called_and_the_rest_is_as_many() -> None:
    chats = [user(f"what is {n} times 3") for n in range(40)]
    items = [later(n, "find_order") for n in range(8)] + [
        dialogue(f"chat-{n}", [chat], "ANSWER") for n, chat in enumerate(chats)
    ]
    cuts = cut_dialogues(items)
    acts = [one for one in cuts if one["gold"] == "ACT"]
    assert len(acts) == 8
    assert len(cuts) == 16
    assert all("find_order" in names_of(one) for one in acts)
    assert {len(one["request"]["tools"]) for one in cuts} == {1, 2}
    assert {one["kind"] for one in cuts} == {"few_tools"}
    assert all(one["request"]["messages"][-1]["role"] == "user" for one in cuts)
    assert json.dumps(cuts) == json.dumps(cut_dialogues(items))


def test_two_calls_keep_both_and_three_are_not_cut() -> None:
    cuts = cut_dialogues([later(1, "find_order", "send_mail"), later(2, *NAMES[:3])])
    assert [names_of(one) for one in cuts] == [{"find_order", "send_mail"}]


def test_a_turn_keeps_the_tools_of_all_hops_and_one_without_an_answer_is_not_cut() -> None:
    hops = [user("cancel my last order"), calls("find_order"), {"role": "tool", "content": "{}"}]
    done = [*hops, calls("cancel_order"), {"role": "tool", "content": "{}"}, {"role": "assistant", "content": "Done."}]
    whole = dialogue("whole", [*done, user("thanks")], "ANSWER", category="multi")
    assert [names_of(one) for one in cut_dialogues([whole])] == [{"find_order", "cancel_order"}]
    stopped = dialogue("stopped", hops, "ACT", category="multi")
    asked = dialogue("asked", [*hops, {"role": "assistant", "content": "Which one?"}, user("4")], "ACT")
    assert cut_dialogues([stopped, asked]) == []


@pytest.mark.parametrize(
    "left_alone",
    [
        dialogue("ask", [user("cancel it")], "ASK"),
        dialogue("either", [user("any news")], "ANSWER", accept=["ANSWER", "ACT"]),
        dialogue("unknown", [user("where is order 4")], "ACT"),
        dialogue("alone", [user("hi")], "ANSWER", tools=TOOLS[:1]),
    ],
)
def test_what_a_cut_could_change_is_left_alone(left_alone: Item) -> None:
    assert all(one["gold"] == "ACT" for one in cut_dialogues([later(1, "find_order"), left_alone]))


def test_public_queries_stand_as_often_beside_their_tool_as_beside_others() -> None:
    items = read_dialogues("gate_public_few")
    by_set: dict[str, list[Item]] = {}
    for one in items:
        by_set.setdefault(one["set"], []).append(one)
    for pair in by_set.values():
        right, other = sorted(pair, key=lambda one: one["gold"])
        assert (right["gold"], other["gold"]) == ("ACT", "DECLINE")
        assert len(names_of(right)) == len(names_of(other)) <= 2
        assert right["request"]["messages"] == other["request"]["messages"]
    assert len(by_set) > 200
