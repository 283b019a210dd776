"""From a ChatView to numbers: the one definition of the gate's features, used by the daemon and by training.

Only five texts are ever looked at: the last user turn, the one before it, the assistant's last text, the results of the
current step (or the last one of an earlier step) and the system text. Each is clipped first and its signals are cached,
so the cost does not grow with the history. Nothing here depends on the clock, and nothing raises on an odd view.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from whetherman_edge.dialects.chat import ChatView, Message, ToolCall
from whetherman_edge.gate.text_signals import (
    CUE_NAMES,
    N_CUES,
    QUESTION_MARKS,
    Embedded,
    ResultSignals,
    TextReader,
    TextSignals,
    clip,
    literal_values,
    n_numbers,
    name_words,
)
from whetherman_edge.gate.tool_signals import ToolReader, ToolsetSignals, ToolSignals
from whetherman_edge.kernels import NGRAM_ALL, NGRAM_WORD1, NGRAM_WORD2
from whetherman_edge.router.scorer import Scorer, Scores

F32Vector = npt.NDArray[np.float32]
F32Matrix = npt.NDArray[np.float32]

COUNT_MAX: Final = 8.0  # calls, results and arguments beyond this say no more
NAMES_CACHED_MAX: Final = 4096
HISTORY_RESULTS_MAX: Final = 4  # of earlier steps, whose words may answer the question

DENSE_BLOCKS: Final = ("user", "next_tool", "result", "assistant", "previous_user", "tools_mean", "system")

# Fields of the hashed n-grams: name -> (hash seed, modes, weight). Seeds differ, so that a word of the user and one of
# a result differ. ``user_now`` is hashed with its seed plus the phase (first step, later user turn, after a result): a
# verb that asks for a call on the first step may have been served after it.
_WORDS: Final = NGRAM_WORD1 | NGRAM_WORD2
NGRAM_FIELDS: Final[Mapping[str, tuple[int, int, float]]] = {
    "user": (1, NGRAM_ALL, 1.0),
    "first_words": (2, _WORDS, 0.5),
    "last_words": (3, _WORDS, 0.5),
    "assistant": (4, NGRAM_ALL, 1.0),
    "result": (5, NGRAM_ALL, 1.0),
    "next_tool": (6, _WORDS, 1.0),
    "last_call": (7, _WORDS, 1.0),
    "previous_user": (8, NGRAM_WORD1, 0.5),
    "system": (9, NGRAM_WORD1, 0.5),
    "user_now": (16, _WORDS, 1.0),
}
TAIL_CHARS: Final = 200  # of the assistant's text and the previous user turn
HEAD_CHARS: Final = 300  # of the result and the system text
_ONE_DIGIT: Final = bytes.maketrans(b"123456789", b"000000000")  # 12:30 and 17:05 are the same to the hash

STRUCTURE_NAMES: Final = (
    "n_messages n_user_turns n_tools has_system system_chars last_is_user last_is_tool n_calls n_results n_called_names"
    " repeated_calls same_tool_calls n_earlier_calls has_earlier_results n_last_results user_after_text has_media"
).split()
USER_NAMES: Final = (
    "user_chars user_tokens user_weight user_ends_question user_has_question user_values user_numbers user_non_ascii"
    " user_starts_lower user_ends_period user_commas user_has_colon"
).split()
ASSISTANT_NAMES: Final = (
    "assistant_exists assistant_chars assistant_ends_question assistant_has_question assistant_asked_now"
    " previous_user_chars"
).split()
RESULT_NAMES: Final = (
    ["result_exists", "result_is_object", "result_is_array", "result_items", "result_chars", "result_blank"]
    + [f"result_{name}" for name in CUE_NAMES]
    + ["result_now"]
    + [f"now_{name}" for name in ("items", "chars", "blank", *CUE_NAMES)]
    + ["n_failed_results", "result_stems"]
)
ROUTER_NAMES: Final = (
    "tool_p1 tool_p2 tool_margin tool_logit tool_logit_2 tool_logit_mean tool_logit_spread tool_cos tool_cos_mean"
    " tool_cos_best tool_desc_best tool_name_best tool_lexical_best"
    " called_logit uncalled_logit uncalled_over_called earlier_logit best_called best_earlier uncalled_share"
    " best_arguments best_required best_identifiers best_writes"
    " reads_share writes_share no_required_share identifier_share description_length"
    " user_in_best user_in_tools user_in_names best_name_in_user"
    " context_cos context_cos_mean result_cos assistant_cos system_cos context_cos_uncalled result_cos_uncalled"
    " result_cos_called hop_arguments hop_identifiers missing_required missing_identifiers"
).split()
COVER_NAMES: Final = (
    "user_in_results user_in_all_results user_in_arguments user_in_assistant user_in_system values_in_arguments"
    " values_left values_in_results values_new result_in_assistant"
).split()
COSINE_NAMES: Final = (
    "cos_user_result cos_user_assistant cos_user_previous cos_user_system cos_user_tools cos_result_assistant"
).split()
SCALAR_NAMES: Final[tuple[str, ...]] = (
    *STRUCTURE_NAMES,
    *USER_NAMES,
    *ASSISTANT_NAMES,
    *RESULT_NAMES,
    *ROUTER_NAMES,
    *COVER_NAMES,
    *COSINE_NAMES,
)
N_SCALARS: Final = len(SCALAR_NAMES)


class Field:
    """One n-gram field: its hash seed, its NGRAM_* modes, its weight, and its UTF-8 with all digits made 0.

    ``logits``: the n-gram head's share for it, once computed; a field is cached with its text.
    """

    __slots__ = ("logits", "modes", "seed", "text", "weight")

    def __init__(self, name: str, text: bytes, phase: int = 0) -> None:
        seed, self.modes, self.weight = NGRAM_FIELDS[name]
        self.seed = seed + phase
        self.text = text
        self.logits: list[float] | None = None


class Features(msgspec.Struct, frozen=True, gc=False):
    """One request as numbers.

    ``scalars``: (N_SCALARS,) float32 in the order of SCALAR_NAMES. ``phase``: one of ``gate.verdict.PHASES``, by index.
    ``blocks``: one for each of DENSE_BLOCKS.
    ``fields``: the texts whose n-grams are hashed, empty ones left out. ``tool``, ``tool_probability``: the router's
    choice for the last user turn.
    """

    scalars: F32Vector
    phase: int
    blocks: tuple[Embedded, ...]
    fields: list[Field]
    tool: str
    tool_probability: float

    @property
    def dense(self) -> F32Matrix:
        """(len(DENSE_BLOCKS), dim) float32: the vectors of ``blocks``."""
        return np.concatenate([block.vector for block in self.blocks]).reshape(len(DENSE_BLOCKS), -1)


class _Step(msgspec.Struct, gc=False):
    """The dialogue, split at the last user turn: ``calls`` and ``results`` stand after it, ``earlier_*`` before."""

    user: TextSignals
    values: frozenset[str]
    previous: TextSignals
    assistant: TextSignals
    system: TextSignals
    result: TextSignals
    result_state: ResultSignals | None
    calls: list[ToolCall]
    results: list[Message]
    earlier_calls: list[ToolCall]
    earlier_results: list[Message]
    n_last_results: int
    n_user_turns: int

    @property
    def phase(self) -> int:
        """Where the dialogue stands, an index of ``gate.verdict.PHASES``."""
        return 2 if self.n_last_results else 1 if self.earlier_calls or self.assistant.text else 0


class Extractor:
    """Features of chat views. Holds caches; not shared between threads."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._texts = TextReader(scorer.table)
        self._tools = ToolReader(self._texts)
        self._nothing = self._texts.empty

    def extract(self, chat: ChatView) -> Features:
        """Features of any view: no messages, no user turn and no tools are all fine."""
        step = self._step(chat)
        user, result, assistant, previous, system = step.user, step.result, step.assistant, step.previous, step.system
        values = _structure(chat, step) + user_scalars(user, step.values) + _assistant(chat, step) + _result(step)
        next_tool: Embedded = self._nothing
        mean: Embedded = self._nothing
        tool, following, probability = "", "", 0.0
        if chat.tools:
            slate = self._scorer.slate(chat.tools, chat.toolset_key)
            toolset = self._tools.toolset(chat.tools, slate, chat.toolset_key)
            scores = self._scorer.score_tokens(user.text, user.pooled, user.stems, slate)
            fit = Fit(step, toolset, scores)
            next_tool, mean = toolset.embedded[fit.next], toolset.mean
            values += _router(step, toolset, fit) + _context_cosines(step, toolset, fit) + _next_hop(step, toolset, fit)
            tool, following, probability = toolset.tools[fit.best].name, toolset.tools[fit.next].name, fit.p_best
        else:
            values += [0.0] * len(ROUTER_NAMES)
        values += self._cover(step)
        values += [user.dot(result), user.dot(assistant), user.dot(previous), user.dot(system), user.dot(mean)]
        values.append(result.dot(assistant))
        shown = result if step.results else self._nothing  # an earlier step's result counts in the scalars only
        return Features(
            scalars=np.array(values, dtype=np.float32),
            phase=step.phase,
            blocks=(user, next_tool, shown, assistant, previous, mean, system),
            fields=_fields(step, following),
            tool=tool,
            tool_probability=probability,
        )

    def _step(self, chat: ChatView) -> _Step:
        messages, texts = chat.messages, self._texts
        at_user = chat.last_user_index
        user = previous = assistant = ""
        systems: list[str] = []
        calls: list[ToolCall] = []
        results: list[Message] = []
        earlier_calls: list[ToolCall] = []
        earlier_results: list[Message] = []
        n_user_turns = 0
        for index, message in enumerate(messages):
            role = message.role
            if role == "user":
                n_user_turns += 1
                previous, user = user, message.text
            elif role == "tool":
                (results if index > at_user else earlier_results).append(message)
            elif role == "assistant":
                if message.calls:
                    (calls if index > at_user else earlier_calls).extend(message.calls)
                text = message.text
                if text and not text.isspace():
                    assistant = text
            else:
                systems.append(message.text)
        n_last = 0
        for message in reversed(messages):
            if message.role != "tool":
                break
            n_last += 1
        last = results[-n_last:] if n_last else (results or earlier_results)[-1:]
        result = last[0].text if len(last) == 1 else "\n".join([clip(message.text) for message in last])
        return _Step(
            user=texts.signals(user),
            values=literal_values(clip(user)),
            previous=texts.signals(previous),
            assistant=texts.signals(assistant),
            system=texts.signals(systems[0] if len(systems) == 1 else "\n".join([clip(text) for text in systems])),
            result=texts.signals(result),
            result_state=texts.result(result) if last else None,
            calls=calls,
            results=results,
            earlier_calls=earlier_calls,
            earlier_results=earlier_results,
            n_last_results=n_last,
            n_user_turns=n_user_turns,
        )

    def _cover(self, step: _Step) -> list[float]:
        """How much of the user's request the dialogue already holds; in the order of COVER_NAMES."""
        user, values, texts = step.user, step.values, self._texts
        now = [texts.signals(message.text) for message in step.results[-HISTORY_RESULTS_MAX:]]
        before = [texts.signals(message.text) for message in step.earlier_results[-HISTORY_RESULTS_MAX:]]
        called = texts.signals(" ".join([f"{c.name} {c.arguments}" for c in step.calls[-8:]])) if step.calls else None
        in_now = max([user.covered_by(s.stems) for s in now], default=0.0)
        in_before = max([user.covered_by(s.stems) for s in before], default=0.0)
        in_arguments = in_results = 0.0
        left = new = 0
        if values:
            arguments = called.lower if called else ""
            n_inside = sum([value in arguments for value in values])
            in_arguments = n_inside / len(values)
            left = len(values) - n_inside if step.results else 0
            everything = "\n".join([s.lower for s in (*now, *before)])
            outside = [value for value in values if value not in everything]
            in_results = 1.0 - len(outside) / len(values)
            spoken = f"{step.assistant.lower}\n{step.system.lower}"
            new = sum([value not in spoken for value in outside])
        return [
            in_now,
            max(in_now, in_before),
            user.covered_by(called.stems) if called else 0.0,
            user.covered_by(step.assistant.stems),
            user.covered_by(step.system.stems),
            in_arguments,
            math.log1p(left),
            in_results,
            math.log1p(new),
            step.result.covered_by(step.assistant.stems),
        ]


