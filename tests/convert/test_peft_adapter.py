"""PEFT folders that cannot be merged exactly are refused, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tests.convert.tiny_gemma as tiny
from convert.peft_adapter import read_adapter
from whetherman_edge.errors import ArtifactError

ONE = {"self_attn.q_proj": 4}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "PROMPT_TUNING"}, "PROMPT_TUNING"),
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "biases"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa"),
        ({"modules_to_save": ["embed_tokens"]}, "embed_tokens"),
        ({"trainable_token_indices": [1]}, "trained token embeddings"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"r": 8}, "rank 8"),
        ({"rank_pattern": {"q_proj": 2}}, "rank 2"),
    ],
)
def test_configurations(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    tiny.write_adapter(tmp_path / "a", tiny.adapter_tensors(ONE), **config)
    with pytest.raises(ArtifactError, match=message):
        read_adapter(tmp_path / "a")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector", "DoRA"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "embeddings"),
        ("base_model.model.lm_head.lora_A.weight", "vocabulary head"),
        ("base_model.model.model.layers.0.self_attn.q_proj.extra", "unknown tensor"),
        ("base_model.model.model.layers.0.mlp.q_proj.lora_A.weight", "unknown module"),
    ],
)
def test_tensors(tmp_path: Path, name: str, message: str) -> None:
    tiny.write_adapter(tmp_path / "a", tiny.adapter_tensors(ONE) | {name: np.zeros((4, 4), np.float32)})
    with pytest.raises(ArtifactError, match=message):
        read_adapter(tmp_path / "a")


def test_half_a_pair_values_that_are_not_finite_and_nothing(tmp_path: Path) -> None:
    arrays = tiny.adapter_tensors(ONE)
    name = "base_model.model.model.layers.2.self_attn.q_proj.lora_B.weight"
    tiny.write_adapter(tmp_path / "half", {n: v for n, v in arrays.items() if n != name})
    with pytest.raises(ArtifactError, match=r"layers\.2"):
        read_adapter(tmp_path / "half")
    tiny.write_adapter(tmp_path / "nan", arrays | {name: arrays[name] * np.float32(np.nan)})
    with pytest.raises(ArtifactError, match="not finite"):
        read_adapter(tmp_path / "nan")
    tiny.write_adapter(tmp_path / "pickled", arrays)
    (tmp_path / "pickled" / "adapter_model.safetensors").rename(tmp_path / "pickled" / "adapter_model.bin")
    with pytest.raises(ArtifactError, match="pickle"):
        read_adapter(tmp_path / "pickled")


def test_patterns_match_as_peft_matches_them(tmp_path: Path) -> None:
    arrays = tiny.adapter_tensors(ONE)
    tiny.write_adapter(
        tmp_path / "a",
        arrays,
        alpha_pattern={r"^model\.layers\.3\..*": 32, r"layers\.1\.self_attn\.q_proj": 16, "proj": 1},
    )
    alphas = {pair.layer: pair.alpha for pair in read_adapter(tmp_path / "a").pairs}
    assert alphas == {0: 8, 1: 16, 2: 8, 3: 32, 4: 8, 5: 8, 6: 8}
