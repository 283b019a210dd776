"""Ollama's native ``POST /api/chat``: messages and tools as chat completions write them, with differences that count.

It streams unless told not to (field case S15), images stand beside the text, tool results carry ``tool_name``, and
there is no tool choice: what an OpenAI client calls "none" has no effect (R05), so tools are taken out or left.
"""

from __future__ import annotations

from typing import Any

import msgspec

from whetherman_edge.dialects import edit, openai_chat
from whetherman_edge.dialects.chat import ChatView, Intervention
from whetherman_edge.dialects.dialect import Piece
from whetherman_edge.dialects.json_spans import refuse_repeated_keys, split_members
from whetherman_edge.dialects.splice import Splicer
from whetherman_edge.dialects.tool_cache import ToolCache, digest
from whetherman_edge.errors import ViewError

NAME = "ollama"


class _WithImages(msgspec.Struct, gc=False):
    images: list[msgspec.Raw] | str | int | float | bool | dict[str, msgspec.Raw] | None = None


_decode_images = msgspec.json.Decoder(list[_WithImages]).decode


def view(body: bytes, cache: ToolCache) -> ChatView:
    """The gate's view of an ``/api/chat`` body; a body without messages loads or unloads a model.

    cache: parsed tools by digest, owned by the caller.  Raises ViewError as ``openai_chat.view`` does.
    """
    fields = split_members(body)
    messages = fields.get("messages")
    if messages is None or bytes(messages) == b"null":
        refuse_repeated_keys(body, fields)
        return ChatView(dialect=NAME, model="", messages=(), tools=(), toolset_key=digest(b"[]"))
    chat = openai_chat.view(body, cache)
    stream = fields.get("stream")
    turns = chat.messages
    if b'"images"' in body:
        try:
            pictured = _decode_images(messages)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise ViewError(f"expected a list of messages: {exc}; the body is relayed as it came") from exc
        turns = tuple(
            msgspec.structs.replace(turn, n_media=len(images)) if isinstance(images := extra.images, list) else turn
            for turn, extra in zip(turns, pictured, strict=True)
        )
    return msgspec.structs.replace(
        chat, dialect=NAME, messages=turns, stream=stream is None or bytes(stream) in (b"true", b"null")
    )


def write(body: bytes, chat: ChatView, intervention: Intervention) -> bytes:
    """The body with the intervention in it.  Raises ViewError when it cannot be edited with certainty."""
    if intervention.forbid or intervention.continue_flags:
        raise ViewError("expected an intervention that Ollama heeds, got a tool choice; the body is relayed as it came")
    splicer = Splicer(body)
    if intervention.strip:
        splicer.delete("tools", "tool_choice")
    if intervention.drop_tools:
        edit.drop_tools(splicer, body, intervention.drop_tools)
    if intervention.prefix:
        splicer.append_message(b'{"role":"assistant","content":' + msgspec.json.encode(intervention.prefix) + b"}")
    if intervention.sentence:
        edit.append_sentence(chat, intervention, splicer.append_text)
    return splicer.result()


class _Message(msgspec.Struct, gc=False):
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[Any] | None = None


class _Reply(msgspec.Struct, gc=False):
    message: _Message | None = None
    error: Any = None
    done: bool | None = None


_decode_reply = msgspec.json.Decoder(_Reply).decode


class Reader:
    """Reads a whole reply or the lines of a stream.

    A call always comes whole, with its arguments as an object; parallel ones may share a line or come one a line, all
    with index 0 (field case S03). So every entry is a call.
    """

    __slots__ = ("_n_calls",)

    def __init__(self) -> None:
        self._n_calls = 0

    @property
    def n_calls(self) -> int:
        """Calls seen so far."""
        return self._n_calls

    def read(self, data: bytes) -> list[Piece] | None:
        """The piece of one value; None for an error in the middle of a stream, and for what is no reply."""
        try:
            reply = _decode_reply(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        message = reply.message
        if reply.error is not None or (message is None and reply.done is None):
            return None
        if message is None:
            return []
        n_calls = len(message.tool_calls or ())
        self._n_calls += n_calls
        return [Piece(0, message.content or "", n_calls, len(message.thinking or ""))]
