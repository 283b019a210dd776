"""What the page and ``replay`` read from the ledger: counts by day, agents, rows, and what was saved, with its method.

Savings are measured against the requests that went out as they came although the gate would have withheld (shadow),
never against the assumption that every withheld request would have called a tool.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from whetherman_edge.ledger.records import ADDED, COLUMNS, missing_columns

# Below this many shadow requests of a decision its calling rate is anybody's guess (a 95 % interval of +-0.2 and more).
SHADOW_MIN = 20
BYTES_PER_TOKEN = 4
ROWS_MAX = 500
DAYS_MAX = 90
READ_TIMEOUT_S = 1.0
# A call that comes this soon after an applied decision, in the same dialogue, speaks against that decision.
SOON_S = 300.0

METHOD = (
    "Calls avoided: for each decision, requests withheld x the share of shadow requests with the same decision whose "
    "model called a tool, less the calls made all the same. Shadow requests went out unchanged, in shadow mode or by "
    "lot (shadow_share), so they show what the model does without the gate; below "
    f"{SHADOW_MIN} of them nothing is claimed. Seconds: the difference of the mean "
    "times of shadow and withheld requests, plus, for each avoided call, the mean time of a request that follows a "
    "tool result. Tokens: prompt tokens of tools that were not sent, plus, for each avoided call, the mean prompt of "
    f"such a follow-up request; {BYTES_PER_TOKEN} bytes a token. The time of the tool itself is not counted."
)

FILTERS = frozenset({"agent", "profile", "decision", "reason", "mode", "engine"})


@contextlib.contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection | None]:
    """A read-only connection, or None while there is no ledger. Raises sqlite3.Error when it cannot be read."""
    if not path.is_file():
        yield None
        return
    db = sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=READ_TIMEOUT_S)
    try:
        db.row_factory = sqlite3.Row
        made = db.execute("SELECT 1 FROM sqlite_master WHERE name = 'decisions'").fetchone()
        if made is None:  # the writer makes the file first, then the table
            yield None
            return
        if missing := missing_columns(db):  # of before, and not written since: seen as it will be
            added = ", ".join(f"{ADDED[name]} AS {name}" for name in missing)
            db.execute(f"CREATE TEMP VIEW decisions AS SELECT *, {added} FROM main.decisions")
        yield db
    finally:
        db.close()


def summary(path: Path, days: int = 14, now_s: float | None = None) -> dict[str, Any]:
    """Everything of the page but the rows, for the last ``days`` days."""
    now_s = time.time() if now_s is None else now_s
    since_s = now_s - min(max(days, 1), DAYS_MAX) * 86_400.0
    with reading(path) as db:
        if db is None:
            return {"rows": 0, "hour": _counts([]), "per_day": [], "agents": [], "reasons": [], "savings": _nothing()}
        per_day = db.execute(
            "SELECT date(at_s, 'unixepoch', 'localtime') AS day, decision, count(*) AS n, sum(applied) AS applied "
            "FROM decisions WHERE at_s >= ? GROUP BY day, decision ORDER BY day",
            (since_s,),
        ).fetchall()
        hour = db.execute(
            "SELECT decision, count(*) AS n, sum(applied) AS applied FROM decisions WHERE at_s >= ? GROUP BY decision",
            (now_s - 3_600.0,),
        ).fetchall()
        reasons = db.execute(
            "SELECT reason, count(*) AS n FROM decisions WHERE at_s >= ? GROUP BY reason ORDER BY n DESC LIMIT 20",
            (since_s,),
        ).fetchall()
        return {
            "rows": db.execute("SELECT count(*) FROM decisions").fetchone()[0],
            "hour": _counts(hour),
            "per_day": _by_day(per_day),
            "agents": _agents(db, since_s),
            "reasons": [dict(row) for row in reasons],
            "savings": savings(db, since_s),
        }


def rows(path: Path, *, limit: int = 100, before: int = 0, where: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """The newest rows first, each marked ``suspect`` where what followed speaks against it. ``before``: an id."""
    clauses, values = ["1=1"], list[Any]()
    for name, value in (where or {}).items():
        if name in FILTERS:
            clauses.append(f"{name} = ?")
            values.append(value)
        elif name == "applied":
            clauses.append("applied = ?")
            values.append(int(value == "yes"))
    if before > 0:
        clauses.append("id < ?")
        values.append(before)
    values.append(min(max(limit, 1), ROWS_MAX))
    with reading(path) as db:
        if db is None:
            return []
        found = db.execute(
            f"SELECT id, {', '.join(COLUMNS)} FROM decisions WHERE {' AND '.join(clauses)} ORDER BY id DESC LIMIT ?",
            values,
        ).fetchall()
        return marked([dict(row) for row in found], _following(db, found))


def _following(db: sqlite3.Connection, found: Sequence[sqlite3.Row]) -> dict[int, sqlite3.Row]:
    """By id, what came next in the dialogue of each applied decision, whether or not it is among those found."""
    asked = [row for row in found if row["applied"] and row["session"]]
    if not asked:
        return {}
    first, last_s = min(row["id"] for row in asked), max(row["at_s"] for row in asked)
    return {
        row["id"]: row
        for row in db.execute(
            f"WITH asked AS (SELECT id, session FROM decisions WHERE id IN ({', '.join('?' * len(asked))})) "
            "SELECT * FROM (SELECT id, lead(at_s) OVER dialogue AS at_s, lead(calls) OVER dialogue AS calls, "
            "lead(last_role) OVER dialogue AS last_role FROM decisions "
            # The plus keeps SQLite from going by time where the ids are a much shorter way.
            "WHERE id >= ? AND +at_s <= ? AND session IN (SELECT session FROM asked) "
            "WINDOW dialogue AS (PARTITION BY session ORDER BY id)) "
            "WHERE id IN (SELECT id FROM asked) AND at_s IS NOT NULL",
            [*(row["id"] for row in asked), first, last_s + SOON_S],
        )
    }


def marked(found: list[dict[str, Any]], following: Mapping[int, sqlite3.Row]) -> list[dict[str, Any]]:
    """Add ``suspect`` (why a decision was likely a false skip, or ""). ``following``: see ``_following``."""
    for row in found:
        row["suspect"] = _suspect(row, following.get(row["id"]))
        row["session"] = f"{row['session'] & 0xFFFF_FFFF_FFFF:012x}" if row["session"] else ""
        row["applied"] = bool(row["applied"])
        row["stream"] = bool(row["stream"])
    return found


def _suspect(row: dict[str, Any], following: sqlite3.Row | None) -> str:
    if row["reason"] == "leaked_call":
        return "the model wrote a call although the tools were withheld"
    if row["applied"] and row["calls"] > 0:
        return "the model called all the same"
    soon = following is not None and following["at_s"] - row["at_s"] <= SOON_S
    if row["applied"] and soon and following is not None and following["last_role"] == "user":
        if following["calls"] > 0:
            return "the next turn of the same dialogue called a tool"
    elif not row["applied"] and row["mode"] == "shadow" and row["decision"] != "ACT" and row["calls"] > 0:
        return "in shadow: would have withheld, and the model called"
    return ""


def savings(db: sqlite3.Connection, since_s: float) -> dict[str, Any]:
    """Calls, tokens and seconds saved since ``since_s``; see METHOD. Never below zero calls, seconds may be."""
    groups = {
        (row["decision"], bool(row["withheld"])): row
        for row in db.execute(
            "SELECT decision, mode != 'shadow' AS withheld, count(*) AS n, sum(calls > 0) AS called, "
            "avg(total_ms) AS ms, sum(tokens_withheld) AS tokens FROM decisions "
            "WHERE at_s >= ? AND decision != 'ACT' AND status = 200 AND calls >= 0 "
            # A request that had to be sent again counts as withheld: its call and its time are the price of trying.
            "AND (applied = 1 OR reason IN ('leaked_call', 'refused') OR mode = 'shadow') "
            "GROUP BY decision, withheld",
            (since_s,),
        )
    }
    follow = db.execute(
        "SELECT avg(total_ms) AS ms, avg(request_bytes) AS bytes FROM decisions "
        "WHERE at_s >= ? AND last_role = 'tool' AND status = 200",
        (since_s,),
    ).fetchone()
    avoided = seconds = tokens = 0.0
    basis, enough = [], False
    for decision in ("ANSWER", "ASK", "DECLINE"):
        applied, shadow = groups.get((decision, True)), groups.get((decision, False))
        n_applied, n_shadow = (applied["n"] if applied else 0), (shadow["n"] if shadow else 0)
        rate = shadow["called"] / n_shadow if shadow and n_shadow else None
        basis.append({"decision": decision, "withheld": n_applied, "shadow": n_shadow, "shadow_called": rate})
        if not applied or not shadow or rate is None or n_shadow < SHADOW_MIN:
            continue
        enough = True
        fewer = max(n_applied * rate - applied["called"], 0.0)
        avoided += fewer
        seconds += (n_applied * (shadow["ms"] - applied["ms"]) + fewer * (follow["ms"] or 0.0)) / 1e3
        tokens += applied["tokens"] + fewer * (follow["bytes"] or 0.0) / BYTES_PER_TOKEN
    return {
        "enough": enough,
        "calls": round(avoided, 1),
        "seconds": round(seconds, 1),
        "tokens": round(tokens),
        "basis": basis,
        "method": METHOD,
    }


def _nothing() -> dict[str, Any]:
    return {"enough": False, "calls": 0.0, "seconds": 0.0, "tokens": 0, "basis": [], "method": METHOD}


def _counts(found: Sequence[sqlite3.Row]) -> dict[str, int]:
    counts = {"ACT": 0, "ANSWER": 0, "ASK": 0, "DECLINE": 0, "applied": 0}
    for row in found:
        counts[row["decision"]] = row["n"]
        counts["applied"] += row["applied"]
    return counts


def _by_day(found: Sequence[sqlite3.Row]) -> list[dict[str, Any]]:
    by_day: dict[str, list[sqlite3.Row]] = {}
    for row in found:
        by_day.setdefault(row["day"], []).append(row)
    return [{"day": day, **_counts(group)} for day, group in by_day.items()]


def _agents(db: sqlite3.Connection, since_s: float) -> list[dict[str, Any]]:
    found = db.execute(
        "SELECT agent, profile, count(*) AS requests, sum(applied) AS applied, "
        "sum(decision != 'ACT' AND mode = 'shadow') AS shadowed, sum(calls > 0) AS called, "
        "sum(reason = 'leaked_call') AS leaked, sum(reason = 'backed_off') AS backed_off, "
        "sum(reason = 'leaked_call' AND cause = 'loop_guard') AS loop_guard_leaked, "
        "sum(reason = 'backed_off' AND cause = 'loop_guard') AS loop_guard_backed_off, avg(gate_ms) AS gate_ms, "
        "max(at_s) AS last_s FROM decisions WHERE at_s >= ? GROUP BY agent, profile ORDER BY requests DESC LIMIT 50",
        (since_s,),
    ).fetchall()
    return [dict(row) for row in found]
