"""The sequential tests: stated error rates, by simulation, and what the daemon makes of them."""

from __future__ import annotations

import numpy as np
import pytest

from whetherman_edge.gate.backoff import (
    ERROR,
    NO_DIALOGUE_EVIDENCE,
    RATES,
    SESSION_ERROR,
    TESTS,
    AgentState,
    DialogueEvidence,
    Outcome,
    Rates,
    Signal,
)
from whetherman_edge.gate.verdict import CAUSES, Cause

N_AGENTS = 2_000
N_REQUESTS = 1_000


OTHER: dict[Cause, Cause] = {"scored": "loop_guard", "loop_guard": "scored"}


def after(*outcomes: Outcome, cause: Cause = "scored", state: AgentState | None = None) -> AgentState:
    state = AgentState() if state is None else state
    for outcome in outcomes:
        state = state.after(cause, outcome)
    return state


def stopped_at(failed: np.ndarray, rates: Rates, error: float) -> np.ndarray:
    """(agents,) the request at which each agent is stopped, or 0; failed: (agents, requests) bool. The recursion of
    ``Evidence``, for all agents at once."""
    e = np.zeros(len(failed))
    found = np.zeros(len(failed), dtype=int)
    for n in range(1, failed.shape[1] + 1):
        worse, better = rates.failing / rates.tolerated, (1 - rates.failing) / (1 - rates.tolerated)
        e = (e + 1 / (n * (n + 1))) * np.where(failed[:, n - 1], worse, better)
        found[(found == 0) & (e >= 1 / error)] = n
    return found


@pytest.mark.parametrize("signal", list(RATES))
def test_an_agent_within_the_tolerated_rate_is_stopped_as_rarely_as_stated(signal: Signal) -> None:
    rng = np.random.default_rng(1)
    rates = RATES[signal]
    found = stopped_at(rng.random((N_AGENTS, N_REQUESTS)) < rates.tolerated, rates, ERROR)
    allowed = ERROR * N_AGENTS
    assert (found > 0).sum() <= allowed + 2 * allowed**0.5


@pytest.mark.parametrize("signal", list(RATES))
def test_a_failing_agent_is_stopped_soon_also_after_a_long_good_time(signal: Signal) -> None:
    rng = np.random.default_rng(2)
    rates = RATES[signal]
    failed = rng.random((N_AGENTS, 500)) < rates.failing
    fresh = stopped_at(failed, rates, ERROR)
    assert (fresh > 0).all()
    assert np.median(fresh) <= 20
    failed[:, :300] = rng.random((N_AGENTS, 300)) < rates.tolerated / 2
    turned = stopped_at(failed, rates, ERROR)
    assert (turned > 300).mean() > 0.99
    assert np.median(turned - 300) <= 60


def test_failures_may_come_in_bursts_as_long_as_each_is_tolerable() -> None:
    """The bound needs no independence: here what comes next depends on what was, never above the tolerated rate."""
    rng = np.random.default_rng(3)
    rates = RATES["leaked"]
    failed = np.zeros((N_AGENTS, N_REQUESTS), dtype=bool)
    for n in range(1, N_REQUESTS):
        chance = np.where(failed[:, max(0, n - 5) : n].any(axis=1), rates.tolerated, rates.tolerated / 10)
        failed[:, n] = rng.random(N_AGENTS) < chance
    assert (stopped_at(failed, rates, ERROR) > 0).mean() <= ERROR


def test_the_state_follows_the_simulated_recursion() -> None:
    rng = np.random.default_rng(4)
    failed = rng.random((1, 60)) < 0.45
    state, at = AgentState(), 0
    for n, bad in enumerate(failed[0], start=1):
        state = state.after("scored", "leaked" if bad else "kept")
        at = at or (n if state.backed_off else 0)
    assert at == stopped_at(failed, RATES["leaked"], ERROR)[0] > 0


@pytest.mark.parametrize(("outcome", "n"), [("leaked", 3), ("refused", 3), ("repeated", 3), ("ignored", 5)])
@pytest.mark.parametrize("cause", CAUSES)
def test_an_agent_that_never_goes_along_is_left_alone_soon(outcome: Outcome, n: int, cause: Cause) -> None:
    assert not after(*[outcome] * (n - 1), cause=cause).backed_off
    assert after(*[outcome] * n, cause=cause).backed_off == (cause,), "and the other cause goes on"


