"""The System One typed-decision API (``POST /v1/systemone``): a body in, a checked request out. No I/O, no clock.

    {"model": str?, "state": text, "questions": {id: question}}        text = string | object | array, always
    question = noul {instructions?, criteria {"true"?, "false"?}?}     probability of yes
             | choice {instructions?, criteria {option: text | null}}  one of 2..255 options
             | score {instructions?, criteria [text, ...]}             one of 2..10 ordered levels

`parse` checks the whole body and reports every fault at once, in the shape FastAPI gives them (422). Faults of size are
`Refusal` with their own status. `system_one_answer` turns probabilities into the answer objects.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from whetherman_edge.dialects.json_spans import VALUES_MAX, refuse_crowded
from whetherman_edge.dialects.text_forms import JSON, Rendered, render
from whetherman_edge.errors import OverLimit, RequestError

OPTIONS_MIN, OPTIONS_MAX = 2, 255
LEVELS_MIN, LEVELS_MAX = 2, 10
"""Ranges documented by TypeSafe for choice options and score levels."""

QUESTIONS_MAX = 1024
"""Questions of one request. None is documented; this one keeps a hostile body from holding the loop for seconds."""

BODY_BYTES_MAX = 2 * 1024 * 1024
"""Body after inflation: several times the documented 64k tokens of a request, and parsed in a few milliseconds."""

BUDGET_BYTES = 128 * 1024
"""State plus longest question: 32k tokens at four bytes each, TypeSafe's own budget (``max_tokens_exceeded``)."""

STATE_CHARS_READ = 8 * 1024
"""How much of a state is read. A mean-pooled embedding of more than that says nothing about any part of it."""

TEXT_CHARS_READ = 2 * 1024
"""How much of one instruction, description or level is read."""

EXAMPLES_READ = 64
"""Examples of one option; each costs one more comparison."""

ID_CHARS_SHOWN = 80
FAULTS_SHOWN_MAX = 64

DECISION_MODEL = "whetherman-edge-0"
"""Our model's name; raised when answers change in kind, not with every fit."""

DEFAULT_MODEL = "jev-latest"
"""What the SDKs send. Clients that leave the model out mean this one."""

_MODEL_NAMES = re.compile(r"(?:[\w.-]+/)?(?:jev-[\w.-]+|whetherman-edge(?:-[\w.-]+)?)", re.IGNORECASE | re.ASCII)
"""Names answered: ours, and any Jev release, with or without a provider's prefix: a pinned client is still a client."""

GATE_LABELS = frozenset({"ACT", "ANSWER", "ASK", "DECLINE"})

Loc: TypeAlias = tuple[str | int, ...]


class Fault(msgspec.Struct, frozen=True, gc=False):
    """One broken rule: where, what, and its machine-readable type."""

    loc: Loc
    msg: str
    type: str


class InvalidBody(RequestError):
    """The body breaks the contract (HTTP 422). ``faults`` lists the broken rules; the message is the first one's."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        first = faults[0]
        super().__init__(f"{_path(first.loc)}: {first.msg}", first.loc, first.type)
        self.faults = tuple(faults[:FAULTS_SHOWN_MAX])


class Refusal(RequestError):
    """A request that is turned away for another reason than its contents' shape. ``status``: the HTTP status."""

    def __init__(self, status: int, error_type: str, message: str) -> None:
        super().__init__(message, ("body",), error_type)
        self.status = status


class State(msgspec.Struct, frozen=True, gc=False):
    """What the questions are about.

    ``subject``: the text that is judged; the last user turn of a messages-like state, the ``query`` of
    ``{"query": ...}``, else the whole state. ``value``: the state as it came, for the gate.
    ``truncated``: not all of it is read.
    """

    subject: str
    value: JSON
    truncated: bool = False


class Option(msgspec.Struct, frozen=True, gc=False):
    """One option of a choice; ``name`` as it came, byte for byte. ``parameters``: argument names of a tool."""

    name: str
    description: str = ""
    examples: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()


class Noul(msgspec.Struct, frozen=True, gc=False):
    """A yes/no question. ``true`` and ``false``: what counts as yes and as no, empty where not said."""

    instructions: str
    true: str = ""
    false: str = ""


class Choice(msgspec.Struct, frozen=True, gc=False):
    """One of ``options``, in the order they came."""

    instructions: str
    options: tuple[Option, ...]

    @property
    def asks_the_gate(self) -> bool:
        """True when the options are exactly the gate's four decisions."""
        return len(self.options) == len(GATE_LABELS) and {option.name for option in self.options} == GATE_LABELS


