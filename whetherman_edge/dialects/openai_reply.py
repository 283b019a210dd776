"""What a chat-completions reply says, read from its bytes: text, reasoning, calls. A view; the bytes go on as they are.

Tolerant as servers differ (field case S03): arguments as string or object, parallel calls all with index 0 in chunks of
their own, content as a list of parts, reasoning under two names, a finish_reason that says nothing.
"""

from __future__ import annotations

from typing import Any

import msgspec

from whetherman_edge.dialects.dialect import Piece


class _Function(msgspec.Struct, gc=False):
    name: str | None = None


class _Call(msgspec.Struct, gc=False):
    id: str | int | None = None
    index: int | None = None
    function: _Function | None = None


class _Message(msgspec.Struct, gc=False):
    content: str | list[dict[str, Any]] | None = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: list[_Call] | None = None
    function_call: _Function | None = None


class _Choice(msgspec.Struct, gc=False):
    index: int | None = None
    delta: _Message | None = None
    message: _Message | None = None


class _Reply(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None


_decode = msgspec.json.Decoder(_Reply).decode


class ReplyReader:
    """Reads the JSON values of one reply in order: one for a whole completion, one for each event of a stream."""

    __slots__ = ("_keys",)

    def __init__(self) -> None:
        self._keys: set[tuple[object, ...]] = set()

    @property
    def n_calls(self) -> int:
        """Calls seen so far."""
        return len(self._keys)

    def read(self, data: bytes) -> list[Piece] | None:
        """The pieces of one value; None when it is no reply (an error, ``[DONE]``, what is no JSON)."""
        try:
            choices = _decode(data).choices
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        if choices is None:
            return None
        found = []
        for position, choice in enumerate(choices):
            message = choice.delta or choice.message
            if message is not None:
                found.append(self._piece(message, choice.index if choice.index is not None else position))
        return found

    def _piece(self, message: _Message, choice: int) -> Piece:
        before = len(self._keys)
        for position, call in enumerate(message.tool_calls or ()):
            # Later pieces of a streamed call carry arguments only, and no name.
            if call.function is not None and call.function.name:
                index = call.index if call.index is not None else position
                self._keys.add((choice, index, call.id or position))
        if message.function_call is not None and message.function_call.name:
            self._keys.add((choice, "function_call"))
        reasoning = message.reasoning_content or message.reasoning
        return Piece(
            choice=choice,
            text=_text(message.content),
            n_calls=len(self._keys) - before,
            n_reasoning_chars=len(reasoning) if isinstance(reasoning, str) else 0,
        )


def _text(content: str | list[dict[str, Any]] | None) -> str:
    if isinstance(content, list):
        return "".join(part["text"] for part in content if isinstance(part.get("text"), str))
    return content or ""
