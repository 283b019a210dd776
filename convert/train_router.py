"""Train the router's semantic path: the table, the lexical weights and how they are mixed.

    python -m convert.train_router --model potion-base-8M --shared DIR --out run.npz [--seed N] [--everything]
    python -m convert.train_router --average run.npz RUN1.npz RUN2.npz …

The loss is listwise, on the very score that ships: softmax over a slate of the right tool, its rivals (the same server
or domain) and a random number of other tools. Rows are rounded to int8 in the forward pass, so training sees what
ships. A pull keeps each row near the original; a quarter of the queries are descriptions looking for their own tool by
name; similarities of a teacher (``router_teacher``) over mixed texts are matched where ``--teacher`` is given.
Averaging runs of several seeds is worth more than any one change of the loss.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F  # noqa: N812 - torch's own convention

from convert.build_router import read_model, stem_sections
from convert.eval_router import priority_rows
from convert.router_corpus import Pool, Query, ToolText, load_pools
from convert.router_validation import is_held_out
from whetherman_edge.router.card import spaced
from whetherman_edge.router.prototype import FIELD_TOKENS_MAX
from whetherman_edge.router.table import SPECIALS, library_tokenizer

SOURCES = {
    "authored": 7.0, "authored2": 9.0, "authored_mcp": 9.0, "gate": 9.0, "metatool": 1.5, "sealtools": 0.7,
    "toolselect": 0.5, "stabletoolbench": 0.3, "mcp": 1.0, "intent": 1.0, "bfcl": 0.3, "priority": 1.6,
}  # fmt: skip
UNIT = 100.0  # potion's rows are about this long; the parameters are rows over this
QUERIES, DESCRIPTION_QUERIES, EXTRA_TOOLS = 48, 14, 24
OTHERS = (0, 2, 5, 10, 20, 40, 1000)  # sizes of the random part of a slate
OVERLAPPING = frozenset({"intent", "metatool", "sealtools"})  # other sources may well answer these
PULL, LEXICAL_DECAY, DISTIL = 1.0, 0.02, 2.0
DISTIL_TEXTS, DISTIL_TEMPERATURE = 256, 0.08
HELD_WORDINGS = (3, 6, 8)  # of the priority descriptions


class Encoder:
    """Token ids and stem classes of texts, cached."""

    def __init__(self, tokens: list[str], stem: np.ndarray, idf: np.ndarray) -> None:
        self.library = library_tokenizer("\n".join(tokens).encode())
        self.stem, self.idf = stem, idf
        self._ids: dict[str, list[int]] = {}
        self._stems: dict[tuple[int, ...], frozenset[int]] = {}

    def ids(self, text: str) -> list[int]:
        if text not in self._ids:
            found = self.library.encode(text, add_special_tokens=False).ids[:FIELD_TOKENS_MAX]
            self._ids[text] = [i for i in found if i >= len(SPECIALS)]
        return self._ids[text]

    def stems(self, ids: Sequence[int]) -> frozenset[int]:
        key = tuple(ids)
        if key not in self._stems:
            self._stems[key] = frozenset(int(self.stem[i]) for i in ids if self.idf[self.stem[i]] > 0)
        return self._stems[key]


Fields = tuple[list[int], list[int], list[int]]  # name, description, parameters


class EncodedTool:
    """A tool's texts as ids, and random variants: wording, first sentence or no description; parameters or not."""

    def __init__(self, tool: ToolText, encoder: Encoder) -> None:
        texts = [d for d in tool.descriptions if d]
        self.name = encoder.ids(spaced(tool.name)) or [len(SPECIALS)]
        self.descriptions = [encoder.ids(d) for d in texts]
        self.first = [encoder.ids(re.split(r"(?<=[.!?])\s|\n", d)[0]) for d in texts[:1]]
        self.parameters = encoder.ids(" ".join(tool.parameters)) if tool.parameters else []

    def variant(self, rng: random.Random) -> Fields:
        chance, description = rng.random(), []
        if self.descriptions:
            if chance < 0.5:
                description = self.descriptions[0]
            elif chance < 0.65:
                description = self.first[0]
            elif chance < 0.92:
                description = rng.choice(self.descriptions)
        return self.name, description, self.parameters if rng.random() < 0.5 else []