class Score(msgspec.Struct, frozen=True, gc=False):
    """A rating. ``levels``: their texts, lowest first; ``legend``: the levels as they came."""

    instructions: str
    levels: tuple[str, ...]
    legend: tuple[JSON, ...]


Question: TypeAlias = Noul | Choice | Score


class Request(msgspec.Struct, frozen=True, gc=False):
    """A checked request. ``n_bytes``: size of its body, for the usage figures."""

    model: str
    state: State
    questions: dict[str, Question]
    n_bytes: int = 0


def parse(body: bytes) -> Request:
    """Check a body. Raises `InvalidBody` (422) with every fault, or `Refusal` (400, 404, 413)."""
    if len(body) > BODY_BYTES_MAX:
        raise Refusal(
            413,
            "request_too_large",
            f"expected a body of at most {BODY_BYTES_MAX} bytes, got {len(body)}; send less state or fewer questions",
        )
    try:
        refuse_crowded(body)
        document = msgspec.json.decode(body)
    except OverLimit as exc:
        message = f"expected at most {VALUES_MAX:,} JSON values; send less state or fewer questions"
        raise Refusal(413, "request_too_large", message) from exc
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        message = f"expected a JSON object in UTF-8, got something else: {str(exc)[:120]}"
        raise InvalidBody([Fault(("body",), message, "json_invalid")]) from exc
    if not isinstance(document, dict):
        raise InvalidBody([_wrong(("body",), "an object", document, "model_type")])
    faults: list[Fault] = []
    model = document.get("model", DEFAULT_MODEL)
    if not isinstance(model, str):
        faults.append(_wrong(("body", "model"), "a string", model, "string_type"))
    if document.get("assets") is not None:
        message = "assets (images) are not supported: this engine reads text only; leave assets out"
        faults.append(Fault(("body", "assets"), message, "unsupported"))
    state = _state(document, faults)
    questions = _questions(document, faults)
    if faults:
        raise InvalidBody(faults)
    assert isinstance(model, str)
    assert state is not None
    if _MODEL_NAMES.fullmatch(model) is None:
        message = (
            f"no model {model[:ID_CHARS_SHOWN]!r} here; expected {DECISION_MODEL} or {DEFAULT_MODEL} (see /v1/models)"
        )
        raise Refusal(404, "not_found", message)
    if len(body) > BUDGET_BYTES:
        _check_budget(document)
    return Request(model, state, questions, len(body))


def chat_body(state: State) -> bytes | None:
    """The state as an OpenAI chat body, when it is one: an object with ``messages`` and a non-empty list of ``tools``.

    A tool may be in OpenAI's form, bare (``{"name", "description", "parameters"}``), or just a name.
    """
    value = state.value
    if not isinstance(value, dict):
        return None
    messages, tools = value.get("messages"), value.get("tools")
    if not isinstance(messages, list) or not messages or not isinstance(tools, list) or not tools:
        return None
    wrapped = [_tool(tool) for tool in tools]
    return msgspec.json.encode({**value, "tools": wrapped})


def _tool(tool: JSON) -> JSON:
    if isinstance(tool, str):
        return {"type": "function", "function": {"name": tool}}
    if isinstance(tool, dict) and "function" not in tool and "type" not in tool and isinstance(tool.get("name"), str):
        return {"type": "function", "function": tool}
    return tool


def _state(document: dict[str, JSON], faults: list[Fault]) -> State | None:
    loc: Loc = ("body", "state")
    if "state" not in document:
        faults.append(Fault(loc, "Field required: state is a string, an object or an array", "missing"))
        return None
    value = document["state"]
    if not isinstance(value, (str, dict, list)):
        faults.append(_wrong(loc, "a string, an object or an array", value, "text_type"))
        return None
    subject = _subject(value)
    if subject is None:
        rendered = render(value, STATE_CHARS_READ)
    else:
        rendered = Rendered(subject[-STATE_CHARS_READ:], len(subject) > STATE_CHARS_READ)
    return State(rendered.text, value, rendered.truncated)


def _subject(value: JSON) -> str | None:
    """The one text a state is about, when its shape says so: ``query``, or the last user turn of ``messages``."""
    messages: JSON = value
    if isinstance(value, dict):
        query = value.get("query")
        if isinstance(query, str) and query.strip():
            return query
        messages = value.get("messages")
    if not isinstance(messages, list):
        return None
    for turn in reversed(messages):
        if isinstance(turn, dict) and turn.get("role") == "user":
            text = _turn_text(turn.get("content"))
            if text:
                return text
    return None


