"""From a training checkpoint to the packaged backbone: adapter, heads, fusion, operating point, manifest.

    python -m convert.fit_fusion adapter CHECKPOINT OUT_DIR
    python -m convert.fit_fusion fuse HEADS GGUF --static NPZ [--readings NPZ] [--out DIR]

``adapter`` writes the adapter (float16, installed by `model install`) and the heads. ``fuse`` reads states from the
derived, quantised GGUF with the code that runs in the daemon, so that what is fitted is what ships, and fits the
fusion on authors that neither the adapter nor the static gate has seen (``--static``: the out-of-fold predictions of
`convert.train_gate --keep`) and on the dev sets. Figures are cross-fitted: no item is scored by a fusion that was
fitted on its author's items.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from convert.gate_data import CACHE, DEV_FILES, TRAIN_FILES, Item, read_dialogues
from convert.gate_metrics import FEW_TOOLS, Tau, figures, fit_operating_point
from convert.kept_readings import key_of, read_all
from convert.lora_corpus import HELD_OUT
from convert.train_lora import DIALOGUE_MAX, POINTER_DIM, TOOLS_MAX
from whetherman_edge.backbone import manifest as manifests
from whetherman_edge.backbone.head import Heads
from whetherman_edge.backbone.prompt import Prompt, render
from whetherman_edge.backbone.store import sha256_of
from whetherman_edge.backbone.worker import States, Worker, WorkerSettings
from whetherman_edge.dialects.openai_chat import view
from whetherman_edge.dialects.tool_cache import ToolCache
from whetherman_edge.engine import Router
from whetherman_edge.gate.features import Extractor
from whetherman_edge.gate.static_gate import StaticGate
from whetherman_edge.gate.verdict import LABELS, PHASES

F64 = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]

RANK: Final = 16
ALPHA: Final = 32.0
READINGS: Final = CACHE / "backbone-readings.npz"
PATIENCE_S: Final = 3_600.0
"""A busy machine may need minutes for one chunk of a prompt."""
STRENGTH: Final = 0.1
BAND_LOSS: Final = 0.01
"""Share of steps whose decision may differ from the fused one because the static stage was taken to be decisive."""


def write_adapter(checkpoint: Path, out: Path) -> None:
    """``backbone_adapter.safetensors`` and ``heads.safetensors`` from a checkpoint of convert.train_lora."""
    adapter: dict[str, npt.NDArray[np.float16]] = {}
    heads: dict[str, npt.NDArray[np.float32]] = {}
    names = {
        "heads.head.weight": "head_weight",
        "heads.head.bias": "head_bias",
        "heads.query.weight": "pointer_query",
        "heads.key.weight": "pointer_key",
        "heads.none.weight": "pointer_none_weight",
        "heads.none.bias": "pointer_none_bias",
        "heads.match.weight": "match_state",
    }
    with safe_open(checkpoint, "np") as file:
        for name in file.keys():  # noqa: SIM118 (no mapping)
            if name.startswith("blocks."):
                adapter["layers." + name.removeprefix("blocks.")] = file.get_tensor(name).astype(np.float16)
            elif name in names:
                heads[names[name]] = file.get_tensor(name).astype(np.float32)
    heads["pointer_none_weight"] = heads["pointer_none_weight"].reshape(-1)
    # What it counts beside the others' opinions is fitted last, by `convert.fit_match`.
    heads["match_state"] = heads["match_state"].reshape(-1)
    heads["match_classes"], heads["match_router"] = np.zeros(len(LABELS), np.float32), np.ones(1, np.float32)
    if heads["pointer_query"].shape[0] != POINTER_DIM:
        raise SystemExit(f"expected a pointer of {POINTER_DIM} dimensions, got {heads['pointer_query'].shape}")
    out.mkdir(parents=True, exist_ok=True)
    save_file(adapter, out / "backbone_adapter.safetensors")
    save_file(heads, out / "heads.safetensors")


def worker_of(gguf: Path, layer: int, threads: int) -> Worker:
    """A worker with the training's limits, which nobody waits for."""
    settings = WorkerSettings(
        layer, n_threads=threads, tools_max=TOOLS_MAX, dialogue_max=DIALOGUE_MAX, wedged_s=PATIENCE_S
    )
    return Worker(gguf, settings)


