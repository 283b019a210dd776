"""From a ChatView to the pieces of a prompt: [tools block][dialogue][cue]. Pure.

A piece is tokenised on its own, so a prompt is a prefix of the next step's prompt whenever its pieces are: no token
ever spans two pieces. Tools come first and in name order, so that clients which shuffle them share one prefix (field
case C08) and get one verdict. Nothing volatile is ever added (C02).

Text is data: pieces of the ``text`` kind are tokenised without special tokens, so a user who types ``<end_of_turn>``
gets the characters. Control tokens come only from pieces of the ``control`` kind, which this module writes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal

import msgspec

from whetherman_edge.dialects.chat import ChatView, Message, Parameter, Tool
from whetherman_edge.errors import ArtifactError

Style = Literal["compact", "functiongemma"]

DESCRIPTION_CHARS_MAX: Final = 200
"""As many whole sentences of a tool's description as fit in this, at least the first, cut: what a tool does not do
stands in the second sentence more often than not, and an 80 KB schema still adds one line (C07)."""
PARAMETERS_MAX: Final = 12
SYSTEM_CHARS_MAX: Final = 800
TEXT_CHARS_MAX: Final = 2_000
"""A turn's text keeps its first three quarters and last quarter of this; about 500 tokens of English."""
RESULT_CHARS_MAX: Final = 1_200
ARGUMENTS_CHARS_MAX: Final = 300
ELLIPSIS: Final = " … "


class Piece(msgspec.Struct, frozen=True, gc=False):
    """A run of text or one control token. ``ends_tool``: the last token of this piece ends that tool's line."""

    text: str
    control: bool = False
    ends_tool: int = -1


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """A rendered request.

    ``tools``: pieces of the tools block. ``turns``: pieces of each turn. ``cue``: pieces after the last turn; the
    state of its last token is what the head reads. ``tool_names``: by the index that ``Piece.ends_tool`` holds.
    """

    tools: tuple[Piece, ...]
    turns: tuple[tuple[Piece, ...], ...]
    cue: tuple[Piece, ...]
    tool_names: tuple[str, ...]


def render(chat: ChatView, style: Style) -> Prompt:
    """The prompt of one request in the style the loaded artifact was trained on. Raises ArtifactError on another
    style.
    """
    tools = sorted(chat.tools, key=lambda tool: (tool.name, tool.key))
    if style == "compact":
        return _compact(chat, tools)
    if style == "functiongemma":
        return _functiongemma(chat, tools)
    raise ArtifactError(f"expected the prompt style compact or functiongemma, got {style!r}")


def cut(text: str, chars_max: int) -> str:
    """``text``, or its first three quarters and last quarter of ``chars_max`` around an ellipsis."""
    if len(text) <= chars_max:
        return text
    tail = chars_max // 4
    return text[: chars_max - tail] + ELLIPSIS + text[len(text) - tail :]


def first_sentence(text: str, chars_max: int = DESCRIPTION_CHARS_MAX) -> str:
    """Up to the first full stop followed by white space, or the first line break."""
    return next(_sentences(text), "")[:chars_max].rstrip()


def opening(text: str, chars_max: int = DESCRIPTION_CHARS_MAX) -> str:
    """The sentences that fit whole into ``chars_max``, on one line; of a first one that does not fit, its beginning."""
    kept: list[str] = []
    length = 0
    for sentence in _sentences(text):
        if kept and length + 1 + len(sentence) > chars_max:
            break
        kept.append(sentence[:chars_max].rstrip())
        length += 1 + len(sentence)
    return " ".join(kept)


def _sentences(text: str) -> Iterator[str]:
    """Pieces that end in a mark followed by white space, in a CJK full stop, or at a line break; none is empty."""
    for line in text.splitlines():
        rest = line.strip()
        while rest:
            ends = [at + 1 for mark in (". ", "! ", "? ", "。") if (at := rest.find(mark)) > 0]
            end = min(ends, default=len(rest))
            yield rest[:end]
            rest = rest[end:].strip()


# --- compact: ours ---------------------------------------------------------------------------------------------------


def _compact(chat: ChatView, tools: Sequence[Tool]) -> Prompt:
    block = [Piece("Tools:\n")]
    block += [Piece(_compact_tool(tool), ends_tool=i) for i, tool in enumerate(tools)]
    turns = tuple((Piece(_compact_turn(m)),) for m in chat.messages)
    return Prompt(tuple(block), turns, (Piece("Next:"),), tuple(t.name for t in tools))


