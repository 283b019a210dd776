"""What requests show of agents: the share that is left out to measure, user repeats, and a state that survives."""

from __future__ import annotations

import json

import msgspec
import pytest

from tests.fakes.chats import CHAT, body_of, looping, metric, said
from tests.fakes.client import once, post
from tests.fakes.upstream import completion, reply, tool_call
from tests.proxy.test_profiles import profile, sure
from tests.proxy.test_sessions import chat
from whetherman_edge import composition
from whetherman_edge.profiles import field
from whetherman_edge.proxy import gating
from whetherman_edge.proxy.sessions import Sessions, drawn


@pytest.fixture
def enforced(judge, monkeypatch):
    """ANSWER by a calibrated profile named "good"."""

    class Store:
        def __init__(self, **_keys) -> None:
            pass

        def load(self, _name: str):
            return profile(mode="strip")

        reload = load

        def list(self) -> list[object]:
            return []

    monkeypatch.setattr(composition, "ProfileStore", Store)
    judge.fused_names = ("log_p_act",)
    judge.verdict = sure("ANSWER")
    return {"profile": "good"}


def turns(*texts: str) -> dict:
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    return {**CHAT, "messages": messages}


async def test_a_share_is_left_out_once_there_is_something_to_measure(upstream, serve, enforced):
    async with serve(**enforced, shadow_share=1.0) as url:
        for n in range(gating.SHADOW_AFTER):
            assert said(await post(url, turns(f"hello {n}"))) == ("ANSWER", "yes", "scored")
        for _ in range(2):
            assert said(await post(url, turns("hello"))) == ("ANSWER", "no", "shadow_share")
            assert upstream.last.body == body_of(turns("hello"))
    async with serve(**enforced, shadow_share=0.0) as url:
        for n in range(gating.SHADOW_AFTER + 5):
            assert said(await post(url, turns(f"hello {n}"))) == ("ANSWER", "yes", "scored")


def test_the_lot_is_fair_and_the_same_for_a_retry():
    chats = [chat(f"hello {n}") for n in range(4_000)]
    first = [drawn(one, "", 0.05) for one in chats]
    assert first == [drawn(one, "", 0.05) for one in chats]
    assert 140 < sum(first) < 260
    assert drawn(chats[0], "s", 1.0)
    assert not drawn(chats[0], "s", 0.0)
    by_turn = {drawn(chat(*["x"] * n), "one session", 0.5) for n in range(1, 20, 2)}
    assert by_turn == {True, False}


async def test_a_user_who_repeats_gets_the_tools(upstream, serve, enforced):
    async with serve(**enforced) as url:
        assert said(await post(url, turns("Who won?")))[2] == "scored"
        repeat = turns("Who won?", "I do not know.", "  who WON? ")
        assert said(await post(url, repeat)) == ("ACT", "no", "guard:user_repeats")
        assert upstream.last.body == body_of(repeat)
        other = turns("Who won?", "I do not know.", "And who lost?")
        assert said(await post(url, other))[2] == "scored"
        for n in range(2):
            await post(url, turns(f"Who won {n}?"))
            await post(url, turns(f"Who won {n}?", "I do not know.", f"Who won {n}?"))
        assert said(await post(url, turns("Hello")))[2] == "backed_off"
        assert (await once(url, "GET", "/health")).json()["profiles"]["agents"]["profile:good"]["stopped"] == "repeated"


async def test_what_was_stopped_stays_stopped_after_a_restart(upstream, serve, enforced):
    upstream.default = reply(completion(None, tool_calls=[tool_call()]))
    async with serve(**enforced) as url:
        assert [said(await post(url, turns(f"hi {n}")))[2] for n in range(4)] == ["leaked_call"] * 3 + ["backed_off"]
    path = field.default_path()
    assert path.stat().st_mode & 0o777 == 0o600
    assert "hi 1" not in path.read_text()
    async with serve(**enforced) as url:
        assert said(await post(url, turns("hi again")))[2] == "backed_off"
    value = json.loads(path.read_text())
    value["agents"]["profile:good"]["basis"] = "another"  # calibrated again since
    path.write_text(json.dumps(value))
    async with serve(**enforced) as url:
        assert said(await post(url, turns("hi once more")))[2] == "leaked_call"


def loops(text: str) -> dict:
    """A dialogue of its own in which the same call has come back with the same result twice."""
    chat = looping(2)
    return {**chat, "messages": [{"role": "user", "content": text}, *chat["messages"][1:]]}


CALLS = reply(completion(None, tool_calls=[tool_call()]))


async def agents(url: str) -> dict:
    return (await once(url, "GET", "/health")).json()["profiles"]["agents"]["profile:good"]


