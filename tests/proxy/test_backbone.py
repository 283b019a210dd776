"""The daemon with a second stage that is wedged, dead or late: requests go on, and /health and /metrics say so."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes.backbone import FakeWorker, Opens, last_for, write_artifact
from tests.fakes.chats import CHAT, metric, said
from tests.fakes.client import once, post
from tests.profiles.samples import profile_of
from whetherman_edge import composition
from whetherman_edge import engine as engines
from whetherman_edge.backbone import stage as stages
from whetherman_edge.engine import Router, StaticEngine
from whetherman_edge.profiles.schema import Agent, EngineArtifact, Layer, Tau
from whetherman_edge.proxy import gating


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """The daemon's backbone worker; it takes every request, and decides as it is told."""
    router = Router()
    static = StaticEngine(router)
    monkeypatch.setenv(
        "WHETHERMAN_BACKBONE", str(write_artifact(tmp_path, gate=static.sha256, router=router.table.sha256))
    )
    fake = FakeWorker()
    fake.last = last_for("ANSWER")
    opens = Opens(fake)
    monkeypatch.setattr(engines.install, "require_backbone", lambda _manifest: opens.locate())
    monkeypatch.setattr(engines, "_worker", lambda _settings, _manifest, path: opens.make(path))
    monkeypatch.setattr(stages, "RESTART_FIRST_S", 3600.0)
    yield fake
    fake.release()


async def health(url: str) -> dict:
    return (await once(url, "GET", "/health")).json()


async def ready(url: str) -> None:
    while (await health(url))["backbone"]["state"] == "loading":  # noqa: ASYNC110 - another thread opens it
        await asyncio.sleep(0.001)


async def test_the_backbone_decides_and_is_counted(upstream, serve, worker):
    async with serve(engine="gemma", gate_deadline_ms=3000) as url:
        await ready(url)
        answer = await post(url, CHAT)
        assert await metric(url, 'backbone_requests_total{outcome="answered"}') == 1
        assert await metric(url, 'verdicts_total{engine="gemma"}') == 1
        assert await metric(url, "backbone_ready") == 1
        assert (await health(url))["backbone"] == {"state": "ready", "detail": ""}
    assert answer.header("x-whetherman-engine") == "gemma"
    assert worker.stopped.is_set()


async def test_a_wedged_backbone_costs_some_requests_their_deadline_and_then_nothing(
    upstream, serve, worker, monkeypatch
):
    monkeypatch.setattr(composition, "FAILURES_MAX", 1)
    worker.mode = "hang"
    async with serve(engine="gemma", gate_deadline_ms=600) as url:
        await ready(url)
        answers = [await post(url, CHAT) for _ in range(4)]
        assert await metric(url, 'backbone_requests_total{outcome="late"}') == 1
        assert await metric(url, 'backbone_requests_total{outcome="resting"}') == 3
        assert await metric(url, "gate_failures_total") == 0
        assert (await health(url))["backbone"]["state"] == "resting"
        assert (await once(url, "GET", "/readyz")).status == 200
    assert {answer.header("x-whetherman-engine") for answer in answers} == {"static"}
    assert all(said(answer)[2] in gating.policy.REASONS for answer in answers)
    assert len(worker.prompts) == 1


async def test_a_dead_backbone_leaves_the_static_stage(upstream, serve, worker):
    worker.mode = "dead"
    async with serve(engine="auto", gate_deadline_ms=3000) as url:
        await ready(url)
        assert (await post(url, CHAT)).header("x-whetherman-engine") == "static"
        found = (await health(url))["backbone"]
        assert (found["state"], "not running" in found["detail"]) == ("failed", True)
        assert await metric(url, "backbone_ready") == 0


def profile_on(sha256: str):
    return profile_of(
        agent=Agent("llamacpp", CHAT["model"]),
        engine=EngineArtifact("gemma", sha256),
        layer=Layer(("log_p_act",), (0.0,), (1.0,), (1.0,), bias=0.0),
        tau=Tau(answer=0.0, ask=0.0, decline=0.0),
    )


@pytest.mark.parametrize(("mode", "expected"), [("answer", ("ANSWER", "yes")), ("hang", ("ACT", "no"))])
async def test_what_was_proven_with_the_backbone_is_applied_with_the_backbone_only(
    upstream, serve, worker, monkeypatch, mode, expected
):
    from whetherman_edge.backbone.manifest import read_manifest
    from whetherman_edge.profiles.store import ProfileStore

    profile = profile_on(read_manifest().sha256)
    for method in ("load", "reload"):
        monkeypatch.setattr(ProfileStore, method, lambda self, name: profile)
    worker.mode = mode
    async with serve(engine="gemma", gate_deadline_ms=200, profile="p", upstream_kind="llamacpp") as url:
        await ready(url)
        answer = await post(url, {**CHAT, "messages": [{"role": "user", "content": "What is two plus two?"}]})
    assert said(answer)[:2] == expected
    assert said(answer)[2] == ("scored" if mode == "answer" else "backbone_late")
