"""The measuring part of ``calibrate``: capability, interventions, then probe after probe until all is decided or the
budget is spent.

Everything that comes back is in the log before anything is made of it, so a killed calibration goes on where it was.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Final, Literal

import msgspec

from whetherman_edge import __version__
from whetherman_edge.calibrate import capability_probe, interventions, neighbours, rejudge
from whetherman_edge.calibrate.agent import AgentClient, Reply
from whetherman_edge.calibrate.capability_probe import Found
from whetherman_edge.calibrate.episode import ANYTHING, STEPS_MAX, run_episode
from whetherman_edge.calibrate.labels import Outcome, outcome, steered_label
from whetherman_edge.calibrate.plan import Item, Plan
from whetherman_edge.calibrate.probe import Kind, Probe
from whetherman_edge.calibrate.run_log import (
    CapabilityLine,
    ChoiceLine,
    LookLine,
    RunLine,
    RunLog,
    SpentLine,
    StartLine,
    run_line,
)
from whetherman_edge.errors import UpstreamMissing, UsageError
from whetherman_edge.gate.intervention import Capability
from whetherman_edge.gate.verdict import STEP_KINDS
from whetherman_edge.profiles.risk import ALPHA, DELTA
from whetherman_edge.profiles.schema import Found as FoundLabels
from whetherman_edge.profiles.schema import Profile

SAMPLED_TEMPERATURE: Final = 0.7
FAILURES_MAX: Final = 5
"""Runs in a row that the server fails before the calibration stops."""
_REFUSED: Final = ("HTTP 400", "HTTP 413", "HTTP 422")
"""Errors that speak of the request, too long for this server perhaps; all of one probe count as one."""
PROBE_FAILURES_MAX: Final = 2
"""Failed runs on one probe before it is left out."""
REPEATS_MAX: Final = 5
"""The same step so often in a row: small agents go on like that to the end, whatever the loop guard says."""
COMPARISON_SHARE: Final = 0.2
"""Part of the budget that comparing interventions may take."""
SPARE_STEPS: Final = 4
"""Steps a run may take beyond the calls its task needs. What has not ended by then seldom ends well, and is the longest
of all: eight steps of a small agent on a laptop are a minute."""
FOCUS_BELOW: Final = 2.5
"""Runs a needed step takes, about: when the budget cannot pay for both kinds at this rate, one goes first."""

End = Literal["complete", "budget", "server", "unusable"]


class BudgetReached(Exception):
    """The budget is spent; the run it is raised in is dropped, its tokens are counted."""


class Budget(msgspec.Struct, frozen=True):
    """What may be spent in all, earlier invocations on the same log included; None for no limit. Prices are USD for a
    million tokens.
    """

    seconds: float | None = None
    usd: float | None = None
    usd_in: float = 0.0
    usd_out: float = 0.0

    def cost(self, prompt_tokens: int, output_tokens: int) -> float:
        """USD of these tokens."""
        return (prompt_tokens * self.usd_in + output_tokens * self.usd_out) / 1e6


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """``runs``, ``runs_max``: of one arm on one probe, the latter where they disagree. ``kind``: of the upstream, as in
    the capability table. ``alpha``, ``delta``: of the claim; they say how many needed steps are sought. ``proven``:
    kinds of step whose proof stands.
    """

    workers: int = 1
    runs: int = 3
    runs_max: int = 5
    budget: Budget = Budget()
    kind: str = "unknown"
    local: bool = True
    seed: int = 1
    alpha: float = ALPHA
    delta: float = DELTA
    proven: frozenset[Kind] = frozenset()


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Where measuring ended. ``arm``: the chosen intervention. ``reason``: in words, for ends other than complete."""

    end: End
    found: Found
    arm: str
    capability: Capability
    reason: str = ""
    n_open: int = 0


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """A glance at a calibration that is going on. ``needed``: needed steps found, by kind; ``targets``: as many as are
    sought, 0 where the proof stands.
    """

    phase: str
    n_runs: int
    n_open: int
    needed: dict[Kind, int]
    targets: dict[Kind, int]
    elapsed_s: float
    left_s: float | None
    usd: float


