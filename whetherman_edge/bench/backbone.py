"""``bench latency --engine gemma``: what one look at a request costs the backbone, against two plainer ways.

Three arms on the same prompts, in turn, so that a noisy machine disturbs all alike:

* ``naive``: what a straightforward llama-cpp-python program does: ``Llama(embedding=True).embed(text)``, the whole
  prompt every time, every token an output, each multiplied by the vocabulary.
* ``full``: the low-level API with one output, but all blocks, the last token's vocabulary product, and no prefix kept.
* ``ours``: the worker: cut weights, stopped at the head's layer, prefixes kept.

Phases: ``first`` (tools and text never seen), ``same_tools`` (tools known, a new dialogue), ``next_step`` (the dialogue
went on by one call and its result). The middle of a long dialogue is cut anew with every half budget that it grows by
(``prompt.kept_turns``): its next steps are measured at STEPS_OF_LONG places in turn, p50 is a step's, p99 a cut's time.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from whetherman_edge.backbone.llama import Context, Network, load_library
from whetherman_edge.backbone.prompt import Prompt, Style, render
from whetherman_edge.backbone.worker import Worker, WorkerSettings
from whetherman_edge.bench import workload
from whetherman_edge.dialects.openai_chat import view
from whetherman_edge.dialects.tool_cache import ToolCache

CASES: Final = {"short2": (2, 0), "tools8": (8, 0), "tools24": (24, 0), "history1500": (8, 34)}
"""Case to (tools, earlier messages). 34 messages of the workload are about 1,500 tokens of history."""
STEPS_OF_LONG: Final = 16
"""A step adds some 33 tokens: so many are once half of a budget of 1,024."""
PHASES: Final = ("first", "same_tools", "next_step")
SEED_MS: Final = {"short2": 188.0, "tools8": 1075.0, "history1500": 2152.0}
"""The research program's own figures on its CPU: 2 tools, 8 tools, 1,500 tokens of history."""
SAME_TOOLS_P50_MS_MAX: Final = 60.0
NEXT_STEP_P50_MS_MAX: Final = 60.0
RATIO_MIN: Final = {"first": 10.0, "same_tools": 60.0, "next_step": 60.0}
MACS_A_BLOCK: Final = 5_570_560
"""Multiply-adds a token and block in the seven projections: 640 x (1024 + 256 + 256) + 1024 x 640 + 3 x 640 x 2048."""
PEAK_TOKENS: Final = 512


class Target(msgspec.Struct, frozen=True):
    """What is measured: the derived weights, the base they came from, and how they are read."""

    derived: Path
    base: Path
    layer: int
    style: Style
    tools_max: int
    dialogue_max: int


class Sample(msgspec.Struct, frozen=True):
    """One prompt of a cell, and the prompts that must have been seen before it."""

    prompt: Prompt
    before: tuple[Prompt, ...] = ()


def measure(
    target: Target, *, calls: int, plain_calls: int, threads: int, cases: Sequence[str], part: Path | None = None
) -> dict[str, Any]:
    """All figures, JSON-ready. calls: measured calls a cell for ``ours``; plain_calls: for the two others (0: leave
    them out). part: a file that gets each cell as soon as it is measured; cells that it holds are not measured again.
    """
    cells: list[dict[str, Any]] = json.loads(part.read_text()) if part is not None and part.exists() else []
    worker = Worker(
        target.derived,
        WorkerSettings(target.layer, n_threads=threads, tools_max=target.tools_max, dialogue_max=target.dialogue_max),
    )
    started = time.perf_counter()
    worker.start()
    ready_ms = (time.perf_counter() - started) * 1e3
    plain = Plain(target.base, threads) if plain_calls else None
    try:
        for case, phase in itertools.product(cases, PHASES):
            if any((cell["case"], cell["phase"]) == (case, phase) for cell in cells):
                continue
            new = _phase(case, phase, target.style, worker, plain, calls, plain_calls)
            cells += new
            _say(new)
            if part is not None:
                part.write_text(json.dumps(cells))
        resident = _resident_mb() if plain is None else None  # the plain ways hold much more
        peak = _peak_macs(target, threads)
    finally:
        worker.stop()
        if plain is not None:
            plain.close()
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cpus, Python {platform.python_version()}",
        "threads": threads,
        "layer": target.layer,
        "ready_ms": round(ready_ms, 1),
        "resident_mb": resident,
        "cells": cells,
        "seed_ms": SEED_MS,
        "ratios_to_naive": _ratios(cells),
        "arithmetic": _arithmetic(cells, target, peak),
        "prefix": msgspec.to_builtins(worker.counts),
    }


