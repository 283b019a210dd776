"""What the gate knows of an offered tool and of a tool list, computed once per tool and per list."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from whetherman_edge.dialects.chat import Tool
from whetherman_edge.gate.text_signals import NAMES_CACHED_MAX, Embedded, TextReader, name_words
from whetherman_edge.gate.tool_effect import effect
from whetherman_edge.router.lexical import Stems
from whetherman_edge.router.prototype import Slate
from whetherman_edge.router.tool_lru import ListLru, ToolLru

F32Matrix = npt.NDArray[np.float32]

DESCRIPTION_CHARS_MAX: Final = 400
MEMO_MAX: Final = 32  # of one text: a text is rarely seen with more than one tool list

# An argument that names one thing: only a lookup or the user can know it.
_IDENTIFIER = re.compile(r"(?:^|_)(?:id|ids|uuid|key|number|no|ref|code|uid|sku)$|[a-z](?:Id|ID|No|Key|Ref)$")


class ToolSignals(msgspec.Struct, frozen=True, gc=False):
    """One tool. ``name_stems``, ``stems``: of its name; of name, description and arguments.

    ``required``: words of each required argument's name; ``identifiers``: of those that name one thing.
    """

    name: str
    name_stems: Stems
    name_weight: float
    stems: Stems
    required: tuple[frozenset[str], ...]
    identifiers: tuple[frozenset[str], ...]
    n_parameters: int
    reads: bool
    writes: bool


class ToolsetSignals(msgspec.Struct, frozen=True, gc=False):
    """A tool list. ``vectors``: (n, dim) float32 of length 1 (zeros for a tool without words), ``embedded`` one by one;
    ``mean``: their mean, which is shorter than 1.

    ``stems``, ``name_stems``: of all tools. ``shares``: (reads, writes, without required arguments, with identifiers,
    log of the mean description length), each over the list.
    """

    key: bytes
    tools: tuple[ToolSignals, ...]
    index: dict[str, int]
    vectors: F32Matrix
    embedded: tuple[Embedded, ...]
    mean: Embedded
    stems: Stems
    name_stems: Stems
    shares: tuple[float, float, float, float, float]

    def cosines(self, text: Embedded) -> list[float]:
        """Cosine of a text with each tool, remembered with the text."""
        if text.is_empty:
            return [0.0] * len(self.tools)
        found: list[float] | None = text.memo.get(self.key)
        if found is None:
            if len(text.memo) > MEMO_MAX:
                text.memo.clear()
            found = text.memo[self.key] = (self.vectors @ text.vector).tolist()
        return found


class ToolReader:
    """Signals of tools and tool lists, cached by their keys. Not shared between threads."""

    def __init__(self, texts: TextReader) -> None:
        self._texts = texts
        self._tools: ToolLru[ToolSignals] = ToolLru()
        self._sets: ListLru[ToolsetSignals] = ListLru()

    def toolset(self, tools: Sequence[Tool], slate: Slate, key: bytes) -> ToolsetSignals:
        """Signals of a non-empty list. ``slate``: the router's slate of the same list; ``key`` names the list."""
        found = self._sets.get(key)
        if found is not None:
            return found
        signals = self._tools.each(tools, self._looked_at)
        return self._sets.put(key, _combine(key, signals, slate, embeds=True), len(tools))

    def prepare(self, tools: Sequence[Tool]) -> None:
        """Look at some tools ahead of their list."""
        self._tools.each(tools, self._looked_at)

    def combined(self, tools: Sequence[Tool], slate: Slate, key: bytes) -> ToolsetSignals:
        """As ``toolset``, for a caller that keeps what it makes of it and wants no ``embedded``."""
        return _combine(key, self._tools.each(tools, self._looked_at), slate, embeds=False)

    def _looked_at(self, tools: Sequence[Tool]) -> list[ToolSignals]:
        """Signals of tools not met before; their texts are read together."""
        names = [name_words(tool.name) for tool in tools]
        arguments = [[_argument(p.name) for p in tool.parameters] for tool in tools]
        wholes = [
            f"{name} {tool.description[:DESCRIPTION_CHARS_MAX]} {' '.join([words for words, _, _ in of_tool])}"
            for tool, name, of_tool in zip(tools, names, arguments, strict=True)
        ]
        stems = self._texts.stems([*names, *wholes])
        n = len(tools)
        return [_signals(tool, arguments[t], name_stems=stems[t], stems=stems[n + t]) for t, tool in enumerate(tools)]


def _signals(
    tool: Tool, arguments: Sequence[tuple[str, frozenset[str], bool]], *, name_stems: Stems, stems: Stems
) -> ToolSignals:
    required = [argument for argument, p in zip(arguments, tool.parameters, strict=True) if p.required]
    kind = effect(tool)
    return ToolSignals(
        name=tool.name,
        name_stems=name_stems,
        name_weight=sum(name_stems.values()),
        stems=stems,
        required=tuple([names for _, names, _ in required]),
        identifiers=tuple([names for _, names, identifies in required if identifies]),
        n_parameters=len(arguments),
        reads=kind == "read",
        writes=kind in ("write", "execute"),
    )


@lru_cache(maxsize=NAMES_CACHED_MAX)
def _argument(name: str) -> tuple[str, frozenset[str], bool]:
    """An argument's name as words, the same in lower case one by one, and whether it names one thing."""
    words = name_words(name)
    return words, frozenset(words.lower().split()), _IDENTIFIER.search(name) is not None


def _combine(key: bytes, tools: Sequence[ToolSignals], slate: Slate, *, embeds: bool) -> ToolsetSignals:
    n = len(tools)
    rows = slate.rows[:n].astype(np.float32)
    lengths = slate.norms[:n].astype(np.float32)
    vectors: F32Matrix = np.divide(rows, np.where(lengths > 0, lengths, np.float32(1.0))[:, None], dtype=np.float32)
    empty = [not length for length in lengths.tolist()] if embeds else []
    stems: Stems = {}
    name_stems: Stems = {}
    for tool in tools:
        stems.update(tool.stems)
        name_stems.update(tool.name_stems)
    return ToolsetSignals(
        key=key,
        tools=tuple(tools),
        index={tool.name: i for i, tool in enumerate(tools)},
        vectors=vectors,
        embedded=tuple([Embedded(row, is_empty) for row, is_empty in zip(vectors, empty, strict=True)])
        if embeds
        else (),
        mean=Embedded(vectors.mean(axis=0), not vectors.any()),
        stems=stems,
        name_stems=name_stems,
        shares=(
            sum(tool.reads for tool in tools) / n,
            sum(tool.writes for tool in tools) / n,
            sum(not tool.required for tool in tools) / n,
            sum(bool(tool.identifiers) for tool in tools) / n,
            math.log1p(sum(len(tool.stems) for tool in tools) / n),
        ),
    )
