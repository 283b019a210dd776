"""``bench router``: one whole choice, query text to probabilities, against other ways to do the same, in one run.

Same tools, same queries, one thread, interleaved in rounds so that a noisy machine disturbs all alike. Ours: the NumPy
reference, the serial kernels and the best ones here. Others, where installed: model2vec as its README shows it, and
semantic-router with the same encoder; both rank by cosine and give no probabilities.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from whetherman_edge.errors import ConfigError, UsageError
from whetherman_edge.kernels import load
from whetherman_edge.router.card import cards_of
from whetherman_edge.router.decision import Choice
from whetherman_edge.router.scorer import Scorer
from whetherman_edge.router.table import RouterTable

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]

ROUNDS: Final = 8
CALLS_PER_ROUND: Final = 250
NEW_TOOLS_CALLS: Final = 40

_THINGS = (
    "calendar event", "email", "invoice", "song", "playlist", "ticket", "repository branch", "photo", "shopping list",
    "bank transfer", "hotel booking", "flight", "support case", "database table", "container", "alarm", "thermostat",
    "contact", "note", "survey",
)  # fmt: skip
_ACTIONS = (
    ("create", "Create a new {} with the given details."),
    ("list", "List every {} that matches a date range or a filter."),
    ("search", "Search for a {} by free text."),
    ("update", "Change an existing {}."),
    ("delete", "Remove a {} for good."),
    ("send", "Send a {} to one or more people."),
    ("export", "Export a {} as a file."),
    ("share", "Share a {} with somebody else."),
    ("archive", "Put a {} away without deleting it."),
    ("describe", "Tell the state and history of a {}."),
)
_QUERIES = (
    "put lunch with Olga on the fourth, at noon", "any mail from the landlord this week?", "void the bakery one",
    "play the second song again", "make a list for the barbecue on saturday, charcoal, buns, corn",
    "how much did I send to Tom in May", "get me out of the hotel in Porto, plans changed",
    "is the case about the broken scanner still open", "drop the staging table",
    "wake me at twenty to six tomorrow", "it is too cold in the bedroom, two degrees more",
    "what is Jana's new phone number", "give the design team access to the holiday photos",
    "which containers restarted last night and how often did they do so before", "rename the branch to fix-login",
)  # fmt: skip


def options(n_tools: int, family: str = "") -> dict[str, str]:
    """``n_tools`` of 200 tools as an options object; another ``family`` gives tools never seen before."""
    found = {}
    for thing in _THINGS:
        for action, text in _ACTIONS:
            found[f"{action}_{thing.replace(' ', '_')}{family}"] = text.format(thing) + (f" {family}" if family else "")
    names = list(found)
    step = max(1, len(names) // n_tools)
    return {name: found[name] for name in names[::step][:n_tools]}


def register(verbs: Verbs) -> None:
    """Add ``bench router``."""
    parser = verbs.add_parser("router", help="the ToolRouter's speed against other ways to do the same")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to FILE")
    parser.add_argument(
        "--model2vec", type=Path, metavar="DIR", help="a local potion-base-8M folder for the comparison"
    )
    parser.set_defaults(run=run)


Call = Callable[[str], Any]


def run(args: argparse.Namespace) -> int:
    """Measure, print, and write ``--json``. Raises UsageError when that file cannot be written."""
    start = time.perf_counter()
    RouterTable.open()
    load_ms = (time.perf_counter() - start) * 1000.0
    figures: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cpus, Python {platform.python_version()}",
        "queries": len(_QUERIES),
        "load_ms": round(load_ms, 1),
    }
    for n_tools in (10, 200):
        figures[f"known_{n_tools}_tools_us"] = _timed(_contenders(n_tools, args.model2vec))
    figures["split_10_tools_us"] = _split(10)
    figures["new_tools_us"] = {str(n): _new_tools(n) for n in (10, 40, 200)}
    figures["memory"] = shared_memory()
    _print(figures)
    if args.json is not None:
        try:
            args.json.write_text(json.dumps(figures, indent=1) + "\n")
        except OSError as exc:
            raise UsageError(f"bench router: --json {args.json} cannot be written ({exc.strerror or exc})") from exc
    return 0


def _contenders(n_tools: int, model: Path | None) -> dict[str, Call]:
    """Name -> a call that chooses among ``n_tools``."""
    tools = options(n_tools)
    calls: dict[str, Call] = {}
    for label, isa in (("numpy reference", "reference"), ("native serial", "serial"), ("native best", "best")):
        try:
            kernels = load(isa)
        except ConfigError:
            continue
        if isa == "best" and kernels.backend == "reference":
            continue
        scorer = Scorer(RouterTable.open(kernels=kernels), kernels)
        calls[f"{label} ({kernels.isa})"] = functools.partial(_route, scorer, tools)
    calls |= _model2vec(tools, model)
    return calls


def _route(scorer: Scorer, tools: dict[str, str], query: str) -> Choice:
    return scorer.route(query, tools)


def _model2vec(tools: dict[str, str], model: Path | None) -> dict[str, Call]:
    """The other contenders, as far as they are installed and a model folder is given."""
    if model is None or importlib.util.find_spec("model2vec") is None:
        return {}
    from model2vec import StaticModel  # type: ignore[import-not-found,unused-ignore]

    encoder = StaticModel.from_pretrained(str(model))
    matrix = encoder.encode([f"{name}. {text}" for name, text in tools.items()])
    matrix /= np.linalg.norm(matrix, axis=1, keepdims=True)

    def nearest(query: str) -> int:
        vector = encoder.encode(query)
        return int((matrix @ (vector / np.linalg.norm(vector))).argmax())

    calls: dict[str, Call] = {"model2vec": nearest}
    if importlib.util.find_spec("semantic_router") is not None:
        calls["semantic-router"] = _semantic_router(tools, encoder)
    return calls


def _semantic_router(tools: dict[str, str], encoder: Any) -> Call:
    from semantic_router import IndexedRouter, Route  # type: ignore[import-not-found,unused-ignore]
    from semantic_router.encoders import DenseEncoder  # type: ignore[import-not-found,unused-ignore]

    class Potion(DenseEncoder):  # type: ignore[misc,unused-ignore]
        """The same vectors behind semantic-router's interface."""

        name: str = "potion"

        def __call__(self, docs: list[str]) -> list[list[float]]:
            return [[float(x) for x in row] for row in encoder.encode(docs)]

    routes = [Route(name=name, utterances=[f"{name}. {text}"]) for name, text in tools.items()]
    router = IndexedRouter(Potion(), routes)
    call: Call = router.__call__
    return call


