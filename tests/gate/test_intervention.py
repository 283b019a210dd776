"""From a decision to the bytes that go upstream, for every kind of upstream."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.gate.chats import WEATHER, body_of, calls, result, says, system, tool, user, verdict_of
from whetherman_edge.dialects.chat import Intervention
from whetherman_edge.dialects.openai_chat import view
from whetherman_edge.dialects.registry import apply
from whetherman_edge.dialects.tool_cache import ToolCache
from whetherman_edge.errors import ViewError
from whetherman_edge.gate.intervention import (
    Capability,
    InterventionSettings,
    plan,
    plan_client_none,
    plan_prune,
    without_prefill,
)
from whetherman_edge.gate.policy import PolicySettings, SessionState, decide, unscored
from whetherman_edge.gate.verdict import Decision, Label
from whetherman_edge.gate.wordings import FIRST_STEP, LATER_STEP, LOOP, PREFIXES, wordings
from whetherman_edge.proxy.capability import CAPABILITIES, capability_of

AUTO = InterventionSettings()
SHELL = tool("shell", "Run a shell command.", required=("command",))
FIRST = [system("You are brief."), user("What is a monad?")]
LATER = [*FIRST, calls("get_weather", {"city": "Oslo"}), result("rain, 7 C")]
NON_ACT: tuple[Label, ...] = ("ANSWER", "ASK", "DECLINE")


def decision_of(label: Label, reason: str = "scored") -> Decision:
    return Decision(
        label=label,
        verdict=label,
        probabilities=(0.1, 0.3, 0.3, 0.3),
        p_need=0.1,
        confidence=0.3,
        reason=reason,
        engine="static",
    )


def planned(
    body: bytes,
    label: Label = "ANSWER",
    kind: str = "unknown",
    settings: InterventionSettings = AUTO,
    reason: str = "scored",
    session: SessionState = SessionState(),  # noqa: B008
) -> Intervention | None:
    return plan(decision_of(label, reason), view(body, ToolCache()), capability_of(kind), settings, session)


def sent(body: bytes, *args: Any, **fields: Any) -> dict[str, Any]:
    """What goes upstream, decoded; the untouched messages are checked to be the same bytes."""
    intervention = planned(body, *args, **fields)
    assert intervention is not None
    edited = apply(body, view(body, ToolCache()), intervention)
    decoded: dict[str, Any] = json.loads(edited)
    return decoded


def mode_of(*args: Any, **fields: Any) -> str | None:
    intervention = planned(*args, **fields)
    return intervention.mode if intervention is not None else None


@pytest.mark.parametrize(
    ("kind", "first", "later"),
    [
        ("openai", "none", "none"),
        ("vllm", "none", "none"),
        ("anthropic", "none", "none"),
        ("ollama", "strip", "note"),
        ("llamacpp", "strip", "note"),
        ("lmstudio", "strip", "note"),
        ("unknown", "note", "note"),
        ("never heard of", "note", "note"),
    ],
)
def test_R17_one_table_says_how_each_kind_is_withheld(kind: str, first: str, later: str) -> None:
    for label in NON_ACT:
        assert mode_of(body_of(*FIRST), label, kind) == first
        assert mode_of(body_of(*LATER), label, kind) == later


@pytest.mark.parametrize("kind", list(CAPABILITIES))
@pytest.mark.parametrize("turns", [FIRST, LATER], ids=["first", "later"])
def test_R17_wire_bodies(kind: str, turns: list[dict[str, Any]]) -> None:
    body = body_of(*turns, tool_choice="auto", parallel_tool_calls=False, temperature=0.5)
    for label in NON_ACT:
        edited = sent(body, label, kind)
        mode = mode_of(body, label, kind)
        assert edited["temperature"] == 0.5
        assert edited.get("tools") != []
        if mode == "strip":
            assert not edited.keys() & {"tools", "tool_choice", "parallel_tool_calls"}
        elif mode == "none":
            assert (edited["tools"], edited["tool_choice"]) == ([WEATHER], "none")
            assert "parallel_tool_calls" not in edited
        else:
            assert (edited["tools"], edited["tool_choice"], edited["parallel_tool_calls"]) == ([WEATHER], "auto", False)
        last = edited["messages"][-1]["content"]
        words = (LATER_STEP if turns is LATER else FIRST_STEP)[label, "reason"]
        if mode == "none" and kind in ("openai", "anthropic") and label == "ANSWER":
            assert edited["messages"] == turns
        else:
            assert last == f"{turns[-1]['content']}\n\n{words}"
            assert edited["messages"][:-1] == turns[:-1]


def test_R02_forced_answer_by_deletion() -> None:
    lookup = tool("weather_lookup", "Weather.", city="string")
    body = body_of(user("What is 2+2?"), tools=[lookup], tool_choice="auto", parallel_tool_calls=False)
    chat = view(body, ToolCache())
    decision = decide(verdict_of("ACT"), chat, None, SessionState(), PolicySettings(force="ANSWER"))
    intervention = plan(decision, chat, capability_of("ollama"), InterventionSettings(mode="strip"))
    assert intervention is not None
    edited = json.loads(apply(body, chat, intervention))
    assert not edited.keys() & {"tools", "tool_choice", "parallel_tool_calls"}
    assert edited["messages"][0]["content"].startswith("What is 2+2?")


def test_R03_parallel_tool_calls_goes_with_the_choice() -> None:
    body = body_of(*FIRST, tool_choice="auto", parallel_tool_calls=True)
    edited = sent(body, "ANSWER", "anthropic")
    assert edited["tool_choice"] == "none"
    assert "parallel_tool_calls" not in edited


def test_R04_an_empty_array_is_never_written() -> None:
    for kind in CAPABILITIES:
        assert sent(body_of(*FIRST), "ANSWER", kind).get("tools", [1])
    chat = view(body_of(*FIRST), ToolCache())
    with pytest.raises(ViewError):
        apply(body_of(*FIRST), chat, Intervention(mode="prune", drop_tools=frozenset(t.key for t in chat.tools)))


def test_R05_none_is_never_relied_on_where_it_is_ignored() -> None:
    for settings in (AUTO, InterventionSettings(mode="none")):
        for turns in (FIRST, LATER):
            assert mode_of(body_of(*turns), "ANSWER", "ollama", settings) in ("strip", "note")


def test_R05_the_clients_own_none_is_carried_out_by_deletion() -> None:
    ollama = capability_of("ollama")
    body = body_of(*LATER, tool_choice="none")
    chat = view(body, ToolCache())
    intervention = plan_client_none(chat, ollama)
    assert intervention is not None
    edited = json.loads(apply(body, chat, intervention))
    assert not edited.keys() & {"tools", "tool_choice"}
    assert edited["messages"] == LATER  # the client asked for no more than that
    assert plan_client_none(chat, capability_of("openai")) is None
    assert plan_client_none(view(body_of(*LATER), ToolCache()), ollama) is None
    careful = Capability("x", ignores_tool_choice=True)
    assert plan_client_none(chat, careful) is None
    assert plan_client_none(view(body_of(*FIRST, tool_choice="none"), ToolCache()), careful) is not None


def test_tools_are_never_stripped_from_a_history_that_needs_them() -> None:
    strip = InterventionSettings(mode="strip")
    assert mode_of(body_of(*LATER), "ANSWER", "openai", strip) == "none"
    assert mode_of(body_of(*LATER), "ANSWER", "unknown", strip) == "note"
    assert mode_of(body_of(*LATER), "ANSWER", "ollama", strip) == "strip"
    assert mode_of(body_of(*FIRST), "ANSWER", "openai", strip) == "strip"


def test_R07_hosted_tools_are_never_taken_away() -> None:
    body = body_of(*FIRST, tools=[WEATHER, {"type": "web_search"}])
    for kind in CAPABILITIES:
        assert mode_of(body, "ANSWER", kind) == "note"
        assert sent(body, "ANSWER", kind)["tools"] == [WEATHER, {"type": "web_search"}]


def test_R13_prefill_only_where_it_is_known_to_work() -> None:
    prefill = InterventionSettings(mode="prefill")
    body = body_of(*FIRST)
    assert sent(body, "ASK", "llamacpp", prefill)["messages"][2:] == [says(PREFIXES["ASK"])]
    assert "continue_final_message" not in sent(body, "ASK", "llamacpp", prefill)
    assert sent(body, "ASK", "vllm", prefill)["continue_final_message"] is True
    for kind in ("openai", "ollama", "lmstudio", "anthropic", "unknown"):
        assert mode_of(body, "ANSWER", kind, prefill) != "prefill"
    for thinking in (
        body_of(*FIRST, model="qwen3:4b"),
        body_of(*FIRST, model="DeepSeek-R1-Distill"),
        body_of(*FIRST, reasoning_effort="low"),
        body_of(*FIRST, response_format={"type": "json_object"}),
    ):
        assert mode_of(thinking, "ANSWER", "llamacpp", prefill) != "prefill"
    refused = without_prefill(capability_of("llamacpp"))
    chat = view(body, ToolCache())
    again = plan(decision_of("ANSWER"), chat, refused, prefill)
    assert again is not None
    assert again.mode == "strip"


def test_R14_everything_else_survives_byte_for_byte() -> None:
    body = (
        b'{"model":"m", "x":{"a":1.0}, "messages":[{"role":"user","content":"q\\u00e9"},'
        b'{"role":"assistant","reasoning_content":"hm","tool_calls":[{"id":"c","function":{"name":"f","arguments":""}}]},'
        b'{"role":"tool","tool_call_id":"c","content":"r"}],"tools":[{"type":"function","function":{"name":"f"}}]}'
    )
    intervention = planned(body)
    assert intervention is not None
    edited = apply(body, view(body, ToolCache()), intervention)
    assert edited.replace(b"\\n\\n" + LATER_STEP["ANSWER", "reason"].encode(), b"") == body


def test_R15_an_answer_that_must_be_json_gets_no_sentence() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
    for turns in (FIRST, LATER):
        body = body_of(*turns, response_format=schema)
        for kind in ("openai", "ollama", "llamacpp", "vllm"):
            edited = sent(body, "ANSWER", kind)
            assert edited["messages"] == turns
            assert edited.get("tool_choice") == "none" or "tools" not in edited
        assert planned(body, "ANSWER", "unknown") is None  # nothing but a note would work there: relay


def test_the_note_stands_at_the_end_of_the_last_user_turn_or_result() -> None:
    body = body_of(*LATER)
    assert sent(body)["messages"][-1]["content"] == f"rain, 7 C\n\n{LATER_STEP['ANSWER', 'reason']}"
    in_user = sent(body, settings=InterventionSettings(note_position="user"))
    assert in_user["messages"][1]["content"].startswith("What is a monad?\n\n")
    assert in_user["messages"][-1]["content"] == "rain, 7 C"
    parts = body_of(
        {"role": "user", "content": [{"type": "text", "text": "q"}, {"type": "image_url", "image_url": {}}]}
    )
    assert sent(parts)["messages"][0]["content"][0]["text"] == f"q\n\n{FIRST_STEP['ANSWER', 'reason']}"


def test_R08_a_result_without_text_passes_the_note_to_the_user_turn() -> None:
    body = body_of(*LATER[:3], {"role": "tool", "tool_call_id": "c1", "content": None})
    edited = sent(body)
    assert edited["messages"][3]["content"] is None
    assert edited["messages"][1]["content"].endswith(LATER_STEP["ANSWER", "reason"])
    result_alone = body_of(result("rain, 7 C"))
    assert sent(result_alone)["messages"][0]["content"].startswith("rain, 7 C\n\n")


@pytest.mark.parametrize("turn", [{"content": None}, {}, {"content": {}}, {"content": []}])
def test_R09_a_user_turn_without_text_is_withheld_for_without_a_sentence(turn: dict[str, Any]) -> None:
    body = body_of({"role": "user", **turn})
    ways = {kind: mode_of(body, kind=kind) for kind in ("openai", "vllm", "ollama", "llamacpp", "unknown")}
    assert ways == {"openai": "none", "vllm": "none", "ollama": "strip", "llamacpp": "strip", "unknown": "strip"}
    called = body_of({"role": "user", **turn}, calls("get_weather", {}), {"role": "tool", "content": "rain"})
    assert mode_of(called) == "note"
    assert sent(body, kind="llamacpp")["messages"] == json.loads(body)["messages"]
    assert sent(body, kind="vllm")["messages"] == json.loads(body)["messages"]
    assert planned(body, "ASK", "llamacpp") is None
    assert planned(body, "DECLINE", "vllm") is None


def test_a_turn_is_never_steered_twice() -> None:
    body = body_of(*FIRST)
    intervention = planned(body)
    assert intervention is not None
    once = apply(body, view(body, ToolCache()), intervention)
    assert apply(once, view(once, ToolCache()), intervention) is once


def test_wordings_are_constant_and_complete() -> None:
    assert wordings() == ("reason", "direct")
    for label in NON_ACT:
        for wording in wordings():
            words = FIRST_STEP.get((label, wording), FIRST_STEP[label, "reason"])
            settings = InterventionSettings(wording=wording)
            assert sent(body_of(*FIRST), label, settings=settings)["messages"][1]["content"].endswith(words)
    unknown = InterventionSettings(wording="poetic")
    assert sent(body_of(*FIRST), settings=unknown)["messages"][1]["content"].endswith(FIRST_STEP["ANSWER", "reason"])
    looping = sent(body_of(*LATER), kind="openai", reason="loop_guard")
    assert looping["messages"][-1]["content"].endswith(LOOP)


def test_no_sentence_names_what_is_not_wanted() -> None:
    """A small model that reads "without calling a tool" calls one (measured with Qwen2.5-Coder 0.5B)."""
    for words in (*FIRST_STEP.values(), *LATER_STEP.values(), LOOP, *PREFIXES.values()):
        opening = words.removeprefix("[").split(" ", 1)[0]
        assert not re.search(r"\b(call|calling|function|do not|don't)\b", words, re.IGNORECASE), words
        assert words in PREFIXES.values() or opening in ("Reply", "Write"), words


def test_C01_the_tools_block_stays_after_turn_one_on_local_servers() -> None:
    """ACT, ANSWER, ACT with 30 tools: everything ahead of the last user turn is the same bytes each time."""
    tools = [tool(f"t{i}", "Does a thing.") for i in range(30)]
    turns = [system("s"), user("one"), calls("t1"), result("r"), says("done"), user("two")]
    body = body_of(*turns, tools=tools)
    for kind in ("ollama", "llamacpp", "lmstudio", "unknown"):
        intervention = planned(body, "ANSWER", kind)
        assert intervention is not None
        assert intervention.mode == "note"
        edited = apply(body, view(body, ToolCache()), intervention)
        before = body.index(b'"two"')
        assert edited[: before + 4] == body[: before + 4]
        assert edited[edited.index(b'], "tools"') :] == body[body.index(b'], "tools"') :]


def test_C01_a_dialogue_that_began_stripped_stays_so_until_it_needs_tools() -> None:
    body = body_of(user("one"), says("an answer"), user("two"))
    assert mode_of(body, "ANSWER", "ollama") == "note"
    assert mode_of(body, "ANSWER", "ollama", session=SessionState(sent_stripped=True)) == "strip"


def test_D13_a_loop_that_goes_on_after_the_note_loses_its_tools() -> None:
    step = [calls("get_weather", {"city": "Oslo"}), result("rain")]
    twice, thrice = body_of(*FIRST, *step, *step), body_of(*FIRST, *step, *step, *step)
    for kind in ("ollama", "llamacpp", "lmstudio"):
        assert mode_of(twice, "ANSWER", kind, reason="loop_guard") == "note"
        assert mode_of(thrice, "ANSWER", kind, reason="loop_guard") == "strip"
        assert mode_of(thrice, "ANSWER", kind) == "note"  # the same dialogue, decided by score
    assert mode_of(thrice, "ANSWER", "unknown", reason="loop_guard") == "note"  # not known to accept it


def test_an_agent_that_ignores_notes_loses_its_tools_where_that_is_safe() -> None:
    ignoring = SessionState(notes_ignored=True)
    assert mode_of(body_of(*LATER), "ANSWER", "llamacpp", session=ignoring) == "strip"
    assert mode_of(body_of(*LATER), "ANSWER", "unknown", session=ignoring) == "note"
    asked = InterventionSettings(mode="note")
    assert mode_of(body_of(*LATER), "ANSWER", "llamacpp", asked, session=ignoring) == "note"


def test_C02_the_same_request_is_edited_to_the_same_bytes() -> None:
    body = body_of(*LATER)
    chat = view(body, ToolCache())
    results = set()
    for kind in CAPABILITIES:
        first, second = planned(body, "ANSWER", kind), planned(body, "ANSWER", kind)
        assert first is not None
        assert second is not None
        assert apply(body, chat, first) == apply(body, chat, second)
        results.add(apply(body, chat, first))
    assert len(results) <= 3


def test_act_has_no_intervention() -> None:
    chat = view(body_of(*FIRST), ToolCache())
    assert plan(unscored("bypass:no_tools"), chat, capability_of("openai"), AUTO) is None


def test_R19_legacy_functions_are_withheld_in_their_own_words() -> None:
    legacy = json.dumps({"messages": FIRST, "functions": [WEATHER["function"]], "function_call": "auto"}).encode()
    assert sent(legacy, "ANSWER", "openai")["function_call"] == "none"
    assert "tool_choice" not in sent(legacy, "ANSWER", "openai")
    assert not sent(legacy, "ANSWER", "ollama").keys() & {"functions", "function_call"}


def test_O14_pinned_tools_survive_every_trim() -> None:
    keep = InterventionSettings(mode="strip", always_keep=("memory_*",))
    body = body_of(*FIRST, tools=[WEATHER, tool("memory_read")])
    assert mode_of(body, "ANSWER", "ollama", keep) == "note"
    chat = view(body, ToolCache())
    pruned = plan_prune(chat, {}, InterventionSettings(always_keep=("memory_*",), prune_keep_min=0))
    assert pruned is not None
    assert [t["function"]["name"] for t in json.loads(apply(body, chat, pruned))["tools"]] == ["memory_read"]


def test_prune_keeps_original_objects_in_order() -> None:
    tools: list[dict[str, Any]] = [tool(f"t{i}") | {"strict": True} for i in range(20)]
    tools.insert(3, {"type": "web_search"})
    history = [user("use t7 please"), calls("t9"), result("r"), says("ok"), user("more")]
    body = json.dumps({"messages": history, "tools": tools}, indent=1).encode()
    chat = view(body, ToolCache())
    probabilities = {f"t{i}": 0.5 if i in (1, 2, 4, 5, 6, 8) else 0.001 for i in range(20)}
    pruned = plan_prune(chat, probabilities, InterventionSettings(prune_threshold=0.2, prune_keep_min=5))
    assert pruned is not None
    edited = json.loads(apply(body, chat, pruned))
    # C09: all six above the threshold stay although five are the least; called tools stay; others are no function tools
    kept = [1, 2, 4, 5, 6, 8, 9]
    assert edited["tools"] == [
        t for t in tools if t.get("type") == "web_search" or int(t["function"]["name"][1:]) in kept
    ]
    assert plan_prune(chat, dict.fromkeys(probabilities, 1.0), InterventionSettings()) is None  # C10: nothing to trim


def test_C08_the_order_of_the_list_does_not_matter() -> None:
    tools = [tool(f"t{i}") for i in range(12)]
    kept = set()
    for shuffled in (tools, tools[::-1], tools[5:] + tools[:5]):
        chat = view(body_of(user("x"), tools=shuffled), ToolCache())
        pruned = plan_prune(chat, {"t3": 0.9}, InterventionSettings(prune_keep_min=4))
        assert pruned is not None
        kept.add(frozenset(t.name for t in chat.tools if t.key not in pruned.drop_tools))
    assert len(kept) == 1


def test_D09_a_named_tool_survives_a_prune() -> None:
    tools = [tool(f"tool_{i}") for i in range(60)]
    chat = view(body_of(user("run tool_42 for job 7"), tools=tools), ToolCache())
    pruned = plan_prune(chat, {}, InterventionSettings(prune_keep_min=5))
    assert pruned is not None
    assert {t.key for t in chat.tools if t.name == "tool_42"}.isdisjoint(pruned.drop_tools)


def test_a_body_that_cannot_be_edited_is_refused() -> None:
    good = body_of(*FIRST)
    chat = view(good, ToolCache())
    intervention = planned(good)
    assert intervention is not None
    with pytest.raises(ViewError, match="twice"):
        apply(good[:-1] + b', "model": "n"}', chat, intervention)