async def test_leaks_behind_scored_skips_leave_the_loop_guard_on(upstream, serve, enforced, judge):
    upstream.default = CALLS
    async with serve(**enforced) as url:
        assert [said(await post(url, turns(f"hi {n}")))[2] for n in range(5)] == ["leaked_call"] * 3 + [
            "backed_off"
        ] * 2
        upstream.default = reply(completion("It is 3 euros."))
        for n in range(3):
            assert said(await post(url, loops(f"find the price of {n}"))) == ("ANSWER", "yes", "loop_guard")
        assert said(await post(url, turns("hi")))[2] == "backed_off"
        found = await agents(url)
        assert (found["stopped"], found["loop_guard"]) == ("leaked", {"applied": 3, "stopped": ""})
        metrics = (await once(url, "GET", "/metrics")).body.decode()
        assert 'whetherman_backed_off_total{cause="scored"} 3' in metrics
        assert 'whetherman_leaked_call_total{cause="scored"} 3' in metrics
        assert 'cause="loop_guard"' not in metrics
    async with serve(**enforced) as url:
        assert said(await post(url, loops("find it again"))) == ("ANSWER", "yes", "loop_guard")
        assert said(await post(url, turns("hi again")))[2] == "backed_off"


async def test_leaks_behind_the_loop_guard_leave_the_scores_on(upstream, serve, enforced, judge):
    upstream.default = CALLS
    judge.verdict = sure("ACT")
    async with serve(**enforced) as url:
        reasons = [said(await post(url, loops(f"find the price of {n}")))[2] for n in range(5)]
        assert reasons == ["leaked_call"] * 3 + ["backed_off"] * 2
        found = await agents(url)
        assert (found["stopped"], found["loop_guard"]) == ("", {"applied": 3, "stopped": "leaked"})
        assert await metric(url, 'leaked_call_total{cause="loop_guard"}') == await metric(url, "leaked_call_total") == 3
        assert await metric(url, "backed_off_total") == 2
        assert 'whetherman_backed_off_total{cause="loop_guard"} 2' in (await once(url, "GET", "/metrics")).body.decode()
    judge.verdict = sure("ANSWER")
    upstream.default = reply(completion("Hello."))
    async with serve(**enforced) as url:
        assert said(await post(url, turns("hi"))) == ("ANSWER", "yes", "scored")
        assert said(await post(url, loops("find it again"))) == ("ANSWER", "yes", "scored"), "the scores think so too"


async def test_where_nothing_can_be_steered_each_cause_stops(upstream, serve, enforced):
    upstream.default = CALLS
    async with serve(**enforced) as url:
        for n in range(3):
            assert said(await post(url, turns(f"hi {n}")))[2] == "leaked_call"
            assert said(await post(url, loops(f"find {n}")))[2] == "leaked_call"
        assert said(await post(url, turns("hi")))[2] == said(await post(url, loops("find")))[2] == "backed_off"
        n_sent = len(upstream.requests)
        await post(url, loops("find it"))
        assert len(upstream.requests) == n_sent + 1
        found = await agents(url)
        assert (found["stopped"], found["loop_guard"]["stopped"]) == ("leaked", "leaked")


async def test_within_a_dialogue_too_each_cause_stops_on_its_own(upstream, serve, enforced):
    """Enough that goes well elsewhere keeps the agent's own tests down."""
    async with serve(**enforced) as url:
        for n in range(40):
            await post(url, turns(f"hello {n}"))
        upstream.default = CALLS
        reasons = [said(await post(url, turns("hi"), x_session_id="s"))[2] for _ in range(4)]
        assert reasons == ["leaked_call"] * 3 + ["backed_off"]
        upstream.default = reply(completion("It is 3 euros."))
        assert said(await post(url, loops("find"), x_session_id="s")) == ("ANSWER", "yes", "loop_guard")
        assert said(await post(url, turns("hi"), x_session_id="t"))[2] == "scored"


async def test_what_comes_after_a_cause_has_backed_off_is_no_evidence_any_more(upstream, serve, enforced):
    async with serve(**enforced) as url:
        for n in range(40):
            await post(url, turns(f"hello {n}"))
        assert said(await post(url, turns("Who won?"), x_session_id="s"))[2] == "scored"
        upstream.default = CALLS
        reasons = [said(await post(url, turns("Who won?"), x_session_id="s"))[2] for _ in range(4)]
        assert reasons == ["leaked_call"] * 3 + ["backed_off"]
        upstream.default = reply(completion("Hello."))
        again = turns("Who won?", "I do not know.", "Who won?")
        assert said(await post(url, again, x_session_id="s"))[2] == "backed_off"
        assert said(await post(url, turns("hi")))[2] == "scored", "it is the dialogue that is left alone"
    found = field.read(field.default_path(), 0.0)["profile:good"]
    assert (found.n_applied, found.tests["leaked"][0], found.tests["repeated"][0]) == (45, 45, 0)


