"""``POST /v1/messages`` (Anthropic): from the body's bytes to a ChatView, and edits back into them.

System text is a member of its own, a string or blocks with ``cache_control``. Calls are ``tool_use`` blocks of an
assistant turn, results are ``tool_result`` blocks of the user turn behind it: one turn on the wire can be several in
the view, so each turn of the view remembers its block.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from whetherman_edge.dialects import edit
from whetherman_edge.dialects.chat import (
    TURNS_MAX,
    ChatView,
    Intervention,
    Message,
    OpenCalls,
    Role,
    ToolCall,
    refuse_many,
)
from whetherman_edge.dialects.json_spans import Span, elements, members, refuse_repeated_keys, split_members
from whetherman_edge.dialects.openai_chat import canonical_arguments, read_tool_choice
from whetherman_edge.dialects.splice import Splicer
from whetherman_edge.dialects.tool_cache import ToolCache, ToolSet, digest
from whetherman_edge.dialects.tool_schema import parse_tools
from whetherman_edge.errors import ViewError

NAME = "anthropic"

_NULL = msgspec.Raw(b"null")
_decode_any = msgspec.json.Decoder().decode
_NO_TOOLS = ToolSet(key=digest(b"[]"), tools=(), n_other=0)
_ROLES: dict[Any, Role] = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
# What Claude Code puts among the blocks: a line that differs with every request (C02), and words that are not the
# user's.
_VOLATILE = "x-anthropic-billing-header:"
_REMINDER, _REMINDER_END = "<system-reminder>", "</system-reminder>"
_MEDIA = frozenset({"image", "document", "container_upload"})
_WHOLE = -1


class Place(NamedTuple):
    """Where a turn's text lies. ``turn``: index in ``messages`` (-1: the system member); ``block``: -1: all of it."""

    turn: int
    block: int


class _Block(msgspec.Struct, gc=False):
    type: Any = None
    text: Any = None
    id: Any = None
    name: Any = None
    input: msgspec.Raw = _NULL
    tool_use_id: Any = None
    content: Any = None


class _Turn(msgspec.Struct, gc=False):
    role: Any = None
    content: str | list[_Block] | None = None


_decode_turns = msgspec.json.Decoder(list[_Turn]).decode


def view(body: bytes, cache: ToolCache) -> ChatView:
    """The gate's view of a Messages body.

    cache: parsed tools by digest, owned by the caller.  Raises ViewError when the body is no JSON object with a list of
    messages, or when a top-level key comes twice; the proxy then relays the bytes as they came.
    """
    fields = split_members(body)
    refuse_repeated_keys(body, fields)
    try:
        turns = _turns(fields)
        raw_tools = fields.get("tools")
        toolset = parse_tools(raw_tools, cache) if raw_tools is not None and bytes(raw_tools) != b"null" else _NO_TOOLS
        choice, choice_name = read_tool_choice(_value(fields, "tool_choice"))
        model, thinking = _value(fields, "model"), _value(fields, "thinking")
        config = _value(fields, "output_config")
        structured = config.get("format") if isinstance(config, dict) else None
        return ChatView(
            dialect=NAME,
            model=model if isinstance(model, str) else "",
            messages=tuple(turn for turn, _ in turns),
            tools=toolset.tools,
            toolset_key=toolset.key,
            tool_choice=choice,
            tool_choice_name=choice_name,
            n_other_tools=toolset.n_other + bool(_value(fields, "mcp_servers")),
            stream=_value(fields, "stream") is True,
            structured_output=structured is not None or _value(fields, "output_format") is not None,
            thinking=isinstance(thinking, dict) and thinking.get("type") != "disabled",
        )
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ViewError(f"expected a list of messages: {exc}; the body is relayed as it came") from exc


def write(body: bytes, chat: ChatView, intervention: Intervention) -> bytes:
    """The body with the intervention in it.  Raises ViewError when it cannot be edited with certainty.

    A tool choice is replaced whole, so that ``disable_parallel_tool_use`` goes with it (field case R03).
    """
    if intervention.prefix:
        raise ViewError("expected no prefill, which current models refuse; the body is relayed as it came")
    splicer = Splicer(body)
    if intervention.strip:
        splicer.delete("tools", "tool_choice")
    elif intervention.forbid:
        splicer.put("tool_choice", b'{"type":"none"}')
    if intervention.drop_tools:
        edit.drop_tools(splicer, body, intervention.drop_tools)
    if intervention.sentence:
        places = [place for _, place in _turns(split_members(body))]

        def append(index: int, sentence: str) -> None:
            splicer.append_to(_text_span(body, splicer, places[index]), sentence)

        edit.append_sentence(chat, intervention, append)
    return splicer.result()


