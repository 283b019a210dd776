"""``POST /v1/chat/completions``: from the body's bytes to a ChatView, and which requests pass the gate by.

More tolerant than the API itself (field cases R08, R09, R10, R18, R19): content null, "", absent or a list of parts,
null tools and tool_calls, arguments as string or object, ids missing, legacy functions, unknown roles. Fields that are
not declared here (``reasoning_content``, image bytes) are skipped by the decoder and never become Python objects.
"""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec

from whetherman_edge.dialects.chat import (
    OPEN_CALLS_MAX,
    TURNS_MAX,
    ChatView,
    Message,
    OpenCalls,
    Role,
    ToolCall,
    ToolChoice,
    refuse_many,
)
from whetherman_edge.dialects.dialogue_cache import BYTES_MAX, BYTES_MIN, DialogueCache, Turns, without_last
from whetherman_edge.dialects.json_spans import refuse_repeated_keys, split_members
from whetherman_edge.dialects.tool_cache import ToolCache, ToolSet, digest
from whetherman_edge.dialects.tool_schema import parse_tools
from whetherman_edge.errors import ViewError

# Arguments beyond this (files that are written) are compared as they were spelled: one that is all keys costs a second.
ARGUMENTS_BYTES_MAX = 64 << 10

_NULL = msgspec.Raw(b"null")
_Scalar = str | int | float | bool | None
_Loose = str | int | float | bool | None | list[msgspec.Raw] | dict[str, msgspec.Raw]


class _Part(msgspec.Struct, gc=False):
    type: _Loose = None
    text: _Loose = None
    refusal: _Loose = None


class _Function(msgspec.Struct, gc=False):
    name: _Loose = None
    arguments: msgspec.Raw = _NULL
    input: msgspec.Raw = _NULL


class _Call(msgspec.Struct, gc=False):
    id: _Loose = None
    function: _Function | _Scalar = None
    custom: _Function | _Scalar = None
    name: _Loose = None
    arguments: msgspec.Raw = _NULL


class _Message(msgspec.Struct, gc=False):
    role: _Loose = None
    content: str | list[_Part | _Scalar] | int | float | bool | dict[str, msgspec.Raw] | None = None
    tool_calls: list[_Call | _Scalar] | dict[str, msgspec.Raw] | _Scalar = None
    function_call: _Function | _Scalar = None
    tool_call_id: _Loose = None
    name: _Loose = None
    tool_name: _Loose = None
    refusal: _Loose = None
    reasoning_content: msgspec.Raw = _NULL  # only whether it is there: its text is never decoded (R14)


_decode_messages = msgspec.json.Decoder(list[_Message]).decode
_decode_any = msgspec.json.Decoder().decode
_encode_sorted = msgspec.json.Encoder(order="sorted").encode

_ROLES: dict[Any, Role] = {
    "user": "user",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "developer": "system",  # R12
    "function": "tool",
    "ipython": "tool",  # Llama 3 templates
    "model": "assistant",  # Gemma templates
    "human": "user",
    None: "user",
}
_MEDIA = ("image", "audio", "video", "file")
_FORMAT_KEYS = ("response_format", "format")
_GUIDE_KEYS = ("json_schema", "grammar", "structured_outputs", "guided_json", "guided_regex", "guided_choice")
_THINKING_KEYS = ("thinking", "reasoning", "think", "enable_thinking")
_STRUCTURE_KEYS = frozenset((*_FORMAT_KEYS, *_GUIDE_KEYS))
_THOUGHT_KEYS = frozenset((*_THINKING_KEYS, "reasoning_effort", "chat_template_kwargs"))


def view(body: bytes, cache: ToolCache) -> ChatView:
    """The gate's view of a chat-completions body.

    cache: parsed tools by digest, owned by the caller.
    Raises ViewError when the body is not a JSON object with a messages list of objects, or when a top-level key comes
    twice (the upstream may read another one than we do); the proxy then relays the bytes as they came.
    """
    fields = split_members(body)
    refuse_repeated_keys(body, fields)
    if "messages" not in fields:
        raise ViewError("expected a messages list, there is none; the body is relayed as it came")
    try:
        toolset = _toolset(fields, cache)
        choice, choice_name = _tool_choice(fields)
        messages, reasoned = _dialogue(bytes(fields["messages"]), cache.dialogues)
        model = _value(fields, "model")
        return ChatView(
            dialect="openai_chat",
            model=model if isinstance(model, str) else "",
            messages=messages,
            tools=toolset.tools,
            toolset_key=toolset.key,
            tool_choice=choice,
            tool_choice_name=choice_name,
            n_other_tools=toolset.n_other,
            stream=_value(fields, "stream") is True,
            structured_output=_is_structured(fields),
            thinking=reasoned or _asks_to_think(fields),
        )
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ViewError(f"expected a list of messages: {exc}; the body is relayed as it came") from exc


