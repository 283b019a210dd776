"""``bench latency``: time of one gate decision in process, from a ChatView to a Verdict.

``--engine gemma`` measures the backbone (``bench.backbone``), ``auto`` both stages; the rest is about ``static``.

Three cases: tools the gate knows and a user text it has never seen (what an agent sends), the very same request again,
and 40 tools it has never seen. Parsing the body is measured apart: it is the proxy's part of the request.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from whetherman_edge.bench import workload
from whetherman_edge.daemon import GC_THRESHOLD
from whetherman_edge.dialects.chat import ChatView
from whetherman_edge.dialects.openai_chat import view
from whetherman_edge.dialects.tool_cache import ToolCache
from whetherman_edge.errors import UsageError
from whetherman_edge.gate.static_gate import StaticGate
from whetherman_edge.kernels import load
from whetherman_edge.router.scorer import Scorer
from whetherman_edge.router.table import RouterTable

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]

KNOWN_CALLS: Final = 4000
NEW_TOOLS_CALLS: Final = 60
NEW_TOOLS: Final = 40
WARM_UP_CALLS: Final = 200
KNOWN_P50_US_MAX: Final = 100.0
NEW_TOOLS_P50_US_MAX: Final = 5000.0


def register(verbs: Verbs) -> None:
    """Add ``bench latency``."""
    parser = verbs.add_parser("latency", help="time of one gate decision in process")
    parser.add_argument("--engine", choices=("static", "gemma", "auto"), default="static")
    parser.add_argument("--calls", type=int, default=30, help="gemma: measured calls a cell (default 30)")
    parser.add_argument(
        "--plain-calls",
        type=int,
        default=3,
        help="gemma: calls a cell of the naive and full arms, 0 for none (default 3)",
    )
    parser.add_argument("--threads", type=int, default=2, help="gemma: threads of llama.cpp (default 2)")
    parser.add_argument("--case", action="append", help="gemma: only this case (short2, tools8, tools24, history1500)")
    parser.add_argument("--kernels", metavar="SET", help="best, serial, avx2, neon or reference (default: best)")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all figures to FILE (gemma: goes on where it was stopped)"
    )
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Measure and print; 1 when a target is missed."""
    if parsed.engine == "gemma":
        return _backbone(parsed, {})
    figures = measure(parsed.kernels)
    for name, value in figures.items():
        if isinstance(value, dict):
            sys.stdout.write(
                f"{name:34} p50 {value['p50_us']:9.1f} us   p99 {value['p99_us']:9.1f} us   n {value['n']}\n"
            )
        else:
            sys.stdout.write(f"{name:34} {value}\n")
    if parsed.engine == "auto":
        return _backbone(parsed, {"static": figures})
    if parsed.json:
        parsed.json.write_text(json.dumps(figures, indent=1) + "\n")
    known, new = figures["known_tools"]["p50_us"], figures["new_tools"]["p50_us"]
    return int(known > KNOWN_P50_US_MAX or new > NEW_TOOLS_P50_US_MAX)


def _backbone(parsed: argparse.Namespace, figures: dict[str, Any]) -> int:
    """Measure the installed backbone; 1 when an absolute aim is missed. Raises what a missing backbone raises."""
    from whetherman_edge.backbone import install, manifest, store
    from whetherman_edge.bench import backbone

    cases = parsed.case or list(backbone.CASES)
    unknown = [case for case in cases if case not in backbone.CASES]
    if unknown or parsed.calls < 1 or parsed.plain_calls < 0 or parsed.threads < 1:
        raise UsageError(f"bench latency: expected --case of {', '.join(backbone.CASES)} and counts above 0")
    artifact = manifest.read_manifest()
    target = backbone.Target(
        derived=install.require_backbone(artifact),
        base=store.require(artifact.base.name).path,
        layer=artifact.layer,
        style=artifact.prompt_style,
        tools_max=artifact.tools_max,
        dialogue_max=artifact.dialogue_max,
    )
    part = parsed.json.with_name(f"{parsed.json.name}.part") if parsed.json else None
    figures |= backbone.measure(
        target, calls=parsed.calls, plain_calls=parsed.plain_calls, threads=parsed.threads, cases=cases, part=part
    )
    sys.stdout.write(json.dumps({key: value for key, value in figures.items() if key != "cells"}, indent=1) + "\n")
    if parsed.json:
        parsed.json.write_text(json.dumps(figures, indent=1) + "\n")
    if part is not None:
        part.unlink(missing_ok=True)
    missed = backbone.missed(figures)
    for line in missed:
        sys.stdout.write(f"missed: {line}\n")
    return int(bool(missed))


def measure(kernel_set: str | None = None) -> dict[str, Any]:
    """All figures, JSON-ready; durations in microseconds."""
    kernels = load(kernel_set)
    scorer = Scorer(RouterTable.open(None, kernels), kernels)
    gate = StaticGate.open(scorer, kernels, None)
    cache = ToolCache()

    def views(count: int, start: int, n_turns: int = 20) -> list[ChatView]:
        return [view(json.dumps(workload.chat(start + i, n_turns=n_turns)).encode(), cache) for i in range(count)]

    for chat in views(WARM_UP_CALLS, 1_000_000):
        gate.judge(chat)
    first_steps = views(KNOWN_CALLS, 0, n_turns=0)
    long = views(KNOWN_CALLS, 10_000)
    again = long[:1] * 1000
    new = [
        view(json.dumps(workload.chat(i, n_tools=NEW_TOOLS, n_turns=0, family=1 + i)).encode(), cache)
        for i in range(NEW_TOOLS_CALLS)
    ]
    gc.collect()
    gc.freeze()  # thousands of prepared views are the benchmark's, not the gate's: they must not cost it collections
    gc.set_threshold(GC_THRESHOLD)  # as the daemon does
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cpus, Python {platform.python_version()}",
        "kernels": f"{kernels.backend} {kernels.isa}",
        "workload": "8 tools; a user text never seen before; 20 turns of history, or none",
        "known_tools": _timed(gate.judge, long),
        "known_tools_first_step": _timed(gate.judge, first_steps),
        "same_request_again": _timed(gate.judge, again),
        "new_tools": _timed(gate.judge, new),
    }


def _timed(judge: Callable[[ChatView], Any], chats: Sequence[ChatView]) -> dict[str, float]:
    clock = time.perf_counter_ns
    spent: list[float] = []
    for chat in chats:
        start = clock()
        judge(chat)
        spent.append((clock() - start) / 1000.0)
    spent.sort()
    return {
        "n": len(spent),
        "p50_us": round(statistics.median(spent), 1),
        "p99_us": round(spent[min(len(spent) - 1, int(len(spent) * 0.99))], 1),
        "min_us": round(spent[0], 1),
    }
