"""Words that query and tool share, stemmed and weighted by learned rarity.

Everything happens on WordPiece ids: the artifact maps each id to a stem class (``stem``) and each class to a weight
(``idf``; 0 for function words and punctuation), so nothing is stemmed at run time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from whetherman_edge.router.artifact import Artifact, fault

F64Array = npt.NDArray[np.float64]
Stems = dict[int, float]


class StemTable:
    """Stem class and weight of each vocabulary entry."""

    def __init__(self, artifact: Artifact, vocab_size: int) -> None:
        self.stem = artifact.array("stem", "I32", 1)
        self.idf = artifact.array("idf", "F32", 1)
        if self.stem.shape != (vocab_size,) or self.idf.shape != (vocab_size,):
            raise fault(artifact.path, "stem or idf section does not match the vocabulary")
        if vocab_size and not (int(self.stem.min()) >= 0 and int(self.stem.max()) < vocab_size):
            raise fault(artifact.path, "stem section points outside the vocabulary")
        if not np.isfinite(self.idf).all():
            raise fault(artifact.path, "idf section is not finite")
        self._pairs = _Pairs(self.stem, self.idf)

    def weights(self, token_ids: Iterable[int]) -> Stems:
        """Stem class -> weight of the content words among ``token_ids``, in order of first appearance."""
        pairs = self._pairs
        return dict([pair for token in token_ids if (pair := pairs[token])])


class _Pairs(dict[int, tuple[int, float] | None]):
    """Token to its stem class and weight, None where it is no content word; filled as tokens are met."""

    def __init__(self, stem: npt.NDArray[np.int32], idf: npt.NDArray[np.float32]) -> None:
        super().__init__()
        self._stem, self._idf = stem, idf

    def __missing__(self, token: int) -> tuple[int, float] | None:
        cls = int(self._stem[token])
        weight = float(self._idf[cls])
        pair = self[token] = (cls, weight) if weight > 0.0 else None
        return pair


class Postings:
    """Inverted index of a slate over the stems of its tools' fields (name, description, parameters).

    With w(s) the weight of a stem, the lexical score of tool t is

        sum over fields f of  covered_f * w(q & t_f) / w(q)  +  own_f * w(q & t_f) / (w(t_f) + floor_f)

    the share of the query's words that the field covers, and the share of the field's words that the query names.
    Both sums are additive over shared stems, so each stem carries its contributions ready-made.
    """

    def __init__(self, fields: Sequence[Sequence[Stems]], weights: Sequence[tuple[float, float, float]]) -> None:
        """``fields[f][t]``: stems of field ``f`` of tool ``t``. ``weights[f]``: (covered, own, floor)."""
        self.n_tools = n = len(fields[0]) if fields else 0
        flat = [stems for tools in fields for stems in tools]
        sizes = [len(stems) for stems in flat]
        size = sum(sizes)
        classes = np.fromiter(chain.from_iterable(flat), np.int64, size)
        weight = np.fromiter(chain.from_iterable([stems.values() for stems in flat]), np.float64, size)
        covered, own, floor = np.array(weights, dtype=np.float64).reshape(-1, 3)[: len(fields)].repeat(n, axis=0).T
        total = np.array([sum(stems.values()) for stems in flat], dtype=np.float64) + floor
        parts = covered.repeat(sizes) * weight, own.repeat(sizes) * weight / total.repeat(sizes)
        places = classes * n + np.tile(np.arange(n), len(fields)).repeat(sizes)
        cells, cell = np.unique(places, return_inverse=True)
        # The index as arrays: cells [starts[i], starts[i + 1]) are those of stem class ``classes[i]``.
        owner, at = np.divmod(cells, max(n, 1))
        first = np.flatnonzero(np.diff(owner, prepend=-1))
        self.classes = owner[first].astype(np.int32)
        self.starts = np.append(first, len(cells)).astype(np.int32)
        self.tools = at.astype(np.int32)
        # bincount adds in the order of the fields, as the sum above is written
        both = [np.bincount(cell, part, len(cells)) for part in parts]
        self.shares: F64Array = np.stack(both, axis=1)
        self._places: dict[int, tuple[npt.NDArray[np.intp], F64Array]] | None = None

    def _read_places(self) -> dict[int, tuple[npt.NDArray[np.intp], F64Array]]:
        """By stem class: positions in the covered and own scores laid end to end, and what is added there."""
        places = {}
        shares = self.shares.reshape(-1, 2)
        starts = self.starts.tolist()
        for i, cls in enumerate(self.classes.tolist()):
            part = slice(starts[i], starts[i + 1])
            at = self.tools[part].astype(np.intp)
            places[cls] = np.concatenate([at, at + self.n_tools]), shares[part].T.ravel()
        return places

    def score(self, query: Stems) -> F64Array:
        """Lexical score of each tool: (n_tools,) float64."""
        n = self.n_tools
        flat = np.zeros(2 * n)
        places = self._places
        if places is None:  # a slate of the compiled gate is never asked
            places = self._places = self._read_places()
        for cls in query:
            if cls in places:
                at, value = places[cls]
                flat[at] += value
        covered, own = flat[:n], flat[n:]
        total = sum(query.values())
        if total > 0.0:
            covered /= total
            covered += own
        return covered
