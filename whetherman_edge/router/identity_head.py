"""The seven tools everybody has: what they are called, and a trained vector for each.

A tool takes part only when its name is one of the known names *and* its description, if it has one, says the same thing
as ours do: a caller's ``files`` tool for tax filings stays on the semantic path. All other tools never see this head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from whetherman_edge.kernels import Kernels
from whetherman_edge.router.artifact import Artifact, fault
from whetherman_edge.router.card import ToolCard

F64Vector = npt.NDArray[np.float64]
I32Vector = npt.NDArray[np.int32]

NGRAM_SEED: Final = 0x5EED
NGRAM_MODES: Final = 1 | 2 | 8  # words, word pairs, character 4-grams
QUERY_BYTES_MAX: Final = 2048  # n-grams of the first sentences say enough; bounds the time on pasted text


class Identity(msgspec.Struct, frozen=True, gc=False):
    """``index``: which of the known tools. ``strength``: in (0, 1], how sure we are that it is that tool."""

    index: int
    strength: float


class IdentityHead:
    """Recognises the known tools and scores a query for each of them."""

    def __init__(self, artifact: Artifact, dim: int, config: Mapping[str, Any]) -> None:
        self.ngrams = artifact.array("identity_ngrams", "F32", 2)
        self.dense = artifact.array("identity_dense", "F32", 2)
        self.bank = artifact.array("identity_bank", "I8", 2)
        owner = artifact.array("identity_owner", "I32", 1)
        self.names: tuple[str, ...] = tuple(config["names"])
        n = len(self.names)
        buckets = self.ngrams.shape[0]
        if self.ngrams.shape[1] != n or self.dense.shape != (n, dim) or buckets < 1 or buckets & (buckets - 1):
            raise fault(artifact.path, "identity sections do not match each other")
        if self.bank.shape != (len(owner), dim) or not ((owner >= 0) & (owner < n)).all():
            raise fault(artifact.path, "identity bank does not match its owners")
        if not (np.isfinite(self.ngrams).all() and np.isfinite(self.dense).all()):
            raise fault(artifact.path, "identity sections are not finite")
        self.bias: F64Vector = np.array(config["bias"], dtype=np.float64)
        self._aliases: dict[str, int] = {k: int(v) for k, v in config["aliases"].items()}
        self._weak: dict[str, int] = {k: int(v) for k, v in config["weak_aliases"].items()}
        self._ramp = _ramp(config["description_cosine"])
        self._weak_ramp = _ramp(config["weak_description_cosine"])
        wide = self.bank.astype(np.int64)
        self._norms: F64Vector = np.sqrt((wide * wide).sum(axis=1).astype(np.float64))
        self._rows_of = [np.flatnonzero(owner == k) for k in range(n)]

    def recognise(self, card: ToolCard, title: str, description: I32Vector, kernels: Kernels) -> Identity | None:
        """The known tool that ``card`` is, if any.

        ``title``: the card's. ``description``: its pooled description, (dim,) int32.
        """
        known, ramp = self._aliases.get(title), self._ramp
        if not card.description.strip():
            return None if known is None else Identity(known, 1.0)
        if known is None:
            known, ramp = self._weak.get(title), self._weak_ramp
        if known is None:
            return None
        cosines = kernels.cosine_i8(description, self.bank, self._norms)
        near = float(cosines[self._rows_of[known]].max(initial=0.0))
        strength = min(1.0, (near - ramp[0]) / (ramp[1] - ramp[0]))
        return Identity(known, strength) if strength > 0.0 else None

    def scores(self, query: str, pooled: I32Vector, kernels: Kernels) -> F64Vector:
        """Score of each known tool: (n_known,) float64; 0 means neither way."""
        sums, count = kernels.ngram_sum_f32(
            query.encode("utf-8", "replace")[:QUERY_BYTES_MAX], NGRAM_SEED, NGRAM_MODES, self.ngrams
        )
        wide = pooled.astype(np.float64)
        norm = float(np.sqrt(wide @ wide))
        score = self.bias + sums / np.sqrt(max(count, 1))
        if norm:
            score = score + self.dense @ (wide / norm)
        return np.asarray(score, dtype=np.float64)


def _ramp(value: Sequence[float]) -> tuple[float, float]:
    low, high = (float(v) for v in value)
    if not low < high:
        raise ValueError(f"expected two rising cosines, got {low}, {high}")
    return low, high


def gather(identities: Sequence[Identity | None]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], F64Vector]:
    """Positions in the slate, known-tool indices and strengths of the recognised tools."""
    found = [(t, i.index, i.strength) for t, i in enumerate(identities) if i is not None]
    return (
        np.array([f[0] for f in found], dtype=np.intp),
        np.array([f[1] for f in found], dtype=np.intp),
        np.array([f[2] for f in found], dtype=np.float64),
    )
