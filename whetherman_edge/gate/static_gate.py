"""The static stage: features to four calibrated class probabilities, in tens of microseconds.

Three heads look at the same request: hashed n-grams (a sum of weight rows), text vectors with the scalars (one hidden
layer), and a boosted forest on the scalars. A small logistic layer blends their log-probabilities; it was fitted on
predictions for domains that the heads had not seen, so it calibrates them too.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load as load_safetensors

from whetherman_edge.dialects.chat import ChatView
from whetherman_edge.errors import ArtifactError
from whetherman_edge.gate.features import DENSE_BLOCKS, N_SCALARS, NGRAM_FIELDS, SCALAR_NAMES, Extractor, Features
from whetherman_edge.gate.verdict import LABELS, Label, Verdict
from whetherman_edge.kernels import NGRAM_ALL, Kernels
from whetherman_edge.router.scorer import Scorer

F64Vector = npt.NDArray[np.float64]
Arrays = Mapping[str, npt.NDArray[Any]]

DEFAULT_PATH: Final = Path(__file__).resolve().parent.parent / "artifacts" / "gate_static.safetensors"
FORMAT: Final = "whetherman-gate-static"
VERSION: Final = 1
FILE_BYTES_MAX: Final = 16 << 20  # the shipped file is under 3 MB
SUMS_CACHED_MAX: Final = 512

SCALAR_LIMIT: Final = np.float32(4.0)  # standard deviations; an odd request is not extrapolated
PROJECTIONS: Final = 48
N_HEADS: Final = 3

# What a profile's logistic layer may use: the four log-probabilities, and scalars that differ between agents.
FUSED_SCALARS: Final = (
    "tool_p1",
    "tool_margin",
    "tool_logit",
    "n_tools",
    "n_results",
    "repeated_calls",
    "last_is_tool",
    "user_words",
    "user_ends_question",
    "missing_required",
    "user_in_all_results",
    "now_error",
    "assistant_asked_now",
    "best_called",
)
FUSED_NAMES: Final[tuple[str, ...]] = (*(f"log_p_{label.lower()}" for label in LABELS), *FUSED_SCALARS)
_FUSED_INDEX: Final = np.array([SCALAR_NAMES.index(name) for name in FUSED_SCALARS])


class StaticGate:
    """The static engine. Holds caches of texts and tools; not shared between threads."""

    def __init__(self, scorer: Scorer, kernels: Kernels, arrays: Arrays, manifest: Mapping[str, Any]) -> None:
        """Use ``open``. Raises KeyError, ValueError or TypeError for arrays that do not fit."""
        self.extractor = Extractor(scorer)
        self.sha256: str = str(manifest["sha256"])
        self.default_tau: Mapping[Label, float] = _tau(manifest["default_tau"])
        self._ngrams = NgramHead(arrays, kernels)
        self._dense = DenseHead(arrays, scorer.table.dim)
        self._forest = ForestHead(arrays, kernels)
        self._blend = _shaped(arrays, "blend_weights", np.float64, (4 * N_HEADS, 4))
        self._bias = _shaped(arrays, "blend_bias", np.float64, (4,))

    @classmethod
    def open(cls, scorer: Scorer, kernels: Kernels, path: Path | str | None = None) -> StaticGate:
        """Open the packaged artifact, or ``path`` (a ``.safetensors`` file with its manifest ``.json`` beside it).

        Raises ArtifactError when either file is missing, corrupt, of another version, or was trained on another router
        than ``scorer``'s.
        """
        weights_path = Path(path) if path is not None else DEFAULT_PATH
        manifest = _read_manifest(weights_path)
        raw = _read(weights_path)
        sha256 = hashlib.sha256(raw).hexdigest()
        if sha256 != manifest.get("sha256"):
            raise fault(weights_path, f"expected sha256 {str(manifest.get('sha256'))[:12]}…, found {sha256[:12]}…")
        trained_on = manifest.get("router_sha256")
        if trained_on != scorer.table.sha256:
            raise fault(
                weights_path,
                f"it was trained on router {str(trained_on)[:12]}…, but router {scorer.table.sha256[:12]}… is loaded",
            )
        try:
            return cls(scorer, kernels, load_safetensors(raw), manifest)
        except (SafetensorError, KeyError, TypeError, ValueError) as exc:
            raise fault(weights_path, f"contents do not fit this version ({exc})") from exc

    def judge(self, chat: ChatView) -> Verdict:
        """Calibrated probabilities for one request. Never raises on any view."""
        features = self.extractor.extract(chat)
        heads = (self._ngrams.logits(features), self._dense.logits(features), self._forest.logits(features))
        logits = np.concatenate([_log_softmax(head) for head in heads]) @ self._blend + self._bias
        log_p = _log_softmax(logits)
        p = np.exp(log_p).tolist()
        return Verdict(
            probabilities=(p[0], p[1], p[2], p[3]),
            engine="static",
            fused=(*log_p.tolist(), *features.scalars[_FUSED_INDEX].tolist()),
            tool=features.tool,
            tool_probability=features.tool_probability,
        )


class NgramHead:
    """Logistic regression on hashed n-grams; every field has its own hash seed."""

    def __init__(self, arrays: Arrays, kernels: Kernels) -> None:
        weights = arrays["ngram_weights"]
        self._weights = _shaped(arrays, "ngram_weights", np.float32, (len(weights), 4))
        self._bias = _shaped(arrays, "ngram_bias", np.float64, (4,))
        self._sum = kernels.ngram_sum_f32
        self._sum(b"check", 1, NGRAM_ALL, self._weights)  # ValueError for a table that is no power of two
        self._known: OrderedDict[tuple[int, bytes], tuple[F64Vector, int]] = OrderedDict()

    def logits(self, features: Features) -> F64Vector:
        """(4,) float64."""
        total = np.zeros(4)
        n_grams = 0
        for field, text in enumerate(features.texts):
            if text:
                sums, count = self._field(field, text)
                total += sums
                n_grams += count
        return total / math.sqrt(max(n_grams, 1)) + self._bias

    def _field(self, field: int, text: bytes) -> tuple[F64Vector, int]:
        found = self._known.get((field, text))
        if found is None:
            found = self._known[field, text] = self._sum(text, 1 + field, NGRAM_ALL, self._weights)
            if len(self._known) > SUMS_CACHED_MAX:
                self._known.popitem(last=False)
        return found


class DenseHead:
    """One hidden layer over the scalars, projected text vectors, and products of the user's with the others."""

    def __init__(self, arrays: Arrays, dim: int) -> None:
        n, p = N_SCALARS, PROJECTIONS
        self._mean = _shaped(arrays, "scalar_mean", np.float32, (n,))
        self._scale = _shaped(arrays, "scalar_scale", np.float32, (n,))
        self._scalar = _shaped(arrays, "dense_scalar_weight", np.float32, (n, 64))
        self._scalar_bias = _shaped(arrays, "dense_scalar_bias", np.float32, (64,))
        self._user = _shaped(arrays, "dense_user_weight", np.float32, (dim, 2 * p))
        self._others = {
            block: _shaped(arrays, f"dense_{name}_weight", np.float32, (dim, p))
            for block, name in zip(DENSE_BLOCKS[1:], _PROJECTED, strict=True)
        }
        self._hidden = _shaped(arrays, "dense_hidden_weight", np.float32, (64 + 8 * p, 96))
        self._hidden_bias = _shaped(arrays, "dense_hidden_bias", np.float32, (96,))
        self._out = _shaped(arrays, "dense_out_weight", np.float32, (96, 4))
        self._out_bias = _shaped(arrays, "dense_out_bias", np.float32, (4,))

    def logits(self, features: Features) -> F64Vector:
        """(4,) float64."""
        p = PROJECTIONS
        x = np.clip((features.scalars - self._mean) * self._scale, -SCALAR_LIMIT, SCALAR_LIMIT)
        both = features.dense[0] @ self._user
        user, other = both[:p], both[p:]
        tool, result, assistant, previous, tools, system = (
            features.dense[1 + i] @ weights for i, weights in enumerate(self._others.values())
        )
        joined = np.concatenate(
            [
                np.maximum(x @ self._scalar + self._scalar_bias, 0),
                np.maximum(user, 0),
                user * tool,
                np.maximum(result, 0),
                np.maximum(assistant, 0),
                np.maximum(previous, 0),
                np.maximum(system, 0),
                user * tools,
                other * result,
            ]
        )
        hidden = np.maximum(joined @ self._hidden + self._hidden_bias, 0)
        return (hidden @ self._out + self._out_bias).astype(np.float64)


