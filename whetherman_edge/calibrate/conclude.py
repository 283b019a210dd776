"""From a log to the report and the profile in it. Runs nothing of the agent, so it can be done again at any time."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from whetherman_edge.calibrate import interventions, rejudge
from whetherman_edge.calibrate.fitting import Fitted, Judge, fit_rows, rows_of
from whetherman_edge.calibrate.labels import outcome
from whetherman_edge.calibrate.payoff_inputs import payoff_of
from whetherman_edge.calibrate.plan import Item
from whetherman_edge.calibrate.report import (
    Report,
    Spent,
    fitted_summary,
    label_table,
    more_time,
    runs_of,
    totals,
)
from whetherman_edge.calibrate.run_log import RunLine, RunLog
from whetherman_edge.calibrate.runner import Budget, Measured
from whetherman_edge.engine import Router, StagedEngine, StaticEngine, open_engine
from whetherman_edge.errors import EnvironmentFault, UsageError
from whetherman_edge.gate.verdict import STEP_KINDS
from whetherman_edge.profiles.fit import Fit
from whetherman_edge.profiles.payoff import Payoff
from whetherman_edge.profiles.schema import (
    SCHEMA_VERSION,
    Agent,
    EngineArtifact,
    InterventionChoice,
    InterventionMode,
    Profile,
    Tau,
    proven,
)

_MODES: dict[str, InterventionMode] = {"note": "note", "none": "none", "strip": "strip", "prefill": "prefill"}


class Conclusion(msgspec.Struct, frozen=True, kw_only=True):
    """What a profile is made for and with. ``engine``: "static", "gemma" or "auto"."""

    name: str
    model: str
    kind: str
    quantisation: str
    engine: str
    alpha: float
    delta: float
    budget: Budget
    created: str
    version: str
    retried: int = 0


async def conclude(wanted: Conclusion, items: Sequence[Item], log: RunLog, measured: Measured) -> Report:
    """Fit and report. Raises ArtifactError without the static gate, EnvironmentFault without a demanded backbone."""
    runs = rejudge.current(log.runs, {item.probe.id: item for item in items})
    by_probe = runs_of(runs)
    outcomes = {probe: outcome(members, measured.arm) for probe, members in by_probe.items()}
    payoff = payoff_of(by_probe, measured.arm, usd_out=wanted.budget.usd_out) if runs else None
    fitted: Fitted | None = None
    profile: Profile | None = None
    reason = measured.reason
    if measured.end != "unusable" and payoff is not None:
        engine, artifact = open_judge(wanted.engine)
        try:
            rows = await rows_of(items, outcomes, engine, wanted.model)

            def make_profile(fit: Fit) -> Profile:
                return _profile(wanted, measured, artifact, fit, payoff, runs)

            tried = [i.probe.kind for i in items if i.split == "calibrate" and i.probe.id in by_probe]
            fitted = await fit_rows(
                rows,
                engine,
                make_profile,
                n_tried={kind: tried.count(kind) for kind in STEP_KINDS},
                alpha=wanted.alpha,
                delta=wanted.delta,
            )
            tau, risk = proven(
                fitted.thresholds,
                alpha=wanted.alpha,
                delta=wanted.delta,
            )
            profile = msgspec.structs.replace(make_profile(fitted.fit), tau=tau, risk=risk)
        except UsageError as exc:
            reason = f"{reason}; {exc}" if reason else str(exc)
        finally:
            close_judge(engine)
    prompt, output, seconds = log.spent()
    table = label_table(items, outcomes)
    return Report(
        name=wanted.name,
        model=wanted.model,
        kind=wanted.kind,
        end=measured.end,
        reason=reason,
        capability=measured.found,
        arm=measured.arm,
        arms=interventions.measure([run for item in _compared(items) for run in by_probe.get(item.probe.id, ())]),
        labels=table,
        totals=totals(table),
        payoff=payoff,
        fitted=fitted_summary(fitted) if fitted is not None else None,
        more=more_time(fitted, n_open=measured.n_open, seconds_a_probe=seconds / max(len(outcomes), 1)),
        spent=Spent(
            n_runs=len(runs),
            prompt_tokens=prompt,
            output_tokens=output,
            seconds=round(seconds, 1),
            usd=round(wanted.budget.cost(prompt, output), 4),
            retried=wanted.retried,
        ),
        alpha=wanted.alpha,
        delta=wanted.delta,
        profile=profile,
    )


def open_judge(name: str) -> tuple[Judge, EngineArtifact]:
    """The engine to fit on, ready to be asked, and what a profile says of it.

    "auto" without usable weights is the static stage alone. Raises ArtifactError; EnvironmentFault for "gemma" then.
    """
    router = Router()
    static = StaticEngine(router)
    alone = EngineArtifact("static", static.sha256)
    if name == "static":
        return static, alone
    engine = open_engine(name, static, router.table.sha256)
    if engine.stage is not None:
        engine.stage.start()
        fault = engine.stage.settled()
        if not fault:
            return engine, EngineArtifact("gemma", engine.stage.manifest.sha256)
        engine.stage.stop()
    else:
        fault = engine.fault
    if name == "gemma":
        raise EnvironmentFault(f"the engine gemma was asked for: {fault}; --engine static fits without it")
    return static, alone


def close_judge(judge: Judge) -> None:
    """End the backbone, where there is one."""
    if isinstance(judge, StagedEngine) and judge.stage is not None:
        judge.stage.stop()


def _profile(
    wanted: Conclusion,
    measured: Measured,
    artifact: EngineArtifact,
    fit: Fit,
    payoff: Payoff | None,
    runs: Sequence[RunLine],
) -> Profile:
    mode, _, wording = measured.arm.partition(":")
    digest = hashlib.sha256(msgspec.json.encode([(run.probe_sha, run.arm, run.index, run.success) for run in runs]))
    return Profile(
        schema=SCHEMA_VERSION,
        agent=Agent(wanted.kind, wanted.model, wanted.quantisation),
        engine=artifact,
        layer=fit.layer,
        tau=Tau(),
        risk=None,
        payoff=msgspec.to_builtins(payoff) if payoff is not None else {},
        intervention=InterventionChoice(mode=_MODES[mode], wording=wording),
        probes_sha256=digest.hexdigest(),
        created=wanted.created,
        version=wanted.version,
    )


def _compared(items: Sequence[Item]) -> list[Item]:
    return interventions.comparison_probes(items)
