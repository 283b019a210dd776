"""Fit the match head: how well the only tool of a prompt fits the request, for `route --engine gemma|auto`.

    python -m convert.fit_match ARTIFACT_DIR GGUF --shared DATA --router SPLIT [--kept NPZ]

The states are those of the shipped weights, frozen; the class head was trained to tell needed from not, which beside
one tool is whether that tool fits, and a linear readout of the same state says it a little better. It is fitted on
queries of the router's training pools, listwise: the right tool against others that the router puts first. What the
router's own opinion counts beside it is fitted on half of the held-out pools, by a router that has not seen them either
(``--router``: `convert.train_router` without ``--everything``), and reported on the other half. States are kept in
``--kept``; 8,000 prompts are ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from convert.fit_fusion import worker_of
from convert.kept_readings import key_of, read_all
from convert.lora_corpus import open_pools
from convert.router_corpus import Pool
from convert.router_validation import Case, mcp_slates, random_slates, unseen
from whetherman_edge.backbone import manifest as manifests
from whetherman_edge.backbone.head import Heads, normalised
from whetherman_edge.backbone.prompt import Prompt, render
from whetherman_edge.backbone.store import sha256_of
from whetherman_edge.bench.scoring import wilson
from whetherman_edge.dialects.chat import ChatView, Message, Parameter, Tool
from whetherman_edge.engine import CANDIDATES
from whetherman_edge.router.scorer import Scorer
from whetherman_edge.router.table import RouterTable

F64 = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

HELD_OUT: Final = {"mcp": 220, "unseen": 150, "rivals": 150}
"""Cases of the pools that nothing was trained on, by group."""
TRAINING: Final = {"rivals": 260, "unseen": 160, "mcp": 350, "random 10": 250}
RIVALS: Final = 4
"""Tools that the router puts first, of a training case; one more is drawn."""
STRENGTH: Final = 0.1
"""Of the penalty on the readout's squares; 0.003 to 0.3 were tried, within two points of each other."""


@dataclass(frozen=True)
class Candidates:
    """The tools of a case that are compared. ``router`` (k,): the ToolRouter's probabilities; ``right`` (k,)."""

    group: str
    query: str
    tools: tuple[Tool, ...]
    router: F64
    right: Bools


def held_out_cases(pools: Sequence[Pool]) -> dict[str, list[Case]]:
    """Cases by group, of pools that validate."""
    held = [pool for pool in pools if pool.is_held_out]
    written = [pool for pool in held if pool.source.startswith("authored")]
    served = [pool for pool in held if pool.source in ("mcp", "gate")]
    groups = {
        "mcp": mcp_slates(served),
        "unseen": unseen(written, "full", rivals=False),
        "rivals": unseen(written, "full", rivals=True),
    }
    return {name: drawn(cases, HELD_OUT[name]) for name, cases in groups.items()}


def training_cases(pools: Sequence[Pool]) -> dict[str, list[Case]]:
    """Cases by group, of pools that train."""
    rest = [pool for pool in pools if not pool.is_held_out]
    written = [pool for pool in rest if pool.source.startswith("authored")]
    served = [pool for pool in rest if pool.source in ("mcp", "gate")]
    others = [pool for pool in rest if pool not in written and pool not in served]
    groups = {
        "rivals": unseen(thinned(written, 300), "full", rivals=True),
        "unseen": unseen(thinned(written, 200), "full", rivals=False),
        "mcp": mcp_slates(thinned(served, 1200)),
        "random 10": random_slates(thinned(others, 300), 10),
    }
    return {name: drawn(cases, TRAINING[name]) for name, cases in groups.items()}


def thinned(pools: Sequence[Pool], n: int) -> list[Pool]:
    """The pools with about 1.6 ``n`` of their queries, since making a slate for each of 100,000 takes an hour."""
    rng = random.Random(9)
    share = min(1.0, 1.6 * n / sum(len(pool.queries) for pool in pools))
    found = [replace(pool, queries=[query for query in pool.queries if rng.random() < share]) for pool in pools]
    return [pool for pool in found if pool.queries]


