"""``bench when2tool FILE [--needed LABELS]``: the decision on When2Tool's tasks.

The tasks carry no label: whether a call is needed depends on the agent. Without ``--needed`` the page says how often a
call is judged due by difficulty, and how well p(need) ranks hard tasks above easy ones; with it (JSON Lines of
``{"id", "needed"}``, measured for one agent) false and right skips are counted for that agent.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whetherman_edge.bench import judging, scoring
from whetherman_edge.errors import ConfigError

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]


def register(verbs: Verbs) -> None:
    """Add ``bench when2tool``."""
    parser = verbs.add_parser("when2tool", help="decisions on When2Tool's tasks")
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument(
        "--needed", type=Path, metavar="LABELS", help="JSON Lines of {'id', 'needed'} measured for an agent"
    )
    judging.add_options(parser)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Judge, print, write. Raises ConfigError for lines that do not fit."""
    needed = _needed(parsed.needed) if parsed.needed else {}
    rows = list(items(parsed.file, needed))[: parsed.limit]
    judged, _ = judging.judge(rows, parsed.engine)
    sections: dict[str, dict[str, Any]] = {}
    lines: list[str] = []
    for difficulty in ("easy", "medium", "hard"):
        inside = [one for one in judged if one.group == difficulty]
        if inside:
            due = scoring.share(sum(one.decision == "ACT" for one in inside), len(inside))
            sections[difficulty] = {"n": len(inside), "call_due": due}
            lines.append(f"{difficulty:7} a call is due {judging.told(due)}")
    ends = [one for one in judged if one.group in ("easy", "hard")]
    ranked = scoring.auroc([one.probabilities["ACT"] for one in ends], [one.group == "hard" for one in ends])
    sections["hard against easy"] = {"auroc": ranked}
    lines.append(f"AUROC of hard against easy {ranked if ranked is None else round(ranked, 3)}")
    if needed:
        labelled = [one for one in judged if one.id in needed]
        figures = scoring.figures(labelled)
        sections["against the agent's labels"] = figures
        lines.append(f"false skips {judging.told(figures['false_skips'])}   skipped {judging.told(figures['skipped'])}")
    note = f"{parsed.file.name}; engine {parsed.engine or 'configured'}"
    return judging.finish(parsed, "When2Tool", note, sections, lines)


def items(path: Path, needed: dict[str, bool]) -> Iterator[dict[str, Any]]:
    """Tasks as chat bodies; gold is a place-holder where the agent was not measured. Raises ConfigError."""
    for number, row in enumerate(judging.read_lines(path), 1):
        if not isinstance(row.get("instruction"), str) or not isinstance(row.get("tools"), list):
            raise ConfigError(f"{path}: line {number}: expected instruction and tools")
        identity = str(row.get("id", number))
        request = {
            "model": "when2tool",
            "messages": [{"role": "user", "content": row["instruction"]}],
            "tools": row["tools"],
        }
        accept = ["ACT"] if needed.get(identity, True) else ["ANSWER", "ASK", "DECLINE"]
        yield {
            "id": identity,
            "request": request,
            "gold": accept[0],
            "accept": accept,
            "group": row.get("difficulty", ""),
        }


def _needed(path: Path) -> dict[str, bool]:
    found = {}
    for number, row in enumerate(judging.read_lines(path), 1):
        if "id" not in row or not isinstance(row.get("needed"), bool):
            raise ConfigError(f"{path}: line {number}: expected id and needed (true or false)")
        found[str(row["id"])] = row["needed"]
    return found
