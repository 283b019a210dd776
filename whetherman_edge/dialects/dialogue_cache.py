"""The turns of recent dialogues, so that a dialogue that grew is read from where it grew.

A client sends all turns with every request, and the bytes of all but the last few are those of its last request. Equal
bytes up to the end of a turn are equal turns, and what follows can be read by itself. Used from the loop's thread only.
"""

from __future__ import annotations

from typing import Final

import msgspec

from whetherman_edge.dialects.chat import Message, ToolCall

# A laptop runs a few dialogues at a time. Shorter ones are read as fast as compared; 128 KiB are some 30,000 tokens.
DIALOGUES_KEPT_MAX: Final = 8
BYTES_MIN: Final = 1 << 10
BYTES_MAX: Final = 128 << 10

_SPACE: Final = b" \t\n\r"
_COMMA: Final = ord(",")
_decode_elements = msgspec.json.Decoder(list[msgspec.Raw]).decode


class Turns(msgspec.Struct, frozen=True, gc=False):
    """All turns but the last of an array. ``raw``: its bytes up to the end of these, without the comma.

    ``waiting``: calls that no result has answered yet. ``reasoned``: one of the turns carries reasoning.
    """

    raw: bytes
    messages: tuple[Message, ...]
    waiting: tuple[ToolCall, ...]
    reasoned: bool


class DialogueCache:
    """Least recently used goes first."""

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept: list[Turns] = []

    def known(self, raw: bytes) -> Turns | None:
        """The longest-known turns that the array ``raw`` begins with and goes on after."""
        best: Turns | None = None
        for turns in self._kept:
            n = len(turns.raw)
            if (best is None or n > len(best.raw)) and raw.startswith(turns.raw) and raw[n : n + 1] == b",":
                best = turns
        if best is not None and best is not self._kept[0]:
            self._kept.remove(best)
            self._kept.insert(0, best)
        return best

    def keep(self, turns: Turns, instead: Turns | None) -> None:
        """Remember turns; ``instead``: those that they continue."""
        if instead is not None:
            self._kept = [other for other in self._kept if other is not instead]
        self._kept.insert(0, turns)
        del self._kept[DIALOGUES_KEPT_MAX:]


def without_last(raw: bytes, known: Turns | None) -> bytes:
    """The bytes of a valid array of at least two elements up to the end of the last but one.

    ``known``: turns it begins with; the elements behind them are at least two then.
    """
    start = len(known.raw) + 1 if known is not None else 1
    last = memoryview(_decode_elements(b"[" + raw[start:])[-1]).nbytes
    end = len(raw.rstrip(_SPACE)) - 1  # the bracket
    while raw[end - 1] in _SPACE:
        end -= 1
    end -= last
    while raw[end - 1] in _SPACE or raw[end - 1] == _COMMA:
        end -= 1
    return raw[:end]