def subscription(headers: Mapping[str, str]) -> bool:
    """True for a request with a subscription's credentials (OAuth) in place of an API key: it is never edited.

    headers: by lower-case name.
    """
    if "oauth-" in headers.get("anthropic-beta", "") or "chatgpt-account-id" in headers:
        return True
    token = headers.get("authorization", "").strip()
    token = token[7:].strip() if token[:7].lower() == "bearer " else token
    return token.startswith("sk-ant-oat") or (token.startswith("eyJ") and token.count(".") >= 2)


def _text_span(body: bytes, splicer: Splicer, place: Place) -> Span:
    """Where the text of a turn can be appended to.  Raises ViewError where there is none."""
    if place.turn < 0:
        return splicer.span("system")
    content = members(body, elements(body, splicer.span("messages"))[place.turn]).get("content")
    if content is None:
        raise ViewError("expected a message with content; the body is relayed as it came")
    if place.block == _WHOLE:
        return content.value
    block = members(body, elements(body, content.value)[place.block])
    text = block.get("text") or block.get("content")
    if text is None:
        raise ViewError("expected a block with text; the body is relayed as it came")
    return text.value


def _value(fields: Mapping[str, msgspec.Raw], key: str) -> Any:
    raw = fields.get(key)
    return None if raw is None else _decode_any(raw)


def _turns(fields: Mapping[str, msgspec.Raw]) -> list[tuple[Message, Place]]:
    found: list[tuple[Message, Place]] = []
    system = _value(fields, "system")
    text = system if isinstance(system, str) else _joined(system)[0]
    if text:
        found.append((Message("system", text), Place(-1, _WHOLE)))
    raw = fields.get("messages")
    if raw is None:
        raise ViewError("expected a messages list, there is none; the body is relayed as it came")
    waiting = OpenCalls()
    for index, turn in enumerate(_decode_turns(raw)):
        role = _ROLES.get(turn.role, "system") if isinstance(turn.role, str) else "user"
        if isinstance(turn.content, list):
            refuse_many(len(turn.content), TURNS_MAX, "blocks in one message")
            found += _blocks(index, role, turn.content, waiting)
        else:
            found.append((Message(role, turn.content or ""), Place(index, _WHOLE)))
        refuse_many(len(found), TURNS_MAX, "messages and results")
    return found


def _blocks(index: int, role: Role, blocks: list[_Block], waiting: OpenCalls) -> list[tuple[Message, Place]]:
    """The turns that one message is: a result each, what the client's program says, then what its author says."""
    results: list[tuple[Message, Place]] = []
    texts: list[str] = []
    reminders: list[str] = []
    calls: list[ToolCall] = []
    n_media, last = 0, _WHOLE
    for number, block in enumerate(blocks):
        if block.type == "tool_result":
            call_id = block.tool_use_id if isinstance(block.tool_use_id, str) else ""
            call = waiting.take(call_id)
            text, media = (block.content, 0) if isinstance(block.content, str) else _joined(block.content)
            message = Message("tool", text, (), call.name if call is not None else "", call_id, media)
            results.append((message, Place(index, number)))
        elif block.type == "tool_use":
            name = block.name if isinstance(block.name, str) else ""
            calls.append(
                ToolCall(block.id if isinstance(block.id, str) else "", name, canonical_arguments(block.input))
            )
        elif block.type == "text" and isinstance(block.text, str):
            if role == "user" and _is_reminder(block.text):
                reminders.append(block.text)
            else:
                texts.append(block.text)
                last = number
        elif isinstance(block.type, str) and block.type in _MEDIA:
            n_media += 1
    waiting.offer(tuple(calls))
    found = results
    if reminders:  # ahead of the results: these are what the dialogue waits for
        found.insert(0, (Message("system", "\n".join(reminders)), Place(index, _WHOLE)))
    if texts or calls or n_media or not found:
        found.append((Message(role, "\n".join(texts), tuple(calls), "", "", n_media), Place(index, last)))
    return found


def _is_reminder(text: str) -> bool:
    """True for a block that is a reminder and nothing else: what stands behind one is its author's."""
    stripped = text.strip()
    return stripped.startswith(_REMINDER) and stripped.endswith(_REMINDER_END)


def _joined(blocks: Any) -> tuple[str, int]:
    """Joined text and number of media of a list of decoded blocks; the volatile line is left out."""
    texts: list[str] = []
    n_media = 0
    for block in blocks if isinstance(blocks, list) else ():
        if not isinstance(block, dict):
            continue
        text = block.get("text")
        if isinstance(text, str):
            if not text.startswith(_VOLATILE):
                texts.append(text)
        elif str(block.get("type")) in _MEDIA:
            n_media += 1
    return "\n".join(texts), n_media
