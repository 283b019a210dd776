"""From a log to the report and the profile in it. Runs nothing of the agent, so it can be done again at any time."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import msgspec

from whetherman_edge.calibrate import interventions, neighbours, rejudge
from whetherman_edge.calibrate.fitting import Fitted, Judge, Levels, Standing, fit_rows, rows_of
from whetherman_edge.calibrate.labels import Outcome, outcome
from whetherman_edge.calibrate.payoff_inputs import payoff_of
from whetherman_edge.calibrate.plan import Item
from whetherman_edge.calibrate.report import (
    Report,
    Spent,
    breadth_of,
    fitted_summary,
    label_table,
    more_time,
    runs_of,
    totals,
)
from whetherman_edge.calibrate.run_log import LookLine, RunLine, RunLog
from whetherman_edge.calibrate.runner import Budget, Measured
from whetherman_edge.engine import Router, StagedEngine, StaticEngine, open_engine
from whetherman_edge.errors import EnvironmentFault, UsageError
from whetherman_edge.gate.verdict import STEP_KINDS, StepKind
from whetherman_edge.profiles.fit import Fit
from whetherman_edge.profiles.payoff import Payoff
from whetherman_edge.profiles.risk import Step, look_level, needed_for
from whetherman_edge.profiles.schema import (
    SCHEMA_VERSION,
    Agent,
    EngineArtifact,
    Found,
    InterventionChoice,
    InterventionMode,
    Profile,
    Proof,
    Tau,
    joined,
    proven,
    proven_kinds,
)

_MODES: dict[str, InterventionMode] = {"note": "note", "none": "none", "strip": "strip", "prefill": "prefill"}


class Conclusion(msgspec.Struct, frozen=True, kw_only=True):
    """What a profile is made for and with. ``engine``: "static", "gemma" or "auto". ``before``: the profile that an
    earlier look at this calibration made.
    """

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
    before: Profile | None = None


async def conclude(
    wanted: Conclusion,
    items: Sequence[Item],
    log: RunLog,
    measured: Measured,
    known: Sequence[tuple[str, Profile]] = (),
) -> Report:
    """Fit and report. known: profiles of agents measured before, by name.

    Raises ArtifactError without the static gate, EnvironmentFault without a demanded backbone.
    """
    logged = log.runs
    runs = rejudge.current(logged, {item.probe.id: item for item in items})
    by_probe = runs_of(runs)
    outcomes = {probe: outcome(members, measured.arm) for probe, members in by_probe.items()}
    payoff = payoff_of(by_probe, measured.arm, usd_out=wanted.budget.usd_out)
    made: _Made | None = None
    reason = measured.reason
    if measured.end != "unusable" and runs:
        engine, artifact = open_judge(wanted.engine)
        try:
            made = await _make(wanted, items, outcomes, log, measured, known, engine, artifact, payoff, runs)
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
        fitted=fitted_summary(made.fitted, made.neighbour) if made is not None else None,
        more=more_time(
            made.fitted if made is not None else None,
            n_open=measured.n_open,
            seconds_a_probe=seconds / max(len(outcomes), 1),
        ),
        spent=Spent(
            n_runs=len(runs),
            prompt_tokens=prompt,
            output_tokens=output,
            seconds=round(seconds, 1),
            usd=round(wanted.budget.cost(prompt, output), 4),
            retried=wanted.retried,
            judged_again=rejudge.n_changed(logged, runs),
            cut=sum(bool(run.steps) and run.steps[-1].finish == "length" for run in runs),
        ),
        alpha=wanted.alpha,
        delta=wanted.delta,
        profile=made.profile if made is not None else None,
        breadth=breadth_of(items, outcomes),
    )


class _Made(msgspec.Struct, frozen=True):
    """``neighbour``: name of the profile that the layer could lean on, or ""."""

    fitted: Fitted
    profile: Profile
    neighbour: str


async def _make(
    wanted: Conclusion,
    items: Sequence[Item],
    outcomes: Mapping[str, Outcome],
    log: RunLog,
    measured: Measured,
    known: Sequence[tuple[str, Profile]],
    engine: Judge,
    artifact: EngineArtifact,
    payoff: Payoff | None,
    runs: Sequence[RunLine],
) -> _Made:
    """Layer, thresholds, profile. Raises UsageError when there is too little to fit."""
    rows = await rows_of(items, outcomes, engine, wanted.model)
    near = _neighbour(known, artifact, items, outcomes, wanted, measured)
    found = neighbours.found_of(items, outcomes)

    def make_profile(fit: Fit) -> Profile:
        return _profile(wanted, measured, artifact, fit, payoff, runs, found)

    tried = [item.probe.kind for item in items if item.split == "calibrate" and item.probe.id in outcomes]
    fitted = await fit_rows(
        rows,
        engine,
        make_profile,
        n_tried={kind: tried.count(kind) for kind in STEP_KINDS},
        alpha=wanted.alpha,
        delta=wanted.delta,
        levels=_looks(log, artifact, wanted),
        known=near.profile.layer if near is not None else None,
        standing=_standing(wanted, artifact, measured),
    )
    tau, risk = proven(fitted.thresholds, alpha=wanted.alpha, delta=wanted.delta)
    if fitted.stands and wanted.before is not None:
        tau, risk = joined(tau, risk, wanted.before, fitted.stands)
    profile = msgspec.structs.replace(make_profile(fitted.fit), tau=tau, risk=risk)
    return _Made(fitted, profile, near.name if near is not None else "")


def _standing(wanted: Conclusion, artifact: EngineArtifact, measured: Measured) -> Standing | None:
    """What an earlier look proved of the same agent, by the same gate and claim, under the same intervention."""
    before = wanted.before
    if before is None or before.risk is None or before.risk.plain or before.engine != artifact:
        return None
    steering = before.intervention
    same = (
        before.agent.model == wanted.model
        and (before.risk.alpha, before.risk.delta) == (wanted.alpha, wanted.delta)
        and f"{steering.mode}:{steering.wording}" == measured.arm
    )
    proofs: dict[StepKind, Proof] = {kind: getattr(before.risk, kind) for kind in sorted(proven_kinds(before))}
    if not same or not proofs:
        return None
    return Standing(before.layer, {kind: proof.n_withheld / proof.n_measured for kind, proof in proofs.items()})


def _looks(log: RunLog, artifact: EngineArtifact, wanted: Conclusion) -> Levels:
    """The error that the next look may spend, written down when it could pass; the same look again spends nothing."""

    def level(kind: StepKind, steps: Sequence[Step]) -> float:
        seen = msgspec.json.encode((wanted.alpha, wanted.delta, steps))
        digest = hashlib.sha256(seen).hexdigest()[:16]
        looks = [
            line
            for line in log.lines
            if isinstance(line, LookLine) and (line.kind, line.artifact) == (kind, artifact.sha256)
        ]
        if not steps:
            return look_level(wanted.delta, len(looks))
        for look in looks:
            if look.digest == digest:
                return look.level
        found = look_level(wanted.delta, len(looks))
        if len({step.group for step in steps if step.needed}) >= needed_for(wanted.alpha, found):
            log.add(LookLine(kind, artifact.sha256, digest, found))
        return found

    return level


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
    found: dict[str, Found],
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
        found=found,
    )


def _neighbour(
    known: Sequence[tuple[str, Profile]],
    artifact: EngineArtifact,
    items: Sequence[Item],
    outcomes: Mapping[str, Outcome],
    wanted: Conclusion,
    measured: Measured,
) -> neighbours.Neighbour | None:
    """For the fit: of the same engine, and chosen on the fit split, which is all that the proof never sees."""
    alike = [(name, profile) for name, profile in known if profile.engine == artifact]
    fit = [item for item in items if item.split == "fit"]
    near = neighbours.nearest(alike, fit, outcomes, wanted.kind, measured.arm.partition(":")[0])
    return near if near is not None and near.n >= neighbours.SHARED_MIN else None


def _compared(items: Sequence[Item]) -> list[Item]:
    return interventions.comparison_probes(items)
