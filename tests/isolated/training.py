"""A small training run on the real base, twice and with a restart in the middle: the same weights to the last bit.

python -m tests.isolated.training GGUF     (extra: convert; about two CPU minutes)

One worker, four steps over two packs of dialogues. Fails where the second run or the restarted one ends with other
weights, where the loss does not fall, or where the running mean is not between the first weights and the last.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

N_STEPS = 4
N_DIALOGUES = 24
PORT = 29_541


def main() -> int:
    import torch
    import torch.distributed as dist

    from convert.gate_data import read_dialogues
    from convert.gate_trie import pack
    from convert.lora_corpus import example_of
    from convert.train_lora import Trainer

    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("gguf", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", PORT, 1, True, timedelta(minutes=10))
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)

    def trainer_in(folder: Path) -> Trainer:
        options = argparse.Namespace(
            gguf=given.gguf, out=folder, init=None, layer=11, first_trained=4, dropout=0.05, seed=3, lr=4e-4,
            warmup=1, average=0.98,
        )  # fmt: skip
        return Trainer(options, 0)

    def run(trainer: Trainer, steps: int, claims: str) -> list[float]:
        items = read_dialogues("gate_train2")[:N_DIALOGUES]
        packs = pack([example_of(trainer.reader, item) for item in items])
        claimed = dist.PrefixStore(claims, store)
        return [trainer.train_step(packs, claimed, 1_000)[0] for _ in range(steps)]

    def weights(trainer: Trainer) -> Mapping[str, Any]:
        return {name: p.detach().clone() for name, p in trainer.trained}

    def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
        return [name for name in a if not torch.equal(a[name], b[name])]

    faults = []
    with tempfile.TemporaryDirectory() as name:
        first = trainer_in(Path(name))
        begun = weights(first)
        losses = run(first, N_STEPS // 2, "a")
        first.save(0, N_STEPS // 2)
        losses += run(first, N_STEPS - N_STEPS // 2, "b")
        whole = weights(first)
        restarted = trainer_in(Path(name))
        if restarted.restore() != (0, N_STEPS // 2):
            faults.append("the restart does not begin where the run stopped")
        run(restarted, N_STEPS - N_STEPS // 2, "c")
    second = trainer_in(Path())
    again = run(second, N_STEPS, "d")
    faults += [f"restart: {name} differs" for name in differing(whole, weights(restarted))]
    faults += [f"second run: {name} differs" for name in differing(whole, weights(second))]
    if again != losses or losses[-1] >= losses[0]:
        faults.append(f"losses: expected the same falling ones twice, got {losses} and {again}")
    for (name, last), mean in zip(whole.items(), first.mean, strict=True):
        if not torch.equal(begun[name], last) and torch.equal(mean, last):
            faults.append(f"{name}: the running mean is the last value")
    print("\n".join(faults) or f"losses {[round(x, 4) for x in losses]}: the same twice and after a restart")
    dist.destroy_process_group()
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
