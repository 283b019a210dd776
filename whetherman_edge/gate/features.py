"""From a ChatView to numbers: the one definition of the gate's features, used by the daemon and by training.

Only five texts are ever looked at: the last user turn, the one before it, the assistant's last text, the results of the
current step (or the last one of an earlier step) and the system text. Each is clipped first and its signals are cached,
so the cost does not grow with the history. Nothing here depends on the clock, and nothing raises on an odd view.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from whetherman_edge.dialects.chat import ChatView, Message, ToolCall
from whetherman_edge.gate.text_signals import (
    CUE_NAMES,
    N_CUES,
    QUESTION_MARKS,
    ResultSignals,
    TextReader,
    TextSignals,
    clip,
    name_words,
)
from whetherman_edge.gate.tool_signals import ToolReader, ToolsetSignals, ToolSignals
from whetherman_edge.kernels import NGRAM_ALL, NGRAM_WORD1, NGRAM_WORD2
from whetherman_edge.router.scorer import Scorer, Scores

F32Vector = npt.NDArray[np.float32]
F32Matrix = npt.NDArray[np.float32]

COUNT_MAX: Final = 8.0  # calls, results and arguments beyond this say no more
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
    " repeated_calls same_tool_calls n_earlier_calls has_earlier_results n_last_results user_after_user user_after_text"
    " has_media structured_output"
).split()
USER_NAMES: Final = (
    "user_chars user_words user_weight user_ends_question user_has_question user_has_exclamation user_values"
    " user_numbers user_newlines user_non_ascii user_starts_lower user_ends_period user_commas user_has_colon"
    " user_has_code user_unknown"
).split()
ASSISTANT_NAMES: Final = (
    "assistant_exists assistant_after_user assistant_chars assistant_ends_question assistant_has_question"
    " assistant_asked_now assistant_lines previous_user_chars"
).split()
RESULT_NAMES: Final = (
    ["result_exists", "result_is_object", "result_is_array", "result_items", "result_chars", "result_blank"]
    + [f"result_{name}" for name in CUE_NAMES]
    + ["result_now"]
    + [f"now_{name}" for name in ("items", "chars", "blank", *CUE_NAMES)]
    + ["n_failed_results", "result_values"]
)
ROUTER_NAMES: Final = (
    "tool_p1 tool_p2 tool_margin tool_logit tool_logit_2 tool_logit_mean tool_logit_spread tool_cos tool_cos_mean"
    " tool_cos_best tool_desc tool_desc_best tool_name tool_name_best tool_lexical tool_lexical_best"
    " called_logit uncalled_logit uncalled_over_called earlier_logit best_called best_earlier uncalled_share"
    " best_arguments best_required best_identifiers best_reads best_writes"
    " reads_share writes_share no_required_share identifier_share description_length"
    " user_in_best user_in_tools user_in_names best_name_in_user"
    " context_cos context_cos_mean result_cos assistant_cos system_cos context_cos_uncalled result_cos_uncalled"
    " result_cos_called hop_arguments hop_identifiers missing_required missing_identifiers lookup_offered"
).split()
COVER_NAMES: Final = (
    "user_in_results user_in_all_results user_in_arguments user_in_assistant user_in_system user_in_previous"
    " user_in_earlier_arguments values_in_arguments values_left values_in_results values_in_assistant"
    " values_in_system values_new result_in_assistant"
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


class Field(msgspec.Struct, frozen=True, gc=False):
    """One n-gram field: its hash seed, its NGRAM_* modes, its weight, and its UTF-8 with all digits made 0."""

    seed: int
    modes: int
    weight: float
    text: bytes


class Features(msgspec.Struct, frozen=True, gc=False):
    """One request as numbers.

    ``scalars``: (N_SCALARS,) float32 in the order of SCALAR_NAMES. ``dense``: (len(DENSE_BLOCKS), dim) float32, unit
    vectors or zeros. ``fields``: the texts whose n-grams are hashed, empty ones left out. ``tool``,
    ``tool_probability``: the router's choice for the last user turn.
    """

    scalars: F32Vector
    dense: F32Matrix
    fields: tuple[Field, ...]
    tool: str
    tool_probability: float


class _Step(msgspec.Struct, gc=False):
    """The dialogue, split at the last user turn: ``calls`` and ``results`` stand after it, ``earlier_*`` before."""

    user: TextSignals
    previous: TextSignals
    assistant: TextSignals
    assistant_after_user: bool
    system: TextSignals
    result: TextSignals
    result_state: ResultSignals | None
    calls: list[ToolCall]
    results: list[Message]
    earlier_calls: list[ToolCall]
    earlier_results: list[Message]
    n_last_results: int
    n_user_turns: int


class Extractor:
    """Features of chat views. Holds caches; not shared between threads."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._texts = TextReader(scorer.table)
        self._tools = ToolReader(self._texts)
        self._dim = scorer.table.dim

    def extract(self, chat: ChatView) -> Features:
        """Features of any view: no messages, no user turn and no tools are all fine."""
        step = self._step(chat)
        user = step.user
        dense = np.zeros((len(DENSE_BLOCKS), self._dim), dtype=np.float32)
        texts = np.stack(
            [user.vector, step.result.vector, step.assistant.vector, step.previous.vector, step.system.vector]
        )
        dense[0] = user.vector
        if step.results:
            dense[2] = step.result.vector
        dense[3], dense[4], dense[6] = texts[2], texts[3], texts[4]
        values = _structure(chat, step)
        values += _user(user)
        values += _assistant(chat, step)
        values += _result(step)
        tool, following, probability = "", "", 0.0
        gram = (texts @ texts.T).tolist()
        with_tools = 0.0
        if chat.tools:
            slate = self._scorer.slate(chat.tools, chat.toolset_key)
            toolset = self._tools.toolset(chat.tools, slate, chat.toolset_key)
            fit = _Fit(step, toolset, self._scorer.score(user.text, slate), (texts @ toolset.vectors.T).tolist(), gram)
            tool, probability = toolset.tools[fit.best].name, fit.probability[fit.best]
            following = toolset.tools[fit.next].name
            dense[1] = toolset.vectors[fit.next]
            dense[5] = toolset.mean
            with_tools = sum(fit.cosines[0]) / len(toolset.tools)
            values += _router(step, toolset, fit)
        else:
            values += [0.0] * len(ROUTER_NAMES)
        values += self._cover(step)
        values += [*gram[0][1:], with_tools, gram[1][2]]
        return Features(
            scalars=np.array(values, dtype=np.float32),
            dense=dense,
            fields=_fields(step, following),
            tool=tool,
            tool_probability=probability,
        )

    def _step(self, chat: ChatView) -> _Step:
        messages = chat.messages
        texts = self._texts
        at_user = chat.last_user_index
        user = previous = assistant = ""
        assistant_index = -1
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
                if message.text and not message.text.isspace():
                    assistant, assistant_index = message.text, index
            else:
                systems.append(message.text)
        n_last = 0
        for message in reversed(messages):
            if message.role != "tool":
                break
            n_last += 1
        last = results[-n_last:] if n_last else (results or earlier_results)[-1:]
        result_text = "\n".join([clip(message.text) for message in last])
        return _Step(
            user=texts.signals(user),
            previous=texts.signals(previous),
            assistant=texts.signals(assistant),
            assistant_after_user=assistant_index > at_user,
            system=texts.signals(systems[0] if len(systems) == 1 else "\n".join([clip(text) for text in systems])),
            result=texts.signals(result_text),
            result_state=texts.result(result_text) if last else None,
            calls=calls,
            results=results,
            earlier_calls=earlier_calls,
            earlier_results=earlier_results,
            n_last_results=n_last,
            n_user_turns=n_user_turns,
        )

    def _cover(self, step: _Step) -> list[float]:
        """How much of the user's request the dialogue already holds; in the order of COVER_NAMES."""
        user, texts = step.user, self._texts
        if not step.results and not step.earlier_results and not step.calls and not step.earlier_calls:
            return _cover_without_calls(step)
        now = [texts.signals(message.text) for message in step.results[-HISTORY_RESULTS_MAX:]]
        before = [texts.signals(message.text) for message in step.earlier_results[-HISTORY_RESULTS_MAX:]]
        arguments = texts.signals(" ".join([f"{c.name} {c.arguments}" for c in step.calls[-8:]]))
        earlier = texts.signals(" ".join([c.arguments for c in step.earlier_calls[-4:]]))
        in_now = max([user.covered_by(s.stems) for s in now], default=0.0)
        in_before = max([user.covered_by(s.stems) for s in before], default=0.0)
        values = user.values
        found = {v for v in values if any(v in s.lower for s in (*now, *before))} if values else values
        assistant, system, called = step.assistant.lower, step.system.lower, arguments.lower
        left = sum([v not in called for v in values]) if step.results else 0
        new = sum([v not in found and v not in assistant and v not in system for v in values])
        return [
            in_now,
            max(in_now, in_before),
            user.covered_by(arguments.stems),
            user.covered_by(step.assistant.stems),
            user.covered_by(step.system.stems),
            user.covered_by(step.previous.stems),
            user.covered_by(earlier.stems),
            user.values_in(called),
            math.log1p(left),
            len(found) / len(values) if values else 0.0,
            user.values_in(assistant),
            user.values_in(system),
            math.log1p(new),
            step.result.covered_by(step.assistant.stems),
        ]


