"""A PEFT LoRA folder, read and checked: what cannot be merged exactly is refused by name.

A = (r, in), B = (out, r); the weight grows by scale * B A, with scale = alpha / r, or alpha / sqrt(r) when
rank-stabilised, and rank and alpha of their own for modules that ``rank_pattern`` and ``alpha_pattern`` match.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from convert.hf_folder import BLOCK
from convert.shards import Shard, read_json
from whetherman_edge.errors import ArtifactError

F32 = npt.NDArray[np.float32]
CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
HEADS: Final = ("score", "classifier", "head")
"""Names people give a classification head in ``modules_to_save``."""
ALTERED_BASE: Final = ("pissa", "olora", "corda", "loftq", "milora")
"""Ways to start training that change the base's own weights: their adapters fit no unchanged base."""
_LORA = re.compile(
    r"(?:base_model\.model\.)?(?:model\.)?(?:language_model\.)?(?:model\.)?"
    r"layers\.(\d+)\.((?:self_attn|mlp)\.(\w+_proj))\.lora_([AB])(?:\.default)?\.weight"
)
_HEAD = re.compile(
    rf"(?:base_model\.model\.)?(?:model\.)?({'|'.join(HEADS)})(?:\.modules_to_save(?:\.default)?)?\.(weight|bias)"
)


class Pair(msgspec.Struct, frozen=True):
    """One module's update. a: (r, in), b: (out, r), float32; ``alpha`` and ``scale`` are the module's own."""

    layer: int
    projection: str
    a: F32
    b: F32
    alpha: float
    scale: float

    @property
    def tensor(self) -> str:
        """Its GGUF tensor."""
        group = "mlp" if f"mlp.{self.projection}" in BLOCK else "self_attn"
        return f"blk.{self.layer}.{BLOCK[f'{group}.{self.projection}']}.weight"


class Head(msgspec.Struct, frozen=True):
    """A classification head. weight: (classes, n_embd), bias: (classes,), zeros when there is none."""

    name: str
    weight: F32
    bias: F32


class Adapter(msgspec.Struct, frozen=True):
    """``base_name``: what the adapter says it was trained on, or ""."""

    pairs: list[Pair]
    head: Head | None
    rslora: bool
    base_name: str


def read_adapter(folder: Path) -> Adapter:
    """Raises ArtifactError for a broken folder or a kind of adapter that cannot be merged."""
    config = read_json(folder / CONFIG)
    _refuse(config)
    if not (folder / WEIGHTS).is_file():
        pickled = (
            " (adapter_model.bin is a pickle, which is not read)" if (folder / "adapter_model.bin").is_file() else ""
        )
        raise ArtifactError(f"{folder}: expected {WEIGHTS}, there is none{pickled}")
    shard = Shard(folder / WEIGHTS)
    halves: dict[tuple[int, str, str], dict[str, F32]] = {}
    head: dict[str, F32] = {}
    head_name = ""
    for name in sorted(shard.entries):
        if found := _LORA.fullmatch(name):
            key = (int(found[1]), found[2], found[3])
            halves.setdefault(key, {})[found[4]] = _finite(shard, name)
        elif found := _HEAD.fullmatch(name):
            head_name, head[found[2]] = found[1], _finite(shard, name)
        else:
            raise ArtifactError(f"{WEIGHTS}: {_why(name)}")
    if not halves:
        raise ArtifactError(f"{WEIGHTS}: expected LoRA tensors of blocks, there are none")
    pairs = [_pair(config, key, both) for key, both in sorted(halves.items())]
    return Adapter(
        pairs, _head(head_name, head), bool(config.get("use_rslora")), str(config.get("base_model_name_or_path") or "")
    )


def _refuse(config: Mapping[str, Any]) -> None:
    kind = str(config.get("peft_type", "LORA")).upper()
    if kind != "LORA":
        raise ArtifactError(f"{CONFIG}: a {kind} adapter cannot be merged here; expected LORA")
    for name, what in (
        ("use_dora", "DoRA (weight-decomposed LoRA)"),
        ("use_qalora", "QALoRA"),
        ("lora_bias", "a bias inside LoRA"),
        ("fan_in_fan_out", "fan_in_fan_out"),
        ("trainable_token_indices", "trained token embeddings"),
        ("target_parameters", "target_parameters"),
        ("alora_invocation_tokens", "activated LoRA"),
    ):
        if config.get(name):
            raise ArtifactError(f"{CONFIG}: {what} is not supported ({name}); expected plain LoRA on projections")
    if config.get("bias", "none") != "none":
        raise ArtifactError(f"{CONFIG}: trained biases are not supported (bias={config['bias']!r}); expected 'none'")
    start = str(config.get("init_lora_weights", "")).lower()
    if start.startswith(ALTERED_BASE):
        raise ArtifactError(
            f"{CONFIG}: init_lora_weights={start!r} changed the base's weights; convert it to plain LoRA"
        )
    others = sorted(set(config.get("modules_to_save") or []) - set(HEADS))
    if others:
        raise ArtifactError(f"{CONFIG}: modules_to_save holds {others[0]!r}; expected a head named {', '.join(HEADS)}")


