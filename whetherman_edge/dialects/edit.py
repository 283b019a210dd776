"""Write an Intervention into the original bytes of a request, in the dialect it came in."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from whetherman_edge.dialects.chat import ChatView, Intervention
from whetherman_edge.dialects.json_spans import elements
from whetherman_edge.dialects.splice import Splicer
from whetherman_edge.dialects.tool_cache import digest
from whetherman_edge.errors import ViewError

_encode = msgspec.json.encode


def apply(body: bytes, chat: ChatView, intervention: Intervention) -> bytes:
    """The body with the intervention in it; every byte that is not part of it stays.

    chat: the view of this very body.  Raises ViewError when the body cannot be edited with certainty; the proxy then
    relays it as it came.
    """
    writer = _WRITERS.get(chat.dialect)
    if writer is None:
        raise ViewError(f"expected a dialect that can be edited, got {chat.dialect!r}; the body is relayed as it came")
    return writer(body, chat, intervention)


def _apply_openai_chat(body: bytes, chat: ChatView, intervention: Intervention) -> bytes:
    splicer = Splicer(body)
    if intervention.strip:
        splicer.delete("tools", "tool_choice", "parallel_tool_calls", "functions", "function_call")
    elif intervention.forbid:
        legacy = splicer.raw("tools") in (b"", b"null") and splicer.has("functions")
        splicer.put("function_call" if legacy else "tool_choice", b'"none"')
        splicer.delete("parallel_tool_calls")
    if intervention.drop_tools:
        _drop_tools(splicer, body, intervention.drop_tools)
    if intervention.prefix:
        splicer.append_message(b'{"role":"assistant","content":' + _encode(intervention.prefix) + b"}")
        if intervention.continue_flags:
            splicer.put("continue_final_message", b"true")
            splicer.put("add_generation_prompt", b"false")
    if intervention.sentence:
        _append_sentence(splicer, chat, intervention)
    return splicer.result()


def _append_sentence(splicer: Splicer, chat: ChatView, intervention: Intervention) -> None:
    """Into the first turn that has a text; nowhere when it stands there already (a body that was steered before)."""
    last: ViewError | None = None
    for index in intervention.note_at:
        if intervention.sentence in chat.messages[index].text:
            return
        try:
            splicer.append_text(index, intervention.sentence)
        except ViewError as exc:
            last = exc
        else:
            return
    raise last or ViewError("expected a turn to append to, there is none; the body is relayed as it came")


def _drop_tools(splicer: Splicer, body: bytes, keys: frozenset[bytes]) -> None:
    name = "functions" if splicer.raw("tools") in (b"", b"null") else "tools"
    spans = elements(body, splicer.span(name))
    kept = [index for index, span in enumerate(spans) if digest(body[span.start : span.end]) not in keys]
    splicer.keep_elements(name, kept)


_WRITERS: dict[str, Callable[[bytes, ChatView, Intervention], bytes]] = {"openai_chat": _apply_openai_chat}
