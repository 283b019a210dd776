"""From a log to a profile: features of the loaded engine, layer, thresholds with their proof, payoff.

Nothing of the engine is in the log, so a changed artifact costs a refit of seconds and no run of the agent.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Final, Protocol

import msgspec
import numpy as np

from whetherman_edge.calibrate.labels import Label, Outcome, label, steered_label
from whetherman_edge.calibrate.plan import Item
from whetherman_edge.dialects import openai_chat
from whetherman_edge.dialects.chat import ChatView
from whetherman_edge.dialects.tool_cache import ToolCache
from whetherman_edge.errors import UsageError
from whetherman_edge.gate.policy import PolicySettings, SessionState, decide
from whetherman_edge.gate.verdict import STEP_KINDS, StepKind, Verdict
from whetherman_edge.gate.verdict import Label as Decided
from whetherman_edge.profiles.fit import Fit, fit_layer
from whetherman_edge.profiles.risk import (
    ALPHA,
    DELTA,
    GRID,
    Step,
    Threshold,
    choose_by_kind,
    needed_for,
    promising,
    smallest_observed,
)
from whetherman_edge.profiles.schema import Layer, Profile, Tau

_ALWAYS: Final = Tau(answer=0.0, ask=0.0, decline=0.0)
_P_MIN: Final = 1e-9

Levels = Callable[[StepKind, Sequence[Step]], float]
"""The error that a look at these steps of a kind may spend; without steps: that the next look may spend."""


class Judge(Protocol):
    """The engine that is loaded (``engine.StaticEngine``, ``engine.StagedEngine``)."""

    fused_names: tuple[str, ...]

    def judge(
        self, chat: ChatView, deadline_s: float, profile: Profile | None = None, /
    ) -> Verdict | Awaitable[Verdict]: ...


class Row(msgspec.Struct, frozen=True):
    """A decided probe: its view, the engine's verdict without a profile, and its label."""

    item: Item
    chat: ChatView
    verdict: Verdict
    label: Label


class Shortfall(msgspec.Struct, frozen=True, kw_only=True):
    """Why a kind of step has no threshold, and what would settle it.

    ``n_tried``: probes tried, those that the agent lost either way included. ``n_needed``: independent needed steps.
    ``n_skipped``: of them withheld already at the strictest threshold. ``n_wanted``: needed steps that could prove the
    rate with that many skipped. ``n_probes``: about so many more probes, at this agent's share of needed ones; None
    where it has none so far.
    """

    n_tried: int
    n_needed: int
    n_skipped: int
    n_wanted: int
    n_probes: int | None


class Standing(msgspec.Struct, frozen=True):
    """Proofs of an earlier look at this calibration, and the layer that they are about. They stand whatever a later
    look finds, as long as that layer is used: all looks together stay below delta. ``withheld``: the share of steps
    that was withheld, by kind of step.
    """

    layer: Layer
    withheld: dict[StepKind, float]


class Fitted(msgspec.Struct, frozen=True, kw_only=True):
    """What the measurements allow. ``observed_tau``: the research rule's threshold, for comparison only. ``stands``:
    kinds of step whose earlier proof stands; they have no threshold here. ``next_needed``: needed steps of each kind
    that a next look wants at least.
    """

    fit: Fit
    thresholds: dict[StepKind, Threshold | None]
    shortfalls: dict[StepKind, Shortfall]
    observed_tau: dict[StepKind, float | None]
    steps: tuple[Step, ...]
    n_fit: int
    stands: frozenset[StepKind] = frozenset()
    next_needed: dict[StepKind, int] = {}


def chat_of(item: Item, model: str) -> ChatView:
    """The gate's view of the request at the probe's decision point."""
    body = {
        "model": model,
        "messages": list(item.probe.messages),
        "tools": [tool.openai() for tool in item.probe.tools],
    }
    return openai_chat.view(msgspec.json.encode(body), ToolCache())


async def rows_of(items: Sequence[Item], outcomes: Mapping[str, Outcome], judge: Judge, model: str) -> list[Row]:
    """The probes that say something, with the engine's verdicts."""
    rows: list[Row] = []
    for item in items:
        found = label(outcomes.get(item.probe.id, Outcome()))
        if found.state in ("open", "lost"):
            continue
        chat = chat_of(item, model)
        rows.append(Row(item, chat, await _verdict(judge, chat, None), found))
    return rows


