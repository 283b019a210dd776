"""The kernels in NumPy: the specification, and what runs on a machine without a compiler.

Every function here has a native twin of the same name and signature that returns the same bits (tests/kernels compares
them). What makes that possible: integers until the last line, one rounding of each double operation in a fixed order,
no fused multiply-add.

Arguments are C-contiguous arrays (or other buffers, such as a memoryview of a mapped file) of exactly the dtype named;
nothing is converted or copied silently. Whatever does not fit raises ValueError: a wrong dtype, shape or length, an
index outside the array it indexes, a value beyond the bound that keeps the integer sums exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

I8Matrix = npt.NDArray[np.int8]
I32Vector = npt.NDArray[np.int32]
U32Vector = npt.NDArray[np.uint32]
F32Vector = npt.NDArray[np.float32]
F32Matrix = npt.NDArray[np.float32]
F64Vector = npt.NDArray[np.float64]
BytesLike = bytes | bytearray | memoryview

POOL_IDS_MAX = 2**24 - 1
"""Rows that one int32 sum holds: each adds at most 128, and 2**31 / 128 = 2**24."""
COSINE_DIM_MAX = 2**14
COSINE_POOLED_MAX = 2**24
"""With these two, dim * pooled**2 stays below 2**62 and fits int64."""

NGRAM_WORD1, NGRAM_WORD2, NGRAM_CHAR3, NGRAM_CHAR4, NGRAM_CHAR5 = 1, 2, 4, 8, 16
NGRAM_ALL = 31
NGRAM_WORD_BYTES_MAX = 64
"""A longer run of word bytes is cut into words of this length: a blob costs no more per byte than prose."""
NGRAM_BUCKETS_MAX = 2**31


def _array(value: Any, name: str, dtype: type[np.generic], n_dims: int) -> npt.NDArray[Any]:
    array = value if isinstance(value, np.ndarray) else _from_buffer(value, name)
    if array.dtype != dtype or array.ndim != n_dims or not array.flags.c_contiguous:
        raise ValueError(
            f"{name}: expected a C-contiguous {np.dtype(dtype)} array of {n_dims} dimension(s); "
            f"got {array.dtype} with shape {array.shape}"
        )
    return array


def _from_buffer(value: Any, name: str) -> npt.NDArray[Any]:
    try:
        view = memoryview(value)
    except TypeError as exc:
        raise ValueError(f"{name}: expected an array; got {type(value).__name__}") from exc
    return np.asarray(view)


def _text(value: Any) -> bytes:
    try:
        return bytes(memoryview(value).cast("B"))
    except TypeError as exc:
        raise ValueError(f"utf8: expected a contiguous bytes-like object; got {type(value).__name__}") from exc


def _integer(value: object, name: str, largest: int) -> int:
    if not isinstance(value, int) or not 0 <= value <= largest:
        raise ValueError(f"{name}: expected an integer from 0 to {largest}; got {value!s:.40}")
    return value


def _bucket_count(value: int, name: str) -> int:
    if not 1 <= value <= NGRAM_BUCKETS_MAX or value & (value - 1):
        raise ValueError(f"{name}: expected a power of two from 1 to 2**31 buckets; got {value}")
    return value


def _check_indices(indices: npt.NDArray[Any], size: int, name: str) -> None:
    if indices.size and (int(indices.min()) < 0 or int(indices.max()) >= size):
        raise ValueError(f"{name}: an index points outside the array it indexes (size {size})")


def pool_i8(table: I8Matrix, ids: I32Vector) -> I32Vector:
    """Sum of the rows ``ids`` of an embedding table.

    table: (vocab_size, dim) int8.  ids: (n,) int32, each in [0, vocab_size), repeats allowed, n <= POOL_IDS_MAX.
    Returns (dim,) int32, zeros for no ids. Un-normalised: a cosine does not care about the length.
    """
    rows = _array(table, "table", np.int8, 2)
    index = _array(ids, "ids", np.int32, 1)
    if index.size > POOL_IDS_MAX:
        raise ValueError(f"ids: expected at most {POOL_IDS_MAX}; got {index.size}")
    _check_indices(index, rows.shape[0], "ids")
    pooled: I32Vector = rows[index].sum(axis=0, dtype=np.int32)
    return pooled


def pool_i8_into(table: I8Matrix, ids: I32Vector, pooled: I32Vector) -> int:
    """``pool_i8`` into the caller's (dim,) int32 buffer; returns the number of ids."""
    target = _array(pooled, "pooled", np.int32, 1)
    total = pool_i8(table, ids)
    if target.shape != total.shape:
        raise ValueError(f"pooled: expected length {total.size} (the columns of table); got {target.size}")
    target[:] = total
    return len(ids)