def _capped(count: float) -> float:
    return min(float(count), COUNT_MAX)


def _structure(chat: ChatView, step: _Step) -> list[float]:
    messages = chat.messages
    at_user = chat.last_user_index
    n_calls = n_names = n_distinct = len(step.calls)
    if n_calls > 1:
        n_names = len({call.name for call in step.calls})
        n_distinct = len({(call.name, call.arguments) for call in step.calls})
    last = chat.last_role
    return [
        math.log1p(len(messages)),
        math.log1p(step.n_user_turns),
        math.log1p(len(chat.tools)),
        float(bool(step.system.text)),
        math.log1p(len(step.system.text)),
        float(last == "user"),
        float(last == "tool"),
        _capped(n_calls),
        _capped(len(step.results)),
        _capped(n_names),
        _capped(n_calls - n_distinct),
        _capped(n_calls - n_names),
        math.log1p(len(step.earlier_calls)),
        float(bool(step.earlier_results)),
        _capped(step.n_last_results),
        float(at_user > 0 and messages[at_user - 1].role == "assistant"),
        float(any(message.n_media for message in messages[-3:])),
    ]


def user_scalars(user: TextSignals, values: frozenset[str]) -> list[float]:
    """USER_NAMES of a text; ``values``: its literal ones."""
    text = user.text
    stripped = text.strip()
    n_chars = len(text)
    asks = "?" in text or (not text.isascii() and any(mark in text for mark in QUESTION_MARKS))
    return [
        math.log1p(n_chars),
        math.log1p(user.n_tokens),
        math.log1p(user.weight),
        float(asks and stripped.endswith(QUESTION_MARKS)),
        float(asks),
        math.log1p(len(values)),
        math.log1p(n_numbers(values)),
        0.0 if text.isascii() else sum([c > "\x7f" for c in text]) / n_chars,
        float(stripped[:1].islower()),
        float(stripped[-1:] in (".", "。")),
        math.log1p(text.count(",")),
        float(":" in text),
    ]


