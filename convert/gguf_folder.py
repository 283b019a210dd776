"""A GGUF of the gemma3 architecture dequantised into a Hugging Face folder, for training with other tools.

python -m convert.gguf_folder MODEL.gguf FOLDER

float32 safetensors (the embedding table as float16: it was 8 bits before), config.json, tokenizer.model. Norms lose the
offset of 1 that GGUF has added. `merge_lora` reads the folder again; check_numerics shows that nothing changes.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from convert.hf_folder import BLOCK
from convert.hf_tokenizer import SPECIALS, Vocabulary, model_bytes
from whetherman_edge.errors import ArtifactError


def write_folder(source: Path, folder: Path) -> None:
    """Atomic. Raises ArtifactError for a file that is no gemma3 GGUF, or a folder that exists already."""
    import gguf

    if folder.exists():
        raise ArtifactError(f"{folder}: expected a folder that does not exist yet")
    try:
        reader = gguf.GGUFReader(source)
        value = {name: field.contents() for name, field in reader.fields.items()}
    except OSError as exc:
        raise ArtifactError(f"{source.name}: cannot be read ({exc.strerror or exc})") from exc
    except Exception as exc:  # the reader raises ValueError, IndexError or KeyError, as the damage has it
        raise ArtifactError(f"{source.name}: expected a whole GGUF file, {exc}") from exc
    if value.get("general.architecture") != "gemma3":
        raise ArtifactError(f"{source.name}: expected the architecture gemma3")
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        module_of = {own: module for module, own in BLOCK.items()}
        arrays: dict[str, Any] = {}
        for tensor in reader.tensors:
            shape = tuple(int(n) for n in reversed(tensor.shape))
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
            if tensor.name == "token_embd.weight":
                arrays["model.embed_tokens.weight"] = values.astype(np.float16)
            elif tensor.name == "output_norm.weight":
                arrays["model.norm.weight"] = values - np.float32(1)
            else:
                _, layer, own, _ = tensor.name.split(".")
                module = module_of[own]
                arrays[f"model.layers.{layer}.{module}.weight"] = (
                    values - np.float32(1) if module.endswith("norm") else np.array(values, np.float32)
                )
        save_file(arrays, scratch / "model.safetensors", metadata={"format": "pt"})
        (scratch / "config.json").write_text(json.dumps(_config(value), indent=1) + "\n")
        _tokenizer(value, scratch)
        os.replace(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _config(value: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": value["gemma3.embedding_length"],
        "intermediate_size": value["gemma3.feed_forward_length"],
        "num_hidden_layers": value["gemma3.block_count"],
        "num_attention_heads": value["gemma3.attention.head_count"],
        "num_key_value_heads": value["gemma3.attention.head_count_kv"],
        "head_dim": value["gemma3.attention.key_length"],
        "query_pre_attn_scalar": value["gemma3.attention.key_length"],
        "sliding_window": value["gemma3.attention.sliding_window"],
        "max_position_embeddings": value["gemma3.context_length"],
        "rms_norm_eps": round(float(value["gemma3.attention.layer_norm_rms_epsilon"]), 9),
        "rope_theta": float(value["gemma3.rope.freq_base"]),
        "rope_local_base_freq": 10_000.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "vocab_size": len(value["tokenizer.ggml.tokens"]),
        "bos_token_id": value["tokenizer.ggml.bos_token_id"],
        "eos_token_id": value["tokenizer.ggml.eos_token_id"],
        "pad_token_id": value.get("tokenizer.ggml.padding_token_id", 0),
    }


def _tokenizer(value: dict[str, Any], folder: Path) -> None:
    tokens = value["tokenizer.ggml.tokens"]
    names = {"unk": "unknown", "pad": "padding"}
    ids = {
        name: i for name in SPECIALS if (i := value.get(f"tokenizer.ggml.{names.get(name, name)}_token_id")) is not None
    }
    vocabulary = Vocabulary(tokens, value["tokenizer.ggml.scores"], value["tokenizer.ggml.token_type"], ids)
    (folder / "tokenizer.model").write_bytes(model_bytes(vocabulary))
    config: dict[str, Any] = {f"{name}_token": tokens[i] for name, i in ids.items()}
    config["add_bos_token"] = bool(value.get("tokenizer.ggml.add_bos_token", True))
    if template := value.get("tokenizer.chat_template"):
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


if __name__ == "__main__":
    write_folder(Path(sys.argv[1]), Path(sys.argv[2]))
