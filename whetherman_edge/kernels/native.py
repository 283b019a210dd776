"""Python faces of the compiled kernels: the output array is made here, the work and all checks are in C."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from whetherman_edge.kernels import reference
from whetherman_edge.kernels.reference import (
    NGRAM_ALL,
    BytesLike,
    DenseWeights,
    F32Matrix,
    F32Vector,
    F64Vector,
    I8Matrix,
    I32Vector,
    U32Vector,
)

_I32, _U32, _F64 = np.dtype(np.int32), np.dtype(np.uint32), np.dtype(np.float64)
_F32 = np.dtype(np.float32)


_GATE = (
    "wordpiece_index_into",
    "wordpiece_into",
    "token_fields",
    "tool_rows_into",
    "text_record_into",
    "ngram_fields_into",
    "gate_forward",
)


def bind(isa: str) -> dict[str, Any]:
    """Functions bound to one instruction set, by name; ``isa``, its name; ``gate``, a dict of those of the gate.

    isa: "best", or a name such as "serial". Raises ImportError where the module is not built, ValueError where this
    machine does not run that set.
    """
    from whetherman_edge.kernels import _native  # absent from a pure-Python install

    compiled: dict[str, Any] = _native.bind(isa)
    return {
        "isa": compiled["isa"],
        "pool_i8": _pool_i8(compiled["pool_i8_into"]),
        "pool_i8_into": compiled["pool_i8_into"],
        "cosine_i8": _cosine_i8(compiled["cosine_i8_into"]),
        "gather_sum_f32": _gather_sum_f32(compiled["gather_sum_f32_into"]),
        "hash_ngrams": _hash_ngrams(compiled["hash_ngrams_into"]),
        "ngram_sum_f32": _ngram_sum_f32(compiled["ngram_sum_f32_into"]),
        "dense_head_f32": _dense_head_f32(compiled["dense_head_f32_into"]),
        "gate": {name: compiled[name] for name in _GATE},
    }


def _columns(value: Any, name: str) -> int:
    try:
        columns: int = value.shape[1]
    except (AttributeError, IndexError, TypeError) as exc:
        raise ValueError(f"{name}: expected an array of 2 dimensions; got {type(value).__name__}") from exc
    return columns


def _rows(value: Any, name: str) -> int:
    try:
        return len(value)
    except TypeError as exc:
        raise ValueError(f"{name}: expected an array; got {type(value).__name__}") from exc


def _pool_i8(into: Callable[..., int]) -> Callable[[I8Matrix, I32Vector], I32Vector]:
    def pool_i8(table: I8Matrix, ids: I32Vector) -> I32Vector:
        pooled = np.empty(_columns(table, "table"), _I32)
        into(table, ids, pooled)
        return pooled

    pool_i8.__doc__ = reference.pool_i8.__doc__
    return pool_i8


def _cosine_i8(into: Callable[..., int]) -> Callable[[I32Vector, I8Matrix, F64Vector], F64Vector]:
    def cosine_i8(pooled: I32Vector, prototypes: I8Matrix, norms: F64Vector) -> F64Vector:
        cosines = np.empty(_rows(prototypes, "prototypes"), _F64)
        into(pooled, prototypes, norms, cosines)
        return cosines

    cosine_i8.__doc__ = reference.cosine_i8.__doc__
    return cosine_i8


def _gather_sum_f32(into: Callable[..., int]) -> Callable[[F32Matrix, U32Vector], F64Vector]:
    def gather_sum_f32(weights: F32Matrix, buckets: U32Vector) -> F64Vector:
        sums = np.empty(_columns(weights, "weights"), _F64)
        into(weights, buckets, sums)
        return sums

    gather_sum_f32.__doc__ = reference.gather_sum_f32.__doc__
    return gather_sum_f32


def _hash_ngrams(into: Callable[..., int]) -> Callable[[BytesLike, int, int, int], U32Vector]:
    def hash_ngrams(utf8: BytesLike, seed: int, n_buckets: int, modes: int = NGRAM_ALL) -> U32Vector:
        room = np.empty(5 * _rows(utf8, "utf8"), _U32)
        return room[: into(utf8, seed, n_buckets, modes, room)].copy()

    hash_ngrams.__doc__ = reference.hash_ngrams.__doc__
    return hash_ngrams


def _ngram_sum_f32(into: Callable[..., int]) -> Callable[[BytesLike, int, int, F32Matrix], tuple[F64Vector, int]]:
    def ngram_sum_f32(utf8: BytesLike, seed: int, modes: int, weights: F32Matrix) -> tuple[F64Vector, int]:
        sums = np.empty(_columns(weights, "weights"), _F64)
        count = into(utf8, seed, modes, weights, sums)
        return sums, count

    ngram_sum_f32.__doc__ = reference.ngram_sum_f32.__doc__
    return ngram_sum_f32


def _dense_head_f32(into: Callable[..., int]) -> Callable[[F32Vector, F32Matrix, DenseWeights], F64Vector]:
    def dense_head_f32(scalars: F32Vector, dense: F32Matrix, weights: DenseWeights) -> F64Vector:
        *arrays, limit = weights
        logits = np.empty(_rows(weights.out_bias, "out_bias"), _F64)
        room = (
            max(_rows(scalars, "scalars"), _columns(dense, "dense"))
            + weights.projection.shape[0] * weights.projection.shape[-1]
            + _rows(weights.hidden_weight, "hidden_weight")
            + _rows(weights.hidden_bias, "hidden_bias")
            + len(logits)
        )
        into(scalars, dense, *arrays, limit, np.empty(room, _F32), logits)
        return logits

    dense_head_f32.__doc__ = reference.dense_head_f32.__doc__
    return dense_head_f32
