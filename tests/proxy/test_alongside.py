"""A request that goes out as it came is sent first and judged while the model works on it."""

from __future__ import annotations

import asyncio
import gc
import json
import warnings

import pytest

from tests.fakes.client import post
from tests.fakes.judge import verdict
from whetherman_edge import composition
from whetherman_edge.config import Config
from whetherman_edge.ledger.counters import Counters
from whetherman_edge.proxy.connection import Connection
from whetherman_edge.proxy.gating import Pending

TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}]
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}


@pytest.fixture
def order(judge, monkeypatch) -> list[str]:
    """What was done first: "judge", "send"."""
    done: list[str] = []
    write = Connection.write

    def judged(*_args):
        done.append("judge")
        return verdict("ANSWER")

    def written(connection, data):
        done.append("send")
        write(connection, data)

    monkeypatch.setattr(judge, "judge", judged)
    monkeypatch.setattr(Connection, "write", written)
    return done


@pytest.mark.parametrize(
    ("keys", "headers", "first"),
    [
        ({}, {}, "send"),
        ({"mode": "shadow"}, {}, "send"),
        ({"mode": "shadow"}, {"x_whetherman_mode": "enforce"}, "judge"),
        ({"mode": "enforce"}, {}, "judge"),
        ({"mode": "enforce"}, {"x_whetherman_mode": "shadow"}, "send"),
        ({"force": "ANSWER"}, {}, "judge"),
        ({}, {"x_whetherman_profile": "p"}, "judge"),
    ],
)
async def test_what_may_be_changed_is_judged_first_and_all_else_meanwhile(upstream, serve, order, keys, headers, first):
    async with serve(**keys) as url:
        answer = await post(url, CHAT, **headers)
    assert answer.status == 200
    assert answer.header("x-whetherman-decision")
    if "x_whetherman_profile" in headers:
        assert answer.header("x-whetherman-reason") == "profile_unknown"
        assert order == ["send"]
        return
    assert order == sorted(["judge", "send"], reverse=first == "send")


async def test_a_request_that_cannot_be_sent_is_judged_all_the_same(upstream, serve, order):
    await upstream.stop()
    async with serve() as url:
        answer = await post(url, CHAT)
    assert answer.status == 502
    assert answer.header("x-whetherman-decision")
    assert order == ["judge"]


async def test_a_request_sent_again_is_judged_once(upstream, serve, order):
    async def die(_seen, wire) -> None:
        wire.reset()

    async with serve() as url:
        await post(url, CHAT)
        order.clear()
        upstream.script(die)
        assert (await post(url, CHAT)).status == 200
    assert sorted(order) == ["judge", "send", "send"]


@pytest.mark.parametrize("enforce", [True, False])
@pytest.mark.parametrize("moment", ["before it is waited for", "before that has begun"])
async def test_a_judgement_that_nobody_waits_for_any_more_is_no_warning(judge, enforce, moment):
    """Found by the reliability run: the client left between two steps, and the log said that a coroutine was lost."""
    config = Config(mode="enforce" if enforce else "shadow")
    gating = composition.Gate(config, Counters(), judge, deadline=False).gating
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        begun = gating.begin({}, json.dumps(CHAT).encode())
        assert isinstance(begun, Pending)
        if moment == "before that has begun":
            waiting = asyncio.ensure_future(begun.ruling())
            waiting.cancel()
            await asyncio.wait([waiting])
            assert waiting.cancelled()
            del waiting
        del begun
        gc.collect()
    assert [str(one.message) for one in said] == []
    assert judge.views == []
