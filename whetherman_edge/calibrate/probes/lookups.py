"""Tasks from facts: the lookup, chains of lookups, and the decision points inside their trajectories."""

from __future__ import annotations

from random import Random
from typing import Final

from whetherman_edge.calibrate.probe import Split

from .facts import CHAINED, SINGLE, Source
from .generator import Book, Draft, Maker
from .task import Task

LOOKUPS: Final = Book()
_COUNT: Final[dict[Split, int]] = {"fit": 5, "calibrate": 8, "test": 4}


def _first(source: Source) -> Maker:
    def make(rng: Random, draft: Draft) -> Task:
        fact = source(rng)
        return draft.task(
            user=fact.user,
            tools=fact.tools,
            calls=fact.calls,
            reply=fact.reply,
            answer=fact.answer,
            expect="ACT",
            setting=fact.setting,
            difficulty=min(len(fact.calls), 3),
        )

    return make


def _enough(source: Source) -> Maker:
    """All calls are made: what is asked stands in the last result."""

    def make(rng: Random, draft: Draft) -> Task:
        fact = source(rng)
        return draft.task(
            user=fact.user,
            tools=fact.tools,
            reply=fact.reply,
            answer=fact.answer,
            expect="ANSWER",
            setting=fact.setting,
            recorded=fact.calls,
        )

    return make


def _between(source: Source) -> Maker:
    """All calls but the last, or (every other task of a long chain) all but the last two."""

    def make(rng: Random, draft: Draft) -> Task:
        fact = source(rng)
        made = len(fact.calls) - (2 if len(fact.calls) > 2 and draft.index % 2 else 1)
        return draft.task(
            user=fact.user,
            tools=fact.tools,
            calls=fact.calls[made:],
            reply=fact.reply,
            answer=fact.answer,
            expect="ACT",
            setting=fact.setting,
            recorded=fact.calls[:made],
            difficulty=min(1 + len(fact.calls) - made, 3),
        )

    return make


_SLOW: Final = ("failing-test", "program-output")
"""Sources that start a process: not in recorded trajectories, so that drawing a pack starts none."""
_FAULTS: Final = (
    "timed out, please try again",
    "503 service unavailable, retry",
    "connection reset; the request may be repeated",
    "busy, try the same call again",
)


def _again(source: Source, *, later: bool) -> Maker:
    """The last call fails once. ``later``: it has failed already."""

    def make(rng: Random, draft: Draft) -> Task:
        fact = source(rng)
        name = fact.calls[-1][0]
        before = sum(call[0] == name for call in fact.calls[:-1])
        setting = {**fact.setting, "faults": {name: [rng.choice(_FAULTS)]}}
        calls = [*fact.calls, fact.calls[-1]] if not before else fact.calls
        return draft.task(
            user=fact.user,
            tools=fact.tools,
            calls=calls[-1:] if later else calls,
            reply=fact.reply,
            answer=fact.answer,
            expect="ACT",
            setting=setting,
            recorded=calls[:-1] if later else (),
            difficulty=2,
        )

    return make


def _name(source: Source) -> str:
    return source.__name__.strip("_").replace("_", "-")


def _enter() -> None:
    """Every source once in each role that it can play."""
    for split, sources in SINGLE.items():
        n = _COUNT[split]
        for place, source in enumerate(sources):
            LOOKUPS.add(f"lookup-{_name(source)}", "lookup", "first", split, n)(_first(source))
            if _name(source) not in _SLOW:
                LOOKUPS.add(f"sufficient-{_name(source)}", "sufficient", "later", split, n // 2 + 1)(_enough(source))
                LOOKUPS.add(f"retry-later-{_name(source)}", "retry", "later", split, n // 2)(_again(source, later=True))
            if place == 0:
                LOOKUPS.add(f"retry-{_name(source)}", "retry", "first", split, n // 2)(_again(source, later=False))
    for split, sources in CHAINED.items():
        n = _COUNT[split]
        for source in sources:
            LOOKUPS.add(f"hop-{_name(source)}", "hop", "first", split, n)(_first(source))
            LOOKUPS.add(f"hop-later-{_name(source)}", "hop", "later", split, n)(_between(source))
            LOOKUPS.add(f"sufficient-{_name(source)}", "sufficient", "later", split, n // 2 + 1)(_enough(source))


_enter()
