"""Train the static gate on the dialogues and write its artifact.

python -m convert.train_gate [--router FILE] [--few-tools] [--out whetherman_edge/artifacts/gate_static.safetensors]

Whole domains (one author each) are held out in turn; the blend, the calibration and the thresholds are fitted on the
predictions for held-out domains only. Takes a few minutes on one core; features are cached in build/gate-cache.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save

from convert import gate_heads as heads
from convert.gate_data import (
    DEV_FILES,
    TRAIN_FILES,
    Item,
    Matrix,
    matrix_of,
    open_scorer,
    prefixes,
    read_dialogues,
    small_talk,
    swapped_tools,
)
from convert.gate_few_tools import few_tools
from convert.gate_metrics import BUDGETS, FALSE_SKIPS_MAX, Bools, Ints, figures, fit_operating_point
from whetherman_edge.gate.features import DENSE_BLOCKS, NGRAM_FIELDS, SCALAR_NAMES
from whetherman_edge.gate.static_gate import DEFAULT_PATH, FORMAT, VERSION
from whetherman_edge.gate.verdict import LABELS

N_FOLDS: Final = 4  # four authors each
DENSE_SEEDS: Final = 1

F64 = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]


def fit_heads(matrix: Matrix, rows: Rows) -> dict[str, Any]:
    """All heads on ``rows``."""
    scaling = heads.fit_scaling(matrix, rows)
    return {
        "scaling": scaling,
        "ngrams": heads.fit_ngrams(matrix, rows),
        "dense": [heads.fit_dense(matrix, rows, scaling, seed) for seed in range(DENSE_SEEDS)],
    }


def head_logits(fitted: dict[str, Any], matrix: Matrix, rows: Rows) -> list[F64]:
    """Logits of each head for ``rows``."""
    return [
        heads.ngram_logits(fitted["ngrams"], matrix, rows),
        np.mean([heads.dense_logits(d, fitted["scaling"], matrix, rows) for d in fitted["dense"]], axis=0),
    ]


def folds_of(matrix: Matrix) -> npt.NDArray[np.intp]:
    """Fold of each item; a domain is never split, and an item with borrowed tools belongs to no fold but its own."""
    domains = sorted({str(d) for d in matrix.domain})
    return np.array([domains.index(d) % N_FOLDS for d in matrix.domain])


def held_out(matrix: Matrix, fold: npt.NDArray[np.intp]) -> list[F64]:
    """Head logits of every item, by heads that saw neither its domain nor tools of it."""
    weights = heads.item_weights(matrix)
    donors = {m["donor"] for m in matrix.meta if "donor" in m}
    fold_of = {d: int(fold[np.flatnonzero(matrix.domain == d)[0]]) for d in donors}
    donor = np.array([fold_of.get(m.get("donor", ""), -1) for m in matrix.meta])
    out = [np.zeros((len(matrix), 4)) for _ in range(2)]
    for k in range(N_FOLDS):
        train = np.flatnonzero((fold != k) & (donor != k) & (weights > 0))
        test = np.flatnonzero((fold == k) & (matrix.kind == "dialogue"))
        for head, logits in zip(out, head_logits(fit_heads(matrix, train), matrix, test), strict=True):
            head[test] = logits
        print(f"fold {k + 1}/{N_FOLDS}: {len(train)} to train on, {len(test)} held out", flush=True)
    return out


def held_out_report(
    p: F64, gold: Ints, accept: Bools, phase: Ints, items: Sequence[Item]
) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """(thresholds of each phase, figures at them) from held-out predictions ``p`` (n, 4) of ``items``."""
    tau = fit_operating_point(p, gold, accept, phase, np.array([len(i["request"].get("tools") or []) for i in items]))
    clusters = [i["set"] for i in items]
    report: dict[str, Any] = {"held_out_domains": figures(p, gold, accept, phase, clusters, tau)}
    parts = {"first_steps": phase == 0, "later_steps": phase > 0, "turns": phase == 1, "results": phase == 2}
    for name, mask in parts.items():
        some = [clusters[i] for i in np.flatnonzero(mask)]
        report[f"held_out_{name}"] = figures(p[mask], gold[mask], accept[mask], phase[mask], some, tau)
    return tau, report


def blended(out: list[F64], matrix: Matrix, rows: Rows, fold: npt.NDArray[np.intp]) -> F64:
    """Probabilities of ``rows``, each by a blend fitted on the other folds."""
    p = np.zeros((len(rows), 4))
    for k in range(N_FOLDS):
        inside, others = np.flatnonzero(fold[rows] == k), rows[fold[rows] != k]
        blend = heads.fit_blend([o[others] for o in out], matrix, others)
        p[inside] = heads.probabilities(blend, [o[rows[inside]] for o in out], matrix.phase[rows[inside]])
    return p


def main() -> None:
    """Train, measure, write."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--router", type=Path, help="router artifact to train on (default: the packaged one)")
    parser.add_argument("--out", type=Path, default=DEFAULT_PATH)
    parser.add_argument("--few-tools", action="store_true", help="also train on first turns cut to one or two tools")
    parser.add_argument("--keep", type=Path, metavar="NPZ", help="also write the held-out predictions there")
    options = parser.parse_args()
    scorer = open_scorer(options.router)
    dialogues = [item for name in TRAIN_FILES for item in read_dialogues(name)]
    extended = [*dialogues, *prefixes(dialogues), *small_talk(dialogues), *read_dialogues("gate_public")]
    if heads.KIND_WEIGHTS["swapped"]:
        extended += swapped_tools(dialogues)
    if options.few_tools:
        extended += few_tools(dialogues)
    matrix = matrix_of(extended, scorer, "train")
    fold = folds_of(matrix)
    rows = np.flatnonzero(matrix.kind == "dialogue")
    out = held_out(matrix, fold)
    p = blended(out, matrix, rows, fold)
    gold, accept, phase = matrix.gold[rows], matrix.accept[rows], matrix.phase[rows]
    tau, report = held_out_report(p, gold, accept, phase, [extended[i] for i in rows])
    fitted = fit_heads(matrix, np.flatnonzero(heads.item_weights(matrix) > 0))
    blend = heads.fit_blend([o[rows] for o in out], matrix, rows)
    for name in DEV_FILES:
        dev = matrix_of(read_dialogues(name), scorer, name)
        q = heads.probabilities(blend, head_logits(fitted, dev, np.arange(len(dev))), dev.phase)
        report[name] = figures(q, dev.gold, dev.accept, dev.phase, [m["set"] for m in dev.meta], tau)
    if options.keep:
        np.savez(options.keep, rows=rows, gold=gold, accept=accept, p=p, heads=np.stack([o[rows] for o in out]))
    write(options.out, fitted, blend, tau, report, scorer.table.sha256)
    print(json.dumps({"default_tau": tau, "figures": report}, indent=1))


def write(
    path: Path,
    fitted: dict[str, Any],
    blend: heads.Arrays,
    tau: Sequence[Mapping[str, float]],
    report: dict[str, Any],
    router_sha256: str,
) -> None:
    """The weights and the manifest beside them."""
    arrays = {
        **fitted["scaling"],
        **fitted["ngrams"],
        **fitted["dense"][0],
        **blend,
    }
    raw = save({k: np.ascontiguousarray(v) for k, v in arrays.items()})
    path.write_bytes(raw)
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "sha256": hashlib.sha256(raw).hexdigest(),
        "router_sha256": router_sha256,
        "classes": list(LABELS),
        "dense": list(DENSE_BLOCKS),
        "ngram_fields": NGRAM_FIELDS,
        "scalars": list(SCALAR_NAMES),
        "default_tau": list(tau),
        "false_skips_targets": [budget * FALSE_SKIPS_MAX for budget in BUDGETS],
        "figures": report,
    }
    path.with_suffix(".json").write_text(json.dumps(manifest, indent=1) + "\n")


if __name__ == "__main__":
    main()
