"""``bench decisions GOLD [PREDICTIONS]``: score ``decide --jsonl`` output, or judge the labelled requests right here.

GOLD: JSON Lines of ``{"id", "gold", "accept"?, "request"?}``; PREDICTIONS: what ``decide --jsonl`` wrote.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whetherman_edge.bench import judging, scoring
from whetherman_edge.bench.scoring import Judged
from whetherman_edge.errors import ConfigError
from whetherman_edge.gate.verdict import LABELS

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]


def register(verbs: Verbs) -> None:
    """Add ``bench decisions``."""
    parser = verbs.add_parser("decisions", help="score decisions against labels")
    parser.add_argument("gold", type=Path, metavar="GOLD")
    parser.add_argument("predictions", type=Path, nargs="?", metavar="PREDICTIONS")
    judging.add_options(parser)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Score, print, write. Raises ConfigError for lines that do not fit."""
    gold = list(judging.read_lines(parsed.gold))[: parsed.limit]
    for number, row in enumerate(gold, 1):
        row.setdefault("id", str(number))
        if row.get("gold") not in LABELS:
            raise ConfigError(f"{parsed.gold}: item {row['id']}: expected gold to be one of {', '.join(LABELS)}")
        row.setdefault("accept", [row["gold"]])
    if parsed.predictions:
        found = {str(row.get("id")): row for row in judging.read_lines(parsed.predictions)}
        items = matched(gold, found, parsed.predictions)
    else:
        lacking = next((row["id"] for row in gold if not isinstance(row.get("request"), dict)), None)
        if lacking is not None:
            raise ConfigError(f"{parsed.gold}: item {lacking}: expected a request to judge, or give PREDICTIONS")
        items, _ = judging.judge(gold, parsed.engine)
    figures = scoring.figures(items)
    lines = [
        f"n {figures['n']}   macro-F1 {figures['macro_f1']}   AUROC of ACT {figures['auroc_act']}",
        f"calibration error of p(need) {figures['ece_need']}",
        f"acceptable {judging.told(figures['acceptable'])}",
        f"false skips {judging.told(figures['false_skips'])}, exact to {figures['false_skips']['exact_high']:.3f}",
        f"skipped {judging.told(figures['skipped'])}",
        *(f"recall {label} {judging.told(value)}" for label, value in figures["recall"].items()),
    ]
    note = f"{parsed.gold.name}, {figures['n']} items; intervals 95 %"
    return judging.finish(parsed, "Decisions against labels", note, {parsed.gold.stem: figures}, lines)


def matched(gold: list[dict[str, Any]], found: dict[str, dict[str, Any]], path: Path) -> list[Judged]:
    """Gold items with their predictions. Raises ConfigError when one is missing or is no record."""
    items = []
    for row in gold:
        record = found.get(str(row["id"]))
        if record is None or "error" in record:
            why = "it has none" if record is None else "its record is an error"
            raise ConfigError(f"{path}: expected a decision for id {row['id']!r}, {why}")
        try:
            items.append(
                Judged(
                    id=str(row["id"]),
                    gold=row["gold"],
                    accept=tuple(row["accept"]),
                    verdict=record["verdict"],
                    decision=record["decision"],
                    probabilities={label: float(record["probabilities"][label]) for label in LABELS},
                )
            )
        except (KeyError, TypeError, ValueError) as exc:
            raise ConfigError(f"{path}: id {row['id']!r}: expected a record of `decide --jsonl` ({exc})") from exc
    return items