def _cover_without_calls(step: _Step) -> list[float]:
    """COVER_NAMES for a dialogue without any call or result."""
    user, assistant, system = step.user, step.assistant.lower, step.system.lower
    return [
        0.0,
        0.0,
        0.0,
        user.covered_by(step.assistant.stems),
        user.covered_by(step.system.stems),
        user.covered_by(step.previous.stems),
        0.0,
        0.0,
        0.0,
        0.0,
        user.values_in(assistant),
        user.values_in(system),
        math.log1p(sum([v not in assistant and v not in system for v in user.values])),
        0.0,
    ]


def _capped(count: float) -> float:
    return min(float(count), COUNT_MAX)


def _structure(chat: ChatView, step: _Step) -> list[float]:
    messages = chat.messages
    at_user = chat.last_user_index
    before = messages[at_user - 1].role if at_user > 0 else ""
    names = {call.name for call in step.calls}
    distinct = {(call.name, call.arguments) for call in step.calls}
    n_calls = len(step.calls)
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
        _capped(len(names)),
        _capped(n_calls - len(distinct)),
        _capped(n_calls - len(names)),
        math.log1p(len(step.earlier_calls)),
        float(bool(step.earlier_results)),
        _capped(step.n_last_results),
        float(before == "user"),
        float(before == "assistant"),
        float(any(message.n_media for message in messages[-3:])),
        float(chat.structured_output),
    ]


