"""Engines "gemma" and "auto": which stage decides, and what a profile makes of it. The worker is scripted."""

from __future__ import annotations

import asyncio
import gc
import inspect
import time
import warnings

import msgspec
import numpy as np
import pytest

from tests.fakes.backbone import FakeWorker, Opens, arrays, last_for, write_artifact
from tests.gate.chats import chat_of, tool, user
from tests.profiles.samples import profile_of
from whetherman_edge import engine as engines
from whetherman_edge.engine import Chooser, Router, StagedEngine, StaticEngine, open_chooser, open_engine
from whetherman_edge.errors import EnvironmentFault, ProfileError
from whetherman_edge.gate.static_gate import FUSED_NAMES
from whetherman_edge.profiles.schema import EngineArtifact, Layer

WEATHER = tool("get_weather", "Current weather in a city.", ("city",))
MAIL = tool("send_mail", "Send an e-mail.", ("to", "body"))
CHAT = chat_of(user("Is it raining in Oslo right now?"), tools=[WEATHER, MAIL])


@pytest.fixture(scope="module")
def router():
    return Router()


@pytest.fixture(scope="module")
def static(router):
    return StaticEngine(router)


@pytest.fixture
def opened(tmp_path, monkeypatch, router, static):
    """``opened(name, worker, **manifest)``: an engine whose stage is settled."""
    made = []

    def run(name: str, worker: FakeWorker | None = None, **changed) -> StagedEngine:
        worker = worker or FakeWorker()
        opens = Opens(worker)
        monkeypatch.setenv("WHETHERMAN_BACKBONE", str(write_artifact(tmp_path, **changed)))
        monkeypatch.setattr(engines.install, "require_backbone", lambda _manifest: opens.locate())
        monkeypatch.setattr(engines, "_worker", lambda _settings, _manifest, path: opens.make(path))
        values = {"gate": static.sha256, "router": router.table.sha256, **changed}
        write_artifact(tmp_path, **values)
        engine = open_engine(name, static, router.table.sha256)
        if engine.stage is not None:
            engine.stage.start()
            engine.stage.settled()
            made.append((worker, engine))
        return engine

    yield run
    for worker, engine in made:
        worker.release()
        engine.stage.stop()


async def judged(engine, chat=CHAT, deadline_s=None, profile=None):
    verdict = engine.judge(chat, time.monotonic() + 3600 if deadline_s is None else deadline_s, profile)
    return await verdict if inspect.isawaitable(verdict) else verdict


@pytest.mark.parametrize("n_tools", [2, 3 * engines.TOOLS_AT_ONCE])
async def test_a_verdict_that_nobody_comes_to_await_is_no_warning(opened, n_tools):
    """The client left in between; found by the reliability run."""
    many = chat_of(
        user("Is it raining?"), tools=[tool(f"left_{i}", f"Kind {i} of rain.", ("a",)) for i in range(n_tools)]
    )
    engine = opened("gemma")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert inspect.isawaitable(engine.judge(many, time.monotonic() + 3600))
        gc.collect()
    assert [str(one.message) for one in said] == []
    assert (await judged(engine, many)).engine == "gemma"


@pytest.mark.parametrize("label", ["ACT", "ANSWER", "ASK", "DECLINE"])
async def test_gemma_decides_by_the_fusion(opened, label):
    worker = FakeWorker()
    worker.last = last_for(label)
    verdict = await judged(opened("gemma", worker))
    assert (verdict.label, verdict.engine, verdict.fallback) == (label, "gemma", False)
    assert len(verdict.fused) == len(FUSED_NAMES)
    assert np.exp(verdict.fused[:4]) == pytest.approx(verdict.probabilities)


async def test_what_is_not_a_log_probability_stays_the_static_stage_s(opened, static):
    verdict, alone = await judged(opened("gemma")), static.judge(CHAT, 0.0)
    assert verdict.fused[4:] == alone.fused[4:]


async def test_auto_asks_only_inside_the_band(opened, static):
    skip = 1 - static.judge(CHAT, 0.0).p_need
    worker = FakeWorker()
    outside = opened("auto", worker, ask_band={"low": min(skip + 0.01, 1.0), "high": 1.0})
    verdict = outside.judge(CHAT, 0.0)
    assert (verdict.engine, verdict.fallback) == ("static", False)
    assert worker.prompts == []


async def test_auto_inside_the_band_is_fused(opened):
    verdict = await judged(opened("auto", ask_band={"low": 0.0, "high": 1.0}))
    assert verdict.engine == "gemma"


async def test_gemma_asks_outside_the_band_too(opened):
    assert (await judged(opened("gemma", ask_band={"low": 0.0, "high": 0.0}))).engine == "gemma"


