"""Loops are found by a rule on calls and results since the last user turn."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gate.chats import calls, chat_of, result, says, tool, user
from whetherman_edge.dialects.registry import OPENAI_RESPONSES
from whetherman_edge.dialects.tool_cache import ToolCache
from whetherman_edge.gate import loop_guard
from whetherman_edge.gate.loop_guard import inspect

SEARCH = tool("search", "Search the web.", query="string")
Turns = list[dict[str, Any]]


def step(arguments: dict[str, Any], text: str, name: str = "search", call_id: str = "c1") -> Turns:
    return [calls(name, arguments, call_id), result(text, call_id)]


def test_D13_four_identical_calls_with_identical_results_are_a_loop() -> None:
    chat = chat_of(user("find it"), *step({"query": "x"}, "nothing") * 4, tools=[SEARCH])
    report = inspect(chat)
    assert (report.repeats, report.looping, report.tool) == (4, True, "search")


def test_twice_is_enough_and_canonical_arguments_are_compared() -> None:
    turns = [*step({"query": "x", "n": 1}, "nothing"), *step({"n": 1, "query": "x"}, "nothing", call_id="c2")]
    assert inspect(chat_of(user("find it"), *turns, tools=[SEARCH])).looping


def test_D02_one_call_with_its_result_is_no_loop() -> None:
    assert not inspect(chat_of(user("Hello there"), *step({}, "Hello! I can…", "greet"), tools=[tool("greet")])).looping


@pytest.mark.parametrize(
    "turns",
    [
        step({"query": "x"}, "a") + step({"query": "y"}, "a"),  # other arguments
        step({"query": "x"}, "10 %") + step({"query": "x"}, "20 %"),  # polling
        step({"query": "x"}, "10 %") + step({"query": "x"}, "20 %") * 2,  # polling that stalls once
        step({"query": "x"}, "a") + step({"edit": 1}, "ok", "edit") + step({"query": "x"}, "a"),  # test, edit, test
        step({"query": "x"}, "a") * 2 + step({"query": "z"}, "new"),  # it has moved on
        [*step({"query": "x"}, "a"), *step({"query": "x"}, "a"), user("try again")],  # the user spoke
        [*step({"query": "x"}, "a"), user("again"), *step({"query": "x"}, "a")],
        [*step({"query": "x"}, "a"), *step({"query": "x"}, "a"), says("I found nothing.")],
    ],
)
def test_what_brings_something_new_is_no_loop(turns: Turns) -> None:
    assert not inspect(chat_of(user("go"), *turns, tools=[SEARCH, tool("edit")])).looping


def test_two_calls_in_turn_are_a_loop_when_neither_brings_anything_new() -> None:
    pair = step({"query": "x"}, "a") + step({"query": "y"}, "b")
    assert not inspect(chat_of(user("go"), *pair, tools=[SEARCH])).looping
    assert inspect(chat_of(user("go"), *pair, *pair, tools=[SEARCH])).looping


def test_a_call_that_steps_the_world_on_is_given_one_more_try() -> None:
    louder = tool("volume_up", "Raise the volume by one notch.")
    twice = chat_of(user("two notches louder"), *step({}, "ok", "volume_up") * 2, tools=[louder])
    assert (inspect(twice).repeats, inspect(twice).looping) == (2, False)
    assert inspect(chat_of(user("louder"), *step({}, "ok", "volume_up") * 3, tools=[louder])).looping


MAIL = tool("send_email", "Send an e-mail. It goes out at once.", ("to", "body"))


def sent(*results: str, **arguments: str) -> Turns:
    return [turn for text in results for turn in step({"to": "a@b.example", **arguments}, text, "send_email")]


def test_the_same_mail_sent_again_and_again_is_a_loop_though_its_id_changes() -> None:
    ids = [f"sent, message id out-{number}" for number in range(1, 5)]
    looping = [inspect(chat_of(user("mail it"), *sent(*ids[:n]), tools=[MAIL])).looping for n in (1, 2, 3, 4)]
    assert looping == [False, False, True, True]
    assert inspect(chat_of(user("mail it"), *sent("sent", "sent"), tools=[MAIL])).looping


def test_results_of_writes_that_were_made_once_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_guard, "_alike", None)
    edits = [turn for n in range(3) for turn in sent("12 lines\n" * 100, body=str(n))]
    assert not inspect(chat_of(user("mail them"), *edits, tools=[MAIL])).looping


def test_other_mails_and_other_reports_of_a_write_are_no_loop() -> None:
    others = [turn for n in range(3) for turn in sent(f"sent, id {n}", body=str(n))]
    assert not inspect(chat_of(user("mail them"), *others, tools=[MAIL])).looping
    tried = sent("busy", "refused", "sent, id 1")
    assert not inspect(chat_of(user("mail it"), *tried, tools=[MAIL])).looping
    read = [turn for n in range(3) for turn in step({"query": "x"}, f"{n} %")]
    assert not inspect(chat_of(user("wait"), *read, tools=[SEARCH])).looping, "reading may poll"


@pytest.mark.parametrize("name", ["press_key", "take_screenshot", "send_keys"])
def test_results_with_pictures_are_not_the_same_because_their_words_are(name: str) -> None:
    def shown(n: int) -> dict[str, Any]:
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{n}"}}
        return {**result("done"), "content": [{"type": "text", "text": "done"}, image]}

    turns = [turn for n in range(5) for turn in (calls(name, {"key": "Down"}), shown(n))]
    assert inspect(chat_of(user("scroll to the end"), *turns, tools=[tool(name)])).repeats == 0


def test_other_commands_of_a_hosted_shell_are_other_calls() -> None:
    turns: list[dict[str, Any]] = [{"role": "user", "content": "set it up"}]
    for n in range(3):
        turns.append({"type": "shell_call", "call_id": f"c{n}", "action": {"commands": [f"mkdir d{n}"]}})
        turns.append({"type": "shell_call_output", "call_id": f"c{n}", "output": [{"stdout": "", "stderr": ""}]})
    tools = [{"type": "function", "name": "search"}, {"type": "shell"}]
    body = json.dumps({"input": turns, "tools": tools}).encode()
    assert inspect(OPENAI_RESPONSES.view(body, ToolCache())).repeats == 0


@pytest.mark.parametrize(
    "text",
    [
        '{"status": "running"}',
        "build is queued",
        "<status>in_progress</status>",
        "<status>running</status>\n\n<timestamp>2026-11-30T19:00:00Z</timestamp>\n\n(no new output)",
        "not ready yet",
        "Error: 429 Too Many Requests, try again later",
        "request timed out",
        "503 temporarily unavailable",
    ],
)
def test_what_is_not_finished_may_be_asked_for_again(text: str) -> None:
    status = tool("get_job", "State of a job.", ("job",))
    looping = [
        inspect(chat_of(user("wait for it"), *step({"job": "7"}, text, "get_job") * n, tools=[status])).looping
        for n in (2, 3, 4)
    ]
    assert looping == [False, False, True]


def test_waiting_between_two_looks_is_no_loop() -> None:
    tools = [tool("get_job", "State of a job.", ("job",)), tool("wait_seconds", "", ("n",))]
    pair = step({"job": "7"}, "running", "get_job") + step({"n": "5"}, "waited", "wait_seconds")
    for n in (1, 2, 3):
        assert not inspect(chat_of(user("wait for it"), *pair * n, tools=tools)).looping
    assert inspect(chat_of(user("wait for it"), *pair * 5, tools=tools)).looping


def test_a_write_that_is_queued_is_not_made_again() -> None:
    assert inspect(chat_of(user("mail it"), *sent("queued for delivery", "queued for delivery"), tools=[MAIL])).looping


@pytest.mark.parametrize(
    "text",
    [
        "no such job",
        "the runner is Mary",
        "done",
        "The running costs of building 7 are in the handbook.",
        "it was queued. " + "x" * 1000,
    ],
)
def test_what_is_finished_or_failed_for_good_is_a_loop_at_once(text: str) -> None:
    status = tool("get_job", "State of a job.", ("job",))
    assert inspect(chat_of(user("wait for it"), *step({"job": "7"}, text, "get_job") * 2, tools=[status])).looping


def test_S03_pairs_by_order_where_ids_are_missing_or_repeated() -> None:
    call = {
        "role": "assistant",
        "tool_calls": [{"index": 0, "function": {"name": "search", "arguments": {"query": "x"}}}],
    }
    answer = {"role": "tool", "content": "nothing"}
    assert inspect(chat_of(user("go"), call, answer, call, answer, tools=[SEARCH])).looping


def test_parallel_calls_must_all_be_repeats() -> None:
    def both(second: str) -> Turns:
        made = [
            {"id": f"c{i}", "function": {"name": "search", "arguments": '{"query":"%s"}' % q}}  # noqa: UP031
            for i, q in enumerate(("x", second))
        ]
        return [{"role": "assistant", "tool_calls": made}, result("a", "c0"), result("b", "c1")]

    assert inspect(chat_of(user("go"), *both("y"), *both("y"), tools=[SEARCH])).looping
    assert not inspect(chat_of(user("go"), *both("y"), *both("z"), tools=[SEARCH])).looping
