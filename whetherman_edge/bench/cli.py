"""``whetherman-edge bench …``: one benchmark a module, each with ``register(verbs)``; only the one used is imported."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]

BENCHMARKS: tuple[tuple[str, str], ...] = (
    ("latency", "time of one gate decision in process"),
    ("router", "the ToolRouter's speed against other ways to do the same"),
    ("proxy", "latency and requests/s added by the daemon, against direct; memory"),
    ("socket", "decision socket and /v1/systemone: round trip and requests/s"),
    ("decisions", "score decisions against labels"),
    ("bfcl", "decisions on BFCL v4 (test sets)"),
    ("when2call", "decisions on When2Call (test set)"),
    ("when2tool", "decisions on When2Tool's tasks"),
    ("ab", "an agent on whole tasks, under each gate and under none"),
)


def register(verbs: Verbs) -> None:
    """Add ``bench`` and its benchmarks."""
    bench = verbs.add_parser("bench", help="measure speed and quality")
    names = bench.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, text in BENCHMARKS:
        module = f"whetherman_edge.bench.{name}"
        if importlib.util.find_spec(module) is None:
            continue
        if name in sys.argv:
            importlib.import_module(module).register(names)
        else:
            names.add_parser(name, help=text)