def _turn_text(content: JSON) -> str:
    if isinstance(content, str):
        return content.strip()
    if not isinstance(content, list):
        return ""
    texts = [part.get("text") for part in content if isinstance(part, dict)]
    return "\n".join(text.strip() for text in texts if isinstance(text, str) and text.strip())


def _questions(document: dict[str, JSON], faults: list[Fault]) -> dict[str, Question]:
    loc: Loc = ("body", "questions")
    if "questions" not in document:
        faults.append(Fault(loc, "Field required: questions maps names to questions", "missing"))
        return {}
    value = document["questions"]
    if not isinstance(value, dict):
        faults.append(_wrong(loc, "an object that maps names to questions", value, "dict_type"))
        return {}
    if not value:
        faults.append(Fault(loc, "at least one question is required", "too_short"))
        return {}
    if len(value) > QUESTIONS_MAX:
        message = f"at most {QUESTIONS_MAX} questions fit into one request, got {len(value)}; send several requests"
        faults.append(Fault(loc, message, "too_long"))
        return {}
    questions: dict[str, Question] = {}
    for name, raw in value.items():
        question = _question((*loc, name), name, raw, faults)
        if question is not None:
            questions[name] = question
    return questions


def _question(loc: Loc, name: str, raw: JSON, faults: list[Fault]) -> Question | None:
    if not name:
        faults.append(Fault(loc, "a question's name must be a non-empty string", "string_too_short"))
    if not isinstance(raw, dict):
        faults.append(_wrong(loc, "an object with a type", raw, "model_type"))
        return None
    kind = raw.get("type")
    match kind:
        case "noul":
            return _noul((*loc, "noul"), raw, faults)
        case "choice":
            return _choice((*loc, "choice"), raw, faults)
        case "score":
            return _score((*loc, "score"), raw, faults)
        case "box":
            message = "box questions need an image model; this engine reads text and answers noul, choice and score"
            faults.append(Fault((*loc, "type"), message, "unsupported"))
        case None if "type" not in raw:
            faults.append(Fault(loc, "Field required: type is one of noul, choice, score", "union_tag_not_found"))
        case _:
            faults.append(_wrong(loc, "type to be one of noul, choice, score", kind, "union_tag_invalid"))
    return None


def _noul(loc: Loc, raw: dict[str, JSON], faults: list[Fault]) -> Noul:
    instructions = _text((*loc, "instructions"), raw.get("instructions"), faults)
    criteria = raw.get("criteria")
    true = false = ""
    if isinstance(criteria, dict):
        true = _text((*loc, "criteria", "true"), criteria.get("true"), faults)
        false = _text((*loc, "criteria", "false"), criteria.get("false"), faults)
    elif criteria is not None:
        faults.append(_wrong((*loc, "criteria"), 'an object with "true" and "false", or null', criteria, "dict_type"))
        return Noul(instructions)
    if not (instructions or true or false):
        message = "a noul needs instructions or a described outcome: there is nothing to judge"
        faults.append(Fault(loc, message, "value_error"))
    return Noul(instructions, true, false)


def _choice(loc: Loc, raw: dict[str, JSON], faults: list[Fault]) -> Choice | None:
    instructions = _text((*loc, "instructions"), raw.get("instructions"), faults)
    where: Loc = (*loc, "criteria")
    if "criteria" not in raw:
        faults.append(Fault(where, "Field required: criteria maps each option to its description or null", "missing"))
        return None
    criteria = raw["criteria"]
    if not isinstance(criteria, dict):
        faults.append(
            _wrong(where, "an object that maps each option to its description or null", criteria, "dict_type")
        )
        return None
    if not _in_range(where, len(criteria), OPTIONS_MIN, OPTIONS_MAX, "option", faults):
        return None
    options: list[Option] = []
    for name, value in criteria.items():
        if value is not None and not isinstance(value, (str, dict, list)):
            faults.append(_wrong((*where, name), "a string, an object, an array or null", value, "text_type"))
            continue
        options.append(_option(name, value))
    return Choice(instructions, tuple(options))


