"""Recorded decisions as one HTML file that needs nothing else: the live page with its data inside.

Works from ``file://``; its Content-Security-Policy allows the two inline parts by their hashes and nothing more.
"""

from __future__ import annotations

import base64
import hashlib
import time
from importlib import resources
from pathlib import Path

import msgspec

from whetherman_edge.ledger import queries

# A browser shows this many rows without trouble.
REPLAY_ROWS_MAX = 5_000


def render(path: Path, *, limit: int = REPLAY_ROWS_MAX, days: int = queries.DAYS_MAX) -> bytes:
    """The HTML. Raises sqlite3.Error when the ledger cannot be read."""
    rows: list[dict[str, object]] = []
    before = 0
    while len(rows) < limit:
        batch = queries.rows(path, limit=min(limit - len(rows), queries.ROWS_MAX), before=before)
        if not batch:
            break
        rows += batch
        before = int(batch[-1]["id"])
    data = {**queries.summary(path, days), "rows_list": rows, "recording": False, "dropped": {}}
    folder = resources.files("whetherman_edge.ledger") / "page"
    html, style, script = ((folder / name).read_text("utf-8") for name in ("page.html", "page.css", "page.js"))
    policy = f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'"
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>'
    # JSON inside HTML: "<" is the only character that could end the element, and \u003c means the same in JSON.
    json = msgspec.json.encode(data).decode("utf-8").replace("<", "\\u003c")
    inside = f'<script id="recorded" type="application/json">{json}</script>\n<script>{script}</script>'
    title = f"Whetherman Edge, {time.strftime('%Y-%m-%d %H:%M')}"
    return (
        html.replace('<link rel="stylesheet" href="page.css">', head)
        .replace("<title>Whetherman Edge</title>", f"<title>{title}</title>")
        .replace("Last hour", "Last hour before this file")
        .replace("Saved in 14 days", "Saved")
        .replace('<script src="page.js"></script>', inside)
        .encode("utf-8")
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}'"
