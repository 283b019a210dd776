"""Fields of tools (name, description, arguments): tokens, stems and pooled rows of many texts in one compiled call.

A client that comes with 40 new tools brings 200 such texts, and a call a text costs as much as the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from whetherman_edge.router.lexical import Stems, StemTable
from whetherman_edge.router.table import CHARS_PER_TOKEN_MAX, RouterTable

I32Matrix = npt.NDArray[np.int32]

TOKENS_MAX: Final = 384  # of one field: WH_TEXT_TOKENS_MAX of native/include/wh_gate.h
_NOT_WANTED: Final = bytearray()


class Field(NamedTuple):
    """What a text holds: the number of its tokens, and its stems as ``StemTable.weights`` gives them."""

    n_tokens: int
    stems: Stems


class FieldReader:
    """Reads texts of one table. Not shared between threads."""

    def __init__(self, table: RouterTable, stems: StemTable) -> None:
        self._table, self._stems = table, stems
        gate = table.kernels.gate
        self._read = gate.token_fields if gate is not None else None
        if gate is not None:
            self._tables = (*table.wordpiece_tables(), table.rows.data, stems.stem, stems.idf, table.dim)

    def fields(
        self, texts: Sequence[str], tokens_max: int, pooled: I32Matrix | None = None
    ) -> Sequence[tuple[int, Stems]]:
        """A ``Field`` (or its like) for each text, cut to ``tokens_max`` (at most TOKENS_MAX) tokens.

        pooled: (n, dim) int32 zeros, to be filled with the sums of the texts' rows.
        """
        chars_max = tokens_max * CHARS_PER_TOKEN_MAX
        cut = tuple([text if len(text) <= chars_max else text[:chars_max] for text in texts])
        found = None
        if self._read is not None:
            try:
                found = self._read(cut, *self._tables, tokens_max, _NOT_WANTED if pooled is None else pooled)
            except UnicodeEncodeError:  # half a surrogate pair
                pass
        return self._one_by_one(cut, tokens_max, pooled) if found is None else found

    def _one_by_one(self, texts: Sequence[str], tokens_max: int, pooled: I32Matrix | None) -> list[Field]:
        table, found = self._table, []
        for place, text in enumerate(texts):
            ids = table.token_list(text, tokens_max)
            found.append(Field(len(ids), self._stems.weights(ids)))
            if pooled is not None:
                table.kernels.pool_i8_into(table.rows, np.array(ids, dtype=np.int32), pooled[place])
        return found
