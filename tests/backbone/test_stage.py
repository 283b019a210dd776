"""The stage: opens beside serving, asks under a deadline, rests when it fails, comes back. The worker is scripted."""

from __future__ import annotations

import asyncio
import logging
import math
import time

import msgspec
import numpy as np
import pytest

from tests.fakes.backbone import FakeWorker, Opens, arrays, last_for, write_artifact
from tests.gate.chats import chat_of, tool, user
from whetherman_edge.backbone import stage as stages
from whetherman_edge.backbone.head import open_heads
from whetherman_edge.backbone.manifest import read_manifest
from whetherman_edge.backbone.stage import Stage
from whetherman_edge.errors import ArtifactError, EnvironmentFault
from whetherman_edge.proxy.breaker import Breaker

CHAT = chat_of(user("What is the weather?"), tools=[tool("a"), tool("b"), tool("c")])
LONG_S = 3600.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def opened(tmp_path, clock, monkeypatch):
    """``opened(workers…)``: a stage on them, settled; with what it counted as ``outcomes`` and ``opens``."""
    monkeypatch.setattr(stages, "RESTART_FIRST_S", 0.001)
    monkeypatch.setattr(stages, "WATCH_S", 0.001)
    made = []

    def run(*workers: FakeWorker, failures: int = 3, missing: Exception | None = None, **changed) -> Stage:
        manifest = read_manifest(write_artifact(tmp_path, **changed))
        opens = Opens(*workers)
        opens.missing = missing
        outcomes = []
        stage = Stage(
            manifest,
            open_heads(manifest),
            locate=opens.locate,
            make_worker=opens.make,
            breaker=Breaker(failures, clock),
            count=outcomes.append,
        )
        stage.outcomes, stage.opens = outcomes, opens
        made.append((stage, workers))
        stage.start()
        stage.settled()
        return stage

    yield run
    for stage, workers in made:
        for worker in workers:
            worker.release()
        stage.stop()


async def until(condition) -> None:
    while not condition():  # noqa: ASYNC110 - the stage's thread has no event for the loop
        await asyncio.sleep(0.001)


def soon() -> float:
    return time.monotonic() + LONG_S


async def test_an_answer_is_read_by_both_heads(opened):
    worker = FakeWorker()
    worker.last = last_for("DECLINE")
    stage = opened(worker)
    reading = await stage.read(CHAT, soon())
    assert int(np.argmax(reading.log_p)) == 3
    assert np.exp(reading.log_p).sum() == pytest.approx(1.0)
    assert reading.tool_names == ("a", "b", "c")
    assert reading.tool_p.sum() + reading.none_p == pytest.approx(1.0)
    assert (stage.outcomes, stage.state, stage.fault) == (["answered"], "ready", "")
    assert worker.keys == [CHAT.toolset_key.hex()]


async def test_without_a_deadline_it_waits(opened):
    worker = FakeWorker(mode="hang")
    stage = opened(worker)
    asking = asyncio.ensure_future(stage.read(CHAT, math.inf))
    await asyncio.to_thread(worker.submitted.wait)
    worker.release()
    assert (await asking) is not None


async def test_a_wedged_worker_is_late_then_rests_and_a_probe_brings_it_back(opened, clock, caplog):
    worker = FakeWorker(mode="hang")
    stage = opened(worker, failures=2)
    assert [await stage.read(CHAT, 0.0) for _ in range(4)] == [None] * 4
    assert stage.outcomes == ["late", "late", "resting", "resting"]
    assert len(worker.abandoned) == 2
    assert stage.state == "resting"
    assert "rests" in stage.fault
    assert "event=backbone_resting" in caplog.text
    clock.now_s += 6.0
    assert await stage.read(CHAT, 0.0) is None  # the probe is late too: it goes on resting
    assert (stage.outcomes[-1], stage.state) == ("late", "resting")
    worker.mode = "answer"
    clock.now_s += 6.0
    assert await stage.read(CHAT, soon()) is not None
    assert (stage.state, stage.fault) == ("ready", "")


@pytest.mark.parametrize(("mode", "outcome"), [("full", "busy"), ("broken", "failed")])
async def test_what_fails_is_no_answer_and_never_raises(opened, mode, outcome):
    stage = opened(FakeWorker(mode=mode), failures=2)
    assert [await stage.read(CHAT, soon()) for _ in range(3)] == [None] * 3
    assert stage.outcomes == [outcome, outcome, "resting"]


