"""Did a model that was left without tools write a call all the same, and how early can that be told?

Small models write calls as text: in the markup of their template, as JSON in a fence, in doubled braces (field
case R06). ``LeakDetector`` reads a reply's text as it arrives and says HOLD until the first characters settle it. The
reader goes left to right and never looks back, so how the text is cut makes no difference.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Literal

State = Literal["HOLD", "CLEAR", "LEAK"]

# Text held back at most while a JSON object could still turn out to be a call: its name stands within the first few
# dozen characters unless long arguments come first.
HOLD_CHARS_MAX = 1024
# White space in front of the first word; templates leave a line break or two.
HOLD_SPACE_CHARS_MAX = 64
# Reasoning held back at most. Past it the stream is released: a structured call may still follow, and a client that
# offered tools can take one.
HOLD_REASONING_CHARS_MAX = 2000
# Text kept for the look at the end of a stream, which only counts.
KEPT_CHARS_MAX = 32_768
_OBJECTS_LOOKED_AT_MAX = 64

# Beginnings that only a call has, whatever follows.
MARKERS = (
    "<tool_call",
    "<tool_code",
    "<tools>",
    "<tool>",
    "<function=",
    "<function_call",
    "<function name",
    "<functioncall",
    "<start_function_call>",
    "<|python_tag|>",
    "<|tool_call",
    "<|tool▁call",
    "<｜tool▁call",
    "<|action_start|>",
    "<|START_ACTION|>",
    "<｜DSML｜",
    "<invoke name=",
    "<minimax:tool_call>",
    "<seed:tool_call>",
    "<|channel|>commentary to=",
    "[TOOL_CALL",
    "[TOOL_REQUEST]",
    "functools[",
    "```tool_c",
    "```function_c",
)
_NAME_KEYS = frozenset({"name", "function", "tool", "tool_name", "function_name", "action", "recipient_name"})
_ARGUMENT_KEYS = frozenset(
    {"arguments", "parameters", "args", "params", "input", "tool_input", "action_input", "kwargs", "tool_args"}
)
_FIRST_KEYS = _NAME_KEYS | _ARGUMENT_KEYS | {"type", "id", "tool_calls", "function_call", "tool_call", "thought"}
# Words before a name: the ReAct way of writing calls, and FunctionGemma's.
_REACT = ("Action", "Tool", "Function", "call")
# ReAct thinks aloud before it calls.
_THOUGHT = "Thought"
_AFTER_THOUGHT = re.compile(r"\n[ \t]*(?:(?P<call>Action)|(?:Final )?Answer)[ \t]*:")
_REACT_LINE = re.compile(
    r"""^[ \t]*Action[ \t]*:[ \t]*[`"']?([A-Za-z_][\w.\-]*)[`"']?[ \t]*(?:$|[(\[{])""", re.MULTILINE
)
_THINK_START, _THINK_END = "<think>", "</think>"

_FENCE = re.compile(r"```[A-Za-z0-9_+-]*[ \t]*\r?\n?\s*")
_FENCE_CHARS_MAX = 40
_LISTED_WORD = re.compile(r"\[\s*(?=[A-Za-z_])")  # [get_weather(city="Oslo")]
_WORD = re.compile(r"[A-Za-z_][\w.\-]*")
_TOKEN = re.compile(
    r"""(?P<space>\s+)|(?P<open>[{\[])|(?P<close>[}\]])|(?P<colon>:)|(?P<comma>,)"""
    r"""|"(?P<double>[^"\\]*(?:\\.[^"\\]*)*)"|'(?P<single>[^'\\]*(?:\\.[^'\\]*)*)'|(?P<scalar>[^\s{}\[\]:,"']+)""",
    re.DOTALL,
)
# Only from the first of several braces on: a small model that is stuck writes thousands of them, and a search that
# begins at each takes the square of that.
_EMBEDDED = re.compile(r"""(?<!\{)\{+\s*["'](?:""" + "|".join(sorted(_FIRST_KEYS)) + r""")["']\s*:""")


