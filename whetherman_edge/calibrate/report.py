"""What a calibration found, as a value (JSON), as text, and as a page. Pure."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from whetherman_edge.calibrate import interventions
from whetherman_edge.calibrate.capability_probe import Found
from whetherman_edge.calibrate.fitting import Fitted, Shortfall
from whetherman_edge.calibrate.labels import Outcome, label
from whetherman_edge.calibrate.plan import Item
from whetherman_edge.calibrate.run_log import RunLine
from whetherman_edge.profiles.payoff import Payoff, explain
from whetherman_edge.profiles.schema import Profile, Proof


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """What it took, earlier invocations included. ``seconds``: of the model. ``retried``: requests sent again.
    ``judged_again``: runs of the log to which today's checkers give another verdict. ``cut``: runs whose last reply
    ended at the limit of its tokens; they are judged as they stand.
    """

    n_runs: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    usd: float
    retried: int = 0
    judged_again: int = 0
    cut: int = 0


class Breadth(msgspec.Struct, frozen=True):
    """What the proof rests on: kinds of task (generators) with a needed step, by kind of step, and the longest list of
    tools among all of the calibration split.
    """

    first: int
    later: int
    tools_max: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All of it. ``labels``: probes by split, kind, family and state. ``profile`` None: no profile was written, and
    ``reason`` says why. ``more``: what more time would buy, in sentences.
    """

    name: str
    model: str
    kind: str
    end: str
    reason: str
    capability: Found
    arm: str
    arms: dict[str, interventions.Measured]
    labels: list[dict[str, Any]]
    totals: dict[str, int]
    payoff: Payoff | None
    fitted: dict[str, Any] | None
    more: list[str]
    spent: Spent
    alpha: float
    delta: float
    profile: Profile | None = None
    breadth: Breadth | None = None


def breadth_of(items: Sequence[Item], outcomes: Mapping[str, Outcome]) -> Breadth:
    """Of the calibration split."""
    own = [
        (item.probe, label(outcomes[item.probe.id]))
        for item in items
        if item.split == "calibrate" and item.probe.id in outcomes
    ]
    needed = {(probe.kind, probe.generator) for probe, made in own if made.proof}
    return Breadth(
        first=sum(kind == "first" for kind, _ in needed),
        later=sum(kind == "later" for kind, _ in needed),
        tools_max=max((len(probe.tools) for probe, _ in own), default=0),
    )


def label_table(items: Sequence[Item], outcomes: Mapping[str, Outcome]) -> list[dict[str, Any]]:
    """Counts of label states, by split, kind of step and family; probes without runs are left out."""
    cells: dict[tuple[str, str, str], Counter[str]] = {}
    for item in items:
        found = outcomes.get(item.probe.id)
        if found is None or not (found.with_tools or found.without):
            continue
        made = label(found)
        cell = cells.setdefault((item.split, item.probe.kind, item.probe.family), Counter())
        cell[made.state] += 1
        cell["worse_with_tools"] += made.worse_with_tools
    return [
        {"split": split, "kind": kind, "family": family, **{key: n for key, n in sorted(cell.items()) if n}}
        for (split, kind, family), cell in sorted(cells.items())
    ]


