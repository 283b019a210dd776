"""The lower blocks of Gemma 3 in PyTorch, over tries, with LoRA on every projection. For training only.

Weights are those of the GGUF file that ships, dequantised. Written out rather than taken from transformers because the
attention mask of a trie, the frozen lower blocks and the missing vocabulary product are what make a CPU enough.
`python -m convert.gemma_torch GGUF` compares it with llama.cpp's own hidden states.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import gguf
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from convert.gate_trie import Pack

N_EMBD: Final = 640
N_HEAD: Final = 4
HEAD_DIM: Final = 256
WINDOW: Final = 512
GLOBAL_EVERY: Final = 6
ROPE_GLOBAL: Final = 1_000_000.0
ROPE_LOCAL: Final = 10_000.0
EPS: Final = 1e-6
STRIP_ROWS: Final = 128
PROJECTIONS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_GGUF: Final = dict(
    zip(PROJECTIONS, ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"), strict=True)
)


def read_weights(path: Path, n_layers: int) -> tuple[dict[str, Tensor], Any]:
    """Float32 tensors of the first ``n_layers`` blocks by GGUF name, and the embedding tensor still quantised."""
    reader = gguf.GGUFReader(path)
    wanted: dict[str, Tensor] = {}
    embedding = None
    for tensor in reader.tensors:
        if tensor.name == "token_embd.weight":
            embedding = tensor
        elif tensor.name.startswith("blk.") and int(tensor.name.split(".")[1]) < n_layers:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            wanted[tensor.name] = torch.from_numpy(np.array(values, dtype=np.float32))
    return wanted, embedding


class Embedding:
    """Rows of the quantised table, dequantised when asked for."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __call__(self, ids: np.ndarray) -> Tensor:
        unique, inverse = np.unique(ids, return_inverse=True)
        rows = gguf.quants.dequantize(np.ascontiguousarray(self._tensor.data[unique]), self._tensor.tensor_type)
        return torch.from_numpy(np.array(rows, dtype=np.float32)[inverse]) * math.sqrt(N_EMBD)


