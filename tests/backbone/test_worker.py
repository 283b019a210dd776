"""The worker's queue, fairness, faults and watchdog on a scripted llama.cpp: no weights, no timing."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from whetherman_edge.backbone import worker as module
from whetherman_edge.backbone.llama import Aborted, DecodeFault
from whetherman_edge.backbone.prompt import Piece, Prompt
from whetherman_edge.backbone.worker import QUEUE_MAX, Overloaded, TooLong, Worker, WorkerSettings
from whetherman_edge.errors import ArtifactError, EnvironmentFault

WIDTH = 4
WAIT_S = 30.0


class Script:
    """What the scripted context does. ``gate``: a decode of "hold" waits for it, and, if ``abortable``, for a stop."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.abortable = True
        self.faults = 0
        self.opened = self.closed = 0
        self.order: list[str] = []
        self.unloadable: Exception | None = None
        self.same_rows = True


class FakeNetwork:
    script: Script

    def __init__(self, _path: Path) -> None:
        if self.script.unloadable is not None:
            raise self.script.unloadable
        self.bos, self.n_embd, self.window, self.lib = 1, WIDTH, 0, SimpleNamespace(__version__="0")

    def tokenize(self, text: str) -> list[int]:
        return [100 + byte for byte in text.encode()]

    def control(self, _token: str) -> int:
        return 2

    def close(self) -> None:
        self.script.closed += 1


class FakeContext:
    def __init__(self, network: FakeNetwork, **_sizes: object) -> None:
        self.script = network.script
        self.script.opened += 1
        self.beat_s = 0.0
        self.stopped = threading.Event()
        self.capture = SimpleNamespace(stop=lambda on: self.stopped.set() if on else self.stopped.clear())

    def decode(self, _seq: int, tokens, _position: int, wanted) -> np.ndarray:
        text = bytes(token - 100 for token in tokens if token >= 100).decode()
        if text != "T:":  # a new tools block without tools, which is decoded ahead of its dialogue
            self.script.order.append(text)
        if "fault" in text:
            self.script.faults += 1
            raise DecodeFault("expected llama_decode to return 0, got -1")
        if "hold" in text:
            self.script.entered.set()
            while not self.script.gate.wait(0.005):
                if self.script.abortable and self.stopped.is_set():
                    raise Aborted(0, np.zeros((0, WIDTH), np.float32))
        return np.full((len(wanted), WIDTH), float(len(tokens)), dtype=np.float32)

    def first(self, _seq: int) -> int:
        return 0

    def check_rows(self) -> bool:
        return self.script.same_rows

    def copy(self, *_: int) -> None: ...
    def truncate(self, *_: int) -> None: ...
    def close(self) -> None: ...


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    found = Script()
    FakeNetwork.script = found
    monkeypatch.setattr(module, "Network", FakeNetwork)
    monkeypatch.setattr(module, "Context", FakeContext)
    return found


@pytest.fixture
def worker(script: Script):
    found = Worker(Path("w.gguf"), WorkerSettings(3, n_cells=4096, tools_max=256, dialogue_max=512))
    found.start()
    yield found
    script.gate.set()
    found.stop()
    assert not found._thread.is_alive()
    assert not found._watcher.is_alive()


def prompt(text: str, tools: tuple[str, ...] = ()) -> Prompt:
    block = (Piece("T:"), *(Piece(f"{name}\n", ends_tool=i) for i, name in enumerate(tools)))
    return Prompt(block, ((Piece(text),),), (Piece(">"),), tools)


def test_answers_and_remembers_an_answer(worker: Worker) -> None:
    first = worker.submit(prompt("hello", ("a", "b"))).future.result(WAIT_S)
    assert first.tool_names == ("a", "b")
    assert first.tools.shape == (2, WIDTH)
    assert first.n_decoded == first.n_tokens > 5
    again = worker.submit(prompt("hello", ("a", "b"))).future.result(WAIT_S)
    assert (again.n_decoded, worker.counts.answered_from_results) == (0, 1)
    assert np.array_equal(again.last, first.last)
    other = worker.submit(prompt("help!", ("a", "b"))).future.result(WAIT_S)
    assert 0 < other.n_decoded < other.n_tokens
    assert np.shares_memory(other.tools, first.tools)
    assert worker.counts.prefix_hits == 1


