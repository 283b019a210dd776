"""Stop what withholds when the evidence in the field turns: sequential tests, by agent, by dialogue, by cause. Pure.

"Never worse" also after calibration. Each kind of failure has a rate that is tolerated, and a test of "the rate is at
most that": a mixture over all starting points of likelihood ratios against a clearly worse rate. Under a tolerated
rate its expectation stays at most 1 however long one looks, so the chance that it *ever* reaches 1/ERROR is at most
ERROR (Ville's inequality): the count may be looked at after every request. Summing over starting points is what lets
an agent that went along a hundred times and then changed be noticed soon.

What a scored decision withholds and what the loop guard does have tests of their own, and each stops on its own: an
agent that calls behind scored skips says nothing of a rule about calls that came back with the same result, nor the
rule's failures of the scores. A cause's tests see that cause's outcomes alone, and all of them in their order, so each
keeps the bound whatever the other cause does, which may change what it gets to see: the inequality asks only that,
given all that was before, the next of its outcomes fails with a tolerated chance. A cause is stopped wrongly with a
chance of at most ERROR times the number of its tests (TESTS). Where nothing can be steered, both fail, and both stop.

There are two causes and no more. Each has to fail by itself before it is stopped (three leaks in a row), and nothing
measured says that kinds of decision or phases of a dialogue fail apart as these two do.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from whetherman_edge.gate.verdict import CAUSES, Cause

Signal = Literal["leaked", "ignored", "repeated", "called_next"]
Outcome = Literal["kept", "leaked", "refused", "heeded", "ignored", "repeated", "called_next", "went_on"]

ERROR: Final = 0.01
"""Chance that one test ever stops a cause for an agent whose failures stay within the tolerated rate."""
SESSION_ERROR: Final = 0.05
"""The same for the one test of a cause in a dialogue."""
NOTE_ERROR: Final = 0.1
"""The same for giving up notes in favour of taking tools away, which costs little when it is wrong."""
EVIDENCE_MAX: Final = 1e12


class Rates(msgspec.Struct, frozen=True, gc=False):
    """Of all trials: the share of failures that is ``tolerated``, and the ``failing`` share that is tested against."""

    tolerated: float
    failing: float


# leaked: the model called although tools were withheld, or the upstream refused the edit; each costs a second request.
# ignored: it called in spite of a note, which costs a sentence. repeated: the user says the same again after a skip.
# called_next: the turn after a skip calls a tool, which is natural half of the time.
RATES: Final[dict[Signal, Rates]] = {
    "leaked": Rates(0.05, 0.5),
    "ignored": Rates(0.2, 0.6),
    "repeated": Rates(0.05, 0.4),
    "called_next": Rates(0.5, 0.85),
}
SESSION_RATES: Final = Rates(0.1, 0.5)

# called_next is no test of the loop guard: an agent that has just looped makes calls in every turn, so that half of
# the turns is not its natural rate, and those that loop in each turn would lose the guard first.
TESTS: Final[dict[Cause, tuple[Signal, ...]]] = {
    "scored": ("leaked", "ignored", "repeated", "called_next"),
    "loop_guard": ("leaked", "ignored", "repeated"),
}

# What an outcome says to which test: True is a failure.
_SAYS: Final[dict[Outcome, tuple[tuple[Signal, bool], ...]]] = {
    "kept": (("leaked", False),),
    "leaked": (("leaked", True),),
    "refused": (("leaked", True),),
    "heeded": (("ignored", False),),
    "ignored": (("ignored", True),),
    "repeated": (("repeated", True),),
    "called_next": (("repeated", False), ("called_next", True)),
    "went_on": (("repeated", False), ("called_next", False)),
}
_IN_SESSION: Final[dict[Outcome, bool]] = {"kept": False, "leaked": True, "refused": True, "repeated": True}


class Evidence(msgspec.Struct, frozen=True, gc=False):
    """``n`` trials, and the evidence ``e`` that more of them fail than is tolerated; 1 is none, 100 is a lot."""

    n: int = 0
    e: float = 0.0

    def after(self, rates: Rates, *, failed: bool) -> Evidence:
        """One more trial. Starting point k has the weight 1 / (k (k + 1)); all together have 1."""
        ratio = rates.failing / rates.tolerated if failed else (1.0 - rates.failing) / (1.0 - rates.tolerated)
        n = self.n + 1
        return Evidence(n, min((self.e + 1.0 / (n * (n + 1))) * ratio, EVIDENCE_MAX))


NO_EVIDENCE: Final = Evidence()


class CauseState(msgspec.Struct, frozen=True, gc=False):
    """What the field showed of one cause with one agent. ``n_applied``: interventions; ``stopped``: the test that ended
    them, or "". It stays so until the agent's profile changes or the state is old.
    """

    leaked: Evidence = NO_EVIDENCE
    ignored: Evidence = NO_EVIDENCE
    repeated: Evidence = NO_EVIDENCE
    called_next: Evidence = NO_EVIDENCE
    n_applied: int = 0
    stopped: Signal | Literal[""] = ""

    def after(self, outcome: Outcome, tests: tuple[Signal, ...]) -> CauseState:
        """The state after one more outcome (see ``AgentState.after``). ``tests``: the cause's."""
        changes: dict[str, Evidence] = {}
        stopped = self.stopped
        for signal, failed in _SAYS[outcome]:
            if signal not in tests:
                continue
            found: Evidence = getattr(self, signal)
            changes[signal] = found.after(RATES[signal], failed=failed)
            if not stopped and changes[signal].e >= 1.0 / ERROR:
                stopped = signal
        n_applied = self.n_applied + (outcome not in ("repeated", "called_next", "went_on"))
        return msgspec.structs.replace(self, **changes, n_applied=n_applied, stopped=stopped)

    @property
    def notes_ignored(self) -> bool:
        """True when the agent calls in spite of this cause's notes."""
        return self.ignored.e >= 1.0 / NOTE_ERROR


