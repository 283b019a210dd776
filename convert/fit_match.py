"""Weigh the match head's opinion against the ToolRouter's, for `route --engine gemma|auto`.

    python -m convert.fit_match ARTIFACT_DIR GGUF --shared DATA --router SPLIT [--kept NPZ]

How well the only tool of a prompt fits the request is trained with the adapter (`convert.train_lora`, packs of requests
beside each of eight tools alone). What its logit, the class head's log-probability of a call, and the router's own
opinion count is fitted on half of the requests of held-out pools, by a router that has not seen them either
(``--router``: `convert.train_router` without ``--everything``), and reported on the other half. States are kept in
``--kept``; 6,000 prompts are some minutes on two cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from convert.fit_fusion import worker_of
from convert.kept_readings import key_of, read_all
from convert.lora_corpus import open_pools
from convert.router_corpus import Pool
from convert.router_validation import Case, mcp_slates, unseen
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

HELD_OUT: Final = {"mcp": 220, "servers": 400, "unseen": 150, "rivals": 150}
"""Cases of the pools that nothing was trained on, by group."""


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
    written = [pool for pool in held if pool.source in ("authored", "authored2")]
    served = [pool for pool in held if pool.source in ("mcp", "gate")]
    groups = {
        "mcp": mcp_slates(served),
        "servers": mcp_slates([pool for pool in held if pool.source == "authored_mcp"], "authored_mcp"),
        "unseen": unseen(written, "full", rivals=False),
        "rivals": unseen(written, "full", rivals=True),
    }
    return {name: drawn(cases, HELD_OUT[name]) for name, cases in groups.items()}


def drawn(cases: Sequence[Case], n: int) -> list[Case]:
    """``n`` of them at random, none with two tools of one name."""
    found = [case for case in cases if len({tool.name for tool in case.tools}) == len(case.tools)]
    random.Random(3).shuffle(found)
    return found[:n]


def candidates(groups: Mapping[str, Sequence[Case]], scorer: Scorer) -> list[Candidates]:
    """What is compared at run time: the tools that the router finds likeliest."""
    found = []
    for group, cases in groups.items():
        for case in cases:
            p = scorer.score(case.query, scorer.slate(case.tools)).probability
            chosen = [int(i) for i in np.argsort(-p, kind="stable")[:CANDIDATES]]
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


def fit_weights(some: Sequence[Candidates], match: Sequence[F64], act: Sequence[F64]) -> F64:
    """(3,): what the match head's logit, the log-probability of a call, and the router's count; least negative
    log-likelihood.
    """
    from scipy.optimize import minimize

    usable = [(o, np.stack([m, a, log_router(o)])) for o, m, a in zip(some, match, act, strict=True) if o.right.any()]

    def loss(w: F64) -> float:
        total = 0.0
        for one, parts in usable:
            logits = w @ parts
            p = np.exp(logits - logits.max())
            total -= float(np.log(max(p[one.right].sum() / p.sum(), 1e-12)))
        return total / len(usable)

    return np.asarray(minimize(loss, np.array([1.0, 0.0, 1.0]), method="Nelder-Mead").x)


def log_router(one: Candidates) -> F64:
    """(k,) log-probabilities, as ``router.decision.reordered`` takes them."""
    return np.log(np.maximum(one.router, 1e-12))


def report_of(some: Sequence[Candidates], scores: Sequence[F64]) -> dict[str, Any]:
    """By group: top-1 of the router, of both, and the right tool among the candidates; [k, n, low, high]."""
    found: dict[str, Any] = {}
    for group in HELD_OUT:
        rows = [(one, score) for one, score in zip(some, scores, strict=True) if one.group == group]
        hits = {"router": sum(bool(one.right[0]) for one, _ in rows)}
        hits["both"] = sum(bool(one.right[int(score.argmax())]) for one, score in rows)
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
    held = candidates(held_out_cases(pools), scorer)
    states = states_of(held, options.gguf, manifest["layer"], options.threads, options.kept)
    act = [np.array([heads.log_probabilities(row.astype(np.float32))[0] for row in one]) for one in states]
    readout = arrays["match_state"] / max(float(np.linalg.norm(arrays["match_state"])), 1e-9)  # fitted before, perhaps
    match = [one @ readout for one in states]
    weights = fit_weights(held[::2], match[::2], act[::2])
    scores = [weights @ np.stack([m, a, log_router(o)]) for o, m, a in zip(held, match, act, strict=True)]
    report = {"n_fit": len(held[::2]), "groups": report_of(held[1::2], scores[1::2])}
    arrays |= {
        "match_state": (weights[0] * readout).astype(np.float32),
        "match_classes": np.array([weights[1], 0, 0, 0], np.float32),
        "match_router": np.array([weights[2]], np.float32),
    }
    save_file({name: np.ascontiguousarray(value) for name, value in arrays.items()}, heads_path)
    heads_path.chmod(0o644)  # the library makes private files
    manifest["heads"]["sha256"] = hashlib.sha256(heads_path.read_bytes()).hexdigest()
    manifest["dev"]["which_tool"] = report
    path.write_text(json.dumps(manifest, indent=1) + "\n")
    manifests.read_manifest(path)
    print(json.dumps({"weights": weights.round(3).tolist(), **report}, indent=1))


if __name__ == "__main__":
    main()
