"""A Hugging Face folder of the gemma3_text layout written as GGUF: names, norms, metadata, tokenizer.

What llama.cpp's graph takes for granted is checked rather than hoped for: a global layer every 6th block, no soft
caps, queries scaled by the head's own width. A folder that differs is refused, with the field's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from convert.hf_tokenizer import SPECIALS, Vocabulary, read_vocabulary
from convert.shards import Weights, read_json
from whetherman_edge.errors import ArtifactError

GLOBAL_EVERY: Final = 6
ROWS: Final = 8192
"""Rows of the embedding table in memory at a time, as float32."""
ROPE_GLOBAL: Final = 1_000_000.0
ROPE_LOCAL: Final = 10_000.0
PREFIXES: Final = ("model.", "language_model.model.", "model.language_model.", "")
BLOCK: Final[Mapping[str, str]] = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
"""Module of a block (transformers) to its GGUF tensor. Norms are stored as w - 1 by transformers, as w in GGUF."""
HEADS: Final = ("score.", "classifier.", "head.", "lm_head.")

Progress = Callable[[int, int], None]


class HfFolder:
    """A checked folder. Raises ArtifactError for anything it cannot carry over exactly."""

    def __init__(self, folder: Path) -> None:
        if not (folder / "config.json").is_file():
            raise ArtifactError(f"{folder}: expected a Hugging Face folder with config.json, or a .gguf file")
        self.folder = folder
        self.config = read_json(folder / "config.json")
        self._check_config()
        self.weights = Weights(folder)
        prefix = next((p for p in PREFIXES if f"{p}embed_tokens.weight" in self.weights), None)
        if prefix is None:
            raise ArtifactError(f"{folder}: expected the gemma3_text layout, no embed_tokens.weight found")
        self.prefix: str = prefix
        self.n_layers = self._int("num_hidden_layers")
        self.n_embd = self._int("hidden_size")
        self.n_vocab = self.weights.shape(f"{self.prefix}embed_tokens.weight")[0]
        self._check_tensors()
        self.vocabulary = read_vocabulary(folder, self.n_vocab)

    def _int(self, name: str) -> int:
        value = self.config.get(name)
        if not isinstance(value, int) or value < 1:
            raise ArtifactError(f"config.json: expected {name} to be a positive number, got {value!r}")
        return value

    def _check_config(self) -> None:
        config = self.config
        if config.get("model_type") != "gemma3_text":
            raise ArtifactError(f"config.json: expected model_type gemma3_text, got {config.get('model_type')!r}")
        expected: dict[str, tuple[Any, ...]] = {
            "attention_bias": (False, None),
            "attn_logit_softcapping": (None,),
            "final_logit_softcapping": (None,),
            "use_bidirectional_attention": (False, None),
            "tie_word_embeddings": (True, None),
            "hidden_activation": ("gelu_pytorch_tanh", None),
            "query_pre_attn_scalar": (self._int("head_dim"), None),
        }
        for name, allowed in expected.items():
            if config.get(name) not in allowed:
                raise ArtifactError(
                    f"config.json: {name} is {config.get(name)!r}; llama.cpp's gemma3 has {allowed[0]!r}"
                )
        pattern = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", GLOBAL_EVERY))
        wanted = [
            "full_attention" if (i + 1) % GLOBAL_EVERY == 0 else "sliding_attention"
            for i in range(self._int("num_hidden_layers"))
        ]
        if pattern != GLOBAL_EVERY or config.get("layer_types", wanted) != wanted:
            raise ArtifactError(
                f"config.json: expected full attention in every {GLOBAL_EVERY}th layer, as llama.cpp has"
            )
        if self.rope(1) != ROPE_LOCAL:
            raise ArtifactError(
                f"config.json: the local rope base is {self.rope(1)}, llama.cpp's gemma3 has {ROPE_LOCAL}"
            )

    def rope(self, local: int) -> float:
        """Base of the rotary embedding, of the global (0) or the sliding layers (1), by either transformers' naming."""
        parameters = self.config.get("rope_parameters") or {}
        kind = parameters.get("sliding_attention" if local else "full_attention") or {}
        scaling = self.config.get("rope_scaling") or kind
        if scaling.get("rope_type", scaling.get("type", "default")) not in ("default", None):
            raise ArtifactError(f"config.json: rope scaling {scaling!r} is not carried over; expected none")
        old = self.config.get("rope_local_base_freq" if local else "rope_theta")
        return float(kind.get("rope_theta", old if old is not None else (ROPE_LOCAL if local else ROPE_GLOBAL)))

    def _check_tensors(self) -> None:
        known = {self.prefix + name for name in ("embed_tokens.weight", "norm.weight")}
        known |= {f"{self.prefix}layers.{i}.{name}.weight" for i in range(self.n_layers) for name in BLOCK}
        for name in sorted(known):
            self.weights.shape(name)
        for name in self.weights.names():
            if name not in known and not name.startswith(HEADS):
                raise ArtifactError(f"{self.folder.name}: unknown tensor {name!r}; expected the gemma3_text layout")
        q_rows = self._int("num_attention_heads") * self._int("head_dim")
        kv_rows = self._int("num_key_value_heads") * self._int("head_dim")
        inner = self._int("intermediate_size")
        shapes = {
            "self_attn.q_proj": (q_rows, self.n_embd), "self_attn.k_proj": (kv_rows, self.n_embd),
            "self_attn.v_proj": (kv_rows, self.n_embd), "self_attn.o_proj": (self.n_embd, q_rows),
            "mlp.gate_proj": (inner, self.n_embd), "mlp.up_proj": (inner, self.n_embd),
            "mlp.down_proj": (self.n_embd, inner),
        }  # fmt: skip
        for i in range(self.n_layers):
            for module, shape in shapes.items():
                name = f"{self.prefix}layers.{i}.{module}.weight"
                if self.weights.shape(name) != shape:
                    raise ArtifactError(
                        f"{self.folder.name}: {name} is {self.weights.shape(name)}, config.json says {shape}"
                    )

    def tensors(self, n_layers: int) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
        """GGUF names and float32 values of the norms and the blocks that are kept, one at a time."""
        yield "output_norm.weight", self.norm(f"{self.prefix}norm.weight")
        for i in range(n_layers):
            for module, own in BLOCK.items():
                name = f"{self.prefix}layers.{i}.{module}.weight"
                values = self.norm(name) if module.endswith("norm") else self.weights.rows(name)
                if not np.isfinite(values).all():
                    raise ArtifactError(f"{self.folder.name}: {name} holds values that are not finite")
                yield f"blk.{i}.{own}.weight", values

    def norm(self, name: str) -> npt.NDArray[np.float32]:
        """A norm's weights with the offset of 1 that transformers adds when it runs."""
        return self.weights.rows(name) + np.float32(1)


