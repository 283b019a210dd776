"""The one thread that owns llama.cpp: takes prompts from a queue, answers with hidden states.

Life of a job: ``submit`` (any thread) -> queue -> plan against the prefix cache -> decode in chunks -> result or the
reason why there is none. A job's deadline bounds what its caller waits for, not the work: a prompt whose caller has
given up is still decoded when nobody else waits, so that the same request finds its keys and values (and its answer)
next time. As soon as another job waits, such work is stopped through llama.cpp's abort callback, within one graph
node.

Fairness: one queue a caller key, served in turn, so that an agent with many requests cannot starve another.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from whetherman_edge.backbone.llama import Aborted, Context, Network
from whetherman_edge.backbone.prefix_cache import PrefixCache
from whetherman_edge.backbone.prompt import Piece, Prompt, Tokens, tokenize
from whetherman_edge.errors import EnvironmentFault

log = logging.getLogger(__name__)

QUEUE_MAX: Final = 32
"""Jobs waiting at once. At 60 ms a job the last one waits two seconds, beyond any useful deadline."""
RESULTS_MAX: Final = 256
"""Answers kept by prompt: 2.6 KB each plus the tool states."""
PIECES_MAX: Final = 8_192
"""Tokenised pieces kept; a piece averages 200 bytes of ids."""
STOP_TIMEOUT_S: Final = 5.0


class Overloaded(EnvironmentFault):
    """The queue is full."""


class WorkerSettings(msgspec.Struct, frozen=True):
    """Sizes of the worker. ``n_cells`` tokens of keys and values cost about 1 KB a layer each."""

    layer: int
    n_cells: int = 8_192
    n_seq: int = 16
    chunk: int = 256
    n_threads: int = 2
    tools_max: int = 3_072
    dialogue_max: int = 1_536


class States(msgspec.Struct, frozen=True):
    """What one pass gives. ``last``: (n_embd,) float32 at the last token. ``tools``: (n, n_embd) float32 at the
    end of each tool line, ``tool_names`` beside it. ``n_tokens``: length of the prompt; ``n_decoded``: tokens
    that had to be computed.
    """

    last: npt.NDArray[np.float32]
    tools: npt.NDArray[np.float32]
    tool_names: tuple[str, ...]
    n_tokens: int
    n_decoded: int


class Job:
    """One request of one caller."""

    __slots__ = ("abandoned", "future", "key", "prompt")

    def __init__(self, prompt: Prompt, key: str) -> None:
        self.prompt, self.key = prompt, key
        self.future: Future[States] = Future()
        self.abandoned = False


class Counts(msgspec.Struct):
    """For the metrics page; written by the worker thread alone."""

    jobs: int = 0
    answered_from_results: int = 0
    tokens_prompt: int = 0
    tokens_decoded: int = 0
    prefix_hits: int = 0
    aborted: int = 0
    late: int = 0
    failed: int = 0


class Worker:
    """Owns a Network and a Context in its own thread.

    ``start`` loads the weights and returns once they are loaded; it raises what loading raises (ArtifactError,
    EnvironmentFault). After a decode fault the context is rebuilt once; a second fault ends the worker, and every later
    ``submit`` raises EnvironmentFault, which the gate's breaker turns into the static stage.
    """

    def __init__(self, model: Path, settings: WorkerSettings) -> None:
        self.model, self.settings = model, settings
        self.counts = Counts()
        self._queues: OrderedDict[str, deque[Job]] = OrderedDict()
        self._n_waiting = 0
        self._wake = threading.Condition()
        self._stopping = False
        self._running: Job | None = None
        self._dead: str = ""
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="backbone", daemon=True)
        self._pieces: OrderedDict[Piece, tuple[int, ...]] = OrderedDict()
        self._results: OrderedDict[tuple[int, ...], States] = OrderedDict()
        self._tool_states: dict[int, npt.NDArray[np.float32]] = {}

    def start(self) -> None:
        """Load the weights; blocks until they are there."""
        self._thread.start()
        self._ready.result()

    def submit(self, prompt: Prompt, key: str = "") -> Job:
        """Queue a prompt for caller ``key``. Raises Overloaded when the queue is full, EnvironmentFault when dead."""
        job = Job(prompt, key)
        with self._wake:
            if self._dead or self._stopping:
                raise EnvironmentFault(f"the backbone worker is not running: {self._dead or 'stopped'}")
            if self._n_waiting >= QUEUE_MAX:
                raise Overloaded(f"expected at most {QUEUE_MAX} waiting requests, the backbone's queue is full")
            self._queues.setdefault(key, deque()).append(job)
            self._n_waiting += 1
            if self._running is not None and self._running.abandoned:
                self._stop_decode(True)
            self._wake.notify()
        return job

    @property
    def waiting(self) -> int:
        """Jobs in the queue."""
        return self._n_waiting

    def abandon(self, job: Job) -> None:
        """The caller no longer waits. A queued job is dropped; a running one goes on while nobody else waits."""
        with self._wake:
            job.abandoned = True
            queue = self._queues.get(job.key)
            if queue is not None and job in queue:
                queue.remove(job)
                self._n_waiting -= 1
                job.future.cancel()
            elif job is self._running and self._n_waiting:
                self._stop_decode(True)

    def stop(self, before_close: Callable[[Context, PrefixCache], None] | None = None) -> None:
        """End the thread; waiting jobs are cancelled. ``before_close`` runs in it, with the context still open."""
        self._before_close = before_close
        with self._wake:
            self._stopping = True
            self._stop_decode(True)
            self._wake.notify()
        self._thread.join(STOP_TIMEOUT_S)

    # --- everything below runs in the worker thread ---

    _before_close: Callable[[Context, PrefixCache], None] | None = None
    _context: Context | None = None
    _cache: PrefixCache
    _no_states: npt.NDArray[np.float32]

    def _stop_decode(self, on: bool) -> None:
        if self._context is not None:
            self._context.capture.stop(on)

    def _run(self) -> None:
        try:
            network = Network(self.model)
        except BaseException as exc:
            self._dead = str(exc)
            self._ready.set_exception(exc)
            return
        try:
            self._open(network)
        except BaseException as exc:
            self._dead = str(exc)
            network.close()
            self._ready.set_exception(exc)
            return
        self._ready.set_result(None)
        try:
            self._serve(network)
        except BaseException as exc:
            log.error("event=backbone_died error=%s", type(exc).__name__)
            self._die(f"{type(exc).__name__}: {exc}")
        finally:
            self._close(network)

    def _open(self, network: Network) -> None:
        s = self.settings
        self._context = Context(
            network, layer=s.layer, n_cells=s.n_cells, n_seq=s.n_seq, chunk=s.chunk, n_threads=s.n_threads
        )
        self._cache = PrefixCache(s.n_seq, s.n_cells)
        self._tool_states.clear()
        self._no_states = np.zeros((0, network.n_embd), dtype=np.float32)

    def _serve(self, network: Network) -> None:
        faults = 0
        while (job := self._next()) is not None:
            try:
                states = self._answer(network, job)
            except Aborted:
                self.counts.aborted += 1
                _finish(job, EnvironmentFault("stopped: another request was waiting"))
            except Exception as exc:
                self.counts.failed += 1
                faults += 1
                _finish(job, exc)
                log.warning("event=backbone_fault error=%s", type(exc).__name__)
                if faults > 1:
                    raise
                assert self._context is not None
                self._context.close()
                self._open(network)
            else:
                faults = 0
                self.counts.late += job.abandoned
                _finish(job, states)
            finally:
                with self._wake:
                    self._running = None

    def _next(self) -> Job | None:
        """The next job, callers in turn; None when stopping."""
        with self._wake:
            while not self._n_waiting and not self._stopping:
                self._wake.wait()
            if self._stopping:
                return None
            key, queue = next(iter(self._queues.items()))
            job = queue.popleft()
            del self._queues[key]
            if queue:
                self._queues[key] = queue  # to the back
            self._n_waiting -= 1
            self._running = job
            self._stop_decode(False)
            return job

    def _answer(self, network: Network, job: Job) -> States:
        s = self.settings
        self.counts.jobs += 1
        tokens = tokenize(
            job.prompt,
            lambda piece: self._tokens_of(network, piece),
            network.bos,
            tools_max=s.tools_max,
            dialogue_max=s.dialogue_max,
        )
        self.counts.tokens_prompt += len(tokens.ids)
        found = self._results.get(tokens.ids)
        if found is not None:
            self._results.move_to_end(tokens.ids)
            self.counts.answered_from_results += 1
            return msgspec.structs.replace(found, n_decoded=0)
        states = self._decode(tokens, job.prompt.tool_names)
        self._results[tokens.ids] = states
        if len(self._results) > RESULTS_MAX:
            self._results.popitem(last=False)
        return states

    def _decode(self, tokens: Tokens, tool_names: Sequence[str]) -> States:
        context, cache, ids = self._context, self._cache, tokens.ids
        assert context is not None
        plan = cache.plan(ids, tokens.n_tools)
        for seq in plan.evict:
            context.truncate(seq, 0)
            self._tool_states.pop(seq, None)
        known = self._tool_states.get(plan.holder, self._no_states)
        n_reused, n_known = usable_prefix(plan.n_reused, tokens.tool_ends, len(known))
        if plan.source >= 0 and n_reused:
            context.copy(plan.source, plan.seq, n_reused)
        else:
            context.truncate(plan.seq, n_reused)
        wanted = [end - n_reused for end in tokens.tool_ends[n_known:]] + [len(ids) - 1 - n_reused]
        try:
            rows = context.decode(plan.seq, ids[n_reused:], n_reused, wanted)
        except Aborted as stopped:
            if plan.root >= 0:
                cache.forget(plan.root)
            self._keep(plan.seq, ids[: n_reused + stopped.n_done], np.concatenate([known[:n_known], stopped.states]))
            raise
        self.counts.prefix_hits += n_reused > 1
        self.counts.tokens_decoded += len(ids) - n_reused
        tools = np.concatenate([known[:n_known], rows[:-1]])
        if plan.root >= 0:
            context.copy(plan.seq, plan.root, tokens.n_tools)
            cache.commit(plan.root, ids[: tokens.n_tools], root=True, shared=0)
            self._tool_states[plan.root] = tools
        cache.commit(plan.seq, ids, root=False, shared=tokens.n_tools)
        self._tool_states[plan.seq] = tools
        return States(rows[-1].copy(), tools, tuple(tool_names[: len(tools)]), len(ids), len(ids) - n_reused)

    def _keep(self, seq: int, ids: Sequence[int], states: npt.NDArray[np.float32]) -> None:
        """After an abort: what is in the cells stays useful."""
        assert self._context is not None
        if ids:
            self._cache.commit(seq, ids, root=False, shared=0)
            self._tool_states[seq] = states
        else:
            self._cache.forget(seq)
            self._tool_states.pop(seq, None)

    def _tokens_of(self, network: Network, piece: Piece) -> tuple[int, ...]:
        ids = self._pieces.get(piece)
        if ids is None:
            ids = (network.control(piece.text),) if piece.control else tuple(network.tokenize(piece.text))
            self._pieces[piece] = ids
            if len(self._pieces) > PIECES_MAX:
                self._pieces.popitem(last=False)
        return ids

    def _die(self, why: str) -> None:
        with self._wake:
            self._dead = why
            jobs = [job for queue in self._queues.values() for job in queue]
            self._queues.clear()
            self._n_waiting = 0
        for job in jobs:
            _finish(job, EnvironmentFault(f"the backbone worker died: {why}"))

    def _close(self, network: Network) -> None:
        self._die(self._dead or "stopped")
        if self._context is not None:
            if self._before_close is not None and not self._dead.startswith("DecodeFault"):
                try:
                    self._before_close(self._context, self._cache)
                except Exception as exc:
                    log.warning("event=backbone_save_failed error=%s", type(exc).__name__)
            self._context.close()
            self._context = None
        network.close()


def usable_prefix(n_reused: int, tool_ends: Sequence[int], n_states: int) -> tuple[int, int]:
    """How much of a cached prefix can be used when only the first ``n_states`` tool lines have their states kept.

    Returns (tokens to reuse, tool states to reuse): a line whose state is missing has its last token decoded again.
    """
    n_inside = sum(end < n_reused for end in tool_ends)
    if n_inside <= n_states:
        return n_reused, n_inside
    return tool_ends[n_states], n_states


def _finish(job: Job, outcome: States | BaseException) -> None:
    if not job.future.set_running_or_notify_cancel():
        return
    if isinstance(outcome, States):
        job.future.set_result(outcome)
    else:
        job.future.set_exception(outcome)