def totals(table: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Sums of a label table."""
    found: Counter[str] = Counter()
    for row in table:
        found.update({key: n for key, n in row.items() if isinstance(n, int)})
    return dict(sorted(found.items()))


def fitted_summary(fitted: Fitted, neighbour: str = "") -> dict[str, Any]:
    """The numbers of a fit that say how good it is. neighbour: the known agent whose layer was offered."""
    return {
        "leans_on": neighbour if fitted.fit.leans else "",
        "n_fit": fitted.n_fit,
        "n_calibrate": len(fitted.steps),
        "penalty": fitted.fit.penalty,
        "log_loss": round(fitted.fit.log_loss, 4),
        "prior_log_loss": round(fitted.fit.prior_log_loss, 4),
        "temperature": round(fitted.fit.layer.temperature, 3),
        "stands": sorted(fitted.stands),
        "thresholds": {kind: msgspec.to_builtins(found) for kind, found in fitted.thresholds.items()},
        "shortfalls": {kind: msgspec.to_builtins(found) for kind, found in fitted.shortfalls.items()},
        "observed_tau_unproven": fitted.observed_tau,
    }


def more_time(fitted: Fitted | None, *, n_open: int, seconds_a_probe: float) -> list[str]:
    """What more time would buy."""
    found: list[str] = []
    if fitted is not None:
        for kind, missing in sorted(fitted.shortfalls.items()):
            found.append(_missing(kind, missing, seconds_a_probe))
        found += [
            f"{kind} steps: proven from {threshold.n_needed} needed steps, and that stands. A further look spends a "
            f"smaller part of the error: from {fitted.next_needed[kind]} needed steps on it could prove more"
            for kind, threshold in sorted(fitted.thresholds.items())
            if threshold is not None and n_open
        ]
    if n_open:
        minutes = n_open * seconds_a_probe / 60
        found.append(f"{n_open} probes are not settled; about {minutes:.0f} minutes for all of them")
    return found


def _missing(kind: str, missing: Shortfall, seconds_a_probe: float) -> str:
    start = f"{kind} steps: nothing is skipped. {missing.n_needed} of {missing.n_tried} probes tried were needed steps"
    if missing.n_skipped:
        start += f", {missing.n_skipped} of which the gate would skip even at the strictest threshold"
    if missing.n_needed >= missing.n_wanted:
        return start + "; the decisions tried on the fit split withhold nothing here"
    start += f"; {missing.n_wanted} could prove the rate"
    if missing.n_probes is None:
        return start + ". So far this agent solved none with tools that it could not solve without"
    minutes = missing.n_probes * seconds_a_probe / 60
    return start + f". About {missing.n_probes} more probes would settle it ({minutes:.0f} minutes)"


def text(report: Report) -> str:
    """For the terminal."""
    found = report.capability
    lines = [
        f"agent          {report.model} on {report.kind}",
        f"measured       {report.spent.n_runs} runs, {report.spent.prompt_tokens} prompt and "
        f"{report.spent.output_tokens} output tokens, {report.spent.seconds / 60:.1f} minutes of the model"
        + (f", {report.spent.usd:.2f} USD" if report.spent.usd else "")
        + (f"; {report.spent.judged_again} judged again by newer checkers" if report.spent.judged_again else "")
        + (f"; {report.spent.cut} ended in a reply cut at --max-tokens" if report.spent.cut else ""),
        f"ended          {report.end}" + (f": {report.reason}" if report.reason else ""),
        f"tools shown    {_word(found.shows_tools)} ({found.prompt_without} prompt tokens, {found.prompt_with} with)",
        f"calls come     {found.call_style}",
        f"upstream       {', '.join(f'{name} {_word(value)}' for name, value in _abilities(found))}",
    ]
    for arm, m in report.arms.items():
        lines.append(
            f"{'* ' if arm == report.arm else '  '}{arm:<15}{m.success:.2f} right (with tools {m.success_with:.2f}), "
            f"calls {m.calls_left:.1f} ({m.calls_with:.1f}), output {m.output_tokens:.0f} ({m.output_with:.0f}), "
            f"{m.seconds:.1f} s ({m.seconds_with:.1f} s), worth {m.value_s:.1f} s, n={m.n}"
        )
    lines.append("labels         " + (", ".join(f"{key} {n}" for key, n in report.totals.items()) or "none"))
    if report.fitted is not None:
        lines.append(
            f"fit            {report.fitted['n_fit']} steps, log loss {report.fitted['log_loss']} (shared gate "
            f"{report.fitted['prior_log_loss']}); calibration split {report.fitted['n_calibrate']} steps"
            + (f"; leans on the profile {report.fitted['leans_on']}" if report.fitted["leans_on"] else "")
        )
        lines += [f"{kind:<15}{_stands(kind, report)}" for kind in report.fitted["stands"]]
        for kind, threshold in report.fitted["thresholds"].items():
            lines.append(f"{kind:<15}{_threshold(threshold, report)}")
        if report.breadth is not None:
            lines.append(
                f"breadth        needed steps of {report.breadth.first} kinds of task (first steps) and "
                f"{report.breadth.later} (later ones), with up to {report.breadth.tools_max} tools"
            )
    if report.payoff is not None:
        lines += [
            f"{'payoff' if not place else '':<15}{line}" for place, line in enumerate(explain(report.payoff, None))
        ]
    elif report.spent.n_runs:
        lines.append("payoff         not known: no probe was solved without a call that was run with tools as well")
    lines += [f"{'more' if not place else '':<15}{line}" for place, line in enumerate(report.more)]
    if report.profile is None:
        lines.append("profile        none was written")
    elif not report.profile.calibrated:
        lines.append("profile        proves nothing: the daemon stays in shadow with it")
    return "\n".join(lines) + "\n"


def page(report: Report) -> bytes:
    """The same as one self-contained HTML page."""
    head = f"Calibration of {report.name}"
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(row.get(key, '')))}</td>" for key in _COLUMNS) + "</tr>"
        for row in report.labels
    )
    columns = "".join(f"<th>{key.replace('_', ' ')}</th>" for key in _COLUMNS)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(head)}</title>'
        "<style>body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem}"
        "pre{overflow-x:auto}table{border-collapse:collapse}td,th{padding:.2rem .7rem;border-bottom:1px solid #ccc;"
        "text-align:left}@media(prefers-color-scheme:dark){body{background:#111;color:#ddd}}</style>"
        f"<h1>{html.escape(head)}</h1><pre>{html.escape(text(report))}</pre><h2>Labels</h2>"
        f"<table><tr>{columns}</tr>{rows}</table></html>\n"
    ).encode()


_COLUMNS = ("split", "kind", "family", "needed", "not_needed", "soft", "lost", "open", "worse_with_tools")


def _threshold(found: Mapping[str, Any] | None, report: Report) -> str:
    if found is None:
        return "no threshold passes: always ACT"
    return (
        f"skips from {found['tau']:g}: {found['n_withheld']} of {found['n_measured']} steps; {found['n_false_skips']} "
        f"of {found['n_needed']} needed ones, at most {found['bound']:.1%} with {1 - report.delta:.0%} confidence"
    )


def _stands(kind: str, report: Report) -> str:
    proof: Proof | None = getattr(report.profile.risk, kind, None) if report.profile is not None else None
    if proof is None:
        return "as proven before"
    return (
        f"as proven before, by the layer of then: {proof.n_withheld} of {proof.n_measured} steps; "
        f"{proof.n_false_skips} of {proof.n_needed} needed ones, at most {proof.bound:.1%} with "
        f"{1 - report.delta:.0%} confidence"
    )


def _abilities(found: Found) -> tuple[tuple[str, bool | None], ...]:
    return (
        ("none", found.honours_none),
        ("required", found.honours_required),
        ("strip with history", found.strips_history),
        ("prefill", found.prefill),
        ("note obeyed", found.obeys_note),
        ("system in the middle", found.middle_system),
    )


def _word(value: bool | None) -> str:
    return "not known" if value is None else "yes" if value else "no"


def runs_of(runs: Sequence[RunLine]) -> dict[str, list[RunLine]]:
    """Runs by probe."""
    found: dict[str, list[RunLine]] = {}
    for run in runs:
        found.setdefault(run.probe, []).append(run)
    return found
