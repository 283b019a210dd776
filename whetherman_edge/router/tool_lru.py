"""What was made of tools and of tool lists, kept in bounds, least recently used first out. Not for several threads."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Final, Generic, Protocol, TypeVar

TOOLS_MAX: Final = 1024  # as many as the dialects keep parsed; about 4 KB each
LISTS_MAX: Final = 64
LIST_TOOLS_MAX: Final = 2048  # over all kept lists: 2.5 KB a tool or less, 5 MB at most


class _Keyed(Protocol):
    @property
    def key(self) -> bytes: ...


_Tool = TypeVar("_Tool", bound=_Keyed)
_Made = TypeVar("_Made")


class ToolLru(Generic[_Made]):
    """By the key of a tool."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, _Made] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def each(self, tools: Sequence[_Tool], make: Callable[[list[_Tool]], Sequence[_Made]]) -> list[_Made]:
        """What was made of each tool, in order. ``make`` is given those that are missing, all together, each once."""
        kept = self._kept
        missing = {tool.key: tool for tool in tools if tool.key not in kept}
        if missing:
            kept.update(zip(missing, make(list(missing.values())), strict=True))
        found: list[_Made] = []
        for tool in tools:
            found.append(kept[tool.key])
            kept.move_to_end(tool.key)
        while len(kept) > TOOLS_MAX:
            kept.popitem(last=False)
        return found


class ListLru(Generic[_Made]):
    """By the key of a tool list. Bounded in lists, and in the tools of all of them together."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, tuple[_Made, int]] = OrderedDict()
        self.n_tools = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Hashable) -> _Made | None:
        """What was made of that list, or None."""
        found = self._kept.get(key)
        if found is None:
            return None
        self._kept.move_to_end(key)
        return found[0]

    def put(self, key: Hashable, made: _Made, n_tools: int) -> _Made:
        """Keep what was made of a list that is not there; returns it. The last one stays, however long it is."""
        kept = self._kept
        kept[key] = made, n_tools
        self.n_tools += n_tools
        while len(kept) > 1 and (len(kept) > LISTS_MAX or self.n_tools > LIST_TOOLS_MAX):
            self.n_tools -= kept.popitem(last=False)[1][1]
        return made