class Runner:
    """Runs probes and writes them down. ``known``: profiles of agents measured before, by name. ``clock``: seconds,
    monotonic. ``show``: told after every run.
    """

    def __init__(
        self,
        client: AgentClient,
        items: Sequence[Item],
        log: RunLog,
        settings: Settings,
        *,
        known: Sequence[tuple[str, Profile]] = (),
        clock: Callable[[], float] = time.monotonic,
        show: Callable[[Progress], None] = lambda _progress: None,
    ) -> None:
        self._client = client
        self._log = log
        self._settings = settings
        self._known = known
        self._clock = clock
        self._show = show
        self._plan = self._planned(items)
        self._items = self._plan.items
        self._prompt, self._output, seconds = log.spent()
        self._started = clock() - seconds / settings.workers
        self._failing: set[str] = set()
        self._n_failed = 0
        self._failed: dict[str, int] = {}
        self._arm = ""
        self._runs: dict[str, list[RunLine]] = {}
        for line in rejudge.current(log.runs, self._items):
            self._runs.setdefault(line.probe, []).append(line)
        client.on_reply = self._spend
        client.on_wait = self._check_budget

    def _planned(self, items: Sequence[Item], like: Mapping[str, FoundLabels] | None = None) -> Plan:
        """A plan whose targets know of the looks that were taken; of several gates' the most."""
        settings = self._settings
        taken = Counter((line.kind, line.artifact) for line in self._log.lines if isinstance(line, LookLine))
        return Plan(
            items,
            runs=settings.runs,
            runs_max=settings.runs_max,
            alpha=settings.alpha,
            delta=settings.delta,
            like=like,
            looks={kind: max((n for (of, _), n in taken.items() if of == kind), default=0) for kind in STEP_KINDS},
            proven=settings.proven,
        )

    async def measure(self) -> Measured:
        """All of it. Raises UpstreamMissing when nothing listens there at the start."""
        self._begin()
        try:
            found = await self._capability()
        except BudgetReached:
            return self._ended("budget", Found(), ANYTHING, "the budget was spent before the upstream was known")
        capability = found.capability(self._settings.kind, local=self._settings.local)
        if found.usable:
            return self._ended("unusable", found, capability, found.usable)
        try:
            await self._compare(found, capability)
            await self._probe_all(capability)
        except BudgetReached:
            self._arm = self._arm or self._chosen(found)
            minutes = (self._clock() - self._started) / 60
            told = f"the budget is spent ({minutes:.0f} min, all in all); --resume with a larger --budget goes on"
            return self._ended("budget", found, capability, told)
        except (UpstreamMissing, _ServerFails) as exc:
            self._arm = self._arm or self._chosen(found)
            return self._ended("server", found, capability, str(exc))
        return self._ended("complete", found, capability)

    def _ended(self, end: End, found: Found, capability: Capability, reason: str = "") -> Measured:
        n_open = self._plan.n_open(self._outcomes(), thorough=True)
        arm = self._arm or interventions.DEFAULT_ARM
        return Measured(end=end, found=found, arm=arm, capability=capability, reason=reason, n_open=n_open)

    def _begin(self) -> None:
        starts = [line for line in self._log.lines if isinstance(line, StartLine)]
        if starts and starts[0].model != self._client.model:
            raise UsageError(
                f"{self._log.path} is a calibration of {starts[0].model!r}, not of {self._client.model!r}; "
                "choose another --name"
            )
        if starts and starts[0].seed != self._settings.seed:
            raise UsageError(
                f"{self._log.path} was measured with --seed {starts[0].seed}, not {self._settings.seed}: none of its "
                "runs would count; use the same, or choose another --name"
            )
        max_tokens = self._client.max_tokens
        if starts and starts[0].max_tokens not in (0, max_tokens):
            raise UsageError(
                f"{self._log.path} was measured with --max-tokens {starts[0].max_tokens}, not {max_tokens}: shorter or "
                "longer replies are another agent; use the same, or choose another --name"
            )
        if not starts:
            start = StartLine(self._client.endpoint, self._client.model, self._settings.seed, __version__, max_tokens)
            self._log.add(start)

    async def _capability(self) -> Found:
        known = [line for line in self._log.lines if isinstance(line, CapabilityLine)]
        if known:
            found = msgspec.convert(known[-1].found, Found)
            if not found.usable:
                return found
        found = await capability_probe.look(self._client)
        self._log.add(CapabilityLine(msgspec.to_builtins(found)))
        return found

    def _chosen(self, found: Found) -> str:
        return interventions.choose(*self._compared(interventions.arms(found)))

    def _compared(self, available: Sequence[str]) -> tuple[dict[str, interventions.Measured], tuple[str, ...]]:
        probes = [item.probe.id for item in interventions.comparison_probes(list(self._items.values()))]
        return interventions.compared(probes, self._comparison_runs(), available)

    def _comparison_runs(self) -> list[RunLine]:
        probes = interventions.comparison_probes(list(self._items.values()))
        return [run for item in probes for run in self._runs.get(item.probe.id, ())]

    async def _compare(self, found: Found, capability: Capability) -> None:
        """Choose the arm, and write it down: labels measured under one arm are no labels under another."""
        for line in self._log.lines:
            if isinstance(line, ChoiceLine):
                self._arm = line.arm
                return
        available = interventions.arms(found)
        limit = None if self._settings.budget.seconds is None else self._settings.budget.seconds * COMPARISON_SHARE
        for item in interventions.comparison_probes(list(self._items.values())):
            if limit is not None and self._clock() - self._started > limit:
                break
            _, tried = self._compared(available)
            for arm in ("with", *tried):  # one after the other: they share the prompt's prefix
                if not any(run.arm == arm and run.index == 0 for run in self._runs.get(item.probe.id, ())):
                    await self._run(item, arm, 0, capability)
        self._arm = interventions.choose(*self._compared(available))
        measured = interventions.measure(self._comparison_runs())
        self._log.add(ChoiceLine(self._arm, {arm: round(m.value_s, 3) for arm, m in measured.items()}))

    async def _probe_all(self, capability: Capability) -> None:
        mode = self._arm.partition(":")[0]
        items = list(self._items.values())
        near = neighbours.nearest(self._known, items, self._outcomes(), self._settings.kind, mode)
        if near is not None:
            self._plan = self._planned(items, near.profile.found)
        self._set_focus()
        busy: dict[str, object] = {}
        for thorough in (False, True):
            await _all(self._work(busy, capability, thorough=thorough) for _ in range(self._settings.workers))

    async def _work(self, busy: dict[str, object], capability: Capability, *, thorough: bool) -> None:
        while True:
            item = self._plan.next(self._outcomes(), busy, thorough=thorough)
            if item is None:
                return
            busy[item.probe.id] = True
            given_up = False
            try:
                while self._failed.get(item.probe.id, 0) < PROBE_FAILURES_MAX:
                    found = outcome(self._runs.get(item.probe.id, ()), self._arm)
                    arm = self._plan.next_arm(item, found, thorough=thorough)
                    if arm is None:
                        break
                    index = len(found.with_tools if arm == "with" else found.without)
                    await self._run(item, "with" if arm == "with" else self._arm, index, capability)
                else:
                    given_up = True  # stays busy: the server cannot do this one
            finally:
                if not given_up:
                    del busy[item.probe.id]

    async def _run(self, item: Item, arm: str, index: int, capability: Capability) -> None:
        """One run, written down. A server failure is written down too, and tried again later.

        Runs with tools have the loop guard, as the daemon has it in enforce: a small agent that repeats a call instead
        of reading its result would otherwise need nothing, because it solves nothing.

        Raises BudgetReached, UpstreamMissing, and _ServerFails after too many failures in a row.
        """
        self._check_budget()  # a log whose budget is spent is only fitted again, and needs no server for it
        steer = None if arm == "with" else interventions.steer(arm, steered_label(item.probe.expect), capability)
        temperature = SAMPLED_TEMPERATURE if index else 0.0
        episode = await run_episode(
            self._client,
            item.probe,
            steer=steer,
            guarded=capability,
            max_steps=min(STEPS_MAX, item.probe.hops + SPARE_STEPS),
            max_repeats=REPEATS_MAX,
            temperature=temperature,
            seed=index,
        )
        line = run_line(item.probe.id, item.sha, arm, index, episode)
        self._log.add(line)
        if line.error:
            self._failing.add(line.probe if line.error.startswith(_REFUSED) else f"{line.probe} {arm} {self._n_failed}")
            self._n_failed += 1
            self._failed[line.probe] = self._failed.get(line.probe, 0) + 1
            if len(self._failing) >= FAILURES_MAX:
                raise _ServerFails(f"the model server failed {len(self._failing)} times in a row: {line.error[:200]}")
        else:
            self._failing.clear()
            self._runs.setdefault(item.probe.id, []).append(line)
        self._show(self._progress())

    def _spend(self, reply: Reply) -> None:
        """Count one response. Raises BudgetReached when it was the last one that the budget pays for."""
        self._prompt += reply.prompt_tokens
        self._output += reply.output_tokens
        self._log.add(SpentLine(reply.prompt_tokens, reply.output_tokens, round(reply.seconds, 4)))
        self._check_budget()

    def _check_budget(self, wait_s: float = 0.0) -> None:
        """Raise BudgetReached when it is spent, or would be after a wait: a server in trouble may ask for an hour."""
        budget = self._settings.budget
        if budget.seconds is not None and self._clock() - self._started + wait_s >= budget.seconds:
            raise BudgetReached
        if budget.usd is not None and budget.cost(self._prompt, self._output) >= budget.usd:
            raise BudgetReached

    def _outcomes(self) -> dict[str, Outcome]:
        return {name: outcome(runs, self._arm) for name, runs in self._runs.items()}

    def _set_focus(self) -> None:
        """One kind of step before the other, first ones before later ones, when the budget will not reach for both."""
        budget = self._settings.budget
        runs = [run for runs in self._runs.values() for run in runs]
        if not runs or (budget.seconds is None and budget.usd is None):
            return
        left = 1e9
        if budget.seconds is not None:
            mean_s = sum(run.seconds for run in runs) / len(runs)
            left = (budget.seconds - (self._clock() - self._started)) * self._settings.workers / max(mean_s, 1e-3)
        if budget.usd is not None:
            spent = budget.cost(self._prompt, self._output)
            left = min(left, (budget.usd - spent) / max(spent / len(runs), 1e-9))
        needed = self._plan.n_needed(self._outcomes())
        missing = {kind: max(n - needed[kind], 0) for kind, n in self._plan.targets.items()}
        if left < FOCUS_BELOW * sum(missing.values()):
            self._plan.focus = next(kind for kind in STEP_KINDS if missing[kind])

    def _progress(self) -> Progress:
        outcomes = self._outcomes()
        needed = self._plan.n_needed(outcomes)
        budget = self._settings.budget
        elapsed = self._clock() - self._started
        n_open = self._plan.n_open(outcomes, thorough=False)
        n_runs = sum(len(runs) for runs in self._runs.values())
        left = elapsed / max(n_runs, 1) * 2 * n_open
        if budget.seconds is not None:
            left = min(left, max(0.0, budget.seconds - elapsed))
        return Progress(
            phase="probes" if self._arm else "interventions",
            n_runs=n_runs,
            n_open=n_open,
            needed=needed,
            targets=self._plan.targets,
            elapsed_s=elapsed,
            left_s=left,
            usd=budget.cost(self._prompt, self._output),
        )


async def _all(workers: Iterable[Coroutine[None, None, None]]) -> None:
    """Run them together; the first that raises ends the others, and its exception goes up."""
    tasks = [asyncio.create_task(worker) for worker in workers]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _ServerFails(Exception):
    """Too many runs in a row ended in a server's error."""


def digest(probe: Probe) -> str:
    """Digest of what the model sees and what is expected of it; runs on another version of a probe do not count."""
    shown = (probe.id, probe.kind, probe.expect, probe.messages, [tool.openai() for tool in probe.tools])
    return hashlib.sha256(msgspec.json.encode(shown)).hexdigest()[:16]