def _assistant(chat: ChatView, step: _Step) -> list[float]:
    text = step.assistant.text
    asks = text.rstrip().endswith(QUESTION_MARKS)
    return [
        float(bool(text)),
        math.log1p(len(text)),
        float(asks),
        float("?" in text),
        float(asks and chat.last_role == "user"),
        math.log1p(len(step.previous.text)),
    ]


def _result(step: _Step) -> list[float]:
    state = step.result_state
    if state is None:
        return [0.0] * len(RESULT_NAMES)
    is_object, is_array, items, chars, blank = state.shape
    stems = math.log1p(len(step.result.stems))
    if not step.results:
        silent = [0.0] * (len(RESULT_NAMES) - 7 - N_CUES)
        return [1.0, is_object, is_array, items, chars, blank, *state.cues, *silent, stems]
    failed = 0
    for message in step.results[-8:]:
        head = message.text[:200].lower()
        failed += "error" in head or "fail" in head or "denied" in head or "not found" in head
    return [
        *(1.0, is_object, is_array, items, chars, blank, *state.cues),
        *(1.0, items, chars, blank, *state.cues),
        float(failed),
        stems,
    ]


class Fit:
    """How the tools fit the user's turn, as plain lists over the tool list (NumPy calls cost more than ten floats do).

    ``best``: the tool that fits best; ``next``: the same among tools not called since that turn. ``cosines``: of the
    user's turn with each tool.
    """

    def __init__(self, step: _Step, toolset: ToolsetSignals, scores: Scores) -> None:
        index, n = toolset.index, len(toolset.tools)
        self.scores = scores
        self.logit: list[float] = scores.logit.tolist()
        self.called = {index[c.name] for c in step.calls if c.name in index}
        self.earlier = {index[c.name] for c in step.earlier_calls if c.name in index}
        self.free = [i for i in range(n) if i not in self.called] if self.called else range(n)
        self.best = self.logit.index(max(self.logit))
        self.next = self.best if self.best not in self.called else max(self.free or [self.best], key=self._by_logit)
        self.p_best = float(scores.probability[self.best])
        self.cosines: list[float] = scores.cos_tool.tolist()

    def _by_logit(self, at: int) -> float:
        return self.logit[at]