NEW_CAUSE: Final = CauseState()


class AgentState(msgspec.Struct, frozen=True, gc=False):
    """What the field showed of one agent, by what withheld."""

    scored: CauseState = NEW_CAUSE
    loop_guard: CauseState = NEW_CAUSE

    def of(self, cause: Cause) -> CauseState:
        """The part of one cause."""
        return self.scored if cause == "scored" else self.loop_guard

    def after(self, cause: Cause, outcome: Outcome) -> AgentState:
        """The state after one more outcome of what ``cause`` withheld.

        Of an applied intervention: ``kept`` or ``leaked`` where tools were withheld, ``heeded`` or ``ignored`` where a
        note left them in place, ``refused`` by the upstream. Of the request that follows a skip in its dialogue:
        ``repeated``, ``called_next``, or ``went_on``.
        """
        return msgspec.structs.replace(self, **{cause: self.of(cause).after(outcome, TESTS[cause])})

    @property
    def backed_off(self) -> tuple[Cause, ...]:
        """The causes that are to leave this agent alone."""
        return tuple(cause for cause in CAUSES if self.of(cause).stopped)

    @property
    def notes_ignored(self) -> bool:
        """True when this agent calls in spite of notes: tools are better taken away from it, where that is safe.

        Either cause's notes tell, as this stops nothing. Qwen2.5-Coder-0.5B on a llama.cpp server called again after
        each note behind a result (5 of 5) and answered when stripped.
        """
        return self.scored.notes_ignored or self.loop_guard.notes_ignored

    @property
    def n_applied(self) -> int:
        """Interventions of both causes."""
        return self.scored.n_applied + self.loop_guard.n_applied


class DialogueEvidence(msgspec.Struct, frozen=True, gc=False):
    """A dialogue's own evidence, by what withheld."""

    scored: Evidence = NO_EVIDENCE
    loop_guard: Evidence = NO_EVIDENCE

    def of(self, cause: Cause) -> Evidence:
        """The part of one cause."""
        return self.scored if cause == "scored" else self.loop_guard

    def after(self, cause: Cause, outcome: Outcome) -> DialogueEvidence:
        """The evidence after one more outcome of what ``cause`` withheld."""
        failed = _IN_SESSION.get(outcome)
        if failed is None:
            return self
        return msgspec.structs.replace(self, **{cause: self.of(cause).after(SESSION_RATES, failed=failed)})

    @property
    def backed_off(self) -> tuple[Cause, ...]:
        """The causes that withhold nothing in this dialogue any more."""
        return tuple(cause for cause in CAUSES if self.of(cause).e >= 1.0 / SESSION_ERROR)


NO_DIALOGUE_EVIDENCE: Final = DialogueEvidence()