def write_gguf(source: HfFolder, target: Path, n_layers: int, embedding: str, progress: Progress | None = None) -> None:
    """Blocks and norms as float32, the embedding table as ``embedding`` ("f16" or "q8_0"): what ``derive`` reads.

    Not atomic: an intermediate file. The whole table as float32 would be 671 MB of it for nothing.
    """
    import gguf

    writer = gguf.GGUFWriter(target, "gemma3")
    _metadata(writer, source, n_layers)
    kind = gguf.GGMLQuantizationType[embedding.upper()]
    table = f"{source.prefix}embed_tokens.weight"
    pieces = [
        gguf.quants.quantize(source.weights.rows(table, start, start + ROWS), kind)
        for start in range(0, source.n_vocab, ROWS)
    ]
    n_all = 2 + n_layers * len(BLOCK)
    writer.add_tensor("token_embd.weight", np.concatenate(pieces), raw_dtype=kind)
    del pieces
    for done, (name, values) in enumerate(source.tensors(n_layers)):
        writer.add_tensor(name, values)
        if progress is not None:
            progress(done + 2, n_all)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _metadata(writer: Any, source: HfFolder, n_layers: int) -> None:
    config, vocabulary = source.config, source.vocabulary
    writer.add_name(str(config.get("_name_or_path") or source.folder.name))
    writer.add_type("model")
    writer.add_context_length(int(config.get("max_position_embeddings", 32_768)))
    writer.add_embedding_length(source.n_embd)
    writer.add_block_count(n_layers)
    writer.add_feed_forward_length(int(config["intermediate_size"]))
    writer.add_head_count(int(config["num_attention_heads"]))
    writer.add_head_count_kv(int(config["num_key_value_heads"]))
    writer.add_layer_norm_rms_eps(float(config.get("rms_norm_eps", 1e-6)))
    writer.add_key_length(int(config["head_dim"]))
    writer.add_value_length(int(config["head_dim"]))
    writer.add_rope_freq_base(source.rope(0))
    writer.add_sliding_window(int(config["sliding_window"]))
    writer.add_sliding_window_pattern(GLOBAL_EVERY)
    writer.add_quantization_version(2)
    writer.add_file_type(0)
    _tokenizer(writer, vocabulary)


def _tokenizer(writer: Any, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(vocabulary.pieces)
    writer.add_token_scores(vocabulary.scores)
    writer.add_token_types(vocabulary.types)
    add = dict(
        zip(SPECIALS, (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_unk_token_id,
                       writer.add_pad_token_id), strict=True)
    )  # fmt: skip
    for name, i in vocabulary.ids.items():
        add[name](i)
    writer.add_add_bos_token(vocabulary.add_bos)
    writer.add_add_eos_token(vocabulary.add_eos)
    writer.add_add_space_prefix(vocabulary.space_prefix)
    if vocabulary.template:
        writer.add_chat_template(vocabulary.template)