def bypass_reason(chat: ChatView) -> str | None:
    """Why this request passes the gate by (``bypass:*``), or None when it is to be judged.

    The caller adds its own: off header, off list, body above the gate's limit (DESIGN 3.2).
    """
    if not chat.tools:
        return "bypass:only_other_tools" if chat.n_other_tools else "bypass:no_tools"
    if chat.tool_choice == "none":
        return "bypass:tool_choice_none"
    if chat.tool_choice != "auto":
        return "bypass:forced_tool"
    if not chat.messages:
        return "bypass:no_messages"
    if chat.last_role == "assistant":
        return "bypass:assistant_last"  # the client has the model continue its own text
    if chat.partial:
        return "bypass:stored_dialogue"
    return None


def _value(fields: dict[str, msgspec.Raw], key: str) -> Any:
    """The decoded value of a top-level key; None when it is absent."""
    raw = fields.get(key)
    return None if raw is None else _decode_any(raw)


def _toolset(fields: dict[str, msgspec.Raw], cache: ToolCache) -> ToolSet:
    for key in ("tools", "functions"):
        raw = fields.get(key)
        if raw is not None and bytes(raw) != b"null":
            return parse_tools(raw, cache)
    return _NO_TOOLS


_NO_TOOLS = ToolSet(key=digest(b"[]"), tools=(), n_other=0)


def _tool_choice(fields: dict[str, msgspec.Raw]) -> tuple[ToolChoice, str]:
    value = _value(fields, "tool_choice")
    return read_tool_choice(_value(fields, "function_call") if value is None else value)


def read_tool_choice(value: Any) -> tuple[ToolChoice, str]:
    """A decoded ``tool_choice`` or ``function_call``. The unknown counts as forced: the gate keeps out."""
    if value is None or value == "auto":
        return "auto", ""
    if value == "none":
        return "none", ""
    if not isinstance(value, dict):
        return "required", ""
    kind = value.get("type")
    if kind == "auto" or kind == "none":
        return kind, ""
    if kind == "allowed_tools":
        allowed = value.get("allowed_tools")
        mode = allowed.get("mode") if isinstance(allowed, dict) else value.get("mode")
        return ("auto", "") if mode == "auto" else ("required", "")
    nested = value.get("function") or value.get("custom")
    name = nested.get("name") if isinstance(nested, dict) else value.get("name")
    if isinstance(name, str) and name:
        return "named", name
    return "required", ""


def _dialogue(raw: bytes, cache: DialogueCache) -> tuple[tuple[Message, ...], bool]:
    """The turns of a messages array, and whether any carries reasoning; turns seen before are not read again.

    Raises msgspec.DecodeError, OverLimit.
    """
    known = cache.known(raw) if len(raw) >= BYTES_MIN else None
    parsed: list[_Message] = []
    if known is not None:
        with contextlib.suppress(msgspec.DecodeError):  # then the whole is read, for an error with the right place
            parsed = _decode_messages(b"[" + raw[len(known.raw) + 1 :])
    if not parsed:  # nothing is known, or nothing stands behind the comma, which is no array
        known, parsed = None, _decode_messages(raw)
    waiting = OpenCalls(known.waiting if known is not None else ())
    before, reasoned = (known.messages, known.reasoned) if known is not None else ((), False)
    refuse_many(len(before) + len(parsed), TURNS_MAX, "messages")
    if len(parsed) > 1 and BYTES_MIN <= len(raw) <= BYTES_MAX:
        messages, has_reasoning = _messages(parsed[:-1], waiting)
        before, reasoned, parsed = before + messages, reasoned or has_reasoning, parsed[-1:]
        cache.keep(Turns(without_last(raw, known), before, waiting.waiting, reasoned), known)
    messages, has_reasoning = _messages(parsed, waiting)
    return before + messages, reasoned or has_reasoning


