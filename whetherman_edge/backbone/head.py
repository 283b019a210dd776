"""From hidden states to numbers: the class head, the pointer head over tool lines, and the match head. Pure numpy.

All read the root-mean-square normalised state ``x = h / sqrt(mean(h^2) + 1e-6)``, so the scale of a layer's residual
stream, which differs between quantisations, does not count.
"""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load as load_safetensors

from whetherman_edge.backbone.manifest import CLASSES, Manifest, fault

F32Vector = npt.NDArray[np.float32]
F32Matrix = npt.NDArray[np.float32]
F64Vector = npt.NDArray[np.float64]

RMS_EPSILON: Final = 1e-6


class Pointed(msgspec.Struct, frozen=True, gc=False):
    """The pointer head's view of one request. ``logits``: (n,) float64, a tool line each; ``none``: of "no tool"."""

    logits: F64Vector
    none: float

    def probabilities(self) -> tuple[F64Vector, float]:
        """Softmax over the tools and "none": ((n,) float64, probability of none)."""
        every = np.append(self.logits, self.none)
        weight = np.exp(every - every.max())
        weight /= weight.sum()
        return weight[:-1], float(weight[-1])


class Heads:
    """All arrays of the heads' file. ``fusion_*`` are handed on as they are.

    head_weight (4, width), head_bias (4,); pointer_query and pointer_key (d, width), pointer_none_weight (width,),
    pointer_none_bias (1,), all of the pointer or none of it; fusion_weights (phases, inputs, 4), fusion_bias
    (phases, 4); match_state (width,), match_classes (4,) and match_router (1,), all of the match head or none of it.
    ``match_router``: what the ToolRouter's log-probability of a tool counts beside its ``match``; 0.0 without the head.
    """

    def __init__(self, arrays: dict[str, npt.NDArray[Any]]) -> None:
        """Use ``open_heads``. Raises KeyError or ValueError for arrays that do not fit or are not finite."""
        self.weight = _array(arrays, "head_weight", (len(CLASSES), None))
        self.width = self.weight.shape[1]
        self.bias = _array(arrays, "head_bias", (len(CLASSES),))
        self.fusion_weights = _array(arrays, "fusion_weights", (None, None, len(CLASSES)))
        self.fusion_bias = _array(arrays, "fusion_bias", (self.fusion_weights.shape[0], len(CLASSES)))
        self.has_match = "match_state" in arrays
        self.match_router = 0.0
        if self.has_match:
            self._match_state = _array(arrays, "match_state", (self.width,))
            self._match_classes = _array(arrays, "match_classes", (len(CLASSES),)).astype(np.float64)
            self.match_router = float(_array(arrays, "match_router", (1,))[0])
        self.has_pointer = "pointer_query" in arrays
        if self.has_pointer:
            query = _array(arrays, "pointer_query", (None, self.width))
            key = _array(arrays, "pointer_key", query.shape)
            # One product instead of two: (Pq x) . (Pk t) = x (Pq' Pk) t, as wide as the states.
            self._bilinear = (query.T @ key) / math.sqrt(len(query))
            self._none_weight = _array(arrays, "pointer_none_weight", (self.width,))
            self._none_bias = float(_array(arrays, "pointer_none_bias", (1,))[0])

    def log_probabilities(self, last: F32Vector) -> list[float]:
        """Log-softmax of the class head, in the order of CLASSES. last: (width,) float32.

        Raises ValueError when it is not finite.
        """
        _check_finite(last)
        logits: F64Vector = (self.weight @ normalised(last) + self.bias).astype(np.float64)
        top = float(logits.max())
        shifted: F64Vector = logits - (top + math.log(float(np.exp(logits - top).sum())))
        return list(shifted.tolist())

    def match(self, last: F32Vector) -> float:
        """How well the only tool of a prompt fits its request: a logit, to be compared with other tools' for the same
        request; 0.0 without a match head. last: (width,) float32. Raises ValueError when it is not finite.
        """
        if not self.has_match:
            return 0.0
        classes = np.array(self.log_probabilities(last))
        return float(self._match_state @ normalised(last)) + float(self._match_classes @ classes)

    def point(self, last: F32Vector, tools: F32Matrix) -> Pointed | None:
        """Pointer logits. last: (width,), tools: (n, width) float32; None without a pointer head or without tools.

        Raises ValueError when they are not finite.
        """
        if not self.has_pointer or not len(tools):
            return None
        _check_finite(last)
        _check_finite(tools)
        x = normalised(last)
        logits = (normalised(tools) @ (x @ self._bilinear)).astype(np.float64)
        none = float(self._none_weight @ x) + self._none_bias
        return Pointed(logits, none)


def normalised(states: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Each state over its root mean square. states: (width,) or (n, width) float32."""
    mean_square = np.mean(np.square(states), axis=-1, keepdims=True)
    scaled: npt.NDArray[np.float32] = states / np.sqrt(mean_square + np.float32(RMS_EPSILON))
    return scaled


def _check_finite(states: npt.NDArray[np.float32]) -> None:
    """The heads' arrays are finite (``_array``), so their outputs are when the states are."""
    if not np.isfinite(states).all():
        raise ValueError("expected finite hidden states of the backbone")


def open_heads(manifest: Manifest) -> Heads:
    """The heads that belong to a manifest. Raises ArtifactError."""
    path = manifest.path.with_name(manifest.heads.file)
    try:
        return Heads(load_safetensors(manifest.read_heads()))
    except (SafetensorError, KeyError, TypeError, ValueError) as exc:
        raise fault(path, f"contents do not fit this version ({exc})") from exc


def _array(arrays: dict[str, npt.NDArray[Any]], name: str, shape: tuple[int | None, ...]) -> npt.NDArray[np.float32]:
    """One array, float32, of that shape (None: any size), all finite. Raises KeyError or ValueError."""
    array = np.ascontiguousarray(arrays[name], dtype=np.float32)
    if array.ndim != len(shape) or any(want not in (None, got) for want, got in zip(shape, array.shape, strict=True)):
        raise ValueError(f"{name}: expected shape {shape}, got {array.shape}")
    if not np.isfinite(array).all():
        raise ValueError(f"{name}: expected finite numbers")
    return array
