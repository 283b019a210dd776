"""What requests show of agents: the share that is left out to measure, user repeats, and a state that survives."""

from __future__ import annotations

import json

import pytest

from tests.fakes.chats import CHAT, body_of, said
from tests.fakes.client import once, post
from tests.fakes.upstream import completion, reply, tool_call
from whetherman_edge.profiles import field
from whetherman_edge.proxy import gating
from whetherman_edge.proxy.sessions import Sessions, drawn


@pytest.fixture
def enforced(judge, monkeypatch):
    """ANSWER by a calibrated profile named "good"."""
    from tests.proxy.test_profiles import profile, sure
    from whetherman_edge import composition

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
    from tests.proxy.test_sessions import chat

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
    from tests.proxy.test_sessions import chat

    sessions = Sessions({"a": record})
    assert sessions.session(chat("x"), "", "a").backed_off
    assert not sessions.session(chat("x"), "", "a", "another profile").backed_off
    assert set(sessions.records()["a"].tests) == {"leaked", "ignored", "repeated", "called_next"}


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
    anew = field.FieldRecord(basis="q", at_s=1e6 + 1)
    field.write(path, {"a": anew}, 1e6)
    assert field.read(path, 1e6)["a"] == anew, "of a newer calibration"
    old = {"b": field.FieldRecord(basis="p", at_s=1e6)}
    field.write(path, {f"m{n}": field.FieldRecord(basis="", at_s=1e6 + n) for n in range(2, 258)} | old, 1e6)
    assert len(field.read(path, 1e6)) == field.AGENTS_MAX
    assert "b" not in field.read(path, 1e6)
