"""All dialects, the paths they are served on, and which one a body is written in."""

from __future__ import annotations

from whetherman_edge.dialects import edit, ollama, openai_chat, openai_reply
from whetherman_edge.dialects.chat import ChatView, Intervention
from whetherman_edge.dialects.dialect import Dialect
from whetherman_edge.dialects.error_shapes import ollama_error, openai_error
from whetherman_edge.dialects.ndjson import LineReader
from whetherman_edge.dialects.sse import EventReader

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

DIALECTS = {dialect.name: dialect for dialect in (OPENAI_CHAT, OLLAMA)}
# llama.cpp serves the paths without a version too.
PATHS: dict[str, Dialect] = {
    "/v1/chat/completions": OPENAI_CHAT,
    "/chat/completions": OPENAI_CHAT,
    "/api/chat": OLLAMA,
}


def apply(body: bytes, chat: ChatView, intervention: Intervention) -> bytes:
    """The body with the intervention in it; every byte that is not part of it stays.

    chat: the view of this very body.  Raises ViewError when the body cannot be edited with certainty; the proxy then
    relays it as it came.
    """
    return DIALECTS[chat.dialect].edit(body, chat, intervention)