def _phase(
    case: str, phase: str, style: Style, worker: Worker, plain: Plain | None, calls: int, plain_calls: int
) -> list[dict[str, Any]]:
    """The cells of one case and phase, one for each arm."""
    arms: dict[str, list[float]] = {"naive": [], "full": [], "ours": []}
    tokens = {"naive": 0, "full": 0, "ours": 0}
    for number, sample in enumerate(samples(case, phase, calls, style)):
        for earlier in sample.before:
            worker.submit(earlier).future.result()
        spent, states = _timed(lambda prompt: worker.submit(prompt).future.result(), sample.prompt)
        arms["ours"].append(spent)
        tokens["ours"] += states.n_decoded
        if plain is not None and number < plain_calls:
            for arm, run in (("naive", plain.naive), ("full", plain.full)):
                spent, count = _timed(run, sample.prompt)
                arms[arm].append(spent)
                tokens[arm] += count
    return [_cell(case, phase, arm, arms[arm], tokens[arm]) for arm in arms if arms[arm]]


def samples(case: str, phase: str, calls: int, style: Style) -> Iterator[Sample]:
    """``calls`` prompts of a cell. Every ``first`` has tools of its own; ``same_tools`` and ``next_step`` share
    theirs.
    """
    n_tools, n_turns = CASES[case]
    cache = ToolCache()

    def prompt(body: dict[str, Any]) -> Prompt:
        return render(view(json.dumps(body).encode(), cache), style)

    base = 10_000 * (1 + sorted(CASES).index(case)) + 3_000 * PHASES.index(phase)
    for number in range(calls):
        family = base + (number if phase == "first" else 0)
        body = workload.chat(number, n_tools=n_tools, n_turns=n_turns, family=family)
        # Another dialogue from its first word on: else the history would be reused with the tools.
        body["messages"][0]["content"] += f" Dialogue {base + number}."
        if phase == "first":
            yield Sample(prompt(body))
        elif phase == "same_tools":
            other = workload.chat(0, n_tools=n_tools, n_turns=0, family=family)
            yield Sample(prompt(body), (prompt(other),))
        else:
            n_steps = number % STEPS_OF_LONG if n_turns else 0
            for step in range(n_steps):
                body["messages"] += _step(body, f"step {step}", step)
            grown = [*body["messages"], *_step(body, f"item {number}", number)]
            yield Sample(prompt({**body, "messages": grown}), (prompt(body),))


def _step(body: dict[str, Any], query: str, number: int) -> list[dict[str, Any]]:
    """A call and its result."""
    arguments = json.dumps({"query": query, "limit": 5})
    function = {"name": body["tools"][0]["function"]["name"], "arguments": arguments}
    return [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c", "content": f'{{"items":[{number}]}}'},
    ]


class Plain:
    """The two plainer ways, on the base file."""

    def __init__(self, base: Path, threads: int) -> None:
        lib = load_library()
        self._llama = lib.Llama(
            model_path=str(base), embedding=True, n_ctx=4096, n_batch=4096, n_ubatch=4096, n_threads=threads,
            n_threads_batch=threads, verbose=False,
        )  # fmt: skip
        self._network = Network(base)
        n_layer = self._network.n_layer
        self.context = Context(self._network, layer=n_layer, n_cells=4096, n_seq=1, chunk=512, n_threads=threads)
        # A name no node has: the graph is never stopped.
        self.context.capture.state.name = b"never"

    def naive(self, prompt: Prompt) -> int:
        """Returns the number of tokens."""
        text = text_of(prompt)
        self._llama.embed(text)
        return len(self._llama.tokenize(text.encode()))

    def full(self, prompt: Prompt) -> int:
        """Returns the number of tokens."""
        ids = [self._network.bos, *self._network.tokenize(text_of(prompt))]
        self.context.truncate(0, 0)
        self.context.run(0, ids)
        return len(ids)

    def close(self) -> None:
        """Free everything."""
        self.context.close()
        self._network.close()
        self._llama.close()