def test_a_llama_cpp_that_wants_to_look_up_its_own_rows_is_told_of(
    script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    script.same_rows = False
    worker = Worker(Path("w.gguf"), WorkerSettings(3, n_cells=4096, tools_max=256, dialogue_max=512))
    worker.start()
    assert worker.submit(prompt("hello")).future.result(WAIT_S).n_decoded > 0
    worker.stop()
    assert "backbone_rows_mapped" in caplog.text


def test_answers_are_kept_in_bounds_of_bytes_and_shared_states_count_once() -> None:
    def answer(tools: np.ndarray) -> module.States:
        return module.States(np.zeros(25, np.float32), tools, ("a",) * len(tools), 9, 9)  # 100 bytes

    kept = module.Results(n_max=4, bytes_max=10_000)
    shared = np.zeros((80, 25), np.float32)  # 8,000 bytes
    for n in range(4):
        kept.put(b"%d" % n, answer(shared[: 80 - n]))
    assert (len(kept), kept.n_bytes) == (4, 8_400)
    kept.put(b"4", answer(shared))
    assert (len(kept), kept.n_bytes, kept.get(b"0")) == (4, 8_400, None)
    assert kept.get(b"1") is not None
    kept.put(b"5", answer(np.zeros((80, 25), np.float32)))
    assert kept.n_bytes <= 10_000
    assert kept.get(b"4") is None
    assert kept.get(b"5") is not None
    kept.put(b"6", answer(np.zeros((800, 25), np.float32)))  # what was just made is kept, whatever its size
    assert (len(kept), kept.n_bytes) == (1, 80_100)
    none = module.Results(n_max=0)  # the soak keeps nothing: every answer is a fresh pass
    none.put(b"0", answer(shared))
    assert (len(none), none.n_bytes, none.get(b"0")) == (0, 0, None)


def test_a_full_queue_refuses_and_goes_on(worker: Worker, script: Script) -> None:
    held = worker.submit(prompt("hold"))
    assert script.entered.wait(WAIT_S)
    queued = [worker.submit(prompt(f"q{i}")) for i in range(QUEUE_MAX)]
    assert worker.waiting == QUEUE_MAX
    with pytest.raises(Overloaded, match=str(QUEUE_MAX)):
        worker.submit(prompt("too many"))
    assert worker.counts.refused == 1
    script.gate.set()
    for job in [held, *queued]:
        job.future.result(WAIT_S)
    assert worker.waiting == 0


def test_callers_are_served_in_turn(worker: Worker, script: Script) -> None:
    held = worker.submit(prompt("hold"), "x")
    assert script.entered.wait(WAIT_S)
    greedy = [worker.submit(prompt(f"{i} greedy"), "greedy") for i in range(5)]
    modest = worker.submit(prompt("modest"), "modest")
    script.gate.set()
    for job in [held, *greedy, modest]:
        job.future.result(WAIT_S)
    assert [text.rstrip(">") for text in script.order][1:4] == ["0 greedy", "modest", "1 greedy"]


def test_an_abandoned_job_gives_way_to_a_waiting_one(worker: Worker, script: Script) -> None:
    slow = worker.submit(prompt("hold"))
    assert script.entered.wait(WAIT_S)
    worker.abandon(slow)
    assert not slow.future.done()  # nobody else waits: it goes on, to warm the cache
    assert worker.submit(prompt("next")).future.result(WAIT_S)
    with pytest.raises(EnvironmentFault, match="another request"):
        slow.future.result(WAIT_S)
    assert worker.counts.aborted == 1


def test_abandoned_in_the_queue_is_dropped_and_abandoned_late_is_counted_and_used(
    worker: Worker, script: Script
) -> None:
    slow, queued = worker.submit(prompt("hold")), worker.submit(prompt("never"))
    assert script.entered.wait(WAIT_S)
    worker.abandon(queued)
    assert queued.future.cancelled()
    assert worker.waiting == 0
    worker.abandon(slow)
    slow.future.cancel()  # as asyncio does when its waiter is cancelled
    script.gate.set()
    again = worker.submit(prompt("hold")).future.result(WAIT_S)
    assert (again.n_decoded, worker.counts.late, worker.counts.answered_from_results) == (0, 1, 1)
    assert not any("never" in text for text in script.order)


def test_one_fault_rebuilds_two_in_a_row_end_the_worker(worker: Worker, script: Script) -> None:
    with pytest.raises(DecodeFault):
        worker.submit(prompt("fault")).future.result(WAIT_S)
    assert worker.submit(prompt("fine")).future.result(WAIT_S)
    assert script.opened == 2
    jobs = [worker.submit(prompt("2 fault")), worker.submit(prompt("3 fault"))]
    for job in jobs:
        with pytest.raises(EnvironmentFault):
            job.future.result(WAIT_S)
    worker._thread.join(WAIT_S)
    with pytest.raises(EnvironmentFault, match="not running"):
        worker.submit(prompt("after"))
    assert worker.dead
    assert script.closed == 1


def test_a_prompt_that_can_never_fit_is_no_fault(script: Script) -> None:
    found = Worker(Path("w.gguf"), WorkerSettings(3, n_cells=200, tools_max=256, dialogue_max=512))
    found.start()
    for _ in range(3):
        with pytest.raises(TooLong, match="at most 136 tokens"):
            found.submit(prompt("x" * 300)).future.result(WAIT_S)
    assert found.submit(prompt("short")).future.result(WAIT_S)
    assert script.opened == 1
    found.stop()


def test_a_wedged_decode_fails_its_callers_and_the_worker_is_dead(script: Script) -> None:
    script.abortable = False  # llama.cpp does not even answer the abort callback
    found = Worker(Path("w.gguf"), WorkerSettings(3, wedged_s=0.05))
    found.start()
    jobs = [found.submit(prompt("hold")), found.submit(prompt("behind"))]
    for job in jobs:
        with pytest.raises(EnvironmentFault, match="no progress"):
            job.future.result(WAIT_S)
    with pytest.raises(EnvironmentFault, match="no progress"):
        found.submit(prompt("after"))
    script.gate.set()  # it comes back after all: the late result goes nowhere and the thread ends
    found._thread.join(WAIT_S)
    assert not found._thread.is_alive()
    assert script.order == ["hold>"]
    found.stop()


def test_stopping_fails_what_waits(worker: Worker, script: Script) -> None:
    running, queued = worker.submit(prompt("hold")), worker.submit(prompt("queued"))
    assert script.entered.wait(WAIT_S)
    worker.stop()
    for job in (running, queued):
        with pytest.raises(EnvironmentFault):
            job.future.result(WAIT_S)
    with pytest.raises(EnvironmentFault, match="not running"):
        worker.submit(prompt("after"))


def test_what_loading_raises_is_raised_by_start(script: Script) -> None:
    script.unloadable = ArtifactError("expected a GGUF model")
    found = Worker(Path("w.gguf"), WorkerSettings(3))
    with pytest.raises(ArtifactError, match="GGUF"):
        found.start()
    with pytest.raises(EnvironmentFault, match="not running"):
        found.submit(prompt("x"))
    found.stop()


def test_kept_texts_are_bounded(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_CHARS_MAX", 1_000)
    for n in range(50):
        worker.submit(prompt(f"{n:03}" * 30)).future.result(WAIT_S)
    assert worker._piece_chars == sum(len(piece.text) for piece in worker._pieces) <= 1_000