_PROJECTED: Final = ("tool", "result", "assistant", "previous", "tools", "system")


class ForestHead:
    """A boosted forest on the scalars."""

    def __init__(self, arrays: Arrays, kernels: Kernels) -> None:
        self._arrays = tuple(
            _shaped(arrays, f"forest_{name}", dtype, (len(arrays[f"forest_{name}"]),))
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


def fault(path: Path, what: str) -> ArtifactError:
    """An ArtifactError that names the file, the finding and the fix."""
    return ArtifactError(
        f"gate artifact {path}: {what}. Reinstall the package, or train it for this router with "
        "`python -m convert.train_gate`."
    )


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            raw = file.read(FILE_BYTES_MAX + 1)
    except OSError as exc:
        raise fault(path, f"cannot be read ({exc.strerror or exc})") from exc
    if len(raw) > FILE_BYTES_MAX:
        raise fault(path, f"expected at most {FILE_BYTES_MAX} bytes")
    return raw


def _read_manifest(weights_path: Path) -> dict[str, Any]:
    path = weights_path.with_suffix(".json")
    try:
        manifest = json.loads(_read(path))
    except (ValueError, RecursionError) as exc:
        raise fault(path, "manifest is not JSON") from exc
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise fault(path, f"expected a manifest of format {FORMAT}")
    if manifest.get("version") != VERSION:
        raise fault(path, f"expected version {VERSION}, found {str(manifest.get('version'))[:20]}")
    if manifest.get("classes") != list(LABELS) or manifest.get("ngram_fields") != list(NGRAM_FIELDS):
        raise fault(path, "classes or n-gram fields are not those of this version")
    if manifest.get("scalars") != list(SCALAR_NAMES):
        raise fault(path, "its scalar features are not those of this version")
    return manifest


def _tau(value: object) -> dict[Label, float]:
    if not isinstance(value, dict):
        raise TypeError("default_tau is not an object")
    found: dict[Label, float] = {}
    for label in LABELS[1:]:
        tau = value.get(label)
        if tau is not None:
            found[label] = float(tau)
            if not 0.0 <= found[label] <= 1.0:
                raise ValueError(f"default_tau.{label} is not in [0, 1]")
    return found


def _shaped(arrays: Arrays, name: str, dtype: Any, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    array = arrays[name]
    if array.dtype != dtype or array.shape != shape:
        raise ValueError(f"{name}: expected {np.dtype(dtype)} {shape}, found {array.dtype} {array.shape}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError(f"{name}: not finite")
    return np.ascontiguousarray(array)


def _log_softmax(logits: F64Vector) -> F64Vector:
    shifted = logits - logits.max()
    return np.asarray(shifted - math.log(float(np.exp(shifted).sum())))
