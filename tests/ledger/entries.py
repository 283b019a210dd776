"""Entries for tests: one default, changed by keyword."""

from __future__ import annotations

import time
from typing import Any

from whetherman_edge.ledger.entry import Entry

_DEFAULT: dict[str, Any] = {
    "at_s": 0.0,
    "session": 11,
    "agent": "m",
    "profile": "",
    "mode": "shadow",
    "decision": "ANSWER",
    "verdict": "ANSWER",
    "applied": False,
    "reason": "scored",
    "confidence": 0.97,
    "p_need": 0.01,
    "engine": "static",
    "tool": "search",
    "plan": "",
    "last_role": "user",
    "tools": 3,
    "messages": 2,
    "repeats": 0,
    "stream": False,
    "request_bytes": 4000,
    "tokens_withheld": 0,
    "calls": 0,
    "status": 200,
    "fault": "",
    "gate_ms": 0.1,
    "total_ms": 1000.0,
    "text": "",
    "cause": "scored",
}


def entry(**keys: Any) -> Entry:
    """A shadow ANSWER of now."""
    return Entry(**{**_DEFAULT, "at_s": time.time(), **keys})
