"""The one thread that owns llama.cpp: takes prompts from a queue, answers with hidden states.

Life of a job: ``submit`` (any thread) -> queue -> plan against the prefix cache -> decode in chunks -> result or the
reason why there is none. A job's deadline bounds what its caller waits for, not the work: a prompt whose caller has
given up is still decoded when nobody else waits, so that the same request finds its keys and values (and its answer)
next time. As soon as another job waits, such work is stopped through llama.cpp's abort callback, within one graph
node.

From an event loop: ``job = worker.submit(prompt, key)``, ``await asyncio.wrap_future(job.future)`` under a timeout,
``worker.abandon(job)`` when that ran out; none of these blocks (``stage.Stage.read`` does it).

Fairness: one queue a caller key, served in turn, so that an agent with many requests cannot starve another.

A second thread watches the first: a decode without progress for ``wedged_s`` fails its job and all that wait, and the
worker counts as dead. Its thread cannot be killed; it is asked to stop and left behind.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from whetherman_edge.backbone import persist
from whetherman_edge.backbone.llama import Aborted, Context, Network
from whetherman_edge.backbone.prefix_cache import SCRATCH_CELLS, PrefixCache
from whetherman_edge.backbone.prompt import Piece, Prompt, Tokens, tokenize
from whetherman_edge.errors import EnvironmentFault

log = logging.getLogger(__name__)

QUEUE_MAX: Final = 32
"""Jobs waiting at once. At 60 ms a job the last one waits two seconds, beyond any useful deadline."""
PIECE_CHARS_MAX: Final = 2_000_000
"""Text of the tokenised pieces kept: with their ids (4 bytes a token) some 5 MB."""
RESULT_BYTES_MAX: Final = 8 << 20
"""States of the answers kept: of long tool lists that all differ 256 would be 50 MB. Shared ones count once."""
SAVE_IDLE_S: Final = 60.0
"""Without a job for so long, new tools blocks are saved: a process that is killed has saved nothing at its stop."""
STOP_TIMEOUT_S: Final = 5.0
WATCH_S: Final = 1.0


class Overloaded(EnvironmentFault):
    """The queue is full."""


class TooLong(EnvironmentFault):
    """A prompt that can never fit in the cells."""


class WorkerSettings(msgspec.Struct, frozen=True):
    """Sizes of the worker. ``n_cells`` tokens of keys and values cost about 1 KB a layer each. ``wedged_s``: a
    micro-batch of ``chunk`` tokens that takes longer than this never ends (30 s were seen on a starved machine; callers
    have given up long before, by their own deadlines). ``saved``: where tools blocks are kept over
    a restart, valid under ``saved_key``; ``save``: whether this worker writes it too. ``results_max``: answers
    kept by prompt, 2.6 KB each (tool states are shared with the prefix they came from).
    """

    layer: int
    n_cells: int = 8_192
    n_seq: int = 16
    chunk: int = 256
    n_threads: int = 2
    tools_max: int = 3_072
    dialogue_max: int = 1_536
    wedged_s: float = 120.0
    saved: Path | None = None
    saved_key: persist.Key | None = None
    save: bool = False
    results_max: int = 256


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
    """For the metrics page. ``refused`` is written by whoever submits, all else by the worker thread alone.

    ``late``: answers whose caller had gone. ``restored``: tools blocks read from the saved file.
    """

    jobs: int = 0
    answered_from_results: int = 0
    tokens_prompt: int = 0
    tokens_decoded: int = 0
    prefix_hits: int = 0
    aborted: int = 0
    late: int = 0
    failed: int = 0
    refused: int = 0
    restored: int = 0


class Results:
    """Answers by the digest of their prompt, least recently used first out; bounded in number and in bytes."""

    def __init__(self, n_max: int, bytes_max: int = RESULT_BYTES_MAX) -> None:
        self._n_max, self._bytes_max = n_max, bytes_max
        self._kept: OrderedDict[bytes, States] = OrderedDict()
        self._n_users: dict[int, int] = {}  # by the array that owns the memory: what prompts share is there once
        self.n_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, digest: bytes) -> States | None:
        """The answer to that prompt, or None."""
        found = self._kept.get(digest)
        if found is not None:
            self._kept.move_to_end(digest)
        return found

    def put(self, digest: bytes, states: States) -> None:
        """Keep the answer to a prompt that has none."""
        self._kept[digest] = states
        self._count(states, 1)
        while len(self._kept) > self._n_max or (self.n_bytes > self._bytes_max and len(self._kept) > 1):
            self._count(self._kept.popitem(last=False)[1], -1)

    def _count(self, states: States, by: int) -> None:
        for part in (states.last, states.tools):
            owner = part.base if isinstance(part.base, np.ndarray) else part
            before = self._n_users.get(id(owner), 0)
            if before + by:
                self._n_users[id(owner)] = before + by
            else:
                del self._n_users[id(owner)]
            if not before or not before + by:
                self.n_bytes += by * owner.nbytes


class Worker:
    """Owns a Network and a Context in its own thread.

    ``start`` loads the weights and returns once they are loaded; it raises what loading raises (ArtifactError,
    EnvironmentFault). After a decode fault the context is rebuilt once; a second fault in a row ends the worker, and
    every later ``submit`` raises EnvironmentFault, upon which the stage opens another one.
    """

    def __init__(self, model: Path, settings: WorkerSettings) -> None:
        self.model, self.settings = model, settings
        self.counts = Counts()
        self._queues: OrderedDict[str, deque[Job]] = OrderedDict()
        self._n_waiting = 0
        self._wake = threading.Condition()
        self._stopping = False
        self._running: Job | None = None
        self._running_since_s = 0.0
        self._dead: str = ""
        self._busy = threading.Event()  # there is something to watch
        self._ended = threading.Event()
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="backbone", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="backbone-watch", daemon=True)
        self._context: Context | None = None
        self._saved_key: persist.Key | None = None
        self._unsaved = False  # there is a tools block that the saved file does not have
        self._cache = PrefixCache(settings.n_seq, settings.n_cells)
        self._no_states = np.zeros((0, 0), dtype=np.float32)
        self._pieces: OrderedDict[Piece, array[int]] = OrderedDict()
        self._piece_chars = 0
        self._results = Results(settings.results_max)
        self._tool_states: dict[int, npt.NDArray[np.float32]] = {}

    def start(self) -> None:
        """Load the weights; blocks until they are there."""
        self._thread.start()
        self._ready.result()
        self._watcher.start()

    def submit(self, prompt: Prompt, key: str = "") -> Job:
        """Queue a prompt for caller ``key``. Raises Overloaded when the queue is full, EnvironmentFault when dead."""
        job = Job(prompt, key)
        with self._wake:
            if self._dead or self._stopping:
                raise EnvironmentFault(f"the backbone worker is not running: {self._dead or 'stopped'}")
            if self._n_waiting >= QUEUE_MAX:
                self.counts.refused += 1
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

    @property
    def dead(self) -> str:
        """Why it answers no more; "" while it does."""
        return self._dead

    def abandon(self, job: Job) -> None:
        """The caller no longer waits. A queued job is dropped; a running one goes on while nobody else waits."""
        with self._wake:
            job.abandoned = True
            queue = self._queues.get(job.key)
            if queue is not None and job in queue:
                queue.remove(job)
                if not queue:
                    del self._queues[job.key]
                self._n_waiting -= 1
                job.future.cancel()
            elif job is self._running and self._n_waiting:
                self._stop_decode(True)

    def stop(self) -> None:
        """End the thread; waiting jobs are failed. Tools blocks are saved first, where the settings say so."""
        with self._wake:
            self._stopping = True
            self._stop_decode(True)
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join(STOP_TIMEOUT_S)
            if self._thread.is_alive():
                log.error("event=backbone_left_behind detail=%r", self._dead or "it did not stop in time")
        self._ended.set()
        self._busy.set()
        if self._watcher.ident is not None:
            self._watcher.join(STOP_TIMEOUT_S)

    def _stop_decode(self, on: bool) -> None:
        if (context := self._context) is not None:
            context.capture.stop(on)

    # --- the watcher's thread ---

    def _watch(self) -> None:
        while True:
            self._busy.wait()
            if self._ended.wait(min(WATCH_S, self.settings.wedged_s / 2)):
                return
            with self._wake:
                if self._running is None:
                    self._busy.clear()
                    continue
                since_s = self._running_since_s
            context = self._context
            beat_s = context.beat_s if context is not None else 0.0
            if time.monotonic() - max(since_s, beat_s) > self.settings.wedged_s:
                why = f"a decode made no progress for {self.settings.wedged_s:g} s"
                log.error("event=backbone_wedged detail=%r", why)
                self._die(why)
                return

    def _die(self, why: str) -> None:
        """No more jobs; those there are fail. Any thread."""
        with self._wake:
            self._dead = self._dead or why
            jobs = [job for queue in self._queues.values() for job in queue]
            if self._running is not None:
                jobs.append(self._running)
            self._queues.clear()
            self._n_waiting = 0
            self._stop_decode(True)
            self._wake.notify()
        for job in jobs:
            _finish(job, EnvironmentFault(f"the backbone worker died: {why}"))

    # --- everything below runs in the worker thread ---

    def _run(self) -> None:
        try:
            network = Network(self.model)
        except BaseException as exc:
            self._dead = str(exc)
            self._ready.set_exception(exc)
            return
        try:
            self._open(network)
            self._restore(network)
        except BaseException as exc:
            self._dead = str(exc)
            if self._context is not None:
                self._context.close()
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
        context = Context(
            network, layer=s.layer, n_cells=s.n_cells, n_seq=s.n_seq, chunk=s.chunk, n_threads=s.n_threads
        )
        try:
            if not context.check_rows():
                log.warning("event=backbone_rows_mapped detail='llama.cpp reads them its own way, in more memory'")
        except BaseException:
            context.close()
            raise
        self._context = context
        self._cache = PrefixCache(s.n_seq, s.n_cells, context.first, network.window)
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
            except TooLong as exc:
                self.counts.failed += 1
                _finish(job, exc)
            except Exception as exc:
                self.counts.failed += 1
                faults += 1
                _finish(job, exc)
                log.warning("event=backbone_fault error=%s", type(exc).__name__)
                if faults > 1:
                    raise
                if self._context is not None:
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
        """The next job, callers in turn; None when stopping, or when the watcher gave this thread up."""
        while True:
            idle_s = SAVE_IDLE_S if self._unsaved and self.settings.save else None
            with self._wake:
                if self._wake.wait_for(lambda: bool(self._n_waiting or self._stopping or self._dead), idle_s):
                    return None if self._stopping or self._dead else self._take()
            self._save()

    def _take(self) -> Job:
        """The first job of the caller whose turn it is. ``_wake`` is held, and a job is waiting."""
        key, queue = next(iter(self._queues.items()))
        job = queue.popleft()
        del self._queues[key]
        if queue:
            self._queues[key] = queue  # to the back
        self._n_waiting -= 1
        self._running, self._running_since_s = job, time.monotonic()
        self._stop_decode(False)
        self._busy.set()
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
        if len(tokens.ids) + SCRATCH_CELLS > s.n_cells:
            raise TooLong(f"expected a prompt of at most {s.n_cells - SCRATCH_CELLS} tokens, it has {len(tokens.ids)}")
        self.counts.tokens_prompt += len(tokens.ids)
        digest = hashlib.blake2b(np.asarray(tokens.ids, dtype=np.int32).tobytes(), digest_size=16).digest()
        found = self._results.get(digest)
        if found is not None:
            self.counts.answered_from_results += 1
            return msgspec.structs.replace(found, n_decoded=0)
        states = self._decode(tokens, job.prompt.tool_names)
        self._results.put(digest, states)
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
        if plan.holder >= 0 and not cache.holds(plan.holder, n_reused):
            n_reused, n_known = 0, 0
        if plan.source >= 0 and n_reused:
            context.copy(plan.source, plan.seq, n_reused)
        else:
            context.truncate(plan.seq, n_reused)
        tools, start = _joined(known, n_known, self._no_states), n_reused
        try:
            if start < tokens.n_tools:
                ends = [end - start for end in tokens.tool_ends[n_known:]]
                rows = context.decode(plan.seq, ids[start : tokens.n_tools], start, ends)
                tools, start = _joined(known, n_known, rows), tokens.n_tools
            if plan.root >= 0:  # before the dialogue: cells of two sequences are never given to other tokens
                context.copy(plan.seq, plan.root, tokens.n_tools)
                cache.commit(plan.root, ids[: tokens.n_tools], root=True, shared=0)
                self._tool_states[plan.root] = tools
                self._unsaved = True
            rows = context.decode(plan.seq, ids[start:], start, [len(ids) - 1 - start])
        except Aborted as stopped:
            if start < tokens.n_tools:
                tools = _joined(known, n_known, stopped.states)
                if plan.root >= 0:
                    cache.forget(plan.root)
            self._keep(plan.seq, ids[: start + stopped.n_done], tools)
            raise
        self.counts.prefix_hits += n_reused > 1
        self.counts.tokens_decoded += len(ids) - n_reused
        cache.commit(plan.seq, ids, root=False, shared=tokens.n_tools)
        self._tool_states[plan.seq] = tools
        return States(rows[-1].copy(), tools, tuple(tool_names[: len(tools)]), len(ids), len(ids) - n_reused)

    def _keep(self, seq: int, ids: Sequence[int], states: npt.NDArray[np.float32]) -> None:
        """After an abort: what is in the cells stays useful."""
        assert self._context is not None
        # llama.cpp promises that a micro-batch which was stopped leaves nothing behind; it costs nothing to be sure.
        self._context.truncate(seq, len(ids))
        if ids:
            self._cache.commit(seq, ids, root=False, shared=0)
            self._tool_states[seq] = states
        else:
            self._cache.forget(seq)
            self._tool_states.pop(seq, None)

    def _tokens_of(self, network: Network, piece: Piece) -> Sequence[int]:
        ids = self._pieces.get(piece)
        if ids is not None:
            self._pieces.move_to_end(piece)
            return ids
        ids = array("i", (network.control(piece.text),) if piece.control else network.tokenize(piece.text))
        self._pieces[piece] = ids
        self._piece_chars += len(piece.text)
        while self._piece_chars > PIECE_CHARS_MAX:
            oldest, _ = self._pieces.popitem(last=False)
            self._piece_chars -= len(oldest.text)
        return ids

    def _restore(self, network: Network) -> None:
        """Take over saved tools blocks, the most recently used ones if not all fit."""
        s = self.settings
        if s.saved is None or s.saved_key is None or self._context is None:
            return
        self._saved_key = msgspec.structs.replace(s.saved_key, llama=str(network.lib.__version__))
        room = s.n_cells // 2  # the other half is for what comes; roots are given up last
        roots: list[persist.Root] = []
        for root in persist.load(s.saved, self._saved_key, network.n_embd)[: s.n_seq // 2]:
            room -= len(root.tokens)
            if room < 0:
                break
            roots.append(root)
        for root in reversed(roots):  # the most recently used one last, as in the cache
            seq = self._cache.reserve()
            if not self._context.restore(seq, root.cells) or self._context.length(seq) != len(root.tokens):
                log.info("event=saved_prefixes_ignored cause=llama_cpp_refused_them")
                self._context.truncate(seq, 0)
                self._cache.forget(seq)
                continue
            if not self._cache.holds(seq, len(root.tokens)):
                log.info("event=saved_prefix_ignored cause=incomplete")
                self._context.truncate(seq, 0)
                self._cache.forget(seq)
                continue
            self._cache.commit(seq, root.tokens.tolist(), root=True, shared=0)
            self._tool_states[seq] = root.states
            self.counts.restored += 1

    def _save(self) -> None:
        s, context = self.settings, self._context
        if not s.save or s.saved is None or self._saved_key is None or context is None or not self._unsaved:
            return
        self._unsaved = False  # whatever comes of it: a full disk is not tried again until there is more to save

        def roots() -> Iterator[persist.Root]:
            for entry in reversed(self._cache.entries):
                if entry.root and self._cache.holds(entry.seq, len(entry.tokens)):
                    yield persist.Root(entry.tokens, self._tool_states[entry.seq], context.save(entry.seq))

        try:
            n = persist.save(s.saved, self._saved_key, roots())
            log.info("event=backbone_prefixes_saved n=%d", n)
        except OSError as exc:
            log.warning("event=backbone_save_failed error=%s", type(exc).__name__)

    def _close(self, network: Network) -> None:
        if not self._dead:
            self._save()
        self._die(self._dead or "stopped")
        context, self._context = self._context, None
        if context is not None:
            context.close()
        network.close()


def usable_prefix(n_reused: int, tool_ends: Sequence[int], n_states: int) -> tuple[int, int]:
    """How much of a cached prefix can be used when only the first ``n_states`` tool lines have their states kept.

    Returns (tokens to reuse, tool states to reuse): a line whose state is missing has its last token decoded again.
    """
    n_inside = sum(end < n_reused for end in tool_ends)
    if n_inside <= n_states:
        return n_reused, n_inside
    return tool_ends[n_states], n_states


def _joined(known: npt.NDArray[np.float32], n_known: int, new: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Tool states of a prompt; the very array of the prefix when nothing is added, so that it is kept once."""
    if not len(new):
        return known if n_known == len(known) else known[:n_known]
    return np.concatenate([known[:n_known], new])


def _finish(job: Job, outcome: States | BaseException) -> None:
    """Give the caller its outcome, unless it has one already: from the watcher, or its own cancellation."""
    with contextlib.suppress(InvalidStateError):
        if isinstance(outcome, States):
            job.future.set_result(outcome)
        else:
            job.future.set_exception(outcome)
