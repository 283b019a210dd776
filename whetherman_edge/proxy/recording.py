"""Turns a concluded request into the ledger's entry. On the request's way, so it only picks fields: no text is copied.

``text``: whether the start of the last user message is kept (``ledger = "text"``, which the user has to ask for).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from whetherman_edge.ledger.entry import Entry
from whetherman_edge.proxy.gating import Ruling
from whetherman_edge.proxy.sessions import key_of

Record = Callable[[Entry], None]

# Names come from requests and models; a row stays small whatever they send.
NAME_CHARS_MAX = 120
TEXT_CHARS_MAX = 300


class Recorder:
    """Makes an Entry of what ``Exchange`` knows at the end of a request, and hands it on."""

    __slots__ = ("_record", "_text")

    def __init__(self, record: Record, *, text: bool = False) -> None:
        self._record = record
        self._text = text

    def __call__(
        self,
        ruling: Ruling,
        *,
        calls: int,
        status: int,
        fault: str,
        total_ms: float,
        tokens_withheld: int,
    ) -> None:
        """Record one request. ``calls``: -1 where the reply was not counted."""
        decision, chat = ruling.decision, ruling.chat
        messages = chat.messages if chat is not None else ()
        profile = ruling.profile if decision.reason != "profile_unknown" else ""
        entry = Entry(
            time.time(),
            # Python salts the hashes of strings anew in each process, so this tells nothing of the text.
            hash(key_of(chat, ruling.session_id)) if chat is not None else 0,
            chat.model[:NAME_CHARS_MAX] if chat is not None else "",
            profile[:NAME_CHARS_MAX],
            ruling.mode,
            decision.label,
            decision.verdict,
            ruling.applied,
            decision.reason,
            decision.confidence,
            decision.p_need,
            decision.engine,
            decision.tool[:NAME_CHARS_MAX],
            ruling.plan.mode if ruling.plan is not None else "",
            messages[-1].role if messages else "",
            len(chat.tools) if chat is not None else 0,
            len(messages),
            ruling.repeats,
            chat.stream if chat is not None else False,
            len(ruling.plain),
            tokens_withheld,
            calls,
            status,
            fault,
            ruling.ms,
            total_ms,
            _last_user_text(ruling) if self._text else "",
            decision.cause,
        )
        self._record(entry)


def _last_user_text(ruling: Ruling) -> str:
    messages = ruling.chat.messages if ruling.chat is not None else ()
    return next((one.text[:TEXT_CHARS_MAX] for one in reversed(messages) if one.role == "user"), "")
