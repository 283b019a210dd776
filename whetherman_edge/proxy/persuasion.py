"""Asking the upstream, and once more with the client's own bytes when steering it to a text did not work.

Only for requests that were steered: nothing reaches the client until it is clear that the model answers in words, or,
where a note left the tools in place, that it calls one properly. A whole reply is read, a stream is held event by
event, both up to a limit; a call in it (field case R06), or a refusal of the edited request (R13), costs one more
request and no more.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Collection
from typing import Protocol

from whetherman_edge.dialects.dialect import Dialect
from whetherman_edge.dialects.registry import OPENAI_CHAT
from whetherman_edge.dialects.system_one import Refusal
from whetherman_edge.errors import UpstreamReset
from whetherman_edge.ledger.counters import Counters
from whetherman_edge.proxy.gating import Gating, Ruling
from whetherman_edge.proxy.inflate import StreamInflater, inflate
from whetherman_edge.proxy.reply_watch import StreamWatch, judge_reply
from whetherman_edge.proxy.request import Request
from whetherman_edge.proxy.tally import Tally
from whetherman_edge.proxy.tool_refusal import read_refusal
from whetherman_edge.proxy.upstream import UpstreamResponse

log = logging.getLogger(__name__)

# Statuses that say nothing about the edit: authentication, rate, routing and load (529 is Anthropic's) are the
# original's problem too.
_NOT_ABOUT_THE_EDIT = frozenset({401, 402, 403, 404, 407, 408, 413, 429, 502, 503, 504, 529})
# A reply that is longer than this before anything looks like a call is an answer.
HELD_BYTES_MAX = 1 << 20
# Rough bytes a token of JSON schema text, for the estimate of what was not sent.
BYTES_PER_TOKEN = 4


class Answer:
    """What came back: the response, the ruling that stands, body bytes read already, and what was seen in passing."""

    __slots__ = ("held", "response", "ruling", "tally", "tokens_withheld")

    def __init__(
        self, response: UpstreamResponse, ruling: Ruling, held: bytes = b"", dialect: Dialect = OPENAI_CHAT
    ) -> None:
        self.response = response
        self.ruling = ruling
        self.held = held
        self.tokens_withheld = 0
        self.tally: Tally | None = None
        if not _coding(response):
            self.tally = Tally(dialect, stream=_is_stream(response, dialect))


class Send(Protocol):
    """``Exchange.send``."""

    def __call__(
        self, request: Request, body: bytes, *, encoded: bool = True, edited: bool = False
    ) -> Awaitable[UpstreamResponse]: ...


class Persuasion:
    """Sends a ruled request and sees to it that the client gets an answer that the original could have had."""

    def __init__(self, send: Send, gating: Gating, counters: Counters) -> None:
        self._send = send
        self._gating = gating
        self._counters = counters

    async def ask(
        self, request: Request, body: bytes, sent: bytes, ruling: Ruling, dialect: Dialect = OPENAI_CHAT
    ) -> Answer:
        """Send ``sent``; ``body``: the client's own bytes. Raises UpstreamMissing."""
        plan = ruling.plan
        if plan is None:
            return Answer(await self._send(request, body), ruling, dialect=dialect)
        if ruling.decision.reason == "tools_unsupported":  # not steered: with its tools it would be refused
            return Answer(await self._send(request, sent, edited=True), ruling, dialect=dialect)
        steered = plan.withholds or bool(plan.sentence)
        try:
            response = await self._send(request, sent, encoded=not steered, edited=True)
        except UpstreamReset as exc:
            if isinstance(exc.__cause__, TimeoutError):  # it may be computing
                raise
            self._counters.add("resent_total", (("cause", "reset"),))
            return Answer(await self._send(request, body), ruling.reopened("refused"), dialect=dialect)
        held = b""
        if response.status >= 400 and self._gating.strips_unsupported:
            held, bare = await self._without_tools(request, response, ruling, dialect)
            if bare is not None:
                return bare
        if response.status >= 400 and response.status not in _NOT_ABOUT_THE_EDIT:
            response.abort()
            self._counters.add("resent_total", (("cause", "refused"),))
            response = await self._send(request, body)
            # What the original is refused too (its context is too long, say) was not about the edit.
            ruling = self._gating.refused(ruling) if response.status < 400 else ruling.reopened("refused")
            return Answer(response, ruling, dialect=dialect)
        if not steered or response.status != 200:
            return self._steered(Answer(response, ruling, held, dialect), body, sent)
        try:
            held, leaked = await _hold(response, ruling.tool_names(), dialect, calls_leak=plan.withholds)
        except BaseException:
            response.abort()
            raise
        if leaked:
            response.abort()
            self._counters.add("resent_total", (("cause", "leaked_call"),))
            return Answer(await self._send(request, body), self._gating.leaked(ruling), dialect=dialect)
        return self._steered(Answer(response, ruling, held, dialect), body, sent)

    async def _without_tools(
        self, request: Request, response: UpstreamResponse, ruling: Ruling, dialect: Dialect
    ) -> tuple[bytes, Answer | None]:
        """What was read of an error, and the answer without tools where it says that the model takes none.

        That is no refusal of the edit, and the client's own bytes would be refused as well. Raises UpstreamMissing.
        """
        try:
            held, takes_none = await read_refusal(response)
            if not takes_none:
                return held, None
            sent, bare = self._gating.without_tools(ruling)
            if not bare.applied:
                return held, None
            response.release()
            self._counters.add("resent_total", (("cause", "tools_unsupported"),))
            log.warning("event=tools_unsupported hint=requests_for_this_model_go_out_without_tools")
            return held, Answer(await self._send(request, sent, edited=True), bare, dialect=dialect)
        except BaseException:
            response.abort()
            raise

    def _steered(self, answer: Answer, body: bytes, sent: bytes) -> Answer:
        """Estimate the prompt tokens that were not sent (field case D03)."""
        answer.tokens_withheld = max(0, len(body) - len(sent)) // BYTES_PER_TOKEN
        if answer.tokens_withheld:
            self._counters.add("prompt_tokens_withheld_total", (), answer.tokens_withheld)
        return answer


