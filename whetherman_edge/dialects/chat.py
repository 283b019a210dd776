"""ChatView: what the gate may know of a request, whatever dialect it came in.

A view, never the source: nothing here is ever serialised back to the wire. Unknown fields of the body never reach it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from whetherman_edge.errors import OverLimit

Role = Literal["system", "user", "assistant", "tool"]
ToolChoice = Literal["auto", "none", "required", "named"]
InterventionMode = Literal["note", "none", "strip", "prefill", "prune"]

# The body's size bounds texts, which cost little. Turns and calls cost 5 to 20 us each wherever a dialogue is walked,
# and the event loop waits: 4,096 are some 50 ms, and ten times as many as a long day's dialogue has.
TURNS_MAX = 4_096
OPEN_CALLS_MAX = 1_024


class Parameter(msgspec.Struct, frozen=True, gc=False, cache_hash=True):
    """One top-level argument of a tool."""

    name: str
    type: str = ""
    description: str = ""
    required: bool = False


class Tool(msgspec.Struct, frozen=True, gc=False, cache_hash=True):
    """One offered function tool.

    ``key`` is a 16-byte digest of the tool's own JSON bytes: equal bytes, equal key, so prototypes are cached by it.
    ``parameters`` holds the top-level arguments only; an 80 KB schema contributes no more than that (field case C07).
    """

    name: str
    description: str
    parameters: tuple[Parameter, ...]
    key: bytes


class ToolCall(msgspec.Struct, frozen=True, gc=False):
    """A call the assistant made earlier. ``arguments`` is canonical JSON (sorted keys, no spaces) where it parses."""

    id: str
    name: str
    arguments: str


class Message(msgspec.Struct, frozen=True, gc=False):
    """One turn.

    ``role``: ``developer`` is read as ``system``, ``function`` as ``tool``. ``text``: all text parts joined with a
    newline; images and audio are counted in ``n_media``, their bytes never kept. ``tool_name``: for tool results, the
    called function's name, resolved through the call id.
    """

    role: Role
    text: str
    calls: tuple[ToolCall, ...] = ()
    tool_name: str = ""
    tool_call_id: str = ""
    n_media: int = 0


class Intervention(msgspec.Struct, frozen=True):
    """What is to change in a request, in words that every dialect can write into its own bytes.

    ``sentence`` is appended to the text of the first turn of ``note_at`` (message indices, best first) that has one.
    ``strip``: remove the tools and all that belongs to them; ``forbid``: tool choice "none". Either drops the parallel
    flag, which some servers refuse without tools (R03). ``prefix``: text of a trailing assistant turn;
    ``continue_flags``: say so in vLLM's way. ``drop_tools``: keys (``Tool.key``) of tools to leave out.
    """

    mode: InterventionMode
    sentence: str = ""
    note_at: tuple[int, ...] = ()
    strip: bool = False
    forbid: bool = False
    prefix: str = ""
    continue_flags: bool = False
    drop_tools: frozenset[bytes] = frozenset()

    @property
    def withholds(self) -> bool:
        """True when the model is left without tools, so that a call in the reply is a leak to be caught."""
        return self.strip or self.forbid or bool(self.prefix)


class ChatView(msgspec.Struct, frozen=True, gc=False):
    """The whole request as the gate sees it.

    ``toolset_key``: 16-byte digest of the tools array's bytes. ``n_other_tools``: hosted or custom tools, never scored.
    ``tool_choice_name``: set when ``tool_choice == "named"``. ``structured_output``: ``response_format`` asks for JSON.
    ``partial``: earlier turns of the dialogue are kept by the server and are not in the request.
    """

    dialect: str
    model: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    toolset_key: bytes
    tool_choice: ToolChoice = "auto"
    tool_choice_name: str = ""
    n_other_tools: int = 0
    stream: bool = False
    structured_output: bool = False
    thinking: bool = False
    partial: bool = False

    @property
    def last_role(self) -> Role:
        """Role of the last message; ``user`` for an empty dialogue."""
        return self.messages[-1].role if self.messages else "user"

    @property
    def last_user_index(self) -> int:
        """Index of the last user message, or -1."""
        for index in range(len(self.messages) - 1, -1, -1):
            if self.messages[index].role == "user":
                return index
        return -1

    @property
    def has_tool_history(self) -> bool:
        """True when any turn carries a call or a tool result."""
        return any(m.calls or m.role == "tool" for m in self.messages)


class OpenCalls:
    """Calls of a dialogue that still wait for their result; pairs results with calls while walking the turns in order.

    Backends disagree about ids: Ollama repeats them, some clients leave them out. So a result takes the oldest waiting
    call with its id; without such a call the oldest one with its tool name; without a name the oldest of all.
    """

    __slots__ = ("_waiting",)

    def __init__(self, waiting: tuple[ToolCall, ...] = ()) -> None:
        self._waiting: list[ToolCall] = list(waiting)

    @property
    def waiting(self) -> tuple[ToolCall, ...]:
        """The calls that wait now."""
        return tuple(self._waiting)

    def offer(self, calls: tuple[ToolCall, ...]) -> None:
        """An assistant turn made these calls. Raises OverLimit."""
        self._waiting.extend(calls)
        refuse_many(len(self._waiting), OPEN_CALLS_MAX, "calls without a result")

    def take(self, call_id: str, tool_name: str = "") -> ToolCall | None:
        """The call that a result with this id (or, failing that, name, or place) answers; None when none waits."""
        waiting = self._waiting
        if not waiting:
            return None
        if len(waiting) == 1 and (not call_id or waiting[0].id == call_id):
            return waiting.pop()
        if call_id:
            for index, call in enumerate(waiting):
                if call.id == call_id:
                    return waiting.pop(index)
            if any(call.id for call in waiting):
                return None  # it names a call that is not here (history was cut), so it belongs to none of these
        if tool_name:
            for index, call in enumerate(waiting):
                if call.name == tool_name:
                    return waiting.pop(index)
        return waiting.pop(0)


def refuse_many(n: int, n_max: int, what: str) -> None:
    """Raise OverLimit when there are more than ``n_max``. ``what``: their name in the plural."""
    if n > n_max:
        raise OverLimit(f"expected at most {n_max:,} {what}, got {n:,}; the body is relayed as it came")
