"""Logged runs get the verdict of today's checkers, where the log tells what they look at."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.fakes.agents import Faults, ScriptedUpstream
from whetherman_edge.calibrate.agent import AgentClient
from whetherman_edge.calibrate.cli import pack
from whetherman_edge.calibrate.episode import ANYTHING, run_episode
from whetherman_edge.calibrate.plan import Item
from whetherman_edge.calibrate.probe import Probe
from whetherman_edge.calibrate.rejudge import current, rejudged
from whetherman_edge.calibrate.run_log import RunLine, RunLog, StepLine, run_line

ITEMS = pack(1)


def needs_nothing(probe: Probe) -> bool:
    return not probe.reference.calls


def said(item: Item, content: str, *, success: bool, **more: object) -> RunLine:
    step = StepLine(10, 5, 0.1, 0.2, content=content, finish="stop", **more)  # type: ignore[arg-type]
    return RunLine(probe=item.probe.id, probe_sha=item.sha, arm="with", index=0, success=success, steps=(step,))


def test_a_reply_that_today_passes_for_wrong_is_wrong() -> None:
    item = next(item for item in ITEMS if item.probe.generator == "done-light")
    told = said(item, "To turn on the office light, you should open the device settings.", success=True)
    assert not rejudged(told, item.probe).success
    assert rejudged(told, item.probe).why == "it does not say that it is done"
    right = said(item, item.probe.reference.reply, success=False)
    assert rejudged(right, item.probe).success


@pytest.mark.parametrize("writes", [False, True])
async def test_runs_that_change_something_are_judged_by_the_state_that_their_calls_make(
    writes: bool, tmp_path: Path
) -> None:
    families = ("action", "done", "lookup", "hop", "chat")
    items = [next(item for item in ITEMS if item.probe.family == family) for family in families]
    probes = [item.probe for item in items]
    with (
        ScriptedUpstream(probes, needs_nothing, faults=Faults(writes_calls=writes)) as upstream,
        RunLog.open(tmp_path / "runs.jsonl") as log,
    ):
        async with AgentClient(upstream.url, "fake") as client:
            for item in items:
                episode = await run_episode(client, item.probe, guarded=ANYTHING)
                assert episode.success, episode.why
                log.add(run_line(item.probe.id, item.sha, "with", 0, episode))
    with RunLog.open(tmp_path / "runs.jsonl") as log:
        by_id = {item.probe.id: item for item in items}
        assert current(log.runs, by_id) == log.runs
        turned = [msgspec.structs.replace(run, success=False) for run in log.runs]
        assert [run.success for run in current(turned, by_id)] == [True] * len(items)


def test_what_the_log_does_not_tell_keeps_its_verdict() -> None:
    item = next(item for item in ITEMS if item.probe.family == "action")
    call = item.probe.reference.calls[0]
    for told in (
        said(item, "", success=True, calls=(call.name,)),  # structured, from before arguments were logged
        said(item, "x" * 2000, success=True),  # cut off
        said(item, "no call here", success=True, calls=(call.name,), written=True),
        msgspec.structs.replace(said(item, "", success=True), steps=()),
        msgspec.structs.replace(said(item, "", success=True), steps=(StepLine(10, 5, 0.1, 0.2),)),
    ):
        assert rejudged(told, item.probe) is told


def test_refused_calls_and_leaked_ones_that_were_sent_again_change_nothing() -> None:
    item = next(item for item in ITEMS if item.probe.generator == "action-light")
    call = item.probe.reference.calls[0]
    arguments = (msgspec.json.encode(call.arguments).decode(),)
    done = StepLine(10, 5, 0.1, 0.2, calls=(call.name,), arguments=arguments, finish="tool_calls")
    end = StepLine(10, 5, 0.1, 0.2, content="The light is on.", finish="stop")
    base = said(item, "", success=False)
    assert rejudged(msgspec.structs.replace(base, steps=(done, end)), item.probe).success
    refused = msgspec.structs.replace(done, refused=True)
    assert not rejudged(msgspec.structs.replace(base, steps=(refused, end)), item.probe).success
    leaked = msgspec.structs.replace(base, steps=(done, msgspec.structs.replace(end, resent=True)))
    assert not rejudged(leaked, item.probe).success