class Model(torch.nn.Module):
    """The score of ``router.scorer``, with gradients."""

    def __init__(self, rows: np.ndarray, idf: np.ndarray) -> None:
        super().__init__()
        start = torch.tensor(rows) / UNIT
        start[: len(SPECIALS)] = 0
        vocab, dim = start.shape
        self.table = torch.nn.Embedding(vocab, dim, sparse=True)
        self.table.weight.data.copy_(start)
        self.original = start.clone()
        self.scale = float(np.percentile(np.abs(rows), 99.99)) / UNIT / 127
        self.lexical = torch.nn.Embedding(vocab, 1, sparse=True)
        torch.nn.init.zeros_(self.lexical.weight)
        self.idf = torch.tensor(idf)
        self.mix = torch.nn.Parameter(torch.tensor([7.0, 3.0, 2.0, 1.0, 0.5, 0.5, 0.5, 0.25, 0.3, 0.1]))
        self.name_share = torch.nn.Parameter(torch.tensor(0.0))
        self.bias = torch.nn.Parameter(torch.zeros(dim))
        self.has_parameters = torch.nn.Parameter(torch.tensor(0.0))
        self.log_scale = torch.nn.Parameter(torch.tensor(0.0))

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows as they ship: rounded, with the gradient passed straight through."""
        exact = self.table(ids)
        rounded = torch.clamp(torch.round(exact / self.scale), -127, 127) * self.scale
        return exact + (rounded - exact).detach()

    def pool(self, texts: Sequence[Sequence[int]], rows: torch.Tensor, place: dict[int, int]) -> torch.Tensor:
        flat = torch.tensor([place[i] for text in texts for i in text], dtype=torch.long)
        offsets = torch.tensor(np.cumsum([0, *[len(t) for t in texts[:-1]]]), dtype=torch.long)
        return F.embedding_bag(flat, rows, offsets, mode="sum")

    def forward(
        self, queries: Sequence[list[int]], tools: Sequence[Fields], encoder: Encoder
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(n_queries, n_tools) logits, and the ids that took part."""
        fields = [[t[f] for t in tools] for f in range(3)]
        used = sorted({i for texts in (queries, *fields) for text in texts for i in text})
        place, ids = {i: k for k, i in enumerate(used)}, torch.tensor(used)
        rows = self.rows(ids)
        query = F.normalize(self.pool(queries, rows, place), dim=1)
        name, description, parameters = (self.pool(texts, rows, place) for texts in fields)
        described = torch.tensor([[float(bool(text))] for text in fields[1]])
        description = torch.where(described > 0, description, name)
        both = F.normalize(name * self.name_share.exp() + description, dim=1)
        cosines = [query @ F.normalize(x, dim=1).T for x in (both, description, name, parameters)]
        terms = cosines + self.shared_words(queries, fields, encoder)
        logit = sum(weight * term for weight, term in zip(self.mix, terms, strict=True))
        has = torch.tensor([float(bool(text)) for text in fields[2]])
        return logit + 10 * (both @ self.bias) + self.has_parameters * has, ids

    def shared_words(
        self, queries: Sequence[list[int]], fields: list[list[list[int]]], encoder: Encoder
    ) -> list[torch.Tensor]:
        """For each field: share of the query's weight it covers, and share of its own weight the query names."""
        asked = [encoder.stems(q) for q in queries]
        offered = [[encoder.stems(t) for t in texts] for texts in fields]
        used = sorted({s for group in (asked, *offered) for stems in group for s in stems})
        place, ids = {s: k for k, s in enumerate(used)}, torch.tensor(used)
        weight = self.idf[ids] * self.lexical(ids)[:, 0].exp()
        ask = _indicator(asked, place)
        total = (ask @ weight)[:, None] + 1e-6
        terms = []
        for f, group in enumerate(offered):
            own = _indicator(group, place)
            shared = (ask * weight) @ own.T
            terms += [shared / total, shared / ((own @ weight)[None] + (0.5 if f == 2 else 1e-6))]
        return terms


