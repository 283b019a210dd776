"""The backbone as an engine sees it: opened when its weights are there, asked under a deadline, given up when it fails.

A thread of its own opens the worker and opens it again after a fault, so that a daemon starts without waiting for
weights, takes them into use when they are installed while it runs, and goes on without them when they fail. ``read``
never raises but for cancellation: what the backbone cannot say in time, it does not say.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from whetherman_edge.backbone.head import Heads
from whetherman_edge.backbone.manifest import Manifest
from whetherman_edge.backbone.prompt import Prompt, render
from whetherman_edge.backbone.worker import Counts, Job, Overloaded, States, TooLong
from whetherman_edge.dialects.chat import ChatView
from whetherman_edge.errors import ArtifactError, EnvironmentFault

log = logging.getLogger(__name__)

MARGIN_S: Final = 0.01
"""Before the deadline, so that the static verdict that takes the place of a late one is itself in time."""
WATCH_S: Final = 15.0
"""How often missing weights are looked for: two ``stat`` calls."""
RESTART_FIRST_S: Final = 2.0
RESTART_MAX_S: Final = 300.0
"""A worker that dies again and again costs a few seconds of loading every five minutes, no more."""

State = Literal["missing", "loading", "ready", "resting", "failed", "stopped"]
Outcome = Literal["answered", "late", "failed", "busy", "too_long", "resting", "absent"]


class WorkerLike(Protocol):
    """``backbone.worker.Worker``, or a stand-in for it."""

    counts: Counts

    @property
    def waiting(self) -> int:
        """Jobs in the queue."""

    def start(self) -> None:
        """Load; blocks until it can be asked. Raises ArtifactError, EnvironmentFault."""

    def submit(self, prompt: Prompt, key: str = "") -> Job:
        """Raises Overloaded, and EnvironmentFault when it is dead."""

    def abandon(self, job: Job) -> None:
        """Nobody waits for the job any more."""

    def stop(self) -> None:
        """End it; blocks for some seconds at most."""


class Breaker(Protocol):
    """``proxy.breaker.Breaker``."""

    @property
    def is_open(self) -> bool: ...
    def admits(self) -> bool: ...
    def succeeded(self) -> None: ...
    def failed(self) -> None: ...
    def gave_up(self) -> None: ...


class NoBreaker:
    """Always asks: for commands that wait for every answer."""

    is_open = False

    def admits(self) -> bool:
        return True

    def succeeded(self) -> None: ...
    def failed(self) -> None: ...
    def gave_up(self) -> None: ...


class Reading(msgspec.Struct, frozen=True, gc=False):
    """What the backbone says of one request.

    ``log_p``: class log-probabilities, in the order of ``manifest.CLASSES``. ``tool_names``: the tool lines that were
    read, with ``tool_p`` (n,) float64 beside them, both empty without a pointer head. ``none_p``: of no tool.
    ``match``: see ``Heads.match``, of a request with one tool.
    """

    log_p: tuple[float, float, float, float]
    tool_names: tuple[str, ...] = ()
    tool_p: npt.NDArray[np.float64] = np.zeros(0)
    none_p: float = 0.0
    match: float = 0.0


class Stage:
    """Owns the worker. ``read`` belongs to one event loop, everything else may be called from any thread.

    ``locate``: the weights' path; raises ArtifactError or EnvironmentFault while they, or llama.cpp, are not there.
    ``make_worker``: a worker, not yet started, on that path. ``count``: told the outcome of every request.
    ``required``: somebody asked for the backbone by name, so that its absence is worth a warning.
    """

    def __init__(
        self,
        manifest: Manifest,
        heads: Heads,
        *,
        locate: Callable[[], Path],
        make_worker: Callable[[Path], WorkerLike],
        breaker: Breaker,
        count: Callable[[Outcome], None] = lambda _outcome: None,
        required: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.manifest = manifest
        self._heads = heads
        self._locate = locate
        self._make_worker = make_worker
        self._breaker = breaker
        self._count = count
        self._required = required
        self._clock = clock
        self._worker: WorkerLike | None = None
        self._past = Counts()  # of workers that are gone
        self._state: State = "missing"
        self._fault = "not started"
        self._told = ""
        self._settled = threading.Event()  # the first attempt to open it is over
        self._wake = threading.Event()  # the worker was lost, or the stage is to stop
        self._stopping = False
        self._thread = threading.Thread(target=self._keep_open, name="backbone-stage", daemon=True)

    def start(self) -> None:
        """Begin to open the worker; returns at once."""
        self._thread.start()

    def settled(self) -> str:
        """Wait until the first attempt to open it is over; returns its fault, "" when it can be asked."""
        self._settled.wait()
        return self._fault

    def stop(self) -> None:
        """End the worker and the thread; blocks for some seconds at most."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def is_open(self) -> bool:
        """Whether there is a worker to ask."""
        return self._worker is not None

    @property
    def match_router(self) -> float | None:
        """What the ToolRouter's log-probability counts beside a match; None where the artifact has no match head."""
        return self._heads.match_router if self._heads.has_match else None

    @property
    def state(self) -> State:
        """Where it stands; "resting": the breaker is open."""
        return "resting" if self._state == "ready" and self._breaker.is_open else self._state

    @property
    def fault(self) -> str:
        """Why it does not answer now; "" when it does."""
        state = self.state
        if state == "resting":
            return "it failed or was late several times in a row and rests for some seconds"
        return "" if state == "ready" else self._fault

    @property
    def counts(self) -> Counts:
        """Counts of all workers since the start."""
        worker = self._worker
        return _sum(self._past, worker.counts) if worker is not None else self._past

    @property
    def waiting(self) -> int:
        """Jobs in the worker's queue."""
        worker = self._worker
        return worker.waiting if worker is not None else 0

    async def read(self, chat: ChatView, deadline_s: float) -> Reading | None:
        """What the backbone says, or None when it is not there, fails, or does not answer before the deadline.

        ``deadline_s``: time.monotonic() of the gate's deadline, inf for none. A late answer stays in the worker: the
        same request finds it, and the next step of the dialogue its keys and values.
        """
        worker = self._worker
        if worker is None:
            self._count("absent")
            return None
        if not self._breaker.admits():
            self._count("resting")
            return None
        try:
            outcome, reading = await self._ask(worker, chat, deadline_s)
        except asyncio.CancelledError:
            self._breaker.gave_up()
            raise
        except Exception as exc:
            log.warning("event=backbone_failed error=%s", type(exc).__name__)
            outcome, reading = "failed", None
        if reading is not None:
            self._breaker.succeeded()
        elif outcome == "too_long":  # says something of the prompt, and nothing of the worker
            self._breaker.gave_up()
        else:
            self._breaker.failed()
            if self._breaker.is_open:
                log.warning("event=backbone_resting cause=%s hint=the_static_stage_serves", outcome)
        self._count(outcome)
        return reading

    async def _ask(self, worker: WorkerLike, chat: ChatView, deadline_s: float) -> tuple[Outcome, Reading | None]:
        try:
            job = worker.submit(render(chat, self.manifest.prompt_style), chat.toolset_key.hex())
        except Overloaded:
            return "busy", None
        except EnvironmentFault as exc:
            self._lost(worker, str(exc))
            return "failed", None
        left_s = None if deadline_s == math.inf else max(deadline_s - self._clock() - MARGIN_S, 0.0)
        try:
            async with asyncio.timeout(left_s):
                states = await asyncio.wrap_future(job.future)
        except TimeoutError:
            worker.abandon(job)
            return "late", None
        except TooLong:
            return "too_long", None
        except asyncio.CancelledError:
            worker.abandon(job)
            raise
        return "answered", self._reading(states)

    def _reading(self, states: States) -> Reading:
        """Raises ValueError when a head's output is not finite."""
        act, answer, ask, decline = self._heads.log_probabilities(states.last)
        log_p = (act, answer, ask, decline)
        match = self._heads.match(states.last) if len(states.tool_names) == 1 else 0.0
        pointed = self._heads.point(states.last, states.tools)
        if pointed is None:
            return Reading(log_p, match=match)
        tool_p, none_p = pointed.probabilities()
        return Reading(log_p, states.tool_names, tool_p, none_p, match)

    def _lost(self, worker: WorkerLike, why: str) -> None:
        """The worker is dead: open another one. Called on the loop."""
        if self._worker is worker:
            self._worker, self._state, self._fault = None, "failed", why
            log.error("event=backbone_lost detail=%r hint=the_static_stage_serves_until_it_is_open_again", why)
            self._wake.set()

    # --- the stage's own thread ---

    def _keep_open(self) -> None:
        pause_s = RESTART_FIRST_S
        while not self._stopping:
            worker, opened_s = self._open(), self._clock()
            self._settled.set()
            if worker is None:
                missing = self._state == "missing"
                self._wake.wait(WATCH_S if missing else pause_s)
                pause_s = RESTART_FIRST_S if missing else min(pause_s * 4, RESTART_MAX_S)
                self._wake.clear()
                continue
            self._wake.wait()
            self._wake.clear()
            self._worker = None
            worker.stop()
            self._past = _sum(self._past, worker.counts)
            if not self._stopping:
                pause_s = (
                    RESTART_FIRST_S if self._clock() - opened_s > RESTART_MAX_S else min(pause_s * 4, RESTART_MAX_S)
                )
                self._wake.wait(pause_s)
                self._wake.clear()
        self._state, self._fault = "stopped", "the daemon is stopping"

    def _open(self) -> WorkerLike | None:
        """A started worker, in use; None when that failed, and then the state says why."""
        try:
            path = self._locate()
        except EnvironmentFault as exc:
            self._unusable("missing", str(exc))
            return None
        except Exception as exc:
            self._unusable("failed", f"{type(exc).__name__}: {exc}")
            return None
        self._state, self._fault = "loading", "it is being loaded"
        started_s = self._clock()
        try:
            worker = self._make_worker(path)
            worker.start()
        except Exception as exc:
            known = isinstance(exc, (ArtifactError, EnvironmentFault))
            self._unusable("failed", str(exc) if known else f"{type(exc).__name__}: {exc}")
            return None
        self._worker, self._state, self._fault, self._told = worker, "ready", "", ""
        log.info("event=backbone_ready weights=%s ms=%.0f", path.name, (self._clock() - started_s) * 1e3)
        return worker

    def _unusable(self, state: State, why: str) -> None:
        """Say why, once for each cause."""
        if why != self._told and not self._stopping:
            self._told = why
            level = logging.INFO if state == "missing" and not self._required else logging.WARNING
            log.log(level, "event=backbone_%s detail=%r hint=the_static_stage_serves", state, why)
        self._state, self._fault = state, why


def _sum(a: Counts, b: Counts) -> Counts:
    return Counts(*(getattr(a, name) + getattr(b, name) for name in Counts.__struct_fields__))