def _user(user: TextSignals) -> list[float]:
    text = user.text
    stripped = text.strip()
    n_chars = len(text)
    non_ascii = 0 if text.isascii() else sum(c > "\x7f" for c in text)
    return [
        math.log1p(n_chars),
        math.log1p(user.n_words),
        math.log1p(user.weight),
        float(stripped.endswith(QUESTION_MARKS)),
        float("?" in text or "？" in text or "؟" in text),
        float("!" in text or "！" in text),
        math.log1p(len(user.values)),
        math.log1p(user.n_numbers),
        math.log1p(text.count("\n")),
        non_ascii / n_chars if n_chars else 0.0,
        float(stripped[:1].islower()),
        float(stripped[-1:] in (".", "。")),
        math.log1p(text.count(",")),
        float(":" in text),
        float("```" in text),
        float(not user.stems),
    ]


def _assistant(chat: ChatView, step: _Step) -> list[float]:
    text = step.assistant.text.strip()
    asks = text.endswith(QUESTION_MARKS)
    return [
        float(bool(text)),
        float(bool(text) and step.assistant_after_user),
        math.log1p(len(text)),
        float(asks),
        float("?" in text),
        float(asks and chat.last_role == "user"),
        math.log1p(text.count("\n")),
        math.log1p(len(step.previous.text)),
    ]


def _result(step: _Step) -> list[float]:
    state = step.result_state
    if state is None:
        return [0.0] * len(RESULT_NAMES)
    now = 1.0 if step.results else 0.0
    is_object, is_array, items, chars, blank = state.shape
    failed = 0
    for message in step.results[-8:]:
        head = message.text[:200].lower()
        failed += "error" in head or "fail" in head or "denied" in head or "not found" in head
    return [
        1.0,
        is_object,
        is_array,
        items,
        chars,
        blank,
        *state.cues,
        now,
        now * items,
        now * chars,
        now * blank,
        *[now * cue for cue in state.cues],
        float(failed),
        math.log1p(len(step.result.values)),
    ]


class _Fit:
    """How the tools fit, as plain lists over the list's order (NumPy calls cost more than loops over ten floats).

    ``best``: the tool that fits the user's turn; ``next``: the same among tools not called since then. ``cosines``: of
    (user, result, assistant, previous user, system) with each tool; ``context``: of the user's turn and the last.
    """

    def __init__(
        self,
        step: _Step,
        toolset: ToolsetSignals,
        scores: Scores,
        cosines: list[list[float]],
        gram: list[list[float]],
    ) -> None:
        index = toolset.index
        n = len(toolset.tools)
        self.scores = scores
        self.cosines = cosines
        self.logit: list[float] = scores.logit.tolist()
        self.probability: list[float] = scores.probability.tolist()
        self.called = {index[c.name] for c in step.calls if c.name in index}
        self.earlier = {index[c.name] for c in step.earlier_calls if c.name in index}
        self.free = [i for i in range(n) if i not in self.called] if self.called else list(range(n))
        self.best = max(range(n), key=self.logit.__getitem__)
        self.next = max(self.free or range(n), key=self.logit.__getitem__)
        length = math.sqrt(max(4.0 * gram[0][0] + gram[3][3] + 4.0 * gram[0][3], 0.0)) or 1.0
        self.context = [(2.0 * u + p) / length for u, p in zip(cosines[0], cosines[3], strict=True)]


