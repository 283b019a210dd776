"""Options as files and lines give them: an options object, or a tools array of OpenAI, Anthropic or MCP shape."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from whetherman_edge.errors import RequestError

Option = str | Mapping[str, Any] | None
Options = Mapping[str, Option]


def parse_json(raw: bytes, loc: tuple[str | int, ...] = ("body",)) -> Any:
    """JSON of ``raw``; an object that names a key twice is refused, since one of the two would be lost silently.

    Half a surrogate pair (U+D800 alone) is refused too: it is no character, and no answer could be written with it.
    Raises RequestError.
    """
    try:
        value = json.loads(
            raw.decode("utf-8-sig"), object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite
        )
        if b"\\ud" in raw or b"\\uD" in raw:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except UnicodeEncodeError as exc:
        raise RequestError(
            "expected text, got half a surrogate pair (\\ud800 to \\udfff on its own)", loc, "string_unicode"
        ) from exc
    except UnicodeDecodeError as exc:
        raise RequestError(f"expected UTF-8 text, byte {exc.start} is not", loc, "json_invalid") from exc
    except json.JSONDecodeError as exc:
        raise RequestError(
            f"expected JSON: {exc.msg} at line {exc.lineno} column {exc.colno}", loc, "json_invalid"
        ) from exc
    except RequestError:
        raise
    except ValueError as exc:  # Python's own: an integer of more digits than it reads
        raise RequestError("expected JSON, got a number of thousands of digits", loc, "json_invalid") from exc
    except RecursionError as exc:
        raise RequestError("expected JSON, got one nested too deeply", loc, "json_invalid") from exc


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise RequestError(f"the key {key[:60]!r} appears twice in one object", ("body", key), "duplicate")
        found[key] = value
    return found


def _no_constant(text: str) -> Any:
    raise RequestError(f"{text} is not JSON", ("body",), "json_invalid")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise RequestError(f"{text[:40]} is too large for a number", ("body",), "json_invalid")
    return value


def options_of(value: Any, loc: tuple[str | int, ...] = ("body", "options")) -> Options:
    """Options from an options object, a tools array, or an object whose ``tools`` is such an array.

    Raises RequestError; what an option may hold is checked by ``card.cards_of``.
    """
    if isinstance(value, Mapping):
        tools = value.get("tools")
        return _from_tools(tools, (*loc, "tools")) if isinstance(tools, list) else value
    if isinstance(value, list):
        return _from_tools(value, loc)
    raise RequestError(
        "expected an object of name to description, or an array of tools, such as "
        '{"weather": "Forecast for a city", "news": null}',
        loc,
        "options_type",
    )


def _from_tools(tools: list[Any], loc: tuple[str | int, ...]) -> Options:
    options: dict[str, Option] = {}
    for index, tool in enumerate(tools):
        at = (*loc, index)
        body = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(body, Mapping):
            raise RequestError(f"tool {index}: expected an object, got {type(tool).__name__}", at, "tool_type")
        name = body.get("name")
        if not isinstance(name, str) or not name.strip():
            raise RequestError(f"tool {index}: expected a non-empty string as its name", (*at, "name"), "string_type")
        if name in options:
            raise RequestError(
                f"tool {index}: the name {name[:60]!r} is taken by an earlier tool", (*at, "name"), "duplicate"
            )
        schema = next((body[k] for k in ("parameters", "input_schema", "inputSchema") if body.get(k) is not None), None)
        options[name] = {"description": body.get("description"), "parameters": schema, "examples": body.get("examples")}
    return options
