"""Text as the System One API writes it: a string, an object or an array, always.

Static embeddings read words, so a structured text is flattened to its words in reading order: strings as they are,
object entries as ``key: value``, array entries one a line. Iterative and bounded: neither depth nor size of a foreign
document can make this function expensive.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

JSON: TypeAlias = bool | int | float | str | list["JSON"] | dict[str, "JSON"] | None

DEPTH_MAX = 32
"""Levels of nesting read. Real tickets and schemas have fewer than ten; deeper content is skipped and flagged."""


class Rendered(msgspec.Struct, frozen=True, gc=False):
    """A flattened text. ``truncated``: something was left out, for length or for depth."""

    text: str
    truncated: bool = False


def render(value: JSON, chars_max: int, *, keys: bool = True) -> Rendered:
    """Flatten any JSON value to at most ``chars_max`` characters of text.

    ``keys=False`` leaves object keys out: in an option's description they are layout ("owns", "examples"), not meaning.
    ``null`` contributes nothing. Never raises.
    """
    if isinstance(value, str):
        return Rendered(value[:chars_max], len(value) > chars_max)
    pieces: list[str] = []
    room = chars_max
    truncated = False
    stack: list[tuple[JSON, str, int]] = [(value, "", 0)]
    while stack:
        node, label, depth = stack.pop()
        if isinstance(node, (dict, list)):
            if depth >= DEPTH_MAX:
                truncated = truncated or bool(node)
                continue
            stack.extend(_children(node, label, depth, keys=keys))
            continue
        text = _scalar(node)
        if not text:
            continue
        piece = f"{label}: {text}" if label else text
        if len(piece) > room:
            pieces.append(piece[:room])
            truncated = True
            break
        pieces.append(piece)
        room -= len(piece) + 1
        if room <= 0:
            truncated = truncated or bool(stack)
            break
    return Rendered("\n".join(piece for piece in pieces if piece), truncated)


def _children(node: dict[str, JSON] | list[JSON], label: str, depth: int, *, keys: bool) -> list[tuple[JSON, str, int]]:
    """The entries of a container, last first, as the stack wants them. An array hands its own key to its entries."""
    if isinstance(node, list):
        return [(child, label, depth + 1) for child in reversed(node)]
    return [(child, key if keys else "", depth + 1) for key, child in reversed(node.items())]


def _scalar(node: bool | int | float | str | None) -> str:
    if node is None:
        return ""
    if isinstance(node, str):
        return node.strip()
    if isinstance(node, bool):
        return "yes" if node else "no"
    return str(node) if isinstance(node, float) or abs(node) < 10**18 else "number"
