"""Quantisation by depth: speed, memory and accuracy of a backbone's first blocks, side by side.

    python -m convert.depth_study BASE.gguf --adapter DIR --static NPZ [--kinds q8_0,q4_k_m,q4_0] [--depths 12]
    python -m convert.depth_study BASE.gguf --static NPZ --kinds q8_0 --depths 12,15,18

With ``--adapter`` (a folder that `convert.fit_fusion adapter` has written) the adapter is merged in, and accuracy is
that of its head and of the fusion with the static stage; without it, that of a logistic head on the frozen base's last
states. Either is cross-fitted: no dialogue is scored by what was fitted on its author's. The same dialogues for every
row, whole sets of them, so that differences are paired; their intervals resample sets.

Speed is processor time of one thread, the rows taking turns, so that what disturbs one disturbs all. Memory is what
a process of its own grows by, with the cells that ship. ``--json`` is written after every row.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

from convert.fit_fusion import ALPHA, RANK, Evaluation, cross_fitted, evaluation_on, inputs_of, states_of, unfused
from convert.gate_metrics import auroc, bootstrap, macro_f1
from whetherman_edge.backbone import derive as deriving
from whetherman_edge.backbone.head import normalised
from whetherman_edge.backbone.llama import Context, Network
from whetherman_edge.backbone.quantise import quantise
from whetherman_edge.engine import Router
from whetherman_edge.gate.features import Extractor
from whetherman_edge.gate.static_gate import StaticGate

F64 = npt.NDArray[np.float64]

TEXT: Final = (
    "search_mail(query*, limit, since): Search the user's mail items by free text, date range or identifier.\n" * 14
    + "User: Could you look up the latest invoice for order 13 and tell me what changed since last Tuesday?\n" * 4
)
PREFILL, STEP = 300, 30
N_CELLS, N_SEQ = 8_192, 16
FROZEN_STRENGTH: Final = 0.01
"""Inverse regularisation of the logistic head on 640 normalised dimensions."""


def weights_of(base: Path, target: Path, kind: str, depth: int, adapter: Path | None) -> None:
    """``target``: the first ``depth`` blocks in that kind, an adapter merged in before."""
    if adapter is None:
        quantise(base, target, kind, depth)
        return
    own = kind in deriving.KINDS
    merged = target if own else target.with_suffix(".f16")
    scale = deriving.Scale(RANK, ALPHA)
    deriving.derive(
        base, merged, kind=kind if own else "f16", n_layers=depth, adapter=adapter / "backbone_adapter.safetensors",
        scale=scale,
    )  # fmt: skip
    if not own:
        quantise(merged, target, kind)
        merged.unlink()


def spent_ms(context: Context, ids: list[int]) -> tuple[float, float]:
    """Processor milliseconds of a prefill of PREFILL tokens and of STEP more behind it."""
    context.truncate(0, 0)
    times = [time.thread_time()]
    context.decode(0, ids[:PREFILL], 0, (PREFILL - 1,))
    times.append(time.thread_time())
    context.decode(0, ids[PREFILL:], PREFILL, (STEP - 1,))
    times.append(time.thread_time())
    return (times[1] - times[0]) * 1e3, (times[2] - times[1]) * 1e3


def speeds(paths: dict[tuple[str, int], Path], rounds: int) -> dict[tuple[str, int], tuple[float, float]]:
    """(kind, depth) to the best of ``rounds``: milliseconds a token of prefill, milliseconds of a step."""
    opened = {}
    for key, path in paths.items():
        network = Network(path)
        ids = [network.bos, *network.tokenize(TEXT)][: PREFILL + STEP]
        opened[key] = (network, Context(network, layer=key[1] - 1, n_cells=1024, n_seq=1, n_threads=1), ids)
    best = {key: (float("inf"), float("inf")) for key in paths}
    for _ in range(rounds):
        for key, (_, context, ids) in opened.items():
            prefill, step = spent_ms(context, ids)
            best[key] = (min(best[key][0], prefill / PREFILL), min(best[key][1], step))
    for network, context, _ in opened.values():
        context.close()
        network.close()
    return best


def resident_mb(path: Path, layer: int) -> float:
    """What this process grows by: the weights mapped, the cells that ship, and one prompt decoded."""
    before = _resident_mb()
    network = Network(path)
    context = Context(network, layer=layer, n_cells=N_CELLS, n_seq=N_SEQ, n_threads=1)
    ids = [network.bos, *network.tokenize(TEXT)][:PREFILL]
    context.decode(0, ids, 0, (PREFILL - 1,))
    return _resident_mb() - before


def _resident_mb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:"))


def in_own_process(path: Path, layer: int) -> float:
    """``resident_mb`` in a process that has loaded nothing yet."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(resident_mb, path, layer).result()