async def test_a_prompt_that_is_too_long_says_nothing_of_the_worker(opened, clock):
    worker = FakeWorker(mode="long")
    stage = opened(worker, failures=2)
    assert [await stage.read(CHAT, soon()) for _ in range(3)] == [None] * 3
    assert (stage.outcomes, stage.state) == (["too_long"] * 3, "ready")
    worker.mode = "broken"
    for _ in range(2):
        await stage.read(CHAT, soon())
    clock.now_s += 6.0
    worker.mode = "long"
    assert await stage.read(CHAT, soon()) is None  # a probe that was too long leaves the next one its turn
    worker.mode = "answer"
    assert await stage.read(CHAT, soon()) is not None
    assert stage.state == "ready"


async def test_states_that_are_not_finite_are_a_failure(opened):
    worker = FakeWorker()
    worker.last = np.full(8, np.nan, np.float32)
    stage = opened(worker, failures=1)
    assert await stage.read(CHAT, soon()) is None
    assert (stage.outcomes, stage.state) == (["failed"], "resting")


async def test_a_dead_worker_is_replaced(opened, caplog):
    caplog.set_level(logging.INFO)
    first, second = FakeWorker(), FakeWorker()
    stage = opened(first, second, failures=5)
    assert await stage.read(CHAT, soon()) is not None
    first.mode = "dead"
    assert await stage.read(CHAT, soon()) is None
    await until(lambda: stage.is_open)
    assert await stage.read(CHAT, soon()) is not None
    assert first.stopped.is_set()
    assert stage.counts.jobs == 2  # of both workers
    assert "event=backbone_lost" in caplog.text
    assert caplog.text.count("event=backbone_ready") == 2


async def test_without_weights_it_says_so_once_and_takes_them_when_they_appear(opened, caplog):
    caplog.set_level(logging.INFO)
    stage = opened(FakeWorker(), missing=ArtifactError("run `model install gemma`"))
    assert (stage.state, stage.is_open) == ("missing", False)
    assert "model install gemma" in stage.fault
    assert await stage.read(CHAT, soon()) is None
    assert stage.outcomes == ["absent"]
    stage.opens.missing = None
    await until(lambda: stage.is_open)
    assert await stage.read(CHAT, soon()) is not None
    assert caplog.text.count("event=backbone_missing") == 1


@pytest.mark.parametrize("raised", [EnvironmentFault("no llama.cpp"), RuntimeError("PROMPTTEXT"), OSError("SIGBUS")])
async def test_a_worker_that_cannot_be_opened_is_a_fault_not_an_exception(opened, raised, monkeypatch):
    monkeypatch.setattr(stages, "RESTART_FIRST_S", LONG_S)
    worker = FakeWorker()
    worker.unopened = raised
    stage = opened(worker)
    assert stage.state == "failed"
    assert str(raised) in stage.fault
    assert await stage.read(CHAT, soon()) is None


async def test_a_client_that_leaves_says_nothing_about_the_worker(opened):
    worker = FakeWorker(mode="hang")
    stage = opened(worker, failures=1)
    asking = asyncio.ensure_future(stage.read(CHAT, math.inf))
    await asyncio.to_thread(worker.submitted.wait)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert len(worker.abandoned) == 1
    assert (stage.outcomes, stage.state) == ([], "ready")


def test_stopping_ends_the_worker_and_the_thread(opened):
    worker = FakeWorker()
    stage = opened(worker)
    stage.stop()
    assert worker.stopped.is_set()
    assert (stage.state, stage.is_open) == ("stopped", False)


async def test_without_a_pointer_head_no_tool_is_named(opened):
    bare = arrays(pointer_query=None, pointer_key=None, pointer_none_weight=None, pointer_none_bias=None)
    stage = opened(FakeWorker(), arrays_of=bare)
    reading = await stage.read(CHAT, soon())
    assert (reading.tool_names, len(reading.tool_p)) == ((), 0)


async def test_only_a_request_with_one_tool_has_a_match(opened):
    stage = opened(FakeWorker())
    alone = msgspec.structs.replace(CHAT, tools=CHAT.tools[:1], toolset_key=b"one")
    assert (await stage.read(alone, soon())).match != 0.0
    assert (await stage.read(CHAT, soon())).match == 0.0
    assert stage.match_router == 0.5
    assert opened(FakeWorker(), arrays_of=arrays(match_state=None)).match_router is None