async def _hold(
    response: UpstreamResponse, offered: Collection[str], dialect: Dialect, *, calls_leak: bool
) -> tuple[bytes, bool]:
    """Read until it is clear whether the model calls; returns what was read, and whether it is a call.

    A reply is asked for without a content coding; one that has it all the same is unpacked beside.
    """
    coding = _coding(response)
    if not _is_stream(response, dialect):
        held, complete = await response.read(HELD_BYTES_MAX)
        try:
            plain = inflate(held, coding, HELD_BYTES_MAX) if complete else b""
        except Refusal:
            return held, False  # nothing can be told
        try:
            return held, judge_reply(plain, offered, dialect, calls_leak=calls_leak) == "LEAK"
        except Exception:
            log.exception("event=reply_watch_failed")
            return held, False
    unpacked = StreamInflater(coding, HELD_BYTES_MAX)
    if not unpacked.readable:
        return b"", False
    watch = StreamWatch(offered, dialect, calls_leak=calls_leak)
    parts: list[bytes] = []
    while True:
        chunk = await response.chunk()
        parts.append(chunk)
        plain_chunk = unpacked.feed(chunk)
        if plain_chunk is None:
            return b"".join(parts), False
        try:
            state = watch.feed(plain_chunk) if chunk else watch.close()
        except Exception:
            log.exception("event=reply_watch_failed")
            return b"".join(parts), False
        if state != "HOLD":
            return b"".join(parts), state == "LEAK"


def _coding(response: UpstreamResponse) -> str:
    """The content coding, "" for none."""
    name = (response.header(b"content-encoding") or b"").strip().lower().decode("latin-1")
    return "" if name == "identity" else name


def _is_stream(response: UpstreamResponse, dialect: Dialect) -> bool:
    content_type = response.header(b"content-type") or b""
    return content_type.lower().startswith(dialect.stream_type)