def sample(found: Evaluation, n: int, seed: int = 0) -> Evaluation:
    """About n dialogues in whole sets, at random."""
    sets = [item["set"] for item in found.items]
    names = sorted(set(sets))
    np.random.default_rng(seed).shuffle(names)
    rows: list[int] = []
    for name in names:
        if len(rows) >= n:
            break
        rows += [i for i, other in enumerate(sets) if other == name]
    return found.of(np.array(sorted(rows)))


def probabilities(path: Path, layer: int, found: Evaluation, adapter: Path | None, threads: int) -> dict[str, F64]:
    """What is scored, to (n, 4) probabilities."""
    states = states_of(path, layer, found.items, threads)
    weight = np.ones(len(found.items))
    if adapter is None:
        return {"frozen head": _frozen(np.stack([normalised(one.last) for one in states]), found)}
    x = inputs_of(unfused(load_file(adapter / "heads.safetensors")), states, found.static_log_p)
    fused = cross_fitted(x, found.phase, found.gold, weight, found.source)
    return {"head": np.exp(x[:, :4]), "fused": fused}


def _frozen(x: npt.NDArray[np.float32], found: Evaluation) -> F64:
    from sklearn.linear_model import LogisticRegression

    source, p = np.array(found.source), np.zeros((len(x), 4))
    for name in sorted(set(found.source)):
        inside = source == name
        p[inside] = (
            LogisticRegression(C=FROZEN_STRENGTH, max_iter=500)
            .fit(x[~inside], found.gold[~inside])
            .predict_proba(x[inside])
        )
    return p


def scored(p: F64, found: Evaluation, first: F64) -> dict[str, Any]:
    """Figures with 95 % intervals, and the difference to the first row's in AUROC."""
    sets, gold = [item["set"] for item in found.items], found.gold
    act: Callable[[F64, Any], float] = lambda q, r: auroc(q[r, 0], gold[r] == 0)  # noqa: E731
    every = np.arange(len(gold))
    return {
        "auroc_act": round(act(p, every), 4),
        "auroc_act_ci": bootstrap(lambda r: act(p, r), sets),
        "less_than_first": round(act(first, every) - act(p, every), 4),
        "less_than_first_ci": bootstrap(lambda r: act(first, r) - act(p, r), sets),
        "macro_f1": round(macro_f1(p.argmax(1), gold), 4),
        "macro_f1_ci": bootstrap(lambda r: macro_f1(p[r].argmax(1), gold[r]), sets),
        "same_class_as_first": round(float((p.argmax(1) == first.argmax(1)).mean()), 4),
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("base", type=Path)
    parser.add_argument("--adapter", type=Path, metavar="DIR", help="adapter and heads; default: the frozen base")
    parser.add_argument("--static", type=Path, metavar="NPZ", help="static predictions; default: no accuracy")
    parser.add_argument("--kinds", default="q8_0,q4_k_m,q4_0,iq4_nl")
    parser.add_argument("--depths", default="12")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sample", type=int, default=700, help="dialogues that accuracy is measured on")
    parser.add_argument("--threads", type=int, default=1, help="of the accuracy's passes; speed has one")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        paths: dict[tuple[str, int], Path] = {}
        for kind in options.kinds.split(","):
            for depth in map(int, options.depths.split(",")):
                paths[kind, depth] = Path(name) / f"{kind}-{depth}.gguf"
                weights_of(options.base, paths[kind, depth], kind, depth, options.adapter)
        best = speeds(paths, options.rounds)
        found, first = None, dict[str, F64]()
        if options.static is not None:
            router = Router()
            gate = StaticGate.open(router.scorer, router.kernels, None)
            found = sample(evaluation_on(options.static, gate, Extractor(router.scorer)), options.sample)
        for (kind, depth), path in paths.items():
            row: dict[str, Any] = {
                "kind": kind,
                "depth": depth,
                "file_mb": round(path.stat().st_size / 1e6, 1),
                "prefill_ms_a_token": round(best[kind, depth][0], 3),
                "step_ms": round(best[kind, depth][1], 1),
                "resident_mb": round(in_own_process(path, depth - 1), 1),
            }
            if found is not None:
                p = probabilities(path, depth - 1, found, options.adapter, options.threads)
                first = first or p
                row |= {"n": len(found.items), **{what: scored(q, found, first[what]) for what, q in p.items()}}
            rows.append(row)
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
            if options.json is not None:
                options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
