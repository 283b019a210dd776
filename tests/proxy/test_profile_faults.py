"""Profiles that must not be used, through the real daemon with its own engine and store: refused by name, in shadow."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.chats import CHAT, body_of, said
from tests.fakes.client import once, post
from tests.profiles.samples import profile_of
from whetherman_edge.engine import Router, StaticEngine
from whetherman_edge.profiles import store
from whetherman_edge.profiles.schema import Agent, ByKind, EngineArtifact, Layer, Profile, Tau, serialize_profile

TALK = {**CHAT, "model": "org/Qwen2.5-Coder-1.5B-Instruct-Q4_K_M.gguf"}
TALK["messages"] = [{"role": "user", "content": "Thanks a lot, that was very kind of you!"}]


@pytest.fixture(scope="module")
def sha256() -> str:
    return StaticEngine(Router()).sha256


@pytest.fixture
def keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sha256: str) -> Callable[..., Profile]:
    """Writes profile "p" of a usable kind that skips whatever is not ACT by the static gate, with some keys changed."""
    monkeypatch.setattr(store, "default_dirs", lambda: (tmp_path,))

    def write(edit: Callable[[dict[str, Any]], None] | None = None, **fields: Any) -> Profile:
        profile = profile_of(
            **{
                "engine": EngineArtifact("static", sha256),
                "agent": Agent("openai", "qwen2.5-coder-1.5b-instruct", "Q4_K_M"),
                "layer": Layer(("log_p_act",), (0.0,), (1.0,), (0.0,), bias=-6.0),
                "tau": Tau(answer=0.5, ask=0.5, decline=0.5),
                **fields,
            }
        )
        value = json.loads(serialize_profile(profile))
        if edit is not None:
            edit(value)
        (tmp_path / "p.json").write_text(json.dumps(value))
        return profile

    return write


async def profiles_in_health(url: str) -> Any:
    return (await once(url, "GET", "/health")).json()["profiles"]


def set_nan(value: dict[str, Any]) -> None:
    value["layer"]["weights"] = [float("nan")]  # json writes NaN, which is no JSON


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda value: value.update(schema=1), "schema: expected 2, got 1"),
        (lambda value: value.pop("layer"), "layer"),
        (lambda value: value.pop("risk"), "risk"),
        (lambda value: value["engine"].update(sha256="cd" * 32), "calibrate again with this version"),
        (lambda value: value["layer"].update(weights=["NaN"]), "weights"),
        (set_nan, "expected a JSON object"),
        (lambda value: value["layer"].update(features=["unheard_of"]), "no 'unheard_of'"),
        (lambda value: value["risk"].update(n_measured=62), "n_needed"),
        (lambda value: value["risk"].update(n_measured=70, n_needed=11), "the claim is 5.0%"),
    ],
)
async def test_what_cannot_be_used_is_refused_by_name_and_the_daemon_is_in_shadow(
    upstream, serve, keep, caplog, edit, message
):
    keep(edit)
    caplog.set_level("INFO")
    async with serve(profile="p", mode="enforce") as url:
        assert said(await post(url, TALK)) == ("ACT", "no", "profile_unknown")
        assert upstream.last.body == body_of(TALK)
        assert message in (await profiles_in_health(url))["unusable"]["p"]
        assert (await once(url, "GET", "/readyz")).status == 200
    assert caplog.text.count("event=profile_unusable name=p") == 1
    assert "mode=shadow" in next(line for line in caplog.messages if "event=chat" in line)


async def test_the_same_profile_is_used_when_nothing_is_wrong_with_it(upstream, serve, keep):
    keep()
    async with serve(profile="p") as url:
        decision, applied, reason = said(await post(url, TALK))
        assert (decision != "ACT", applied, reason) == (True, "yes", "scored")
        assert (await profiles_in_health(url))["unusable"] == {}


@pytest.mark.parametrize("model", ["llama-3.2-1b", "qwen2.5-coder-1.5b-instruct-q8_0", "qwen2.5-coder-0.5b-instruct"])
async def test_another_model_or_quantisation_is_left_alone_until_it_is_measured(upstream, serve, keep, caplog, model):
    keep()
    other = {**TALK, "model": model}
    async with serve(profile="p") as url:
        for _ in range(2):
            assert said(await post(url, other))[1:] == ("no", "profile_foreign")
            assert upstream.last.body == body_of(other)
        assert caplog.text.count("event=recalibrate") == 1
        agents = (await profiles_in_health(url))["agents"]
        assert "calibrate again" in agents["profile:p"]["recalibrate"]
        # Who names the profile in the request means it.
        assert said(await post(url, other, x_whetherman_profile="p"))[1:] == ("yes", "scored")
        await post(url, TALK)
        assert (await profiles_in_health(url))["agents"]["profile:p"]["recalibrate"] == ""
    # So does who gives it to this model, or asks for enforce; the advice is given all the same.
    for options in ({"agents": {f"{model[:-1]}*": "p"}}, {"profile": "p", "mode": "enforce"}):
        async with serve(**options) as url:
            assert said(await post(url, other))[1:] == ("yes", "scored")
            advice = (await profiles_in_health(url))["agents"]["profile:p"]["recalibrate"]
            assert "calibrate again" in advice


async def test_each_kind_of_step_has_its_own_threshold(upstream, serve, keep):
    keep(tau=Tau(answer=ByKind(first=0.5), ask=ByKind(first=0.5), decline=ByKind(first=0.5)))
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": CHAT["tools"][0]["function"]["name"], "arguments": "{}"},
    }
    later = {
        **TALK,
        "messages": [
            *TALK["messages"],
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "done"},
        ],
    }
    async with serve(profile="p") as url:
        assert said(await post(url, TALK))[1:] == ("yes", "scored")
        assert said(await post(url, later))[0] == "ACT"