async def test_a_leak_behind_the_clients_own_wish_is_nobodys_evidence(upstream, serve, enforced):
    upstream.default = CALLS
    async with serve(**enforced, upstream_kind="ollama", mode="enforce") as url:
        for n in range(4):
            answer = await post(url, {**turns(f"hi {n}"), "tool_choice": "none"}, x_session_id="s")
            assert said(answer)[1:] == ("no", "leaked_call")
        assert await metric(url, 'leaked_call_total{cause="client"}') == await metric(url, "leaked_call_total") == 4
        assert (await once(url, "GET", "/health")).json()["profiles"]["agents"] == {}


async def test_a_user_who_repeats_speaks_against_what_had_skipped(upstream, serve, enforced):
    async with serve(**enforced) as url:
        for n in range(3):
            chat = loops(f"find {n}")
            assert said(await post(url, chat))[2] == "loop_guard"
            again = [{"role": "assistant", "content": "None."}, {"role": "user", "content": f"find {n}"}]
            answer = await post(url, {**chat, "messages": [*chat["messages"], *again]})
            assert said(answer) == ("ACT", "no", "guard:user_repeats")
        found = await agents(url)
        assert (found["stopped"], found["loop_guard"]) == ("", {"applied": 3, "stopped": "repeated"})
        assert said(await post(url, turns("Hello")))[2] == "scored"


async def test_calls_in_the_turn_after_a_broken_loop_leave_the_guard_on(upstream, serve, enforced, judge):
    judge.verdict = sure("ACT")
    async with serve(**enforced) as url:
        for n in range(30):
            upstream.default = reply(completion("None."))
            chat = loops(f"find {n}")
            assert said(await post(url, chat))[2] == "loop_guard"
            upstream.default = CALLS
            turn = [{"role": "assistant", "content": "None."}, {"role": "user", "content": "and another"}]
            await post(url, {**chat, "messages": [*chat["messages"], *turn]})


async def test_a_refusal_counts_against_what_was_withheld_by(upstream, serve, enforced):
    upstream.script(reply({"error": "no"}, status="400 Bad Request"))
    async with serve(**enforced) as url:
        assert said(await post(url, loops("find")))[2] == "refused"
    found = field.read(field.default_path(), 0.0)["profile:good"]
    assert (found.loop_guard.tests["leaked"][0], found.tests["leaked"][0]) == (1, 0)


async def test_what_the_original_is_refused_too_is_no_evidence_against_the_agent(upstream, serve, enforced):
    upstream.default = reply({"error": "the request exceeds the context size"}, status="400 Bad Request")
    async with serve(**enforced) as url:
        for n in range(6):
            assert said(await post(url, turns(f"hi {n}"))) == ("ANSWER", "no", "refused")
        upstream.default = reply(completion("hello"))
        assert said(await post(url, turns("hi"))) == ("ANSWER", "yes", "scored")
        assert "tools" not in upstream.last.json(), "removing the tools is still what this model's server takes"


async def test_an_error_is_neither_a_success_nor_a_skip(upstream, serve, enforced):
    upstream.default = reply({"error": "busy"}, status="503 Service Unavailable")
    async with serve(**enforced) as url:
        assert said(await post(url, turns("Who won?"))) == ("ANSWER", "yes", "scored")
        upstream.default = reply(completion("Oslo."))
        again = turns("Who won?", "(the server was busy)", "Who won?")
        assert said(await post(url, again)) == ("ANSWER", "yes", "scored"), "nothing was skipped before"
    assert field.read(field.default_path(), 0.0)["profile:good"].n_applied == 1


@pytest.mark.parametrize("content", ["{", "[]", '{"version": 9, "agents": {}}', '{"version": 1, "agents": {"a": 1}}'])
async def test_a_state_that_cannot_be_read_costs_the_evidence_only(upstream, serve, enforced, content):
    path = field.default_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    async with serve(**enforced) as url:
        assert said(await post(url, turns("hi")))[2] == "scored"
    assert field.read(path, 0.0)["profile:good"].n_applied == 1


