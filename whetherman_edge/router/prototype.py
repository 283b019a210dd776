"""A tool, embedded once: int8 rows, stems, a bias, and who it is. A slate is a stack of these, ready to score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from whetherman_edge.router.artifact import Artifact, fault
from whetherman_edge.router.card import ToolCard
from whetherman_edge.router.identity_head import Identity, IdentityHead, gather
from whetherman_edge.router.lexical import Postings, Stems, StemTable
from whetherman_edge.router.table import RouterTable

I8Matrix = npt.NDArray[np.int8]
I8Vector = npt.NDArray[np.int8]
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
        self._name_share = float(config["name_share"])
        self._has_parameters_bias = float(config["has_parameters_bias"])
        self._field_weights: list[tuple[float, float, float]] = [
            (float(c), float(o), float(f)) for c, o, f in config["lexical"]
        ]
        self._bias = bias_vector(table.artifact, table.dim)

    def prototype(self, card: ToolCard) -> Prototype:
        """Embed one tool."""
        table = self.table
        ids = [
            table.token_list(text, FIELD_TOKENS_MAX)
            for text in (card.title, card.description, " ".join(card.parameters))
        ]
        name, description, parameters = (self._pool(i) for i in ids)
        identity = self.head.recognise(card, description, table.kernels) if self.head else None
        if not description.any():
            description = name
        both = to_int8(self._name_share * name + description)
        rows = np.stack([both, to_int8(description), to_int8(name), to_int8(parameters)])
        examples = [to_int8(self._pool(table.token_list(text, FIELD_TOKENS_MAX))) for text in card.examples]
        return Prototype(
            name=card.name,
            rows=rows,
            examples=np.stack(examples) if examples else np.zeros((0, table.dim), dtype=np.int8),
            stems=tuple(self.stems.weights(i) for i in ids),
            bias=self._tool_bias(both) + (self._has_parameters_bias if ids[2] else 0.0),
            identity=identity,
        )

    def slate(self, tools: Sequence[Prototype]) -> Slate:
        """Stack ``tools``, in order."""
        blocks = [np.stack([t.rows[c] for t in tools]) for c in range(len(CHANNELS))] if tools else []
        blocks += [t.examples for t in tools if len(t.examples)]
        rows = np.concatenate(blocks) if blocks else np.zeros((0, self.table.dim), dtype=np.int8)
        wide = rows.astype(np.int64)
        at, index, strength = gather([t.identity for t in tools])
        return Slate(
            names=tuple(t.name for t in tools),
            rows=rows,
            norms=np.sqrt((wide * wide).sum(axis=1).astype(np.float64)),
            example_tool=np.repeat(np.arange(len(tools)), [len(t.examples) for t in tools]),
            postings=Postings([[t.stems[f] for t in tools] for f in range(len(FIELDS))], self._field_weights),
            bias=np.array([t.bias for t in tools], dtype=np.float64),
            known_at=at,
            known_index=index,
            known_strength=strength,
        )

    def _pool(self, ids: list[int]) -> I32Vector:
        return self.table.kernels.pool_i8(self.table.rows, np.array(ids, dtype=np.int32))

    def _tool_bias(self, both: I8Vector) -> float:
        """How readily this tool is chosen whatever the query: learned, so that generic tools stop stealing."""
        wide = both.astype(np.float64)
        norm = float(np.sqrt(wide @ wide))
        return float(self._bias @ wide) / norm if norm else 0.0


def bias_vector(artifact: Artifact, dim: int) -> F64Vector:
    """The learned bias direction, (dim,) float64; zero where the artifact has none."""
    if "bias" not in artifact:
        return np.zeros(dim)
    bias = artifact.array("bias", "F32", 1).astype(np.float64)
    if bias.shape != (dim,) or not np.isfinite(bias).all():
        raise fault(artifact.path, "bias section does not match the table")
    return bias


def to_int8(pooled: npt.NDArray[Any]) -> I8Vector:
    """A direction as int8: scaled so that its largest entry is 127; zero stays zero."""
    peak = float(np.abs(pooled).max(initial=0))
    if peak == 0.0:
        return np.zeros(pooled.shape, dtype=np.int8)
    return np.rint(pooled.astype(np.float64) * (127.0 / peak)).astype(np.int8)
