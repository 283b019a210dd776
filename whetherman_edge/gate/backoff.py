"""Stop an intervention when the evidence in the field turns: sequential tests, by agent and by dialogue. Pure.

"Never worse" also after calibration. Each kind of failure has a rate that is tolerated, and a test of "the rate is at
most that": a mixture over all starting points of likelihood ratios against a clearly worse rate. Under a tolerated
rate its expectation stays at most 1 however long one looks, so the chance that it *ever* reaches 1/ERROR is at most
ERROR (Ville's inequality): the count may be looked at after every request. Summing over starting points is what lets
an agent that went along a hundred times and then changed be noticed soon.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

Signal = Literal["leaked", "ignored", "repeated", "called_next"]
Outcome = Literal["kept", "leaked", "refused", "heeded", "ignored", "repeated", "called_next", "went_on"]

ERROR: Final = 0.01
"""Chance that one test ever stops an agent whose failures stay within the tolerated rate; there are four tests."""
SESSION_ERROR: Final = 0.05
"""The same for the one test of a dialogue."""
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


class AgentState(msgspec.Struct, frozen=True, gc=False):
    """What the field showed of one agent. ``n_applied``: interventions; ``stopped``: the test that ended them."""

    leaked: Evidence = NO_EVIDENCE
    ignored: Evidence = NO_EVIDENCE
    repeated: Evidence = NO_EVIDENCE
    called_next: Evidence = NO_EVIDENCE
    n_applied: int = 0
    stopped: Signal | Literal[""] = ""

    def after(self, outcome: Outcome) -> AgentState:
        """The state after one more outcome.

        Of an applied intervention: ``kept`` or ``leaked`` where tools were withheld, ``heeded`` or ``ignored`` where a
        note left them in place, ``refused`` by the upstream. Of the request that follows a skip in its dialogue:
        ``repeated``, ``called_next``, or ``went_on``.
        """
        changes: dict[str, Evidence] = {}
        stopped = self.stopped
        for signal, failed in _SAYS[outcome]:
            found: Evidence = getattr(self, signal)
            changes[signal] = found.after(RATES[signal], failed=failed)
            if not stopped and changes[signal].e >= 1.0 / ERROR:
                stopped = signal
        n_applied = self.n_applied + (outcome not in ("repeated", "called_next", "went_on"))
        return msgspec.structs.replace(self, **changes, n_applied=n_applied, stopped=stopped)

    @property
    def notes_ignored(self) -> bool:
        """True when this agent calls in spite of notes: tools are better taken away from it, where that is safe.

        Qwen2.5-Coder-0.5B on a llama.cpp server called again after each note behind a result (5 of 5) and answered when
        stripped.
        """
        return self.ignored.e >= 1.0 / NOTE_ERROR

    @property
    def backed_off(self) -> bool:
        """True when this agent is to be left alone. It stays so until its profile changes or the state is old."""
        return self.stopped != ""


def in_session(evidence: Evidence, outcome: Outcome) -> Evidence:
    """A dialogue's own evidence after one more outcome."""
    failed = _IN_SESSION.get(outcome)
    return evidence if failed is None else evidence.after(SESSION_RATES, failed=failed)


def session_stopped(evidence: Evidence) -> bool:
    """True when nothing is withheld in this dialogue any more."""
    return evidence.e >= 1.0 / SESSION_ERROR
