"""From a tool's JSON to a bounded Tool: name, description, top-level arguments; the rest of a schema is never kept.

One MCP server can add 64k tokens of schema to each request (field case C07), so every part has a bound. The tool itself
is relayed whole: this is the gate's view of it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from whetherman_edge.dialects.chat import Parameter, Tool, refuse_many
from whetherman_edge.dialects.tool_cache import TOOLS_MAX, ToolCache, ToolSet, digest
from whetherman_edge.errors import ViewError

# The gate scores a name, a first sentence and arguments; the longest descriptions of the 527 MCP tools of LiveMCPBench
# that carry meaning end well before these bounds.
DESCRIPTION_CHARS_MAX = 4096
PARAMETER_DESCRIPTION_CHARS_MAX = 512
PARAMETERS_MAX = 64

_decode_any = msgspec.json.Decoder().decode
_decode_raw_list = msgspec.json.Decoder(list[msgspec.Raw]).decode


def parse_tools(raw: bytes | memoryview | msgspec.Raw, cache: ToolCache) -> ToolSet:
    """The tools array of a body, in its order, from the cache where these bytes were seen before.

    raw: the JSON bytes of the array.  Raises ViewError when they are not an array, OverLimit.
    """
    raw = bytes(raw)
    recent = cache.recent(raw)
    if recent is not None:
        return recent
    key = digest(raw)
    known = cache.toolset(key)
    if known is not None:
        cache.keep_toolset(raw, known)
        return known
    try:
        entries = _decode_raw_list(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ViewError(f"tools: expected an array, {exc}; the body is relayed as it came") from exc
    refuse_many(len(entries), TOOLS_MAX, "tools")  # they would push each other out of the cache
    tools: list[Tool] = []
    n_other = 0
    for entry in entries:
        tool = _parse_entry(entry, cache)
        if tool is None:
            n_other += 1
        else:
            tools.append(tool)
    toolset = ToolSet(key=key, tools=tuple(tools), n_other=n_other)
    cache.keep_toolset(raw, toolset)
    return toolset


def _parse_entry(raw: msgspec.Raw, cache: ToolCache) -> Tool | None:
    key = digest(raw)
    if cache.has_tool(key):
        return cache.tool(key)
    try:
        tool = parse_tool(_decode_any(raw), key)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ViewError(f"tools: an entry is not valid JSON ({exc}); the body is relayed as it came") from exc
    cache.keep_tool(key, tool)
    return tool


def parse_tool(entry: Any, key: bytes) -> Tool | None:
    """A Tool from one decoded entry, nested (``{"type","function":{…}}``) or flat (``{"type","name",…}``).

    Returns None for anything that is not a function tool (hosted, MCP, custom, nameless): those are never scored.
    """
    if not isinstance(entry, dict):
        return None
    nested = entry.get("function")
    if isinstance(nested, dict):
        definition = nested
    elif entry.get("type", "function") == "function" or _is_anthropic(entry):
        definition = entry
    else:
        return None
    name = definition.get("name")
    if not isinstance(name, str) or not name:
        return None
    schema = definition.get("parameters")
    if schema is None:
        schema = definition.get("input_schema")
    return Tool(
        name=name,
        description=_text(definition.get("description"), DESCRIPTION_CHARS_MAX),
        parameters=parse_parameters(schema),
        key=key,
    )


def _is_anthropic(entry: dict[str, Any]) -> bool:
    """``custom`` is Anthropic's word for a function tool; OpenAI's custom tools have no schema."""
    return entry.get("type") in ("custom", None) and isinstance(entry.get("input_schema"), dict)


def parse_parameters(schema: Any) -> tuple[Parameter, ...]:
    """The top-level arguments of a JSON schema, at most PARAMETERS_MAX; () for a schema of any other shape."""
    if not isinstance(schema, dict):
        return ()
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return ()
    required = schema.get("required")
    names_required = {r for r in required if isinstance(r, str)} if isinstance(required, list) else set()
    found: list[Parameter] = []
    for name, definition in properties.items():
        if len(found) == PARAMETERS_MAX:
            break
        described = definition if isinstance(definition, dict) else {}
        found.append(
            Parameter(
                name=name,
                type=_type_name(described.get("type")),
                description=_text(described.get("description"), PARAMETER_DESCRIPTION_CHARS_MAX),
                # draft-3 schemas, which small MCP servers still write, mark the argument itself
                required=name in names_required or described.get("required") is True,
            )
        )
    return tuple(found)


def _text(value: Any, chars_max: int) -> str:
    return value[:chars_max] if isinstance(value, str) else ""


def _type_name(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "|".join(v for v in value if isinstance(v, str))
    return ""
