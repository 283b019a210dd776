"""How much the pointer head counts beside the ToolRouter in `route --engine gemma|auto`; fitted on pools held out of
both.

    python -m convert.fit_route HEADS GGUF --shared DATA [--cases 150]

Half of the cases of every group fit the two weights, the other half are reported: top-1 of the ToolRouter, of the
pointer alone and of both.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

from convert.lora_corpus import open_pools
from convert.router_validation import Case, dev_groups, mcp_slates, random_slates, unseen
from convert.train_lora import DIALOGUE_MAX, TOOLS_MAX
from whetherman_edge.backbone.head import Heads
from whetherman_edge.backbone.prompt import render
from whetherman_edge.backbone.worker import Worker, WorkerSettings
from whetherman_edge.bench.scoring import wilson
from whetherman_edge.engine import Router, chat_of
from whetherman_edge.gate.features import PHASES

F64 = npt.NDArray[np.float64]
Scored = tuple[F64, F64, frozenset[int]]

WEIGHTS: Final = tuple(round(0.1 * step, 1) for step in range(21))


def scored(cases: Sequence[Case], router: Router, heads: Heads, worker: Worker) -> list[Scored]:
    """(pointer logits, log p of the ToolRouter, right ones) of each case."""
    found: list[Scored] = []
    for case in cases:
        names = [card.name for card in case.tools]
        if len(set(names)) < len(names):
            continue
        options: dict[str, Any] = {
            card.name: {"description": card.description, "parameters": list(card.parameters)} for card in case.tools
        }
        choice = router.scorer.route(case.query, options)
        states = worker.submit(render(chat_of(case.query, options), "compact"), "route").future.result()
        pointed = heads.point(states.last, states.tools)
        if pointed is None or len(states.tool_names) < len(names):
            continue
        by_name = dict(zip(states.tool_names, pointed.logits.tolist(), strict=True))
        static = np.log(np.maximum([choice.probabilities[name] for name in names], 1e-12))
        found.append((np.array([by_name[name] for name in names]), static, case.accept))
    return found


def loss(some: Sequence[Scored], a: float, b: float) -> float:
    """Mean negative log-likelihood of the right tools."""
    total = 0.0
    for pointer, static, right in some:
        logits = a * pointer + b * static
        logits = logits - logits.max()
        p = np.exp(logits)
        total -= float(np.log(max(p[list(right)].sum() / p.sum(), 1e-12)))
    return total / max(len(some), 1)


def top1(some: Sequence[Scored], a: float, b: float) -> list[float]:
    """[k, n, low, high]."""
    k = sum(int((a * pointer + b * static).argmax()) in right for pointer, static, right in some)
    low, high = wilson(k, len(some))
    return [k, len(some), round(low, 4), round(high, 4)]


def main() -> None:
    """Fit, report."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("heads", type=Path)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--layer", type=int, default=11)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cases", type=int, default=150, help="cases of each group")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    data = Path(__file__).resolve().parent / "data"
    pools = open_pools(options.shared, data)
    held = [pool for pool in pools if pool.is_held_out]
    written = [pool for pool in held if pool.source.startswith("authored")]
    groups: dict[str, list[Case]] = {
        "unseen full": unseen(written, "full", rivals=False),
        "unseen short": unseen(written, "4-word", rivals=False),
        "rivals full": unseen(written, "full", rivals=True),
        "random 5": random_slates(written, 5),
        "mcp": mcp_slates([pool for pool in held if pool.source == "mcp"]),
        **dev_groups(options.shared, pools),
    }
    router = Router()
    blank = {
        "fusion_weights": np.zeros((len(PHASES), 10, 4), np.float32),
        "fusion_bias": np.zeros((len(PHASES), 4), np.float32),
    }
    heads = Heads({**load_file(options.heads), **blank})
    settings = WorkerSettings(options.layer, n_threads=options.threads, tools_max=TOOLS_MAX, dialogue_max=DIALOGUE_MAX)
    worker = Worker(options.gguf, settings)
    worker.start()
    try:
        results: Mapping[str, list[Scored]] = {
            name: scored(cases[:: max(1, len(cases) // options.cases)], router, heads, worker)
            for name, cases in groups.items()
        }
    finally:
        worker.stop()
    fit_on = [one for name, some in results.items() if not name.startswith("dev") for one in some[::2]]
    a, b = min(((a, b) for a in WEIGHTS for b in WEIGHTS if a + b > 0), key=lambda w: loss(fit_on, *w))
    report: dict[str, Any] = {"route_fusion": [a, b, 1.0], "n_fit": len(fit_on), "groups": {}}
    for name, some in results.items():
        rest = some if name.startswith("dev") else some[1::2]
        report["groups"][name] = {"static": top1(rest, 0, 1), "pointer": top1(rest, 1, 0), "both": top1(rest, a, b)}
    text = json.dumps(report, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
