"""Back-off: an agent that does not go along is left alone."""

from __future__ import annotations

from whetherman_edge.gate.backoff import IGNORED_MAX, LEAKS_MAX, NOTES_IGNORED_MAX, WINDOW, AgentState, Outcome


def after(*outcomes: Outcome) -> AgentState:
    state = AgentState()
    for outcome in outcomes:
        state = state.after(outcome)
    return state


def test_a_few_leaks_end_withholding() -> None:
    assert not after(*["leaked"] * (LEAKS_MAX - 1)).backed_off
    assert after(*["leaked"] * LEAKS_MAX).backed_off


def test_an_agent_that_mostly_goes_along_is_kept() -> None:
    assert not after(*["kept"] * 100, *["leaked"] * LEAKS_MAX).backed_off
    assert not after(*["kept"] * 30, *["ignored"] * IGNORED_MAX).backed_off


def test_ignored_notes_count_too_but_weigh_less() -> None:
    assert not after(*["ignored"] * (IGNORED_MAX - 1)).backed_off
    assert after(*["ignored"] * IGNORED_MAX).backed_off


def test_notes_give_way_before_withholding_ends() -> None:
    state = after(*["ignored"] * NOTES_IGNORED_MAX)
    assert state.notes_ignored
    assert not state.backed_off
    assert not after(*["kept"] * 50, *["ignored"] * NOTES_IGNORED_MAX).notes_ignored
    assert not after(*["leaked"] * 2).notes_ignored


def test_the_counts_follow_an_agent_that_changes() -> None:
    state = after(*["kept"] * (10 * WINDOW))
    assert state.withheld <= WINDOW
    for _ in range(WINDOW // 3):
        state = state.after("leaked")
    assert state.backed_off


def test_backed_off_stays_so() -> None:
    state = after(*["leaked"] * WINDOW)
    assert state.backed_off
    assert state.after("leaked").backed_off