def cosine_i8(pooled: I32Vector, prototypes: I8Matrix, norms: F64Vector) -> F64Vector:
    """Cosine similarity of one pooled vector to each prototype.

    pooled: (dim,) int32, |value| <= COSINE_POOLED_MAX, dim <= COSINE_DIM_MAX.  prototypes: (n, dim) int8.
    norms: (n,) float64, the Euclidean norms of the prototypes (``norms_i8``).
    Returns (n,) float64 in [-1, 1] up to rounding; 0.0 where either norm is 0.
    Exactly: double(dot) / (sqrt(double(sum of squares)) * norm), dot and sum of squares exact in int64.
    """
    query = _array(pooled, "pooled", np.int32, 1)
    rows = _array(prototypes, "prototypes", np.int8, 2)
    lengths = _array(norms, "norms", np.float64, 1)
    if query.size != rows.shape[1]:
        raise ValueError(f"pooled: expected length {rows.shape[1]} (the columns of prototypes); got {query.size}")
    if lengths.size != rows.shape[0]:
        raise ValueError(f"norms: expected length {rows.shape[0]} (the rows of prototypes); got {lengths.size}")
    wide = query.astype(np.int64)
    if query.size > COSINE_DIM_MAX or (query.size and int(np.abs(wide).max()) > COSINE_POOLED_MAX):
        raise ValueError(f"pooled: expected at most {COSINE_DIM_MAX} values of at most {COSINE_POOLED_MAX}")
    cosines = np.zeros(lengths.size, np.float64)
    query_norm = np.sqrt(np.float64((wide * wide).sum()))
    used = lengths != 0.0
    if query_norm != 0.0:
        dots = rows.astype(np.float64) @ query.astype(np.float64)  # below 2**45 all along, so exact in any order
        with np.errstate(all="ignore"):  # C does not warn either
            cosines[used] = dots[used] / (query_norm * lengths[used])
    return cosines


def norms_i8(prototypes: I8Matrix) -> F64Vector:
    """Euclidean norms of (n, dim) int8 rows, (n,) float64: what ``cosine_i8`` expects. Used when a slate is built."""
    rows = _array(prototypes, "prototypes", np.int8, 2)
    # Below 2**24 float32 counts exactly, in any order: 1,024 squares of 128.
    wide: npt.NDArray[Any] = rows.astype(np.float32 if rows.shape[1] <= 1024 else np.float64)
    norms: F64Vector = np.sqrt(np.einsum("ij,ij->i", wide, wide).astype(np.float64))
    return norms


def gather_sum_f32(weights: F32Matrix, buckets: U32Vector) -> F64Vector:
    """Sum of the rows ``buckets`` of a hashed n-gram head, added in double in the order given.

    weights: (n_buckets, k) float32.  buckets: (n,) uint32, each < n_buckets.  Returns (k,) float64.
    """
    rows = _array(weights, "weights", np.float32, 2)
    index = _array(buckets, "buckets", np.uint32, 1)
    _check_indices(index, rows.shape[0], "buckets")
    sums = np.zeros((index.size + 1, rows.shape[1]), np.float64)
    sums[1:] = rows[index]
    with np.errstate(all="ignore"):  # C does not warn either
        total: F64Vector = np.cumsum(sums, axis=0)[-1]  # strictly in order, where sum() may add pairwise
    return total.copy()