def prompts_of(items: Sequence[Item]) -> tuple[list[Prompt], list[int]]:
    """The prompts, and an order to read them in: neighbours with one tools block after each other."""
    cache = ToolCache()
    chats = [view(json.dumps(item["request"]).encode(), cache) for item in items]
    order = sorted(range(len(items)), key=lambda i: (chats[i].toolset_key, items[i]["set"], len(chats[i].messages)))
    return [render(chat, "compact") for chat in chats], order


def states_of(gguf: Path, layer: int, items: Sequence[Item], threads: int) -> list[States]:
    """What one pass gives for every item, through the worker."""
    worker = worker_of(gguf, layer, threads)
    worker.start()
    try:
        prompts, order = prompts_of(items)
        found: dict[int, States] = {}
        for done, i in enumerate(order):
            found[i] = worker.submit(prompts[i], str(i)).future.result()
            if done % 200 == 0:
                print(f"states: {done} of {len(items)}", flush=True)
        return [found[i] for i in range(len(items))]
    finally:
        worker.stop()


def readings_of(options: argparse.Namespace, heads: Heads, items: Sequence[Item]) -> F64:
    """(n, 6): ``reading`` of every item, kept in ``options.readings``."""
    prompts, order = prompts_of(items)
    weights = f"{sha256_of(options.gguf)} {options.layer} {sha256_of(options.heads)}"
    worker = worker_of(options.gguf, options.layer, options.threads)
    worker.start()

    def read(i: int) -> list[float]:
        return reading(heads, worker.submit(prompts[i], str(i)).future.result())

    try:
        kept: Path = options.readings
        return read_all([key_of(prompt, weights) for prompt in prompts], order, read, kept)
    finally:
        worker.stop()


def held_out_items() -> tuple[list[Item], Ints]:
    """Dialogues of the held-out authors, and their places among all training dialogues (as in train_gate's NPZ)."""
    every = [item for name in TRAIN_FILES for item in read_dialogues(name)]
    places = np.array([i for i, item in enumerate(every) if item["domain"] in HELD_OUT])
    return [every[i] for i in places], places


def reading(heads: Heads, states: States) -> list[float]:
    """What the backbone adds to the fusion's inputs: four log-probabilities, the pointer's best and none."""
    pointed = heads.point(states.last, states.tools)
    best, none = 0.0, 0.0
    if pointed is not None:
        p, none = pointed.probabilities()
        best = float(p.max())
    return [*heads.log_probabilities(states.last), best, none]


def joined(readings: F64, static: F64) -> F64:
    """(n, 10): the fusion's inputs, as ``gate.fusion`` takes them. static: (n, 4) log-probabilities."""
    return np.concatenate([readings[:, :4], static, readings[:, 4:]], axis=1)


def inputs_of(heads: Heads, states: Sequence[States], static: F64) -> F64:
    """``joined`` of what the heads read in ``states``."""
    return joined(np.array([reading(heads, one) for one in states]), static)


def fit(x: F64, phase: Ints, gold: Ints, weight: F64) -> dict[str, npt.NDArray[np.float32]]:
    """One logistic layer a phase, as a shared one with differences, so that phases learn from each other."""
    from sklearn.linear_model import LogisticRegression

    later = phase[:, None] == np.arange(1, len(PHASES))
    parts = np.concatenate([x, *(x * mark[:, None] for mark in later.T), later.astype(np.float64)], axis=1)
    model = LogisticRegression(C=STRENGTH, max_iter=2_000).fit(parts, gold, sample_weight=weight)
    width = x.shape[1]
    shared, *differences = np.split(model.coef_.T[: len(PHASES) * width], len(PHASES))
    offsets = model.coef_.T[len(PHASES) * width :]
    return {
        "fusion_weights": np.stack([shared, *(shared + d for d in differences)]).astype(np.float32),
        "fusion_bias": np.stack([model.intercept_, *(model.intercept_ + o for o in offsets)]).astype(np.float32),
    }


def fused(arrays: Mapping[str, npt.NDArray[Any]], x: F64, phase: Ints) -> F64:
    """(n, 4) probabilities."""
    logits = np.einsum("ni,nic->nc", x, arrays["fusion_weights"][phase]) + arrays["fusion_bias"][phase]
    logits -= logits.max(axis=1, keepdims=True)
    p = np.exp(logits)
    return np.asarray(p / p.sum(axis=1, keepdims=True))


