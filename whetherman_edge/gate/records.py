"""Texts, tool lists and weights as the compiled gate reads them: one buffer each, laid out as
``native/include/wh_gate.h`` says. What is packed comes from the same functions that ``features`` and ``heads`` use.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from whetherman_edge.gate.text_signals import QUESTION_MARKS, TextSignals, literal_values, n_numbers
from whetherman_edge.gate.tool_signals import ToolsetSignals, ToolSignals
from whetherman_edge.kernels import DenseWeights
from whetherman_edge.router.prototype import Slate

F64Vector = npt.NDArray[np.float64]
F32Matrix = npt.NDArray[np.float32]

N_CLASSES: Final = 4
N_PHASES: Final = 3
N_PROJECTIONS: Final = 8
TEXT_HEADER: Final = struct.Struct("<14i")
# Places of the n-gram head's shares in a text record: the user's of each phase, then these.
SLOTS: Final[Mapping[str, int]] = {"assistant": 3, "result": 4, "previous_user": 5, "system": 6}
N_SLOTS: Final = 7
NGRAMS_AT: Final = TEXT_HEADER.size + 8
SLOT_BYTES: Final = 8 * N_CLASSES
VECTOR_AT: Final = NGRAMS_AT + N_SLOTS * SLOT_BYTES + 4 * 12
EMPTY: Final = b""


def text_room(dim: int, n_columns: int) -> int:
    """Bytes that hold any record the compiled reader makes (WH_TEXT_RECORD_MAX)."""
    return VECTOR_AT + 8 * dim + 4 * N_PROJECTIONS * n_columns + 8 * 384 + 8 * 2048 + 3 * 2048


def pack_text(text: TextSignals, user: Sequence[float], n_columns: int) -> bytearray:
    """The record of a text, without n-grams and products. ``user``: ``features.user_scalars`` of it, 12 numbers."""
    literal = literal_values(text.text)
    values = [value.encode() for value in sorted(literal)]
    lower = text.lower.encode()
    stems = sorted(text.stems.items())
    starts = np.cumsum([0, *map(len, values)])
    spans = [(int(start), len(value)) for start, value in zip(starts, values, strict=False)]
    header = TEXT_HEADER.pack(
        *(
            len(text.vector),
            n_columns,
            text.n_tokens,
            len(stems),
            len(lower),
            len(values),
            int(starts[-1]),
            n_numbers(literal),
        ),
        *(len(text.text), text.text.rstrip().endswith(QUESTION_MARKS), "?" in text.text, 0, text.is_empty, 0),
    )
    return bytearray().join(
        [
            header,
            struct.pack("<d", text.weight),
            bytes(N_SLOTS * SLOT_BYTES),
            np.array(user, dtype=np.float32).tobytes(),
            text.vector.tobytes(),
            text.pooled.tobytes(),
            bytes(4 * N_PROJECTIONS * n_columns),
            np.array([stem for stem, _ in stems], dtype=np.int32).tobytes(),
            np.array([weight for _, weight in stems], dtype=np.float32).tobytes(),
            np.array(spans, dtype=np.int32).tobytes(),
            lower,
            *values,
        ]
    )


def pack_tools(
    toolset: ToolsetSignals, slate: Slate, ngrams: bytes | bytearray, next_tool: F32Matrix, mean: F32Matrix
) -> bytes:
    """The record of a tool list.

    ngrams: (n, N_CLASSES) float64, the share of each tool's name as the next tool. next_tool, mean: (dim, n_columns)
    float32, the projections of a tool's vector and of their mean.
    """
    tools, n, dim = toolset.tools, len(toolset.tools), toolset.vectors.shape[1]
    postings = slate.postings
    tool_stems = [sorted(tool.stems) for tool in tools]
    name_stems = [sorted(tool.name_stems.items()) for tool in tools]
    all_stems, names_stems = sorted(toolset.stems), sorted(toolset.name_stems)
    counts = (
        *(n, dim, next_tool.shape[1], len(slate.example_tool), len(slate.known_at), len(all_stems), len(names_stems)),
        *(
            sum(map(len, tool_stems)),
            sum(map(len, name_stems)),
            len(postings.classes),
            len(postings.tools),
            not toolset.mean.is_empty,
        ),
    )
    flat_names = [pair for pairs in name_stems for pair in pairs]
    return b"".join(
        [
            struct.pack("<12i", *counts),
            slate.bias.astype(np.float64).tobytes(),
            np.array(toolset.shares, dtype=np.float64).tobytes(),
            np.array([tool.name_weight for tool in tools], dtype=np.float64).tobytes(),
            ngrams,
            slate.known_strength.astype(np.float64).tobytes(),
            postings.shares.tobytes(),
            np.ascontiguousarray(toolset.vectors).tobytes(),
            np.ascontiguousarray(toolset.mean.vector, dtype=np.float32).tobytes(),
            (toolset.vectors @ next_tool).tobytes(),
            (toolset.mean.vector @ mean).tobytes(),
            np.array([weight for _, weight in flat_names], dtype=np.float32).tobytes(),
            slate.example_tool.astype(np.int32).tobytes(),
            np.stack([slate.known_at, slate.known_index], axis=1).astype(np.int32).tobytes(),
            np.array([_facts(tool) for tool in tools], dtype=np.int32).tobytes(),
            _i32(all_stems),
            _i32(names_stems),
            _starts(tool_stems),
            _i32([stem for stems in tool_stems for stem in stems]),
            _starts(name_stems),
            _i32([stem for stem, _ in flat_names]),
            postings.classes.tobytes(),
            postings.starts.tobytes(),
            postings.tools.tobytes(),
        ]
    )


def _facts(tool: ToolSignals) -> tuple[int, int, int, int]:
    return tool.n_parameters, len(tool.required), len(tool.identifiers), int(tool.writes)


def _i32(values: Sequence[int]) -> bytes:
    return np.array(values, dtype=np.int32).tobytes()


def _starts(lists: Sequence[Sequence[Any]]) -> bytes:
    return _i32([0, *np.cumsum([len(part) for part in lists]).tolist()])


def pack_weights(
    *,
    mix: F64Vector,
    calibration: Sequence[float],
    ngram_bias: Sequence[float],
    blend: F64Vector,
    blend_bias: F64Vector,
    dense: DenseWeights,
    fused: Sequence[int],
) -> bytes:
    """The gate's weights but for the n-gram table.

    mix, calibration: ``Scorer.weights``. blend: (N_PHASES, 2 N_CLASSES, N_CLASSES), blend_bias: (N_PHASES, N_CLASSES)
    float64. fused: places of the scalars that a profile may use.
    """
    n_scalars, n_units = dense.scalar_weight.shape
    _, dim, n_columns = dense.projection.shape
    counts = (dim, n_scalars, n_units, n_columns, len(dense.hidden_bias), len(dense.alone), len(dense.left), len(fused))
    doubles = (mix, np.array(calibration), np.array(ngram_bias), blend, blend_bias)
    floats = (
        *(dense.mean, dense.scale, dense.limit, dense.scalar_weight, dense.scalar_bias, dense.projection),
        *(dense.hidden_weight, dense.hidden_bias, dense.out_weight, dense.out_bias),
    )
    return b"".join(
        [
            struct.pack("<8i", *counts),
            *[np.ascontiguousarray(array, dtype=np.float64).tobytes() for array in doubles],
            *[np.ascontiguousarray(array, dtype=np.float32).tobytes() for array in floats],
            *[_i32(array.tolist()) for array in (dense.alone, dense.left, dense.right)],
            _i32(fused),
        ]
    )
