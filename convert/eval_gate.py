"""Measure the shipped gate on test sets: our dev dialogues and, where a folder is given, BFCL (test only).

python -m convert.eval_gate [--bfcl FOLDER/bfcl_eval/data] [--gate FILE] [--json FILE] [--save]

Nothing of BFCL is trained on or tuned on. --save writes the figures into the manifest beside the weights.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Final

import numpy as np

from convert.gate_data import DEV_FILES, Item, open_scorer, read_dialogues
from convert.gate_metrics import auroc, bootstrap, figures
from whetherman_edge.bench import bfcl
from whetherman_edge.dialects.openai_chat import view
from whetherman_edge.dialects.tool_cache import ToolCache
from whetherman_edge.gate.static_gate import DEFAULT_PATH, StaticGate
from whetherman_edge.gate.verdict import LABELS

# The sets whose figures stand in the manifest.
BFCL: Final = ("irrelevance", "live_irrelevance", "simple_python", "live_relevance")


def judged(gate: StaticGate, items: list[Item]) -> tuple[np.ndarray, np.ndarray]:
    """((n, 4) probabilities, (n,) phases)."""
    cache = ToolCache()
    verdicts = [gate.judge(view(json.dumps(i["request"]).encode(), cache)) for i in items]
    return np.array([one.probabilities for one in verdicts]), np.array([one.phase for one in verdicts])


def measured(gate: StaticGate, items: list[Item]) -> dict[str, Any]:
    """Figures of one set, the clusters being dialogue sets where there are any."""
    p, phase = judged(gate, items)
    gold = np.array([LABELS.index(i["gold"]) for i in items])
    accept = np.array([[label in i["accept"] for label in LABELS] for i in items])
    tau = [
        {label: one for label in LABELS[1:] if (one := at.at(label, "first")) is not None} for at in gate.default_tau
    ]
    return figures(p, gold, accept, phase, [str(i.get("set", i["id"])) for i in items], tau)


def bfcl_figures(gate: StaticGate, folder: Path) -> dict[str, Any]:
    """Per file: how often the decision is acceptable, skipped, falsely skipped; AUROC of irrelevance against simple."""
    found: dict[str, Any] = {}
    need: dict[str, np.ndarray] = {}
    for name in BFCL:
        items = list(bfcl.items(folder, name))
        all_figures = measured(gate, items)
        kept = ("n", "acceptable", "false_skips" if bfcl.SETS[name] == ("ACT",) else "skipped")
        found[name] = {key: all_figures[key] for key in kept}
        need[name] = judged(gate, items)[0][:, 0]
    for name, yes, no in (("simple_against_irrelevance", "simple_python", "irrelevance"),):
        score = np.concatenate([need[yes], need[no]])
        positive = np.arange(len(score)) < len(need[yes])
        clusters = [str(i) for i in range(len(score))]
        found[name] = {
            "n": len(score),
            "auroc_act": round(auroc(score, positive), 4),
            "auroc_act_ci": bootstrap(lambda r, s=score, p=positive: auroc(s[r], p[r]), clusters),
        }
    return found


def main() -> None:
    """Measure, print, and write where asked to."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--bfcl", type=Path, help="folder with BFCL_v4_*.json (package bfcl-eval, bfcl_eval/data)")
    parser.add_argument("--gate", type=Path, default=DEFAULT_PATH)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--save", action="store_true", help="write the figures into the gate's manifest")
    options = parser.parse_args()
    scorer = open_scorer()
    gate = StaticGate.open(scorer, scorer.kernels, options.gate)
    report: dict[str, Any] = {name: measured(gate, read_dialogues(name)) for name in DEV_FILES}
    if options.bfcl:
        report["bfcl_test_only"] = bfcl_figures(gate, options.bfcl)
    text = json.dumps(report, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    if options.save:
        path = options.gate.with_suffix(".json")
        manifest = json.loads(path.read_text())
        manifest["figures"].update(report)
        path.write_text(json.dumps(manifest, indent=1) + "\n")


if __name__ == "__main__":
    main()
