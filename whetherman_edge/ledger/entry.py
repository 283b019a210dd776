"""One row of the ledger: what was decided about one request, and what the model then did. No text of it."""

from __future__ import annotations

import msgspec


class Entry(msgspec.Struct, frozen=True, gc=False):
    """The field order is the column order of the table.

    ``at_s``: Unix time at the end of the request. ``session``: a salted hash of the dialogue's key, 0 where unknown.
    ``applied``: the request was changed, and stayed so. ``calls``: tool calls of the reply, -1 where they could not be
    counted. ``last_role``: role of the last message, "tool" on a later step of an agent. ``request_bytes``: size of the
    request. ``tokens_withheld``: estimated prompt tokens of tools that were not sent. ``agent``: the model's name.
    ``text``: start of the last user message, only with ``ledger = "text"``. ``cause``: what withheld, or would have but
    for a guard or its back-off (scored, loop_guard), or "".
    """

    at_s: float
    session: int
    agent: str
    profile: str
    mode: str
    decision: str
    verdict: str
    applied: bool
    reason: str
    confidence: float
    p_need: float
    engine: str
    tool: str
    plan: str
    last_role: str
    tools: int
    messages: int
    repeats: int
    stream: bool
    request_bytes: int
    tokens_withheld: int
    calls: int
    status: int
    fault: str
    gate_ms: float
    total_ms: float
    text: str = ""
    cause: str = ""
