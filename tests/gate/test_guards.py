"""Rules that veto a decision: they fire on clear evidence, and on nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gate.chats import WEATHER, calls, chat_of, result, says, system, tool, user
from whetherman_edge.dialects.tool_cache import TOOLS_MAX
from whetherman_edge.gate import guards
from whetherman_edge.gate.tool_effect import effect, objects, verbs

TUNNELS = [
    tool("list_tunnels", "List all tunnels."),
    tool("delete_tunnel", "Delete a tunnel.", required=("tunnel_id",)),
]
MAIL = [tool("search_emails", "Search mail.", required=("query",)), tool("send_email", "Send mail.", required=("to",))]
SHELL = [tool("shell", "Run a shell command.", required=("command",))]


@pytest.mark.parametrize(
    ("name", "description", "expected"),
    [
        ("get_weather", "", "read"),
        ("list_tunnels", "", "read"),
        ("mcp__github__listBranches", "", "read"),
        ("searchConfluenceUsingCql", "", "read"),
        ("order_status", "Returns the state of an order.", "read"),
        ("delete_tunnel", "", "write"),
        ("HassTurnOn", "", "write"),
        ("gitlab_retry_job", "Retry a job.", "unknown"),
        ("slack_reply_to_thread", "", "write"),
        ("Bash", "Executes a bash command.", "execute"),
        ("run_terminal_cmd", "", "execute"),
        ("ask_user", "", "question"),
        ("mcp__ui__ask_followup_question", "", "question"),
        ("my_reservations", "Reservations of the calling user.", "unknown"),
    ],
)
def test_effect_is_read_from_name_and_description(name: str, description: str, expected: str) -> None:
    (offered,) = chat_of(user("x"), tools=[tool(name, description)]).tools
    assert effect(offered) == expected


@pytest.mark.parametrize(
    "text",
    [
        "delete the old tunnel",
        "Please delete tunnel t-9.",
        "can you please remove the tunnel called db?",
        "ok, now delete it",
        "I want you to delete the staging tunnel",
        "Thanks! Go ahead and delete that one",
    ],
)
def test_an_action_with_its_tool_offered_is_never_answer(text: str) -> None:
    assert guards.action_wanted(chat_of(user(text), tools=TUNNELS))


@pytest.mark.parametrize(
    "text",
    [
        "why do you suggest deleting the tunnel?",
        "how do I delete a tunnel?",
        "should I delete the old tunnel?",
        "don't delete the tunnel",
        "what happens if I delete a tunnel?",
        "explain what a tunnel is",
        "write a poem about a tunnel",
        "create a joke",
    ],
)
def test_a_question_about_an_action_or_a_negation_is_no_action(text: str) -> None:
    assert not guards.action_wanted(chat_of(user(text), tools=TUNNELS))


def test_D07_why_do_you_suggest_is_not_taken_as_approval() -> None:
    proposal = says("I suggest deleting branch old-fix.")
    branches = [tool("delete_branch", "Delete a branch.", required=("name",))]
    for tools in (SHELL, branches):
        assert not guards.action_wanted(chat_of(proposal, user("why do you suggest deleting old-fix?"), tools=tools))
    assert guards.action_wanted(chat_of(proposal, user("yes, go ahead"), tools=[tool("delete_branch", "Deletes.")]))


@pytest.mark.parametrize("text", ["how's the weather in your head today?", "don't check the weather, just say hi"])
def test_D12_no_guard_stands_in_the_way_of_figurative_and_negated_wording(text: str) -> None:
    assert not guards.action_wanted(chat_of(user(text)))


def test_an_action_already_taken_may_be_reported() -> None:
    turns = [user("send an email to Ann"), calls("send_email", {"to": "ann"}), result("sent")]
    assert guards.action_wanted(chat_of(turns[0], tools=MAIL))
    assert guards.action_wanted(chat_of(turns[0], calls("search_emails"), result("ann@x.org"), tools=MAIL))
    assert not guards.action_wanted(chat_of(*turns, tools=MAIL))
    assert not guards.action_wanted(chat_of(turns[0], calls("search_emails"), result("error: denied"), tools=MAIL))


def test_D09_an_exact_tool_name_forbids_decline_and_pins_the_tool() -> None:
    tools = [tool(f"tool_{i}") for i in range(59)] + [tool("workflow_run_dispatch_round")]
    chat = chat_of(user("run workflow_run_dispatch_round for job 7"), tools=tools)
    assert guards.tool_named(chat) == {"workflow_run_dispatch_round"}
    by_system = chat_of(system("Always use tool_3 for jobs."), user("job 7"), tools=tools)
    assert guards.tool_named(by_system) == {"tool_3"}  # and not tool_30 to tool_39


@pytest.mark.parametrize(
    ("text", "demanded"),
    [
        ("run workflow_run_dispatch_round for job 7", True),
        ("Please use k8s.get_pods.", True),
        ("ok, can you call get_weather for Oslo?", True),
        ("what does get_weather do?", False),
        ("don't use get_weather", False),
        ("you used get_weather before", False),
    ],
)
def test_a_tool_demanded_by_name_is_never_answer(text: str, demanded: bool) -> None:
    tools = [WEATHER, tool("workflow_run_dispatch_round"), tool("k8s.get_pods")]
    assert guards.action_wanted(chat_of(user(text), tools=tools)) is demanded
    done = [calls(name) for name in ("workflow_run_dispatch_round", "k8s.get_pods", "get_weather")]
    assert not guards.action_wanted(chat_of(user(text), *done, result("ok"), tools=tools))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("search for shoes", False),
        ("use the search tool", True),
        ("call `search` for shoes", True),
        ("run search() now", True),
        ("research shoes", False),
    ],
)
def test_a_name_that_is_a_word_must_be_marked_as_a_name(text: str, named: bool) -> None:
    assert bool(guards.tool_named(chat_of(user(text), tools=[tool("search")]))) is named


@pytest.mark.parametrize("name", ["ask_user", "clarify", "AskUserQuestion", "request_user_input"])
def test_the_clients_own_question_tool_is_seen(name: str) -> None:
    assert guards.asks_itself(chat_of(user("book it"), tools=[WEATHER, tool(name)]))
    assert not guards.asks_itself(chat_of(user("book it"), tools=[WEATHER, tool("ask_wikipedia")]))


PART = "The owner of ticket T-3921 mailed me which part they need. How many of that part are in stock?"


@pytest.mark.parametrize(
    ("question", "results", "missing"),
    [
        (PART, ("id: T-3921\nowner: Emeka Zeller", "m77: Emeka Zeller: Part", "I need part EU-6836."), True),
        (PART, ("id: T-3921\nowner: Emeka Zeller", "EU-6836: 412 pieces"), False),
        ("How much does it cost?", ("see doc-12 of 2026-05-04, 10:30",), True),
        ("How much does it cost?", ("It costs 1,250.50 EUR.",), False),
        ("how many users are there", ("count\n38",), False),
        ("Which part do they need?", ("I need part EU-6836.",), False),
        (PART, (), False),
    ],
)
def test_a_quantity_is_not_answered_before_a_result_holds_a_number(
    question: str, results: tuple[str, ...], missing: bool
) -> None:
    turns = [user(question)]
    for number, text in enumerate(results):
        turns += [calls("look", {"id": number}, f"c{number}"), result(text, f"c{number}")]
    assert guards.number_missing(chat_of(*turns)) is missing


@pytest.mark.parametrize(
    ("turns", "asked"),
    [
        ([user("book a table"), says("For how many people?"), user("four")], True),
        ([user("hi"), says("Hello! How can I help you today?"), user("book a table")], False),
        ([user("book a table"), says("Done."), user("and another")], False),
        ([user("book a table")], False),
        ([user("a"), says("Which one?"), user("b"), calls("f"), result("r")], True),
    ],
)
def test_a_question_just_asked_is_seen(turns: list[dict[str, Any]], asked: bool) -> None:
    assert guards.just_asked(chat_of(*turns)) is asked


def test_D11_a_read_only_tool_that_can_find_the_object_comes_first() -> None:
    ask = user("delete the old tunnel")
    assert guards.lookup_first(chat_of(ask, tools=TUNNELS))
    assert not guards.lookup_first(chat_of(ask, calls("list_tunnels"), result("a, b"), tools=TUNNELS))
    assert not guards.lookup_first(chat_of(ask, tools=[WEATHER, TUNNELS[1]]))
    needs_more = tool("get_tunnel", "One tunnel.", required=("tunnel_id",))
    assert not guards.lookup_first(chat_of(ask, tools=[needs_more, TUNNELS[1]]))


def test_a_lookup_cannot_fill_its_own_gap() -> None:
    assert not guards.lookup_first(chat_of(user("what's the weather?")))
    assert not guards.lookup_first(chat_of(user("check the weather"), tools=[WEATHER, tool("list_cities")]))


def test_long_and_hostile_texts_are_settled_quickly() -> None:
    for text in ("please " * 50_000, "yes! " * 50_000, "so, " * 50_000, "a" * 200_000, "ok" * 100_000):
        chat = chat_of(says("Shall I delete the tunnel?"), user(text), tools=TUNNELS)
        guards.action_wanted(chat)
        guards.lookup_first(chat)
        guards.tool_named(chat)


def test_no_more_tools_are_held_than_the_dialects_keep() -> None:
    assert {look.cache_info().maxsize for look in (effect, verbs, objects)} == {TOOLS_MAX}
