"""A head on the frozen base, without any training of the backbone: the plainest artifact that makes real decisions.

    python -m convert.fit_head BASE_GGUF OUT_DIR [--dialogues 1500] [--layer 9] [--quantisation q8_0]

Reads states of whole contrast sets (one tool list each, so its tokens are read once) with the code that runs in the
daemon, and fits a ridge-regularised softmax by accelerated gradient descent: NumPy is all it needs. The fusion
is no fit: the static stage was trained on these very dialogues, so a fit on them would believe it too much. It is a
fixed weighted product of both opinions. `convert.fit_fusion` makes the artifact that ships.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from convert.gate_data import Item, read_dialogues
from convert.gate_metrics import auroc, macro_f1
from whetherman_edge.backbone import derive, manifest, store
from whetherman_edge.backbone.head import normalised
from whetherman_edge.backbone.prompt import render
from whetherman_edge.backbone.worker import Worker, WorkerSettings
from whetherman_edge.dialects.openai_chat import view
from whetherman_edge.dialects.tool_cache import ToolCache
from whetherman_edge.engine import Router, StaticEngine
from whetherman_edge.gate.fusion import N_INPUTS
from whetherman_edge.gate.verdict import LABELS, PHASES

F32 = npt.NDArray[np.float32]
Ints = npt.NDArray[np.intp]

RIDGE: Final = 3e-2
STEPS: Final = 600
SMOOTHING: Final = 0.1
"""Of a label's mass, spread over the other labels that the dialogue's authors would accept too."""
WEIGHT_BACKBONE: Final = 0.1
WEIGHT_STATIC: Final = 0.95
TOOLS_MAX: Final = 3_072
DIALOGUE_MAX: Final = 1_536
ASK_BAND: Final = {"low": 0.35, "high": 0.95}
HELD_OUT_SHARE: Final = 0.15


def chosen(n: int) -> list[Item]:
    """Whole contrast sets of the training split, evenly over the domains, ``n`` dialogues at most."""
    sets: dict[str, list[Item]] = {}
    for item in read_dialogues("gate_train"):
        sets.setdefault(f"{item['domain']} {item['set']}", []).append(item)
    order = sorted(sets, key=lambda key: hashlib.sha256(key.encode()).digest())
    found: list[Item] = []
    for key in order:
        if len(found) + len(sets[key]) > n:
            break
        found += sets[key]
    return found


def states_of(gguf: Path, layer: int, items: Sequence[Item], threads: int) -> F32:
    """(n, width) float32: the last token's state of every dialogue."""
    settings = WorkerSettings(layer=layer, n_threads=threads, tools_max=TOOLS_MAX, dialogue_max=DIALOGUE_MAX)
    worker, cache = Worker(gguf, settings), ToolCache()
    worker.start()
    try:
        rows = []
        for done, item in enumerate(items):
            chat = view(json.dumps(item["request"]).encode(), cache)
            rows.append(worker.submit(render(chat, "compact")).future.result().last)
            if done % 100 == 0:
                print(f"states: {done} of {len(items)}", flush=True)
        return np.stack(rows)
    finally:
        worker.stop()


def targets_of(items: Sequence[Item]) -> F32:
    """(n, 4) float32: the gold label, with some mass on what is acceptable too."""
    targets = np.zeros((len(items), len(LABELS)), dtype=np.float32)
    for row, item in zip(targets, items, strict=True):
        others = [label for label in item["accept"] if label != item["gold"]]
        row[LABELS.index(item["gold"])] = 1.0 - SMOOTHING * bool(others)
        for label in others:
            row[LABELS.index(label)] += SMOOTHING / len(others)
    return targets