def _messages(parsed: list[_Message], waiting: OpenCalls) -> tuple[tuple[Message, ...], bool]:
    """The turns, and whether any carries reasoning. Runs for every turn of every request: kept short of calls."""
    reasoned = False
    messages: list[Message] = []
    for turn in parsed:
        content = turn.content
        n_media = 0
        if type(content) is str:
            text = content
        elif content is None:
            text = turn.refusal if type(turn.refusal) is str else ""
        else:
            text, n_media = _parts(content)
        raw_role = turn.role
        role = _ROLES.get(raw_role, "system") if raw_role is None or type(raw_role) is str else "system"
        if role == "tool":
            call_id = _text(turn.tool_call_id)
            name = _text(turn.name) or _text(turn.tool_name)
            call = waiting.take(call_id, name)
            tool_name = call.name if call is not None and call.name else name
            messages.append(Message("tool", text, (), tool_name, call_id, n_media))
            continue
        calls: tuple[ToolCall, ...] = ()
        if turn.tool_calls is not None or turn.function_call is not None:
            calls = _calls(turn)
            waiting.offer(calls)
        if turn.reasoning_content is not _NULL and bytes(turn.reasoning_content) != b"null":
            reasoned = True
        messages.append(Message(role, text, calls, "", "", n_media))
    return tuple(messages), reasoned


def _parts(content: Any) -> tuple[str, int]:
    """Joined text and number of media parts of a content that is no plain string."""
    if not isinstance(content, list):
        return "", 0
    texts: list[str] = []
    n_media = 0
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, _Part):
            kind = part.type if isinstance(part.type, str) else ""
            if "thinking" in kind or "reasoning" in kind:
                continue
            if isinstance(part.text, str):
                texts.append(part.text)
            elif isinstance(part.refusal, str):
                texts.append(part.refusal)
            elif any(word in kind for word in _MEDIA):
                n_media += 1
    return "\n".join(texts), n_media


def _calls(turn: _Message) -> tuple[ToolCall, ...]:
    found: list[ToolCall] = []
    if isinstance(turn.tool_calls, list):
        refuse_many(len(turn.tool_calls), OPEN_CALLS_MAX, "calls in one turn")
        for entry in turn.tool_calls:
            if not isinstance(entry, _Call):
                continue
            call_id = _text(entry.id)
            if isinstance(entry.function, _Function):
                function = entry.function
                found.append(ToolCall(call_id, _text(function.name), canonical_arguments(function.arguments)))
            elif isinstance(entry.custom, _Function):
                custom = entry.custom
                found.append(ToolCall(call_id, _text(custom.name), canonical_arguments(custom.input)))
            elif isinstance(entry.name, str):
                found.append(ToolCall(call_id, entry.name, canonical_arguments(entry.arguments)))
    if not found and isinstance(turn.function_call, _Function):
        legacy = turn.function_call
        found.append(ToolCall("", _text(legacy.name), canonical_arguments(legacy.arguments)))
    return tuple(found)


def canonical_arguments(raw: msgspec.Raw | bytes) -> str:
    """Arguments (a JSON string holding JSON, or an object) with sorted keys and no spaces; as they are otherwise."""
    data = bytes(raw)
    if len(data) > ARGUMENTS_BYTES_MAX and data[:1] != b'"':
        return data.decode(errors="replace")
    value = _decode_any(data)
    text = ""
    if isinstance(value, str):
        text = value
        if not text.strip():
            return "{}"
        if len(text) > ARGUMENTS_BYTES_MAX:
            return text
        try:
            value = _decode_any(text)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return text
    elif value is None:
        return "{}"
    try:
        return _encode_sorted(value).decode()
    except (msgspec.MsgspecError, UnicodeError, RecursionError, OverflowError):
        return text


def _text(value: Any) -> str:
    if type(value) is str:
        return value
    if type(value) is int:
        return str(value)
    return ""


def _is_structured(fields: dict[str, msgspec.Raw]) -> bool:
    if _STRUCTURE_KEYS.isdisjoint(fields):
        return False
    for key in _FORMAT_KEYS:
        value = _value(fields, key)
        kind = value.get("type", "json_schema") if isinstance(value, dict) else value
        if kind not in ("text", "", None):
            return True
    return any(_value(fields, key) is not None for key in _GUIDE_KEYS)


def _asks_to_think(fields: dict[str, msgspec.Raw]) -> bool:
    if _THOUGHT_KEYS.isdisjoint(fields):
        return False
    if _value(fields, "reasoning_effort") not in (None, "none"):
        return True
    for key in _THINKING_KEYS:
        value = _value(fields, key)
        off = isinstance(value, dict) and (value.get("type") == "disabled" or value.get("enabled") is False)
        if value is not None and value is not False and not off:
            return True
    template = _value(fields, "chat_template_kwargs")
    return isinstance(template, dict) and any(template.get(key) is True for key in ("enable_thinking", "thinking"))
