"""One page a benchmark: figures, confusion matrix, reliability plot. Self-contained HTML; works from file://."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

_STYLE = """
:root{color-scheme:light dark;--line:#8884;--ink:#1f6feb}
body{font:15px/1.5 system-ui,sans-serif;max-width:56rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}
table{border-collapse:collapse;margin:.5rem 0}td,th{border:1px solid var(--line);padding:.25rem .6rem;text-align:right}
th{font-weight:600}td:first-child,th:first-child{text-align:left}svg{max-width:100%;height:auto}
p.note{opacity:.75}
"""


def page(title: str, note: str, sections: Mapping[str, Mapping[str, Any]]) -> str:
    """The page. sections: name to figures; ``confusion`` with ``labels`` and ``reliability_need`` are drawn, the rest
    is a table.
    """
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        '<meta name=viewport content="width=device-width,initial-scale=1">',
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style>",
        f"<h1>{html.escape(title)}</h1><p class=note>{html.escape(note)}</p>",
    ]
    for name, figures in sections.items():
        parts.append(f"<h2>{html.escape(name)}</h2>")
        parts.append(_table(figures))
        if "confusion" in figures:
            parts.append(_confusion(figures["labels"], figures["confusion"]))
        if figures.get("reliability_need"):
            parts.append(_reliability(figures["reliability_need"]))
    return "\n".join(parts) + "\n"


def _table(figures: Mapping[str, Any]) -> str:
    rows = []
    for name, value in figures.items():
        if name in ("confusion", "labels", "reliability_need"):
            continue
        if isinstance(value, Mapping) and "share" not in value:
            rows += [(f"{name} {key}", _text(inner)) for key, inner in value.items()]
        else:
            rows.append((name, _text(value)))
    cells = "".join(f"<tr><td>{html.escape(a)}</td><td>{html.escape(b)}</td></tr>" for a, b in rows)
    return f"<table>{cells}</table>"


def _text(value: Any) -> str:
    if isinstance(value, Mapping) and "share" in value:
        if value["share"] is None:
            return "no items"
        exact = f"; exact {value['exact_low']:.3f} to {value['exact_high']:.3f}" if "exact_low" in value else ""
        return f"{value['share']:.3f} ({value['k']} of {value['n']}; {value['low']:.3f} to {value['high']:.3f}{exact})"
    return "none" if value is None else str(value)


def _confusion(labels: Sequence[str], table: Sequence[Sequence[int]]) -> str:
    head = "".join(f"<th>{html.escape(label)}</th>" for label in labels)
    rows = []
    for label, row in zip(labels, table, strict=True):
        most = max(sum(row), 1)
        cells = "".join(
            f'<td style="background:color-mix(in srgb,var(--ink) {round(70 * n / most)}%,transparent)">{n}</td>'
            for n in row
        )
        rows.append(f"<tr><th>{html.escape(label)}</th>{cells}</tr>")
    return f"<table><tr><th>right \\ judged</th>{head}</tr>{''.join(rows)}</table>"


def _reliability(bins: Sequence[Mapping[str, float]]) -> str:
    size, pad = 260, 34

    def at(p: float) -> float:
        return pad + p * size

    def down(p: float) -> float:
        return pad + (1 - p) * size

    most = max(one["n"] for one in bins)
    dots = "".join(
        f'<circle cx="{at(one["p"]):.1f}" cy="{down(one["observed"]):.1f}" r="{3 + 7 * (one["n"] / most) ** 0.5:.1f}" '
        f'fill="var(--ink)" fill-opacity=".6"><title>{one["n"]:.0f} items</title></circle>'
        for one in bins
    )
    ticks = "".join(
        f'<text x="{at(p):.0f}" y="{pad + size + 16}" text-anchor="middle">{p:g}</text>'
        f'<text x="{pad - 6}" y="{down(p) + 4:.0f}" text-anchor="end">{p:g}</text>'
        for p in (0.0, 0.5, 1.0)
    )
    total = 2 * pad + size
    return (
        f'<svg viewBox="0 0 {total} {total + 12}" width="{total}" font-size="11" fill="currentColor" role="img" '
        f'aria-label="reliability of p(need)"><rect x="{pad}" y="{pad}" width="{size}" height="{size}" fill="none" '
        f'stroke="var(--line)"/><line x1="{at(0)}" y1="{down(0)}" x2="{at(1)}" y2="{down(1)}" stroke="var(--line)"/>'
        f'{dots}{ticks}<text x="{pad + size / 2}" y="{total + 6}" text-anchor="middle">p(need), and how often it was '
        "needed</text></svg>"
    )
