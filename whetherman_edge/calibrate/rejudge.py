"""Judge a logged run again: checkers get better, and a run of the agent is dear. Pure but for the probe's world.

The world's state is made again from the write calls, whose arguments are in the log, or in the text they were read
from. A run that the log does not tell in full keeps the verdict it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from whetherman_edge.calibrate.episode import CALLS_A_STEP_MAX
from whetherman_edge.calibrate.plan import Item
from whetherman_edge.calibrate.probe import Call, Probe
from whetherman_edge.calibrate.run_log import CONTENT_CHARS_MAX, RunLine, StepLine
from whetherman_edge.calibrate.written_calls import ToolCall, parse_arguments, read_calls


def current(runs: Sequence[RunLine], items: Mapping[str, Item]) -> list[RunLine]:
    """The runs on these probes as they are today, with the verdicts of today's checkers."""
    found = []
    for run in runs:
        item = items.get(run.probe)
        if item is not None and item.sha == run.probe_sha:
            found.append(rejudged(run, item.probe))
    return found


def n_changed(logged: Sequence[RunLine], now: Sequence[RunLine]) -> int:
    """How many of the logged runs have another verdict now."""
    before = {(run.probe, run.probe_sha, run.arm, run.index): run.success for run in logged}
    return sum(before[run.probe, run.probe_sha, run.arm, run.index] != run.success for run in now)


def rejudged(run: RunLine, probe: Probe) -> RunLine:
    """The run with the verdict that its probe's checker gives now; as it is where the log is not enough."""
    made: list[ToolCall] = []
    for place, step in enumerate(run.steps):
        calls = _calls(step, probe)
        if calls is None:
            return run
        sent_again = place + 1 < len(run.steps) and run.steps[place + 1].resent
        if not step.refused and not sent_again:
            made += calls[:CALLS_A_STEP_MAX]
    if not run.steps:
        return run
    writes = {tool.name for tool in probe.tools if tool.effect == "write"}
    world = probe.open()
    try:
        for call in made:
            if call.name in writes and call.arguments is not None:
                world.call(call.name, call.arguments)
        told = "" if run.steps[-1].calls else run.steps[-1].content
        check = probe.check(told, world, [Call(call.name, call.arguments or {}) for call in made])
    finally:
        world.close()
    if check.success == run.success:
        return run
    return msgspec.structs.replace(run, success=check.success, why=check.why[:CONTENT_CHARS_MAX])


def _calls(step: StepLine, probe: Probe) -> tuple[ToolCall, ...] | None:
    """The calls of a step with their arguments; None where the log cannot tell them."""
    if not step.calls:
        told = bool(step.content or step.finish) and len(step.content) < CONTENT_CHARS_MAX
        return () if told else None
    if step.arguments:
        pairs = zip(step.calls, step.arguments, strict=False)
        calls = tuple(ToolCall("", name, parse_arguments(raw), raw) for name, raw in pairs)
    elif step.written and len(step.content) < CONTENT_CHARS_MAX:
        calls = read_calls(step.content, tuple(tool.name for tool in probe.tools))
    else:
        return None
    return calls if tuple(call.name for call in calls) == step.calls else None