def _router(step: _Step, toolset: ToolsetSignals, fit: _Fit) -> list[float]:
    user, tools, n, best, scores = step.user, toolset.tools, len(toolset.tools), fit.best, fit.scores
    logit, probability = fit.logit, fit.probability
    others = logit[:best] + logit[best + 1 :]
    logit_2 = max(others) if others else logit[best] - 4.0
    p_2 = max(probability[:best] + probability[best + 1 :], default=0.0)
    logit_mean = sum(logit) / n
    spread = math.sqrt(max(sum([v * v for v in logit]) / n - logit_mean * logit_mean, 0.0))
    called_logit = max([logit[i] for i in fit.called], default=logit_mean)
    free_logit = max([logit[i] for i in fit.free], default=logit_mean)
    first = tools[best]
    cos_tool: list[float] = scores.cos_tool.tolist()
    cos_desc: list[float] = scores.cos_desc.tolist()
    cos_name: list[float] = scores.cos_name.tolist()
    lexical: list[float] = scores.lexical.tolist()
    n_numbers = user.n_numbers
    return [
        probability[best],
        p_2,
        probability[best] - p_2,
        logit[best],
        logit_2,
        logit_mean,
        spread,
        max(cos_tool),
        sum(cos_tool) / n,
        cos_tool[best],
        max(cos_desc),
        cos_desc[best],
        max(cos_name),
        cos_name[best],
        max(lexical),
        lexical[best],
        called_logit,
        free_logit,
        free_logit - called_logit,
        max([logit[i] for i in fit.earlier], default=logit_mean),
        float(best in fit.called),
        float(best in fit.earlier),
        len(fit.free) / n,
        _capped(first.n_parameters),
        _capped(len(first.required)),
        _capped(len(first.identifiers)),
        float(first.reads),
        float(first.writes),
        *toolset.shares,
        user.covered_by(first.stems),
        user.covered_by(toolset.stems),
        user.covered_by(toolset.name_stems),
        _named(first, user),
        *_context_cosines(fit),
        *_next_hop(step, toolset, fit.called),
        float(max(0, len(first.required) - len(user.values))),
        float(max(0, len(first.identifiers) - n_numbers)),
        float(toolset.n_lookups > (first.reads and not first.identifiers)),
    ]


def _named(tool: ToolSignals, user: TextSignals) -> float:
    """Share of a tool name's stems, by weight, that the user wrote."""
    if not tool.name_weight:
        return 0.0
    stems = user.stems
    return sum([w for s, w in tool.name_stems.items() if s in stems]) / tool.name_weight


def _context_cosines(fit: _Fit) -> list[float]:
    context, result = fit.context, fit.cosines[1]
    return [
        max(context),
        sum(context) / len(context),
        max(result),
        max(fit.cosines[2]),
        sum(fit.cosines[4]) / len(context),
        max([context[i] for i in fit.free], default=0.0),
        max([result[i] for i in fit.free], default=0.0),
        max([result[i] for i in fit.called], default=0.0),
    ]


def _next_hop(step: _Step, toolset: ToolsetSignals, called: set[int]) -> list[float]:
    """Required arguments (and identifiers among them) of tools not called yet that the last result has a field for."""
    state = step.result_state
    if state is None or not step.results or not state.keys:
        return [0.0, 0.0]
    hops = identifiers = 0
    for i, tool in enumerate(toolset.tools):
        if i not in called:
            hops += sum(1 for words in tool.required if words and words <= state.keys)
            identifiers += sum(1 for words in tool.identifiers if words and words <= state.keys)
    return [_capped(hops), _capped(identifiers)]


def _fields(step: _Step, following: str) -> tuple[Field, ...]:
    text = step.user.text
    if "?" in text:
        text = text.replace("?", " qmark ")  # punctuation is no word to the hash
    after_result = step.n_last_results > 0
    phase = 2 if after_result else 1 if step.earlier_calls or step.assistant.text else 0
    user = _hashable(text)
    texts = (
        user,
        b" ".join(user.split(None, 2)[:2]),
        b" ".join(user.rsplit(None, 2)[-2:]),
        _hashable(step.assistant.text[-TAIL_CHARS:]),
        _hashable(step.result.text[:HEAD_CHARS]) if step.results else b"",
        _hashable(name_words(following)),
        _hashable(name_words(step.calls[-1].name)) if after_result and step.calls else b"",
        _hashable(step.previous.text[-TAIL_CHARS:]),
        _hashable(step.system.text[:HEAD_CHARS]),
        user,
    )
    found = [
        Field(seed, modes, weight, text)
        for (seed, modes, weight), text in zip(NGRAM_FIELDS.values(), texts, strict=True)
        if text
    ]
    if user:
        seed, modes, weight = NGRAM_FIELDS["user_now"]
        found[-1] = Field(seed + phase, modes, weight, user)
    return tuple(found)


def _hashable(text: str) -> bytes:
    return text.encode("utf-8", "replace").translate(_ONE_DIGIT)


assert len(CUE_NAMES) == N_CUES
