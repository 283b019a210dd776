"""Bounded cache of parsed tools, keyed by the digest of their own JSON bytes.

A client sends the same tools with every request of a session, up to 25 KB of them (field case D03), so each tool is
parsed once. The daemon makes one cache and hands it to every dialect; it is used from the loop's thread only.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

import msgspec

from whetherman_edge.dialects.chat import Tool
from whetherman_edge.dialects.dialogue_cache import DialogueCache

# One agent has 1 to 90 tools; 64 sets and 1,024 tools hold dozens of agents in about 2 MB.
TOOLSETS_MAX = 64
TOOLS_MAX = 1024
DIGEST_BYTES = 16
# Sets whose very bytes are kept: a laptop runs a few agents at a time.
RECENT_MAX = 4
RECENT_BYTES_MAX = 256 << 10


def digest(raw: bytes | memoryview | msgspec.Raw) -> bytes:
    """16-byte blake2b digest: equal JSON bytes, equal key."""
    return blake2b(raw, digest_size=DIGEST_BYTES).digest()


class ToolSet(msgspec.Struct, frozen=True, gc=False):
    """A parsed ``tools`` array. ``n_other``: entries that are not function tools; they are never scored."""

    key: bytes
    tools: tuple[Tool, ...]
    n_other: int


class ToolCache:
    """Least-recently-used maps: digest of a tools array to its ToolSet, digest of one tool to its Tool or None.

    ``dialogues``: turns that come again, for the dialects that read them so.
    """

    __slots__ = ("_recent", "_sets", "_sets_max", "_tools", "_tools_max", "dialogues")

    def __init__(self, sets_max: int = TOOLSETS_MAX, tools_max: int = TOOLS_MAX) -> None:
        self._sets: OrderedDict[bytes, ToolSet] = OrderedDict()
        self._tools: OrderedDict[bytes, Tool | None] = OrderedDict()
        self._recent: list[tuple[bytes, ToolSet]] = []
        self._sets_max = sets_max
        self._tools_max = tools_max
        self.dialogues = DialogueCache()

    @property
    def n_tools(self) -> int:
        """Number of single tools held."""
        return len(self._tools)

    def recent(self, raw: bytes) -> ToolSet | None:
        """The set of exactly these bytes if it is among the last few: comparing is ten times cheaper than a digest."""
        for known, toolset in self._recent:
            if known == raw:
                return toolset
        return None

    def toolset(self, key: bytes) -> ToolSet | None:
        """The set of that key, or None."""
        found = self._sets.get(key)
        if found is not None:
            self._sets.move_to_end(key)
        return found

    def keep_toolset(self, raw: bytes, toolset: ToolSet) -> None:
        """Remember a set and its bytes; the least recently used one goes when the cache is full."""
        if len(raw) <= RECENT_BYTES_MAX:
            self._recent.insert(0, (raw, toolset))
            del self._recent[RECENT_MAX:]
        self._sets[toolset.key] = toolset
        if len(self._sets) > self._sets_max:
            self._sets.popitem(last=False)

    def has_tool(self, key: bytes) -> bool:
        """True when that tool was parsed before, also when it turned out to be no function tool."""
        return key in self._tools

    def tool(self, key: bytes) -> Tool | None:
        """The parsed tool; None when unknown or not a function tool (ask ``has_tool`` first)."""
        found = self._tools.get(key)
        if found is not None:
            self._tools.move_to_end(key)
        return found

    def keep_tool(self, key: bytes, tool: Tool | None) -> None:
        """Remember one tool, or that this entry is not a function tool."""
        self._tools[key] = tool
        if len(self._tools) > self._tools_max:
            self._tools.popitem(last=False)
