"""Token ids equal the library's for any text; pooling equals the sum of rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whetherman_edge.errors import ArtifactError
from whetherman_edge.kernels import load
from whetherman_edge.router.table import CHARS_PER_TOKEN_MAX, RouterTable, chunks_of

pieces = st.sampled_from(
    [
        "[MASK]",
        "[mask]",
        "[UNK]",
        "##ing",
        "don't",
        "C++",
        "\x00",
        "\x0b",
        "\u200b",
        "é",
        "İ",
        "中文",
        "a" * 101,
        "\n",
        "_",
        "\ufffd",
    ]
)
texts = st.lists(st.text(max_size=12) | pieces | st.from_regex(r"[ -~]{0,12}", fullmatch=True), max_size=6).map("".join)


@settings(deadline=None, max_examples=600)
@given(text=texts)
def test_ids_equal_the_library(table, text):
    expected = table._library.encode(text, add_special_tokens=False).ids
    assert table.token_ids(text).tolist() == expected[:512]


@settings(deadline=None, max_examples=300)
@given(text=st.text(alphabet=st.characters(max_codepoint=127), max_size=60))
def test_ids_equal_the_library_on_ascii(table, text):
    assert table.token_list(text) == table._library.encode(text, add_special_tokens=False).ids


# What the tokenizer.json published with potion-base-8M (sha256 of the model in MODELS.md) gives.
PUBLISHED = {
    "Where's the café? [MASK] naïve 中文 x_y": [1079, 11, 61, 1002, 6674, 35, 4, 14749, 752, 867, 66, 41, 67],
    "\u0130stanbul\u200b weather": [8966, 3639],
    "ﬁle ½ №": [990, 1577, 98, 584],
}


@pytest.mark.parametrize("text", PUBLISHED)
def test_library_equals_the_published_tokenizer(table, text):
    assert table._library.encode(text, add_special_tokens=False).ids == PUBLISHED[text]
    assert table.token_list(text) == PUBLISHED[text]


def test_odd_text_takes_the_library_path():
    assert chunks_of("naïve") is None
    assert chunks_of("a\x00b") is None
    assert chunks_of("[MASK] it") is None
    assert chunks_of("What's\tup?\n[mask]") == ["what's", "up?", "[mask]"]


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb \u00e9", "x" + "\u0315" * 40 + "\ud800"])
def test_half_a_surrogate_pair_is_a_question_mark(table, text):
    asked = text.replace("\ud800", "?").replace("\udfff", "?")
    assert table.token_list(text) == table.token_list(asked)
    assert RouterTable.open(kernels=load("best")).token_list(text) == table.token_list(asked)


def test_endless_text_is_cut(table):
    assert len(table.token_ids("word " * 100_000)) == 512
    assert len(table.token_ids("\u00e9" * 100_000, 32)) <= 32
    assert table.token_list("x" * (CHARS_PER_TOKEN_MAX * 600)) == [1]


def test_pooled_is_the_sum_of_rows(table):
    ids = table.token_ids("book a table for two")
    assert table.pooled("book a table for two").tolist() == table.rows[ids].astype(int).sum(0).tolist()
    assert table.pooled("").tolist() == [0] * table.dim


def test_special_tokens_add_nothing(table):
    assert table.pooled("[MASK][UNK]").tolist() == [0] * table.dim


def test_vector_has_unit_length(table):
    assert np.linalg.norm(table.vector("rain tomorrow")) == pytest.approx(1.0, abs=1e-6)
    assert not table.vector("").any()


def test_environment_names_the_artifact(monkeypatch, tiny, kernels):
    monkeypatch.setenv("WHETHERMAN_ROUTER", str(tiny))
    assert RouterTable.open(kernels=kernels).dim == 8
    monkeypatch.setenv("WHETHERMAN_ROUTER", str(tiny) + ".absent")
    with pytest.raises(ArtifactError, match="absent"):
        RouterTable.open(kernels=kernels)


def test_word_cache_is_bounded(table, monkeypatch):
    monkeypatch.setattr("whetherman_edge.router.table.CHUNKS_CACHED_MAX", 50)
    for i in range(40):
        text = " ".join(f"w{i}x{j}" for j in range(20))
        assert table.token_list(text) == table._library.encode(text, add_special_tokens=False).ids
        assert len(table._chunks) <= 50
    text = " ".join(f"long{j}" for j in range(120))
    assert table.token_list(text) == table._library.encode(text, add_special_tokens=False).ids
