"""The gate's heads at run time, one request at a time. ``convert.gate_heads`` fits them and has their batch forms.

Each reads its arrays from the artifact when it is made and raises KeyError or ValueError for any that do not fit.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from whetherman_edge.gate.features import N_SCALARS, Features, Field
from whetherman_edge.kernels import NGRAM_ALL, Kernels

F64Vector = npt.NDArray[np.float64]
Arrays = Mapping[str, npt.NDArray[Any]]

SUMS_CACHED_MAX: Final = 512

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
        self._weights = shaped(arrays, "ngram_weights", np.float32, (len(arrays["ngram_weights"]), 4))
        self._bias = shaped(arrays, "ngram_bias", np.float64, (4,))
        self._sum = kernels.ngram_sum_f32
        self._sum(b"check", 1, NGRAM_ALL, self._weights)  # ValueError for a table that is no power of two
        self._known: OrderedDict[Field, F64Vector] = OrderedDict()

    def logits(self, features: Features) -> F64Vector:
        """(4,) float64."""
        known = self._known
        total = self._bias
        for field in features.fields:
            part = known.get(field)
            if part is None:
                part = self._field(field)
            total = total + part
        return total

    def _field(self, field: Field) -> F64Vector:
        sums, count = self._sum(field.text, field.seed, field.modes, self._weights)
        part: F64Vector = sums * (field.weight / math.sqrt(count + FIELD_SMOOTHING))
        self._known[field] = part
        if len(self._known) > SUMS_CACHED_MAX:
            self._known.popitem(last=False)
        return part


class DenseHead:
    """One hidden layer over the scalars, projected text vectors, and products of the user's with the others."""

    def __init__(self, arrays: Arrays, dim: int) -> None:
        n, f32 = N_SCALARS, np.float32
        joined = N_SCALAR_UNITS + PROJECTIONS * (len(ALONE) + len(LEFT))
        self._mean = shaped(arrays, "scalar_mean", f32, (n,))
        self._scale = shaped(arrays, "scalar_scale", f32, (n,))
        self._scalar = shaped(arrays, "dense_scalar_weight", f32, (n, N_SCALAR_UNITS))
        self._scalar_bias = shaped(arrays, "dense_scalar_bias", f32, (N_SCALAR_UNITS,))
        self._projection = shaped(arrays, "dense_projection", f32, (len(PROJECTED), dim, PROJECTIONS))
        self._hidden = shaped(arrays, "dense_hidden_weight", f32, (joined, N_HIDDEN))
        self._hidden_bias = shaped(arrays, "dense_hidden_bias", f32, (N_HIDDEN,))
        self._out = shaped(arrays, "dense_out_weight", f32, (N_HIDDEN, 4))
        self._out_bias = shaped(arrays, "dense_out_bias", f32, (4,))
        self._rows, self._alone = np.array(PROJECTED), np.array(ALONE)
        self._left, self._right = np.array(LEFT), np.array(RIGHT)

    def logits(self, features: Features) -> F64Vector:
        """(4,) float64."""
        x = ((features.scalars - self._mean) * self._scale).clip(-SCALAR_LIMIT, SCALAR_LIMIT)
        projected = np.matmul(features.dense[self._rows, None, :], self._projection)[:, 0, :]
        joined = np.concatenate(
            [
                np.maximum(x @ self._scalar + self._scalar_bias, 0),
                np.maximum(projected[self._alone], 0).ravel(),
                (projected[self._left] * projected[self._right]).ravel(),
            ]
        )
        hidden = np.maximum(joined @ self._hidden + self._hidden_bias, 0)
        return (hidden @ self._out + self._out_bias).astype(np.float64)


class ForestHead:
    """A boosted forest on the scalars."""

    def __init__(self, arrays: Arrays, kernels: Kernels) -> None:
        self._arrays = tuple(
            shaped(arrays, f"forest_{name}", dtype, (len(arrays[f"forest_{name}"]),))
            for name, dtype in (
                ("feature", np.int32),
                ("threshold", np.float64),
                ("left", np.int32),
                ("right", np.int32),
                ("leaf", np.float64),
                ("root", np.int32),
                ("class", np.int32),
            )
        )
        self._run = kernels.forest_f32
        self._run(np.zeros(N_SCALARS, np.float32), *self._arrays, 4)  # ValueError for a forest that does not hold

    def logits(self, features: Features) -> F64Vector:
        """(4,) float64."""
        return self._run(features.scalars, *self._arrays, 4)


def shaped(arrays: Arrays, name: str, dtype: Any, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """The array ``name``, C-contiguous. Raises KeyError, or ValueError for another dtype or shape, NaN or infinity."""
    array = arrays[name]
    if array.dtype != dtype or array.shape != shape:
        raise ValueError(f"{name}: expected {np.dtype(dtype)} {shape}, found {array.dtype} {array.shape}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError(f"{name}: not finite")
    return np.ascontiguousarray(array)
