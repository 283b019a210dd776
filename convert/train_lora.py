"""LoRA on the lower blocks of Gemma 3 270M with its heads on one pass: the decision, which tool, whether one fits.

    python -m convert.train_lora GGUF OUT --shared DATA [--layer 11] [--first-trained 0] [--epochs 3] [--workers 2]

Data-parallel over processes of one thread each: on a shared CPU that beats threads, whose barriers spin. The packs of
a step are claimed one by one, so a worker that is slowed down takes fewer. Checkpoints every few minutes; run the same
command again to go on. Where the processor multiplies bfloat16, products are computed in it (2.6 times the nodes a
second on a Zen 5, the states' cosine to float32's 0.9999); elsewhere that is slower than float32.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from convert.gate_data import TRAIN_FILES, read_dialogues
from convert.gate_metrics import auroc, macro_f1
from convert.gate_trie import NONE, Pack, Reader, pack
from convert.gemma_torch import N_EMBD, Geometry, Trunk, rms_norm
from convert.lora_corpus import (
    HELD_OUT,
    cut_packs,
    dialogue_packs,
    dialogues,
    example_of,
    few_tools_packs,
    match_pack,
    match_packs,
    open_pools,
    reader_of,
    slate_packs,
)
from convert.router_corpus import Pool
from whetherman_edge.backbone.llama import Network
from whetherman_edge.gate.verdict import LABELS

POINTER_DIM: Final = 128
POINTER_SHARE: Final = 0.5
MATCH_SHARE: Final = 0.5
ACT_COST: Final = 1.25
"""Weight of examples whose right decision is a call: a false skip costs more than a needless call."""
TOOLS_MAX: Final = 1_536
DIALOGUE_MAX: Final = 1_024
DEV_SHARE: Final = 160
"""Dialogues of a held-out author that are looked at during training; evaluation stops the work."""


class Heads(nn.Module):
    """The heads, on states divided by their root mean square."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(N_EMBD, len(LABELS))
        self.query = nn.Linear(N_EMBD, POINTER_DIM, bias=False)
        self.key = nn.Linear(N_EMBD, POINTER_DIM, bias=False)
        self.none = nn.Linear(N_EMBD, 1)
        self.match = nn.Linear(N_EMBD, 1, bias=False)
        nn.init.normal_(self.head.weight, std=0.01)
        nn.init.zeros_(self.head.bias)
        nn.init.zeros_(self.none.weight)
        nn.init.zeros_(self.match.weight)

    def forward(self, last: Tensor, tools: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(n, 4) logits, (n, k + 1) pointer logits, the last column for none of the tools, and (n,) how well a
        prompt's only tool fits.
        """
        last, tools = rms_norm(last, None), rms_norm(tools, None)
        scores = self.query(last) @ self.key(tools).T / math.sqrt(POINTER_DIM)
        return self.head(last), torch.cat([scores, self.none(last)], dim=1), self.match(last)[:, 0]


def losses(logits: Tensor, pointer: Tensor, match: Tensor, packed: Pack) -> tuple[Tensor, float]:
    """Summed loss of a pack, and the sum of its weights."""
    target = torch.tensor([e.target for e in packed.examples])
    weight = torch.tensor([e.weight for e in packed.examples])
    weight = weight * (1.0 + (ACT_COST - 1.0) * target[:, 0])
    loss = -(target * functional.log_softmax(logits, dim=1)).sum(1) @ weight
    chosen = functional.log_softmax(pointer, dim=1)
    for row, example in enumerate(packed.examples):
        if example.tools:
            right = [len(packed.tool_ends) if tool == NONE else tool for tool in example.tools]
            share = POINTER_SHARE * example.tool_weight * (1.0 if example.weight > 0.2 else 0.5)
            loss = loss - share * torch.logsumexp(chosen[row, right], dim=0)
    for rows, fitting in requests_of(packed):
        loss = loss + MATCH_SHARE * (torch.logsumexp(match[rows], 0) - torch.logsumexp(match[fitting], 0))
    return loss, float(weight.sum())


def requests_of(packed: Pack) -> Iterator[tuple[list[int], list[int]]]:
    """Of each request that is asked beside several tools: its rows, and those of them whose tool fits."""
    rows: dict[int, list[int]] = {}
    for row, example in enumerate(packed.examples):
        if example.query >= 0:
            rows.setdefault(example.query, []).append(row)
    for some in rows.values():
        yield some, [row for row in some if packed.examples[row].fits]


class Trainer:
    """One worker. Rank 0 also checkpoints and evaluates."""

    def __init__(self, arguments: argparse.Namespace, rank: int) -> None:
        self.arguments, self.rank = arguments, rank
        torch.manual_seed(arguments.seed)
        self.trunk = Trunk(
            arguments.gguf,
            arguments.layer,
            arguments.first_trained,
            dropout=arguments.dropout,
            dtype=torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32,
        )
        self.heads = Heads()
        self.trained = [(n, p) for n, p in self.trunk.named_parameters() if p.requires_grad]
        self.trained += [(f"heads.{n}", p) for n, p in self.heads.named_parameters()]
        lora = [p for n, p in self.trained if not n.startswith("heads.")]
        head = [p for n, p in self.trained if n.startswith("heads.")]
        groups = [{"params": lora, "lr": arguments.lr}, {"params": head, "lr": arguments.lr * 2}]
        self.optimiser = torch.optim.AdamW(groups, weight_decay=0.01, betas=(0.9, 0.98))
        self.rates = [group["lr"] for group in self.optimiser.param_groups]
        self.network = Network(arguments.gguf)
        self.reader: Reader = reader_of(self.network, tools_max=TOOLS_MAX, dialogue_max=DIALOGUE_MAX)
        self.lower: dict[bytes, Tensor] = {}
        self.step = 0
        self.mean = [p.detach().clone() for _, p in self.trained]

    def epoch_packs(self, epoch: int) -> list[Pack]:
        """The packs of one epoch in their order, the same in every worker."""
        options = self.arguments
        seed, rng = options.seed + epoch, np.random.default_rng(options.seed + epoch)
        others = [name for name in TRAIN_FILES if name not in options.focus]
        unfocused = dialogues(others)
        packs = dialogue_packs(self.reader, unfocused, options.seed)
        packs += slate_packs(self.reader, self.pools(), options.slates, seed)
        packs += few_tools_packs(self.reader, self.pools(), options.few_tools, seed)
        packs += match_packs(self.reader, self.pools(), options.matches, seed)
        every_time = cut_packs(self.reader, unfocused, options.cuts, seed) if options.cuts else []
        if options.focus:
            items = dialogues(options.focus)
            every_time += dialogue_packs(self.reader, items, options.seed, n_public=0, n_swapped=0)
        if options.epoch_packs:
            share = max(0, options.epoch_packs - len(every_time))
            packs = [packs[i] for i in rng.permutation(len(packs))[:share]]
        packs += every_time
        return [packs[i] for i in rng.permutation(len(packs))]

    def pools(self) -> Any:
        """The router's pools, read once."""
        if not hasattr(self, "_pools"):
            self._pools = open_pools(self.arguments.shared, self.arguments.data)
        return self._pools

    def outputs(self, packed: Pack) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of the heads for a pack."""
        geometry = Geometry(packed)
        key = hashlib.blake2b(packed.ids.tobytes() + packed.parent.tobytes(), digest_size=16).digest()
        x = self.lower.get(key)
        if x is None:
            x = self.trunk.lower(packed, geometry)
            if self.arguments.first_trained:  # else it is the embedding alone, not worth its memory
                self.lower[key] = x
        x = self.trunk.upper(x, geometry)
        return self.heads(x[packed.readout], x[packed.tool_ends])  # type: ignore[no-any-return]

    def train_step(self, packs: Sequence[Pack], store: dist.Store, total: int) -> tuple[float, float]:
        """One optimiser step over ``packs``, shared between the workers. Returns (loss, gradient norm)."""
        self.trunk.train()
        sums = torch.zeros(2)
        while (index := store.add(f"step-{self.step}", 1) - 1) < len(packs):
            # The same dropout whoever claims the pack, and after a restart.
            torch.manual_seed((self.arguments.seed << 40) + (self.step << 12) + index)
            loss, weight = losses(*self.outputs(packs[index]), packs[index])
            loss.backward()
            sums += torch.tensor([float(loss.detach()), weight])
        flat = torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for _, p in self.trained])
        flat = torch.cat([flat, sums])
        dist.all_reduce(flat)
        loss_sum, weight_sum = flat[-2:].tolist()
        at = 0
        for _, parameter in self.trained:
            n = parameter.numel()
            parameter.grad = (flat[at : at + n] / max(weight_sum, 1e-6)).view_as(parameter)
            at += n
        norm = float(nn.utils.clip_grad_norm_([p for _, p in self.trained], 1.0))
        share = min(1.0, (self.step + 1) / self.arguments.warmup)
        progress = min(1.0, self.step / total)
        for group, rate in zip(self.optimiser.param_groups, self.rates, strict=True):
            group["lr"] = rate * share * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.step += 1
        decay = min(self.arguments.average, self.step / (self.step + 10))
        torch._foreach_lerp_(self.mean, [p.detach() for _, p in self.trained], 1 - decay)
        return loss_sum / max(weight_sum, 1e-6), norm

    @torch.no_grad()
    def evaluate(self, packs: Sequence[Pack]) -> Mapping[str, float]:
        """AUROC of ACT against the rest, macro-F1 and accuracy on packs."""
        self.trunk.eval()
        probabilities, gold, accept = [], [], []
        for packed in packs:
            logits, _, _ = self.outputs(packed)
            probabilities.append(torch.softmax(logits, 1).numpy())
            target = np.array([e.target for e in packed.examples])
            gold.append(target.argmax(1))
            accept.append(target > 0)
        p, g = np.concatenate(probabilities), np.concatenate(gold)
        return {
            "n": len(g),
            "auroc": auroc(p[:, 0], g == 0),
            "macro_f1": macro_f1(p.argmax(1), g),
            "accepted": float(np.concatenate(accept)[np.arange(len(g)), p.argmax(1)].mean()),
        }

    @torch.no_grad()
    def evaluate_match(self, packs: Sequence[Pack]) -> Mapping[str, float]:
        """Share of the requests whose best tool fits."""
        self.trunk.eval()
        found: list[bool] = []
        for packed in packs:
            _, _, match = self.outputs(packed)
            found += [rows[int(match[rows].argmax())] in fitting for rows, fitting in requests_of(packed)]
        return {"n": len(found), "top1": float(np.mean(found))}

    def save(self, epoch: int, position: int) -> None:
        """Checkpoint: trained tensors, their running mean, optimiser state, and where the run is. Atomic.

        ``averaged.safetensors`` holds the mean under the tensors' own names: it is what ships.
        """
        tensors: dict[str, Tensor] = {name: p.detach().contiguous() for name, p in self.trained}
        for index, (_, parameter) in enumerate(self.trained):
            state = self.optimiser.state.get(parameter)
            if state:
                tensors[f"m.{index}"], tensors[f"v.{index}"] = state["exp_avg"], state["exp_avg_sq"]
        averaged = {name: mean for (name, _), mean in zip(self.trained, self.mean, strict=True)}
        tensors |= {f"mean.{name}": mean for name, mean in averaged.items()}
        metadata = {"step": str(self.step), "epoch": str(epoch), "position": str(position)}
        for file, content in (("averaged", averaged), ("checkpoint", tensors)):
            path = self.arguments.out / f"{file}.safetensors"
            save_file(content, path.with_suffix(".partial"), metadata)
            os.replace(path.with_suffix(".partial"), path)

    def restore(self) -> tuple[int, int]:
        """(epoch, position) to go on from."""
        path = self.arguments.out / "checkpoint.safetensors"
        if not path.exists():
            if self.arguments.init is not None:
                tensors = load_file(self.arguments.init)
                with torch.no_grad():
                    for (name, parameter), mean in zip(self.trained, self.mean, strict=True):
                        if name in tensors:  # blocks or heads that the other run did not train begin anew
                            parameter.copy_(tensors[name])
                            mean.copy_(tensors[name])
            return 0, 0
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        tensors = load_file(path)
        self.step = int(metadata["step"])
        with torch.no_grad():
            for index, (name, parameter) in enumerate(self.trained):
                parameter.copy_(tensors[name])
                self.mean[index].copy_(tensors.get(f"mean.{name}", tensors[name]))
                if f"m.{index}" in tensors:
                    self.optimiser.state[parameter] = {
                        "step": torch.tensor(float(self.step)),
                        "exp_avg": tensors[f"m.{index}"],
                        "exp_avg_sq": tensors[f"v.{index}"],
                    }
        return int(metadata["epoch"]), int(metadata["position"])


def dev_packs(reader: Reader) -> dict[str, list[Pack]]:
    """Dev sets, and some dialogues of each held-out author, as packs."""
    sets: dict[str, list[Any]] = {name: read_dialogues(name) for name in ("gate_dev", "gate_dev2", "gate_dev3")}
    for author in sorted(HELD_OUT):
        sets[author] = [item for item in read_dialogues("gate_train") if item["domain"] == author][:DEV_SHARE]
    return {name: pack([example_of(reader, item) for item in items]) for name, items in sets.items()}


def dev_match_packs(reader: Reader, pools: Sequence[Pool]) -> dict[str, list[Pack]]:
    """Requests of pools that never train beside eight of their tools, by source."""
    found: dict[str, list[Pack]] = {}
    strangers = [tool for pool in pools for tool in pool.tools]
    rng = random.Random(5)
    for source in ("authored2", "authored_mcp", "gate", "mcp"):
        held = [pool for pool in pools if pool.source == source and pool.is_held_out and len(pool.queries) >= 3]
        rng.shuffle(held)
        packs = [match_pack(reader, pool, strangers, rng, n_queries=8, n_tools=8) for pool in (held * 12)[:14]]
        if packs:
            found[source] = packs
    return found


def work(rank: int, arguments: argparse.Namespace) -> None:
    """One worker's life."""
    torch.set_num_threads(1)
    if rank:
        os.nice(arguments.nice)
    store = dist.TCPStore("127.0.0.1", arguments.port, arguments.workers, rank == 0, timedelta(hours=3))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=arguments.workers, timeout=timedelta(hours=3))
    trainer = Trainer(arguments, rank)
    log = (arguments.out / "log.jsonl").open("a") if rank == 0 else None

    def say(**values: Any) -> None:
        if log is not None:
            log.write(json.dumps({"at": time.strftime("%H:%M:%S"), **values}) + "\n")
            log.flush()

    dev = dev_packs(trainer.reader) if rank == 0 else {}
    dev_match = dev_match_packs(trainer.reader, trainer.pools()) if rank == 0 else {}

    def look() -> None:
        for name, some in dev.items():
            say(dev=name, step=trainer.step, **{k: round(v, 4) for k, v in trainer.evaluate(some).items()})
        for name, some in dev_match.items():
            say(match=name, step=trainer.step, **{k: round(v, 4) for k, v in trainer.evaluate_match(some).items()})

    epoch, position = trainer.restore()
    claims = dist.PrefixStore(f"run-{trainer.step}", store)
    saved = evaluated = time.monotonic()
    started = time.monotonic()
    while epoch < arguments.epochs:
        packs = trainer.epoch_packs(epoch)
        total = arguments.steps or arguments.epochs * -(-len(packs) // arguments.packs)
        say(epoch=epoch, packs=len(packs), nodes=sum(len(p.ids) for p in packs), steps=total)
        while position < len(packs):
            chosen = packs[position : position + arguments.packs]
            began = time.monotonic()
            loss, norm = trainer.train_step(chosen, claims, total)
            position += len(chosen)
            nodes = sum(len(p.ids) for p in chosen)
            say(
                step=trainer.step,
                loss=round(loss, 4),
                norm=round(norm, 3),
                s=round(time.monotonic() - began, 2),
                nodes=nodes,
                minutes=round((time.monotonic() - started) / 60, 1),
            )
            if rank == 0 and time.monotonic() - saved > 120:
                trainer.save(epoch, position)
                saved = time.monotonic()
            if rank == 0 and time.monotonic() - evaluated > arguments.evaluate * 60:
                look()
                evaluated = time.monotonic()
        epoch, position = epoch + 1, 0
        if rank == 0:
            trainer.save(epoch, 0)
            look()
            evaluated = time.monotonic()
    dist.barrier()


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parent / "data")
    parser.add_argument("--layer", type=int, default=11)
    parser.add_argument("--first-trained", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="length of the schedule; default: all epochs")
    parser.add_argument("--packs", type=int, default=3, help="packs a step")
    parser.add_argument("--slates", type=int, default=250)
    parser.add_argument("--few-tools", type=int, default=150, help="slates of one or two tools an epoch")
    parser.add_argument("--matches", type=int, default=400, help="packs an epoch of requests beside one tool each")
    parser.add_argument("--cuts", type=int, default=0, help="dialogues and public queries beside few tools an epoch")
    parser.add_argument("--init", type=Path, help="weights to begin with: another run's checkpoint")
    parser.add_argument("--focus", nargs="*", default=[], help="files of which every epoch has all packs")
    parser.add_argument("--epoch-packs", type=int, default=0, help="packs of an epoch, a sample; default: all")
    parser.add_argument("--lr", type=float, default=4e-4)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--average", type=float, default=0.98, help="decay of the weights' running mean, a step")
    parser.add_argument("--dropout", type=float, default=0.05)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--nice", type=int, default=5, help="how much workers after the first give way")
    parser.add_argument("--evaluate", type=float, default=20.0, help="minutes between evaluations")
    parser.add_argument("--port", type=int, default=29511)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.multiprocessing.spawn(work, (arguments,), nprocs=arguments.workers)


if __name__ == "__main__":
    main()
