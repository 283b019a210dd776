"""A tiny Gemma 3 merged and run by llama.cpp against NumPy; folders and adapters of every kind; what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

import tests.convert.tiny_gemma as tiny
from convert.check_numerics import by_llama, cosines
from convert.export_head import main as export_main
from convert.gguf_folder import write_folder
from convert.hf_folder import HfFolder, write_gguf
from convert.hf_tokenizer import Vocabulary, model_bytes
from convert.merge_lora import main, merge, verify
from whetherman_edge.backbone.llama import Network
from whetherman_edge.backbone.store import sha256_of
from whetherman_edge.errors import ArtifactError

ALL = dict.fromkeys(tiny.PROJECTIONS, 4)
_RNG = np.random.default_rng(8)
# Short, with control tokens, and longer than three windows.
PROMPTS = [[2, *_RNG.integers(6, len(tiny.PIECES), n).tolist()] for n in (3, 12, 40, 70)] + [
    [2, 4, 270, 6, 5, 6, 4, 271]
]


def expected(scales: dict[str, float], arrays: dict[str, tiny.F32], n_layers: int = tiny.LAYERS) -> np.ndarray:
    weights = tiny.with_lora(tiny.tensors(), arrays, scales)
    return np.array([tiny.forward(weights, ids, n_layers) for ids in PROMPTS])


@pytest.fixture(name="base", scope="module")
def _base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "base"
    tiny.write_base(folder)
    return folder


# Eight bits in rows of 64 cost more than in rows of 640; check_numerics holds 0.999 at the real shape.
@pytest.mark.parametrize(("kind", "least"), [("f16", 0.9999), ("q8_0", 0.998), ("q4_0", 0.9), ("q4_k_m", 0.95)])
def test_a_merged_model_has_the_states_of_base_and_adapter(base: Path, tmp_path: Path, kind: str, least: float) -> None:
    arrays = tiny.adapter_tensors(ALL)
    tiny.write_adapter(tmp_path / "adapter", arrays)
    merge(base, tmp_path / "adapter", tmp_path / "out.gguf", kind, None)
    theirs = expected(dict.fromkeys(ALL, 2.0), arrays)
    assert cosines(by_llama(tmp_path / "out.gguf", PROMPTS), theirs).min() >= least
    assert cosines(expected({}, arrays), theirs).min() < 0.9  # the adapter does something


def test_ranks_and_alphas_of_their_own_and_rank_stabilised(base: Path, tmp_path: Path) -> None:
    arrays = tiny.adapter_tensors({"self_attn.q_proj": 4, "mlp.up_proj": 2})
    tiny.write_adapter(
        tmp_path / "adapter", arrays, use_rslora=True, rank_pattern={"up_proj": 2}, alpha_pattern={"mlp.up_proj": 3}
    )
    merge(base, tmp_path / "adapter", tmp_path / "out.gguf", "f16", None)
    theirs = expected({"self_attn.q_proj": 8 / 2, "mlp.up_proj": 3 / 2**0.5}, arrays)
    assert cosines(by_llama(tmp_path / "out.gguf", PROMPTS), theirs).min() >= 0.9999
    write_gguf(HfFolder(base), tmp_path / "plain.gguf", tiny.LAYERS, "f16")
    applied = by_llama(tmp_path / "plain.gguf", PROMPTS, tmp_path / "out.lora.gguf")
    assert cosines(applied, theirs).min() >= 0.9999


def test_shards_and_bfloat16_are_the_same_model(tmp_path: Path) -> None:
    tiny.write_base(tmp_path / "three", shards=3)
    tiny.write_base(tmp_path / "half", bfloat16=True)
    for name, least in (("three", 0.9999), ("half", 0.999)):
        write_gguf(HfFolder(tmp_path / name), tmp_path / f"{name}.gguf", tiny.LAYERS, "f16")
        assert cosines(by_llama(tmp_path / f"{name}.gguf", PROMPTS), expected({}, {})).min() >= least


def test_a_gguf_base_and_its_dequantised_folder_merge_alike(base: Path, tmp_path: Path) -> None:
    arrays = tiny.adapter_tensors(ALL)
    tiny.write_adapter(tmp_path / "adapter", arrays)
    write_gguf(HfFolder(base), tmp_path / "base.gguf", tiny.LAYERS, "q8_0")
    write_folder(tmp_path / "base.gguf", tmp_path / "again")
    one = merge(tmp_path / "base.gguf", tmp_path / "adapter", tmp_path / "one.gguf", "q8_0", None)
    merge(tmp_path / "again", tmp_path / "adapter", tmp_path / "two.gguf", "q8_0", None)
    a, b = by_llama(tmp_path / "one.gguf", PROMPTS), by_llama(tmp_path / "two.gguf", PROMPTS)
    assert cosines(a, b).min() >= 0.99999
    assert one["base"] == {"base.gguf": sha256_of(tmp_path / "base.gguf")}
    texts = [
        gguf.GGUFReader(tmp_path / f"{n}.gguf").get_field("tokenizer.ggml.tokens").contents() for n in ("one", "two")
    ]
    assert texts[0] == texts[1] == tiny.PIECES


def test_fewer_layers_are_the_lower_ones(base: Path, tmp_path: Path) -> None:
    arrays = tiny.adapter_tensors(ALL)
    tiny.write_adapter(tmp_path / "adapter", arrays)
    merge(base, tmp_path / "adapter", tmp_path / "out.gguf", "f16", 3)
    theirs = expected(dict.fromkeys(ALL, 2.0), arrays, 3)
    assert cosines(by_llama(tmp_path / "out.gguf", PROMPTS), theirs).min() >= 0.9999


def test_metadata_and_token_ids(base: Path, tmp_path: Path) -> None:
    write_gguf(HfFolder(base), tmp_path / "base.gguf", tiny.LAYERS, "q8_0")
    fields = {name: field.contents() for name, field in gguf.GGUFReader(tmp_path / "base.gguf").fields.items()}
    assert fields["gemma3.attention.sliding_window"] == tiny.WINDOW
    assert fields["gemma3.attention.sliding_window_pattern"] == 6
    assert fields["tokenizer.chat_template"] == "{{ messages }}"
    assert [fields[f"tokenizer.ggml.{n}_token_id"] for n in ("bos", "eos", "unknown", "padding")] == [2, 1, 3, 0]
    theirs, ours = Tokenizer.from_str(json.dumps(tiny.tokenizer_json())), Network(tmp_path / "base.gguf")
    for text in ("the and in there", "a  theand", "Zoë, 東京?\n\nthe\n", "andthereinand", " "):
        assert ours.tokenize(text) == theirs.encode(text).ids
    ours.close()


def test_a_sentencepiece_model_gets_the_names_of_tokens_added_later(tmp_path: Path) -> None:
    tiny.write_base(tmp_path / "base")
    (tmp_path / "base" / "tokenizer.json").unlink()
    first = ["<pad>", "<eos>", "<bos>", "<unk>", "<unused0>", "<unused1>"]
    types = [3, 3, 3, 2, 3, 3, 4, *[6] * 256, *[1] * (len(tiny.PIECES) - 263)]
    pieces = [*first, "▁▁", *tiny.PIECES[7:]]
    model = model_bytes(Vocabulary(pieces, [float(-i) for i in range(len(pieces))], types, {}))
    (tmp_path / "base" / "tokenizer.model").write_bytes(model)
    added = {"4": {"content": "<start_call>", "special": True}, "3": {"content": "<unk>", "special": True}}
    (tmp_path / "base" / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    source = HfFolder(tmp_path / "base")
    assert source.vocabulary.pieces[3:7] == ["<unk>", "<start_call>", "<unused1>", "  "]
    assert source.vocabulary.types[:7] == [3, 3, 3, 3, 3, 3, 4]
    write_gguf(source, tmp_path / "base.gguf", tiny.LAYERS, "q8_0")
    network = Network(tmp_path / "base.gguf")
    assert network.control("<start_call>") == 4
    assert 6 in network.tokenize("the  and")
    network.close()
    (tmp_path / "base" / "tokenizer.model").write_bytes(model[:-40])
    with pytest.raises(ArtifactError, match=r"tokenizer\.model"):
        HfFolder(tmp_path / "base")


@pytest.mark.parametrize("name", ["score", "classifier", "head"])
def test_a_head_is_exported_with_the_final_norm_folded_in(base: Path, tmp_path: Path, name: str) -> None:
    arrays = tiny.adapter_tensors(ALL, head=name)
    tiny.write_adapter(tmp_path / "adapter", arrays, modules_to_save=[name])
    merge(base, tmp_path / "adapter", tmp_path / "out.gguf", "f16", None)
    head = load_file(tmp_path / "out.head.safetensors")
    weight = tiny.tensors()["model.norm.weight"]
    state = expected(dict.fromkeys(ALL, 2.0), arrays)[0]
    logits = arrays[f"base_model.model.{name}.weight"] @ state
    out = tmp_path / "alone.safetensors"
    labels = "ANSWER,ACT,ASK,DECLINE"
    assert export_main([str(base), str(tmp_path / "adapter"), str(out), "--labels", labels]) == 0
    assert np.array_equal(load_file(out)["head_weight"], head["head_weight"][[1, 0, 2, 3]])
    assert export_main([str(base), str(tmp_path / "adapter"), str(out), "--labels", "ACT,ANSWER"]) == 3
    assert np.allclose(head["head_weight"] @ (state / (1 + weight)) + head["head_bias"], logits, atol=1e-4)


def test_verify_sees_another_file_and_another_state(base: Path, tmp_path: Path) -> None:
    tiny.write_adapter(tmp_path / "adapter", tiny.adapter_tensors(ALL))
    out = tmp_path / "out.gguf"
    assert main([str(base), str(tmp_path / "adapter"), str(out), "--quant", "f16"]) == 0
    assert verify(out) > 0.99999
    assert main(["--verify", str(out)]) == 0
    manifest = json.loads(out.with_suffix(".json").read_text())
    manifest["states"][1] = manifest["states"][0]
    out.with_suffix(".json").write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match="cosine"):
        verify(out)
    out.write_bytes(out.read_bytes()[:-1] + b"\xff")
    with pytest.raises(ArtifactError, match=r"out\.gguf: is missing or differs"):
        verify(out)


def test_a_wrong_base_leaves_nothing_behind(tmp_path: Path) -> None:
    tiny.write_base(tmp_path / "base")
    arrays = tiny.adapter_tensors({"self_attn.q_proj": 4})
    arrays = {name: values[:, :32] if "lora_A" in name else values for name, values in arrays.items()}
    tiny.write_adapter(tmp_path / "adapter", {n: np.ascontiguousarray(v) for n, v in arrays.items()})
    with pytest.raises(ArtifactError, match="in the base, the adapter's is"):
        merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out" / "out.gguf", "q8_0", None)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "llama"}, "model_type gemma3_text"),
        ({"query_pre_attn_scalar": 168}, "query_pre_attn_scalar"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"layer_types": ["sliding_attention"] * 7}, "every 6th layer"),
        ({"rope_parameters": None, "rope_local_base_freq": 5e4}, "local rope base"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "rope scaling"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"intermediate_size": 128}, "config.json says"),
        ({"num_hidden_layers": 8, "layer_types": None}, "layers.7"),
    ],
)
def test_folders_that_would_run_differently_are_refused(
    tmp_path: Path, config: dict[str, object], message: str
) -> None:
    tiny.write_base(tmp_path / "base", **config)
    if config.get("layer_types", "") is None:
        text = json.loads((tmp_path / "base" / "config.json").read_text())
        del text["layer_types"]
        (tmp_path / "base" / "config.json").write_text(json.dumps(text))
    with pytest.raises(ArtifactError, match=message):
        HfFolder(tmp_path / "base")


def test_files_cut_short_are_refused(tmp_path: Path) -> None:
    tiny.write_base(tmp_path / "base", shards=2)
    shard = tmp_path / "base" / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ArtifactError, match="cut short"):
        HfFolder(tmp_path / "base")
    shard.unlink()
    with pytest.raises(ArtifactError, match="model-00002-of-00002"):
        HfFolder(tmp_path / "base")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(20))
    tiny.write_adapter(tmp_path / "adapter", tiny.adapter_tensors(ALL))
    with pytest.raises(ArtifactError, match=r"bad\.gguf"):
        merge(tmp_path / "bad.gguf", tmp_path / "adapter", tmp_path / "out.gguf", "q8_0", None)