def test_a_tool_call_in_the_next_turn_is_weak_evidence() -> None:
    assert not after(*["called_next", "went_on"] * 200).backed_off
    assert after(*["called_next"] * 20).scored.stopped == "called_next"


def test_calls_behind_a_broken_loop_are_no_evidence_against_the_loop_guard() -> None:
    """An agent that loops in every turn calls in every next turn: it is the one that the guard is for."""
    assert not after(*["kept", "called_next"] * 200, cause="loop_guard").backed_off
    assert after(*["repeated"] * 3, cause="loop_guard").loop_guard.stopped == "repeated"
    assert after(*["called_next", "repeated"] * 3, cause="loop_guard").loop_guard.called_next.n == 0


def test_notes_give_way_before_withholding_ends() -> None:
    state = after(*["ignored"] * 3)
    assert state.notes_ignored
    assert not state.backed_off
    assert not after(*["heeded"] * 50, *["ignored"] * 2).notes_ignored
    assert not after("leaked", "leaked").notes_ignored


def test_what_was_stopped_stays_so() -> None:
    state = after(*["leaked"] * 3, *["kept"] * 1_000)
    assert state.scored.stopped == "leaked"
    assert state.n_applied == 1_003


@pytest.mark.parametrize("cause", CAUSES)
def test_a_dialogue_stops_on_its_own(cause: Cause) -> None:
    evidence = NO_DIALOGUE_EVIDENCE
    outcomes: tuple[Outcome, ...] = ("kept", "heeded", "leaked", "leaked")
    for outcome in outcomes:
        evidence = evidence.after(cause, outcome)
    assert not evidence.backed_off
    evidence = evidence.after(cause, "repeated").after(cause, "leaked")
    assert evidence.backed_off == (cause,)
    assert SESSION_ERROR > ERROR


@pytest.mark.parametrize("cause", CAUSES)
def test_each_cause_has_its_own_evidence(cause: Cause) -> None:
    """One that always fails beside one that always succeeds: each sees its own outcomes, in whatever order they come,
    and counts its own interventions."""
    state, evidence = AgentState(), DialogueEvidence()
    for _ in range(50):
        state = state.after(cause, "leaked").after(OTHER[cause], "kept")
        evidence = evidence.after(cause, "leaked").after(OTHER[cause], "kept")
    assert state.backed_off == evidence.backed_off == (cause,)
    assert state.of(cause) == after(*["leaked"] * 50, cause=cause).of(cause)
    assert state.of(OTHER[cause]) == after(*["kept"] * 50, cause=OTHER[cause]).of(OTHER[cause])
    assert (state.of(cause).n_applied, state.n_applied) == (50, 100)


def test_where_nothing_can_be_steered_both_stop() -> None:
    state = after(*["leaked"] * 3, cause="loop_guard")
    assert state.backed_off == ("loop_guard",)
    state = after(*["leaked"] * 2, state=state)
    assert state.backed_off == ("loop_guard",), "what the guard met does not count against the scores"
    assert after("leaked", state=state).backed_off == CAUSES


@pytest.mark.parametrize("cause", CAUSES)
def test_either_causes_notes_tell_how_notes_are_taken(cause: Cause) -> None:
    state = after(*["ignored"] * 3, cause=cause)
    assert state.notes_ignored
    assert not after(*["ignored"] * 2, cause=OTHER[cause]).notes_ignored


@pytest.mark.parametrize("cause", CAUSES)
def test_a_cause_keeps_its_bound_beside_one_that_fails(cause: Cause) -> None:
    """Agents whose one cause fails half of the time, which also decides whether the other gets to act next, and whose
    other one fails as rarely as is tolerated: that is stopped as rarely as stated, all its tests together."""
    rng = np.random.default_rng(5)
    n_agents, n_steps, n_stopped = 400, 150, 0
    for _ in range(n_agents):
        state, failed = AgentState(), False
        for _ in range(n_steps):
            if failed or rng.random() < 0.5:
                leaks, says_again = rng.random() < RATES["leaked"].tolerated, rng.random() < RATES["repeated"].tolerated
                state = state.after(cause, "leaked" if leaks else "kept")
                state = state.after(cause, "repeated" if says_again else "went_on")
                failed = False
            else:
                failed = bool(rng.random() < 0.5)
                state = state.after(OTHER[cause], "leaked" if failed else "kept")
        n_stopped += cause in state.backed_off
        assert OTHER[cause] in state.backed_off
    allowed = ERROR * len(TESTS[cause]) * n_agents
    assert n_stopped <= allowed + 2 * allowed**0.5
