"""The real backbone: Gemma through llama.cpp, by `decide`, `route` and a daemon; and what is served without it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import START_S, serving
from tests.fakes.chats import CHAT, body_of, metric, said
from tests.fakes.client import once, post
from tests.fakes.upstream import FakeUpstream
from whetherman_edge.backbone import install, store
from whetherman_edge.backbone.manifest import read_manifest
from whetherman_edge.backbone.progress import ConsoleProgress

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def models(weights) -> Path:
    """The models' directory, with the backbone's weights in it."""
    install.ensure_backbone(read_manifest(), ConsoleProgress())
    return store.models_dir()


def run(*arguments: str, env: dict[str, str] | None = None, code: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(("-c", code) if code else ("-m", "whetherman_edge")), *arguments]
    clean = {key: value for key, value in os.environ.items() if not key.startswith("WHETHERMAN_")}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=START_S, cwd=ROOT, env={**clean, **(env or {})}, check=False
    )


def chat(n: int) -> dict[str, object]:
    return {**CHAT, "messages": [{"role": "user", "content": f"Find me flight number {n} to Oslo."}]}


@pytest.mark.model
def test_decide_with_the_backbone_is_repeatable_and_not_the_static_stage_s(models, tmp_path):
    file = tmp_path / "in.jsonl"
    file.write_text("".join(json.dumps({"id": i, "request": chat(i % 3)}) + "\n" for i in range(6)))
    env = {"WHETHERMAN_MODELS": str(models)}
    found = {}
    for engine in ("gemma", "static"):
        done = run("decide", "--jsonl", str(file), "--engine", engine, env=env)
        assert done.returncode == 0, done.stderr
        found[engine] = [json.loads(line) for line in done.stdout.splitlines()]
        assert {record["engine"] for record in found[engine]} == {engine}
    for i in range(3):
        first, again = found["gemma"][i], found["gemma"][i + 3]
        assert first["probabilities"] == pytest.approx(again["probabilities"], abs=2e-3)
        assert first["probabilities"] != found["static"][i]["probabilities"]


@pytest.mark.model
@pytest.mark.model
def test_d05_the_backbone_calls_for_an_action_behind_prose(models, tmp_path):
    turns = [("user", "lamp on"), ("assistant", "Turned on"), ("user", "kitchen light on")]
    schema = {"type": "object", "properties": {"device": {"type": "string"}}, "required": ["device"]}
    tool = {"name": "turn_on", "description": "Turn on a device by name.", "parameters": schema}
    file = tmp_path / "in.json"
    messages = [{"role": role, "content": content} for role, content in turns]
    file.write_text(json.dumps({"model": "m", "messages": messages, "tools": [{"type": "function", "function": tool}]}))
    done = run("decide", str(file), "--engine", "gemma", env={"WHETHERMAN_MODELS": str(models)})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verdict"] == "ACT"


@pytest.mark.parametrize("engine", ["gemma", "auto"])
def test_route_answers_with_every_engine(models, tmp_path, engine):
    file = tmp_path / "tools.json"
    file.write_text(json.dumps({"get_weather": "Current weather in a city.", "send_mail": "Send an e-mail."}))
    env = {"WHETHERMAN_MODELS": str(models)}
    done = run("route", "will it rain in Oslo?", "--tools", str(file), "--engine", engine, env=env)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["choice"] == "get_weather"
    assert sum(answer["probabilities"].values()) == pytest.approx(1.0)


@pytest.mark.model
@pytest.mark.e2e
async def test_a_daemon_answers_with_the_backbone_and_counts_what_it_reused(models, tmp_path):
    upstream = await FakeUpstream().start()
    env = {"WHETHERMAN_MODELS": str(models), "WHETHERMAN_GATE_DEADLINE_MS": "3000"}
    try:
        with serving("--engine", "gemma", "--upstream", upstream.url, home=tmp_path, env=env) as daemon:
            while not any("event=backbone_ready" in line for line in daemon.log):  # noqa: ASYNC110 - a child's stderr
                await asyncio.sleep(0.05)
            answers = [await post(daemon.url, chat(i)) for i in range(3)]
            again = await post(daemon.url, chat(0))
            health = (await once(daemon.url, "GET", "/health")).json()
            reused = await metric(daemon.url, 'backbone_tokens_total{source="reused"}')
            ready = await metric(daemon.url, "backbone_ready")
    finally:
        await upstream.stop()
    assert {answer.header("x-whetherman-engine") for answer in (*answers[1:], again)} == {"gemma"}
    assert said(again)[1] == "no"
    assert health["backbone"] == {"state": "ready", "detail": ""}
    assert reused > 0
    assert ready == 1
    posted = [seen.body for seen in upstream.requests if seen.head.startswith(b"POST ")]
    assert posted == [body_of(chat(i)) for i in (0, 1, 2, 0)]


@pytest.mark.e2e
@pytest.mark.parametrize("engine", ["gemma", "auto"])
async def test_without_weights_the_static_stage_serves_and_says_so(tmp_path, engine):
    upstream = await FakeUpstream().start()
    env = {"WHETHERMAN_MODELS": str(tmp_path / "none")}
    try:
        with serving("--engine", engine, "--upstream", upstream.url, home=tmp_path, env=env) as daemon:
            answer = await post(daemon.url, CHAT)
            health = (await once(daemon.url, "GET", "/health")).json()
            ready = await once(daemon.url, "GET", "/readyz")
            log = list(daemon.log)
    finally:
        await upstream.stop()
    assert answer.header("x-whetherman-engine") == "static"
    assert health["backbone"]["state"] == "missing"
    assert "model install gemma" in health["backbone"]["detail"]
    assert ready.status == 200
    assert sum("event=backbone_missing" in line for line in log) == 1


BLOCKED = """
import sys
sys.modules["llama_cpp"] = None
sys.argv[0] = "whetherman-edge"
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "llama_cpp" else find(name, *rest)
from whetherman_edge.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_without_llama_cpp_what_asks_for_it_says_so_and_the_rest_goes_on(tmp_path):
    body, tools = tmp_path / "chat.json", tmp_path / "tools.json"
    body.write_text(json.dumps(CHAT))
    tools.write_text(json.dumps({"get_weather": "Current weather.", "send_mail": "Send an e-mail."}))
    refused = run("decide", str(body), "--engine", "gemma", code=BLOCKED)
    assert (refused.returncode, refused.stdout) == (3, "")
    assert "llama-cpp-python" in refused.stderr
    decided = run("decide", str(body), "--engine", "auto", code=BLOCKED)
    assert (decided.returncode, json.loads(decided.stdout)["engine"]) == (0, "static")
    routed = run("route", "rain in Oslo?", "--tools", str(tools), "--engine", "gemma", code=BLOCKED)
    assert (routed.returncode, json.loads(routed.stdout)["choice"]) == (0, "get_weather")
    assert "static router answers" in routed.stderr
    checks = json.loads(run("doctor", "--json", code=BLOCKED).stdout)["checks"]
    gemma = next(check for check in checks if check["name"] == "gemma")
    assert gemma["state"] == "note"
    assert "llama-cpp-python" in gemma["detail"]
    quiet = run("decide", str(body), code=BLOCKED)
    assert (quiet.returncode, quiet.stderr) == (0, "")
