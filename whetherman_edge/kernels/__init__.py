"""Integer kernels: ``load()`` gives the compiled ones where they are built, else NumPy ones with the same results."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Literal, Protocol

import msgspec

from whetherman_edge.errors import ConfigError
from whetherman_edge.kernels import native, reference
from whetherman_edge.kernels.reference import (
    NGRAM_ALL,
    NGRAM_CHAR3,
    NGRAM_CHAR4,
    NGRAM_CHAR5,
    NGRAM_WORD1,
    NGRAM_WORD2,
    BytesLike,
    DenseWeights,
    F32Matrix,
    F32Vector,
    F64Vector,
    I8Matrix,
    I32Vector,
    U32Vector,
    norms_i8,
)

__all__ = [
    "NGRAM_ALL",
    "NGRAM_CHAR3",
    "NGRAM_CHAR4",
    "NGRAM_CHAR5",
    "NGRAM_WORD1",
    "NGRAM_WORD2",
    "BytesLike",
    "DenseWeights",
    "F32Matrix",
    "F32Vector",
    "F64Vector",
    "GateKernels",
    "I8Matrix",
    "I32Vector",
    "Kernels",
    "U32Vector",
    "load",
    "norms_i8",
]

ENVIRONMENT_KEY = "WHETHERMAN_KERNELS"


class HashNgrams(Protocol):
    """Signature of ``reference.hash_ngrams``."""

    def __call__(self, utf8: BytesLike, seed: int, n_buckets: int, modes: int = NGRAM_ALL) -> U32Vector: ...


class GateKernels(msgspec.Struct, frozen=True):
    """The gate's hot path in C, as ``native/src/module_gate.c`` describes each function; the Python it follows is
    ``router.table`` (word pieces), ``router.fields`` and ``router.prototype`` (tools), ``gate.records`` (text records),
    ``gate.heads`` and ``gate.features``.
    """

    wordpiece_index_into: Callable[..., int]
    wordpiece_into: Callable[..., int | None]
    token_fields: Callable[..., tuple[tuple[int, dict[int, float]], ...] | None]
    tool_rows_into: Callable[..., int]
    text_record_into: Callable[..., int | None]
    ngram_fields_into: Callable[..., int]
    gate_forward: Callable[..., tuple[tuple[float, float, float, float], tuple[float, ...], int, float]]


class Kernels(msgspec.Struct, frozen=True):
    """One set of kernels; each function is documented in ``kernels.reference``.

    ``backend``: who computes. ``isa``: "numpy", "serial", "avx2" or "neon". ``doctor`` prints both.
    ``gate``: None where nothing is compiled.
    """

    backend: Literal["native", "reference"]
    isa: str
    pool_i8: Callable[[I8Matrix, I32Vector], I32Vector]
    pool_i8_into: Callable[[I8Matrix, I32Vector, I32Vector], int]
    cosine_i8: Callable[[I32Vector, I8Matrix, F64Vector], F64Vector]
    gather_sum_f32: Callable[[F32Matrix, U32Vector], F64Vector]
    hash_ngrams: HashNgrams
    ngram_sum_f32: Callable[[BytesLike, int, int, F32Matrix], tuple[F64Vector, int]]
    dense_head_f32: Callable[[F32Vector, F32Matrix, DenseWeights], F64Vector]
    gate: GateKernels | None = None


def load(isa: str | None = None) -> Kernels:
    """Load a set of kernels.

    isa: "best" (the default: the fastest set this machine runs, NumPy where nothing is compiled), "reference", or a
    name that must then be available: "serial", "avx2", "neon". Where isa is None the environment variable
    WHETHERMAN_KERNELS is asked first.
    Raises ConfigError when the set that was named cannot run here.
    """
    wanted = isa or os.environ.get(ENVIRONMENT_KEY) or "best"
    if wanted == "reference":
        return _reference()
    try:
        functions = native.bind(wanted)
        return Kernels(backend="native", gate=GateKernels(**functions.pop("gate")), **functions)
    except ImportError as exc:
        if wanted == "best":
            return _reference()
        raise ConfigError(
            f"kernels: expected a compiled module for {wanted!r}; this install has none. Reinstall with a C compiler, "
            f"or set {ENVIRONMENT_KEY}=reference"
        ) from exc
    except ValueError as exc:
        raise ConfigError(f"kernels: {exc}; or 'reference'") from exc


def _reference() -> Kernels:
    return Kernels(
        backend="reference",
        isa="numpy",
        pool_i8=reference.pool_i8,
        pool_i8_into=reference.pool_i8_into,
        cosine_i8=reference.cosine_i8,
        gather_sum_f32=reference.gather_sum_f32,
        hash_ngrams=reference.hash_ngrams,
        ngram_sum_f32=reference.ngram_sum_f32,
        dense_head_f32=reference.dense_head_f32,
    )
