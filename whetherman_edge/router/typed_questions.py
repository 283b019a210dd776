"""Choice, noul and score questions answered by word embeddings. Pure; what each answer means is in docs/systemone.md.

A static embedding knows what a text is *about*, and little else. So a choice is the router's own question; a noul is a
test of topic ("is this about billing?") or a comparison of two described outcomes; a score compares the text with each
level, helped along a few well-known directions (pleased, urgent, severe, …). Where the words say nothing the answer
stays near chance: 0.5 for a noul, even probabilities for a score.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from whetherman_edge.dialects.system_one import Choice, Noul, Option, Question, Score, State
from whetherman_edge.dialects.system_one_answer import Judgement
from whetherman_edge.router.card import ToolCard, make_card
from whetherman_edge.router.prototype import Slate
from whetherman_edge.router.scorer import Scorer, softmax
from whetherman_edge.router.tool_lru import ListLru

F64Vector = npt.NDArray[np.float64]
F64Matrix = npt.NDArray[np.float64]

ENGINE: Final = "static"

SENTENCES_MAX: Final = 24
"""Parts of a state that are compared one by one. Each costs some 10 microseconds."""

TEXTS_CACHED_MAX: Final = 2048
"""Vectors of instructions, outcomes and levels: 2 KB each."""

PORTION: Final = 8
"""Options embedded in one go: some 0.5 ms when all are new."""

# Fitted by convert/fit_typed_questions.py on topic questions made from three intent corpora and on our own states.
TOPIC_SLOPE: Final = 10.2
TOPIC_BIAS: Final = -2.4
CONTRAST_SLOPE: Final = 16.8
LEVEL_SLOPE: Final = 2.0
DIRECTION_SLOPE: Final = 1.2
NEIGHBOUR_SHARE: Final = 0.35

# Words of a question that carry no topic. With them, "Is the customer asking about X?" is near any customer's message.
_ASKING_TEXT: Final = (
    "is are was were be been do does did has have had will would should can could may might must the a an this that "
    "these those it its there they he she we you i user users customer customers sender writer author message text "
    "ticket request asking asks ask asked about want wants wanted of to for in on at by any or and with from as what "
    "which who how when where why"
)
_ASKING: Final = frozenset(_ASKING_TEXT.split())
_NEGATIONS: Final = frozenset(
    {"not", "no", "never", "without", "neither", "nor", "cannot", "none", "nobody", "nothing"}
)
_WORDS: Final = re.compile(r"[\w'’-]+")
_SENTENCE_END: Final = re.compile(r"(?<=[.!?;:])\s+|\n+")

# Directions along which the levels of many scales lie: words of the high end, words of the low end.
_DIRECTIONS: Final = (
    (
        "excellent wonderful great happy love perfect delighted",
        "terrible awful bad worst hate poor disappointed",
    ),
    (
        "urgent immediately now emergency critical asap today help down failing",
        "someday no hurry later eventually nice wait",
    ),
    (
        "furious angry outraged ridiculous useless unacceptable sue",
        "calm thanks kind pleasant fine appreciate",
    ),
    (
        "please thank you kindly dear appreciate would could",
        "stupid idiots useless shut up",
    ),
    (
        "code stack trace exception database server api command python kernel",
        "hello friend dinner family weather poem holiday",
    ),
    (
        "severe critical life-threatening destroys deletes fatal dangerous crash outage",
        "mild minor harmless small cosmetic trivial safe",
    ),
)

# Everyday texts that say where the middle of each direction is.
_EVERYDAY: Final = (
    "What is the weather tomorrow?",
    "Play some music in the kitchen.",
    "My card payment was declined.",
    "Book a flight to Madrid next week.",
    "The app crashes when I open it.",
    "Who won the match last night?",
    "How do I cook rice?",
    "I have a headache since yesterday.",
    "Read me the latest news.",
    "Remind me to call mum at six.",
    "I forgot my password.",
    "Where is my parcel?",
    "When did the war end?",
    "How do you say thank you in French?",
    "Write a story about a dragon.",
    "Turn off the lights, please.",
    "Find a good restaurant nearby.",
    "How is traffic on the way to work?",
    "Add milk to the shopping list.",
    "I would like to apply for the job.",
    "Thanks, that was very helpful!",
    "This is not what I ordered.",
    "The server returned an error.",
    "Can I change my address?",
)


class _Reading(msgspec.Struct, frozen=True, gc=False):
    """A state as unit vectors: ``whole`` (dim,), and ``parts`` (n, dim): its sentences, then the whole."""

    whole: F64Vector
    parts: F64Matrix


class TypedJudge:
    """Answers System One questions with a `Scorer`. Same question and state, same answer. For one thread only."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._texts: OrderedDict[str, F64Vector] = OrderedDict()
        self._slates: ListLru[Slate] = ListLru()
        self._read: tuple[str, _Reading] | None = None
        axes = np.stack([self._embed(high) - self._embed(low) for high, low in _DIRECTIONS])
        self._axes: F64Matrix = axes / np.maximum(np.linalg.norm(axes, axis=1, keepdims=True), 1e-9)
        everyday = np.stack([self._embed(text) for text in _EVERYDAY]) @ self._axes.T
        self._axis_mean: F64Vector = everyday.mean(axis=0)
        self._axis_spread: F64Vector = np.maximum(everyday.std(axis=0), 1e-9)

    def portions(self, question: Question) -> Iterator[None]:
        """Embed the options of a choice a few at a time; 255 new ones take too long for one go."""
        if isinstance(question, Choice) and self._slates.get(question.options) is None:
            for start in range(0, len(question.options), PORTION):
                self._scorer.prepare([_card(option) for option in question.options[start : start + PORTION]])
                yield

    def judge(self, state: State, question: Question) -> Judgement:
        """Probabilities for one question about ``state``; never raises for a checked request."""
        match question:
            case Choice():
                return Judgement(self._choice(state, question), ENGINE)
            case Noul():
                return Judgement((self.noul(state.subject, question),), ENGINE)
            case Score():
                return Judgement(tuple(self.score(state.subject, question).tolist()), ENGINE)

    def _choice(self, state: State, question: Choice) -> tuple[float, ...]:
        """The router's answer for the state; the instructions stand in only where the state is empty.

        Appended to the state they cost 5 to 11 points of accuracy (clinc150, hwu64, banking77 with ten options): they
        are the same for every state, so all they can do is to dilute it.
        """
        query = state.subject if state.subject.strip() else question.instructions
        n = len(question.options)
        if not query.strip():
            return (1.0 / n,) * n
        return tuple(self._scorer.score(query, self._slate(question.options)).probability.tolist())

    def _slate(self, options: tuple[Option, ...]) -> Slate:
        """The slate of these options. Comparing them with the last ones' costs less than a digest of each."""
        found = self._slates.get(options)
        if found is not None:
            return found
        return self._slates.put(options, self._scorer.slate([_card(option) for option in options]), len(options))

    def noul(self, subject: str, question: Noul) -> float:
        """Probability of yes.

        Both outcomes described: which of them the text is nearer to. One outcome or instructions only: whether the text
        is about them. A negated question, or nothing to go by: 0.5.
        """
        reading = self._reading(subject)
        if reading is None:
            return 0.5
        if question.true and question.false:
            return _sigmoid(
                CONTRAST_SLOPE * (self._nearness(reading, question.true) - self._nearness(reading, question.false))
            )
        asked = question.true or question.instructions
        if question.true and question.instructions:
            near = max(self._nearness(reading, question.true), self._nearness(reading, question.instructions))
        elif asked:
            near = self._nearness(reading, asked)
        else:
            return _sigmoid(-0.5 * (TOPIC_SLOPE * self._nearness(reading, question.false) + TOPIC_BIAS))
        if is_negated(asked):
            return 0.5
        if question.false:
            return _sigmoid(CONTRAST_SLOPE * (near - self._nearness(reading, question.false)))
        return _sigmoid(TOPIC_SLOPE * near + TOPIC_BIAS)

    def score(self, subject: str, question: Score) -> F64Vector:
        """Probabilities of the levels, (n,) float64, lowest level first."""
        n = len(question.levels)
        reading = self._reading(subject)
        levels = np.stack([self._text(level) for level in question.levels])
        if reading is None or not levels.any():
            return np.full(n, 1.0 / n)
        logit = LEVEL_SLOPE * (levels @ reading.parts.T).max(axis=1)
        logit = logit + DIRECTION_SLOPE * self._lean(reading, levels) * np.linspace(-1.0, 1.0, n)
        spread = NEIGHBOUR_SHARE ** np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
        return np.asarray((spread / spread.sum(axis=0)) @ softmax(logit))

    def _lean(self, reading: _Reading, levels: F64Matrix) -> float:
        """How far the text lies towards the high end, in standard deviations of everyday texts.

        Each direction counts by the square of how much the levels move along it.
        """
        ranks = np.linspace(-1.0, 1.0, len(levels))
        moves = ranks @ (levels @ self._axes.T)
        weight = np.sign(moves) * moves**2
        total = float(np.abs(weight).sum())
        where = (self._axes @ reading.whole - self._axis_mean) / self._axis_spread
        return float(weight @ where) / total if total else 0.0

    def _nearness(self, reading: _Reading, text: str) -> float:
        """Cosine of the text's topic to the nearest part of the state, in [-1, 1]."""
        return float((reading.parts @ self._text(topic_of(text))).max())

    def _reading(self, subject: str) -> _Reading | None:
        """The state as vectors, kept for the next question of the same request; None when no word of it is known."""
        if self._read is not None and self._read[0] == subject:
            return self._read[1]
        whole = self._embed(subject)
        if not whole.any():
            return None
        sentences = [part for part in _SENTENCE_END.split(subject) if part.strip()][:SENTENCES_MAX]
        parts = [self._embed(part) for part in sentences] if len(sentences) > 1 else []
        reading = _Reading(whole, np.stack([*parts, whole]))
        self._read = (subject, reading)
        return reading

    def _text(self, text: str) -> F64Vector:
        found = self._texts.get(text)
        if found is not None:
            self._texts.move_to_end(text)
            return found
        vector = self._texts[text] = self._embed(text)
        if len(self._texts) > TEXTS_CACHED_MAX:
            self._texts.popitem(last=False)
        return vector

    def _embed(self, text: str) -> F64Vector:
        return self._scorer.table.vector(text).astype(np.float64)


def _card(option: Option) -> ToolCard:
    return make_card(option.name, option.description, option.parameters, option.examples)


def topic_of(text: str) -> str:
    """The words of a question that name its topic; the whole text when none is left."""
    words = [word for word in _WORDS.findall(text) if word.lower() not in _ASKING]
    return " ".join(words) or text


def is_negated(text: str) -> bool:
    """True when a question is asked the other way round ("Is it not …?"), which pooled words cannot tell."""
    return any(word.lower() in _NEGATIONS or word.lower().endswith(("n't", "n’t")) for word in _WORDS.findall(text))


def _sigmoid(logit: float) -> float:
    return float(1.0 / (1.0 + np.exp(-logit)))
