"""transformers + PEFT against what merge_lora writes, run by llama.cpp: cosine of the last token's final state.

python -m convert.check_numerics BASE.gguf [--prompts 50]      (needs torch, transformers, peft, llama-cpp-python)

(a) random weights of the exact Gemma 3 270M shape and a random rank-stabilised LoRA on every projection, in two shards;
(b) the real base: GGUF, dequantised folder, GGUF again; (c) merged against the adapter applied at run time.
Prompts are random token ids, control tokens among them, up to 1,600 tokens: three sliding windows.
"""

from __future__ import annotations

import argparse
import ctypes
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from convert.gguf_folder import write_folder
from convert.merge_lora import merge
from whetherman_edge.backbone.llama import Context, Network


def prompts(n: int, n_vocab: int) -> list[list[int]]:
    """Token ids, each starting with <bos> (2); every fifth prompt is long."""
    rng = np.random.default_rng(7)
    found = []
    for i in range(n):
        length = int(rng.integers(1_000, 1_600)) if i % 5 == 4 else int(rng.integers(4, 300))
        length = 1_600 if i == n - 1 else length
        ids = rng.integers(238, n_vocab, length)
        ids[rng.random(length) < 0.05] = rng.choice([1, 105, 106, 107])
        found.append([2, *ids.tolist()])
    return found


def by_llama(path: Path, tokens: list[list[int]], adapter: Path | None = None) -> np.ndarray:
    """(n, n_embd): states after the final norm."""
    network = Network(path)
    context = Context(network, layer=network.n_layer, n_cells=2_048, n_seq=1, chunk=256, n_threads=1)
    if adapter is not None:
        lib = network.lib
        handle = lib.llama_adapter_lora_init(network.handle, str(adapter).encode())
        assert handle, f"llama.cpp did not take {adapter.name}"
        _apply(lib, context.handle, handle)
    rows = []
    for ids in tokens:
        context.truncate(0, 0)
        rows.append(context.decode(0, ids, 0, (len(ids) - 1,))[0])
    context.close()
    network.close()
    return np.array(rows)


def _apply(lib: Any, context: Any, handle: Any) -> None:
    """Older llama.cpp sets one adapter at a time, newer ones all at once."""
    if hasattr(lib, "llama_set_adapters_lora"):
        adapters = (type(handle) * 1)(handle)
        status = lib.llama_set_adapters_lora(context, adapters, 1, (ctypes.c_float * 1)(1.0))
    else:
        status = lib.llama_set_adapter_lora(context, handle, 1.0)
    assert status == 0, status


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


def random_model(folder: Path, adapter: Path, tokenizer: Path) -> Any:
    """Saves the base in shards and the adapter; returns the adapted model."""
    import shutil

    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(3)
    torch.set_num_threads(1)
    config = Gemma3TextConfig(
        vocab_size=262_144, hidden_size=640, intermediate_size=2_048, num_hidden_layers=18, num_attention_heads=4,
        num_key_value_heads=1, head_dim=256, sliding_window=512, query_pre_attn_scalar=256,
        max_position_embeddings=32_768, initializer_range=0.04,
    )  # fmt: skip
    model = Gemma3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("norm.weight"):
                value.normal_(0, 0.3)
    model.save_pretrained(folder, max_shard_size="600MB")
    for name in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder / name)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    lora = LoraConfig(r=16, lora_alpha=8, use_rslora=True, target_modules=names, rank_pattern={"layers.3.*.q_proj": 8})
    adapted = get_peft_model(model, lora).eval()
    with torch.no_grad():
        for name, value in adapted.named_parameters():
            if "lora_B" in name:
                value.normal_(0, 0.02)
    adapted.save_pretrained(adapter)
    return adapted


def by_transformers(model: Any, tokens: list[list[int]]) -> np.ndarray:
    import torch

    inner = model.get_base_model().model
    with torch.no_grad():
        return np.array([inner(input_ids=torch.tensor([ids])).last_hidden_state[0, -1].numpy() for ids in tokens])


def report(what: str, values: np.ndarray) -> None:
    print(f"{what}: least cosine {values.min():.6f}, median {np.median(values):.6f}, n {len(values)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("base", type=Path)
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--kinds", nargs="+", default=["f16", "q8_0", "q4_0", "q4_k_m"], help="f16 among them")
    options = parser.parse_args()
    tokens = prompts(options.prompts, 262_144)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        write_folder(options.base, scratch / "real")
        model = random_model(scratch / "random", scratch / "adapter", scratch / "real")
        theirs = by_transformers(model, tokens)
        del model
        ours = {}
        for kind in options.kinds:
            merge(scratch / "random", scratch / "adapter", scratch / f"{kind}.gguf", kind, None)
            ours[kind] = by_llama(scratch / f"{kind}.gguf", tokens)
            report(f"(a) transformers + PEFT, merged {kind}", cosines(ours[kind], theirs))
        from convert.hf_folder import HfFolder, write_gguf

        write_gguf(HfFolder(scratch / "random"), scratch / "plain.gguf", 18, "f16")
        applied = by_llama(scratch / "plain.gguf", tokens, scratch / "f16.lora.gguf")
        report("(c) merged f16, adapter applied at run time", cosines(ours["f16"], applied))
        write_gguf(HfFolder(scratch / "real"), scratch / "again.gguf", 18, "q8_0")
        again, base = by_llama(scratch / "again.gguf", tokens), by_llama(options.base, tokens)
        report("(b) real base (Q4_K_M), its dequantised folder as float32", cosines(again, base))
        _same_tensors(options.base, scratch / "again.gguf")


def _same_tensors(one: Path, other: Path) -> None:
    """Values, not bytes: norms differ by one rounding of w - 1 + 1."""
    import gguf

    a, b = ({t.name: t for t in gguf.GGUFReader(p).tensors} for p in (one, other))
    assert set(a) == set(b)
    worst = 0.0
    for name, tensor in a.items():
        x, y = (gguf.quants.dequantize(t.data, t.tensor_type).ravel() for t in (tensor, b[name]))
        worst = max(worst, float(np.abs(x - y).max() / np.abs(x).max()))
    print(f"(b) tensors: largest difference {worst:.2e} of each tensor's largest value", flush=True)


if __name__ == "__main__":
    main()
