"""What a right skip saves is read off runs that have both."""

from __future__ import annotations

import msgspec
import pytest

from whetherman_edge.calibrate.payoff_inputs import payoff_of
from whetherman_edge.calibrate.run_log import RunLine, StepLine
from whetherman_edge.profiles.payoff import Payoff, explain, saved_s
from whetherman_edge.profiles.payoff import payoff_of as payoff_inputs


def step(output: int, seconds: float, *, prompt: int = 100, cached: int | None = 100) -> StepLine:
    """0.1 s a token, and the rest of the seconds before the first one."""
    return StepLine(prompt=prompt, output=output, ttft=seconds - output * 0.1, seconds=seconds, cached=cached)


def run(probe: str, arm: str, *steps: StepLine, success: bool = True) -> RunLine:
    n_calls = len(steps) - 1
    return RunLine(probe=probe, probe_sha="", arm=arm, index=0, success=success, n_calls=n_calls, steps=steps)


def known(runs: dict[str, list[RunLine]], arm: str, **more: float) -> Payoff:
    payoff = payoff_of(runs, arm, **more)
    assert payoff is not None
    return payoff


def test_a_skip_saves_the_calls_that_would_have_followed_too() -> None:
    chain = (step(20, 2.0), step(20, 2.0), step(10, 1.0))
    runs = {"a": [run("a", "with", *chain), run("a", "note:reason", step(30, 3.5, prompt=110, cached=100))]}
    payoff = known(runs, "note:reason", usd_out=2.0)
    assert (payoff.call_s, payoff.call_tokens) == (4.0, 40.0)
    assert payoff.shift_tokens == 20.0
    assert payoff.token_s == pytest.approx(0.1)
    assert payoff.failure_s == pytest.approx(5.0 + 3.5)
    assert payoff.usd_a_token == pytest.approx(2e-6)
    assert saved_s(payoff) == pytest.approx(4.0 - 20 * 0.1, abs=0.01)


def test_prompt_that_is_evaluated_again_costs() -> None:
    cold = step(0, 2.0, prompt=200, cached=0)  # 0.01 s a token
    runs = {"a": [run("a", "with", cold), run("a", "strip:reason", step(10, 2.0, prompt=100, cached=0))]}
    assert known(runs, "strip:reason").cache_s == pytest.approx(1.0)


def test_wrong_skips_are_no_measure_of_right_ones() -> None:
    runs = {
        "a": [run("a", "with", step(50, 5.0), step(10, 1.0)), run("a", "note:reason", step(1, 0.1), success=False)],
        "b": [run("b", "with", step(10, 1.0), step(10, 1.0)), run("b", "note:reason", step(10, 1.0))],
    }
    assert known(runs, "note:reason").call_s == 1.0


def test_without_pairs_nothing_is_known() -> None:
    runs = {"a": [run("a", "with", step(10, 1.0))], "b": [run("b", "note:reason", step(10, 1.0))]}
    assert payoff_of(runs, "note:reason") is None


def test_the_payoff_says_how_many_right_skips_it_is_of() -> None:
    runs = {name: [run(name, "with", step(9, 1.0), step(9, 1.0)), run(name, "a", step(9, 1.0))] for name in "xyz"}
    payoff = payoff_of(runs, "a")
    assert payoff is not None
    assert payoff.n == 3
    told = " ".join(explain(payoff, 0.9))
    assert "3 right skips: few" in told
    kept = payoff_inputs(msgspec.json.decode(msgspec.json.encode(payoff), type=dict[str, float]))
    assert kept == payoff, "a profile keeps it"
    assert "rough" not in " ".join(explain(msgspec.structs.replace(payoff, n=9), 0.9))