class LoraLinear(nn.Module):
    """y = x Wᵀ + scale · x' Aᵀ Bᵀ; W frozen, of the dtype that products are computed in; A and B float32."""

    def __init__(self, weight: Tensor, rank: int, scale: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
        self.scale, self.rank, self.dtype = scale, rank, dtype
        if rank:
            self.lora_A = nn.Parameter(torch.empty(rank, weight.shape[1]))
            nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
            self.lora_B = nn.Parameter(torch.zeros(weight.shape[0], rank))

    def forward(self, x: Tensor, dropped: Tensor) -> Tensor:
        """X and ``dropped`` (x' above: x behind the dropout, one draw for the projections of one input) (T, in)."""
        y = functional.linear(x, self.weight)
        if self.rank:
            low = functional.linear(dropped, self.lora_A.to(self.dtype))
            y = y + functional.linear(low, (self.lora_B * self.scale).to(self.dtype))
        return y


class Strip(NamedTuple):
    """Attention of some neighbouring nodes: rows ``start:end``, the columns that any of them sees, and the additive
    mask (end - start, columns). In a trie neighbours share most ancestors, so there are few columns.
    """

    start: int
    end: int
    columns: Tensor
    mask: Tensor


class Geometry:
    """What every block needs of one pack: attention strips, and rotations (T, HEAD_DIM)."""

    def __init__(self, pack: Pack) -> None:
        seen = pack.mask()
        near = (pack.position[:, None] - pack.position[None, :]) < WINDOW
        self.strips_global = self._strips(seen)
        self.strips_local = self._strips(seen & near)
        position = torch.from_numpy(pack.position).long()
        self.rope_global = self._rope(position, ROPE_GLOBAL)
        self.rope_local = self._rope(position, ROPE_LOCAL)

    @staticmethod
    def _strips(seen: np.ndarray) -> list[Strip]:
        strips = []
        for start in range(0, len(seen), STRIP_ROWS):
            rows = seen[start : start + STRIP_ROWS]
            columns = np.flatnonzero(rows.any(axis=0))
            mask = np.where(rows[:, columns], np.float32(0), np.float32("-inf"))
            strips.append(Strip(start, start + len(rows), torch.from_numpy(columns), torch.from_numpy(mask)))
        return strips

    @staticmethod
    def _rope(position: Tensor, base: float) -> tuple[Tensor, Tensor]:
        inverse = base ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
        angle = position.double()[:, None] * inverse[None, :]
        angle = torch.cat([angle, angle], dim=-1)
        return angle.cos().float(), angle.sin().float()


def rms_norm(x: Tensor, weight: Tensor | None) -> Tensor:
    """X / rms(x), times ``weight`` (in the GGUF file the norm offset of 1 is already added)."""
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    return y if weight is None else y * weight


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of (heads, T, HEAD_DIM)."""
    cos, sin = rope
    half = HEAD_DIM // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos + turned * sin


def attend(q: Tensor, k: Tensor, v: Tensor, strip: Strip) -> Tensor:
    """(rows, N_HEAD * HEAD_DIM) of one strip; q (N_HEAD, T, HEAD_DIM), k and v (T, HEAD_DIM), one key head for all."""
    rows, width = strip.end - strip.start, len(strip.columns)
    queries = q[:, strip.start : strip.end].reshape(N_HEAD * rows, HEAD_DIM)
    scores = (queries @ k.index_select(0, strip.columns).T).view(N_HEAD, rows, width) + strip.mask
    weights = torch.softmax(scores, dim=-1).to(v.dtype).view(N_HEAD * rows, width)
    mixed = weights @ v.index_select(0, strip.columns)
    return mixed.view(N_HEAD, rows, HEAD_DIM).transpose(0, 1).reshape(rows, -1)


class Block(nn.Module):
    """One transformer block."""

    def __init__(
        self,
        index: int,
        weights: Mapping[str, Tensor],
        rank: int,
        scale: float,
        dropout: float,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.is_global = (index + 1) % GLOBAL_EVERY == 0
        self.dropout, self.dtype = dropout, dtype
        for name in PROJECTIONS:
            setattr(self, name, LoraLinear(weights[f"blk.{index}.{_GGUF[name]}.weight"], rank, scale, dtype))
        self.norms = {
            name: weights[f"blk.{index}.{name}.weight"]
            for name in ("attn_norm", "attn_q_norm", "attn_k_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
        }

    def forward(self, x: Tensor, geometry: Geometry) -> Tensor:
        """(T, N_EMBD) float32, as ``x``: the residual stream, norms, rotations and softmax stay float32."""
        n = x.shape[0]
        norms = self.norms
        strips = geometry.strips_global if self.is_global else geometry.strips_local
        rope = geometry.rope_global if self.is_global else geometry.rope_local
        y = self._both(rms_norm(x, norms["attn_norm"]))
        q = self.q_proj(*y).float().view(n, N_HEAD, HEAD_DIM).transpose(0, 1)
        k = self.k_proj(*y).float().view(n, 1, HEAD_DIM).transpose(0, 1)
        v = self.v_proj(*y)
        q = (rotate(rms_norm(q, norms["attn_q_norm"]), rope) * HEAD_DIM**-0.5).to(self.dtype)
        k = rotate(rms_norm(k, norms["attn_k_norm"]), rope).to(self.dtype)
        mixed = torch.cat([attend(q, k[0], v, strip) for strip in strips])
        x = x + rms_norm(self.o_proj(*self._both(mixed)).float(), norms["post_attention_norm"])
        y = self._both(rms_norm(x, norms["ffn_norm"]))
        hidden = functional.gelu(self.gate_proj(*y), approximate="tanh") * self.up_proj(*y)
        return x + rms_norm(self.down_proj(*self._both(hidden)).float(), norms["post_ffw_norm"])

    def _both(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What the projections of one input read: it, and it behind the dropout."""
        x = x.to(self.dtype)
        if not (self.dropout and self.training):
            return x, x
        # Whole dimensions at once: a draw for every element took a seventh of a step.
        kept = functional.dropout(torch.ones(x.shape[1], dtype=self.dtype), self.dropout)
        return x, x * kept


class Trunk(nn.Module):
    """Blocks 0 to ``layer``; those below ``first_trained`` are frozen and their output may be cached by the caller."""

    def __init__(
        self,
        path: Path,
        layer: int,
        first_trained: int,
        rank: int = 16,
        alpha: float = 32.0,
        dropout: float = 0.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        weights, table = read_weights(path, layer + 1)
        self.embedding = Embedding(table)
        self.first_trained = first_trained
        self.layer = layer
        self.blocks = nn.ModuleList(
            Block(i, weights, rank if i >= first_trained else 0, alpha / rank, dropout, dtype) for i in range(layer + 1)
        )

    @torch.no_grad()
    def lower(self, pack: Pack, geometry: Geometry) -> Tensor:
        """(T, N_EMBD): what the frozen blocks make of a pack."""
        x = self.embedding(pack.ids)
        for block in self.blocks[: self.first_trained]:
            x = block(x, geometry)
        return x

    def upper(self, x: Tensor, geometry: Geometry) -> Tensor:
        """(T, N_EMBD): the trained blocks on what ``lower`` gave."""
        for block in self.blocks[self.first_trained :]:
            x = block(x, geometry)
        return x


def check(path: Path, layer: int = 11) -> float:
    """Least cosine between this network and llama.cpp at ``layer`` on some dialogues; prints each."""
    import json

    from convert.gate_data import read_dialogues
    from convert.gate_trie import pack, target_of
    from convert.lora_corpus import reader_of
    from whetherman_edge.backbone.llama import Context, Network

    network = Network(path)
    reader = reader_of(network, tools_max=1_536, dialogue_max=1_024)
    items = read_dialogues("gate_dev2")[:40]
    examples = [
        reader.read(i["id"], json.dumps(i["request"]).encode(), target_of(i["gold"], i["accept"]), 1.0) for i in items
    ]
    context = Context(network, layer=layer, n_cells=4_096, n_seq=1, chunk=256, n_threads=1)
    trunk = Trunk(path, layer, layer + 1).eval()
    least = 1.0
    for packed in pack(examples)[:4]:
        geometry = Geometry(packed)
        states = trunk.lower(packed, geometry)[packed.readout].numpy()
        for example, mine in zip(packed.examples, states, strict=True):
            context.truncate(0, 0)
            theirs = context.decode(0, example.ids, 0, (len(example.ids) - 1,))[0]
            cosine = float(mine @ theirs / np.linalg.norm(mine) / np.linalg.norm(theirs))
            least = min(least, cosine)
            print(f"{example.key}: {len(example.ids)} tokens, cosine {cosine:.6f}")
    context.close()
    network.close()
    return least


if __name__ == "__main__":
    import sys

    print(f"least cosine {check(Path(sys.argv[1])):.6f} (llama.cpp multiplies in 8 bits, this in 32)")