def _why(name: str) -> str:
    for mark, what in (
        ("lora_magnitude_vector", "DoRA (weight-decomposed LoRA) is not supported"),
        ("lora_embedding", "LoRA on embeddings is not supported"),
        ("embed_tokens", "trained embeddings are not supported"),
        ("lm_head", "a trained vocabulary head is not supported"),
        (".bias", "trained biases are not supported"),
    ):
        if mark in name:
            return f"{what} ({name!r})"
    return f"unknown tensor {name!r}"


def _finite(shard: Shard, name: str) -> F32:
    values = shard.rows(name)
    if not np.isfinite(values).all():
        raise ArtifactError(f"{WEIGHTS}: {name!r} holds values that are not finite")
    return values


def _pattern(patterns: Mapping[str, Any] | None, module: str, default: float) -> float:
    """As PEFT matches: a key is a regular expression for the end of the module's path; ``^`` anchors it."""
    for key, value in (patterns or {}).items():
        regex = key if key.startswith("^") else rf"(?:.*\.)?(?:{key})$"
        if re.match(regex, module):
            return float(value)
    return default


def _pair(config: Mapping[str, Any], key: tuple[int, str, str], both: Mapping[str, F32]) -> Pair:
    layer, path, projection = key
    module = f"model.layers.{layer}.{path}"
    if path not in BLOCK:
        raise ArtifactError(f"{WEIGHTS}: unknown module {module!r}")
    a, b = both.get("A"), both.get("B")
    r = int(_pattern(config.get("rank_pattern"), module, float(config.get("r", 8))))
    if a is None or b is None or a.ndim != 2 or b.ndim != 2 or a.shape[0] != r or b.shape[1] != r:
        raise ArtifactError(f"{WEIGHTS}: {module} has no lora_A and lora_B of rank {r}, which {CONFIG} gives it")
    alpha = _pattern(config.get("alpha_pattern"), module, float(config.get("lora_alpha", 8)))
    return Pair(layer, projection, a, b, alpha, alpha / (r**0.5 if config.get("use_rslora") else r))


def _head(name: str, arrays: Mapping[str, F32]) -> Head | None:
    if not arrays:
        return None
    weight = arrays.get("weight")
    if weight is None or weight.ndim != 2:
        raise ArtifactError(f"{WEIGHTS}: expected the head {name!r} to have a weight of two dimensions")
    bias = arrays.get("bias", np.zeros(len(weight), np.float32))
    if bias.shape != (len(weight),):
        raise ArtifactError(f"{WEIGHTS}: the bias of {name!r} is {bias.shape}, expected ({len(weight)},)")
    return Head(name, weight, bias)


def save_flat(adapter: Adapter, path: Path) -> int:
    """Write what ``derive`` reads: every pair at one rank (padded with zeros), its scale in B. Returns that rank.

    float32, so nothing is lost; with alpha = r the factor that ``derive`` applies is 1.
    """
    rank = max(len(pair.a) for pair in adapter.pairs)
    arrays: dict[str, F32] = {}
    for pair in adapter.pairs:
        name, spare = f"layers.{pair.layer}.{pair.projection}", rank - len(pair.a)
        arrays[f"{name}.lora_A"] = np.pad(pair.a, ((0, spare), (0, 0)))
        arrays[f"{name}.lora_B"] = np.pad(pair.b * np.float32(pair.scale), ((0, 0), (0, spare)))
    save_file(arrays, path)
    return rank


def write_lora_gguf(adapter: Adapter, path: Path) -> None:
    """A GGUF LoRA adapter for llama.cpp to apply at run time. Not atomic.

    llama.cpp knows one alpha and applies alpha / r per tensor: the scale stands in B, alpha is each tensor's rank only
    where all ranks are equal, so B carries scale * r / alpha, alpha being the largest rank.
    """
    import gguf

    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_type("adapter")
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    alpha = max(len(pair.a) for pair in adapter.pairs)
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(alpha))
    for pair in adapter.pairs:
        writer.add_tensor(f"{pair.tensor}.lora_a", pair.a)
        writer.add_tensor(f"{pair.tensor}.lora_b", pair.b * np.float32(pair.scale * len(pair.a) / alpha))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