def drawn(cases: Sequence[Case], n: int) -> list[Case]:
    """``n`` of them at random, none with two tools of one name."""
    found = [case for case in cases if len({tool.name for tool in case.tools}) == len(case.tools)]
    random.Random(3).shuffle(found)
    return found[:n]


def candidates(groups: Mapping[str, Sequence[Case]], scorer: Scorer, *, training: bool) -> list[Candidates]:
    """What is compared: as at run time, or for training with the right tool among them and one drawn at random."""
    found = []
    for group, cases in groups.items():
        for number, case in enumerate(cases):
            p = scorer.score(case.query, scorer.slate(case.tools)).probability
            chosen = [int(i) for i in np.argsort(-p, kind="stable")[: RIVALS if training else CANDIDATES]]
            if training:
                others = [i for i in range(len(p)) if i not in chosen and i not in case.accept]
                random.Random(number).shuffle(others)
                if chosen[-1] not in case.accept and case.accept.isdisjoint(chosen):
                    chosen[-1] = min(case.accept)
                chosen += others[:1]
            tools = tuple(
                Tool(card.name, card.description, tuple(Parameter(one) for one in card.parameters), card.key)
                for card in (case.tools[i] for i in chosen)
            )
            right = np.array([i in case.accept for i in chosen])
            found.append(Candidates(group, case.query, tools, p[chosen], right))
    return found


def prompt_of(query: str, tool: Tool) -> Prompt:
    """As ``engine.Chooser`` asks."""
    return render(ChatView("route", "", (Message("user", query),), (tool,), tool.key), "compact")


def states_of(some: Sequence[Candidates], gguf: Path, layer: int, threads: int, kept: Path) -> list[F64]:
    """(k, width) normalised states of each case's candidates."""
    prompts = [prompt_of(one.query, tool) for one in some for tool in one.tools]
    weights = f"{sha256_of(gguf)} {layer}"
    worker = worker_of(gguf, layer, threads)
    worker.start()

    def read(i: int) -> list[float]:
        states = worker.submit(prompts[i], "match").future.result()
        return [float(value) for value in normalised(states.last)]

    try:
        rows = read_all([key_of(prompt, weights) for prompt in prompts], range(len(prompts)), read, kept)
    finally:
        worker.stop()
    return np.split(rows, np.cumsum([len(one.tools) for one in some])[:-1])


def fit_readout(some: Sequence[Candidates], states: Sequence[F64], log_p: Sequence[F64]) -> tuple[F64, F64]:
    """((width,) on the state, (4,) on the class log-probabilities): least listwise loss with a penalty on the first."""
    from scipy.optimize import minimize

    rows = np.concatenate(states)
    scale = rows.std(axis=0) + 1e-3
    x = np.concatenate([(rows - rows.mean(axis=0)) / scale, np.concatenate(log_p)], axis=1)
    right = np.concatenate([one.right for one in some])
    starts = np.cumsum([0] + [len(one.tools) for one in some])[:-1]
    owner = np.repeat(np.arange(len(some)), [len(one.tools) for one in some])
    width = rows.shape[1]

    def loss(w: F64) -> tuple[float, F64]:
        logits = x @ w
        logits = logits - np.maximum.reduceat(logits, starts)[owner]
        weight = np.exp(logits)
        total = np.add.reduceat(weight, starts)
        hit = np.add.reduceat(weight * right, starts)
        gradient = x.T @ (weight / total[owner] - weight * right / hit[owner]) / len(some)
        gradient[:width] += 2 * STRENGTH * w[:width]
        value = float(np.mean(np.log(total) - np.log(hit)) + STRENGTH * np.sum(w[:width] ** 2))
        return value, gradient

    found = minimize(loss, np.zeros(x.shape[1]), jac=True, method="L-BFGS-B", options={"maxiter": 500}).x
    return found[:width] / scale, found[width:]


