"""Fit the router's softmax(logit * (A + B ln n_tools) * C) on the tool-disjoint validation; C only with known tools.

    python -m convert.calibrate_router --artifact FILE --shared DIR [--data DIR]

Prints A, B and C for ``build_router --calibration``. Every group counts the same, however many queries it has. The
split model is calibrated; a model trained on everything ships with the split model's figures.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
from scipy.optimize import minimize

from convert.eval_router import priority_rows
from convert.router_corpus import load_pools
from convert.router_validation import validation_groups
from whetherman_edge.router.scorer import Scorer
from whetherman_edge.router.table import RouterTable

SKIPPED = ("shifted", "dev", "priority dev")
SURE = 0.95


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifact", type=Path, required=True)
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "data")
    args = parser.parse_args()
    scorer = Scorer(RouterTable.open(args.artifact))
    described = json.loads((Path(__file__).parent / "data" / "router_priority.json").read_text())
    pools = load_pools(args.shared, args.data, None)
    groups = validation_groups(pools, args.shared, priority_rows(args.shared, args.data), described)
    groups = {name: cases for name, cases in groups.items() if not name.startswith(SKIPPED)}
    sets = []
    for cases in groups.values():
        rows = []
        for case in cases:
            logit = scorer.score(case.query, scorer.slate(case.tools)).logit
            good = np.zeros(len(logit), dtype=bool)
            good[list(case.accept)] = True
            known = len(scorer.slate(case.tools).known_at) > 0
            rows.append((logit - logit.max(), good, math.log(max(len(logit), 2)), known))
        sets.append(rows)

    def loss(parameters: np.ndarray) -> float:
        total = 0.0
        for rows in sets:
            part = 0.0
            for logit, good, log_n, known in rows:
                z = logit * (parameters[0] + parameters[1] * log_n) * (parameters[2] if known else 1.0)
                z = z - z.max()
                part += math.log(np.exp(z).sum()) - math.log(np.exp(z[good]).sum() + 1e-30)
            total += part / len(rows)
        return total / len(sets)

    fitted = minimize(loss, np.array([1.5, 0.0, 1.0]), method="Nelder-Mead", options={"xatol": 1e-3, "fatol": 1e-5})
    a, b, c = (float(v) for v in fitted.x)
    print(f"A {a:.4f} B {b:.4f} C {c:.4f} loss {fitted.fun:.4f}")
    for shrink in (1.0, 0.95, 0.9, 0.85, 0.8):
        right = sure = 0
        for rows in sets:
            for logit, good, log_n, known in rows:
                z = np.exp(logit * shrink * (a + b * log_n) * (c if known else 1.0))
                z /= z.sum()
                if z.max() >= SURE:
                    sure += 1
                    right += bool(good[int(z.argmax())])
        print(f"x {shrink:.2f}: confidence >= {SURE}: {right}/{sure} = {right / max(sure, 1):.3f}")


if __name__ == "__main__":
    main()
