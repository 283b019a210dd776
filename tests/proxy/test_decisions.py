"""Decision cases over the wire, with the verdict fixed. Whether the verdict is right is the gate's part."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.fakes.chats import body_of, said
from tests.fakes.client import post
from tests.fakes.judge import verdict
from tests.fakes.upstream import completion, reply, tool_call
from whetherman_edge.dialects.json_spans import VALUES_MAX
from whetherman_edge.gate import policy
from whetherman_edge.gate.policy import REASONS


def tool(name: str, description: str = "", pad: int = 0) -> dict:
    properties = {"query": {"type": "string", "description": "what to look for" + "." * pad}}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def user(text: str) -> dict:
    return {"role": "user", "content": text}


async def test_d01_hi_is_answered_and_visible_in_header_and_log(upstream, serve, judge, caplog):
    caplog.set_level("INFO", logger="whetherman_edge")
    upstream.default = reply(completion("Hi! How can I help?"))
    async with serve(force="ANSWER", upstream_kind="llamacpp") as url:
        answer = await post(url, {"model": "llama3.2", "messages": [user("hi")], "tools": [tool("web_search")]})
    assert said(answer) == ("ANSWER", "yes", "forced")
    choice = answer.json()["choices"][0]
    assert (choice["finish_reason"], "tool_calls" in choice["message"]) == ("stop", False)
    assert "event=chat decision=ANSWER applied=yes" in caplog.text


async def test_d02_a_turn_after_a_result_is_never_pushed_towards_a_call(upstream, serve, judge):
    turns = [
        user("Hello there"),
        {"role": "assistant", "content": None, "tool_calls": [tool_call("greet")]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Hello! I can greet you."},
    ]
    sent = body_of({"model": "m", "messages": turns, "tools": [tool("greet"), tool("get_weather")]})
    async with serve(force="ACT") as url:
        answer = await post(url, sent)
    assert upstream.last.body == sent
    assert answer.json()["choices"][0]["finish_reason"] == "stop"


async def test_d03_41_tools_are_parsed_once_and_the_tokens_avoided_are_logged(upstream, serve, judge, caplog):
    caplog.set_level("INFO", logger="whetherman_edge")
    tools = [tool(f"home_{n}", "Control the home.", pad=400) for n in range(41)]
    chat = {
        "model": "m",
        "messages": [{"role": "system", "content": "You run a home. " * 2200}, user("hello")],
        "tools": tools,
    }
    async with serve(force="ANSWER", intervention="strip") as url:
        for _ in range(5):
            assert said(await post(url, chat)) == ("ANSWER", "yes", "forced")
    withheld = [int(text) for text in re.findall(r"tokens_withheld=(\d+)", caplog.text)]
    assert len(withheld) == 5
    assert min(withheld) > 4000
    # One tool object for all five requests: nothing is parsed again.
    assert len({id(view.tools[0]) for view in judge.views}) == 1


async def test_d05_calls_and_results_of_earlier_turns_stay_on_every_path(upstream, serve, judge):
    turns = [
        user("lamp on"),
        {"role": "assistant", "content": None, "tool_calls": [tool_call("turn_on", '{"lamp": 1}')]},
        {"role": "tool", "tool_call_id": "call_1", "content": "ok"},
        {"role": "assistant", "content": "Turned on"},
        user("what is a lamp?"),
    ]
    chat = {"model": "m", "messages": turns, "tools": [tool("turn_on")]}
    for kind in ("openai", "ollama", "llamacpp", "vllm", "unknown"):
        for way in ("auto", "note", "none", "strip", "prefill"):
            async with serve(force="ANSWER", upstream_kind=kind, intervention=way) as url:
                assert (await post(url, chat)).status == 200
            got = upstream.last.json()["messages"]
            assert got[1:3] == turns[1:3], (kind, way)


async def test_d08_declined_when_no_tool_can(upstream, serve, judge):
    upstream.default = reply(completion("I cannot switch lights: none of my tools can."))
    chat = {
        "model": "m",
        "messages": [user("Could anything here change the mood of the room?")],
        "tools": [tool("terminal"), tool("read_file")],
    }
    async with serve(force="DECLINE", intervention="strip") as url:
        answer = await post(url, chat)
    assert said(answer) == ("DECLINE", "yes", "forced")
    assert "tools" not in upstream.last.json()


@pytest.mark.parametrize("role", ["user", "system"])
async def test_d09_a_tool_named_word_for_word_is_never_declined(upstream, serve, judge, role):
    name = "workflow_run_dispatch_round"
    turns = [user("run it for job 7")]
    if role == "system":
        turns.insert(0, {"role": "system", "content": f"Use {name} to run jobs."})
    else:
        turns = [user(f"run {name} for job 7")]
    tools = [tool(f"tool_{n}") for n in range(59)] + [tool(name)]
    sent = body_of({"model": "m", "messages": turns, "tools": tools})
    async with serve(force="DECLINE") as url:
        answer = await post(url, sent)
    assert said(answer) == ("ACT", "no", "guard:tool_named")
    assert upstream.last.body == sent


async def test_d11_a_read_only_tool_comes_before_a_question(upstream, serve, judge):
    tools = [tool("list_tunnels", "List the tunnels."), tool("delete_tunnel", "Delete a tunnel.")]
    sent = body_of({"model": "m", "messages": [user("delete the old tunnel")], "tools": tools})
    async with serve(force="ASK") as url:
        assert said(await post(url, sent)) == ("ACT", "no", "guard:lookup_first")
    async with serve(force="ANSWER") as url:
        assert said(await post(url, sent)) == ("ACT", "no", "guard:action")
    assert all(seen.body == sent for seen in upstream.requests)


async def test_r07_nested_tools_keep_objects_and_order_and_others_are_never_scored(upstream, serve, judge):
    nested = [tool(f"t{n}") for n in range(33)]
    for one in nested:
        one["function"]["strict"] = True
    others = [{"type": "web_search"}, {"type": "mcp", "server_label": "x"}, {"type": "custom", "custom": {"name": "c"}}]
    sent = body_of({"model": "m", "messages": [user("hello")], "tools": [*nested, *others]})
    async with serve() as url:
        await post(url, sent)
        assert upstream.last.body == sent
    view = judge.views[0]
    assert (len(view.tools), view.n_other_tools) == (33, 3)
    judge.verdict = verdict("ANSWER")
    async with serve(force="ANSWER", intervention="strip") as url:
        await post(url, sent)
    assert upstream.last.json()["tools"] == [*nested, *others]


async def test_c02_nothing_volatile_is_added(upstream, serve, judge):
    chat = {"model": "m", "messages": [user("hello")], "tools": [tool("search")]}
    async with serve(force="ANSWER", upstream_kind="unknown") as url:
        for _ in range(3):
            await post(url, chat)
    assert len({seen.sha256 for seen in upstream.requests}) == 1


async def test_a_body_of_very_many_values_passes_ungated(upstream, serve, judge):
    body = b'{"model":"m","messages":[' + b"{}," * VALUES_MAX + b'{}],"tools":[{"name":"f","role":"developer"}]}'
    async with serve(map_developer="system", mode="enforce", force="ANSWER") as url:
        answer = await post(url, body)
        refused = await post(url, body, "/v1/decide")
    assert (answer.status, said(answer)) == (200, ("ACT", "no", "bypass:oversize"))
    assert [seen.body for seen in upstream.requests] == [body]
    assert (refused.status, refused.json()["error"]["code"]) == (422, "too_long")


async def test_an_unknown_mode_leaves_the_request_as_it_came(upstream, serve, judge, caplog):
    sent = body_of({"model": "m", "messages": [user("hi")], "tools": [tool("web_search")]})
    async with serve(force="ANSWER") as url:
        answer = await post(url, sent, **{"x-whetherman-mode": "enfroce"})
    assert said(answer) == ("ACT", "no", "bypass:unknown_mode")
    assert upstream.last.body == sent
    assert "event=unknown_mode" in caplog.text
    assert "enfroce" not in caplog.text  # header values are not logged


def test_every_reason_is_listed():
    package = Path(policy.__file__).parents[1]
    sources = [path.read_text() for folder in ("proxy", "gate", "dialects") for path in (package / folder).glob("*.py")]
    written = {reason for source in sources for reason in re.findall(r'"((?:bypass|guard):[a-z_]+)"', source)}
    assert len(written) > 15
    assert written <= REASONS.keys()