class LeakDetector:
    """Watches one reply. ``offered``: names of the tools that were withheld."""

    __slots__ = ("_kept", "_n_reasoning_chars", "_names", "_state", "leaked_late")

    def __init__(self, offered: Collection[str]) -> None:
        self._names = frozenset(offered)
        self._kept = ""
        self._n_reasoning_chars = 0
        self._state: State = "HOLD"
        self.leaked_late = False

    @property
    def state(self) -> State:
        """HOLD: not settled; CLEAR: to be released; LEAK: a call, not a byte of which was released."""
        return self._state

    def text(self, piece: str) -> State:
        """More of the reply's content."""
        if len(self._kept) < KEPT_CHARS_MAX:
            self._kept += piece
        if self._state == "HOLD":
            self._state = classify(self._kept, self._names)
        return self._state

    def reasoning(self, n_chars: int) -> State:
        """More reasoning, which is never read, only counted."""
        self._n_reasoning_chars += n_chars
        if self._state == "HOLD" and self._n_reasoning_chars > HOLD_REASONING_CHARS_MAX:
            self._state = "CLEAR"
        return self._state

    def call(self) -> State:
        """A structured call."""
        if self._state == "HOLD":
            self._state = "LEAK"
        elif self._state == "CLEAR":
            self.leaked_late = True
        return self._state

    def release(self) -> State:
        """The upstream sent what is no reply (an error): pass it on."""
        if self._state == "HOLD":
            self._state = "CLEAR"
        return self._state

    def close(self) -> State:
        """The reply is complete: settle what is still open; after a release only count."""
        found = holds_call(self._kept, self._names)
        if self._state == "HOLD":
            self._state = "LEAK" if found else "CLEAR"
        elif self._state == "CLEAR" and found:
            self.leaked_late = True
        return self._state


def holds_call(text: str, names: frozenset[str]) -> bool:
    """True when a complete text is, or contains, a call to an offered tool, or call markup."""
    if classify(text, names) == "LEAK":
        return True
    for marker in MARKERS:
        if marker[0] in "<[" or marker.startswith("```"):
            position = text.find(marker)
            if position >= 0 and text[position - 1 : position] != "`":
                return True
    if any(match[1] in names for match in _REACT_LINE.finditer(text)):
        return True
    for count, match in enumerate(_EMBEDDED.finditer(text)):
        if count == _OBJECTS_LOOKED_AT_MAX:
            break
        chars_max = HOLD_CHARS_MAX if count else KEPT_CHARS_MAX  # long arguments may come before the name
        if _classify_json(text[match.start() :], names, closed=True, chars_max=chars_max) == "LEAK":
            return True
    return False


def classify(text: str, names: frozenset[str]) -> State:
    """What the beginning of a reply settles.

    Extending a text never changes CLEAR or LEAK. Prose is CLEAR with its first word, a code block with its first line.
    """
    rest = text.lstrip()
    thinking = _classify_thinking(rest, names) if rest.startswith("<") else None
    return thinking or _classify_beginning(text, names)


def _classify_beginning(text: str, names: frozenset[str]) -> State:
    rest = text.lstrip()
    if not rest:
        return "HOLD" if len(text) <= HOLD_SPACE_CHARS_MAX else "CLEAR"
    if len(text) - len(rest) > HOLD_SPACE_CHARS_MAX:
        return "CLEAR"
    first = rest[0]
    if first == "<":
        return _classify_markup(rest, names)
    if any(rest.startswith(marker) for marker in MARKERS):
        return "LEAK"
    if any(marker.startswith(rest) for marker in MARKERS):
        return "HOLD"
    if first == "`":
        return _classify_fence(rest, names)
    if first in "{[":
        listed = _LISTED_WORD.match(rest)
        return _classify_words(rest[listed.end() :], names) if listed else _classify_json(rest, names)
    return _classify_words(rest, names)


