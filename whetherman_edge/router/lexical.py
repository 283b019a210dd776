"""Words that query and tool share, stemmed and weighted by learned rarity.

Everything happens on WordPiece ids: the artifact maps each id to a stem class (``stem``) and each class to a weight
(``idf``; 0 for function words and punctuation), so nothing is stemmed at run time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
        self._pairs: dict[int, tuple[int, float]] = {}  # at most vocab_size entries, filled as tokens are met

    def weights(self, token_ids: Iterable[int]) -> Stems:
        """Stem class -> weight of the content words among ``token_ids``, in order of first appearance."""
        pairs = self._pairs
        found: Stems = {}
        for token in token_ids:
            pair = pairs.get(token)
            if pair is None:
                cls = int(self.stem[token])
                pair = pairs[token] = (cls, float(self.idf[cls]))
            if pair[1] > 0.0:
                found[pair[0]] = pair[1]
        return found


class Postings:
    """Inverted index of a slate over the stems of its tools' fields (name, description, parameters).

    With w(s) the weight of a stem, the lexical score of tool t is

        sum over fields f of  covered_f * w(q & t_f) / w(q)  +  own_f * w(q & t_f) / (w(t_f) + floor_f)

    the share of the query's words that the field covers, and the share of the field's words that the query names.
    Both sums are additive over shared stems, so each stem carries its contributions ready-made.
    """

    def __init__(self, fields: Sequence[Sequence[Stems]], weights: Sequence[tuple[float, float, float]]) -> None:
        """``fields[f][t]``: stems of field ``f`` of tool ``t``. ``weights[f]``: (covered, own, floor)."""
        self.n_tools = len(fields[0]) if fields else 0
        gathered: dict[int, dict[int, list[float]]] = {}
        for tools, (covered, own, floor) in zip(fields, weights, strict=True):
            for t, stems in enumerate(tools):
                total = sum(stems.values()) + floor
                for cls, weight in stems.items():
                    cell = gathered.setdefault(cls, {}).setdefault(t, [0.0, 0.0])
                    cell[0] += covered * weight
                    cell[1] += own * weight / total
        order = sorted(gathered)
        cells = [gathered[cls] for cls in order]
        # The index as arrays: cells [starts[i], starts[i + 1]) are those of stem class ``classes[i]``.
        self.classes = np.array(order, dtype=np.int32)
        self.starts = np.cumsum([0, *map(len, cells)], dtype=np.int32)
        self.tools = np.array([t for cell in cells for t in cell], dtype=np.int32)
        self.shares: F64Array = np.array([share for cell in cells for share in cell.values()], dtype=np.float64)
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
