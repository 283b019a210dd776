"""``whetherman-edge`` with a backbone that can be killed and wedged from outside; for the reliability run.

SIGUSR1: the worker dies, and the next one is fine. SIGUSR2: it stops answering; the second one lets it go on. Engine,
stage, breaker and fusion are the daemon's own; only llama.cpp's part is a stand-in that answers at once.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path

import numpy as np

from tests.fakes.backbone import WIDTH, last_for, write_artifact
from whetherman_edge import engine
from whetherman_edge.backbone import stage
from whetherman_edge.backbone.prompt import Prompt
from whetherman_edge.backbone.worker import Counts, Job, States
from whetherman_edge.cli import main
from whetherman_edge.engine import Router, StaticEngine
from whetherman_edge.errors import EnvironmentFault

RESTART_S = 0.5


class Worker:
    """Answers every prompt with the same state; ``mode``: answer, hang or dead."""

    def __init__(self) -> None:
        self.mode = "answer"
        self.counts = Counts()
        self._held: list[Job] = []

    @property
    def waiting(self) -> int:
        return len(self._held)

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def abandon(self, job: Job) -> None: ...

    def submit(self, prompt: Prompt, key: str = "") -> Job:
        if self.mode == "dead":
            raise EnvironmentFault("the backbone worker is not running: killed")
        job = Job(prompt, key)
        self.counts.jobs += 1
        if self.mode == "hang":
            self._held.append(job)
        else:
            self._answer(job)
        return job

    def go_on(self) -> None:
        self.mode = "answer"
        while self._held:
            self._answer(self._held.pop())

    def _answer(self, job: Job) -> None:
        if job.future.set_running_or_notify_cancel():
            tools = np.eye(WIDTH, dtype=np.float32)[: len(job.prompt.tool_names)]
            job.future.set_result(States(last_for("ACT"), tools, job.prompt.tool_names, 10, 4))


def run(argv: list[str]) -> int:
    """The command line, with the stand-in in its place."""
    router = Router()
    folder = Path(tempfile.mkdtemp(dir=os.environ["HOME"]))
    path = write_artifact(folder, gate=StaticEngine(router).sha256, router=router.table.sha256)
    os.environ["WHETHERMAN_BACKBONE"] = str(path)
    worker = Worker()

    def make() -> Worker:
        nonlocal worker
        worker = Worker()
        return worker

    def kill(*_signal: object) -> None:
        worker.mode = "dead"

    def wedge(*_signal: object) -> None:
        if worker.mode == "hang":
            worker.go_on()
        else:
            worker.mode = "hang"

    engine.install.require_backbone = lambda _manifest: Path("weights.gguf")  # type: ignore[assignment]
    engine._worker = lambda _settings, _manifest, _path: make()  # type: ignore[assignment]
    stage.RESTART_FIRST_S = RESTART_S  # type: ignore[misc]
    signal.signal(signal.SIGUSR1, kill)
    signal.signal(signal.SIGUSR2, wedge)
    return main(argv)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
