"""Which tool fits a query: cosines of static embeddings, shared words, a calibrated softmax.

Pure: no I/O, no clock, no logging. All numbers come from the artifact and the request, and are the same with the NumPy and the
native kernels.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from whetherman_edge.dialects.chat import Tool
from whetherman_edge.errors import RequestError
from whetherman_edge.router.card import ToolCard, cards_of, from_tool
from whetherman_edge.router.decision import Choice
from whetherman_edge.router.lexical import Postings, StemTable
from whetherman_edge.router.table import Kernels, RouterTable, words_of

F64Vector = npt.NDArray[np.float64]
I8Matrix = npt.NDArray[np.int8]

TOOLS_CACHED_MAX: Final = 4096  # about 2 KB each
SLATES_CACHED_MAX: Final = 64  # 40 tools: about 60 KB each
CHANNELS: Final = ("tool", "description", "name")


class Prototype(msgspec.Struct, frozen=True, gc=False):
    """One tool, embedded: ``rows`` (3, dim) int8 in the order of CHANNELS, ``examples`` (m, dim) int8, and the stem
    weights of name, description and parameters.
    """

    name: str
    rows: I8Matrix
    examples: I8Matrix
    stems: tuple[dict[int, float], dict[int, float], dict[int, float]]


class Slate(msgspec.Struct, frozen=True, gc=False):
    """A list of tools, ready to score. ``rows``: (3 n + examples, dim) int8, channel-major, then the examples."""

    names: tuple[str, ...]
    rows: I8Matrix
    norms: F64Vector
    example_tool: npt.NDArray[np.int64]
    postings: Postings

    @property
    def n_tools(self) -> int:
        return len(self.names)


class Scores(msgspec.Struct, frozen=True, gc=False):
    """Scores of one query over a slate; each array is (n_tools,) float64 in the slate's order.

    ``logit``: the score before the temperature. ``cos_*``: cosines in [-1, 1]. ``lexical``: shared-word score.
    ``probability``: calibrated softmax.
    """

    logit: F64Vector
    cos_tool: F64Vector
    cos_desc: F64Vector
    cos_name: F64Vector
    lexical: F64Vector
    probability: F64Vector


class Scorer:
    """Scores queries against slates; keeps tools and slates in LRU caches. Not shared between threads."""

    def __init__(self, table: RouterTable, kernels: Kernels | None = None) -> None:
        self.table = table
        self.kernels: Kernels = kernels or table.kernels
        self._stems = StemTable(table.artifact, table.vocab_size)
        self._config = table.artifact.json("config")
        self._temperature = float(self._config["temperature"])
        self._tools: OrderedDict[bytes, Prototype] = OrderedDict()
        self._slates: OrderedDict[bytes, Slate] = OrderedDict()

    def slate(self, tools: Sequence[Tool | ToolCard], key: bytes = b"") -> Slate:
        """The slate of ``tools``; ``key`` names this very list (b"" = the tools' own keys joined)."""
        key = key or b"".join(tool.key for tool in tools)
        slate = self._slates.get(key)
        if slate is not None:
            self._slates.move_to_end(key)
            return slate
        slate = self._build([self._prototype(tool) for tool in tools])
        self._slates[key] = slate
        if len(self._slates) > SLATES_CACHED_MAX:
            self._slates.popitem(last=False)
        return slate

    def score(self, query: str, slate: Slate) -> Scores:
        """Scores of ``query`` for each tool of ``slate``."""
        words = words_of(query[:8192])
        ids = self.table.tokens_of(query, words)
        pooled = self.kernels.pool_i8(self.table.rows, np.array(ids, dtype=np.int32))
        n = slate.n_tools
        cosines = self.kernels.cosine_i8(pooled, slate.rows, slate.norms)
        cos_tool, cos_desc, cos_name = cosines[:n], cosines[n : 2 * n], cosines[2 * n : 3 * n]
        if len(slate.example_tool):
            cos_tool = cos_tool.copy()
            np.maximum.at(cos_tool, slate.example_tool, cosines[3 * n :])
        lexical = self._lexical(self._stems.weights(ids), slate)
        logit = 7.0 * cos_tool + 3.0 * cos_desc + 2.0 * cos_name + lexical
        return Scores(logit, cos_tool, cos_desc, cos_name, lexical, softmax(logit / self._temperature))

    def route(self, query: str, options: Mapping[str, str | Mapping[str, Any] | None]) -> Choice:
        """Choose one of ``options``. Raises RequestError (a ValueError) for anything out of contract."""
        if not isinstance(query, str):
            raise RequestError(f"query must be a string, got {type(query).__name__}", ("body", "query"), "string_type")
        if not query.strip():
            raise RequestError("query must not be empty", ("body", "query"), "string_too_short")
        slate = self.slate(cards_of(options))
        return choice_of(slate, self.score(query, slate))

    def _lexical(self, query: dict[int, float], slate: Slate) -> F64Vector:
        shared = slate.postings.shared(query)
        total = sum(query.values())
        if not total or not slate.n_tools:
            return np.zeros(slate.n_tools)
        covered = shared / total
        own = shared / np.maximum(slate.postings.totals, 1e-9)
        return np.asarray(0.5 * covered[0] + 0.5 * own[0] + 0.5 * covered[1] + 0.25 * own[1])

    def _prototype(self, tool: Tool | ToolCard) -> Prototype:
        found = self._tools.get(tool.key)
        if found is not None:
            self._tools.move_to_end(tool.key)
            return found
        card = tool if isinstance(tool, ToolCard) else from_tool(tool)
        title = card.title
        ids = {
            "name": self.table.token_list(title),
            "description": self.table.token_list(card.description),
            "parameters": self.table.token_list(" ".join(card.parameters)),
        }
        both = ids["name"] + self.table.token_list(". ") + ids["description"]
        rows = np.stack([self._row(both), self._row(ids["description"] or ids["name"]), self._row(ids["name"])])
        examples = [self._row(self.table.token_list(text)) for text in card.examples]
        prototype = Prototype(
            name=card.name,
            rows=rows,
            examples=np.stack(examples) if examples else np.zeros((0, self.table.dim), dtype=np.int8),
            stems=tuple(self._stems.weights(part) for part in ids.values()),  # type: ignore[arg-type]
        )
        self._tools[tool.key] = prototype
        if len(self._tools) > TOOLS_CACHED_MAX:
            self._tools.popitem(last=False)
        return prototype

    def _row(self, ids: list[int]) -> npt.NDArray[np.int8]:
        return to_int8(self.kernels.pool_i8(self.table.rows, np.array(ids, dtype=np.int32)))

    def _build(self, tools: Sequence[Prototype]) -> Slate:
        dim = self.table.dim
        blocks = [np.stack([t.rows[c] for t in tools]) for c in range(len(CHANNELS))] if tools else []
        blocks += [t.examples for t in tools if len(t.examples)]
        rows = np.concatenate(blocks) if blocks else np.zeros((0, dim), dtype=np.int8)
        wide = rows.astype(np.int64)
        return Slate(
            names=tuple(t.name for t in tools),
            rows=rows,
            norms=np.sqrt((wide * wide).sum(axis=1).astype(np.float64)),
            example_tool=np.repeat(np.arange(len(tools)), [len(t.examples) for t in tools]),
            postings=Postings([[t.stems[f] for t in tools] for f in range(3)]),
        )


def to_int8(pooled: npt.NDArray[Any]) -> npt.NDArray[np.int8]:
    """A direction as int8: scaled so that its largest entry is 127; zero stays zero."""
    peak = float(np.abs(pooled).max(initial=0))
    if peak == 0.0:
        return np.zeros(pooled.shape, dtype=np.int8)
    return np.rint(pooled.astype(np.float64) * (127.0 / peak)).astype(np.int8)


def softmax(logit: F64Vector) -> F64Vector:
    """Probabilities of ``logit``; empty stays empty."""
    if not len(logit):
        return np.zeros(0)
    weight = np.exp(logit - logit.max())
    return np.asarray(weight / weight.sum())


def choice_of(slate: Slate, scores: Scores) -> Choice:
    """The typed answer; ties go to the earlier option."""
    best = int(np.argmax(scores.probability))
    probabilities = dict(zip(slate.names, scores.probability.tolist(), strict=True))
    return Choice(choice=slate.names[best], probabilities=probabilities, confidence=float(scores.probability[best]))
