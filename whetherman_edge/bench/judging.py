"""Labelled chat bodies through the gate that serves, and the common end of every quality benchmark."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from whetherman_edge.bench import report
from whetherman_edge.bench.scoring import Judged
from whetherman_edge.config import load_config
from whetherman_edge.errors import ConfigError, EnvironmentFault

SAY_EVERY = 200


def add_options(parser: argparse.ArgumentParser) -> None:
    """``--engine``, ``--limit``, ``--json`` and ``--report``."""
    parser.add_argument("--engine", choices=("static", "gemma", "auto"), help="default: the configured one")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N items of each set")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to FILE")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write a one-page HTML report to FILE")


def judge(items: Sequence[Mapping[str, Any]], engine: str | None) -> tuple[list[Judged], list[dict[str, Any]]]:
    """Every item through the gate, without a deadline.

    items: mappings with ``id, request, gold, accept`` and, where it matters, ``group``. Returns the judged items and
    the records as ``decide --jsonl`` writes them. Raises EnvironmentFault when the engine cannot be opened.
    """
    from whetherman_edge import composition
    from whetherman_edge.ledger.counters import Counters
    from whetherman_edge.proxy.decide import decide

    config = load_config({"engine": engine} if engine else {}).config
    gate = composition.open_gate(config, Counters(), deadline=False)
    if gate.fault:
        raise EnvironmentFault(gate.fault)
    judged: list[Judged] = []
    records: list[dict[str, Any]] = []
    with contextlib.closing(gate):
        gate.start()
        fault = gate.await_backbone()
        if fault and config.engine == "gemma":
            raise EnvironmentFault(f"the engine gemma was asked for: {fault}")
        with asyncio.Runner() as runner:
            for number, item in enumerate(items, 1):
                body = json.dumps(item["request"]).encode()
                record = runner.run(decide(gate.gating, {}, body, item["id"]))
                judged.append(
                    Judged(
                        id=str(item["id"]),
                        gold=item["gold"],
                        accept=tuple(item["accept"]),
                        verdict=record.verdict,
                        decision=record.decision,
                        probabilities=record.probabilities,
                        group=str(item.get("group", "")),
                    )
                )
                records.append({"engine": record.engine, "reason": record.reason})
                if number % SAY_EVERY == 0:
                    sys.stderr.write(f"judged {number} of {len(items)}\n")
    return judged, records


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Objects of a JSON Lines file. Raises ConfigError naming the line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path}: expected a JSON Lines file: {exc}") from exc
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as exc:
            raise ConfigError(f"{path}: line {number}: expected a JSON object: {exc}") from exc
        if not isinstance(value, dict):
            raise ConfigError(f"{path}: line {number}: expected a JSON object, got {type(value).__name__}")
        yield value


def finish(
    parsed: argparse.Namespace, title: str, note: str, sections: Mapping[str, Mapping[str, Any]], lines: Iterable[str]
) -> int:
    """Print ``lines``, write JSON and report where asked. Returns 0."""
    for line in lines:
        sys.stdout.write(line + "\n")
    if parsed.json:
        parsed.json.write_text(json.dumps({"title": title, "note": note, "sets": sections}, indent=1) + "\n")
    if parsed.report:
        parsed.report.write_text(report.page(title, note, sections), encoding="utf-8")
    return 0


def told(value: Mapping[str, Any]) -> str:
    """A share in one breath."""
    if value["share"] is None:
        return "no items"
    return f"{value['share']:.3f} ({value['k']}/{value['n']}, {value['low']:.3f} to {value['high']:.3f})"
