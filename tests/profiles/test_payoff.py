"""Safe *and* worth it."""

from __future__ import annotations

import pytest

from whetherman_edge.profiles.payoff import Payoff, ToolCost, break_even, explain, saved_s, value_s

LAPTOP = Payoff(call_s=20.0, call_tokens=120, failure_s=60.0, shift_tokens=30, token_s=0.1, cache_s=2.0)


def test_value_is_zero_at_the_break_even_point() -> None:
    assert saved_s(LAPTOP) == pytest.approx(20 - 3 - 2)
    least = break_even(LAPTOP)
    assert value_s(LAPTOP, 1 - least) == pytest.approx(0.0)
    assert value_s(LAPTOP, 1 - least + 0.01) < 0 < value_s(LAPTOP, 1 - least - 0.01)


def test_steering_that_costs_more_than_the_call_never_pays() -> None:
    dear = Payoff(call_s=1.0, call_tokens=20, failure_s=10.0, cache_s=4.0)
    assert break_even(dear) > 1.0
    assert "nothing is skipped" in " ".join(explain(dear, 0.8))


def test_an_expensive_tool_lowers_the_bar_and_a_side_effect_forbids_it() -> None:
    assert break_even(LAPTOP, ToolCost(usd=0.05, latency_ms=1200)) < break_even(LAPTOP)
    assert break_even(LAPTOP, ToolCost(usd=0.05, side_effect=True)) > 1.0


def test_money_counts_at_the_users_rate() -> None:
    hosted = Payoff(call_s=0.0, call_tokens=1000, failure_s=10.0, usd_a_token=1e-5, seconds_a_dollar=180)
    assert saved_s(hosted) == pytest.approx(1.8)


def test_the_explanation_says_which_bound_binds() -> None:
    assert "the proven threshold decides" in " ".join(explain(LAPTOP, 0.95))
    assert "the payoff decides" in " ".join(explain(LAPTOP, 0.10))
