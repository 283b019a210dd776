"""Train the identity head: one hashed n-gram vector and one dense vector for each of the seven known tools.

    python -m convert.train_router_identity --artifact semantic.safetensors --shared DIR --data DIR --out identity.npz

Episodic, on top of the finished semantic scores: a query, the known tools with random wordings of their descriptions,
random other tools, and each known tool's identity shown with a probability drawn per episode, so that the head adds to
the semantic score and does not replace it. Queries for other tools train it to keep quiet.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F  # noqa: N812 - torch's own convention

from convert.eval_router import priority_rows
from convert.router_corpus import Pool, lines, load_pools
from convert.router_validation import card, is_held_out
from whetherman_edge.kernels import load
from whetherman_edge.router.card import make_card
from whetherman_edge.router.identity_head import NGRAM_MODES, NGRAM_SEED, QUERY_BYTES_MAX
from whetherman_edge.router.scorer import Scorer
from whetherman_edge.router.table import RouterTable

BUCKETS = 1 << 14
BATCH = 64
SHOWN = (0.3, 1.0)  # bounds of an episode's probability that a known tool's identity is shown
SILENT_WEIGHT = 0.5
WORDINGS_TRAIN = (0, 1, 2, 4, 5, 7, 9, 10, 11, 12, 13)  # 3, 6 and 8 stay for validation
GAIN = 6.0  # so that steps of Adam's size move the scores; folded into the weights at the end
OTHER_TOOLS = 240
SILENT_QUERIES = 2000
FORBIDDEN_COSINE = 0.45  # a distractor as near as this may well answer the query
# Intents whose queries belong to one of the seven tools.
BORROWED = {
    "hwu64": {
        "weather_query": "weather", "news_query": "news", "qa_factoid": "wiki", "qa_definition": "wiki",
        "qa_maths": "other", "general_joke": "other", "general_quirky": "other",
        "recommendation_locations": "websearch",
    },
    "clinc150": {
        "weather": "weather", "translate": "other", "calculator": "other", "tell_joke": "other", "fun_fact": "other",
        "restaurant_reviews": "websearch", "meaning_of_life": "other", "what_is_your_name": "other",
    },
    "snips": {"GetWeather": "weather"},
}  # fmt: skip
BORROWED_PER_INTENT = 60
BORROWED_WEIGHT = 0.3


def borrowed(shared: Path, rng: random.Random) -> list[tuple[str, list[str], float]]:
    """(query, accepted tools, weight) from public intent sets, commands and instructions."""
    rows = []
    for source, intents in BORROWED.items():
        found: dict[str, list[str]] = {i: [] for i in intents}
        for row in lines(shared / source / "train.jsonl"):
            if row["intent"] in found:
                found[row["intent"]].append(row["query"])
        for intent, texts in found.items():
            rng.shuffle(texts)
            rows += [(t, [intents[intent]], BORROWED_WEIGHT) for t in texts[:BORROWED_PER_INTENT]]
    commands = [r["query"] for r in lines(shared / "nl2bash" / "pairs.jsonl")]
    rows += [(t, ["shell", "files"], BORROWED_WEIGHT) for t in rng.sample(commands, 300)]
    return rows


def silent_queries(pools: list[Pool], rng: random.Random, keep_held_out: bool) -> list[tuple[str, Pool, list[int]]]:
    """Queries for other tools, with their pool."""
    chosen = [
        (q.text, p, q.accept)
        for p in pools
        if p.source in {"authored", "authored2", "gate", "metatool"} and (keep_held_out or not p.is_held_out)
        for q in p.queries
    ]
    rng.shuffle(chosen)
    return chosen[:SILENT_QUERIES]


class Head(torch.nn.Module):
    """Scores of the known tools: mean-like n-gram sum, dense part, bias."""

    def __init__(self, n_known: int, dim: int) -> None:
        super().__init__()
        self.ngrams = torch.nn.EmbeddingBag(BUCKETS, n_known, mode="sum")
        torch.nn.init.zeros_(self.ngrams.weight)
        self.dense = torch.nn.Parameter(torch.zeros(n_known, dim))
        self.bias = torch.nn.Parameter(torch.zeros(n_known))

    def forward(
        self, flat: torch.Tensor, offsets: torch.Tensor, counts: torch.Tensor, query: torch.Tensor
    ) -> torch.Tensor:
        return self.bias + GAIN * (
            self.ngrams(flat, offsets) / counts.clamp(min=1).sqrt()[:, None] + query @ self.dense.T
        )


@dataclass
class Evidence:
    """What training needs of each text; rows of the known tools' queries first, then those of other tools.

    ``known``: (n, wordings, known) semantic logits. ``other``: (n, OTHER_TOOLS), ``barred`` where such a tool may well
    answer the query. ``own``: logit of the right tool where it is not a known one, else -1e9. ``good``: (n, known + 1),
    the last column for that right tool. ``weight``: (n,).
    """

    known: torch.Tensor
    other: torch.Tensor
    barred: torch.Tensor
    own: torch.Tensor
    good: torch.Tensor
    weight: torch.Tensor
    vectors: torch.Tensor
    buckets: list[np.ndarray]


def gather(args: argparse.Namespace, described: dict[str, dict[str, list[str]]], rng: random.Random) -> Evidence:
    """Score every training text once with the finished semantic path."""
    names = list(described)
    kernels = load("best")
    table = RouterTable.open(args.artifact, kernels)
    scorer = Scorer(table, kernels)
    pools = load_pools(args.shared, args.data, None)
    queries = [
        (str(r["query"]), list(r["accept"]), 1.0)  # type: ignore[call-overload]
        for r in priority_rows(args.shared, args.data)
        if args.everything or not is_held_out(str(r["query"]))
    ]
    queries += borrowed(args.shared, rng)
    silent = silent_queries(pools, rng, args.everything)
    wordings = (*WORDINGS_TRAIN, -1)
    known_slate = scorer.slate(
        [make_card(n, described[n]["descriptions"][w] if w >= 0 else "") for w in wordings for n in names]
    )
    places = [
        (p, i)
        for p in pools
        if p.source in {"authored", "authored2", "gate", "mcp"} and (args.everything or not p.is_held_out)
        for i in range(len(p.tools))
    ]
    other_slate = scorer.slate([card(p.tools[i], "full") for p, i in rng.sample(places, OTHER_TOOLS)])
    texts = [q[0] for q in queries] + [s[0] for s in silent]
    at_other = [scorer.score(text, other_slate) for text in texts]
    own = [-1e9] * len(queries)
    for text, pool, accept in silent:
        own.append(float(scorer.score(text, scorer.slate([card(pool.tools[accept[0]], "full")])).logit[0]))
    good = torch.zeros(len(texts), len(names) + 1)
    for row, (_, accept, _) in enumerate(queries):
        good[row, [names.index(n) for n in accept]] = 1
    good[len(queries) :, -1] = 1
    print(f"{len(queries)} queries of the known tools, {len(silent)} of others", flush=True)
    known = np.array([scorer.score(text, known_slate).logit for text in texts], dtype=np.float32)
    barred = np.array([s.cos_tool > FORBIDDEN_COSINE for s in at_other])
    barred[len(queries) :] = False
    return Evidence(
        known=torch.tensor(known.reshape(len(texts), len(wordings), len(names))),
        other=torch.tensor(np.array([s.logit for s in at_other], dtype=np.float32)),
        barred=torch.tensor(barred),
        own=torch.tensor(own),
        good=good,
        weight=torch.tensor([q[2] for q in queries] + [SILENT_WEIGHT] * len(silent)),
        vectors=torch.tensor(np.array([table.vector(text) for text in texts])),
        buckets=[
            kernels.hash_ngrams(t.encode()[:QUERY_BYTES_MAX], NGRAM_SEED, BUCKETS, NGRAM_MODES).astype(np.int64)
            for t in texts
        ],
    )


def episode(head: Head, evidence: Evidence, rows: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """Mean loss of one batch, each row with its own wordings, shown identities and other tools."""
    n, (_, n_wordings, n_known) = len(rows), evidence.known.shape
    buckets = [evidence.buckets[i] for i in rows.tolist()]
    counts = torch.tensor([len(b) for b in buckets])
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)[:-1]])
    added = head(torch.tensor(np.concatenate(buckets)), offsets, counts, evidence.vectors[rows])
    wording = torch.randint(0, n_wordings, (n, n_known))
    shown = torch.rand(n, n_known) < torch.empty(n, 1).uniform_(*SHOWN)
    at_known = evidence.known[rows[:, None], wording, torch.arange(n_known)] + added * shown
    good = evidence.good[rows]
    gone = (torch.rand(n, n_known) < 0.5) & (torch.rand(n, 1) < 0.3) & (good[:, :-1] == 0)
    at_known = at_known.masked_fill(gone, -1e9)
    some = torch.tensor(rng.sample(range(OTHER_TOOLS), rng.choice((0, 0, 2, 5, 10))), dtype=torch.long)
    at_other = evidence.other[rows][:, some].masked_fill(evidence.barred[rows][:, some], -1e9)
    logp = F.log_softmax(torch.cat([at_known, evidence.own[rows, None], at_other], 1), 1)[:, : n_known + 1]
    loss = -torch.logsumexp(logp.masked_fill(good == 0, -1e9), 1)
    return (loss * evidence.weight[rows]).mean()


def fit(evidence: Evidence, args: argparse.Namespace, rng: random.Random) -> Head:
    """Train a head."""
    head = Head(evidence.known.shape[2], evidence.vectors.shape[1])
    optimiser = torch.optim.Adam(head.parameters(), lr=args.lr)
    n = len(evidence.buckets)
    n_batches = args.epochs * math.ceil(n / BATCH)
    done = 0
    for epoch in range(args.epochs):
        total = 0.0
        for rows in torch.randperm(n).split(BATCH):
            for group in optimiser.param_groups:
                group["lr"] = args.lr * max(0.02, 1 - done / n_batches)
            loss = episode(head, evidence, rows, rng)
            total += float(loss.detach()) * len(rows) / n
            loss = loss + args.decay * (head.dense.square().sum() + head.ngrams.weight.square().sum())
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            done += 1
        print(f"epoch {epoch}: loss {total:.4f}", flush=True)
    return head


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifact", type=Path, required=True, help="the artifact without an identity head")
    parser.add_argument("--shared", type=Path, required=True, help="folder of the public data sets")
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "data", help="our own data")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--decay", type=float, default=1e-4)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--everything", action="store_true", help="train on the validation queries too (for shipping)")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rng = random.Random(0)
    described = json.loads((Path(__file__).parent / "data" / "router_priority.json").read_text())
    head = fit(gather(args, described, rng), args, rng)
    bank = [(text, k) for k, entry in enumerate(described.values()) for text in entry["descriptions"]]
    np.savez(
        args.out,
        ngrams=GAIN * head.ngrams.weight.detach().numpy().astype(np.float32),
        dense=GAIN * head.dense.detach().numpy().astype(np.float32),
        bias=head.bias.detach().numpy().astype(np.float64),
        bank=np.array([text for text, _ in bank]),
        owner=np.array([k for _, k in bank], dtype=np.int32),
    )


if __name__ == "__main__":
    main()
