"""Profiles on the wire: which one a request gets, and what it allows (DESIGN 7)."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.fakes.chats import CHAT, body_of, said
from tests.fakes.client import post
from tests.fakes.judge import verdict
from whetherman_edge import composition
from whetherman_edge.errors import ProfileError, ProfileNotFound
from whetherman_edge.gate.verdict import LABELS
from whetherman_edge.profiles.schema import (
    SCHEMA_VERSION,
    Agent,
    EngineArtifact,
    InterventionChoice,
    Layer,
    Profile,
    Risk,
    Tau,
)
from whetherman_edge.profiles.store import Stored

SHA = "a" * 64


def profile(*, tau: float | None = 0.5, risk: bool = True, mode: str = "auto", model: str = "") -> Profile:
    """Reads p(need) from the fused log-probability of ACT alone: below 0.5 it is confident. Of any model, or of one."""
    return Profile(
        schema=SCHEMA_VERSION,
        agent=Agent(kind="openai", model=model),
        engine=EngineArtifact(name="static", sha256=SHA),
        layer=Layer(features=("log_p_act",), mean=(0.0,), scale=(1.0,), weights=(4.0,), bias=3.0),
        tau=Tau(answer=tau, ask=tau, decline=tau),
        risk=Risk(alpha=0.05, delta=0.1, n_measured=200, n_withheld=80, n_false_skips=1) if risk else None,
        intervention=InterventionChoice(mode=mode),  # type: ignore[arg-type]
        created="2026-01-01T00:00:00Z",
        version="0.1.0",
    )


@pytest.fixture
def profiles(monkeypatch, judge):
    """Profiles by name, for daemons of this test; the judge's verdicts carry the one fused value that they read."""
    known: dict[str, Profile] = {}

    class Store:
        def __init__(self, **_keys) -> None:
            pass

        def load(self, name: str) -> Profile:
            if name not in known:
                raise ProfileNotFound(f"no profile named {name!r}")
            if known[name].engine.sha256 != SHA:
                raise ProfileError(f"profile {name!r}: fitted on another engine")
            return known[name]

        reload = load

        def list(self) -> list[Stored]:
            return [Stored(name, Path(name), "", one) for name, one in sorted(known.items())]

    monkeypatch.setattr(composition, "ProfileStore", Store)
    judge.fused_names = ("log_p_act",)
    return known


def sure(label: str):
    one = verdict(label)  # type: ignore[arg-type]
    act = one.probabilities[LABELS.index("ACT")]
    return msgspec.structs.replace(one, fused=(0.0 if act > 0.5 else -3.5,))


async def test_a_calibrated_profile_enforces_without_being_told_to(upstream, serve, judge, profiles):
    profiles["good"] = profile()
    judge.verdict = sure("ANSWER")
    async with serve(profile="good", intervention="strip") as url:
        answer = await post(url, CHAT)
        assert said(answer) == ("ANSWER", "yes", "scored")
        assert "tools" not in upstream.last.json()
        assert said(await post(url, CHAT, x_whetherman_mode="shadow")) == ("ANSWER", "no", "scored")
        assert upstream.last.body == body_of(CHAT)
        judge.verdict = sure("ACT")
        assert said(await post(url, CHAT)) == ("ACT", "no", "need")
        assert upstream.last.body == body_of(CHAT)


@pytest.mark.parametrize("keys", [{"risk": False}, {"tau": None}])
async def test_a_profile_that_proves_nothing_changes_nothing(upstream, serve, judge, profiles, keys):
    profiles["bare"] = profile(**keys)
    judge.verdict = sure("ANSWER")
    for mode in (None, "enforce"):
        async with serve(profile="bare", mode=mode) as url:
            answer = await post(url, CHAT, x_whetherman_mode="enforce")
        assert answer.header("x-whetherman-applied") == "no"
        assert upstream.last.body == body_of(CHAT)


async def test_the_request_header_wins_over_agents_over_the_default(upstream, serve, judge, profiles):
    profiles.update(strip=profile(mode="strip"), note=profile(mode="note"), none=profile(mode="none"))
    judge.verdict = sure("ANSWER")
    async with serve(profile="none", agents={"qwen*": "note"}) as url:
        await post(url, CHAT)
        assert upstream.last.json()["tool_choice"] == "none"
        await post(url, {**CHAT, "model": "qwen3:4b"})
        assert upstream.last.json()["tools"] == CHAT["tools"]
        assert upstream.last.json()["messages"] != CHAT["messages"]
        await post(url, {**CHAT, "model": "qwen3:4b"}, x_whetherman_profile="strip")
        assert "tools" not in upstream.last.json()


async def test_a_model_that_was_measured_and_has_no_profile_is_told_of_once(upstream, serve, judge, profiles, caplog):
    profiles["own"] = profile(model="qwen2.5-coder-1.5b")
    judge.verdict = sure("ANSWER")
    ollama = {**CHAT, "model": "qwen2.5-coder:1.5b"}
    caplog.set_level("INFO")
    async with serve() as url:
        for _ in range(3):
            assert said(await post(url, ollama))[1] == "no"
            assert upstream.last.body == body_of(ollama), "it is said, and not done"
        await post(url, {**CHAT, "model": "qwen2.5-coder:7b"})
    assert caplog.text.count("event=profile_at_hand") == 1
    assert '"qwen2.5-coder:1.5b" = "own"' in caplog.text
    caplog.clear()
    async with serve(agents={"qwen2.5-coder:1.5b": "own"}) as url:
        assert said(await post(url, ollama))[1] == "yes"
    assert "event=profile_at_hand" not in caplog.text


async def test_a_name_that_does_not_tell_the_same_model_stays_in_shadow_and_its_line_is_said(
    upstream, serve, judge, profiles, caplog
):
    profiles["own"] = profile(model="qwen2.5-coder-1.5b")
    judge.verdict = sure("ANSWER")
    tagged = {**CHAT, "model": "qwen2.5-coder:1.5b-instruct-q4_K_M"}
    async with serve(profile="own") as url:
        assert said(await post(url, tagged))[1] == "no"
        assert upstream.last.body == body_of(tagged)
    assert '"qwen2.5-coder:1.5b-instruct-q4_K_M" = "own"' in caplog.text


async def test_a_broken_profile_of_one_agent_leaves_the_others_alone(upstream, serve, judge, profiles, caplog):
    profiles["good"] = profile(mode="strip")
    profiles["old"] = msgspec.structs.replace(profile(), engine=EngineArtifact(name="static", sha256="b" * 64))
    judge.verdict = sure("ANSWER")
    async with serve(agents={"a": "good", "b": "old", "c": "gone"}) as url:
        assert said(await post(url, {**CHAT, "model": "a"})) == ("ANSWER", "yes", "scored")
        assert said(await post(url, {**CHAT, "model": "b"})) == ("ACT", "no", "profile_unknown")
        assert said(await post(url, {**CHAT, "model": "c"})) == ("ACT", "no", "profile_unknown")
    assert caplog.text.count("event=profile_unusable") == 2


async def test_a_profile_named_at_the_start_must_be_usable(serve, judge, profiles):
    with pytest.raises(ProfileNotFound, match="nope"):
        async with serve(profile="nope"):
            pass
