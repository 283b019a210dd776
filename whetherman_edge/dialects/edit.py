"""Write an Intervention into the bytes of a chat-completions body; and the parts that other dialects share."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from whetherman_edge.dialects.chat import ChatView, Intervention
from whetherman_edge.dialects.json_spans import elements
from whetherman_edge.dialects.splice import Splicer
from whetherman_edge.dialects.tool_cache import digest
from whetherman_edge.errors import ViewError

_encode = msgspec.json.encode


def write_openai_chat(body: bytes, chat: ChatView, intervention: Intervention) -> bytes:
    """The body with the intervention in it; every byte that is not part of it stays.

    chat: the view of this very body.  Raises ViewError when the body cannot be edited with certainty; the proxy then
    relays it as it came.
    """
    splicer = Splicer(body)
    if intervention.strip:
        splicer.delete("tools", "tool_choice", "parallel_tool_calls", "functions", "function_call")
    elif intervention.forbid:
        legacy = splicer.raw("tools") in (b"", b"null") and splicer.has("functions")
        splicer.put("function_call" if legacy else "tool_choice", b'"none"')
        splicer.delete("parallel_tool_calls")
    if intervention.drop_tools:
        drop_tools(splicer, body, intervention.drop_tools)
    if intervention.prefix:
        splicer.append_message(b'{"role":"assistant","content":' + _encode(intervention.prefix) + b"}")
        if intervention.continue_flags:
            splicer.put("continue_final_message", b"true")
            splicer.put("add_generation_prompt", b"false")
    if intervention.sentence:
        append_sentence(chat, intervention, splicer.append_text)
    return splicer.result()


def append_sentence(chat: ChatView, intervention: Intervention, append: Callable[[int, str], None]) -> None:
    """Into the first turn that has a text; nowhere when it stands there already (a body that was steered before).

    append: writes a text behind the turn of that index in ``chat.messages``; raises ViewError where there is no place.
    """
    last: ViewError | None = None
    for index in intervention.note_at:
        if intervention.sentence in chat.messages[index].text:
            return
        try:
            append(index, intervention.sentence)
        except ViewError as exc:
            last = exc
        else:
            return
    raise last or ViewError("expected a turn to append to, there is none; the body is relayed as it came")


def drop_tools(splicer: Splicer, body: bytes, keys: frozenset[bytes]) -> None:
    """Leave out the tools with these keys; the others stay as they are and in their order."""
    name = "functions" if splicer.raw("tools") in (b"", b"null") else "tools"
    spans = elements(body, splicer.span(name))
    kept = [index for index, span in enumerate(spans) if digest(body[span.start : span.end]) not in keys]
    splicer.keep_elements(name, kept)
