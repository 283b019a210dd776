"""The gate's two heads at run time, one request at a time. ``convert.gate_heads`` fits them and has their batch forms.

Each reads its arrays from the artifact when it is made and raises KeyError or ValueError for any that do not fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from whetherman_edge.gate.features import N_SCALARS, Features
from whetherman_edge.kernels import NGRAM_ALL, DenseWeights, Kernels

Arrays = Mapping[str, npt.NDArray[Any]]

SCALAR_LIMIT: Final = 4.0  # standard deviations; an odd request is not extrapolated
PROJECTIONS: Final = 48
# Rows of ``Features.dense`` that are projected, each by its own matrix: the user's twice, then next tool, result,
# assistant, previous user, tools' mean, system. Of the projections, ALONE pass through a ReLU; LEFT times RIGHT are
# products: user with next tool, user with tools' mean, user (second matrix) with result.
PROJECTED: Final = (0, 0, 1, 2, 3, 4, 5, 6)
ALONE: Final = (0, 3, 4, 5, 7)
LEFT: Final = (0, 0, 1)
RIGHT: Final = (2, 6, 3)
N_SCALAR_UNITS: Final = 64
N_HIDDEN: Final = 96


# Added to a field's n-gram count: a field of two words says less than its few n-grams would otherwise weigh.
FIELD_SMOOTHING: Final = 20.0


class NgramHead:
    """Logistic regression on hashed n-grams; a field counts weight/sqrt(n-grams + FIELD_SMOOTHING)."""

    def __init__(self, arrays: Arrays, kernels: Kernels) -> None:
        self.weights = shaped(arrays, "ngram_weights", np.float32, (len(arrays["ngram_weights"]), 4))
        self.bias: list[float] = shaped(arrays, "ngram_bias", np.float64, (4,)).tolist()
        self._sum = kernels.ngram_sum_f32
        self._sum(b"check", 1, NGRAM_ALL, self.weights)  # ValueError for a table that is no power of two

    def logits(self, features: Features) -> list[float]:
        """Four logits, in the order of LABELS."""
        act, answer, ask, decline = self.bias
        for field in features.fields:
            part = field.logits
            if part is None:
                sums, count = self._sum(field.text, field.seed, field.modes, self.weights)
                scale = field.weight / math.sqrt(count + FIELD_SMOOTHING)
                part = field.logits = [value * scale for value in sums.tolist()]
            act += part[0]
            answer += part[1]
            ask += part[2]
            decline += part[3]
        return [act, answer, ask, decline]


class DenseHead:
    """One hidden layer over the scalars, projected text vectors, and products of the user's with the others."""

    def __init__(self, arrays: Arrays, dim: int, kernels: Kernels) -> None:
        n, f32 = N_SCALARS, np.float32
        joined = N_SCALAR_UNITS + PROJECTIONS * (len(ALONE) + len(LEFT))
        self.weights = DenseWeights(
            mean=shaped(arrays, "scalar_mean", f32, (n,)),
            scale=shaped(arrays, "scalar_scale", f32, (n,)),
            scalar_weight=shaped(arrays, "dense_scalar_weight", f32, (n, N_SCALAR_UNITS)),
            scalar_bias=shaped(arrays, "dense_scalar_bias", f32, (N_SCALAR_UNITS,)),
            projection=shaped(arrays, "dense_projection", f32, (len(PROJECTED), dim, PROJECTIONS)),
            projected_rows=np.array(PROJECTED, dtype=np.int32),
            alone=np.array(ALONE, dtype=np.int32),
            left=np.array(LEFT, dtype=np.int32),
            right=np.array(RIGHT, dtype=np.int32),
            hidden_weight=shaped(arrays, "dense_hidden_weight", f32, (joined, N_HIDDEN)),
            hidden_bias=shaped(arrays, "dense_hidden_bias", f32, (N_HIDDEN,)),
            out_weight=shaped(arrays, "dense_out_weight", f32, (N_HIDDEN, 4)),
            out_bias=shaped(arrays, "dense_out_bias", f32, (4,)),
            limit=np.array([SCALAR_LIMIT], dtype=f32),
        )
        self._run = kernels.dense_head_f32

    @property
    def projection(self) -> npt.NDArray[np.float32]:
        """(len(PROJECTED), dim, PROJECTIONS) float32."""
        return self.weights.projection

    def logits(self, features: Features) -> list[float]:
        """Four logits, in the order of LABELS."""
        logits: list[float] = self._run(features.scalars, features.dense, self.weights).tolist()
        return logits


def shaped(arrays: Arrays, name: str, dtype: Any, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """The array ``name``, C-contiguous. Raises KeyError, or ValueError for another dtype or shape, NaN or infinity."""
    array = arrays[name]
    if array.dtype != dtype or array.shape != shape:
        raise ValueError(f"{name}: expected {np.dtype(dtype)} {shape}, found {array.dtype} {array.shape}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError(f"{name}: not finite")
    return np.ascontiguousarray(array)
