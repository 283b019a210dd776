"""What a skip is worth for this agent, as measured: the inputs of ``profiles.payoff``. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from whetherman_edge.calibrate.run_log import RunLine, StepLine
from whetherman_edge.profiles.payoff import Payoff


def payoff_of(runs: Mapping[str, Sequence[RunLine]], arm: str, *, usd_out: float = 0.0) -> Payoff:
    """Means over all runs of the arm "with" and the chosen one. usd_out: USD for a million output tokens.

    A call costs the time and tokens of a run less those of its last step, shared among its calls; a failure costs a
    second run. What steering adds is read off probes that have both arms at temperature 0.
    """
    base = [run for members in runs.values() for run in members if run.arm == "with"]
    called = [run for run in base if run.n_calls and len(run.steps) > 1]
    n_calls = sum(run.n_calls for run in called)
    before_last = [step for run in called for step in run.steps[:-1]]
    generated = [step for run in base for step in run.steps]
    decode_s = sum(step.seconds - step.ttft for step in generated)
    n_output = sum(step.output for step in generated)
    shifts, cache = _steering(runs.values(), arm)
    return Payoff(
        call_s=sum(step.seconds for step in before_last) / n_calls if n_calls else 0.0,
        call_tokens=sum(step.output for step in before_last) / n_calls if n_calls else 0.0,
        failure_s=_mean(run.seconds for run in base),
        shift_tokens=_mean(shifts),
        token_s=decode_s / n_output if n_output else 0.0,
        cache_s=max(0.0, _mean(cache)) * _prompt_token_s(generated),
        usd_a_token=usd_out / 1e6,
    )


def _steering(by_probe: Iterable[Sequence[RunLine]], arm: str) -> tuple[list[float], list[float]]:
    """Of probes with both arms: output tokens of the steered reply more than of the last one with tools; and prompt
    tokens that the steered request had evaluated again.
    """
    shifts: list[float] = []
    cache: list[float] = []
    for members in by_probe:
        first = {run.arm: run for run in members if run.index == 0 and run.steps}
        steered, base = first.get(arm), first.get("with")
        if steered is None or base is None or steered.n_refused or base.unfinished:
            continue
        shifts.append(steered.steps[0].output - base.steps[-1].output)
        if steered.steps[0].cached is not None:
            cache.append(steered.steps[0].prompt - steered.steps[0].cached)
    return shifts, cache


def _prompt_token_s(steps: Sequence[StepLine]) -> float:
    """Seconds that one prompt token takes to evaluate; 0 where the server does not report its cache."""
    known = [step for step in steps if step.cached is not None]
    n = sum(step.prompt - (step.cached or 0) for step in known)
    return sum(step.ttft for step in known) / n if n else 0.0


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0