def _option(name: str, value: JSON) -> Option:
    """Any text form will do. What looks like a tool keeps its parts, since the scorer weighs them differently:

    strings under ``examples``, and ``parameters`` as a JSON schema, an object keyed by name, or a list of names.
    """
    if value is None or isinstance(value, str):
        return Option(name, (value or "")[:TEXT_CHARS_READ])
    if not isinstance(value, dict):
        return Option(name, render(value, TEXT_CHARS_READ, keys=False).text)
    rest = dict(value)
    examples = _strings(rest.get("examples"))
    if examples:
        del rest["examples"]
    parameters = _parameter_names(rest.get("parameters"))
    if parameters:
        del rest["parameters"]
    return Option(name, render(rest, TEXT_CHARS_READ, keys=False).text, examples[:EXAMPLES_READ], parameters)


def _strings(value: JSON) -> tuple[str, ...]:
    """A list of strings, blanks left out; nothing for any other shape."""
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        return ()
    return tuple(item[:TEXT_CHARS_READ] for item in value if isinstance(item, str) and item.strip())


def _parameter_names(value: JSON) -> tuple[str, ...]:
    if isinstance(value, dict):
        properties = value.get("properties")
        if isinstance(properties, dict):
            value = properties
        elif value.get("type") == "object":
            return ()
        return tuple(value)
    return _strings(value)


def _score(loc: Loc, raw: dict[str, JSON], faults: list[Fault]) -> Score | None:
    instructions = _text((*loc, "instructions"), raw.get("instructions"), faults)
    where: Loc = (*loc, "criteria")
    if "criteria" not in raw:
        faults.append(Fault(where, "Field required: criteria lists the levels, lowest first", "missing"))
        return None
    criteria = raw["criteria"]
    if not isinstance(criteria, list):
        faults.append(_wrong(where, "a list of levels, lowest first (not a map)", criteria, "list_type"))
        return None
    if not _in_range(where, len(criteria), LEVELS_MIN, LEVELS_MAX, "level", faults):
        return None
    for index, level in enumerate(criteria):
        if not isinstance(level, (str, dict, list)):
            faults.append(_wrong((*where, index), "a string, an object or an array", level, "text_type"))
    levels = tuple(render(level, TEXT_CHARS_READ, keys=False).text for level in criteria)
    return Score(instructions, levels, tuple(criteria))


def _text(loc: Loc, value: JSON, faults: list[Fault]) -> str:
    """An optional text, flattened; null and absent are the empty text."""
    if value is None:
        return ""
    if not isinstance(value, (str, dict, list)):
        faults.append(_wrong(loc, "a string, an object, an array or null", value, "text_type"))
        return ""
    return render(value, TEXT_CHARS_READ, keys=False).text.strip()


def _in_range(loc: Loc, count: int, low: int, high: int, noun: str, faults: list[Fault]) -> bool:
    if count == 0:
        faults.append(Fault(loc, f"at least one {noun} is required ({low} to {high} are accepted)", "too_short"))
    elif count < low:
        faults.append(Fault(loc, f"expected {low} to {high} {noun}s, got {count}", "too_short"))
    elif count > high:
        faults.append(Fault(loc, f"expected {low} to {high} {noun}s, got {count}", "too_long"))
    return low <= count <= high


def _check_budget(document: dict[str, JSON]) -> None:
    """Raises `Refusal` (400) when the state and the longest question together are over the budget."""
    questions = document["questions"]
    assert isinstance(questions, dict)
    size = len(msgspec.json.encode(document["state"]))
    size += max(len(msgspec.json.encode(question)) for question in questions.values())
    if size > BUDGET_BYTES:
        raise Refusal(
            400,
            "max_tokens_exceeded",
            f"expected at most {BUDGET_BYTES} bytes in the state and the longest question together (about 32k tokens), "
            f"got {size}; shorten the state",
        )


def _wrong(loc: Loc, expected: str, got: JSON, kind: str) -> Fault:
    return Fault(loc, f"expected {expected}, got {_kind(got)}", kind)


def _kind(value: JSON) -> str:
    """A JSON value named for a message: its type, and a short string's text. Contents of a state never appear here."""
    if isinstance(value, str):
        return f"the string {value[:ID_CHARS_SHOWN]!r}" if len(value) <= ID_CHARS_SHOWN else "a long string"
    names = {
        dict: "an object",
        list: "an array",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        type(None): "null",
    }
    return names[type(value)]


_KINDS: dict[type, str] = {
    dict: "an object",
    list: "an array",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    type(None): "null",
}


def _path(loc: Loc) -> str:
    return ".".join(str(part)[:ID_CHARS_SHOWN] for part in loc)