def fit(x: F32, targets: F32) -> tuple[F32, F32]:
    """Softmax regression on standardised columns, given back for the plain ones: (4, width) and (4,)."""
    mean, scale = x.mean(axis=0), x.std(axis=0) + 1e-6
    z = np.concatenate([(x - mean) / scale, np.ones((len(x), 1), dtype=np.float32)], axis=1)
    penalty = np.append(np.full(x.shape[1], RIDGE, dtype=np.float32), np.float32(0.0))[:, None]
    # The loss's curvature is at most half the largest eigenvalue of the inputs' second moment.
    step = 1.0 / (0.5 * float(np.linalg.eigvalsh(z.T @ z / len(z))[-1]) + RIDGE)
    w = ahead = np.zeros((z.shape[1], len(LABELS)), dtype=np.float32)
    for k in range(STEPS):
        logits = z @ ahead
        logits -= logits.max(axis=1, keepdims=True)
        p = np.exp(logits)
        p /= p.sum(axis=1, keepdims=True)
        new = ahead - step * (z.T @ (p - targets) / len(z) + penalty * ahead)
        ahead, w = new + (k / (k + 3)) * (new - w), new
    weight = w[:-1] / scale[:, None]
    return np.ascontiguousarray(weight.T), w[-1] - mean @ weight


def fusion() -> dict[str, F32]:
    """The fixed product of both opinions."""
    weights = np.zeros((len(PHASES), N_INPUTS, len(LABELS)), dtype=np.float32)
    for label in range(len(LABELS)):
        weights[:, label, label] = WEIGHT_BACKBONE
        weights[:, len(LABELS) + label, label] = WEIGHT_STATIC
    return {"fusion_weights": weights, "fusion_bias": np.zeros((len(PHASES), len(LABELS)), dtype=np.float32)}


def held_out_figures(x: F32, items: Sequence[Item], targets: F32) -> dict[str, Any]:
    """How well the head does on domains it was not fitted on."""
    gold: Ints = np.array([LABELS.index(item["gold"]) for item in items])
    domains = sorted({item["domain"] for item in items}, key=lambda name: hashlib.sha256(name.encode()).digest())
    out = set(domains[: max(1, round(HELD_OUT_SHARE * len(domains)))])
    inside = np.array([item["domain"] not in out for item in items])
    weight, bias = fit(x[inside], targets[inside])
    logits = x[~inside] @ weight.T + bias
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    held = gold[~inside]
    return {
        "n": int((~inside).sum()),
        "domains": sorted(out),
        "auroc_act": round(float(auroc(p[:, 0], held == 0)), 4),
        "macro_f1": round(float(macro_f1(p.argmax(axis=1), held)), 4),
    }


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("base", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--base-name", default="gemma-3-270m")
    parser.add_argument("--dialogues", type=int, default=1_500)
    parser.add_argument("--layer", type=int, default=9)
    parser.add_argument("--n-layers", type=int, default=11)
    parser.add_argument("--quantisation", default="q8_0", choices=derive.KINDS)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    items = chosen(options.dialogues)
    with tempfile.TemporaryDirectory() as folder:
        gguf = Path(folder) / "derived.gguf"
        derive.derive(options.base, gguf, kind=options.quantisation, n_layers=options.n_layers)
        x = normalised(states_of(gguf, options.layer, items, options.threads))
    targets = targets_of(items)
    weight, bias = fit(x, targets)
    figures = {"frozen_base": held_out_figures(x, items, targets), "n_dialogues": len(items)}
    router = Router()
    static = StaticEngine(router)
    options.out.mkdir(parents=True, exist_ok=True)
    heads = options.out / "backbone.safetensors"
    part = heads.with_suffix(".part")
    save_file({"head_weight": weight.astype(np.float32), "head_bias": bias.astype(np.float32), **fusion()}, part)
    part.chmod(0o644)  # the library makes private files
    os.replace(part, heads)
    value = {
        "format": manifest.FORMAT,
        "version": manifest.VERSION,
        "base": {"name": options.base_name, "sha256": store.sha256_of(options.base)},
        "adapter": None,
        "prompt_style": "compact",
        "layer": options.layer,
        "pooling": "last",
        "quantisation": options.quantisation,
        "n_layers": options.n_layers,
        "heads": {"file": heads.name, "sha256": store.sha256_of(heads)},
        "gate_static_sha256": static.sha256,
        "router_sha256": router.table.sha256,
        "classes": list(LABELS),
        "tools_max": TOOLS_MAX,
        "dialogue_max": DIALOGUE_MAX,
        "default_tau": msgspec.to_builtins(static.default_tau),
        "ask_band": ASK_BAND,
        "dev": figures,
    }
    (options.out / "backbone.json").write_text(json.dumps(value, indent=1) + "\n", "utf-8")
    manifest.read_manifest(options.out / "backbone.json")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
