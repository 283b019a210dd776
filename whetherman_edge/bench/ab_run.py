"""The loop of ``bench ab``: task by task, and for each task gate by gate, so that a cut run is a paired comparison."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from whetherman_edge.bench.ab_gates import NONE, ORACLE, Gate
from whetherman_edge.bench.ab_hop import Hop
from whetherman_edge.bench.ab_log import Run, RunLog, Step
from whetherman_edge.calibrate.agent import AgentClient
from whetherman_edge.calibrate.episode import STEPS_MAX, Episode, run_episode
from whetherman_edge.calibrate.probe import Probe
from whetherman_edge.errors import EnvironmentFault

# Model servers fail for a while when they are restarted; so many tasks in a row means that this one is gone.
FAILED_MAX: Final = 5


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is run. ``temperature``: of repeats after the first, which is greedy. ``replays``: latest step from which
    the oracle's replays try to do without tools.
    """

    model: str
    key: str = ""
    gates: tuple[str, ...]
    repeats: int = 1
    temperature: float = 0.7
    seed: int = 0
    max_steps: int = STEPS_MAX
    max_tokens: int = 512
    replays: int = 2


class Bench:
    """Runs a plan's episodes and logs each as it ends. ``say``: takes one line of progress."""

    def __init__(
        self, plan: Plan, gates: dict[str, Gate], hop: Hop, log: RunLog, say: Callable[[str], None] = lambda _line: None
    ) -> None:
        self._plan = plan
        self._gates = gates
        self._hop = hop
        self._log = log
        self._say = say
        self._failed = 0

    async def run(self, probes: Sequence[Probe]) -> None:
        """All tasks under all gates; what the log has is not run again.

        Raises UpstreamMissing when the model server is not there, EnvironmentFault when it keeps failing.
        """
        started = time.monotonic()
        n_before = len(self._log.runs)
        for number, probe in enumerate(probes, 1):
            for repeat in range(self._plan.repeats):
                for name in self._plan.gates:
                    if name == ORACLE:
                        await self._oracle(probe, repeat)
                    else:
                        await self._episode(name, self._gates[name], probe, repeat)
            minutes = (time.monotonic() - started) / 60
            if len(self._log.runs) > n_before:
                left = minutes / number * (len(probes) - number)
                self._say(f"task {number} of {len(probes)}, {minutes:.1f} min, about {left:.0f} min left")

    async def _oracle(self, probe: Probe, repeat: int) -> None:
        """Find the first step from which the task is solved without tools, then run with exactly that skipped."""
        if (ORACLE, probe.id, repeat) in self._log.runs:
            return
        ungated = self._log.runs.get((NONE, probe.id, repeat))
        n_steps = len(ungated.steps) if ungated is not None else 1
        skip_from: int | None = None
        for step in range(min(max(n_steps, 1), self._plan.replays + 1)):
            replay = await self._episode(f"replay@{step}", self._gates[ORACLE], probe, repeat, step)
            if replay is not None and replay.success:
                skip_from = step
                break
        await self._episode(ORACLE, self._gates[ORACLE], probe, repeat, skip_from)

    async def _episode(
        self, name: str, gate: Gate, probe: Probe, repeat: int, skip_from: int | None = None
    ) -> Run | None:
        """One run, from the log where it is there; None when the model server failed."""
        kept = self._log.runs.get((name, probe.id, repeat))
        if kept is not None:
            return kept
        plan = self._plan
        extra: dict[str, Any] = {"seed": plan.seed + repeat}
        task = gate.prepare(probe, skip_from)
        self._hop.begin(f"{probe.id}\n{repeat}")
        client = AgentClient(
            gate.url,
            plan.model,
            plan.key,
            temperature=plan.temperature if repeat else 0.0,
            max_tokens=plan.max_tokens,
            headers=gate.headers(f"{probe.id}-{repeat}"),
        )
        async with client:
            episode = await run_episode(client, task, max_steps=plan.max_steps, **extra)
        run = _run(name, probe, repeat, episode, self._hop)
        self._log.add(run)
        self._failed = self._failed + 1 if run.error else 0
        if self._failed >= FAILED_MAX:
            raise EnvironmentFault(f"the agent's model server failed {FAILED_MAX} runs in a row, last: {run.error}")
        return None if run.error else run


def progress(line: str) -> None:
    """One line to standard error."""
    sys.stderr.write(line + "\n")


def _run(name: str, probe: Probe, repeat: int, episode: Episode, hop: Hop) -> Run:
    """The log's row. Tokens are the model server's own counts of all requests, also of those the client never saw."""
    spent = hop.spent
    counted = spent.prompt_tokens + spent.output_tokens > 0
    return Run(
        gate=name,
        task=probe.id,
        repeat=repeat,
        family=probe.family,
        difficulty=probe.difficulty,
        kind=probe.kind,
        group=probe.group,
        success=episode.success,
        why=episode.why[:200],
        calls=episode.n_calls,
        steps=tuple(_step(record.reply.headers) for record in episode.steps),
        requests=spent.requests,
        reused=spent.reused,
        prompt_tokens=spent.prompt_tokens if counted else episode.prompt_tokens,
        output_tokens=spent.output_tokens if counted else episode.output_tokens,
        cached_tokens=spent.cached_tokens,
        seconds=round(episode.seconds + spent.saved_s, 4),
        unfinished=episode.unfinished,
        error=episode.error[:300],
    )


def _step(headers: dict[str, str]) -> Step:
    """What the ``x-whetherman-*`` headers of one reply say."""
    reason = headers.get("x-whetherman-reason", "")
    if not reason or reason == "bypass:off":
        return Step()
    return Step(
        label=headers.get("x-whetherman-decision", ""),
        applied=headers.get("x-whetherman-applied") == "yes",
        reason=reason,
        engine=headers.get("x-whetherman-engine", ""),
        confidence=float(headers.get("x-whetherman-confidence", 0)),
        ms=float(headers.get("x-whetherman-ms", 0)),
    )