def _router(step: _Step, toolset: ToolsetSignals, fit: Fit) -> list[float]:
    """ROUTER_NAMES up to ``best_name_in_user``."""
    user, n, best, scores, logit = step.user, len(toolset.tools), fit.best, fit.scores, fit.logit
    top = logit[best]
    ordered = sorted(logit)
    p_2 = float(scores.probability[logit.index(ordered[-2])]) if n > 1 else 0.0
    logit_mean = sum(logit) / n
    called_logit = max([logit[i] for i in fit.called]) if fit.called else logit_mean
    free_logit = logit[fit.next] if fit.free else logit_mean
    first = toolset.tools[best]
    cos_tool = fit.cosines
    return [
        fit.p_best,
        p_2,
        fit.p_best - p_2,
        top,
        ordered[-2] if n > 1 else top - 4.0,
        logit_mean,
        math.sqrt(max(sum([v * v for v in logit]) / n - logit_mean * logit_mean, 0.0)),
        max(cos_tool),
        sum(cos_tool) / n,
        cos_tool[best],
        float(scores.cos_desc[best]),
        float(scores.cos_name[best]),
        float(scores.lexical[best]),
        called_logit,
        free_logit,
        free_logit - called_logit,
        max([logit[i] for i in fit.earlier]) if fit.earlier else logit_mean,
        float(best in fit.called),
        float(best in fit.earlier),
        len(fit.free) / n,
        _capped(first.n_parameters),
        _capped(len(first.required)),
        _capped(len(first.identifiers)),
        float(first.writes),
        *toolset.shares,
        user.covered_by(first.stems),
        user.covered_by(toolset.stems),
        user.covered_by(toolset.name_stems),
        _named(first, user),
    ]


