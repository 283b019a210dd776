"""System One answers and error bodies: probabilities in, wire objects out. Pure.

Probabilities are shown with six decimals that add up to one exactly; choice, score and confidence are computed from the
shown figures, so a reader can recompute them. Fields of ours beside the documented ones start with ``x_``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec

from whetherman_edge.dialects.system_one import (
    DECISION_MODEL,
    DEFAULT_MODEL,
    Choice,
    Fault,
    InvalidBody,
    Loc,
    Noul,
    Question,
    Refusal,
    Request,
    Score,
    State,
)
from whetherman_edge.dialects.text_forms import JSON
from whetherman_edge.errors import RequestError

UNIT = 1_000_000
"""Probabilities are whole millionths."""

BYTES_PER_TOKEN = 4
"""Usage is an estimate: nothing is billed here, and tokenising twice would cost more than the decision."""

MODELS: tuple[dict[str, str], ...] = (
    {
        "name": DECISION_MODEL,
        "description": "Whetherman Edge static router: typed decisions on this machine from int8 word embeddings.",
        "release_date": "2026-11-30",
    },
    {
        "name": DEFAULT_MODEL,
        "description": f"Alias of {DECISION_MODEL}, the name System One clients send by default.",
        "release_date": "2026-11-30",
    },
)
"""What ``GET /v1/models`` lists for us under ``models``."""


class Judgement(msgspec.Struct, frozen=True, gc=False):
    """What an engine says to one question.

    ``probabilities``: one for each option or level, in their order; for a noul the single probability of yes.
    ``engine``: what produced them, shown as ``x_engine``.
    """

    probabilities: tuple[float, ...]
    engine: str


class Judge(Protocol):
    """Answers one question at a time, so that neither order nor company of the questions can matter."""

    def portions(self, question: Question) -> Iterator[None]:
        """Do the slow part of a question ahead of ``judge``, pausing after each portion; may do nothing."""

    def judge(self, state: State, question: Question) -> Judgement:
        """Pure and deterministic; never sees a question's name."""


class NoulAnswer(msgspec.Struct, frozen=True, tag="noul", gc=False, omit_defaults=True):
    """``noul``: probability of yes."""

    noul: float
    x_engine: str = ""


class ChoiceAnswer(msgspec.Struct, frozen=True, tag="choice", omit_defaults=True):
    """The most probable option, all probabilities by option name, and TypeSafe's confidence."""

    choice: str
    probabilities: dict[str, float]
    confidence: float
    x_engine: str = ""


class ScoreAnswer(msgspec.Struct, frozen=True, tag="score", omit_defaults=True):
    """Expected level, the levels as they came, their probabilities, and TypeSafe's confidence."""

    score: float
    legend: dict[str, JSON]
    probabilities: dict[str, float]
    confidence: float
    x_engine: str = ""


Answer = NoulAnswer | ChoiceAnswer | ScoreAnswer


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Token counts, estimated from bytes."""

    input_tokens: int
    output_tokens: int = 0


class Response(msgspec.Struct, frozen=True, omit_defaults=True):
    """``x_engine``: what answered; ``x_ms``: time taken; ``x_truncated``: the state was longer than what is read."""

    model: str
    answers: dict[str, Answer]
    usage: Usage
    x_engine: str = ""
    x_ms: float = 0.0
    x_truncated: bool = False


_ENCODER = msgspec.json.Encoder()


def answer(question: Question, judgement: Judgement) -> Answer:
    """The wire object for a judgement."""
    match question:
        case Noul():
            return noul_answer(judgement.probabilities[0], judgement.engine)
        case Choice():
            names = [option.name for option in question.options]
            return choice_answer(names, judgement.probabilities, judgement.engine)
        case Score():
            return score_answer(question, judgement.probabilities, judgement.engine)


def noul_answer(p_yes: float, engine: str = "") -> NoulAnswer:
    """``p_yes``: probability in [0, 1]."""
    return NoulAnswer(round(min(1.0, max(0.0, p_yes)), 6), engine)


def choice_answer(names: Sequence[str], probabilities: Sequence[float], engine: str = "") -> ChoiceAnswer:
    """``names`` and ``probabilities`` in the same order; ties go to the earlier option."""
    shares = millionths(probabilities)
    best = max(range(len(shares)), key=lambda index: (shares[index], probabilities[index], -index))
    shown = [share / UNIT for share in shares]
    confidence = round(choice_confidence(shown), 6)
    return ChoiceAnswer(names[best], dict(zip(names, shown, strict=True)), confidence, engine)


def score_answer(question: Score, probabilities: Sequence[float], engine: str = "") -> ScoreAnswer:
    """``probabilities``: one a level, lowest first."""
    shown = [share / UNIT for share in millionths(probabilities)]
    return ScoreAnswer(
        score=round(sum(index * p for index, p in enumerate(shown)), 6),
        legend={str(index): level for index, level in enumerate(question.legend)},
        probabilities={str(index): p for index, p in enumerate(shown)},
        confidence=round(score_confidence(shown), 6),
        x_engine=engine,
    )


def millionths(probabilities: Sequence[float]) -> list[int]:
    """Whole millionths that sum to one million (largest remainder, earlier first on ties): order is never reversed.

    ``probabilities``: non-negative, of positive sum, which need not be exactly 1.
    """
    total = sum(probabilities)
    exact = [p / total * UNIT for p in probabilities]
    shares = [int(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda index: (shares[index] - exact[index], index))
    for index in by_remainder[: UNIT - sum(shares)]:
        shares[index] += 1
    return shares


def choice_confidence(probabilities: Sequence[float]) -> float:
    """(max - 1/n) / (1 - 1/n); 1 for a single option. TypeSafe's own adapter computes it so."""
    n = len(probabilities)
    return 1.0 if n == 1 else max(0.0, (max(probabilities) - 1 / n) / (1 - 1 / n))


def score_confidence(probabilities: Sequence[float]) -> float:
    """1 - mean distance to the most probable level, over that of a uniform guess to the middle; 1 for one level."""
    n = len(probabilities)
    if n == 1:
        return 1.0
    mode = max(range(n), key=lambda index: probabilities[index])
    spread = sum(p * abs(index - mode) for index, p in enumerate(probabilities))
    uniform = sum(abs(index - (n - 1) / 2) for index in range(n)) / n
    return max(0.0, 1.0 - spread / uniform)


def usage_of(request: Request) -> Usage:
    """Estimated tokens of the request: its bytes over four."""
    return Usage(-(-request.n_bytes // BYTES_PER_TOKEN))


def serialize(response: Response) -> bytes:
    """UTF-8 JSON."""
    return _ENCODER.encode(response)


def error_status_and_body(error: RequestError) -> tuple[int, bytes]:
    """The documented error shapes: 422 with a list of faults, any other status with ``error_type`` and ``message``."""
    match error:
        case InvalidBody():
            return 422, _ENCODER.encode({"detail": error.faults})
        case Refusal():
            return error.status, error_body(error.kind, str(error))
        case _:
            loc: Loc = error.loc
            return 422, _ENCODER.encode({"detail": [Fault(loc, str(error), error.kind)]})


def error_body(error_type: str, message: str) -> bytes:
    """``{"detail": {"error_type", "message"}}``."""
    return _ENCODER.encode({"detail": {"error_type": error_type, "message": message}})