def _compact_tool(tool: Tool) -> str:
    """``name(required*, optional): Opening sentences.`` on one line; required arguments come first, in the tool's
    order.
    """
    ordered = sorted(tool.parameters, key=lambda p: not p.required)[:PARAMETERS_MAX]
    arguments = ", ".join(p.name + ("*" if p.required else "") for p in ordered)
    line = f"{tool.name}({arguments}): {opening(tool.description)}"
    return line.replace("\n", " ") + "\n"  # a name may hold anything


def _compact_turn(message: Message) -> str:
    lines: list[str] = []
    text = message.text.strip()
    media = " [media]" * min(message.n_media, 4)
    match message.role:
        case "system":
            lines.append(f"System: {cut(text, SYSTEM_CHARS_MAX)}")
        case "user":
            lines.append(f"User: {cut(text, TEXT_CHARS_MAX)}{media}")
        case "tool":
            lines.append(f"Result {message.tool_name}: {cut(text, RESULT_CHARS_MAX)}{media}")
        case _:
            if text or not message.calls:
                lines.append(f"Assistant: {cut(text, TEXT_CHARS_MAX)}")
            lines += [f"Call {c.name}({cut(c.arguments, ARGUMENTS_CHARS_MAX)})" for c in message.calls]
    return "\n".join(lines) + "\n"


# --- functiongemma: the declaration format of google/functiongemma-270m-it --------------------------------------------

_TURN, _END = Piece("<start_of_turn>", control=True), Piece("<end_of_turn>", control=True)
_ESCAPE = Piece("<escape>", control=True)
_DECLARE, _DECLARED = Piece("<start_function_declaration>", control=True), "<end_function_declaration>"
_CALL, _CALLED = Piece("<start_function_call>", control=True), Piece("<end_function_call>", control=True)
_RESPONSE, _RESPONDED = Piece("<start_function_response>", control=True), Piece("<end_function_response>", control=True)
_INTRODUCTION = "You are a model that can do function calling with the following functions"


def _functiongemma(chat: ChatView, tools: Sequence[Tool]) -> Prompt:
    block = [_TURN, Piece(f"developer\n{_INTRODUCTION}")]
    for index, tool in enumerate(tools):
        block += _declaration(tool, index)
    turns: list[tuple[Piece, ...]] = []
    first = True  # system texts that open the dialogue belong to the developer turn, after the declarations
    for message in chat.messages:
        if first and message.role == "system":
            turns.append((Piece("\n" + cut(message.text.strip(), SYSTEM_CHARS_MAX)),))
            continue
        opening = (_END, Piece("\n")) if first else ()
        first = False
        turns.append((*opening, *_gemma_turn(message)))
    closing = (_END, Piece("\n")) if first else ()
    answering = bool(chat.messages) and chat.messages[-1].role == "tool"
    cue = closing if answering else (*closing, _TURN, Piece("model\n"))
    return Prompt(tuple(block), tuple(turns), cue, tuple(t.name for t in tools))


def _quoted(text: str) -> tuple[Piece, ...]:
    return (_ESCAPE, Piece(text), _ESCAPE) if text else (_ESCAPE, _ESCAPE)


def _declaration(tool: Tool, index: int) -> list[Piece]:
    pieces = [_DECLARE, Piece(f"declaration:{tool.name}{{description:")]
    pieces += _quoted(cut(tool.description.strip(), DESCRIPTION_CHARS_MAX * 2))
    pieces.append(Piece(",parameters:{properties:{"))
    shown = tool.parameters[:PARAMETERS_MAX]
    for i, parameter in enumerate(shown):
        pieces += _property(parameter, first=i == 0)
    pieces.append(Piece("},required:["))
    for i, parameter in enumerate([p for p in shown if p.required]):
        if i:
            pieces.append(Piece(","))
        pieces += _quoted(parameter.name)
    pieces += [Piece("],type:"), *_quoted("OBJECT"), Piece("}}"), Piece(_DECLARED, control=True, ends_tool=index)]
    return pieces


def _property(parameter: Parameter, first: bool) -> list[Piece]:
    pieces = [Piece(("" if first else ",") + f"{parameter.name}:{{description:")]
    pieces += _quoted(first_sentence(parameter.description))
    return [*pieces, Piece(",type:"), *_quoted((parameter.type or "string").upper()), Piece("}")]