def _named(tool: ToolSignals, user: TextSignals) -> float:
    """Share of a tool name's stems, by weight, that the user wrote."""
    if not tool.name_weight:
        return 0.0
    stems = user.stems
    return sum([w for s, w in tool.name_stems.items() if s in stems]) / tool.name_weight


def _context_cosines(step: _Step, toolset: ToolsetSignals, fit: Fit) -> list[float]:
    """Cosines with the tools of the user's turn joined to the one before it, the result, assistant and system text."""
    of_user, previous = fit.cosines, step.previous
    n = len(of_user)
    result, assistant, system = (toolset.cosines(text) for text in (step.result, step.assistant, step.system))
    if previous.is_empty:
        context = of_user
    else:
        own = 0.0 if step.user.is_empty else 1.0
        length = math.sqrt(max(4.0 * own + 1.0 + 4.0 * step.user.dot(previous), 0.0)) or 1.0
        context = [(2.0 * u + p) / length for u, p in zip(of_user, toolset.cosines(previous), strict=True)]
    if fit.called:
        context_free = max([context[i] for i in fit.free], default=0.0)
        result_free = max([result[i] for i in fit.free], default=0.0)
        result_called = max([result[i] for i in fit.called])
    else:
        context_free, result_free, result_called = max(context), max(result), 0.0
    return [
        *(max(context), sum(context) / n, max(result), max(assistant), sum(system) / n),
        *(context_free, result_free, result_called),
    ]


def _next_hop(step: _Step, toolset: ToolsetSignals, fit: Fit) -> list[float]:
    """ROUTER_NAMES from ``hop_arguments`` on.

    Hops: required arguments (and identifiers among them) of tools not called yet that the last result has a field for.
    """
    state, first, hops, identifiers = step.result_state, toolset.tools[fit.best], 0, 0
    if state is not None and step.results and state.keys:
        for i in fit.free:
            tool = toolset.tools[i]
            hops += sum([bool(words) and words <= state.keys for words in tool.required])
            identifiers += sum([bool(words) and words <= state.keys for words in tool.identifiers])
    return [
        _capped(hops),
        _capped(identifiers),
        _capped(max(0, len(first.required) - len(step.values))),
        _capped(max(0, len(first.identifiers) - n_numbers(step.values))),
    ]


def _fields(step: _Step, following: str) -> list[Field]:
    """The n-gram fields of a request; those of texts seen before come with their shares of the logits."""
    found = _user_fields(step.user, step.phase)
    for name, text, limits in (
        ("assistant", step.assistant, slice(-TAIL_CHARS, None)),
        ("result", step.result, slice(HEAD_CHARS)),
        ("previous_user", step.previous, slice(-TAIL_CHARS, None)),
        ("system", step.system, slice(HEAD_CHARS)),
    ):
        if text.text and (name != "result" or step.results):
            field = text.memo.get(name)
            if field is None:
                field = text.memo[name] = Field(name, hashable(text.text[limits]))
            found.append(field)
    if following:
        found.append(_name_field("next_tool", following))
    if step.n_last_results and step.calls:
        found.append(_name_field("last_call", step.calls[-1].name))
    return found


def _user_fields(user: TextSignals, phase: int) -> list[Field]:
    found: list[Field] | None = user.memo.get(("user", phase))
    if found is None:
        text = user.text
        if "?" in text:
            text = text.replace("?", " qmark ")  # punctuation is no word to the hash
        whole = hashable(text)
        words = whole.split()
        found = []
        if words:
            found = [
                Field("user", whole),
                Field("first_words", b" ".join(words[:2])),
                Field("last_words", b" ".join(words[-2:])),
                Field("user_now", whole, phase),
            ]
        user.memo["user", phase] = found
    return found.copy()


@lru_cache(maxsize=NAMES_CACHED_MAX)
def _name_field(name: str, tool: str) -> Field:
    return Field(name, hashable(name_words(tool)))


def hashable(text: str) -> bytes:
    """UTF-8 of a text with all digits made 0: what the n-grams of it are made of."""
    return text.encode("utf-8", "replace").translate(_ONE_DIGIT)


assert len(CUE_NAMES) == N_CUES