def text_of(prompt: Prompt) -> str:
    """The whole prompt as one text."""
    pieces = [*prompt.tools, *(piece for turn in prompt.turns for piece in turn), *prompt.cue]
    return "".join(piece.text for piece in pieces)


def _timed(run: Callable[[Any], Any], argument: Any) -> tuple[float, Any]:
    gc.collect(0)
    start = time.perf_counter()
    result = run(argument)
    return (time.perf_counter() - start) * 1e3, result


def _cell(case: str, phase: str, arm: str, spent: Sequence[float], tokens: int) -> dict[str, Any]:
    ordered = sorted(spent)
    return {
        "case": case,
        "phase": phase,
        "arm": arm,
        "n": len(ordered),
        "p50_ms": round(statistics.median(ordered), 2),
        "p99_ms": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))], 2),
        "tokens": round(tokens / len(ordered), 1),
    }


def _say(cells: Sequence[dict[str, Any]]) -> None:
    for cell in cells:
        seed_ms = SEED_MS.get(cell["case"])
        beside = f"   seed {seed_ms:.0f} ms" if seed_ms is not None and cell["arm"] == "ours" else ""
        sys.stdout.write(
            f"{cell['case']:12} {cell['phase']:11} {cell['arm']:6} p50 {cell['p50_ms']:9.1f} ms   "
            f"p99 {cell['p99_ms']:9.1f} ms   {cell['tokens']:7.1f} tokens   n {cell['n']}{beside}\n"
        )
    sys.stdout.flush()


def _ratios(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How many times faster than naive each of our cells is."""
    by_key = {(c["case"], c["phase"], c["arm"]): c["p50_ms"] for c in cells}
    return [
        {"case": case, "phase": phase, "ratio": round(by_key[case, phase, "naive"] / ours, 1), "aim": RATIO_MIN[phase]}
        for (case, phase, arm), ours in by_key.items()
        if arm == "ours" and (case, phase, "naive") in by_key
    ]


def _peak_macs(target: Target, threads: int) -> float:
    """Multiply-adds a second in llama.cpp's int8 matrix products, at their best: one wide batch of the derived
    weights.
    """
    network = Network(target.derived)
    own = Context(network, layer=target.layer, n_cells=2048, n_seq=1, chunk=PEAK_TOKENS, n_threads=threads)
    ids = np.random.default_rng(0).integers(1_000, 50_000, PEAK_TOKENS).tolist()
    best = float("inf")
    for _ in range(4):
        own.truncate(0, 0)
        spent, _ = _timed(lambda tokens: own.decode(0, tokens, 0, (PEAK_TOKENS - 1,)), ids)
        best = min(best, spent)
    own.close()
    network.close()
    return PEAK_TOKENS * (target.layer + 1) * MACS_A_BLOCK / (best / 1e3)


def _arithmetic(cells: Sequence[dict[str, Any]], target: Target, peak: float) -> dict[str, Any]:
    """How far each of our cells is from what its multiply-adds need at that peak."""
    limits = [
        {
            "case": cell["case"],
            "phase": cell["phase"],
            "limit_ms": round(cell["tokens"] * (target.layer + 1) * MACS_A_BLOCK / peak * 1e3, 2),
            "times_the_limit": round(
                cell["p50_ms"] / max(cell["tokens"] * (target.layer + 1) * MACS_A_BLOCK / peak * 1e3, 1e-9), 2
            ),
        }
        for cell in cells
        if cell["arm"] == "ours"
    ]
    return {"peak_gmacs": round(peak / 1e9, 1), "cells": limits}


def _resident_mb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines() if Path("/proc/self/status").exists() else ():
        if line.startswith("VmRSS:"):
            return round(int(line.split()[1]) / 1024, 1)
    return 0.0


def missed(figures: dict[str, Any]) -> list[str]:
    """The absolute aims that were missed, in words."""
    found = []
    for cell in figures["cells"]:
        limit = {"same_tools": SAME_TOOLS_P50_MS_MAX, "next_step": NEXT_STEP_P50_MS_MAX}.get(cell["phase"])
        if cell["arm"] == "ours" and limit is not None and cell["p50_ms"] > limit:
            found.append(f"{cell['case']} {cell['phase']}: p50 {cell['p50_ms']} ms, aim {limit:g} ms")
    return found