def cross_fitted(x: F64, phase: Ints, gold: Ints, weight: F64, source: Sequence[str]) -> F64:
    """Probabilities of each source by a fusion fitted on the others."""
    names = np.array(source)
    p = np.zeros((len(gold), 4))
    for name in sorted(set(source)):
        inside = names == name
        p[inside] = fused(fit(x[~inside], phase[~inside], gold[~inside], weight[~inside]), x[inside], phase[inside])
    return p


def band_of(static: F64, final: F64, phase: Ints, tau: Tau) -> dict[str, float]:
    """The band of static 1 - p(need) outside of which asking the backbone changes at most BAND_LOSS of the
    decisions.
    """
    skip = 1 - np.exp(static[:, 0])
    act = 1 - final[:, 0] < np.array([min(one.values(), default=2.0) for one in tau])[phase]
    low = 0.0
    for candidate in np.linspace(0.0, 0.9, 91):
        below = skip < candidate
        if (below & ~act).sum() > BAND_LOSS / 2 * len(skip):
            break
        low = float(candidate)
    high = 1.0
    for candidate in np.linspace(1.0, 0.5, 51):
        if ((skip > candidate) & act).sum() > BAND_LOSS / 2 * len(skip):
            break
        high = float(candidate)
    return {"low": round(min(low, high), 3), "high": round(high, 3)}


class Evaluation(msgspec.Struct, frozen=True):
    """The dialogues that fusions are fitted and judged on, none of which an adapter has seen.

    ``static_log_p`` (n, 4): the static stage's, which has not seen them either; ``phase`` and ``gold`` (n,), ``accept``
    (n, 4) bool; ``source``: author or dev set, the unit of cross-fitting.
    """

    items: list[Item]
    static_log_p: F64
    phase: Ints
    gold: Ints
    accept: npt.NDArray[np.bool_]
    source: list[str]

    def of(self, rows: Ints) -> Evaluation:
        """Some of them."""
        items, source = [self.items[i] for i in rows], [self.source[i] for i in rows]
        return Evaluation(items, self.static_log_p[rows], self.phase[rows], self.gold[rows], self.accept[rows], source)


def evaluation_on(static: Path, gate: StaticGate, extractor: Extractor) -> Evaluation:
    """Dialogues of the held-out authors, and the dev sets. static: NPZ of `convert.train_gate --keep`."""
    cache = ToolCache()
    held, places = held_out_items()
    kept = np.load(static)
    items, log_p, source = list(held), [np.log(np.clip(kept["p"][places], 1e-9, 1.0))], [i["domain"] for i in held]
    for name in DEV_FILES:
        dev = read_dialogues(name)
        judged = [gate.judge(view(json.dumps(i["request"]).encode(), cache)).probabilities for i in dev]
        log_p.append(np.log(np.clip(np.array(judged), 1e-9, 1.0)))
        items += dev
        source += [name] * len(dev)
    phase = np.array([extractor.extract(view(json.dumps(i["request"]).encode(), cache)).phase for i in items])
    gold = np.array([LABELS.index(i["gold"]) for i in items])
    accept = np.array([[label in i["accept"] for label in LABELS] for i in items])
    return Evaluation(items, np.concatenate(log_p), phase, gold, accept, source)


def unfused(raw: Mapping[str, npt.NDArray[Any]]) -> Heads:
    """Heads whose fusion is not fitted yet."""
    weights, bias = np.zeros((len(PHASES), 10, 4), np.float32), np.zeros((len(PHASES), 4), np.float32)
    return Heads({**raw, "fusion_weights": weights, "fusion_bias": bias})


