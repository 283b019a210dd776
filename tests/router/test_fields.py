"""Fields of tools, read together: the compiled reader and the compiled channels give what the Python ones give."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whetherman_edge.kernels import load
from whetherman_edge.router.fields import TOKENS_MAX, FieldReader
from whetherman_edge.router.lexical import Postings, StemTable
from whetherman_edge.router.prototype import to_int8, tool_rows_into
from whetherman_edge.router.table import RouterTable

TEXTS = [
    "",
    "search weather",
    "Search the user's weather items by free text, date range or identifier.",
    "the of and",
    "weather Weather WEATHER storms",
    "今天北京的天气怎么样？",
    "naïve café [MASK] \x00 x",
    "word " * 600,
    "z" * 9000,
]


def reader_of(table: RouterTable) -> FieldReader:
    return FieldReader(table, StemTable(table.artifact, table.vocab_size))


@pytest.fixture(scope="module")
def native() -> RouterTable:
    return RouterTable.open(None, load("best"))


@pytest.mark.native
@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from(TEXTS) | st.text(max_size=30), max_size=12), st.sampled_from([1, 7, 256, TOKENS_MAX]))
def test_together_and_one_by_one_are_the_same(
    table: RouterTable, native: RouterTable, texts: list[str], tokens_max: int
) -> None:
    found = []
    for each in (table, native):
        pooled = np.zeros((len(texts), each.dim), np.int32)
        fields = reader_of(each).fields(texts, tokens_max, pooled)
        assert [stems for _, stems in reader_of(each).fields(texts, tokens_max)] == [stems for _, stems in fields]
        found.append((pooled.tolist(), [(n, list(stems.items())) for n, stems in fields]))
    assert found[0] == found[1]


def test_a_field_is_its_tokens(table: RouterTable) -> None:
    pooled = np.zeros((len(TEXTS), table.dim), np.int32)
    stems = StemTable(table.artifact, table.vocab_size)
    for text, row, (n, found) in zip(TEXTS, pooled, reader_of(table).fields(TEXTS, 256, pooled), strict=True):
        ids = table.token_list(text, 256)
        assert (n, found) == (len(ids), stems.weights(ids))
        assert row.tolist() == table.kernels.pool_i8(table.rows, np.array(ids, np.int32)).tolist()


@pytest.mark.native
def test_half_a_surrogate_pair_does_not_cost_the_others(native: RouterTable) -> None:
    texts = ["rain \ud800", "rain"]
    assert reader_of(native).fields(texts, 256)[1] == reader_of(native).fields(["rain"], 256)[0]


@pytest.mark.native
@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 6), st.sampled_from([0, 1, 7, 256]), st.sampled_from([1.0, 0.0, 0.37, -2.5, 1e9]), st.integers(0, 9)
)
def test_compiled_channels_are_those_of_numpy(n: int, dim: int, name_share: float, seed: int) -> None:
    gate = load("best").gate
    assert gate is not None
    draw = np.random.default_rng(seed)
    fields = draw.integers(-300, 300, (n, 3, dim), dtype=np.int32) * draw.integers(0, 2, (n, 3, 1), dtype=np.int32)
    described = draw.integers(0, 2, n).astype(bool)
    one, other = np.ones((n, 4, dim), np.int8), np.zeros((n, 4, dim), np.int8)
    if n and dim:
        assert tool_rows_into(fields, described, name_share, one) == n
        assert gate.tool_rows_into(fields, described, name_share, other) == n
        assert one.tolist() == other.tolist()
        assert (other[~described, 1] == other[~described, 2]).all()


@pytest.mark.native
def test_channels_refuse_what_does_not_fit() -> None:
    gate = load("best").gate
    assert gate is not None
    fields, described, rows = np.zeros((2, 3, 8), np.int32), np.ones(2, bool), np.zeros((2, 4, 8), np.int8)
    for arguments in (
        (fields[:1], described, 1.0, rows),
        (fields, described, float("nan"), rows),
        (fields, described, 1.0, rows[:, :3].copy()),
    ):
        with pytest.raises(ValueError, match="expected"):
            gate.tool_rows_into(*arguments)


def test_halves_are_rounded_to_even() -> None:
    assert to_int8(np.array([[254.0, 1.0, 3.0, -5.0]])).tolist() == [[127, 0, 2, -2]]
    assert to_int8(np.zeros((1, 3))).tolist() == [[0, 0, 0]]


def test_postings_add_up_over_fields_and_tools() -> None:
    """The score written out, for two tools and two fields."""
    names, descriptions = [{5: 2.0, 7: 1.0}, {7: 1.0}], [{5: 2.0}, {}]
    postings = Postings([names, descriptions], [(0.5, 0.25, 1.0), (2.0, 1.0, 0.5)])
    query = {5: 2.0, 7: 1.0, 9: 1.0}
    first = 0.5 * 3 / 4 + 0.25 * 3 / (3 + 1.0) + 2.0 * 2 / 4 + 1.0 * 2 / (2 + 0.5)
    second = 0.5 * 1 / 4 + 0.25 * 1 / (1 + 1.0)
    assert postings.score(query) == pytest.approx([first, second])
    assert postings.classes.tolist() == [5, 7]
    assert Postings([[], []], [(1.0, 1.0, 0.0)] * 2).score(query).tolist() == []