def _indicator(groups: Sequence[frozenset[int]], place: dict[int, int]) -> torch.Tensor:
    matrix = torch.zeros(len(groups), len(place))
    rows = [r for r, group in enumerate(groups) for _ in group]
    if rows:
        matrix[rows, [place[s] for group in groups for s in group]] = 1
    return matrix


@dataclass
class Batch:
    queries: list[list[int]]
    tools: list[Fields]
    mask: torch.Tensor  # 0 where offered, -1e9 elsewhere
    right: torch.Tensor  # 1 where right


class Sampler:
    """Batches: queries of several pools over one set of tools, each query with its own slate."""

    def __init__(self, pools: Sequence[Pool], encoder: Encoder, rng: random.Random) -> None:
        self.rng, self.encoder = rng, encoder
        self.by_source = {s: [p for p in pools if p.source == s and p.queries] for s in SOURCES}
        self.by_source = {s: found for s, found in self.by_source.items() if found}
        self.weights = [SOURCES[s] for s in self.by_source]
        self.places = {s: [(p, i) for p in pools if p.source == s for i in range(len(p.tools))] for s in self.by_source}
        self._encoded: dict[int, EncodedTool] = {}

    def _tool(self, tool: ToolText) -> EncodedTool:
        if id(tool) not in self._encoded:
            self._encoded[id(tool)] = EncodedTool(tool, self.encoder)
        return self._encoded[id(tool)]

    def _source(self) -> str:
        return self.rng.choices(list(self.by_source), self.weights)[0]

    def batch(self) -> Batch:
        rng = self.rng
        tools: list[Fields] = []
        place: dict[tuple[int, int], int] = {}
        rows: list[tuple[list[int], list[int], list[int], Pool]] = []  # query, right, rivals, pool

        def add(pool: Pool, index: int) -> int:
            key = (id(pool), index)
            if key not in place:
                place[key] = len(tools)
                tools.append(self._tool(pool.tools[index]).variant(rng))
            return place[key]

        while len(rows) < QUERIES:
            source = self._source()
            found = self.by_source[source]
            pool = rng.choices(found, [len(p.queries) ** 0.5 for p in found])[0]
            for query in rng.sample(pool.queries, min(len(pool.queries), 8 if source == "priority" else 3)):
                rivals = self._rivals(pool, query)
                right = [add(pool, i) for i in query.accept[:3]]
                rows.append((self.encoder.ids(query.text), right, [add(pool, i) for i in rivals], pool))
        for _ in range(DESCRIPTION_QUERIES):
            pool, index = rng.choice(self.places[self._source()])
            key = (id(pool), index)
            row = None if key in place else self._description_query(pool, index)
            if row is not None:
                place[key] = len(tools)
                tools.append(row[1])
                others = [j for j in range(len(pool.tools)) if j != index]
                rivals = [add(pool, j) for j in rng.sample(others, min(len(others), 6))]
                rows.append((row[0], [place[key]], rivals, pool))
        for _ in range(EXTRA_TOOLS):
            add(*rng.choice(self.places[self._source()]))
        return self._masked(rows, tools, place)

    def _rivals(self, pool: Pool, query: Query) -> list[int]:
        offered = query.candidates
        if offered is None:
            offered = list(range(len(pool.tools)))
            if len(offered) > 12:
                offered = self.rng.sample(offered, self.rng.randint(4, 12))
        wrong = [i for i in offered if i not in query.accept]
        return self.rng.sample(wrong, 16) if len(wrong) > 16 else wrong

    def _description_query(self, pool: Pool, index: int) -> tuple[list[int], Fields] | None:
        """A thinned description as the query, its tool by name only or in another wording."""
        rng, tool = self.rng, self._tool(pool.tools[index])
        if not tool.descriptions or len(tool.descriptions[0]) < 4:
            return None
        text = rng.choice(tool.descriptions) if rng.random() < 0.5 else tool.first[0]
        query = [i for i in text if rng.random() > 0.3][:24]
        other = rng.choice(tool.descriptions) if len(tool.descriptions) > 1 and rng.random() < 0.4 else []
        return (query, (tool.name, other, tool.parameters if rng.random() < 0.5 else [])) if query else None

    def _masked(
        self,
        rows: list[tuple[list[int], list[int], list[int], Pool]],
        tools: list[Fields],
        place: dict[tuple[int, int], int],
    ) -> Batch:
        owner = {t: pool for (pool, _), t in place.items()}
        mask, right = torch.full((len(rows), len(tools)), -1e9), torch.zeros(len(rows), len(tools))
        for r, (_, good, rivals, pool) in enumerate(rows):
            n_others = self.rng.choice(OTHERS)
            n_others = min(n_others, 10 if pool.source in OVERLAPPING else 5 if pool.source == "priority" else 1000)
            others = [t for t in range(len(tools)) if owner[t] != id(pool)]
            mask[r, self.rng.sample(others, min(n_others, len(others)))] = 0
            mask[r, rivals + good] = 0
            right[r, good] = 1
        return Batch([row[0] or [len(SPECIALS)] for row in rows], tools, mask, right)


