"""The world of a task: kits of tools over one state, with arguments checked as a real tool's would be.

A kit is a class with ``tools`` and one method a tool, named as the tool, which returns text or raises ToolFault. Its
setting is plain data, so a world can be described, compared and rebuilt. ``changes`` reads the state itself: what the
checkers judge side effects by.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final

from whetherman_edge.calibrate.probe import Tool

Setting = dict[str, Any]
"""Kit name to its plain data; "faults": tool name to the error texts of its first calls."""
RESULT_CHARS_MAX: Final = 1500

_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


class ToolFault(Exception):
    """A tool refuses a call; the text goes to the agent after "error: "."""


class Kit:
    """Base of the tool kits. ``setting``: this kit's plain data."""

    name: ClassVar[str]
    tools: ClassVar[tuple[Tool, ...]]

    def __init__(self, setting: Mapping[str, Any]) -> None:
        self.setting = setting

    def changes(self) -> list[dict[str, Any]]:
        """How the state differs from the one it opened with, one record a changed thing."""
        return []

    def close(self) -> None:
        """Free what the kit holds."""


class Room:
    """A World of several kits, showing only the tools of its task."""

    def __init__(self, kits: Mapping[str, type[Kit]], tools: Iterable[Tool], setting: Setting) -> None:
        self._tools = {tool.name: tool for tool in tools}
        owners = {tool.name: kit for kit in kits.values() for tool in kit.tools}
        needed = {owners[name] for name in self._tools} | {kits[name] for name in setting if name in kits}
        self._kits = {kit.name: kit(setting.get(kit.name, {})) for kit in sorted(needed, key=lambda kit: kit.name)}
        self._owner = {name: self._kits[owners[name].name] for name in self._tools}
        self._faults = {name: list(texts) for name, texts in setting.get("faults", {}).items()}

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        tool = self._tools.get(name)
        if tool is None:
            return f"error: there is no tool {str(name)[:60]!r}; there are {', '.join(self._tools)}"
        if self._faults.get(name):
            return f"error: {self._faults[name].pop(0)}"
        try:
            text: str = getattr(self._owner[name], name)(**fitted(tool, arguments))
        except ToolFault as fault:
            return f"error: {fault}"
        except Exception as error:
            return f"error: {type(error).__name__}: {str(error)[:160]}"
        return text if len(text) <= RESULT_CHARS_MAX else text[:RESULT_CHARS_MAX] + " …"

    def changes(self) -> list[dict[str, Any]]:
        """Every change of state since the world opened, kit by kit."""
        return [{"kit": name, **record} for name, kit in self._kits.items() for record in kit.changes()]

    def close(self) -> None:
        for kit in self._kits.values():
            kit.close()


def fitted(tool: Tool, arguments: object) -> dict[str, Any]:
    """The arguments that ``tool`` knows, with numbers in quotes read as numbers; raises ToolFault for what is missing
    or of the wrong type.
    """
    if not isinstance(arguments, dict):
        raise ToolFault(f"expected an object of arguments, got {type(arguments).__name__}")
    known: dict[str, Any] = tool.parameters.get("properties", {})
    missing = [name for name in tool.parameters.get("required", ()) if arguments.get(name) in (None, "")]
    if missing:
        raise ToolFault(f"missing argument {', '.join(missing)}")
    out = {}
    for name, value in arguments.items():
        if name in known and value is not None:
            out[name] = _typed(name, value, known[name])
    return out


def _typed(name: str, value: Any, schema: Mapping[str, Any]) -> Any:
    kind = schema.get("type", "string")
    if kind == "string" and isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if kind in ("number", "integer") and isinstance(value, str):
        try:
            value = float(value) if kind == "number" else int(value)
        except ValueError:
            raise ToolFault(f"{name}: expected a {kind}, got {value[:40]!r}") from None
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        value = int(value)
    if kind == "boolean" and isinstance(value, str) and value.lower() in ("true", "false"):
        value = value.lower() == "true"
    if not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean"):
        raise ToolFault(f"{name}: expected a {kind}, got {type(value).__name__}")
    if "enum" in schema and value not in schema["enum"]:
        raise ToolFault(f"{name}: expected one of {', '.join(schema['enum'])}, got {str(value)[:40]!r}")
    return value


def schema(required: Mapping[str, Any], optional: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A JSON schema object. Values are descriptions ("str: text", "int: …", "num: …", "bool: …") or whole schemas."""
    kinds = {"str": "string", "int": "integer", "num": "number", "bool": "boolean", "list": "array", "obj": "object"}

    def one(value: Any) -> dict[str, Any]:
        if isinstance(value, dict):
            return value
        kind, _, text = value.partition(": ")
        return {"type": kinds[kind]} | ({"description": text} if text else {})

    properties = {name: one(value) for name, value in {**required, **(optional or {})}.items()}
    return {"type": "object", "properties": properties, "required": list(required)}


def choice(options: Sequence[str], description: str = "") -> dict[str, Any]:
    """The schema of a string that must be one of ``options``."""
    return {"type": "string", "enum": list(options)} | ({"description": description} if description else {})
