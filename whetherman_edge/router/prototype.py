"""A tool, embedded once: int8 rows, stems, a bias, and who it is. A slate is a stack of these, ready to score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from whetherman_edge.kernels import norms_i8
from whetherman_edge.router.artifact import Artifact, fault
from whetherman_edge.router.card import ToolCard
from whetherman_edge.router.fields import FieldReader
from whetherman_edge.router.identity_head import Identity, IdentityHead, gather
from whetherman_edge.router.lexical import Postings, Stems, StemTable
from whetherman_edge.router.table import RouterTable

I8Matrix = npt.NDArray[np.int8]
I32Vector = npt.NDArray[np.int32]
F64Vector = npt.NDArray[np.float64]

CHANNELS: Final = ("tool", "description", "name", "parameters")
FIELDS: Final = ("name", "description", "parameters")
FIELD_TOKENS_MAX: Final = 256  # what training saw; MCP descriptions run to thousands of tokens of caveats


class Prototype(msgspec.Struct, frozen=True, gc=False):
    """One tool. ``rows``: (4, dim) int8 in the order of CHANNELS; ``examples``: (m, dim) int8; ``stems``: of FIELDS."""

    name: str
    rows: I8Matrix
    examples: I8Matrix
    stems: tuple[Stems, ...]
    bias: float
    identity: Identity | None


class Slate(msgspec.Struct, frozen=True, gc=False):
    """A list of tools, ready to score.

    ``rows``: (4 n + examples, dim) int8, channel-major, then the examples; ``norms``: their lengths, float64.
    ``example_tool``: the tool of each example row. ``bias``: (n,). ``known_*``: position, known-tool index and strength
    of the tools that the identity head recognises.
    """

    names: tuple[str, ...]
    rows: I8Matrix
    norms: F64Vector
    example_tool: npt.NDArray[np.intp]
    postings: Postings
    bias: F64Vector
    known_at: npt.NDArray[np.intp]
    known_index: npt.NDArray[np.intp]
    known_strength: F64Vector

    @property
    def n_tools(self) -> int:
        """Number of tools."""
        return len(self.names)


class Embedder:
    """Turns cards into prototypes and prototypes into slates."""

    def __init__(
        self, table: RouterTable, stems: StemTable, head: IdentityHead | None, config: Mapping[str, Any]
    ) -> None:
        self.table, self.stems, self.head = table, stems, head
        self.fields = FieldReader(table, stems)
        gate = table.kernels.gate
        self._rows_into = gate.tool_rows_into if gate is not None else tool_rows_into
        self._no_examples = np.zeros((0, table.dim), dtype=np.int8)
        self._name_share = float(config["name_share"])
        self._has_parameters_bias = float(config["has_parameters_bias"])
        self._field_weights: list[tuple[float, float, float]] = [
            (float(c), float(o), float(f)) for c, o, f in config["lexical"]
        ]
        self._bias = bias_vector(table.artifact, table.dim)

    def prototypes(self, cards: Sequence[ToolCard]) -> list[Prototype]:
        """Embed tools; the arithmetic runs over all of them at once."""
        table, n = self.table, len(cards)
        titles = [card.title for card in cards]
        texts = [
            text
            for title, card in zip(titles, cards, strict=True)
            for text in (title, card.description, " ".join(card.parameters))
        ]
        flat = np.zeros((len(FIELDS) * n, table.dim), dtype=np.int32)
        n_tokens, stems = zip(*self.fields.fields(texts, FIELD_TOKENS_MAX, flat), strict=True) if n else ((), ())
        fields = flat.reshape(n, len(FIELDS), table.dim)
        identities = [
            self.head.recognise(card, title, fields[t, 1], table.kernels) if self.head else None
            for t, (card, title) in enumerate(zip(cards, titles, strict=True))
        ]
        described = np.array(n_tokens[1::3], dtype=bool)
        rows = np.empty((n, len(CHANNELS), table.dim), dtype=np.int8)
        self._rows_into(fields, described, self._name_share, rows)
        both = rows[:, 0].astype(np.float64)
        bias = ((both @ self._bias) / np.maximum(np.sqrt((both * both).sum(axis=1)), 1e-9)).tolist()
        return [
            Prototype(
                name=card.name,
                rows=rows[t].copy(),  # not a view: it would keep the whole batch alive
                examples=self._examples(card),
                stems=tuple(stems[3 * t : 3 * t + 3]),
                bias=bias[t] + (self._has_parameters_bias if n_tokens[3 * t + 2] else 0.0),
                identity=identities[t],
            )
            for t, card in enumerate(cards)
        ]

    def slate(self, tools: Sequence[Prototype]) -> Slate:
        """Stack ``tools``, in order."""
        n, dim = len(tools), self.table.dim
        blocks = [np.array([t.rows for t in tools], dtype=np.int8).reshape(n, len(CHANNELS), dim).swapaxes(0, 1)]
        stacked = [blocks[0].reshape(len(CHANNELS) * n, dim), *(t.examples for t in tools if len(t.examples))]
        rows = np.concatenate(stacked) if len(stacked) > 1 else np.ascontiguousarray(stacked[0])
        at, index, strength = gather([t.identity for t in tools])
        return Slate(
            names=tuple(t.name for t in tools),
            rows=rows,
            norms=norms_i8(rows),
            example_tool=np.repeat(np.arange(n), [len(t.examples) for t in tools]),
            postings=Postings([[t.stems[f] for t in tools] for f in range(len(FIELDS))], self._field_weights),
            bias=np.array([t.bias for t in tools], dtype=np.float64),
            known_at=at,
            known_index=index,
            known_strength=strength,
        )

    def _examples(self, card: ToolCard) -> I8Matrix:
        if not card.examples:
            return self._no_examples
        pooled = np.zeros((len(card.examples), self.table.dim), dtype=np.int32)
        self.fields.fields(card.examples, FIELD_TOKENS_MAX, pooled)
        return to_int8(pooled)


def bias_vector(artifact: Artifact, dim: int) -> F64Vector:
    """The learned bias direction, (dim,) float64; zero where the artifact has none."""
    if "bias" not in artifact:
        return np.zeros(dim)
    bias = artifact.array("bias", "F32", 1).astype(np.float64)
    if bias.shape != (dim,) or not np.isfinite(bias).all():
        raise fault(artifact.path, "bias section does not match the table")
    return bias


def tool_rows_into(
    fields: npt.NDArray[np.int32], described: npt.NDArray[np.bool_], name_share: float, rows: npt.NDArray[np.int8]
) -> int:
    """The channels of tools, for their fields; returns n. The compiled twin gives the same.

    fields: (n, 3, dim) int32, pooled, in the order of FIELDS. described: (n,), False for a tool without a description,
    which is what its name says. rows: (n, 4, dim) int8, to be filled, in the order of CHANNELS.
    """
    name, described_by, parameters = fields.swapaxes(0, 1).astype(np.float64)
    description = np.where(described[:, None], described_by, name)
    rows[:] = to_int8(np.stack([name_share * name + description, description, name, parameters], axis=1))
    return len(rows)


def to_int8(pooled: npt.NDArray[Any]) -> npt.NDArray[np.int8]:
    """Directions (…, dim) as int8: each scaled so that its largest entry is 127; zero stays zero."""
    peak = np.maximum(pooled.max(axis=-1, keepdims=True, initial=0), -pooled.min(axis=-1, keepdims=True, initial=0))
    scaled = pooled * (127.0 / np.maximum(peak, 1e-9))
    return np.asarray(np.rint(scaled, out=scaled), dtype=np.int8)
