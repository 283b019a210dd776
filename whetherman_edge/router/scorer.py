"""Which tool fits a query: cosines of static embeddings, shared words, known tools, a calibrated softmax.

Pure: no I/O, no clock, no logging. All numbers come from the artifact and the request, and are the same with the NumPy
and the native kernels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from whetherman_edge.dialects.chat import Tool
from whetherman_edge.errors import RequestError
from whetherman_edge.kernels import Kernels
from whetherman_edge.router.artifact import fault
from whetherman_edge.router.card import ToolCard, cards_of, check_text, from_tool
from whetherman_edge.router.decision import Choice
from whetherman_edge.router.identity_head import IdentityHead
from whetherman_edge.router.lexical import Stems, StemTable
from whetherman_edge.router.prototype import CHANNELS, Embedder, Prototype, Slate
from whetherman_edge.router.table import RouterTable
from whetherman_edge.router.tool_lru import LISTS_MAX, ListLru, ToolLru

F64Vector = npt.NDArray[np.float64]
I32Vector = npt.NDArray[np.int32]


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
    """Scores queries against slates; keeps tools and slates in LRU caches. Not shared between threads.

    Raises ArtifactError when the table's artifact lacks what scoring needs.
    """

    def __init__(self, table: RouterTable, kernels: Kernels | None = None) -> None:
        self.table = table
        self.kernels: Kernels = kernels or table.kernels
        artifact = table.artifact
        config = artifact.json("config")
        try:
            self._mix = np.array(config["mix"], dtype=np.float64)
            self._scale, self._scale_log_n, self._scale_known = (float(v) for v in config["calibration"])
            head = IdentityHead(artifact, table.dim, config["identity"]) if "identity" in config else None
            self._embedder = Embedder(table, StemTable(artifact, table.vocab_size), head, config)
        except (KeyError, TypeError, ValueError) as exc:
            raise fault(artifact.path, f"config section is incomplete or malformed ({exc})") from exc
        if self._mix.shape != (len(CHANNELS),) or not np.isfinite(self._mix).all():
            raise fault(artifact.path, f"config: expected {len(CHANNELS)} finite mixing weights")
        self._head = head
        self._tools: ToolLru[Prototype] = ToolLru()
        self._slates: ListLru[Slate] = ListLru()
        self._routes: dict[tuple[Any, ...], Slate] = {}

    def slate(self, tools: Sequence[Tool | ToolCard], key: bytes = b"") -> Slate:
        """The slate of ``tools``; ``key`` names this very list (b"" = the tools' own keys joined)."""
        key = key or b"".join([tool.key for tool in tools])
        found = self._slates.get(key)
        if found is not None:
            return found
        return self._slates.put(key, self._embedder.slate(self._prototypes(tools)), len(tools))

    def knows(self, key: bytes) -> bool:
        """Whether the slate of that key is kept."""
        return self._slates.get(key) is not None

    def prepare(self, tools: Sequence[Tool | ToolCard]) -> None:
        """Embed some tools ahead of ``slate``, for a caller that must not be held for hundreds of new ones at once."""
        self._prototypes(tools)

    def score(self, query: str, slate: Slate) -> Scores:
        """Scores of ``query`` for each tool of ``slate``."""
        ids = self.table.token_list(query)
        pooled = self.kernels.pool_i8(self.table.rows, np.array(ids, dtype=np.int32))
        return self.score_tokens(query, pooled, self._embedder.stems.weights(ids), slate)

    def score_tokens(self, query: str, pooled: I32Vector, stems: Stems, slate: Slate) -> Scores:
        """``score`` for a caller that has already pooled the query's tokens and looked up their stems.

        pooled: (dim,) int32.  stems: stem class -> weight, as ``StemTable.weights`` gives them.
        """
        kernels, n = self.kernels, slate.n_tools
        cosines = kernels.cosine_i8(pooled, slate.rows, slate.norms)
        if len(slate.example_tool):
            np.maximum.at(cosines, slate.example_tool, cosines[len(CHANNELS) * n :])
            cosines = cosines[: len(CHANNELS) * n]
        by_channel = cosines.reshape(len(CHANNELS), n)
        lexical = slate.postings.score(stems)
        logit: F64Vector = np.dot(self._mix, by_channel)
        logit += lexical
        logit += slate.bias
        scale = self._scale + self._scale_log_n * math.log(max(n, 2))
        if len(slate.known_at) and self._head is not None:
            known = self._head.scores(query, pooled, kernels)
            logit[slate.known_at] += slate.known_strength * known[slate.known_index]
            scale *= self._scale_known
        probability = softmax(logit * scale)
        return Scores(logit, by_channel[0], by_channel[1], by_channel[2], lexical, probability)

    def known_scores(self, query: str, pooled: I32Vector) -> F64Vector:
        """Scores of the known tools (``IdentityHead``), empty without that head.  pooled: (dim,) int32."""
        return self._head.scores(query, pooled, self.kernels) if self._head is not None else np.zeros(0)

    @property
    def weights(self) -> tuple[F64Vector, tuple[float, float, float]]:
        """The channels' mixing weights; the softmax's scale, its slope in log n, its factor with known tools."""
        return self._mix, (self._scale, self._scale_log_n, self._scale_known)

    def route(self, query: str, options: Mapping[str, str | Mapping[str, Any] | None]) -> Choice:
        """Choose one of ``options``. Raises RequestError (a ValueError) for anything out of contract."""
        check_query(query)
        slate = self._known_slate(options)
        return choice_of(slate, self.score(query, slate))

    def _known_slate(self, options: Mapping[str, str | Mapping[str, Any] | None]) -> Slate:
        """The slate of ``options``; the very same options skip the checks, which only a slate that passed can do.

        Descriptions and null are compared as they are (strings keep their hashes); objects as their JSON.
        """
        key: tuple[Any, ...]
        try:
            key = tuple(options.items())
            slate = self._routes.get(key)
        except (AttributeError, TypeError):
            try:
                key = (tuple(options), msgspec.json.encode(options))
                slate = self._routes.get(key)
            except (TypeError, ValueError, RecursionError):
                return self.slate(cards_of(options))
        if slate is None:
            slate = self.slate(cards_of(options))
            if len(self._routes) >= LISTS_MAX:
                self._routes.clear()
            self._routes[key] = slate
        return slate

    def _prototypes(self, tools: Sequence[Tool | ToolCard]) -> list[Prototype]:
        """Prototypes of ``tools``, in order; those not kept are embedded together."""

        def embed(missing: list[Tool | ToolCard]) -> list[Prototype]:
            return self._embedder.prototypes([one if isinstance(one, ToolCard) else from_tool(one) for one in missing])

        return self._tools.each(tools, embed)


def check_query(query: object, loc: tuple[str | int, ...] = ("body", "query")) -> None:
    """Raise RequestError unless ``query`` is a string with something in it."""
    if not isinstance(query, str):
        raise RequestError(f"query must be a string, got {type(query).__name__}", loc, "string_type")
    if not query.strip():
        raise RequestError("query must not be empty", loc, "string_too_short")
    check_text("query", query, loc)


def softmax(logit: F64Vector) -> F64Vector:
    """Probabilities of ``logit``; empty stays empty."""
    if not len(logit):
        return np.zeros(0)
    weight: F64Vector = np.exp(logit - logit[logit.argmax()])
    weight /= math.fsum(weight.tolist())  # exact, so the same everywhere; and faster than NumPy's for short slates
    return weight


def choice_of(slate: Slate, scores: Scores) -> Choice:
    """The typed answer; ties go to the earlier option."""
    best = int(scores.probability.argmax())
    probabilities = dict(zip(slate.names, scores.probability.tolist(), strict=True))
    return Choice(choice=slate.names[best], probabilities=probabilities, confidence=float(scores.probability[best]))