def _timed(calls: dict[str, Call]) -> dict[str, dict[str, float]]:
    """p50 and p99 in microseconds, warm, rounds interleaved."""
    for call in calls.values():
        for query in _QUERIES:
            call(query)
    taken: dict[str, list[int]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            slow = name == "semantic-router"
            for i in range(CALLS_PER_ROUND // (10 if slow else 1)):
                query = _QUERIES[i % len(_QUERIES)]
                start = time.perf_counter_ns()
                call(query)
                taken[name].append(time.perf_counter_ns() - start)
    return {name: _percentiles(times) for name, times in taken.items()}


def _split(n_tools: int) -> dict[str, dict[str, float]]:
    """Where the time of one warm call with the best kernels goes."""
    kernels = load("best")
    table = RouterTable.open(kernels=kernels)
    scorer = Scorer(table, kernels)
    slate = scorer.slate(cards_of(options(n_tools)))
    ids = {query: table.token_ids(query) for query in _QUERIES}
    pooled = {query: kernels.pool_i8(table.rows, ids[query]) for query in _QUERIES}
    tools = options(n_tools)
    return _timed(
        {
            "whole call": lambda q: scorer.route(q, tools),
            "token ids": table.token_ids,
            "pooling": lambda q: kernels.pool_i8(table.rows, ids[q]),
            "cosines": lambda q: kernels.cosine_i8(pooled[q], slate.rows, slate.norms),
            "scores, all": lambda q: scorer.score(q, slate),
        }
    )


def _new_tools(n_tools: int) -> dict[str, float]:
    """A first call with tools never seen: embeds them all."""
    scorer = Scorer(RouterTable.open())
    times = []
    for i in range(NEW_TOOLS_CALLS):
        fresh = options(n_tools, family=f"v{i}")
        start = time.perf_counter_ns()
        scorer.route(_QUERIES[i % len(_QUERIES)], fresh)
        times.append(time.perf_counter_ns() - start)
    return _percentiles(times)


def _percentiles(times_ns: Sequence[int]) -> dict[str, float]:
    micro = np.array(times_ns) / 1000.0
    return {"p50": round(float(np.percentile(micro, 50)), 1), "p99": round(float(np.percentile(micro, 99)), 1)}


_CHILD = """
import sys
from whetherman_edge.router.scorer import Scorer
from whetherman_edge.router.table import RouterTable
table = RouterTable.open()
Scorer(table).route("rain tomorrow?", {"weather": "Forecast for a city", "news": "Headlines"})
int(table.rows.max())
print(table.artifact.path, flush=True)
sys.stdin.readline()
"""


def shared_memory() -> dict[str, list[int]]:
    """Pages of the mapped file in two live processes that both touched all of it, in KiB; Linux only, else empty."""
    if not Path("/proc/self/smaps").is_file():
        return {}
    command = [sys.executable, "-c", _CHILD]
    children = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = [child.stdout.readline().strip() if child.stdout else "" for child in children]
    found = [mapped_kb(child.pid, path) for child, path in zip(children, paths, strict=True)]
    for child in children:
        child.communicate("\n")
    return {
        "mapped_rss_kb": [f["Rss"] for f in found],
        "mapped_pss_kb": [f["Pss"] for f in found],
        "shared_kb": [f["Shared_Clean"] for f in found],
        "process_rss_kb": [f["VmRSS"] for f in found],
    }


def mapped_kb(pid: int, path: str) -> dict[str, int]:
    """Rss, Pss and Shared_Clean of a process's mappings of ``path``, and its whole VmRSS, in KiB."""
    sums = {"Rss": 0, "Pss": 0, "Shared_Clean": 0}
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        head = line.split()
        if "-" in head[0] and not head[0].endswith(":"):
            inside = bool(path) and line.rstrip().endswith(path)
        elif inside and head[0].rstrip(":") in sums:
            sums[head[0].rstrip(":")] += int(head[1])
    status = Path(f"/proc/{pid}/status").read_text()
    return sums | {"VmRSS": int(status.split("VmRSS:")[1].split()[0])}


def _print(figures: dict[str, Any]) -> None:
    write = sys.stdout.write
    write(f"{figures['machine']}; load {figures['load_ms']} ms\n")
    for key in ("known_10_tools_us", "known_200_tools_us", "split_10_tools_us", "new_tools_us"):
        write(f"\n{key}\n")
        for name, row in figures[key].items():
            write(f"  {name:28s} p50 {row['p50']:9.1f}   p99 {row['p99']:9.1f}\n")
    for name, value in figures["memory"].items():
        write(f"{name}: {value}\n")
