"""A Gemma 3 of 7 small blocks as a Hugging Face folder, a PEFT adapter for it, and its arithmetic in NumPy.

`tests/isolated/tiny_gemma_transformers.py` holds this against transformers and PEFT themselves; it stands in for them
where PyTorch is not installed. Block 6 of 7 is global, the window is 16 tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

F32 = npt.NDArray[np.float32]
WIDTH, INNER, HEADS, HEAD_DIM, LAYERS, WINDOW, EPS = 64, 96, 2, 32, 7, 16, 1e-6
CONTROLS = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
LETTERS = "▁abcdefghijklmnopqrstuvwxyzABC.,?"
MERGES = (
    ("t", "h"),
    ("th", "e"),
    ("▁", "the"),
    ("i", "n"),
    ("a", "n"),
    ("an", "d"),
    ("▁", "a"),
    ("▁", "and"),
    ("r", "e"),
)
PIECES = [*CONTROLS, "\n", *(f"<0x{i:02X}>" for i in range(256)), *LETTERS, *("".join(m) for m in MERGES)]
PROJECTIONS = {
    "self_attn.q_proj": (HEADS * HEAD_DIM, WIDTH),
    "self_attn.k_proj": (HEAD_DIM, WIDTH),
    "self_attn.v_proj": (HEAD_DIM, WIDTH),
    "self_attn.o_proj": (WIDTH, HEADS * HEAD_DIM),
    "mlp.gate_proj": (INNER, WIDTH),
    "mlp.up_proj": (INNER, WIDTH),
    "mlp.down_proj": (WIDTH, INNER),
}
NORMS = {
    "input_layernorm": WIDTH, "post_attention_layernorm": WIDTH, "pre_feedforward_layernorm": WIDTH,
    "post_feedforward_layernorm": WIDTH, "self_attn.q_norm": HEAD_DIM, "self_attn.k_norm": HEAD_DIM,
}  # fmt: skip
CONFIG = {
    "model_type": "gemma3_text", "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": 1, "head_dim": HEAD_DIM, "query_pre_attn_scalar": HEAD_DIM,
    "sliding_window": WINDOW, "max_position_embeddings": 512, "rms_norm_eps": EPS, "vocab_size": len(PIECES),
    "rope_parameters": {"full_attention": {"rope_theta": 1e6, "rope_type": "default"},
                        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"}},
    "layer_types": ["full_attention" if i == 5 else "sliding_attention" for i in range(LAYERS)],
    "bos_token_id": 2, "eos_token_id": [1, 5], "pad_token_id": 0,
}  # fmt: skip


def tensors() -> dict[str, F32]:
    """The same random weights every time, as transformers names and stores them."""
    rng = np.random.default_rng(5)
    found = {"model.embed_tokens.weight": rng.normal(0, 0.1, (len(PIECES), WIDTH))}
    found["model.norm.weight"] = rng.normal(0, 0.3, WIDTH)
    for i in range(LAYERS):
        for name, shape in PROJECTIONS.items():
            found[f"model.layers.{i}.{name}.weight"] = rng.normal(0, 0.2, shape)
        for name, size in NORMS.items():
            found[f"model.layers.{i}.{name}.weight"] = rng.normal(0, 0.3, size)
    return {name: values.astype(np.float32) for name, values in found.items()}


def tokenizer_json() -> dict[str, Any]:
    """As Gemma's: BPE with bytes to fall back on, spaces as ▁."""
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": text != "\n"}
            for i, text in enumerate([*CONTROLS, "\n"])
        ],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
            "vocab": {text: i for i, text in enumerate(PIECES)}, "merges": [list(pair) for pair in MERGES],
        },
    }  # fmt: skip