def _gemma_turn(message: Message) -> list[Piece]:
    text = message.text.strip()
    if message.role == "tool":
        body = [Piece(f"response:{message.tool_name}{{value:"), *_quoted(cut(text, RESULT_CHARS_MAX)), Piece("}")]
        return [_RESPONSE, *body, _RESPONDED]
    name = {"assistant": "model", "system": "developer"}.get(message.role, "user")
    chars_max = SYSTEM_CHARS_MAX if message.role == "system" else TEXT_CHARS_MAX
    pieces = [_TURN, Piece(f"{name}\n{cut(text, chars_max)}")]
    for call in message.calls:
        pieces += [_CALL, Piece(f"call:{call.name}{{"), *_arguments(call.arguments), Piece("}"), _CALLED]
    return pieces if message.calls else [*pieces, _END, Piece("\n")]


def _arguments(arguments: str) -> list[Piece]:
    try:
        values = json.loads(arguments)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        return [Piece("value:"), *_quoted(cut(arguments, ARGUMENTS_CHARS_MAX))]
    pieces: list[Piece] = []
    for i, (key, value) in enumerate(values.items()):
        pieces.append(Piece(("" if i == 0 else ",") + f"{key}:"))
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        shown = cut(text, ARGUMENTS_CHARS_MAX)
        pieces += _quoted(shown) if isinstance(value, str) else (Piece(shown),)
    return pieces


# --- tokens ---


class Tokens(msgspec.Struct, frozen=True, gc=False):
    """A prompt as token ids. ``n_tools``: length of the tools block. ``tool_ends``: position of each tool line's
    last token.
    """

    ids: tuple[int, ...]
    n_tools: int
    tool_ends: tuple[int, ...]


def tokenize(
    prompt: Prompt, tokens_of: Callable[[Piece], Sequence[int]], bos: int, *, tools_max: int, dialogue_max: int
) -> Tokens:
    """Token ids of a prompt within the two budgets.

    tokens_of: ids of one piece (cached by the caller). tools_max: tool lines past it are left out. dialogue_max: the
    middle of a longer dialogue is left out by ``kept_turns``, and the middle of a turn longer than half of it (texts
    are cut by characters before; a script with a token a character, or hundreds of calls in a turn, can still be long).
    """
    ids = [bos]
    ends: list[int] = []
    line: list[int] = []
    for piece in prompt.tools:
        line += tokens_of(piece)
        if piece.ends_tool >= 0:
            if len(ids) + len(line) > tools_max:
                break
            ids += line
            ends.append(len(ids) - 1)
            line = []
        elif not ends and piece is prompt.tools[-1]:
            ids += line  # no tools at all: the heading alone
    n_tools = len(ids)
    turns = [
        _shortened([token for piece in turn for token in tokens_of(piece)], dialogue_max // 2) for turn in prompt.turns
    ]
    for index in kept_turns([len(turn) for turn in turns], dialogue_max):
        ids += turns[index]
    for piece in prompt.cue:
        ids += tokens_of(piece)
    return Tokens(tuple(ids), n_tools, tuple(ends))


def _shortened(turn: list[int], tokens_max: int) -> list[int]:
    """A turn, or its first three quarters and last quarter of ``tokens_max``: the same whatever comes after it."""
    if len(turn) <= tokens_max:
        return turn
    tail = tokens_max // 4
    return turn[: tokens_max - tail] + turn[len(turn) - tail :]


def kept_turns(lengths: Sequence[int], budget: int) -> list[int]:
    """Indices of the turns that stay when a dialogue is longer than ``budget`` tokens.

    The opening turns stay up to a quarter of the budget (at least one turn), the latest turns stay, the middle
    goes. What goes grows in steps of half the budget, not by one turn a step: between two steps of that size the
    kept prefix is the same from one request to the next, so that its keys and values still match.
    """
    total = sum(lengths)
    if total <= budget or len(lengths) < 3:
        return list(range(len(lengths)))
    head, used = 0, 0
    while head < len(lengths) - 1 and (head == 0 or used + lengths[head] <= budget // 4):
        used += lengths[head]
        head += 1
    step = max(budget // 2, 1)
    room = max(budget - used, step)
    excess = total - used - room
    if excess <= 0:
        return list(range(len(lengths)))
    to_drop = -(-excess // step) * step
    tail, dropped = head, 0
    while tail < len(lengths) - 1 and dropped < to_drop:
        dropped += lengths[tail]
        tail += 1
    return [*range(head), *range(tail, len(lengths))]
