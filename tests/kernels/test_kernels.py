"""What each kernel returns and refuses, for every set of kernels; native ones return the reference's bits."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from whetherman_edge.kernels import (
    NGRAM_ALL,
    NGRAM_CHAR3,
    NGRAM_WORD1,
    NGRAM_WORD2,
    DenseWeights,
    Kernels,
    load,
    norms_i8,
    reference,
)

I32, U32, F32, F64 = np.int32, np.uint32, np.float32, np.float64
# Around every register width (8, 16, 32 lanes) and block width (64, 128) of the C files, and the shipped 256.
DIMS = [0, 1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 143, 255, 256, 257, 1024, 1025]
COUNTS = [0, 1, 2, 255, 256, 257]
same_machine = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def unaligned(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same values one byte past an aligned address."""
    memory = np.zeros(array.nbytes + 1, np.uint8)
    view = memory[1:].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


def identical(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def random_i8(rng: np.random.Generator, *shape: int, extremes: bool = False) -> npt.NDArray[np.int8]:
    values = rng.integers(-127, 128, shape, dtype=np.int8)
    return np.where(values < 0, -127, 127).astype(np.int8) if extremes else values


# ---- pool_i8 ----


def test_pool_sums_rows_with_repeats(kernels: Kernels) -> None:
    table = np.array([[1, -2], [100, 127], [-128, 5]], np.int8)
    assert kernels.pool_i8(table, np.array([1, 1, 2, 0], I32)).tolist() == [73, 257]


def test_pool_of_nothing_is_zero(kernels: Kernels) -> None:
    assert kernels.pool_i8(np.ones((3, 5), np.int8), np.empty(0, I32)).tolist() == [0] * 5
    assert kernels.pool_i8(np.ones((0, 5), np.int8), np.empty(0, I32)).tolist() == [0] * 5


@pytest.mark.parametrize("extremes", [False, True])
@pytest.mark.parametrize("dim", DIMS)
def test_pool_equals_a_plain_sum(kernels: Kernels, dim: int, extremes: bool) -> None:
    rng = np.random.default_rng(dim)
    for n in COUNTS:
        table = random_i8(rng, 9, dim, extremes=extremes)
        ids = rng.integers(0, 9, n).astype(I32) if not extremes else np.full(n, 4, I32)
        expected = table.astype(np.int64)[ids].sum(axis=0)
        for pooled in (kernels.pool_i8(table, ids), kernels.pool_i8(unaligned(table), unaligned(ids))):
            assert pooled.dtype == I32
            assert pooled.tolist() == expected.tolist()


def test_pool_of_minus_128_does_not_wrap(kernels: Kernels) -> None:
    table = np.full((1, 40), -128, np.int8)
    for n in (256, 257, 70_000):
        assert set(kernels.pool_i8(table, np.zeros(n, I32)).tolist()) == {-128 * n}


@pytest.mark.parametrize("bad", [-1, 3, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("where", [0, 150, 299])
def test_pool_refuses_ids_outside_the_table(kernels: Kernels, bad: int, where: int) -> None:
    ids = np.zeros(300, I32)
    ids[where] = bad
    with pytest.raises(ValueError, match="index"):
        kernels.pool_i8(np.zeros((3, 16), np.int8), ids)


def test_pool_reads_a_mapped_file_in_place(kernels: Kernels, tmp_path: Path) -> None:
    path = tmp_path / "table"
    path.write_bytes(b"header!" + bytes(range(96)))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        whole = memoryview(mapped)
        table = whole[7:].cast("b", (6, 16))
        assert kernels.pool_i8(table, np.array([0, 5], I32)).tolist() == [80 + 2 * j for j in range(16)]  # type: ignore[arg-type]
        table.release()
        whole.release()


def test_pool_into_fills_the_callers_buffer(kernels: Kernels) -> None:
    table = np.array([[1, 2, 3], [4, 5, 6]], np.int8)
    pooled = np.full(3, 99, I32)
    assert kernels.pool_i8_into(table, np.array([0, 1, 1], I32), pooled) == 3
    assert pooled.tolist() == [9, 12, 15]
    pooled.flags.writeable = False
    with pytest.raises(ValueError):  # noqa: PT011  (NumPy words it itself in the reference)
        kernels.pool_i8_into(table, np.array([0], I32), pooled)
    with pytest.raises(ValueError, match="pooled: expected length 3"):
        kernels.pool_i8_into(table, np.array([0], I32), np.zeros(2, I32))


# ---- cosine_i8 ----


def test_cosine_of_known_angles(kernels: Kernels) -> None:
    prototypes = np.array([[3, 4], [-3, -4], [4, -3], [0, 0]], np.int8)
    cosines = kernels.cosine_i8(np.array([3, 4], I32), prototypes, norms_i8(prototypes))
    assert cosines.dtype == F64
    assert cosines.tolist() == [1.0, -1.0, 0.0, 0.0]


def test_cosine_with_a_zero_query_is_zero(kernels: Kernels) -> None:
    assert kernels.cosine_i8(np.zeros(2, I32), np.ones((3, 2), np.int8), np.ones(3)).tolist() == [0.0] * 3
    assert kernels.cosine_i8(np.ones(2, I32), np.ones((0, 2), np.int8), np.ones(0)).tolist() == []


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("largest", [1, 32767, 32768, 2**24])
def test_cosine_equals_exact_integers(kernels: Kernels, dim: int, largest: int) -> None:
    rng = np.random.default_rng(dim)
    prototypes = random_i8(rng, 5, dim)
    query = rng.integers(-largest, largest + 1, dim).astype(I32)
    if dim:
        query[0] = largest
    norms = norms_i8(prototypes)
    expected = []
    for row, norm in zip(prototypes.tolist(), norms.tolist(), strict=True):
        dot = sum(a * b for a, b in zip(query.tolist(), row, strict=True))
        length = np.sqrt(F64(sum(a * a for a in query.tolist())))
        expected.append(0.0 if length == 0 or norm == 0 else float(F64(dot) / (length * norm)))
    got = kernels.cosine_i8(query, prototypes, norms)
    assert got.tolist() == expected
    assert identical(kernels.cosine_i8(unaligned(query), unaligned(prototypes), unaligned(norms)), got)


@pytest.mark.parametrize("value", [32767, -32767, 32768, 2**24])
def test_cosine_sums_do_not_overflow(kernels: Kernels, value: int) -> None:
    """All products of one sign: the sum leaves int32, lane by lane and at the end."""
    for dim in (256, 1024, 16384):
        prototypes = np.full((1, dim), -128, np.int8)
        cosines = kernels.cosine_i8(np.full(dim, value, I32), prototypes, norms_i8(prototypes))
        assert cosines[0] == pytest.approx(-1.0 if value > 0 else 1.0, abs=1e-12)


def test_cosine_refuses_what_could_overflow(kernels: Kernels) -> None:
    prototypes, norms = np.ones((1, 2), np.int8), np.ones(1)
    for value in (2**24 + 1, -(2**24) - 1, 2**31 - 1, -(2**31)):
        with pytest.raises(ValueError, match=r"pooled|bound"):
            kernels.cosine_i8(np.array([0, value], I32), prototypes, norms)
    with pytest.raises(ValueError, match=r"pooled|bound"):
        kernels.cosine_i8(np.ones(16385, I32), np.ones((1, 16385), np.int8), norms)


def test_cosine_refuses_lengths_that_differ(kernels: Kernels) -> None:
    prototypes = np.ones((3, 4), np.int8)
    with pytest.raises(ValueError, match="pooled: expected length 4"):
        kernels.cosine_i8(np.ones(5, I32), prototypes, np.ones(3))
    with pytest.raises(ValueError, match="norms: expected length 3"):
        kernels.cosine_i8(np.ones(4, I32), prototypes, np.ones(2))


# ---- hashed n-grams ----


def fnv1a(data: bytes, seed: int) -> int:
    """Written from the definition, apart from the package's own."""
    value = 2166136261 ^ seed
    for byte in data:
        value = (value ^ byte) * 16777619 % 2**32
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        value = (value ^ (value >> shift)) * factor % 2**32
    return value


def test_words_are_lowered_split_and_paired(kernels: Kernels) -> None:
    got = kernels.hash_ngrams(b"Get_user-ID 42", 5, 2**31, NGRAM_WORD1 | NGRAM_WORD2)
    keys = [b"wget", b"wuser", b"pget user", b"wid", b"puser id", b"w42", b"pid 42"]
    assert got.dtype == U32
    assert got.tolist() == [fnv1a(key, 5) & (2**31 - 1) for key in keys]


def test_character_ngrams_stay_inside_the_padded_word(kernels: Kernels) -> None:
    got = kernels.hash_ngrams(b"ab c", 0, 2**16, NGRAM_ALL & ~NGRAM_WORD1 & ~NGRAM_WORD2)
    keys = [b"c<ab", b"c<ab>", b"cab>", b"c<c>"]
    assert got.tolist() == [fnv1a(key, 0) & 0xFFFF for key in keys]


def test_a_character_may_have_many_bytes(kernels: Kernels) -> None:
    got = kernels.hash_ngrams("né日".encode(), 1, 2**16, NGRAM_CHAR3)
    keys = ["c<né", "cné日", "cé日>"]
    assert got.tolist() == [fnv1a(key.encode(), 1) & 0xFFFF for key in keys]


def test_a_long_run_is_cut_into_words(kernels: Kernels) -> None:
    got = kernels.hash_ngrams(b"x" * 130, 0, 2**16, NGRAM_WORD1 | NGRAM_WORD2)
    long, rest = b"x" * 64, b"xx"
    keys = [b"w" + long, b"w" + long, b"p" + long + b" " + long, b"w" + rest, b"p" + long + b" " + rest]
    assert got.tolist() == [fnv1a(key, 0) & 0xFFFF for key in keys]


def test_texts_without_words_give_nothing(kernels: Kernels) -> None:
    for text in (b"", b" ", b"--- \n\0!?"):
        assert kernels.hash_ngrams(text, 0, 16).tolist() == []
    assert kernels.hash_ngrams(b"word", 0, 16, 0).tolist() == []


def test_every_bytes_like_text_reads_the_same(kernels: Kernels) -> None:
    text = "Réservez un vol, s'il vous plaît".encode()
    expected = kernels.hash_ngrams(text, 9, 1024).tolist()
    assert kernels.hash_ngrams(bytearray(text), 9, 1024).tolist() == expected
    assert kernels.hash_ngrams(memoryview(text), 9, 1024).tolist() == expected
    assert max(expected) < 1024


@pytest.mark.parametrize(
    "arguments",
    [
        *((b"a", seed, 16, 31) for seed in (-1, 2**32, "0", 1.0)),
        *((b"a", 0, n_buckets, 31) for n_buckets in (0, 12, 2**32, -16)),
        *((b"a", 0, 16, modes) for modes in (32, -1, None)),
        *((text, 0, 16, 31) for text in ("a", 7, None)),
    ],
)
def test_hash_refuses_bad_arguments(kernels: Kernels, arguments: tuple[Any, Any, Any, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        kernels.hash_ngrams(*arguments)


def test_ngram_sum_is_gather_of_hash(kernels: Kernels) -> None:
    rng = np.random.default_rng(3)
    weights = rng.standard_normal((256, 5)).astype(F32)
    text = b"Cancel my 9 o'clock, and tell Ana that I'm late"
    buckets = kernels.hash_ngrams(text, 4, 256)
    sums, count = kernels.ngram_sum_f32(text, 4, NGRAM_ALL, weights)
    assert count == buckets.size > 50
    assert identical(sums, kernels.gather_sum_f32(weights, buckets))
    assert identical(kernels.ngram_sum_f32(text, 4, NGRAM_ALL, unaligned(weights))[0], sums)
    empty, none = kernels.ngram_sum_f32(b"", 4, NGRAM_ALL, weights)
    assert (empty.tolist(), none) == ([0.0] * 5, 0)


def test_ngram_sum_refuses_a_table_that_is_no_power_of_two(kernels: Kernels) -> None:
    for rows in (0, 3, 12):
        with pytest.raises(ValueError, match="power of two"):
            kernels.ngram_sum_f32(b"a", 0, NGRAM_ALL, np.zeros((rows, 2), F32))


# ---- gather_sum_f32 ----


def test_gather_adds_in_order_in_double(kernels: Kernels) -> None:
    weights = np.array([[2.0**60, 1.0], [1.0, 0.1], [-(2.0**60), 0.5]], F32)
    sums = kernels.gather_sum_f32(weights, np.array([0, 1, 2, 1], U32))
    assert sums.dtype == F64
    assert sums.tolist() == [1.0, 1.0 + float(F32(0.1)) + 0.5 + float(F32(0.1))]  # 2**60 + 1 rounds the 1 away


@pytest.mark.parametrize("columns", [0, 1, 3, 4, 5, 7, 8, 9, 17])
@pytest.mark.parametrize("n", [0, 1, 8, 9, 1000])
def test_gather_equals_a_loop(kernels: Kernels, columns: int, n: int) -> None:
    rng = np.random.default_rng(n + columns)
    weights = rng.standard_normal((64, columns)).astype(F32)
    buckets = rng.integers(0, 64, n).astype(U32)
    expected = [0.0] * columns
    for bucket in buckets.tolist():
        expected = [total + float(w) for total, w in zip(expected, weights[bucket], strict=True)]
    assert kernels.gather_sum_f32(weights, buckets).tolist() == expected
    assert kernels.gather_sum_f32(unaligned(weights), unaligned(buckets)).tolist() == expected


def test_gather_refuses_buckets_outside(kernels: Kernels) -> None:
    for bad in (4, 2**32 - 1):
        with pytest.raises(ValueError, match="index"):
            kernels.gather_sum_f32(np.zeros((4, 2), F32), np.array([0, bad], U32))


# ---- every kernel ----

GOOD: dict[str, list[Any]] = {
    "pool_i8": [np.ones((3, 4), np.int8), np.zeros(2, I32)],
    "pool_i8_into": [np.ones((3, 4), np.int8), np.zeros(2, I32), np.zeros(4, I32)],
    "cosine_i8": [np.ones(4, I32), np.ones((3, 4), np.int8), np.ones(3)],
    "gather_sum_f32": [np.ones((4, 2), F32), np.zeros(2, U32)],
    "ngram_sum_f32": [b"text", 0, 31, np.ones((4, 2), F32)],
}
ARRAYS = [(name, i) for name, values in GOOD.items() for i, v in enumerate(values) if isinstance(v, np.ndarray)]


def another_dtype(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same bytes under a dtype of the same size."""
    other = {1: np.uint8, 4: I32 if array.dtype == F32 else F32, 8: np.int64}[array.itemsize]
    return array.view(other)


def another_byte_order(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return array.astype(array.dtype.newbyteorder(">")) if array.itemsize > 1 else array.astype("c")


WRONG: dict[str, Callable[[npt.NDArray[Any]], Any]] = {
    "dtype of the same size": another_dtype,
    "wider dtype": lambda a: a.astype(np.longdouble),
    "big-endian": another_byte_order,
    "one dimension more": lambda a: a[None],
    "one dimension less": lambda a: a[0] if a.ndim > 1 else np.zeros((), a.dtype),
    "not contiguous": lambda a: np.repeat(a, 2, axis=-1)[..., ::2],
    "a list": lambda a: a.tolist(),
    "None": lambda _: None,
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(("name", "position"), ARRAYS)
def test_arrays_of_another_kind_are_refused(kernels: Kernels, name: str, position: int, wrong: str) -> None:
    arguments = list(GOOD[name])
    getattr(kernels, name)(*arguments)
    arguments[position] = WRONG[wrong](arguments[position])
    with pytest.raises(ValueError, match=r"expected|dimension"):
        getattr(kernels, name)(*arguments)


def test_fortran_order_is_refused(kernels: Kernels) -> None:
    table = np.asfortranarray(np.arange(12, dtype=np.int8).reshape(3, 4))
    with pytest.raises(ValueError, match="C-contiguous"):
        kernels.pool_i8(table, np.zeros(1, I32))


@pytest.mark.parametrize("name", ["pool_i8", "cosine_i8", "gather_sum_f32", "ngram_sum_f32"])
def test_arguments_are_counted(kernels: Kernels, name: str) -> None:
    with pytest.raises(TypeError):
        getattr(kernels, name)(*GOOD[name], 1)
    with pytest.raises(TypeError):
        getattr(kernels, name)(*GOOD[name][:-1])


# ---- the native sets return the reference's bits ----


@same_machine
@given(st.data())
def test_native_pool_and_cosine_match_the_reference(native_kernels: Kernels, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    rows, dim, n = data.draw(st.integers(1, 12)), data.draw(st.integers(0, 300)), data.draw(st.integers(0, 600))
    table = random_i8(rng, rows, dim, extremes=data.draw(st.booleans()))
    ids = rng.integers(0, rows if data.draw(st.booleans()) else 1, n).astype(I32)
    pooled = reference.pool_i8(table, ids)
    assert identical(native_kernels.pool_i8(table, ids), pooled)
    norms = data.draw(st.sampled_from([norms_i8(table), np.zeros(rows), rng.standard_normal(rows) * 1e300]))
    assert identical(native_kernels.cosine_i8(pooled, table, norms), reference.cosine_i8(pooled, table, norms))


@same_machine
@given(
    text=st.one_of(st.text().map(lambda s: s.encode("utf-8", "surrogatepass")), st.binary(max_size=400)),
    seed=st.integers(0, 2**32 - 1),
    bits=st.integers(0, 31),
    modes=st.integers(0, 31),
)
def test_native_ngrams_match_the_reference(
    native_kernels: Kernels, text: bytes, seed: int, bits: int, modes: int
) -> None:
    expected = reference.hash_ngrams(text, seed, 2**bits, modes)
    assert identical(native_kernels.hash_ngrams(text, seed, 2**bits, modes), expected)
    assert expected.size <= 5 * len(text)


@same_machine
@given(st.data())
def test_native_sums_match_the_reference(native_kernels: Kernels, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    columns = data.draw(st.integers(0, 20))
    weights = (rng.standard_normal((64, columns)) * 10.0 ** rng.integers(-30, 30, (64, columns))).astype(F32)
    buckets = rng.integers(0, 64, data.draw(st.integers(0, 300))).astype(U32)
    assert identical(native_kernels.gather_sum_f32(weights, buckets), reference.gather_sum_f32(weights, buckets))
    text = data.draw(st.binary(max_size=200))
    got, count = native_kernels.ngram_sum_f32(text, 3, NGRAM_ALL, weights)
    expected, expected_count = reference.ngram_sum_f32(text, 3, NGRAM_ALL, weights)
    assert identical(got, expected)
    assert count == expected_count


# ---- dense_head_f32 ----


def dense_weights(seed: int, n: int = 9, dim: int = 13, columns: int = 5, hidden: int = 7) -> DenseWeights:
    rng = np.random.default_rng(seed)

    def random(*shape: int) -> npt.NDArray[np.float32]:
        return rng.normal(size=shape).astype(F32)

    return DenseWeights(
        mean=random(n),
        scale=random(n),
        scalar_weight=random(n, 6),
        scalar_bias=random(6),
        projection=random(4, dim, columns),
        projected_rows=np.array([0, 0, 2, 1], I32),
        alone=np.array([0, 3], I32),
        left=np.array([0, 1, 1], I32),
        right=np.array([2, 3, 1], I32),
        hidden_weight=random(6 + columns * 5, hidden),
        hidden_bias=random(hidden),
        out_weight=random(hidden, 3),
        out_bias=random(3),
        limit=np.array([1.5], F32),
    )


@pytest.mark.parametrize("columns", [1, 3, 8, 17])
@pytest.mark.parametrize("zero_row", [False, True])
def test_dense_head_matches_the_reference(kernels: Kernels, columns: int, zero_row: bool) -> None:
    weights = dense_weights(columns, columns=columns)
    rng = np.random.default_rng(1)
    scalars, dense = (3 * rng.normal(size=9)).astype(F32), rng.normal(size=(3, 13)).astype(F32)
    if zero_row:
        dense[1] = 0.0
    got = kernels.dense_head_f32(scalars, dense, weights)
    assert got.dtype == F64
    np.testing.assert_allclose(got, reference.dense_head_f32(scalars, dense, weights), rtol=1e-5, atol=1e-4)


def test_dense_head_is_the_same_on_every_instruction_set() -> None:
    if load().backend != "native":
        pytest.skip("nothing is compiled here")
    weights = dense_weights(3, columns=48, hidden=96)
    rng = np.random.default_rng(2)
    scalars, dense = rng.normal(size=9).astype(F32), rng.normal(size=(3, 13)).astype(F32)
    serial = load("serial").dense_head_f32(scalars, dense, weights)
    assert load("best").dense_head_f32(scalars, dense, weights).tobytes() == serial.tobytes()


@pytest.mark.parametrize("name", ["projected_rows", "alone", "left", "right"])
@pytest.mark.parametrize("value", [-1, 4])
def test_dense_head_refuses_indices_outside(kernels: Kernels, name: str, value: int) -> None:
    weights = dense_weights(4)
    broken = getattr(weights, name).copy()
    broken[-1] = value
    with pytest.raises(ValueError, match="index"):
        kernels.dense_head_f32(np.zeros(9, F32), np.zeros((3, 13), F32), weights._replace(**{name: broken}))


@pytest.mark.parametrize("name", DenseWeights._fields)
def test_dense_head_refuses_shapes_that_do_not_fit(kernels: Kernels, name: str) -> None:
    weights = dense_weights(5)
    short = getattr(weights, name)[:-1]
    with pytest.raises((ValueError, IndexError)):
        kernels.dense_head_f32(np.ones(9, F32), np.ones((3, 13), F32), weights._replace(**{name: short}))
