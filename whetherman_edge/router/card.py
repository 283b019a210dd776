"""What the router reads of a tool, whoever describes it: a chat tool, or an option of our own APIs."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from whetherman_edge.dialects.chat import Tool
from whetherman_edge.errors import RequestError

OPTIONS_MIN: Final = 2
OPTIONS_MAX: Final = 255  # documented limit of the System One API
EXAMPLES_MAX: Final = 64  # each is one more prototype row for that tool
NAME_CHARS_MAX: Final = 256
OPTION_KEYS: Final = frozenset({"description", "examples", "parameters"})

_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|(?<=[A-Za-z])(?=[0-9])|(?<=[0-9])(?=[A-Za-z])")
_HUMP = re.compile(r"[A-Z0-9]")
_BREAK = re.compile(r"[_\-./:\s]+")


class ToolCard(msgspec.Struct, frozen=True, gc=False):
    """One tool as texts.

    ``parameters``: names of the top-level arguments. ``key``: 16-byte digest of all of it, for the prototype cache.
    """

    name: str
    description: str
    parameters: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()
    key: bytes = b""

    @property
    def title(self) -> str:
        """The name as words: ``getWeatherByCity``, ``get_weather-by.city`` -> ``get weather by city``."""
        return spaced(self.name)


def spaced(name: str) -> str:
    """An identifier of any style as lower-case words."""
    if _HUMP.search(name) is not None:  # most names have none, and looking for borders is the dear part
        name = _CAMEL.sub(" ", name)
    return " ".join(_BREAK.sub(" ", name).split()).lower()


def from_tool(tool: Tool) -> ToolCard:
    """The card of a chat tool; its own key is kept."""
    return ToolCard(
        name=tool.name,
        description=tool.description,
        parameters=tuple(p.name for p in tool.parameters),
        key=tool.key,
    )


def cards_of(options: Mapping[str, str | Mapping[str, Any] | None], loc: tuple[str | int, ...] = ()) -> list[ToolCard]:
    """Checked cards of an options object, in its order.

    An option is a description, null, or an object of ``description``, ``examples`` (strings) and ``parameters``
    (a JSON schema, an object keyed by argument name, or a list of names).
    Raises RequestError with ``loc`` and ``kind``.
    """
    loc = loc or ("body", "options")
    if not isinstance(options, Mapping):
        raise RequestError(
            f"options must be an object of name to description, got {_kind(options)}", loc, "mapping_type"
        )
    if len(options) < OPTIONS_MIN:
        raise RequestError(
            f"at least {OPTIONS_MIN} options are required to choose between, got {len(options)}", loc, "too_short"
        )
    if len(options) > OPTIONS_MAX:
        raise RequestError(f"at most {OPTIONS_MAX} options are allowed, got {len(options)}", loc, "too_long")
    cards = [_card(name, value, loc) for name, value in options.items()]
    for card in cards:
        for text in (card.name, card.description, *card.parameters, *card.examples):
            check_text("an option's text", text, loc)
    return cards


def check_text(what: str, text: str, loc: tuple[str | int, ...]) -> None:
    """Raise RequestError unless ``text`` is Unicode text: half a surrogate pair is no character."""
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as exc:
        raise RequestError(
            f"{what} must be Unicode text, got half a surrogate pair at character {exc.start}", loc, "string_unicode"
        ) from exc


def _card(name: object, value: object, loc: tuple[str | int, ...]) -> ToolCard:
    """One checked option."""
    if not isinstance(name, str):
        raise RequestError(f"option names must be strings, got {_kind(name)}", loc, "string_type")
    if not name.strip():
        raise RequestError("option names must not be empty", (*loc, name), "string_too_short")
    if len(name) > NAME_CHARS_MAX:
        raise RequestError(
            f"option names are at most {NAME_CHARS_MAX} characters, got {len(name)}",
            (*loc, name[:40]),
            "string_too_long",
        )
    at = (*loc, name)
    if value is None or isinstance(value, str):
        return make_card(name, value or "")
    if not isinstance(value, Mapping):
        raise RequestError(
            f"an option is a description, null, or an object with {_keys()}; got {_kind(value)}", at, "option_type"
        )
    unknown = [key for key in value if key not in OPTION_KEYS]
    if unknown:
        raise RequestError(f"unknown key {str(unknown[0])[:40]!r}; an option has {_keys()}", at, "extra_forbidden")
    description = value.get("description")
    if description is not None and not isinstance(description, str):
        raise RequestError(
            f"description must be a string, got {_kind(description)}", (*at, "description"), "string_type"
        )
    return make_card(
        name,
        description or "",
        parameters=_parameters(value.get("parameters"), (*at, "parameters")),
        examples=_examples(value.get("examples"), (*at, "examples")),
    )


def make_card(name: str, description: str, parameters: Sequence[str] = (), examples: Sequence[str] = ()) -> ToolCard:
    """A card with its key computed from all fields."""
    digest = hashlib.blake2b(len(parameters).to_bytes(4, "little"), digest_size=16)
    for part in (name, description, *parameters, *examples):
        raw = part.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(4, "little"))
        digest.update(raw)
    return ToolCard(name, description, tuple(parameters), tuple(examples), digest.digest())


def _examples(value: object, loc: tuple[str | int, ...]) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise RequestError(f"examples must be a list of strings, got {_kind(value)}", loc, "list_type")
    if len(value) > EXAMPLES_MAX:
        raise RequestError(f"at most {EXAMPLES_MAX} examples are allowed, got {len(value)}", loc, "too_long")
    for index, item in enumerate(value):
        if not isinstance(item, str):
            raise RequestError(f"an example must be a string, got {_kind(item)}", (*loc, index), "string_type")
    return tuple(item for item in value if item.strip())


def _parameters(value: object, loc: tuple[str | int, ...]) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, Mapping):
        properties = value.get("properties")
        if isinstance(properties, Mapping):
            value = properties
        elif value.get("type") == "object":
            value = {}
        return tuple(str(key) for key in value)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for index, item in enumerate(value):
            if not isinstance(item, str):
                raise RequestError(
                    f"a parameter name must be a string, got {_kind(item)}", (*loc, index), "string_type"
                )
        return tuple(value)
    raise RequestError(
        f"parameters must be a JSON schema, an object keyed by name, or a list of names; got {_kind(value)}",
        loc,
        "parameters_type",
    )


def _keys() -> str:
    return ", ".join(sorted(OPTION_KEYS))


def _kind(value: object) -> str:
    """JSON's word for a Python value's type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    if isinstance(value, Mapping):
        return "object"
    if isinstance(value, list | tuple):
        return "array"
    return type(value).__name__
