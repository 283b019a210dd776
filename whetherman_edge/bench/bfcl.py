"""``bench bfcl``: the decision on BFCL v4's irrelevance, relevance and simple sets. A test set: never trained on.

Reads the files of the ``bfcl-eval`` package (Apache-2.0), which is not needed otherwise. Here only whether a call is
due is scored, not the call itself.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from whetherman_edge.bench import judging, scoring
from whetherman_edge.errors import ConfigError

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]

SETS: Final[dict[str, tuple[str, ...]]] = {
    "irrelevance": ("DECLINE", "ANSWER", "ASK"),
    "live_irrelevance": ("DECLINE", "ANSWER", "ASK"),
    "live_relevance": ("ACT",),
    "simple_python": ("ACT",),
    "multiple": ("ACT",),
}
"""File to the acceptable labels, the first being the one that counts as gold."""
_TYPES: Final = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}


def register(verbs: Verbs) -> None:
    """Add ``bench bfcl``."""
    parser = verbs.add_parser("bfcl", help="decisions on BFCL v4 (test sets)")
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="with BFCL_v4_*.json (default: the bfcl-eval package)"
    )
    parser.add_argument("--set", action="append", choices=tuple(SETS), help="only this set; may be repeated")
    judging.add_options(parser)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Judge, print, write. Raises ConfigError without the files."""
    folder = parsed.folder or _folder()
    sections: dict[str, dict[str, Any]] = {}
    lines: list[str] = []
    need: dict[str, list[float]] = {}
    for name in parsed.set or SETS:
        judged, _ = judging.judge(list(items(folder, name))[: parsed.limit], parsed.engine)
        figures = scoring.figures(judged)
        wanted = sum(i.verdict in i.accept for i in judged)
        figures["right"] = scoring.share(wanted, len(judged))
        sections[name] = figures
        need[name] = [i.probabilities["ACT"] for i in judged]
        acts = SETS[name] == ("ACT",)
        what = ("false skips", figures["false_skips"]) if acts else ("skipped", figures["skipped"])
        lines.append(f"{name:17} right {judging.told(figures['right'])}   {what[0]} {judging.told(what[1])}")
    if "simple_python" in need and "irrelevance" in need:
        scores = need["simple_python"] + need["irrelevance"]
        flags = [True] * len(need["simple_python"]) + [False] * len(need["irrelevance"])
        ranked = scoring.auroc(scores, flags)
        sections["simple against irrelevance"] = {"auroc_act": ranked}
        lines.append(f"AUROC of simple against irrelevance {ranked:.3f}")
    note = f"BFCL v4, test only; engine {parsed.engine or 'configured'}; right: the most probable class is acceptable"
    return judging.finish(parsed, "BFCL v4: is a call due?", note, sections, lines)


def items(folder: Path, name: str) -> Iterator[dict[str, Any]]:
    """Items of one BFCL v4 file as chat bodies. Raises ConfigError."""
    path = folder / f"BFCL_v4_{name}.json"
    for row in judging.read_lines(path):
        try:
            tools = [{"type": "function", "function": _function(f)} for f in row["function"]]
            messages = row["question"][0]
            yield {
                "id": row["id"],
                "request": {"model": "bfcl", "messages": messages, "tools": tools},
                "gold": SETS[name][0],
                "accept": list(SETS[name]),
            }
        except (KeyError, TypeError, IndexError) as exc:
            raise ConfigError(f"{path}: expected an item with id, question and function ({exc!r})") from exc


def _folder() -> Path:
    spec = importlib.util.find_spec("bfcl_eval")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "bench bfcl: expected --folder DIR with BFCL_v4_*.json, or the bfcl-eval package "
            "(`pip install --no-deps bfcl-eval`)"
        )
    return Path(spec.submodule_search_locations[0]) / "data"


def _function(function: dict[str, Any]) -> dict[str, Any]:
    """A BFCL function with JSON Schema's type names."""

    def fix(node: Any) -> Any:
        if isinstance(node, list):
            return [fix(value) for value in node]
        if isinstance(node, dict):
            fixed = {key: fix(value) for key, value in node.items()}
            kind = fixed.get("type")
            return {**fixed, "type": _TYPES.get(kind, kind)} if isinstance(kind, str) else fixed
        return node

    return dict(json.loads(json.dumps({**function, "parameters": fix(function["parameters"])})))
