"""The report of ``bench ab``: one self-contained HTML page with plots as inline SVG, and a table for the terminal."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

_STYLE: Final = """
:root{color-scheme:light dark;--ink:#1f6feb;--own:#1a7f37;--bad:#cf222e;--line:#8885;--soft:#8882}
@media(prefers-color-scheme:dark){:root{--ink:#58a6ff;--own:#3fb950;--bad:#f85149}}
body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}.wide{overflow-x:auto}
table{border-collapse:collapse;margin:.5rem 0;font-variant-numeric:tabular-nums}
td,th{border:1px solid var(--line);padding:.2rem .55rem;text-align:right;white-space:nowrap}
th{font-weight:600}td:first-child,th:first-child{text-align:left}tr.own td{font-weight:600}
svg{max-width:100%;height:auto}p.note,figcaption{opacity:.8}.bad{color:var(--bad)}figure{margin:.5rem 0}
"""
_NOTE: Final = (
    "Means a run. Tokens and seconds are the model server's own, the gate's questions and requests sent again "
    "included. Intervals: success 95 % (Wilson), differences 90 % (bootstrap with one more win and loss), and p "
    "(McNemar), all over tasks: repeats of one count once. Reused: runs whose requests an earlier gate had sent byte "
    "for byte; their time is as measured then."
)
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 380, 52, 130, 14, 42


def page(figures: Mapping[str, Any], about: Mapping[str, str]) -> str:
    """The whole page. figures: of ``ab_figures.compare``, with ``about``; about: what each gate is."""
    gates, told = figures["gates"], figures["about"]
    title = f"A/B: {told['model']}"
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        '<meta name=viewport content="width=device-width,initial-scale=1">',
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style><h1>{html.escape(title)}</h1>",
        f"<p class=note>{html.escape(_setting(figures))}</p>",
    ]
    if told.get("cut"):
        parts.append(f"<p class=bad>This bench ended early: {html.escape(told['cut'])}</p>")
    if figures["n_runs"]:
        parts += [
            "<h2>Success against calls</h2>",
            _scatter(gates),
            "<h2>Gates</h2><div class=wide>",
            _table(("gate", *_COLUMNS), [_row(name, gates[name]) for name in gates], own="own"),
            f"</div><p class=note>{_NOTE}</p>",
            _parts("Families", figures["families"], gates),
            _parts("Difficulty", figures["difficulties"], gates),
            _parts("First and later decision points", figures["kinds"], gates),
            _skips(gates),
            _decisions(gates),
        ]
    names = "".join(f"<tr><td>{html.escape(name)}</td><td>{html.escape(about[name])}</td></tr>" for name in gates)
    parts.append(f"<h2>What the gates are</h2><table>{names}</table>")
    return "\n".join(parts) + "\n"


def lines(figures: Mapping[str, Any]) -> Iterator[str]:
    """The table for the terminal."""
    yield _setting(figures)
    if not figures["n_runs"]:
        yield "no task was finished under every gate"
        return
    rows = [("gate", *_COLUMNS), *(_row(name, gate) for name, gate in figures["gates"].items())]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells)


_Scale = Callable[[float], float]

_COLUMNS: Final = (
    "success",
    "95 %",
    "points",
    "90 %",
    "won/lost",
    "p",
    "calls",
    "±calls",
    "tokens",
    "±tokens",
    "out",
    "s",
    "±s",
    "usd",
    "false skips",
    "reused",
)


def _row(name: str, gate: Mapping[str, Any]) -> tuple[str, ...]:
    success, paired = gate["success"], gate["against_none"]
    change, skips = paired["change"], gate["false_skips"]
    return (
        name,
        _percent(success["share"]),
        f"{_percent(success['low'])} to {_percent(success['high'])}",
        f"{paired['success_points']:+.1f}",
        f"{paired['success_points_low']:+.1f} to {paired['success_points_high']:+.1f}",
        f"{paired['won']}/{paired['lost']}",
        f"{paired['mcnemar_p']:.3f}",
        f"{gate['calls']:.2f}",
        _changed(change["calls"]),
        f"{gate['prompt_tokens'] + gate['output_tokens']:.0f}",
        _changed(change["tokens"]),
        f"{gate['output_tokens']:.0f}",
        f"{gate['seconds']:.1f}",
        _changed(change["seconds"]),
        f"{gate['usd']:.5f}" if gate["usd"] else "-",
        f"{skips['k']}/{skips['n']}",
        str(gate["reused_runs"]),
    )


def _setting(figures: Mapping[str, Any]) -> str:
    told = figures["about"]
    profiles = ", ".join(f"{role} {name}" for role, name in told["profiles"].items()) or "none"
    left_out = "".join(f"; left out {n} of {name}" for name, n in told.get("left_out", {}).items())
    return (
        f"{told['model']} on {told['endpoint_kind']}; {told['tasks']}: {figures['n_tasks']} tasks, "
        f"{figures['n_runs']} runs a gate of {figures['n_started']} begun{left_out}; engine {told['engine']}, gate "
        f"deadline {told['gate_deadline_ms']} ms; profiles: {profiles}; first repeat greedy, later ones at temperature "
        f"{told['temperature']:g}; seed {told['seed']}; Whetherman Edge {told['version']}"
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def _changed(change: Mapping[str, float] | None) -> str:
    return "-" if change is None else f"{100 * change['share']:+.0f} %"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], own: str = "") -> str:
    top = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join(
        f"<tr{' class=own' if row[0] == own else ''}>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>"
        for row in rows
    )
    return f"<table><tr>{top}</tr>{body}</table>"


def _scatter(gates: Mapping[str, Any]) -> str:
    """Calls a run across, success up with its interval; up and to the left is better."""
    most: float = max(max(gate["calls"] for gate in gates.values()) * 1.08, 0.5)

    def across(calls: float) -> float:
        return _LEFT + calls / most * (_WIDTH - _LEFT - _RIGHT)

    def up(share: float) -> float:
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    drawn = [_axes(most, across, up)]
    taken: list[tuple[float, float]] = []
    for name, gate in sorted(gates.items(), key=lambda one: -one[1]["success"]["share"]):
        success = gate["success"]
        x, y = across(gate["calls"]), up(success["share"])
        label = y + 4
        while any(abs(label - other_y) < 13 and abs(x - other_x) < 90 for other_x, other_y in taken):
            label += 13
        taken.append((x, label))
        color = "var(--own)" if name == "own" else "var(--ink)"
        drawn.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{up(success["low"]):.1f}" y2="{up(success["high"]):.1f}" '
            f'stroke="{color}" stroke-opacity=".35"/><circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{color}"><title>'
            f"{html.escape(name)}: {_percent(success['share'])} %, {gate['calls']:.2f} calls</title></circle>"
            f'<text x="{x + 9:.1f}" y="{label:.1f}">{html.escape(name)}</text>'
        )
    return (
        f'<figure><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" font-size="12" fill="currentColor" role="img" '
        f'aria-label="success against calls, one point a gate">{"".join(drawn)}</svg></figure>'
    )


def _axes(most: float, across: _Scale, up: _Scale) -> str:
    right = _WIDTH - _RIGHT
    parts = [
        f'<line x1="{_LEFT}" x2="{right}" y1="{up(share):.1f}" y2="{up(share):.1f}" stroke="var(--soft)"/>'
        f'<text x="{_LEFT - 6}" y="{up(share) + 4:.1f}" text-anchor="end">{100 * share:.0f} %</text>'
        for share in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]
    parts += [
        f'<text x="{across(calls):.1f}" y="{_HEIGHT - 24}" text-anchor="middle">{calls:.1f}</text>'
        for calls in (most * part / 4 for part in range(5))
    ]
    middle = (_LEFT + right) / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle">tool calls a task</text>')
    return "".join(parts)


def _parts(title: str, parts: Mapping[str, Any], gates: Mapping[str, Any]) -> str:
    """Success of each gate in each part, as bars in the cells; calls beside."""
    if len(parts) < 2:
        return ""
    rows = []
    for part, by_gate in parts.items():
        cells = "".join(_bar(by_gate[name], by_gate["none"]) for name in gates)
        n = next(iter(by_gate.values()))["n"]
        rows.append(f"<tr><td>{html.escape(part)}</td><td>{n}</td>{cells}</tr>")
    head = "".join(f"<th>{html.escape(name)}</th>" for name in gates)
    return (
        f"<h2>{html.escape(title)}</h2><div class=wide><table><tr><th></th><th>runs</th>{head}</tr>{''.join(rows)}"
        "</table></div><p class=note>Success in %, and calls a run below it; red: below none.</p>"
    )


def _bar(cell: Mapping[str, float], none: Mapping[str, float]) -> str:
    share = cell["success"]
    color = "var(--bad)" if share < none["success"] else "var(--ink)"
    return (
        f'<td><svg viewBox="0 0 64 34" width="64" height="34" font-size="11" fill="currentColor" role="img" '
        f'aria-label="{100 * share:.0f} %, {cell["calls"]:.1f} calls"><rect width="64" height="8" fill="var(--soft)"/>'
        f'<rect width="{64 * share:.1f}" height="8" fill="{color}"/><text y="20">{100 * share:.0f} %</text>'
        f'<text y="32" fill-opacity=".65">{cell["calls"]:.1f} calls</text></svg></td>'
    )


def _skips(gates: Mapping[str, Any]) -> str:
    rows = [
        (name, one["task"], str(one["repeat"]), one["family"], one["why"])
        for name, gate in gates.items()
        for one in gate["false_skip_tasks"]
    ]
    note = "Runs with an applied skip that failed where the ungated run of the same task succeeded."
    table = _table(("gate", "task", "repeat", "family", "why"), rows) if rows else "<p>None.</p>"
    return f"<h2>False skips by replay</h2><p class=note>{note}</p><div class=wide>{table}</div>"


def _decisions(gates: Mapping[str, Any]) -> str:
    rows = [
        (
            name,
            str(gate["steps"]),
            ", ".join(f"{told} {n}" for told, n in gate["applied"].items()) or "none",
            ", ".join(f"{reason} {n}" for reason, n in gate["reasons"].items()),
        )
        for name, gate in gates.items()
    ]
    return f"<h2>Decisions</h2><div class=wide>{_table(('gate', 'steps', 'applied', 'reasons'), rows)}</div>"
