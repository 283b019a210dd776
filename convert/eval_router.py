"""Accuracy of router artifacts on the tool-disjoint validation, with intervals.

    python -m convert.eval_router --shared DIR [--data DIR] [--artifact NAME=FILE ...] [--json FILE]

Intervals: 95 %, bootstrap over clusters (the right tool, or the domain of a dialogue), since queries of one tool are
alike.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from convert.router_corpus import lines, load_pools
from convert.router_validation import Case, validation_groups
from whetherman_edge.router.scorer import Scorer
from whetherman_edge.router.table import DEFAULT_PATH, RouterTable

RESAMPLES = 2000
TOP5_GROUPS = frozenset({"mcp", "big 210"})


@dataclass(frozen=True)
class Outcome:
    """Per case: right at the first place, among the first five, and the stated confidence."""

    top1: np.ndarray
    top5: np.ndarray
    confidence: np.ndarray
    cluster: list[str]


def run_cases(scorer: Scorer, cases: Sequence[Case]) -> Outcome:
    """Score every case as a caller would."""
    top1, top5, confidence = [], [], []
    for case in cases:
        scores = scorer.score(case.query, scorer.slate(case.tools))
        order = np.argsort(-scores.probability, kind="stable")
        top1.append(int(order[0]) in case.accept)
        top5.append(not case.accept.isdisjoint(order[:5].tolist()))
        confidence.append(float(scores.probability[order[0]]))
    return Outcome(np.array(top1), np.array(top5), np.array(confidence), [c.cluster for c in cases])


def interval(right: np.ndarray, cluster: Sequence[str]) -> tuple[float, float]:
    """95 % bootstrap interval of the mean of ``right``, resampling clusters."""
    by_cluster: dict[str, list[int]] = defaultdict(list)
    for i, name in enumerate(cluster):
        by_cluster[name].append(i)
    sums = np.array([right[ix].sum() for ix in by_cluster.values()], dtype=float)
    sizes = np.array([len(ix) for ix in by_cluster.values()], dtype=float)
    pick = np.random.default_rng(0).integers(0, len(sums), (RESAMPLES, len(sums)))
    means = sums[pick].sum(1) / sizes[pick].sum(1)
    return float(np.percentile(means, 2.5)), float(np.percentile(means, 97.5))


def wilson(right: int, n: int) -> tuple[float, float]:
    """95 % Wilson interval of a share."""
    if n == 0:
        return 0.0, 1.0
    z, p = 1.96, right / n
    centre, half = p + z * z / (2 * n), z * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return float((centre - half) / (1 + z * z / n)), float((centre + half) / (1 + z * z / n))


def report(outcomes: dict[str, Outcome]) -> dict[str, dict[str, object]]:
    """Figures by group, and the calibration over all unshifted ones."""
    table: dict[str, dict[str, object]] = {}
    for name, outcome in outcomes.items():
        row: dict[str, object] = {
            "n": len(outcome.top1),
            "top1": float(outcome.top1.mean()),
            "top1_interval": interval(outcome.top1, outcome.cluster),
        }
        if name in TOP5_GROUPS:
            row |= {"top5": float(outcome.top5.mean()), "top5_interval": interval(outcome.top5, outcome.cluster)}
        sure = outcome.confidence >= 0.95
        row["sure"] = [int(outcome.top1[sure].sum()), int(sure.sum())]
        row["mean_confidence"] = float(outcome.confidence.mean())
        table[name] = row
    right = sum(int(r["sure"][0]) for n, r in table.items() if not n.startswith("shifted"))  # type: ignore[index]
    total = sum(int(r["sure"][1]) for n, r in table.items() if not n.startswith("shifted"))  # type: ignore[index]
    table["confidence >= 0.95"] = {"n": total, "top1": right / max(total, 1), "top1_interval": wilson(right, total)}
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, required=True, help="folder of the public data sets")
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "data", help="our own data")
    parser.add_argument("--artifact", action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    pools = load_pools(args.shared, args.data, None)
    described = json.loads((Path(__file__).parent / "data" / "router_priority.json").read_text())
    rows = priority_rows(args.shared, args.data)
    groups = validation_groups(pools, args.shared, rows, described)
    results = {}
    for spec in args.artifact or [f"shipped={DEFAULT_PATH}"]:
        name, _, path = spec.partition("=")
        scorer = Scorer(RouterTable.open(path))
        results[name] = report({g: run_cases(scorer, cases) for g, cases in groups.items()})
    for group in next(iter(results.values())):
        cells = []
        for table in results.values():
            row = table[group]
            low, high = row["top1_interval"]  # type: ignore[misc]
            text = f"{row['top1']:.3f} [{low:.3f}, {high:.3f}]"
            if "top5" in row:
                text += f" / {row['top5']:.3f}"
            cells.append(f"{text:34s} sure {row.get('sure', '')!s:12s}")
        print(f"{group:20s} n={next(iter(results.values()))[group]['n']:<5} " + " | ".join(cells))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


def priority_rows(shared: Path, data: Path) -> list[dict[str, object]]:
    """Queries for the seven tools: the shared ones and our own."""
    rows = list(lines(shared / "authored" / "priority_train.jsonl"))
    return [*rows, *lines(data / "router_priority.jsonl.gz")]


if __name__ == "__main__":
    main()
