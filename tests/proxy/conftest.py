"""The daemon in the test's own loop, which is uvloop as in production, in front of a fake upstream."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

import pytest
import uvloop

from tests.fakes.judge import ScriptedJudge
from tests.fakes.upstream import FakeUpstream
from whetherman_edge import composition, daemon
from whetherman_edge.config import Config, Loaded
from whetherman_edge.ledger.counters import Counters


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(config, item):
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def upstream() -> AsyncIterator[FakeUpstream]:
    fake = await FakeUpstream().start()
    yield fake
    await fake.stop()


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> ScriptedJudge:
    """Takes the gate's place in daemons of this test."""
    scripted = ScriptedJudge()

    def open_gate(config: Config, counters: Counters, **_keys) -> composition.Gate:
        return composition.Gate(config, counters, scripted)

    monkeypatch.setattr(composition, "open_gate", open_gate)
    return scripted


Serve = Callable[..., AbstractAsyncContextManager[str]]


@pytest.fixture
def serve(upstream: FakeUpstream) -> Serve:
    """``async with serve(**keys) as url``: the daemon on a free port (or on ``listen``), keys as in Config."""

    @contextlib.asynccontextmanager
    async def run(**keys) -> AsyncIterator[str]:
        values = {
            "port": 0,
            "engine": "static",
            "upstream": upstream.url,
            "upstream_kind": "openai",
            "drain_timeout_s": 0.2,
            **keys,
        }
        listens = {"listen": "flag"} if "listen" in keys else {"port": "flag"}
        async with daemon.running(Loaded(config=Config(**values), origins=listens)) as urls:
            yield urls[0]

    return run
