"""Fit the static gate's default thresholds anew, without training it again.

    python -m convert.fit_operating_point KEPT.npz

``KEPT``: the held-out predictions that `convert.train_gate --keep` wrote when it trained the packaged gate. Thresholds
and figures go into the manifest; the weights, and so what profiles and the backbone were fitted on, stay as they are.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from convert.eval_gate import measured
from convert.gate_data import DEV_FILES, TRAIN_FILES, open_scorer, read_dialogues
from convert.gate_metrics import BUDGETS, FALSE_SKIPS_MAX
from convert.train_gate import held_out_report
from whetherman_edge.dialects.openai_chat import view
from whetherman_edge.dialects.tool_cache import ToolCache
from whetherman_edge.gate.features import Extractor
from whetherman_edge.gate.static_gate import DEFAULT_PATH, VERSION, StaticGate


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("kept", type=Path)
    options = parser.parse_args()
    dialogues = [item for name in TRAIN_FILES for item in read_dialogues(name)]
    kept = np.load(options.kept)
    items = [dialogues[i] for i in kept["rows"]]
    scorer = open_scorer()
    cache, extractor = ToolCache(), Extractor(scorer)
    phase = np.array([extractor.extract(view(json.dumps(i["request"]).encode(), cache)).phase for i in items])
    tau, report = held_out_report(kept["p"], kept["gold"], kept["accept"], phase, items)
    path = DEFAULT_PATH.with_suffix(".json")
    manifest = json.loads(path.read_text())
    manifest |= {"version": VERSION, "default_tau": tau}
    manifest["false_skips_targets"] = [budget * FALSE_SKIPS_MAX for budget in BUDGETS]
    manifest.pop("false_skips_target", None)
    manifest["figures"] = report | {k: v for k, v in manifest["figures"].items() if k not in report}
    path.write_text(json.dumps(manifest, indent=1) + "\n")
    gate = StaticGate.open(scorer, scorer.kernels)
    manifest["figures"] |= {name: measured(gate, read_dialogues(name)) for name in DEV_FILES}
    path.write_text(json.dumps(manifest, indent=1) + "\n")
    print(json.dumps({"default_tau": tau}, indent=1))


if __name__ == "__main__":
    main()
