"""The static stage: features to four calibrated class probabilities, in tens of microseconds.

Two heads look at the same request: hashed n-grams (a sum of weight rows), and text vectors with the scalars (one hidden
layer). A small logistic layer, one for each phase of a dialogue, blends their log-probabilities; it was fitted on
predictions for domains that the heads had not seen, so it calibrates them too.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load as load_safetensors

from whetherman_edge.dialects.chat import ChatView
from whetherman_edge.errors import ArtifactError
from whetherman_edge.gate.compiled import CompiledGate
from whetherman_edge.gate.features import DENSE_BLOCKS, NGRAM_FIELDS, SCALAR_NAMES, Extractor
from whetherman_edge.gate.heads import Arrays, DenseHead, NgramHead, shaped
from whetherman_edge.gate.operating_point import read_operating_point
from whetherman_edge.gate.records import pack_weights
from whetherman_edge.gate.verdict import LABELS, PHASES, Verdict
from whetherman_edge.kernels import Kernels
from whetherman_edge.router.scorer import Scorer

F64Vector = npt.NDArray[np.float64]

DEFAULT_PATH: Final = Path(__file__).resolve().parent.parent / "artifacts" / "gate_static.safetensors"
FORMAT: Final = "whetherman-gate-static"
VERSION: Final = 3
"""3: thresholds for each phase."""
FILE_BYTES_MAX: Final = 16 << 20  # the shipped file is under 3 MB
N_HEADS: Final = 2
PORTION: Final = 32  # tools read in one go: some 3 ms when all are new

# What a profile's logistic layer may use: the four log-probabilities, and scalars that differ between agents.
FUSED_SCALARS: Final = (
    "tool_p1",
    "tool_margin",
    "tool_logit",
    "n_tools",
    "n_results",
    "repeated_calls",
    "last_is_tool",
    "user_tokens",
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
        self._scorer = scorer
        self.extractor = Extractor(scorer)
        self.sha256: str = str(manifest["sha256"])
        self.default_tau = read_operating_point(manifest["default_tau"])
        self._ngrams = NgramHead(arrays, kernels)
        self._dense = DenseHead(arrays, scorer.table.dim, kernels)
        self._blend = shaped(arrays, "blend_weights", np.float64, (len(PHASES), 4 * N_HEADS, 4))
        self._bias = shaped(arrays, "blend_bias", np.float64, (len(PHASES), 4))
        self._compiled: CompiledGate | None = None
        if kernels.gate is not None:
            self._compiled = CompiledGate(scorer, kernels.gate, self._ngrams, self._dense, self._packed(scorer))

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
        if self._compiled is not None:
            return self._compiled.judge(chat)
        return self.judge_by_reference(chat)

    def portions(self, chat: ChatView) -> Iterator[None]:
        """Read the request's tools a few at a time, for a caller that must not be held for hundreds of new ones.

        Whatever of it is forgotten before ``judge`` is called, that reads again.
        """
        for start in range(0, len(chat.tools), PORTION):
            part = chat.tools[start : start + PORTION]
            self._scorer.prepare(part)
            if self._compiled is not None:
                self._compiled.prepare(part)
            yield
        self._scorer.slate(chat.tools, chat.toolset_key)
        yield

    def knows(self, chat: ChatView) -> bool:
        """Whether the request's tool list is kept; without compiled kernels only the router's part of it is."""
        if self._compiled is not None:
            return self._compiled.knows(chat.toolset_key)
        return self._scorer.knows(chat.toolset_key)

    def judge_by_reference(self, chat: ChatView) -> Verdict:
        """``judge`` by way of ``features`` and ``heads``, also where the kernels are compiled."""
        features = self.extractor.extract(chat)
        inputs = _log_softmax(self._ngrams.logits(features)) + _log_softmax(self._dense.logits(features))
        phase = features.phase
        log_p = _log_softmax((np.array(inputs) @ self._blend[phase] + self._bias[phase]).tolist())
        act, answer, ask, decline = (math.exp(value) for value in log_p)
        return Verdict(
            probabilities=(act, answer, ask, decline),
            engine="static",
            fused=(*log_p, *features.scalars[_FUSED_INDEX].tolist()),
            tool=features.tool,
            tool_probability=features.tool_probability,
            phase=phase,
        )

    def _packed(self, scorer: Scorer) -> bytes:
        mix, calibration = scorer.weights
        return pack_weights(
            mix=mix,
            calibration=calibration,
            ngram_bias=self._ngrams.bias,
            blend=self._blend,
            blend_bias=self._bias,
            dense=self._dense.weights,
            fused=_FUSED_INDEX.tolist(),
        )


def packaged_sha256() -> str:
    """Digest of the packaged weights, from their manifest. Raises ArtifactError."""
    return str(_read_manifest(DEFAULT_PATH).get("sha256"))


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
    if manifest.get("classes") != list(LABELS) or manifest.get("dense") != list(DENSE_BLOCKS):
        raise fault(path, "classes or dense features are not those of this version")
    fields = {name: list(field) for name, field in NGRAM_FIELDS.items()}
    if manifest.get("scalars") != list(SCALAR_NAMES) or manifest.get("ngram_fields") != fields:
        raise fault(path, "its scalar features or n-gram fields are not those of this version")
    return manifest


def _log_softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    total = math.log(sum([math.exp(value - top) for value in logits]))
    return [value - top - total for value in logits]
