"""Derived weights: the arithmetic of a merge, what is kept, and what is refused. On a tiny GGUF of the same shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

from whetherman_edge.backbone.derive import Scale, derive
from whetherman_edge.backbone.store import sha256_of
from whetherman_edge.errors import ArtifactError

WIDTH, INNER, HEADS, N_VOCAB, N_BLOCKS = 64, 96, 32, 40, 3
SHAPES = {
    "attn_q": (HEADS, WIDTH),
    "attn_k": (HEADS, WIDTH),
    "attn_v": (HEADS, WIDTH),
    "attn_output": (WIDTH, HEADS),
    "ffn_gate": (INNER, WIDTH),
    "ffn_up": (INNER, WIDTH),
    "ffn_down": (WIDTH, INNER),
}
Arrays = dict[str, npt.NDArray[Any]]


def write_base(path: Path, architecture: str = "gemma3") -> Arrays:
    """A GGUF with float32 projections; returns its tensors."""
    rng = np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(N_BLOCKS)
    writer.add_embedding_length(WIDTH)
    writer.add_file_type(0)
    writer.add_token_list([f"t{i}" for i in range(N_VOCAB)])
    tensors: Arrays = {
        "token_embd.weight": rng.normal(size=(N_VOCAB, WIDTH)).astype(np.float32),
        "output_norm.weight": rng.normal(size=WIDTH).astype(np.float32),
    }
    for block in range(N_BLOCKS):
        tensors[f"blk.{block}.attn_norm.weight"] = rng.normal(size=WIDTH).astype(np.float32)
        for name, shape in SHAPES.items():
            tensors[f"blk.{block}.{name}.weight"] = rng.normal(size=shape).astype(np.float32)
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def write_adapter(path: Path, **changes: npt.NDArray[Any]) -> Arrays:
    """Rank 4 on two projections of block 1."""
    rng = np.random.default_rng(2)
    arrays: Arrays = {
        "layers.1.q_proj.lora_A": rng.normal(size=(4, WIDTH)).astype(np.float16),
        "layers.1.q_proj.lora_B": rng.normal(size=(HEADS, 4)).astype(np.float16),
        "layers.1.down_proj.lora_A": rng.normal(size=(4, INNER)).astype(np.float16),
        "layers.1.down_proj.lora_B": rng.normal(size=(WIDTH, 4)).astype(np.float16),
    }
    arrays.update(changes)
    save_file(arrays, path)
    return arrays


def tensors_of(path: Path) -> Arrays:
    """Dequantised tensors by name."""
    return {
        t.name: gguf.quants.dequantize(t.data, t.tensor_type).reshape(tuple(reversed(t.shape.tolist())))
        for t in gguf.GGUFReader(path).tensors
    }


@pytest.mark.parametrize(("kind", "tolerance"), [("f16", 2e-3), ("q8_0", 1.2e-2), ("q4_0", 0.2)])
@pytest.mark.parametrize("rslora", [False, True])
def test_the_merge_is_the_base_plus_the_scaled_product(
    tmp_path: Path, kind: str, tolerance: float, rslora: bool
) -> None:
    base = write_base(tmp_path / "base.gguf")
    lora = write_adapter(tmp_path / "a.safetensors")
    target = tmp_path / "out.gguf"
    sha256 = derive(
        tmp_path / "base.gguf", target, kind=kind, n_layers=2, adapter=tmp_path / "a.safetensors",
        scale=Scale(4, 8.0, rslora),
    )  # fmt: skip
    assert sha256 == sha256_of(target)
    found = tensors_of(target)
    factor = 8.0 / 2.0 if rslora else 8.0 / 4.0
    for tensor, projection in (("attn_q", "q_proj"), ("ffn_down", "down_proj")):
        a, b = (lora[f"layers.1.{projection}.lora_{x}"].astype(np.float32) for x in "AB")
        expected = base[f"blk.1.{tensor}.weight"] + factor * b @ a
        error = np.abs(found[f"blk.1.{tensor}.weight"] - expected).max()
        assert error <= tolerance * np.abs(expected).max()
    untouched = base["blk.0.attn_q.weight"]
    assert np.abs(found["blk.0.attn_q.weight"] - untouched).max() <= tolerance * np.abs(untouched).max()


def test_upper_blocks_go_and_the_rest_stays_as_it_was(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base.gguf")
    derive(tmp_path / "base.gguf", tmp_path / "out.gguf", kind="q8_0", n_layers=2)
    found = tensors_of(tmp_path / "out.gguf")
    assert set(found) == {name for name in base if not name.startswith("blk.2.")}
    for name in ("token_embd.weight", "output_norm.weight", "blk.0.attn_norm.weight"):
        np.testing.assert_array_equal(found[name], base[name])
    fields = gguf.GGUFReader(tmp_path / "out.gguf").fields
    assert fields["gemma3.block_count"].contents() == 2
    assert fields["gemma3.embedding_length"].contents() == WIDTH
    assert fields["general.file_type"].contents() == 7
    assert fields["tokenizer.ggml.tokens"].contents() == [f"t{i}" for i in range(N_VOCAB)]


def test_progress_ends_at_the_whole(tmp_path: Path) -> None:
    write_base(tmp_path / "base.gguf")
    seen: list[tuple[int, int]] = []
    derive(
        tmp_path / "base.gguf", tmp_path / "o.gguf", kind="f16", n_layers=1, progress=lambda a, b: seen.append((a, b))
    )
    assert seen[-1][0] == seen[-1][1] == len(seen)


ODD = np.zeros((4, 7), np.float16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers.1.embed.lora_A": np.zeros((4, 8), np.float16)}, "unknown tensor 'layers.1.embed.lora_A'"),
        ({"layers.1.q_proj.magnitude": np.zeros(8, np.float16)}, "unknown tensor 'layers.1.q_proj.magnitude'"),
        ({"layers.2.q_proj.lora_A": np.zeros((4, WIDTH), np.float16)}, "above the 2 blocks"),
        ({"layers.1.q_proj.lora_A": np.zeros((5, WIDTH), np.float16)}, "at rank 4"),
        ({"layers.1.q_proj.lora_A": ODD}, "the adapter's is"),
        ({"layers.1.v_proj.lora_B": np.zeros((HEADS, 4), np.float16)}, "a lora_A for every lora_B"),
        ({"layers.1.q_proj.lora_A": np.full((4, WIDTH), np.nan, np.float16)}, "not finite"),
    ],
)  # fmt: skip
def test_an_adapter_that_does_not_fit_is_refused_by_name(tmp_path: Path, changes: Arrays, message: str) -> None:
    write_base(tmp_path / "base.gguf")
    write_adapter(tmp_path / "a.safetensors", **changes)
    with pytest.raises(ArtifactError, match=message):
        derive(
            tmp_path / "base.gguf", tmp_path / "out.gguf", kind="q8_0", n_layers=2,
            adapter=tmp_path / "a.safetensors", scale=Scale(4, 8.0),
        )  # fmt: skip
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.safetensors", "base.gguf"], "nothing half-written is left"


def test_a_wrong_or_broken_base_is_refused(tmp_path: Path) -> None:
    write_base(tmp_path / "llama.gguf", "llama")
    with pytest.raises(ArtifactError, match="expected the architecture gemma3, it is 'llama'"):
        derive(tmp_path / "llama.gguf", tmp_path / "out.gguf", kind="q8_0", n_layers=1)
    write_base(tmp_path / "base.gguf")
    whole = (tmp_path / "base.gguf").read_bytes()
    for size in (0, 3, 100, len(whole) // 2):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(ArtifactError, match=r"cut\.gguf"):
            derive(tmp_path / "cut.gguf", tmp_path / "out.gguf", kind="q8_0", n_layers=1)
    with pytest.raises(ArtifactError, match="keep 1 to 3 blocks, got 9"):
        derive(tmp_path / "base.gguf", tmp_path / "out.gguf", kind="q8_0", n_layers=9)
    with pytest.raises(ArtifactError, match=r"missing\.gguf"):
        derive(tmp_path / "missing.gguf", tmp_path / "out.gguf", kind="q8_0", n_layers=1)
    assert not (tmp_path / "out.gguf").exists()


def test_a_failed_derivation_leaves_the_old_file(tmp_path: Path) -> None:
    write_base(tmp_path / "base.gguf")
    (tmp_path / "out.gguf").write_bytes(b"old")

    def stop(_done: int, _all: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        derive(tmp_path / "base.gguf", tmp_path / "out.gguf", kind="q8_0", n_layers=1, progress=stop)
    assert (tmp_path / "out.gguf").read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 2