async def fit_rows(
    rows: Sequence[Row],
    judge: Judge,
    make_profile: Callable[[Fit], Profile],
    *,
    n_tried: Mapping[StepKind, int],
    alpha: float = ALPHA,
    delta: float = DELTA,
    levels: Levels | None = None,
    known: Layer | None = None,
    standing: Standing | None = None,
) -> Fitted:
    """Layer from the fit split, thresholds from the calibrate split.

    n_tried: probes of the calibrate split with runs. make_profile: the profile of a layer, without thresholds; what the
    gate would do is then asked of the gate itself, staged engine, guards and all. levels: by default all of delta, as
    for steps that are looked at once. known: as for ``profiles.fit.fit_layer``. standing: what was proven before; the
    layer of then is kept unless a new one proves all of that again, and withholds no less. Raises UsageError when there
    is too little to fit.
    """
    own = [row for row in rows if row.item.split == "fit" and row.label.weight > 0.0]
    if not own:
        raise UsageError("expected decided probes of the fit split, got none; give it more time")
    prior = np.array([_logit(row.verdict.p_need) for row in own])
    fit = fit_layer(
        np.array([row.verdict.fused for row in own], dtype=np.float64),
        np.array([row.label.needed for row in own]),
        judge.fused_names,
        prior,
        [row.item.probe.generator for row in own],
        weights=np.array([row.label.weight for row in own]),
        known=known,
    )
    spend: Levels = levels or (lambda _kind, _steps: delta)
    if standing is not None and standing.layer.features != tuple(judge.fused_names):
        standing = None
    if standing is not None:
        again = await _looked_at(rows, own, judge, make_profile, fit, alpha, spend, tuple(standing.withheld))
        if all(_no_less(again.thresholds[kind], share) for kind, share in standing.withheld.items()):
            standing = None
        else:
            p_need = np.array([standing.layer.p_need(row.verdict.fused) for row in own])
            fit = msgspec.structs.replace(fit, layer=standing.layer, out_of_fold=p_need, leans=False)
    stands: frozenset[StepKind] = frozenset() if standing is None else frozenset(standing.withheld)
    looked = await _looked_at(
        rows, own, judge, make_profile, fit, alpha, spend, [kind for kind in STEP_KINDS if kind not in stands]
    )
    kinds = {kind: [step for step in looked.steps if step.kind == kind] for kind in STEP_KINDS}
    return Fitted(
        fit=fit,
        thresholds=looked.thresholds,
        shortfalls={
            kind: shortfall(kinds[kind], n_tried[kind], alpha, spend(kind, ()))
            for kind, found in looked.thresholds.items()
            if found is None
        },
        observed_tau={kind: smallest_observed(members, alpha) for kind, members in kinds.items()},
        steps=looked.steps,
        n_fit=len(own),
        stands=stands,
        next_needed={kind: needed_for(alpha, spend(kind, ())) for kind in STEP_KINDS},
    )


def _no_less(found: Threshold | None, share: float) -> bool:
    return found is not None and found.n_withheld >= share * found.n_measured


class _Looked(msgspec.Struct, frozen=True):
    steps: tuple[Step, ...]
    thresholds: dict[StepKind, Threshold | None]


async def _looked_at(
    rows: Sequence[Row],
    own: Sequence[Row],
    judge: Judge,
    make_profile: Callable[[Fit], Profile],
    fit: Fit,
    alpha: float,
    spend: Levels,
    wanted: Collection[StepKind],
) -> _Looked:
    """The steps of the calibrate split under the fit's layer, and the thresholds of the wanted kinds."""
    # Without its payoff: what is not worth a skip today may be tomorrow, and the proof should still hold then.
    profile = msgspec.structs.replace(make_profile(fit), tau=_ALWAYS, payoff={})
    steps = [
        await _step(row, judge, profile)
        for row in rows
        if row.item.split == "calibrate" and row.label.proof is not None
    ]
    fit_steps = [
        msgspec.structs.replace(await _step(row, judge, profile), skip_score=1.0 - float(p_need))
        for row, p_need in zip(own, fit.out_of_fold, strict=True)
        if row.label.proof is not None
    ]
    # Where the fit split, thin in generators, shows no decision to be of use, all are tried: the proof holds anyway.
    by_kind = [[step for step in fit_steps if step.kind == kind] for kind in STEP_KINDS]
    telling = [step for members in by_kind if promising(members, alpha) for step in members]
    level = {kind: spend(kind, [step for step in steps if step.kind == kind]) for kind in wanted}
    looked = [step for step in steps if step.kind in level]
    thresholds = choose_by_kind(looked, fit_steps=telling, alpha=alpha, levels=level)
    return _Looked(tuple(steps), thresholds)


def shortfall(steps: Sequence[Step], n_tried: int, alpha: float, delta: float) -> Shortfall:
    """What more would settle a kind of step for which no threshold passed."""
    needed: dict[str, bool] = {}
    strictest = max(GRID)
    for index, step in enumerate(steps):
        if step.needed:
            group = step.group or f"#{index}"
            needed[group] = needed.get(group, False) or (step.wanted and step.skip_score >= strictest)
    n, n_skipped = len(needed), sum(needed.values())
    wanted = needed_for(alpha, delta, n_skipped)
    share = n / n_tried if n_tried else 0.0
    return Shortfall(
        n_tried=n_tried,
        n_needed=n,
        n_skipped=n_skipped,
        n_wanted=wanted,
        n_probes=math.ceil(max(wanted - n, 0) / share) if share else None,
    )


async def _step(row: Row, judge: Judge, profile: Profile) -> Step:
    """What the gate makes of this step under the profile's layer, were every threshold 0."""
    verdict = await _verdict(judge, row.chat, profile)
    settings = PolicySettings(fused_names=judge.fused_names, loop_guard=False)
    decision = decide(verdict, row.chat, profile, SessionState(), settings)
    others: dict[Decided, float] = dict(zip(("ANSWER", "ASK", "DECLINE"), decision.probabilities[1:], strict=True))
    candidate = decision.label if decision.label != "ACT" else max(others, key=lambda name: others[name])
    probe = row.item.probe
    return Step(
        skip_score=1.0 - decision.p_need,
        needed=bool(row.label.proof),
        wanted=decision.label != "ACT",
        group=probe.group,
        kind=probe.kind,
        decision=candidate,
        doubtful=not row.label.proof and not probe.any_reply and candidate != steered_label(probe.expect),
    )


async def _verdict(judge: Judge, chat: ChatView, profile: Profile | None) -> Verdict:
    verdict = judge.judge(chat, math.inf, profile)
    if inspect.isawaitable(verdict):
        return await asyncio.ensure_future(verdict)
    return verdict


def _logit(p: float) -> float:
    bounded = min(max(p, _P_MIN), 1.0 - _P_MIN)
    return math.log(bounded / (1.0 - bounded))