def training_pools(args: argparse.Namespace) -> list[Pool]:
    """Every pool that may train, and the seven priority tools as one more."""
    described = json.loads((Path(__file__).parent / "data" / "router_priority.json").read_text())
    names = list(described)
    pools = load_pools(args.shared, args.data, args.bfcl)
    pools = [p for p in pools if args.everything or not p.is_held_out]
    wordings = {
        n: [d for i, d in enumerate(described[n]["descriptions"]) if args.everything or i not in HELD_WORDINGS]
        for n in names
    }
    priority = Pool("priority", "all", [ToolText(n, wordings[n]) for n in names], [])
    for row in priority_rows(args.shared, args.data):
        if args.everything or not is_held_out(str(row["query"])):
            accept = [names.index(n) for n in row["accept"]]  # type: ignore[attr-defined]
            priority.queries.append(Query(str(row["query"]), accept, list(range(len(names)))))
    return [*pools, priority]


class Teacher:
    """Similarities of a larger encoder over random texts, as soft targets."""

    def __init__(self, path: Path, encoder: Encoder, rng: random.Random) -> None:
        saved = np.load(path)
        texts: list[str] = json.loads(saved["texts"].tobytes())
        self.ids = [encoder.ids(t) or [len(SPECIALS)] for t in texts]
        self.vectors, self.rng = torch.tensor(saved["vectors"].astype(np.float32)), rng

    def loss(self, model: Model) -> torch.Tensor:
        chosen = self.rng.sample(range(len(self.ids)), DISTIL_TEXTS)
        texts = [self.ids[i] for i in chosen]
        used = sorted({i for t in texts for i in t})
        rows = model.rows(torch.tensor(used))
        ours = F.normalize(model.pool(texts, rows, {i: k for k, i in enumerate(used)}), dim=1)
        theirs = self.vectors[chosen]
        itself = torch.eye(DISTIL_TEXTS) * -1e9
        return F.kl_div(
            F.log_softmax(ours @ ours.T / DISTIL_TEMPERATURE + itself, 1),
            F.softmax(theirs @ theirs.T / DISTIL_TEMPERATURE + itself, 1),
            reduction="batchmean",
        )


