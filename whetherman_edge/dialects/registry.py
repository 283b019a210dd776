"""All dialects, the paths they are served on, and which one a body is written in."""

from __future__ import annotations

import msgspec

from whetherman_edge.dialects import anthropic, edit, ollama, openai_chat, openai_reply, openai_responses
from whetherman_edge.dialects.chat import ChatView, Intervention
from whetherman_edge.dialects.dialect import Dialect, ErrorShape
from whetherman_edge.dialects.error_shapes import anthropic_error, detail_error, ollama_error, openai_error
from whetherman_edge.dialects.event_replies import MessagesReader, ResponsesReader
from whetherman_edge.dialects.json_spans import split_members
from whetherman_edge.dialects.ndjson import LineReader
from whetherman_edge.dialects.sse import EventReader
from whetherman_edge.errors import ViewError

OPENAI_CHAT = Dialect(
    name="openai_chat",
    view=openai_chat.view,
    edit=edit.write_openai_chat,
    splitter=EventReader,
    reader=openai_reply.ReplyReader,
    call_marks=(b'"tool_calls"', b'"function_call"'),
    error=openai_error,
)
OLLAMA = Dialect(
    name=ollama.NAME,
    view=ollama.view,
    edit=ollama.write,
    splitter=LineReader,
    reader=ollama.Reader,
    call_marks=(b'"tool_calls"',),
    error=ollama_error,
    stream_type=b"application/x-ndjson",
)
OPENAI_RESPONSES = Dialect(
    name=openai_responses.NAME,
    view=openai_responses.view,
    edit=openai_responses.write,
    splitter=EventReader,
    reader=ResponsesReader,
    call_marks=(b'_call"',),
    error=openai_error,
    untouchable=anthropic.subscription,
)
ANTHROPIC = Dialect(
    name=anthropic.NAME,
    view=anthropic.view,
    edit=anthropic.write,
    splitter=EventReader,
    reader=MessagesReader,
    call_marks=(b'"tool_use"',),
    error=anthropic_error,
    untouchable=anthropic.subscription,
)

DIALECTS = {dialect.name: dialect for dialect in (OPENAI_CHAT, OLLAMA, OPENAI_RESPONSES, ANTHROPIC)}
# llama.cpp serves the paths without a version too.
PATHS: dict[str, Dialect] = {
    "/v1/chat/completions": OPENAI_CHAT,
    "/chat/completions": OPENAI_CHAT,
    "/api/chat": OLLAMA,
    "/v1/responses": OPENAI_RESPONSES,
    "/responses": OPENAI_RESPONSES,
    "/v1/messages": ANTHROPIC,
}


def error_shape(path: str) -> ErrorShape:
    """How the clients of a path read errors, also of one that is only relayed; OpenAI's shape when in doubt."""
    if path.startswith("/api/"):
        return OLLAMA.error
    if path.startswith("/v1/messages"):
        return ANTHROPIC.error
    return detail_error if path == "/v1/systemone" else openai_error


def of_body(body: bytes) -> Dialect:
    """The dialect that a chat body is written in, by its shape, where no path says so; chat completions when in doubt.

    Ollama's own differs from these in nothing that a decision needs.
    """
    try:
        fields = split_members(body)
        if "messages" not in fields:
            return OPENAI_RESPONSES if "input" in fields else OPENAI_CHAT
        tools = _decode_any(fields.get("tools", b"[]"))
    except (ViewError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return OPENAI_CHAT
    entries = tools if isinstance(tools, list) else ()
    has_schema = any(isinstance(tool, dict) and "input_schema" in tool for tool in entries)
    return ANTHROPIC if has_schema or "system" in fields else OPENAI_CHAT


_decode_any = msgspec.json.Decoder().decode


def apply(body: bytes, chat: ChatView, intervention: Intervention) -> bytes:
    """The body with the intervention in it; every byte that is not part of it stays.

    chat: the view of this very body.  Raises ViewError when the body cannot be edited with certainty; the proxy then
    relays it as it came.
    """
    return DIALECTS[chat.dialect].edit(body, chat, intervention)