async def test_late_gives_the_static_verdict_and_the_work_goes_on(opened, static):
    worker = FakeWorker(mode="hang")
    verdict = await judged(opened("gemma", worker), deadline_s=0.0)
    assert verdict == msgspec.structs.replace(static.judge(CHAT, 0.0), fallback=True)
    assert len(worker.held) == 1
    assert worker.held[0].prompt.turns != ()


@pytest.mark.parametrize("mode", ["dead", "full", "broken"])
async def test_a_worker_that_fails_leaves_the_static_verdict(opened, static, mode):
    verdict = await judged(opened("gemma", FakeWorker(mode=mode)))
    assert verdict == msgspec.structs.replace(static.judge(CHAT, 0.0), fallback=True)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"gate": "a" * 64}, "fitted on static gate"),
        ({"router": "a" * 64}, "fitted on router"),
        ({"layer": 99}, "below n_layers"),
        ({"default_tau": [{"ANSWER": 0.5}]}, "3 phases"),
        ({"arrays_of": arrays(head_weight=np.full((4, 8), np.nan, np.float32))}, "finite"),
        ({"arrays_of": arrays(fusion_weights=np.zeros((3, 9, 4), np.float32))}, "fusion"),
    ],
)
async def test_an_artifact_that_does_not_fit_leaves_the_static_stage(opened, static, changed, says):
    engine = opened("auto", **changed)
    assert engine.stage is None
    assert says in engine.fault
    assert engine.state == "failed"
    verdict = engine.judge(CHAT, 0.0)
    assert verdict == msgspec.structs.replace(static.judge(CHAT, 0.0), fallback=True)
    assert engine.default_tau == static.default_tau


async def test_each_stage_has_its_own_operating_point(opened, static):
    engine = opened("auto")
    assert [(tau.answer, tau.ask) for tau in engine.default_tau] == [(0.5, None)] * 3
    assert engine.fallback_tau == static.default_tau


def on(engine_name: str, sha256: str, weight: float = 1.0):
    layer = Layer(("log_p_act",), (0.0,), (1.0,), (weight,), bias=0.0)
    return profile_of(engine=EngineArtifact(engine_name, sha256), layer=layer)


async def test_a_profile_of_the_static_stage_is_served_by_it_alone(opened, static):
    worker = FakeWorker()
    engine = opened("gemma", worker)
    profile = on("static", static.sha256)
    engine.fits(profile, "p")
    assert engine.judge(CHAT, 0.0, profile) == static.judge(CHAT, 0.0)
    assert worker.prompts == []


async def test_a_profile_of_the_backbone_fits_that_artifact_only(opened, static):
    engine = opened("auto")
    engine.fits(on("gemma", engine.stage.manifest.sha256), "p")
    for profile in (on("gemma", static.sha256), on("static", engine.stage.manifest.sha256)):
        with pytest.raises(ProfileError, match="calibrate again"):
            engine.fits(profile, "p")
    with pytest.raises(ProfileError):
        opened("auto", gate="a" * 64).fits(on("gemma", engine.stage.manifest.sha256), "p")


async def test_under_a_profile_the_band_is_on_its_own_p_need(opened, static):
    worker = FakeWorker()
    engine = opened("auto", worker, ask_band={"low": 0.2, "high": 0.8})
    sure = profile_of(
        engine=EngineArtifact("gemma", engine.stage.manifest.sha256),
        layer=Layer(("log_p_act",), (0.0,), (1.0,), (0.0,), bias=9.0),
    )
    assert engine.judge(CHAT, 0.0, sure).engine == "static"
    torn = profile_of(
        engine=EngineArtifact("gemma", engine.stage.manifest.sha256),
        layer=Layer(("log_p_act",), (0.0,), (1.0,), (0.0,), bias=0.0),
    )
    assert (await judged(engine, profile=torn)).engine == "gemma"


OPTIONS = {"alpha": "First.", "beta": "Second.", "gamma": None}


def matching(*names: str) -> FakeWorker:
    """A worker that finds the first of these tools to fit best, then the next."""
    worker = FakeWorker()
    for place, name in enumerate(names):
        worker.lasts[name] = np.ones(8, np.float32)
        worker.lasts[name][5] = 8.0 - 3 * place
    return worker


