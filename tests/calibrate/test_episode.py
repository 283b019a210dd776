"""One run, against replies made by hand."""

from __future__ import annotations

import pytest

from tests.calibrate.test_calibrate import probe_with_calls
from whetherman_edge.calibrate.agent import AgentClient, Reply
from whetherman_edge.calibrate.episode import CALLS_A_STEP_MAX, run_episode
from whetherman_edge.calibrate.written_calls import ToolCall


async def test_a_reply_of_hundreds_of_calls_makes_a_few_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = probe_with_calls()
    call = ToolCall("x", probe.tools[0].name, {}, "{}")
    replies = [Reply(calls=(call,) * 300), Reply(content="done")]
    sent: list[bytes] = []

    async def send(body: bytes, *_more: object) -> Reply:
        sent.append(body)
        return replies.pop(0)

    async with AgentClient("http://127.0.0.1:9", "fake") as client:
        monkeypatch.setattr(client, "send", send)
        episode = await run_episode(client, probe)
    assert episode.n_calls == CALLS_A_STEP_MAX
    assert sent[-1].count(b"calls at once") == 300 - CALLS_A_STEP_MAX, "and every call has its result"
