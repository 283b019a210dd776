"""Calls that a model wrote into its text, read as an agent would read them. Pure.

``gate.leak`` says whether a text is a call; here its name and arguments are taken out of it.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Iterator
from typing import Any

import msgspec

from whetherman_edge.gate import leak

CALLS_MAX = 8
_STARTS_MAX = 64
_NAME_KEYS = ("name", "function", "tool", "tool_name", "function_name", "action")
_ARGUMENT_KEYS = ("arguments", "parameters", "args", "params", "input", "tool_input", "action_input", "tool_args")
_FUNCTION_TAG = re.compile(r"<function(?:=|\s+name=[\"']?)([\w.\-]+)[\"']?\s*>?\s*(\{.*?\})?\s*</function>", re.DOTALL)
_PYTHON = re.compile(r"(?<![\w.])([A-Za-z_]\w*)\(")
_REACT = re.compile(r"Action\s*:\s*[`\"']?([\w.\-]+)[`\"']?\s*\n\s*Action Input\s*:\s*", re.IGNORECASE)


class ToolCall(msgspec.Struct, frozen=True):
    """One call of the model. ``arguments`` None: they are no JSON object; ``raw``: their text as it came."""

    id: str
    name: str
    arguments: dict[str, Any] | None
    raw: str


def read_calls(text: str, offered: Collection[str]) -> tuple[ToolCall, ...]:
    """The calls to offered tools that a reply's text holds, in order; () for a text that is none."""
    names = frozenset(offered)
    if not names or not leak.holds_call(text, names):
        return ()
    found: list[ToolCall] = []
    for name, arguments, raw in (*_objects(text, names), *_tagged(text, names)):
        found.append(ToolCall(f"written_{len(found)}", name, arguments, raw))
        if len(found) == CALLS_MAX:
            break
    if not found:
        found = [ToolCall("written_0", name, arguments, raw) for name, arguments, raw in _python(text, names)][:1]
    if not found:
        named = sorted((name for name in names if name in text), key=text.find)
        found = [ToolCall("written_0", named[0], None, text[:2000])] if named else []
    return tuple(found)


def parse_arguments(raw: str) -> dict[str, Any] | None:
    """Arguments from their JSON text; None when they are no object. Empty means none."""
    if not raw.strip():
        return {}
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _objects(text: str, names: frozenset[str]) -> Iterator[tuple[str, dict[str, Any] | None, str]]:
    """JSON objects that name an offered tool; doubled braces and Python quotes are read too."""
    position, starts = 0, 0
    while starts < _STARTS_MAX:
        position = text.find("{", position)
        if position < 0:
            return
        starts += 1
        value, end = _object_at(text, position)
        call = _call_of(value, names) if value is not None else None
        if call is not None:
            yield call[0], call[1], text[position:end]
            position = end
        else:
            react = _REACT.search(text, 0, position)
            if react is not None and react.end() == position and react[1] in names:
                yield react[1], value, text[position:end]
                position = end
            else:
                position += 1


def _object_at(text: str, start: int) -> tuple[dict[str, Any] | None, int]:
    """The object that begins there, and where it ends; (None, start) when there is none."""
    try:
        value, end = json.JSONDecoder(strict=False).raw_decode(text, start)
        return (value, end) if isinstance(value, dict) else (None, start)
    except (ValueError, RecursionError):
        pass
    end = _closing(text, start)
    if end < 0:
        return None, start
    piece = text[start:end]
    if piece.startswith("{{") and piece.endswith("}}"):
        value, inner = _object_at(piece[1:-1], 0)
        if value is not None and inner == len(piece) - 2:
            return value, end
        undoubled = piece.replace("{{", "{").replace("}}", "}")
        return (_loaded(undoubled), end)
    return _loaded(piece), end


def _loaded(piece: str) -> dict[str, Any] | None:
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(piece)
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            continue
        if isinstance(value, dict):
            return {str(key): entry for key, entry in value.items()}
    return None


def _closing(text: str, start: int) -> int:
    """Behind the brace that closes the one at ``start``; -1 when it stays open. Strings are stepped over."""
    depth, quoted, position = 0, "", start
    while position < len(text):
        char = text[position]
        if quoted:
            if char == "\\":
                position += 1
            elif char == quoted:
                quoted = ""
        elif char == '"':
            quoted = char
        elif char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if depth == 0:
                return position + 1
        position += 1
    return -1


def _call_of(value: dict[str, Any], names: frozenset[str]) -> tuple[str, dict[str, Any] | None] | None:
    inner = value.get("function")
    if isinstance(inner, dict):
        return _call_of(inner, names)
    name = next((value[key] for key in _NAME_KEYS if isinstance(value.get(key), str)), "")
    name = name.removeprefix("functions.")
    if name not in names:
        return None
    for key in _ARGUMENT_KEYS:
        if key in value:
            arguments = value[key]
            if isinstance(arguments, str):
                return name, parse_arguments(arguments)
            return name, arguments if isinstance(arguments, dict) else None
    rest = {key: entry for key, entry in value.items() if key not in (*_NAME_KEYS, "type", "id")}
    return name, rest


def _tagged(text: str, names: frozenset[str]) -> Iterator[tuple[str, dict[str, Any] | None, str]]:
    for match in _FUNCTION_TAG.finditer(text):
        if match[1] in names:
            yield match[1], parse_arguments(match[2] or ""), match[0]


def _python(text: str, names: frozenset[str]) -> Iterator[tuple[str, dict[str, Any] | None, str]]:
    """``get_weather(city="Oslo")``: keyword arguments with literal values."""
    for match in _PYTHON.finditer(text):
        if match[1] not in names:
            continue
        end = text.find(")", match.end())
        while 0 <= end < len(text):
            piece = text[match.start(1) : end + 1]
            try:
                node = ast.parse(piece, mode="eval").body
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                end = text.find(")", end + 1)
                continue
            if isinstance(node, ast.Call):
                yield match[1], _keywords(node), piece
            break


def _keywords(node: ast.Call) -> dict[str, Any] | None:
    try:
        arguments = {word.arg: ast.literal_eval(word.value) for word in node.keywords if word.arg is not None}
    except (ValueError, TypeError):
        return None
    return arguments if not node.args else None