async def test_a_choice_of_tools_is_put_to_the_backbone_when_the_router_is_unsure(opened, router):
    worker = matching("gamma", "beta", "alpha")
    engine = opened("auto", worker)
    first = await router.route("something else entirely", OPTIONS)
    choice = await engine.chooser.second_opinion("something else entirely", OPTIONS, first, time.monotonic() + 3600)
    assert choice.choice == "gamma"
    assert list(choice.probabilities) == list(OPTIONS)
    assert sum(choice.probabilities.values()) == pytest.approx(1.0)
    assert choice.confidence == choice.probabilities["gamma"]
    assert sorted(prompt.tool_names for prompt in worker.prompts) == [("alpha",), ("beta",), ("gamma",)]
    sure = msgspec.structs.replace(first, confidence=0.95)
    assert await engine.chooser.second_opinion("x", OPTIONS, sure, 0.0) == sure
    assert len(worker.prompts) == 3
    always = Chooser("gemma", engine.stage)
    assert (await always.second_opinion("x", OPTIONS, sure, time.monotonic() + 3600)).choice == "gamma"


async def test_only_the_likeliest_tools_are_read_and_the_others_keep_their_probability(opened, router):
    many = {f"tool_{n}": f"Does number {n} of many things." for n in range(engines.CANDIDATES + 5)}
    engine = opened("gemma", worker := FakeWorker())
    first = await router.route("number seven", many)
    choice = await engine.chooser.second_opinion("number seven", many, first, time.monotonic() + 3600)
    likeliest = sorted(many, key=lambda name: -first.probabilities[name])[: engines.CANDIDATES]
    assert [prompt.tool_names[0] for prompt in worker.prompts] == likeliest
    for name in set(many) - set(likeliest):
        assert choice.probabilities[name] == first.probabilities[name]
    assert sum(choice.probabilities.values()) == pytest.approx(1.0)


async def test_what_was_read_in_time_is_put_in_order_and_nothing_is_asked_that_would_come_late(opened, router):
    end_s = time.monotonic() + 3600
    engine = opened("gemma", worker := matching("alpha", "beta", "gamma"))
    first = await router.route("something else entirely", OPTIONS)
    shown = iter((0.0, 0.4, 0.4, 0.8, 0.8))  # each takes 0.4 s of the one that there is
    chooser = Chooser("gemma", engine.stage, lambda: end_s - 1.0 + next(shown))
    choice = await chooser.second_opinion("something else entirely", OPTIONS, first, end_s)
    left = min(first.probabilities, key=lambda name: first.probabilities[name])
    assert len(worker.prompts) == 2
    assert choice.probabilities[left] == first.probabilities[left]
    assert choice.probabilities != first.probabilities


async def test_without_a_match_head_nothing_is_asked(opened, router, static):
    worker = FakeWorker()
    engine = opened("gemma", worker, arrays_of=arrays(match_state=None))
    choice = await router.route("something else entirely", OPTIONS)
    assert await engine.chooser.second_opinion("x", OPTIONS, choice, time.monotonic() + 3600) == choice
    assert worker.prompts == []
    verdict, alone = await judged(engine), static.judge(CHAT, 0.0)
    assert verdict.engine == "gemma"
    assert (verdict.tool, verdict.tool_probability) == (alone.tool, alone.tool_probability)


@pytest.mark.parametrize("mode", ["hang", "broken", "dead"])
async def test_a_choice_without_an_answer_in_time_is_the_router_s(opened, router, mode):
    engine = opened("gemma", FakeWorker(mode=mode))
    first = await router.route("x", OPTIONS)
    assert await engine.chooser.second_opinion("x", OPTIONS, first, 0.0) == first


def test_a_chooser_needs_a_match_head_and_weights(opened, router, monkeypatch):
    opened("auto", arrays_of=arrays(match_state=None))
    with pytest.raises(EnvironmentFault, match="no match head"):
        open_chooser("auto", router.table.sha256)
    opened("auto")

    def missing(_manifest):
        raise EnvironmentFault("model install gemma")

    monkeypatch.setattr(engines.install, "require_backbone", missing)
    with pytest.raises(EnvironmentFault, match="model install gemma"):
        open_chooser("auto", router.table.sha256)


@pytest.mark.parametrize("name", ["static", "auto"])
async def test_many_new_tools_hold_the_loop_for_a_few_at_a_time(router, name):
    many = [tool(f"read_{name}_{n}", f"Read record {n} of the archive.", ("id",)) for n in range(600)]
    chat = msgspec.structs.replace(chat_of(user("Is it raining?"), tools=many), toolset_key=name.encode())
    engine = StaticEngine(router) if name == "static" else StagedEngine(name, StaticEngine(router), None, None, "none")
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    waiting = engine.judge(chat, 0.0)
    assert inspect.isawaitable(waiting)
    verdict = await waiting
    beside.cancel()
    assert turns >= 600 // 32
    alone = StaticEngine(Router())._gate.judge(chat)
    assert verdict == msgspec.structs.replace(alone, fallback=name == "auto")
    assert engine.judge(chat, 0.0) == verdict, "at once, now that the list is known"