def _classify_thinking(rest: str, names: frozenset[str]) -> State | None:
    """Reasoning written into the content: what counts is what comes behind it. None when there is none."""
    if not rest.startswith(_THINK_START):
        return "HOLD" if _THINK_START.startswith(rest) else None
    end = rest.find(_THINK_END, 0, HOLD_REASONING_CHARS_MAX)
    if end < 0:
        return "HOLD" if len(rest) < HOLD_REASONING_CHARS_MAX else "CLEAR"
    return _classify_beginning(rest[end + len(_THINK_END) :], names)


def _classify_markup(rest: str, names: frozenset[str]) -> State:
    """``<…``: a template's markup, or a tag named like a tool."""
    tags = [*MARKERS, *(f"<{name}>" for name in names)]
    if any(rest.startswith(tag) for tag in tags):
        return "LEAK"
    return "HOLD" if any(tag.startswith(rest) for tag in tags) else "CLEAR"


def _classify_fence(rest: str, names: frozenset[str]) -> State:
    """A code block: a call when it holds JSON that is one, or a Python call of a tool."""
    if not rest.startswith("```"):
        return "HOLD" if "```".startswith(rest) else "CLEAR"
    fence = _FENCE.match(rest)
    end = fence.end() if fence is not None else 0
    if end == len(rest):
        return "HOLD" if end <= _FENCE_CHARS_MAX else "CLEAR"
    if end > _FENCE_CHARS_MAX:
        return "CLEAR"
    inner = rest[end:]
    return _classify_json(inner, names) if inner[0] in "{[" else _classify_words(inner, names)


def _classify_words(rest: str, names: frozenset[str], *, printed: bool = False) -> State:
    """``get_weather(…)``, ``print(get_weather(…))``, ``Action: get_weather``; prose otherwise."""
    word = _WORD.match(rest)
    if word is None:
        return "CLEAR"
    name, behind = word[0], rest[word.end() :]
    if not behind:
        known = any(candidate.startswith(name) for candidate in ("print", _THOUGHT, *_REACT, *names))
        return "HOLD" if known else "CLEAR"
    if behind[0] in "({" and name in names:
        return "LEAK"
    if name == "print" and behind[0] == "(" and not printed:
        return _classify_words(behind[1:], names, printed=True) if behind[1:] else "HOLD"
    if name in _REACT and behind[0] == ":":
        return _classify_react(behind[1:], names)
    if name == _THOUGHT and behind[0] == ":":
        return _classify_thought(behind[1:], names)
    return "CLEAR"


def _classify_thought(rest: str, names: frozenset[str]) -> State:
    """``Thought: …``: what counts is the action behind it, or the answer."""
    found = _AFTER_THOUGHT.search(rest, 0, HOLD_CHARS_MAX)
    if found is None:
        return "HOLD" if len(rest) < HOLD_CHARS_MAX else "CLEAR"
    return _classify_react(rest[found.end() :], names) if found["call"] else "CLEAR"


def _classify_react(rest: str, names: frozenset[str]) -> State:
    fenced = rest.removeprefix(" ")
    if fenced.startswith("```"):
        return _classify_fence(fenced, names)  # Command R
    stripped = rest.lstrip(" `")
    if not stripped:
        return "HOLD" if len(rest) <= 4 else "CLEAR"
    if len(rest) - len(stripped) > 4:
        return "CLEAR"
    word = _WORD.match(stripped)
    if word is None:
        return "CLEAR"
    if word.end() == len(stripped):
        return "HOLD" if any(name.startswith(word[0]) for name in names) else "CLEAR"
    return "LEAK" if word[0] in names else "CLEAR"