def hash_ngrams(utf8: BytesLike, seed: int, n_buckets: int, modes: int = NGRAM_ALL) -> U32Vector:
    """Buckets of the word and character n-grams of a text.

    utf8: the text's bytes; need not be valid UTF-8.  seed: uint32, one per field, so that a word of the user and a word
    of a tool differ.  n_buckets: a power of two, at most 2**31.  modes: sum of NGRAM_* flags.
    Returns (m,) uint32, repeats included, in this order; m <= 5 * len(utf8).

    Words. A to Z are lower-cased; a byte is a word byte when it is then a letter a-z, a digit, or >= 0x80. A word is a
    run of word bytes, cut every NGRAM_WORD_BYTES_MAX bytes.
    For each word, in order: the word itself (NGRAM_WORD1, tag ``w``); from the second word on, the previous word, one
    space and the word (NGRAM_WORD2, tag ``p``); then its character n-grams (tag ``c``): of "<word>", for each start,
    the 3-, 4- and 5-gram whose flag is set and that end inside. A character starts at each byte that is not a UTF-8
    continuation byte (10xxxxxx) and at the first byte of the word.

    Hash. 32-bit FNV-1a with the offset basis XOR seed, over the tag byte and then the n-gram's bytes, followed by
    MurmurHash3's 32-bit finaliser (the low bits of FNV are weak for short keys); bucket = hash & (n_buckets - 1).
    """
    text = _text(utf8)
    seed = _integer(seed, "seed", 0xFFFFFFFF)
    mask = _bucket_count(_integer(n_buckets, "n_buckets", NGRAM_BUCKETS_MAX), "n_buckets") - 1
    modes = _integer(modes, "modes", NGRAM_ALL)
    return np.array([h & mask for h in _ngram_hashes(text, seed, modes)], np.uint32)


def ngram_sum_f32(utf8: BytesLike, seed: int, modes: int, weights: F32Matrix) -> tuple[F64Vector, int]:
    """``gather_sum_f32`` of ``hash_ngrams`` in one call: the hashed n-gram head on the hot path.

    weights: (n_buckets, k) float32, n_buckets a power of two.  Returns ((k,) float64 sums, number of n-grams).
    """
    rows = _array(weights, "weights", np.float32, 2)
    buckets = hash_ngrams(utf8, seed, _bucket_count(rows.shape[0], "weights"), modes)
    return gather_sum_f32(rows, buckets), buckets.size


_FNV_OFFSET, _FNV_PRIME = 2166136261, 16777619
_WORD_BYTE = bytes(
    b | 0x20 if 0x41 <= b <= 0x5A else b if 0x61 <= b <= 0x7A or 0x30 <= b <= 0x39 or b >= 0x80 else 0
    for b in range(256)
)
"""Each byte as it is hashed; 0 separates words."""


def _fnv(state: int, data: bytes) -> int:
    for byte in data:
        state = ((state ^ byte) * _FNV_PRIME) & 0xFFFFFFFF
    return state


def _finalise(state: int) -> int:
    state ^= state >> 16
    state = (state * 0x85EBCA6B) & 0xFFFFFFFF
    state ^= state >> 13
    state = (state * 0xC2B2AE35) & 0xFFFFFFFF
    return state ^ (state >> 16)


def _words(text: bytes) -> Iterator[bytes]:
    for run in text.translate(_WORD_BYTE).split(b"\0"):
        for start in range(0, len(run), NGRAM_WORD_BYTES_MAX):
            yield run[start : start + NGRAM_WORD_BYTES_MAX]


def _ngram_hashes(text: bytes, seed: int, modes: int) -> Iterator[int]:
    word_start, pair_start, char_start = (_fnv(_FNV_OFFSET ^ seed, tag) for tag in (b"w", b"p", b"c"))
    previous: bytes | None = None
    for word in _words(text):
        if modes & NGRAM_WORD1:
            yield _finalise(_fnv(word_start, word))
        if modes & NGRAM_WORD2 and previous is not None:
            yield _finalise(_fnv(pair_start, previous + b" " + word))
        previous = word
        if modes & (NGRAM_CHAR3 | NGRAM_CHAR4 | NGRAM_CHAR5):
            yield from _character_hashes(b"<" + word + b">", char_start, modes)