def write_base(folder: Path, *, shards: int = 1, bfloat16: bool = False, **config: Any) -> None:
    """config: fields of config.json that differ."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<bos>", "eos_token": {"content": "<eos>"}, "chat_template": "{{ messages }}"})
    )
    arrays = tensors()
    if bfloat16:
        write_bfloat16(folder / "model.safetensors", arrays)
    elif shards == 1:
        save_file(arrays, folder / "model.safetensors")
    else:
        names, places = sorted(arrays), {}
        for k in range(shards):
            file = f"model-{k + 1:05d}-of-{shards:05d}.safetensors"
            save_file({name: arrays[name] for name in names[k::shards]}, folder / file)
            places |= dict.fromkeys(names[k::shards], file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def write_bfloat16(path: Path, arrays: Mapping[str, F32]) -> None:
    """The upper halves of the values, which NumPy has no type for."""
    header, data = {}, bytearray()
    for name, values in arrays.items():
        raw = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
        header[name] = {
            "dtype": "BF16", "shape": list(values.shape), "data_offsets": [len(data), len(data) + len(raw)],
        }  # fmt: skip
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def adapter_tensors(ranks: Mapping[str, int], head: str = "") -> dict[str, F32]:
    """ranks: projection to its rank, in every block. head: the name of a head in modules_to_save, or none."""
    rng = np.random.default_rng(6)
    found: dict[str, Any] = {}
    for i in range(LAYERS):
        for name, rank in ranks.items():
            out, width = PROJECTIONS[name]
            root = f"base_model.model.model.layers.{i}.{name}"
            found[f"{root}.lora_A.weight"] = rng.normal(0, 0.2, (rank, width))
            found[f"{root}.lora_B.weight"] = rng.normal(0, 0.2, (out, rank))
    if head:
        found[f"base_model.model.{head}.weight"] = rng.normal(size=(4, WIDTH))
    return {name: values.astype(np.float32) for name, values in found.items()}


def write_adapter(folder: Path, arrays: Mapping[str, F32], **config: Any) -> None:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8} | config))
    save_file(dict(arrays), folder / "adapter_model.safetensors")


def with_lora(weights: Mapping[str, F32], arrays: Mapping[str, F32], scales: Mapping[str, float]) -> dict[str, F32]:
    """W + scale B A; scales: projection to its factor."""
    merged = dict(weights)
    for i in range(LAYERS):
        for name, scale in scales.items():
            root = f"base_model.model.model.layers.{i}.{name}"
            update = arrays[f"{root}.lora_B.weight"] @ arrays[f"{root}.lora_A.weight"]
            merged[f"model.layers.{i}.{name}.weight"] = weights[f"model.layers.{i}.{name}.weight"] + scale * update
    return merged


def _norm(x: F32, weight: F32) -> F32:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * (1 + weight)


def _rotate(x: F32, base: float) -> F32:
    angle = np.arange(x.shape[-2])[:, None] * base ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = (np.concatenate([f(angle)] * 2, axis=-1) for f in (np.cos, np.sin))
    half = HEAD_DIM // 2
    return x * cos + np.concatenate([-x[..., half:], x[..., :half]], axis=-1) * sin


def forward(weights: Mapping[str, F32], ids: list[int], n_layers: int = LAYERS) -> F32:
    """(WIDTH,): the last token's state after the final norm."""
    n = len(ids)
    x = weights["model.embed_tokens.weight"][ids].astype(np.float64) * WIDTH**0.5
    distance = np.arange(n)[:, None] - np.arange(n)[None, :]
    for i in range(n_layers):
        w = {name: weights[f"model.layers.{i}.{name}.weight"] for name in (*PROJECTIONS, *NORMS)}
        is_global = (i + 1) % 6 == 0
        y = _norm(x, w["input_layernorm"])
        q = (y @ w["self_attn.q_proj"].T).reshape(n, HEADS, HEAD_DIM).swapaxes(0, 1)
        k = (y @ w["self_attn.k_proj"].T)[None]
        base = 1e6 if is_global else 1e4
        q = _rotate(_norm(q, w["self_attn.q_norm"]), base) * HEAD_DIM**-0.5
        k = _rotate(_norm(k, w["self_attn.k_norm"]), base)
        seen = (distance >= 0) & (is_global | (distance < WINDOW))
        scores = np.where(seen, q @ k.swapaxes(1, 2), -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (p / p.sum(-1, keepdims=True)) @ (y @ w["self_attn.v_proj"].T)
        mixed = mixed.swapaxes(0, 1).reshape(n, HEADS * HEAD_DIM) @ w["self_attn.o_proj"].T
        x = x + _norm(mixed, w["post_attention_layernorm"])
        y = _norm(x, w["pre_feedforward_layernorm"])
        gate = y @ w["mlp.gate_proj"].T
        gate = 0.5 * gate * (1 + np.tanh((2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
        y = (gate * (y @ w["mlp.up_proj"].T)) @ w["mlp.down_proj"].T
        x = x + _norm(y, w["post_feedforward_layernorm"])
    return np.asarray(_norm(x, weights["model.norm.weight"])[-1], np.float32)