def _classify_json(rest: str, names: frozenset[str], *, closed: bool = False, chars_max: int = HOLD_CHARS_MAX) -> State:
    """An object or array: a call when it names an offered tool and has arguments; quotes and braces of any kind.

    closed: there is no more to come, so an unfinished object is settled as it stands. chars_max: read no further.
    """
    undecided: State = "CLEAR" if closed or len(rest) > chars_max else "HOLD"
    scanner = _ObjectScanner(names)
    position = 0
    while position < min(len(rest), chars_max):
        token = _TOKEN.match(rest, position)
        if token is None:
            return undecided if rest[position] in "\"'" and scanner.may_hold(rest[position + 1 :]) else "CLEAR"
        if token.lastgroup == "scalar" and token.end() == len(rest) and not closed and scanner.has_key:
            return undecided
        position = token.end()
        state = scanner.take(token)
        if state != "HOLD":
            return state
    return undecided


class _ObjectScanner:
    """Reads the tokens of JSON that may be a call, left to right."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._depth = 0
        self._key = ""
        self._string: str | None = None
        self._n_keys = 0
        self._named = False
        self._has_arguments = False
        self._arguments_depth = 0  # depth outside the arguments' value while inside it

    def may_hold(self, unfinished: str) -> bool:
        """True when a string that is not finished may still become part of a call."""
        if self._arguments_depth:
            return True
        if self._key in _NAME_KEYS:
            return any(f"functions.{name}".startswith((unfinished, f"functions.{unfinished}")) for name in self._names)
        return self._n_keys > 0 or any(key.startswith(unfinished) for key in _FIRST_KEYS)

    @property
    def has_key(self) -> bool:
        """True once a first key was read."""
        return self._n_keys > 0

    def take(self, token: re.Match[str]) -> State:
        """One token; HOLD while nothing is settled."""
        kind = token.lastgroup
        if kind == "space":
            return "HOLD"
        if kind == "open":
            if self._key in _ARGUMENT_KEYS and not self._arguments_depth:
                self._arguments_depth = self._depth + 1
            self._depth += 1
            self._key, self._string = "", None
            return "HOLD"
        if kind == "close":
            return self._close()
        if kind == "colon":
            return self._take_key()
        if kind == "comma":
            return self._take_value(end=True)
        if self._n_keys == 0 and kind == "scalar":
            return "CLEAR"  # [1, 2] or {x: 1}
        value = token["double"] if token["double"] is not None else token["single"]
        self._string = value if value is not None else ""
        if self._n_keys == 0 and self._string not in _FIRST_KEYS:
            return "CLEAR"  # the first key of an answer, or a list of strings
        return self._take_value(end=False)

    def _take_key(self) -> State:
        if self._arguments_depth:
            self._string = None
            return "HOLD"
        self._key, self._string = self._string or "", None
        self._n_keys += 1
        if self._n_keys == 1 and self._key not in _FIRST_KEYS:
            return "CLEAR"
        if self._key in _ARGUMENT_KEYS:
            self._has_arguments = True
            return self._settled()
        return "HOLD"

    def _take_value(self, *, end: bool) -> State:
        if self._arguments_depth:
            return "HOLD"
        if self._key in _NAME_KEYS and self._string is not None:
            if _bare(self._string) not in self._names:
                return "CLEAR"  # JSON about something else
            self._named = True
            self._key = ""
            return self._settled()
        if end:
            if self._n_keys == 0:
                return "CLEAR"  # a list of strings
            self._key, self._string = "", None
        return "HOLD"

    def _close(self) -> State:
        self._depth -= 1
        self._key, self._string = "", None
        if self._arguments_depth and self._depth < self._arguments_depth:
            self._arguments_depth = 0
        return "CLEAR" if self._depth <= 0 else "HOLD"

    def _settled(self) -> State:
        return "LEAK" if self._named and self._has_arguments else "HOLD"


def _bare(name: str) -> str:
    """``functions.get_weather`` -> ``get_weather``."""
    return name.removeprefix("functions.")
