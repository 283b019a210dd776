"""The sequential tests: stated error rates, by simulation, and what the daemon makes of them."""

from __future__ import annotations

import numpy as np
import pytest

from whetherman_edge.gate.backoff import (
    ERROR,
    NO_EVIDENCE,
    RATES,
    SESSION_ERROR,
    AgentState,
    Outcome,
    Rates,
    Signal,
    in_session,
    session_stopped,
)

N_AGENTS = 2_000
N_REQUESTS = 1_000


def after(*outcomes: Outcome) -> AgentState:
    state = AgentState()
    for outcome in outcomes:
        state = state.after(outcome)
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
        state = state.after("leaked" if bad else "kept")
        at = at or (n if state.backed_off else 0)
    assert at == stopped_at(failed, RATES["leaked"], ERROR)[0] > 0


@pytest.mark.parametrize(("outcome", "n"), [("leaked", 3), ("refused", 3), ("repeated", 3), ("ignored", 5)])
def test_an_agent_that_never_goes_along_is_left_alone_soon(outcome: Outcome, n: int) -> None:
    assert not after(*[outcome] * (n - 1)).backed_off
    assert after(*[outcome] * n).backed_off


def test_a_tool_call_in_the_next_turn_is_weak_evidence() -> None:
    assert not after(*["called_next", "went_on"] * 200).backed_off
    assert after(*["called_next"] * 20).stopped == "called_next"


def test_notes_give_way_before_withholding_ends() -> None:
    state = after(*["ignored"] * 3)
    assert state.notes_ignored
    assert not state.backed_off
    assert not after(*["heeded"] * 50, *["ignored"] * 2).notes_ignored
    assert not after("leaked", "leaked").notes_ignored


def test_what_was_stopped_stays_so() -> None:
    state = after(*["leaked"] * 3, *["kept"] * 1_000)
    assert state.stopped == "leaked"
    assert state.n_applied == 1_003


def test_a_dialogue_stops_on_its_own() -> None:
    evidence = NO_EVIDENCE
    for outcome in ("kept", "heeded", "leaked", "leaked"):
        evidence = in_session(evidence, outcome)  # type: ignore[arg-type]
    assert not session_stopped(evidence)
    evidence = in_session(in_session(evidence, "repeated"), "leaked")
    assert session_stopped(evidence)
    assert SESSION_ERROR > ERROR