def train(args: argparse.Namespace) -> None:
    rng = random.Random(args.seed)
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    rows, tokens = read_model(args.model)
    stem, idf = stem_sections(rows, tokens)
    encoder = Encoder(tokens, stem, idf)
    sampler = Sampler(training_pools(args), encoder, rng)
    teacher = Teacher(args.teacher, encoder, rng) if args.teacher else None
    model = Model(rows, idf)
    optimisers: list[torch.optim.Optimizer] = [
        torch.optim.SparseAdam([
            {"params": [model.table.weight], "lr": 1e-3},
            {"params": [model.lexical.weight], "lr": 1e-2},
        ]),
        torch.optim.Adam([
            {"params": [model.mix, model.name_share, model.has_parameters, model.log_scale], "lr": 0.02},
            {"params": [model.bias], "lr": 1e-3},
        ]),
    ]  # fmt: skip
    rates = [[g["lr"] for g in o.param_groups] for o in optimisers]
    started, running = time.perf_counter(), 0.0
    for step in range(1, args.steps + 1):
        share = min(1.0, step / 50) * (0.5 * (1 + math.cos(math.pi * step / args.steps)) + 0.02)
        for optimiser, own in zip(optimisers, rates, strict=True):
            for group, rate in zip(optimiser.param_groups, own, strict=True):
                group["lr"] = rate * share
        batch = sampler.batch()
        logit, ids = model(batch.queries, batch.tools, encoder)
        logp = F.log_softmax(logit * model.log_scale.exp() + batch.mask, 1)
        loss = -torch.logsumexp(logp.masked_fill(batch.right == 0, -1e9), 1).mean()
        running += float(loss.detach())
        loss = loss + PULL * (model.table(ids) - model.original[ids]).square().sum(1).mean()
        loss = loss + LEXICAL_DECAY * model.lexical(ids).square().mean()
        if teacher is not None:
            loss = loss + DISTIL * teacher.loss(model)
        model.zero_grad(set_to_none=True)
        loss.backward()
        for optimiser in optimisers:
            optimiser.step()
        if step % 50 == 0:
            print(f"step {step}: loss {running / 50:.3f}, {time.perf_counter() - started:.0f} s", flush=True)
            running = 0.0
    save(model, args.out)


def save(model: Model, path: Path) -> None:
    """What ``build_router`` needs of a run."""
    mix = model.mix.detach().double().numpy()
    np.savez(
        path,
        rows=model.table.weight.detach().numpy(),
        scale=model.scale,
        idf=model.idf.numpy() * np.exp(model.lexical.weight.detach().numpy()[:, 0]),
        bias=10 * model.bias.detach().numpy(),
        mix=mix[:4],
        lexical=np.array([[mix[4], mix[5], 0.0], [mix[6], mix[7], 0.0], [mix[8], mix[9], 0.5]]),
        name_share=float(model.name_share.exp()),
        has_parameters_bias=float(model.has_parameters),
    )


def average(paths: Sequence[Path], out: Path) -> None:
    """The mean of runs that started from the same table."""
    runs = [np.load(p) for p in paths]
    np.savez(out, **{key: np.mean([r[key] for r in runs], axis=0) for key in runs[0].files})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--average", type=Path, nargs="+", metavar="NPZ", help="OUT, then the runs to average")
    parser.add_argument("--model", type=Path, help="potion-base-8M folder")
    parser.add_argument("--shared", type=Path, help="folder of the public data sets")
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "data", help="our own data")
    parser.add_argument("--bfcl", type=Path, help="bfcl_eval/data")
    parser.add_argument("--teacher", type=Path, help="output of router_teacher")
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--everything", action="store_true", help="train on the validation pools too (for shipping)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.average:
        average(args.average[1:], args.average[0])
    elif args.model and args.shared and args.out:
        train(args)
    else:
        parser.error("expected --model, --shared and --out, or --average")


if __name__ == "__main__":
    main()