def fit_weights(some: Sequence[Candidates], match: Sequence[F64]) -> tuple[float, float]:
    """(what a match counts, what the router's log-probability counts): least negative log-likelihood."""
    from scipy.optimize import minimize

    usable = [(one, m) for one, m in zip(some, match, strict=True) if one.right.any()]

    def loss(w: F64) -> float:
        total = 0.0
        for one, m in usable:
            logits = w[0] * m + w[1] * np.log(np.maximum(one.router, 1e-12))
            logits = logits - logits.max()
            p = np.exp(logits)
            total -= float(np.log(max(p[one.right].sum() / p.sum(), 1e-12)))
        return total / len(usable)

    a, b = minimize(loss, np.ones(2), method="Nelder-Mead").x
    return float(a), float(b)


def report_of(some: Sequence[Candidates], match: Sequence[F64], a: float, b: float) -> dict[str, Any]:
    """By group: top-1 of the router, of both, and the right tool among the candidates; [k, n, low, high]."""
    found: dict[str, Any] = {}
    for group in HELD_OUT:
        rows = [(one, m) for one, m in zip(some, match, strict=True) if one.group == group]
        both = sum(bool(one.right[int((a * m + b * np.log(one.router + 1e-12)).argmax())]) for one, m in rows)
        hits = {"router": sum(bool(one.right[0]) for one, _ in rows), "both": both}
        hits["candidates"] = sum(bool(one.right.any()) for one, _ in rows)
        found[group] = {name: [k, len(rows), *(round(v, 4) for v in wilson(k, len(rows)))] for name, k in hits.items()}
    return found


def main() -> None:
    """Fit, report, write into the artifact."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("artifact", type=Path, help="folder with backbone.json and its heads")
    parser.add_argument("gguf", type=Path, help="the derived file whose states are read")
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--router", type=Path, required=True, help="a router that has not seen the held-out pools")
    parser.add_argument("--kept", type=Path, default=Path("build/match-states.npz"))
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    path = options.artifact / "backbone.json"
    manifest = json.loads(path.read_text())
    heads_path = options.artifact / manifest["heads"]["file"]
    arrays = load_file(heads_path)
    heads = Heads(arrays)
    pools = open_pools(options.shared, Path(__file__).resolve().parent / "data")
    scorer = Scorer(RouterTable.open(options.router))
    train = candidates(training_cases(pools), scorer, training=True)
    held = candidates(held_out_cases(pools), scorer, training=False)
    states = states_of([*train, *held], options.gguf, manifest["layer"], options.threads, options.kept)
    log_p = [np.array([heads.log_probabilities(row.astype(np.float32)) for row in one]) for one in states]
    n = len(train)
    readout, classes = fit_readout(train, states[:n], log_p[:n])
    match = [x @ readout + p @ classes for x, p in zip(states[n:], log_p[n:], strict=True)]
    a, b = fit_weights(held[::2], match[::2])
    report = {"n_training": n, "n_fit": len(held[::2]), "groups": report_of(held[1::2], match[1::2], a, b)}
    arrays |= {
        "match_state": (a * readout).astype(np.float32),
        "match_classes": (a * classes).astype(np.float32),
        "match_router": np.array([b], np.float32),
    }
    save_file({name: np.ascontiguousarray(value) for name, value in arrays.items()}, heads_path)
    heads_path.chmod(0o644)  # the library makes private files
    manifest["heads"]["sha256"] = hashlib.sha256(heads_path.read_bytes()).hexdigest()
    manifest["dev"]["which_tool"] = report
    path.write_text(json.dumps(manifest, indent=1) + "\n")
    manifests.read_manifest(path)
    print(json.dumps({"match": a, "router": b, "classes": classes.round(3).tolist(), **report}, indent=1))


if __name__ == "__main__":
    main()
