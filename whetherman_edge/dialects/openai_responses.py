"""``POST /v1/responses``: from the body's bytes to a ChatView, and edits back into them.

The dialogue is ``instructions`` and a list of ``input`` items, of which a message is one kind, a call and its output
two others; tools are flat, and hosted ones stand among them (field cases R07, S17). What the server keeps of a dialogue
(``previous_response_id``, ``conversation``, references) is not in the body, so such a request is not judged.
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
from whetherman_edge.dialects.json_spans import elements, members, refuse_repeated_keys, split_members
from whetherman_edge.dialects.openai_chat import canonical_arguments, read_tool_choice
from whetherman_edge.dialects.splice import Splicer
from whetherman_edge.dialects.tool_cache import ToolCache, ToolSet, digest
from whetherman_edge.dialects.tool_schema import parse_tools
from whetherman_edge.errors import ViewError

NAME = "openai_responses"

_NULL = msgspec.Raw(b"null")
_decode_any = msgspec.json.Decoder().decode
_encode = msgspec.json.encode
_NO_TOOLS = ToolSet(key=digest(b"[]"), tools=(), n_other=0)

_ROLES: dict[Any, Role] = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
# Calls whose result the client owes; the others (web_search_call, mcp_call, …) the server made and answered itself.
CLIENT_CALLS = frozenset(
    "function_call custom_tool_call local_shell_call shell_call computer_call apply_patch_call".split()
)
# Outputs that take a text of any kind; the others have a form that the server checks, or that a program reads.
_TEXT_OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output"})
# Of a part: what was said, or what a shell wrote.
_TEXT_MEMBERS = ("text", "refusal", "stdout", "stderr")
# Members that say: earlier turns of this dialogue are on the server.
_KEPT_BY_SERVER = ("previous_response_id", "conversation", "prompt")


class Place(NamedTuple):
    """Where a turn's text lies: the item (-1: ``instructions``, -2: ``input`` itself), and the member that has it.

    ``member`` is "" where nothing can be appended.
    """

    item: int
    member: str


_INSTRUCTIONS = Place(-1, "")
_INPUT = Place(-2, "")


class _Item(msgspec.Struct, gc=False):
    type: Any = None
    role: Any = None
    content: Any = None
    call_id: Any = None
    name: Any = None
    arguments: msgspec.Raw = _NULL
    input: msgspec.Raw = _NULL
    action: msgspec.Raw = _NULL
    operation: msgspec.Raw = _NULL
    output: Any = None


_decode_items = msgspec.json.Decoder(list[_Item]).decode


def view(body: bytes, cache: ToolCache) -> ChatView:
    """The gate's view of a Responses body.

    cache: parsed tools by digest, owned by the caller.  Raises ViewError when the body is no JSON object with an input
    of text or items, or when a top-level key comes twice; the proxy then relays the bytes as they came.
    """
    fields = split_members(body)
    refuse_repeated_keys(body, fields)
    try:
        turns, partial = _turns(fields)
        raw_tools = fields.get("tools")
        toolset = parse_tools(raw_tools, cache) if raw_tools is not None and bytes(raw_tools) != b"null" else _NO_TOOLS
        choice, choice_name = read_tool_choice(_value(fields, "tool_choice"))
        model = _value(fields, "model")
        return ChatView(
            dialect=NAME,
            model=model if isinstance(model, str) else "",
            messages=tuple(turn for turn, _ in turns),
            tools=toolset.tools,
            toolset_key=toolset.key,
            tool_choice=choice,
            tool_choice_name=choice_name,
            n_other_tools=toolset.n_other,
            stream=_value(fields, "stream") is True,
            structured_output=_is_structured(_value(fields, "text")),
            thinking=_value(fields, "reasoning") is not None,
            partial=partial or any(_value(fields, key) is not None for key in _KEPT_BY_SERVER),
        )
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ViewError(f"expected a list of input items: {exc}; the body is relayed as it came") from exc


def write(body: bytes, chat: ChatView, intervention: Intervention) -> bytes:
    """The body with the intervention in it.  Raises ViewError when it cannot be edited with certainty."""
    if intervention.prefix:
        raise ViewError("expected no prefill, which Responses do not continue; the body is relayed as it came")
    splicer = Splicer(body)
    if intervention.strip:
        splicer.delete("tools", "tool_choice", "parallel_tool_calls")
    elif intervention.forbid:
        splicer.put("tool_choice", b'"none"')
        splicer.delete("parallel_tool_calls")
    if intervention.drop_tools:
        edit.drop_tools(splicer, body, intervention.drop_tools)
    if intervention.sentence:
        places = [place for _, place in _turns(split_members(body))[0]]

        def append(index: int, sentence: str) -> None:
            _append(splicer, body, places[index], sentence)

        edit.append_sentence(chat, intervention, append)
    return splicer.result()


def _append(splicer: Splicer, body: bytes, place: Place, sentence: str) -> None:
    if place == _INSTRUCTIONS:
        splicer.append_to(splicer.span("instructions"), sentence)
        return
    span = splicer.span("input")
    if place != _INPUT:
        item = members(body, elements(body, span)[place.item])
        if place.member not in item:
            raise ViewError("expected an input item that takes a text; the body is relayed as it came")
        span = item[place.member].value
    splicer.append_to(span, sentence, b"input_text")


def _value(fields: Mapping[str, msgspec.Raw], key: str) -> Any:
    raw = fields.get(key)
    return None if raw is None else _decode_any(raw)


def _turns(fields: Mapping[str, msgspec.Raw]) -> tuple[list[tuple[Message, Place]], bool]:
    """The turns with their places, and whether some of the dialogue is not here.

    Consecutive calls are one assistant turn, and belong to the assistant's words before them, as in other dialects.
    """
    turns: list[tuple[Message, Place]] = []
    instructions = _value(fields, "instructions")
    if isinstance(instructions, str) and instructions:
        turns.append((Message("system", instructions), _INSTRUCTIONS))
    raw = fields.get("input")
    if raw is None:
        if any(_value(fields, key) is not None for key in _KEPT_BY_SERVER):
            return turns, True
        raise ViewError("expected an input, there is none; the body is relayed as it came")
    if bytes(raw)[:1] == b'"':
        return [*turns, (Message("user", _decode_any(raw)), _INPUT)], False
    waiting = OpenCalls()
    partial = False
    open_calls = False  # the last turn is the assistant's and may take one more call
    items = _decode_items(raw)
    refuse_many(len(items), TURNS_MAX, "input items")
    for index, item in enumerate(items):
        kind = item.type if isinstance(item.type, str) else "message"
        if kind == "item_reference" or kind.startswith("compaction"):
            partial = True  # not here, or encrypted
        elif kind in CLIENT_CALLS:
            call = _call(item, kind)
            waiting.offer((call,))
            if open_calls:
                before, place = turns.pop()
                turns.append((msgspec.structs.replace(before, calls=(*before.calls, call)), place))
            else:
                turns.append((Message("assistant", "", (call,)), Place(index, "content")))
            open_calls = True
        elif kind.endswith("_call_output"):
            call_id = item.call_id if isinstance(item.call_id, str) else ""
            answered = waiting.take(call_id)
            text, n_media = _text(item.output)
            name = answered.name if answered is not None else ""
            member = "output" if kind in _TEXT_OUTPUTS else ""
            turns.append((Message("tool", text, (), name, call_id, n_media), Place(index, member)))
            open_calls = False
        elif kind == "message":
            text, n_media = _text(item.content)
            role = _ROLES.get(item.role, "system") if isinstance(item.role, str) else "user"
            turns.append((Message(role, text, (), "", "", n_media), Place(index, "content")))
            open_calls = role == "assistant"
    return turns, partial


def _call(item: _Item, kind: str) -> ToolCall:
    name = item.name if isinstance(item.name, str) else kind.removesuffix("_call")
    match kind:
        case "function_call":
            arguments = item.arguments
        case "custom_tool_call":
            arguments = item.input
        case "apply_patch_call":
            arguments = item.operation
        case _:
            arguments = item.action
    return ToolCall(item.call_id if isinstance(item.call_id, str) else "", name, canonical_arguments(arguments))


def _text(content: Any) -> tuple[str, int]:
    """Joined text and number of media parts."""
    if isinstance(content, str):
        return content, 0
    if isinstance(content, dict):  # a screenshot
        content = [content]
    if not isinstance(content, list):
        return "", 0
    texts: list[str] = []
    n_media = 0
    for part in content:
        if not isinstance(part, dict):
            continue
        said = [text for key in _TEXT_MEMBERS if isinstance(text := part.get(key), str)]
        if said:
            texts += said
        elif str(part.get("type")).startswith(("input_", "output_", "computer_")):
            n_media += 1
    return "\n".join(texts), n_media


def _is_structured(text: Any) -> bool:
    form = text.get("format") if isinstance(text, dict) else None
    return isinstance(form, dict) and form.get("type") not in ("text", None)