def _character_hashes(padded: bytes, char_start: int, modes: int) -> Iterator[int]:
    starts = [i for i, byte in enumerate(padded) if i <= 1 or byte & 0xC0 != 0x80]
    characters = [padded[a:b] for a, b in zip(starts, [*starts[1:], len(padded)], strict=True)]
    for first in range(len(characters) - 2):
        state = _fnv(char_start, characters[first] + characters[first + 1])
        for length, flag in ((3, NGRAM_CHAR3), (4, NGRAM_CHAR4), (5, NGRAM_CHAR5)):
            if first + length > len(characters):
                break
            state = _fnv(state, characters[first + length - 1])
            if modes & flag:
                yield _finalise(state)


class DenseWeights(NamedTuple):
    """Weights of the gate's dense head; k projections of p columns, u scalar units, h hidden units.

    mean, scale: (n_scalars,) float32. scalar_weight: (n_scalars, u), scalar_bias: (u,) float32. projection: (k, dim, p)
    float32. projected_rows: (k,) int32, the row of ``dense`` that each projects. alone: (a,), left, right: (b,) int32,
    projections. hidden_weight: (u + p (a + b), h), hidden_bias: (h,), out_weight: (h, n_classes), out_bias:
    (n_classes,) float32. limit: (1,) float32, standard deviations at which scalars are clipped.
    """

    mean: F32Vector
    scale: F32Vector
    scalar_weight: F32Matrix
    scalar_bias: F32Vector
    projection: npt.NDArray[np.float32]
    projected_rows: I32Vector
    alone: I32Vector
    left: I32Vector
    right: I32Vector
    hidden_weight: F32Matrix
    hidden_bias: F32Vector
    out_weight: F32Matrix
    out_bias: F32Vector
    limit: F32Vector


def dense_head_f32(scalars: F32Vector, dense: F32Matrix, weights: DenseWeights) -> F64Vector:
    """Class scores of the gate's dense head for one request.

    scalars: (n_scalars,) float32.  dense: (n_rows, dim) float32.
    With x = clip((scalars - mean) * scale, -limit, limit) and P_k = dense[projected_rows[k]] @ projection[k]:
        joined = [relu(x @ scalar_weight + scalar_bias), relu(P_a) for a in alone, P_l * P_r for (l, r) in left, right]
        logits = relu(joined @ hidden_weight + hidden_bias) @ out_weight + out_bias
    Computed in float32; returns (n_classes,) float64. The compiled twins add in another order than BLAS: they agree
    with each other bit for bit and with this one to 1e-4. Raises ValueError for shapes that do not fit and indices
    outside.
    """
    w = weights
    scalars = _array(scalars, "scalars", np.float32, 1)
    dense = _array(dense, "dense", np.float32, 2)
    n_projections = len(w.projected_rows)
    _check_indices(w.projected_rows, len(dense), "projected_rows")
    for name, indices in (("alone", w.alone), ("left", w.left), ("right", w.right)):
        _check_indices(indices, n_projections, name)
    if len(w.left) != len(w.right):
        raise ValueError(f"right: expected length {len(w.left)} (left); got {len(w.right)}")
    limit = w.limit[0]
    x = ((scalars - w.mean) * w.scale).clip(-limit, limit)
    projected = np.matmul(dense[w.projected_rows, None, :], w.projection)[:, 0, :]
    joined = np.concatenate(
        [
            np.maximum(x @ w.scalar_weight + w.scalar_bias, 0),
            np.maximum(projected[w.alone], 0).ravel(),
            (projected[w.left] * projected[w.right]).ravel(),
        ]
    )
    hidden = np.maximum(joined @ w.hidden_weight + w.hidden_bias, 0)
    return np.asarray((hidden @ w.out_weight + w.out_bias).astype(np.float64))