def fuse(options: argparse.Namespace) -> None:
    """Fit, measure, write."""
    router = Router()
    gate = StaticGate.open(router.scorer, router.kernels, None)
    found = evaluation_on(options.static, gate, Extractor(router.scorer))
    items, static_log_p, phase = found.items, found.static_log_p, found.phase
    gold, accept, source = found.gold, found.accept, found.source
    raw = load_file(options.heads)
    x = joined(readings_of(options, unfused(raw), items), static_log_p)
    weight = np.ones(len(items))
    p = cross_fitted(x, phase, gold, weight, source)
    n_tools = np.array([len(i["request"].get("tools") or []) for i in items])
    tau = fit_operating_point(p, gold, accept, phase, n_tools)
    first = phase == 0
    clusters = [i["set"] for i in items]
    report: dict[str, Any] = {}
    alone = {"fused": p, "static": np.exp(static_log_p), "backbone": np.exp(x[:, :4])}
    groups = {"all": np.ones(len(items), bool), "first": first, "few": first & (n_tools <= FEW_TOOLS), "later": ~first}
    groups |= {"turns": phase == 1, "results": phase == 2}
    for name in (*groups, *sorted(set(source))):
        rows = np.flatnonzero(groups.get(name, np.array(source) == name))
        for kind, q in alone.items():
            some = figures(q[rows], gold[rows], accept[rows], phase[rows], [clusters[i] for i in rows], tau)
            report.setdefault(name, {})[kind] = (
                some if kind == "fused" else {k: some[k] for k in ("auroc_act", "macro_f1")}
            )
    arrays = {**raw, **fit(x, phase, gold, weight)}
    band = band_of(static_log_p, p, phase, tau)
    write(options, arrays, tau, band, report, gate.sha256, router.table.sha256)
    print(json.dumps({"tau": tau, "band": band, "figures": report}, indent=1))


def write(
    options: argparse.Namespace,
    arrays: Mapping[str, npt.NDArray[Any]],
    tau: Tau,
    band: Mapping[str, float],
    report: Mapping[str, Any],
    gate_sha256: str,
    router_sha256: str,
) -> None:
    """Heads' file and manifest into ``options.out``; the adapter must stand there already."""
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    heads_path = out / "backbone.safetensors"
    save_file({k: np.ascontiguousarray(v) for k, v in arrays.items()}, heads_path)
    adapter_path = options.heads.with_name("backbone_adapter.safetensors")
    target = out / adapter_path.name
    if adapter_path != target:
        target.write_bytes(adapter_path.read_bytes())
    manifest = {
        "format": manifests.FORMAT,
        "version": manifests.VERSION,
        "base": {"name": options.base_name, "sha256": sha256_of(options.base)},
        "adapter": {"file": target.name, "sha256": sha256_of(target), "r": RANK, "alpha": ALPHA, "rslora": False},
        "prompt_style": "compact",
        "layer": options.layer,
        "pooling": "last",
        "quantisation": options.quantisation,
        "n_layers": options.n_layers,
        "heads": {"file": heads_path.name, "sha256": sha256_of(heads_path)},
        "gate_static_sha256": gate_sha256,
        "router_sha256": router_sha256,
        "classes": list(LABELS),
        "tools_max": TOOLS_MAX,
        "dialogue_max": DIALOGUE_MAX,
        "default_tau": [{label: one.get(label) for label in LABELS[1:]} for one in tau],
        "ask_band": dict(band),
        "dev": dict(report),
    }
    (out / "backbone.json").write_text(json.dumps(manifest, indent=1) + "\n")
    manifests.read_manifest(out / "backbone.json")


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    adapter = verbs.add_parser("adapter")
    adapter.add_argument("checkpoint", type=Path)
    adapter.add_argument("out", type=Path)
    fusion = verbs.add_parser("fuse")
    fusion.add_argument("heads", type=Path)
    fusion.add_argument("gguf", type=Path, help="the derived file whose states are read")
    fusion.add_argument("--base", type=Path, required=True, help="the base GGUF it was derived from")
    fusion.add_argument("--base-name", default="gemma-3-270m")
    fusion.add_argument("--static", type=Path, required=True)
    fusion.add_argument("--readings", type=Path, metavar="NPZ", default=READINGS, help="where readings are kept")
    fusion.add_argument("--layer", type=int, default=11)
    fusion.add_argument("--n-layers", type=int, default=13)
    fusion.add_argument("--quantisation", default="q8_0")
    fusion.add_argument("--threads", type=int, default=1)
    fusion.add_argument("--out", type=Path, default=manifests.DEFAULT_PATH.parent)
    options = parser.parse_args()
    if options.verb == "adapter":
        write_adapter(options.checkpoint, options.out)
    else:
        fuse(options)


if __name__ == "__main__":
    main()
