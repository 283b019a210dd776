"""Words that query and tool share, stemmed and weighted by rarity.

Everything happens on WordPiece ids: the artifact maps each id to a stem class (``stem``) and each class to a weight
(``idf``; 0 for function words and punctuation), so nothing is stemmed at run time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from whetherman_edge.router.artifact import Artifact, fault

F64Array = npt.NDArray[np.float64]
FIELDS: Final = 3  # name, description, parameters


class StemTable:
    """Stem class and weight of each vocabulary entry."""

    def __init__(self, artifact: Artifact, vocab_size: int) -> None:
        self.stem = artifact.array("stem", "I32", 1)
        self.idf = artifact.array("idf", "F32", 1)
        if self.stem.shape != (vocab_size,) or self.idf.shape != (vocab_size,):
            raise fault(artifact.path, "stem or idf section does not match the vocabulary")
        if vocab_size and not (0 <= int(self.stem.min()) and int(self.stem.max()) < vocab_size):
            raise fault(artifact.path, "stem section points outside the vocabulary")
        if not np.isfinite(self.idf).all():
            raise fault(artifact.path, "idf section is not finite")

    def weights(self, token_ids: Iterable[int]) -> dict[int, float]:
        """Stem class -> weight of the content words among ``token_ids``, in order of first appearance."""
        stem, idf = self.stem, self.idf
        found: dict[int, float] = {}
        for token in token_ids:
            cls = int(stem[token])
            if cls not in found:
                weight = float(idf[cls])
                if weight > 0.0:
                    found[cls] = weight
        return found


class Postings:
    """Inverted index of a slate: stem class -> where it adds, in a flat (FIELDS * n_tools,) vector.

    The value added is the stem's weight over the field's own total for the parameter and name fields' share, so that
    ``overlap`` is the share of the query's weight that a tool's field covers.
    """

    def __init__(self, fields: Sequence[Sequence[dict[int, float]]]) -> None:
        """``fields[f][t]``: stem weights of field ``f`` of tool ``t``."""
        self.n_tools = len(fields[0]) if fields else 0
        self.size = len(fields) * self.n_tools
        places: dict[int, list[int]] = {}
        for f, tools in enumerate(fields):
            for t, stems in enumerate(tools):
                for cls in stems:
                    places.setdefault(cls, []).append(f * self.n_tools + t)
        self._places = {cls: np.array(where, dtype=np.int64) for cls, where in places.items()}
        self.totals: F64Array = np.array([[sum(s.values()) for s in tools] for tools in fields], dtype=np.float64)

    def shared(self, query: dict[int, float]) -> F64Array:
        """Weight shared by the query and each field: (FIELDS, n_tools) float64."""
        where, values = [], []
        for cls, weight in query.items():
            place = self._places.get(cls)
            if place is not None:
                where.append(place)
                values.append(np.full(len(place), weight))
        if not where:
            return np.zeros((self.size // self.n_tools, self.n_tools)) if self.n_tools else np.zeros((0, 0))
        flat = np.bincount(np.concatenate(where), np.concatenate(values), minlength=self.size)
        return flat.reshape(-1, self.n_tools)
