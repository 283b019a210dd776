"""Train the identity head: one hashed n-gram vector and one dense vector for each of the seven known tools.

    python -m convert.train_router_identity --artifact semantic.safetensors --shared DIR --data DIR --out identity.npz

Episodic, on top of the finished semantic scores: a query, the known tools with random wordings of their descriptions,
random other tools, and each known tool's identity shown with a probability drawn per episode, so that the head adds to
the semantic score and does not replace it. Queries for other tools train it to keep quiet.
"""

from __future__ import annotations

import argparse
import json
import random
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifact", type=Path, required=True)
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "data")
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
    names = list(described)
    kernels = load("best")
    table = RouterTable.open(args.artifact, kernels)
    scorer = Scorer(table, kernels)
    pools = load_pools(args.shared, args.data, None)

    queries: list[tuple[str, list[str], float]] = [
        (str(r["query"]), list(r["accept"]), 1.0)  # type: ignore[call-overload]
        for r in priority_rows(args.shared, args.data)
        if args.everything or not is_held_out(str(r["query"]))
    ]
    queries += borrowed(args.shared, rng)
    n_priority = len(queries)
    silent = silent_queries(pools, rng, args.everything)
    texts = [q[0] for q in queries] + [s[0] for s in silent]

    known_cards = [
        make_card(n, described[n]["descriptions"][w] if w >= 0 else "") for w in (*WORDINGS_TRAIN, -1) for n in names
    ]
    n_wordings = len(WORDINGS_TRAIN) + 1
    places = [
        (p, i)
        for p in pools
        if p.source in {"authored", "authored2", "gate", "mcp"} and (args.everything or not p.is_held_out)
        for i in range(len(p.tools))
    ]
    other_cards = [card(p.tools[i], "full") for p, i in rng.sample(places, OTHER_TOOLS)]
    known_slate, other_slate = scorer.slate(known_cards), scorer.slate(other_cards)
    known, other, other_cos, own, vectors, buckets = [], [], [], [], [], []
    for index, text in enumerate(texts):
        known.append(scorer.score(text, known_slate).logit.reshape(n_wordings, len(names)))
        scores = scorer.score(text, other_slate)
        other.append(scores.logit)
        other_cos.append(scores.cos_tool)
        if index >= n_priority:
            _, pool, accept = silent[index - n_priority]
            own.append(float(scorer.score(text, scorer.slate([card(pool.tools[accept[0]], "full")])).logit[0]))
        vectors.append(table.vector(text))
        buckets.append(
            kernels.hash_ngrams(text.encode()[:QUERY_BYTES_MAX], NGRAM_SEED, BUCKETS, NGRAM_MODES).astype(np.int64)
        )
    known_t = torch.tensor(np.array(known), dtype=torch.float32)
    other_t = torch.tensor(np.array(other), dtype=torch.float32)
    barred = torch.tensor(np.array(other_cos)) > FORBIDDEN_COSINE
    vectors_t = torch.tensor(np.array(vectors))
    print(f"{n_priority} queries of the known tools, {len(silent)} of others", flush=True)

    head = Head(len(names), table.dim)
    optimiser = torch.optim.Adam(head.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        order = rng.sample(range(len(texts)), len(texts))
        total = 0.0
        for start in range(0, len(order), 64):
            batch = order[start : start + 64]
            counts = torch.tensor([len(buckets[i]) for i in batch])
            offsets = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)[:-1]])
            added = head(torch.tensor(np.concatenate([buckets[i] for i in batch])), offsets, counts, vectors_t[batch])
            logits, targets, weights = [], [], []
            for row, i in enumerate(batch):
                shown = torch.rand(len(names)) < (0.3 + 0.7 * rng.random())
                wording = torch.randint(0, n_wordings, (len(names),))
                at_known = known_t[i, wording, torch.arange(len(names))] + added[row] * shown
                some = torch.randperm(OTHER_TOOLS)[: rng.choice((0, 0, 2, 5, 10))]
                at_other = other_t[i, some]
                good = torch.zeros(len(names) + len(some) + 1)
                if i < n_priority:
                    accept = [names.index(t) for t in queries[i][1]]
                    at_other = at_other.masked_fill(barred[i, some], -1e9)
                    good[accept] = 1
                    gone = torch.rand(len(names)) < rng.choice((0.0, 0.0, 0.5))
                    gone[accept] = False
                    at_known = at_known.masked_fill(gone, -1e9)
                    right = torch.tensor([-1e9])
                    weights.append(queries[i][2])
                else:
                    good[-1] = 1
                    right = torch.tensor([own[i - n_priority]])
                    weights.append(0.5)
                row_logits = torch.cat([at_known, at_other, right])
                padded = torch.full((len(names) + 11,), -1e9)
                padded[: len(row_logits)] = row_logits
                mask = torch.zeros(len(names) + 11)
                mask[: len(good)] = good
                logits.append(padded)
                targets.append(mask)
            stacked, good_rows = torch.stack(logits), torch.stack(targets)
            logp = F.log_softmax(stacked, 1)
            nll = -torch.logsumexp(logp.masked_fill(good_rows == 0, -1e9), 1)
            loss = (nll * torch.tensor(weights)).mean() + args.decay * (
                head.dense.square().sum() + head.ngrams.weight.square().sum()
            )
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            for group in optimiser.param_groups:
                group["lr"] = args.lr * (1 - (epoch + start / len(order)) / args.epochs)
            total += float(loss.detach())
        print(f"epoch {epoch}: loss {total / (len(order) / 64):.4f}", flush=True)
    bank, owner = [], []
    for k, name in enumerate(names):
        for text in described[name]["descriptions"]:
            bank.append(text)
            owner.append(k)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez(
        args.out,
        ngrams=GAIN * head.ngrams.weight.detach().numpy().astype(np.float32),
        dense=GAIN * head.dense.detach().numpy().astype(np.float32),
        bias=head.bias.detach().numpy().astype(np.float64),
        bank=np.array(bank),
        owner=np.array(owner, dtype=np.int32),
    )


if __name__ == "__main__":
    main()
