"""What a skip is worth for this agent, as measured: the inputs of ``profiles.payoff``. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from whetherman_edge.calibrate.run_log import RunLine, StepLine
from whetherman_edge.profiles.payoff import Payoff


def payoff_of(runs: Mapping[str, Sequence[RunLine]], arm: str, *, usd_out: float = 0.0) -> Payoff | None:
    """Means over right skips: probes that the chosen arm solved without a call, run with tools as well (at temperature
    0). usd_out: USD for a million output tokens. None without any: nothing is known then, not even that a skip does not
    pay.

    A skipped call saves the ones that would have followed it too, so ``call_s`` and ``call_tokens`` are all of a run
    but its last reply. A failure costs what was in vain, and a run with tools.
    """
    base = [run for members in runs.values() for run in members if run.arm == "with" and run.steps]
    generated = [step for run in base for step in run.steps]
    n_output = sum(step.output for step in generated)
    pairs = list(_right_skips(runs.values(), arm))
    saved = [step for _, with_tools in pairs for step in with_tools.steps[:-1]]
    reevaluated = [run.steps[0].prompt - run.steps[0].cached for run, _ in pairs if run.steps[0].cached is not None]
    n = len(pairs)
    if not n:
        return None
    return Payoff(
        call_s=sum(step.seconds for step in saved) / n,
        call_tokens=sum(step.output for step in saved) / n,
        failure_s=_mean(run.seconds for run in base) + _mean(run.seconds for run, _ in pairs),
        shift_tokens=_mean(run.output_tokens - with_tools.steps[-1].output for run, with_tools in pairs),
        token_s=sum(step.seconds - step.ttft for step in generated) / n_output if n_output else 0.0,
        cache_s=_mean(reevaluated) * _prompt_token_s(generated),
        usd_a_token=usd_out / 1e6,
        n=n,
    )


def _right_skips(by_probe: Iterable[Sequence[RunLine]], arm: str) -> Iterable[tuple[RunLine, RunLine]]:
    """(run under the arm, run with tools) of each probe that the arm solved without a call."""
    for members in by_probe:
        first = {run.arm: run for run in members if run.index == 0 and run.steps}
        steered, base = first.get(arm), first.get("with")
        if steered is not None and base is not None and steered.success and not steered.n_refused:
            yield steered, base


def _prompt_token_s(steps: Sequence[StepLine]) -> float:
    """Seconds that one prompt token takes to evaluate; 0 where the server does not report its cache."""
    known = [step for step in steps if step.cached is not None]
    n = sum(step.prompt - (step.cached or 0) for step in known)
    return sum(step.ttft for step in known) / n if n else 0.0


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0
