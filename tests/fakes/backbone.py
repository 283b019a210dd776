"""A backbone without llama.cpp: a scripted worker, and an artifact of eight dimensions."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path

import msgspec
import numpy as np
from safetensors.numpy import save

from whetherman_edge.backbone.manifest import VERSION
from whetherman_edge.backbone.prompt import Prompt
from whetherman_edge.backbone.worker import Counts, Job, Overloaded, States, TooLong
from whetherman_edge.errors import ArtifactError, EnvironmentFault

WIDTH = 8
SHA256 = "c" * 64


class FakeWorker:
    """``mode``: answer, hang (until ``release``), dead, full, broken (decoding fails),
    long (the prompt does not fit).

    ``last``: the state it answers with; ``lasts``: by the name of the only tool. ``unopened``: what ``start`` raises.
    """

    def __init__(self, path: Path = Path("weights.gguf"), mode: str = "answer") -> None:
        self.path, self.mode = path, mode
        self.unopened: Exception | None = None
        self.last = np.arange(WIDTH, dtype=np.float32)
        self.lasts: dict[str, np.ndarray] = {}
        self.counts = Counts()
        self.waiting = 0
        self.prompts: list[Prompt] = []
        self.keys: list[str] = []
        self.held: list[Job] = []
        self.abandoned: list[Job] = []
        self.submitted = threading.Event()
        self.stopped = threading.Event()

    def start(self) -> None:
        if self.unopened is not None:
            raise self.unopened

    def submit(self, prompt: Prompt, key: str = "") -> Job:
        if self.mode == "dead":
            raise EnvironmentFault("the backbone worker is not running: DecodeFault")
        if self.mode == "full":
            raise Overloaded("expected at most 32 waiting requests")
        job = Job(prompt, key)
        self.prompts.append(prompt)
        self.keys.append(key)
        self.counts.jobs += 1
        self.submitted.set()
        match self.mode:
            case "hang":
                self.held.append(job)
            case "broken":
                job.future.set_exception(RuntimeError("llama_decode"))
            case "long":
                job.future.set_exception(TooLong("expected a prompt of at most 8 tokens"))
            case _:
                job.future.set_result(self.states(prompt))
        return job

    def states(self, prompt: Prompt) -> States:
        tools = np.eye(WIDTH, dtype=np.float32)[: len(prompt.tool_names)]
        alone = prompt.tool_names[0] if len(prompt.tool_names) == 1 else ""
        return States(self.lasts.get(alone, self.last), tools, prompt.tool_names, 10, 4)

    def release(self) -> None:
        """Answer what was held, as a worker does that was only slow."""
        for job in self.held:
            if job.future.set_running_or_notify_cancel():
                job.future.set_result(self.states(job.prompt))
        self.held.clear()

    def abandon(self, job: Job) -> None:
        self.abandoned.append(job)

    def stop(self) -> None:
        self.stopped.set()


def arrays(**changed) -> dict[str, np.ndarray]:
    """Heads of width WIDTH: class k's logit is x[k], the fusion takes the backbone's word, tool k's logit is x[k], a
    match is x[5] and the log-probability of ACT, the router's counts half.
    """
    fusion = np.zeros((3, 10, 4), np.float32)
    fusion[:, :4, :] = np.eye(4)
    found = {
        "head_weight": np.eye(4, WIDTH, dtype=np.float32),
        "head_bias": np.zeros(4, np.float32),
        "pointer_query": np.eye(WIDTH, dtype=np.float32),
        "pointer_key": np.eye(WIDTH, dtype=np.float32),
        "pointer_none_weight": np.zeros(WIDTH, np.float32),
        "pointer_none_bias": np.zeros(1, np.float32),
        "fusion_weights": fusion,
        "fusion_bias": np.zeros((3, 4), np.float32),
        "match_state": np.eye(1, WIDTH, 5, dtype=np.float32)[0],
        "match_classes": np.array([1.0, 0.0, 0.0, 0.0], np.float32),
        "match_router": np.array([0.5], np.float32),
        **changed,
    }
    return {name: array for name, array in found.items() if array is not None}


def write_artifact(folder: Path, *, gate: str = SHA256, router: str = SHA256, arrays_of=None, **changed) -> Path:
    """A manifest with its heads in ``folder``; ``changed``: fields of the manifest. Returns the manifest's path."""
    raw = save(arrays_of if arrays_of is not None else arrays())
    (folder / "backbone.safetensors").write_bytes(raw)
    value = {
        "format": "whetherman-backbone",
        "version": VERSION,
        "base": {"name": "gemma-3-270m", "sha256": SHA256},
        "adapter": None,
        "prompt_style": "compact",
        "layer": 3,
        "pooling": "last",
        "quantisation": "q8_0",
        "n_layers": 5,
        "heads": {"file": "backbone.safetensors", "sha256": hashlib.sha256(raw).hexdigest()},
        "gate_static_sha256": gate,
        "router_sha256": router,
        "classes": ["ACT", "ANSWER", "ASK", "DECLINE"],
        "tools_max": 3072,
        "dialogue_max": 1536,
        "default_tau": [{"ANSWER": 0.5, "ASK": None, "DECLINE": 0.5}] * 3,
        "ask_band": {"low": 0.0, "high": 1.0},
        "dev": {},
        **changed,
    }
    path = folder / "backbone.json"
    path.write_text(json.dumps(value))
    return path


class Opens:
    """``locate`` and ``make_worker`` of a stage: what they raise or give is set from outside."""

    def __init__(self, *workers: FakeWorker) -> None:
        self.workers = list(workers) or [FakeWorker()]
        self.made: list[FakeWorker] = []
        self.missing: Exception | None = None

    def locate(self) -> Path:
        if self.missing is not None:
            raise self.missing
        return Path("weights.gguf")

    def make(self, path: Path) -> FakeWorker:
        if not self.workers:
            raise ArtifactError("no worker left")
        worker = self.workers.pop(0)
        self.made.append(worker)
        return worker


def last_for(label: str, strength: float = 10.0) -> np.ndarray:
    """A state on which the heads of ``arrays`` say ``label``."""
    last = np.full(WIDTH, 0.01, np.float32)
    last[["ACT", "ANSWER", "ASK", "DECLINE"].index(label)] = strength
    return last


def replaced(manifest, **fields):
    return msgspec.structs.replace(manifest, **fields)
