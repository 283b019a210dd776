"""Dialogues as token tries: what shares a prefix is computed once.

The dialogues come in contrast sets: one tools block, many continuations. Trained one by one, four fifths of the work
would be spent on the same tools block again and again. A pack is a trie of token ids: the tools block is the trunk,
every dialogue a path, and a node attends to its ancestors only. The network's outputs at a node are those of the plain
sequence that leads to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from whetherman_edge.backbone.prompt import Piece, render, tokenize
from whetherman_edge.dialects.openai_chat import view
from whetherman_edge.dialects.tool_cache import ToolCache
from whetherman_edge.gate.verdict import LABELS

PACK_TOKENS: Final = 1_536
"""Nodes of one pack, unless one dialogue alone has more. Smaller packs repeat the trunk more often."""

NONE: Final = -1


class Example(msgspec.Struct, frozen=True):
    """One decision point. ``ids``: its prompt; the first ``n_tools`` ids are the tools block. ``target``: (4,)
    probabilities in the order of LABELS, ``weight`` its loss weight. ``tools``: indices of the right tool lines, NONE
    for none of them; empty when unknown. ``query``: in packs of requests beside one tool each, which of the pack's
    requests this is, else -1; the prompts of one request compete, and those whose tool ``fits`` should win.
    """

    key: str
    ids: tuple[int, ...]
    n_tools: int
    tool_ends: tuple[int, ...]
    target: tuple[float, float, float, float]
    weight: float
    tools: tuple[int, ...]
    tool_weight: float = 1.0
    query: int = -1
    fits: bool = False


class Pack(msgspec.Struct, frozen=True):
    """A trie of T nodes. ids, position: (T,) int32; parent: (T,) int32, -1 at the root, always smaller than the child.
    readout: (n,) int32, the node each example ends at; examples: beside it. tool_ends: (k,) int32 nodes of the tool
    lines.
    """

    ids: npt.NDArray[np.int32]
    position: npt.NDArray[np.int32]
    parent: npt.NDArray[np.int32]
    readout: npt.NDArray[np.int32]
    tool_ends: npt.NDArray[np.int32]
    examples: tuple[Example, ...]

    def mask(self) -> npt.NDArray[np.bool_]:
        """(T, T): True where the row's node may see the column's (an ancestor or itself)."""
        n = len(self.ids)
        seen = np.zeros((n, n), dtype=bool)
        for node, parent in enumerate(self.parent):
            if parent >= 0:
                seen[node] = seen[parent]
            seen[node, node] = True
        return seen


class Reader:
    """Chat bodies to examples, with the prompt code that runs in the daemon."""

    def __init__(
        self, tokens_of: Callable[[Piece], Sequence[int]], bos: int, *, tools_max: int, dialogue_max: int
    ) -> None:
        self._tokens_of, self._bos = tokens_of, bos
        self._tools_max, self._dialogue_max = tools_max, dialogue_max
        self._cache = ToolCache()

    def read(
        self,
        key: str,
        body: bytes,
        target: Sequence[float],
        weight: float,
        tools: Sequence[str] | None = None,
        tool_weight: float = 1.0,
    ) -> Example:
        """The example of one chat body. ``tools``: names of the right tools, empty for none of them, None unknown."""
        prompt = render(view(body, self._cache), "compact")
        tokens = tokenize(
            prompt, self._tokens_of, self._bos, tools_max=self._tools_max, dialogue_max=self._dialogue_max
        )
        names = prompt.tool_names[: len(tokens.tool_ends)]
        right: tuple[int, ...] = (NONE,) if tools is not None else ()
        if tools:
            right = tuple(names.index(name) for name in tools if name in names)
        a, b, c, d = target
        return Example(key, tokens.ids, tokens.n_tools, tokens.tool_ends, (a, b, c, d), weight, right, tool_weight)


def target_of(gold: str, accept: Sequence[str], gold_share: float = 0.75) -> list[float]:
    """Soft target: ``gold_share`` on gold, the rest shared by the other acceptable labels."""
    others = [label for label in accept if label != gold]
    if not others:
        return [float(label == gold) for label in LABELS]
    rest = (1.0 - gold_share) / len(others)
    return [gold_share if label == gold else rest if label in others else 0.0 for label in LABELS]


def pack(examples: Sequence[Example], pack_tokens: int = PACK_TOKENS) -> list[Pack]:
    """Examples with one tools block go into as few tries as ``pack_tokens`` allows, in their order."""
    groups: Mapping[tuple[int, ...], list[Example]] = defaultdict(list)
    for example in examples:
        groups[example.ids[: example.n_tools]].append(example)
    packs: list[Pack] = []
    for group in groups.values():
        group.sort(key=lambda example: example.ids)  # neighbours share the longest prefixes
        builder = _Builder()
        for example in group:
            if builder.examples and len(builder.ids) + builder.new_nodes(example) > pack_tokens:
                packs.append(builder.finish())
                builder = _Builder()
            builder.add(example)
        packs.append(builder.finish())
    return packs


def pack_together(examples: Sequence[Example]) -> Pack:
    """All of them in one trie, whatever their tools blocks; its tool lines are those of the first."""
    builder = _Builder()
    for example in sorted(examples, key=lambda example: example.ids):
        builder.add(example)
    return builder.finish()


class _Builder:
    def __init__(self) -> None:
        self.ids: list[int] = []
        self.position: list[int] = []
        self.parent: list[int] = []
        self.readout: list[int] = []
        self.examples: list[Example] = []
        self._children: dict[tuple[int, int], int] = {}
        self._tool_ends: list[int] = []

    def new_nodes(self, example: Example) -> int:
        node, at = -1, 0
        while at < len(example.ids):
            child = self._children.get((node, example.ids[at]))
            if child is None:
                break
            node, at = child, at + 1
        return len(example.ids) - at

    def add(self, example: Example) -> None:
        node = -1
        path: list[int] = []
        for position, token in enumerate(example.ids):
            child = self._children.get((node, token))
            if child is None:
                child = len(self.ids)
                self._children[(node, token)] = child
                self.ids.append(token)
                self.position.append(position)
                self.parent.append(node)
            node = child
            path.append(node)
        if not self.examples:
            self._tool_ends = [path[end] for end in example.tool_ends]
        self.readout.append(node)
        self.examples.append(example)

    def finish(self) -> Pack:
        arrays: list[Any] = [
            np.array(values, dtype=np.int32)
            for values in (self.ids, self.position, self.parent, self.readout, self._tool_ends)
        ]
        return Pack(*arrays, tuple(self.examples))