def test_old_evidence_is_forgotten_and_tests_that_are_gone_are_left_out():
    record = field.FieldRecord(basis="", at_s=1e6, tests={"leaked": (3, 500.0), "gone": (1, 1.0)}, stopped="leaked")
    path = field.default_path()
    field.write(path, {"a": record}, 1e6)
    assert field.read(path, 1e6 + 86_400 * (field.AGE_DAYS_MAX - 1)) == {"a": record}
    assert field.read(path, 1e6 + 86_400 * (field.AGE_DAYS_MAX + 1)) == {}
    sessions = Sessions({"a": record})
    assert sessions.session(chat("x"), "", "a").backed_off == ("scored",)
    assert not sessions.session(chat("x"), "", "a", "another profile").backed_off
    assert set(sessions.records()["a"].tests) == {"leaked", "ignored", "repeated", "called_next"}
    assert set(sessions.records()["a"].loop_guard.tests) == {"leaked", "ignored", "repeated"}


def test_a_file_of_before_the_causes_were_told_apart_counts_for_scored_decisions():
    path = field.default_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    tests = {"leaked": [3, 500.0], "ignored": [0, 0.0], "repeated": [2, 0.5], "called_next": [2, 0.25]}
    was = {"basis": "b", "at_s": 1e6, "tests": tests, "n_applied": 5, "stopped": "leaked", "advice": ""}
    path.write_text(json.dumps({"version": 1, "agents": {"profile:old": was}}))
    sessions = Sessions(field.read(path, 1e6))
    state = sessions.record("profile:old", "loop_guard", "kept", "b")
    assert state.backed_off == ("scored",)
    assert (state.scored.leaked.n, state.scored.leaked.e, state.scored.repeated.n, state.n_applied) == (3, 500.0, 2, 6)
    assert (state.loop_guard.leaked.n, state.loop_guard.n_applied) == (1, 1)
    field.write(path, sessions.records(), 1e6)
    value = json.loads(path.read_text())
    assert value["version"] == 1, "a version of before goes on with it too"
    assert {key: value["agents"]["profile:old"][key] for key in ("tests", "stopped", "n_applied")} == {
        key: was[key] for key in ("tests", "stopped", "n_applied")
    }


def test_both_causes_come_back_as_they_went():
    path = field.default_path()
    sessions = Sessions(clock=lambda: 1e6)
    for outcome in ("leaked", "leaked", "kept", "repeated"):
        sessions.record("a", "scored", outcome)
    for outcome in ("ignored", "heeded", "leaked", "leaked", "leaked"):
        sessions.record("a", "loop_guard", outcome)
    field.write(path, sessions.records(), 1e6)
    again = Sessions(field.read(path, 1e6))
    assert again.records() == sessions.records()
    assert again.session(chat("x"), "", "a") == sessions.session(chat("x"), "", "a")
    assert again.session(chat("x"), "", "a").backed_off == ("loop_guard",)


def test_two_daemons_keep_each_others_evidence():
    """One for each model server, say: both write the one file of their user."""
    path = field.default_path()
    a, b = (field.FieldRecord(basis="p", at_s=1e6, tests={"leaked": (n, 1.0)}, n_applied=n) for n in (3, 5))
    field.write(path, {"a": a}, 1e6)
    field.write(path, {"b": b}, 1e6)
    assert field.read(path, 1e6) == {"a": a, "b": b}
    field.write(path, {"a": b}, 1e6)
    field.write(path, {"a": a}, 1e6)
    assert field.read(path, 1e6)["a"] == b, "the one that has seen more"
    stopped = field.FieldRecord(basis="p", at_s=1e6, stopped="leaked")
    field.write(path, {"a": stopped}, 1e6)
    field.write(path, {"a": b}, 1e6)
    assert field.read(path, 1e6)["a"] == stopped
    looped = field.FieldRecord(
        basis="p", at_s=1e6 + 1, loop_guard=field.CauseRecord({"leaked": (3, 500.0)}, 3, "leaked")
    )
    field.write(path, {"a": looped}, 1e6)
    both = field.FieldRecord(basis="p", at_s=1e6 + 1, stopped="leaked", loop_guard=looped.loop_guard)
    assert field.read(path, 1e6)["a"] == both, "each cause from the one that has seen more of it"
    more = field.FieldRecord(basis="p", at_s=1e6 + 1, tests={"leaked": (9, 500.0)}, n_applied=9, stopped="leaked")
    field.write(path, {"a": more}, 1e6)
    assert field.read(path, 1e6)["a"] == msgspec.structs.replace(more, loop_guard=looped.loop_guard)
    anew = field.FieldRecord(basis="q", at_s=1e6 + 1)
    field.write(path, {"a": anew}, 1e6)
    assert field.read(path, 1e6)["a"] == anew, "of a newer calibration"
    old = {"b": field.FieldRecord(basis="p", at_s=1e6)}
    field.write(path, {f"m{n}": field.FieldRecord(basis="", at_s=1e6 + n) for n in range(2, 258)} | old, 1e6)
    assert len(field.read(path, 1e6)) == field.AGENTS_MAX
    assert "b" not in field.read(path, 1e6)
