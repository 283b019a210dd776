"""READ FIRST. One request, bytes in to bytes out, one line a stage; see ``Exchange.chat``.

Whatever fails between the client's bytes and the upstream, the client's own bytes go out. Errors that reach the client
are the upstream's own, passed on, or one of ours with ``"src": "whetherman-edge"``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterable, Callable

from whetherman_edge.dialects.dialect import Dialect
from whetherman_edge.dialects.registry import OPENAI_CHAT
from whetherman_edge.errors import UpstreamMissing, UpstreamReset
from whetherman_edge.gate import policy
from whetherman_edge.ledger.counters import Counters
from whetherman_edge.proxy.gating import Gating, Pending, Ruling
from whetherman_edge.proxy.persuasion import Answer, Persuasion
from whetherman_edge.proxy.recording import Recorder
from whetherman_edge.proxy.relay import BodyStream, Reply, forwardable, read_body, relay
from whetherman_edge.proxy.repairs import Repairs
from whetherman_edge.proxy.request import Request
from whetherman_edge.proxy.tally import Tally
from whetherman_edge.proxy.upstream import Headers, Upstream, UpstreamResponse

log = logging.getLogger(__name__)

# Bodies up to this are read before they are sent, so that a stale keep-alive socket costs one retry and no error;
# larger ones (Ollama blob uploads are gigabytes) stream through and use a fresh connection.
WHOLE_BODY_BYTES_MAX = 1 << 20

# Request headers that ask for a response we cannot read, or that describe a body which is no longer the one sent.
_ENCODED = (b"accept-encoding", b"if-none-match")
_EDITED = (b"content-encoding", b"content-md5", b"digest", b"content-digest")

Body = bytes | AsyncIterable[bytes]


class _Judging:
    """The gate's work on one request, which may begin before the request is sent or while it is answered."""

    __slots__ = ("_begun", "_judge", "_waiting")

    def __init__(self, judge: Callable[[], Ruling | Pending]) -> None:
        self._judge = judge
        self._begun: Ruling | Pending | None = None
        self._waiting: asyncio.Future[Ruling] | None = None

    def start(self) -> Ruling | Pending:
        """Judge as far as that needs no waiting."""
        if self._begun is None:
            self._begun = self._judge()
        return self._begun

    def begin(self) -> None:
        """Judge, and let what needs waiting run."""
        begun = self.start()
        if isinstance(begun, Pending) and self._waiting is None:
            self._waiting = asyncio.ensure_future(begun.ruling())

    async def ruling(self) -> Ruling:
        """The ruling, once it is there."""
        self.begin()
        if self._waiting is not None:
            return await self._waiting
        begun = self.start()
        assert isinstance(begun, Ruling)
        return begun

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        if self._waiting is not None:
            self._waiting.cancel()


class Exchange:
    """Relays and gates requests to one upstream.

    A dialect (``dialects.dialect``) says how a request is read and edited, and how its reply is read.

    ``gate_body_bytes_max`` and ``body_bytes_max``: what the gate reads, and what gated paths accept at all.
    """

    def __init__(
        self,
        upstream: Upstream,
        counters: Counters,
        gating: Gating,
        *,
        gate_body_bytes_max: int,
        body_bytes_max: int,
        api_key: str = "",
        upstream_api_key: str = "",
        recorder: Recorder | None = None,
        strip_unsupported: bool = False,
        map_developer: bool = False,
    ) -> None:
        self._upstream = upstream
        self._counters = counters
        self._gating = gating
        self._persuasion = Persuasion(self.send, gating, counters)
        self._repairs = Repairs(
            self.send, gating, counters, strip_unsupported=strip_unsupported, map_developer=map_developer
        )
        self._gate_body_bytes_max = min(gate_body_bytes_max, body_bytes_max)
        self._body_bytes_max = body_bytes_max
        self._api_key = api_key
        self._upstream_api_key = upstream_api_key
        self._recorder = recorder

    async def chat(self, request: Request, reply: Reply, dialect: Dialect = OPENAI_CHAT) -> Reply:
        """One chat request, in whatever dialect."""
        started_s = time.perf_counter()
        body = await self._receive(request)  # bytes, or what is too large for the gate, as a stream
        if not isinstance(body, bytes):
            return await self._large(request, reply, body, dialect, started_s)
        body = self._repairs.roles(request, body, dialect)  # the same bytes, unless map_developer is on
        judging = _Judging(lambda: self._gating.begin(request.headers, body, dialect))  # view, judge, decide, plan
        if self._gating.leaves_alone(request.headers):
            return await self._alongside(request, reply, body, judging, dialect, started_s)
        begun = judging.start()
        if isinstance(begun, Pending) and not begun.may_apply:
            return await self._alongside(request, reply, body, judging, dialect, started_s)
        ruling = await begun.ruling() if isinstance(begun, Pending) else begun
        sent, ruling = self._gating.edit(body, ruling)  # the body itself, unless the ruling is applied
        try:
            answer = await self._persuasion.ask(request, body, sent, ruling, dialect)  # send; again if a call leaked
            answer = await self._repairs.without_tools(request, answer, dialect)  # only with strip_unsupported
        except UpstreamMissing as exc:
            reply.extra += ruling.headers()
            return await self.fault(reply, exc)
        reply.extra += answer.ruling.headers()
        fault = await self._pass_on(answer.response, reply, answer.held, answer.tally)  # chunk by chunk, as it comes
        self._conclude(answer, reply, fault, started_s)  # back-off, counters, ledger, the one log line
        return reply

    async def _alongside(
        self, request: Request, reply: Reply, body: bytes, judging: _Judging, dialect: Dialect, started_s: float
    ) -> Reply:
        """A request that goes out as it came: the model starts at once, it is judged meanwhile."""
        try:
            response = await self.send(request, body, meanwhile=judging.begin)
        except UpstreamMissing as exc:
            reply.extra += (await judging.ruling()).headers()
            return await self.fault(reply, exc)
        except BaseException:
            judging.cancel()
            raise
        try:
            answer = Answer(response, await judging.ruling(), dialect=dialect)
            answer = await self._repairs.without_tools(request, answer, dialect)
        except UpstreamMissing as exc:
            reply.extra += (await judging.ruling()).headers()
            return await self.fault(reply, exc)
        except BaseException:
            response.abort()
            raise
        reply.extra += answer.ruling.headers()
        fault = await self._pass_on(answer.response, reply, answer.held, answer.tally)
        self._conclude(answer, reply, fault, started_s)
        return reply

    async def relay(self, request: Request, reply: Reply) -> Reply:
        """Relay a request that is none of the gate's business: any method, path, query and body."""
        body: Body
        length = request.content_length
        if not request.has_body:
            body = b""
        elif length is not None and length <= WHOLE_BODY_BYTES_MAX:
            answer_expect(request)
            body, _ = await read_body(request, WHOLE_BODY_BYTES_MAX)
        else:
            answer_expect(request)
            body = BodyStream(request)
        try:
            response = await self.send(request, body)
        except UpstreamMissing as exc:
            return await self.fault(reply, exc)
        return await self.pass_on(response, reply)

    async def send(
        self,
        request: Request,
        body: Body,
        *,
        encoded: bool = True,
        edited: bool = False,
        meanwhile: Callable[[], None] | None = None,
    ) -> UpstreamResponse:
        """Send the client's request with a given body. Raises UpstreamMissing.

        ``encoded`` False: the response must come without a content coding, because we read it. ``edited``: the body is
        not the client's own, so a content coding of the original is not one of this. ``meanwhile``: as in
        ``Upstream.send``.
        """
        length = len(body) if isinstance(body, bytes) else None
        headers = forwardable(request.raw_headers, length, self._api_key)
        if not encoded or edited:
            dropped = _ENCODED * (not encoded) + _EDITED * edited
            headers = [(name, value) for name, value in headers if name.lower() not in dropped]
        if self._upstream_api_key:
            _add_key(headers, self._upstream_api_key)
        chunked = length is None and request.content_length is None
        return await self._upstream.send(
            request.method, request.target, headers, body, chunked=chunked, meanwhile=meanwhile
        )

    async def pass_on(self, response: UpstreamResponse, reply: Reply, held: bytes = b"") -> Reply:
        """Relay a response, and see to it that neither side is left with half of one. ``held``: read already."""
        await self._pass_on(response, reply, held)
        return reply

    async def fault(self, reply: Reply, exc: UpstreamMissing) -> Reply:
        """502: which upstream, what happened, how to set another."""
        kind = "reset" if isinstance(exc, UpstreamReset) else "connect"
        self._counters.add("upstream_failures_total", (("kind", kind),))
        log.warning("event=upstream_%s upstream=%s detail=%r", kind, self._upstream.target.url, str(exc))
        message = (
            f"the model server did not answer: {exc}. Upstream is {self._upstream.target.url}; set another with "
            "--upstream, WHETHERMAN_UPSTREAM or the configuration key upstream"
        )
        return await reply.send_error(502, "Bad Gateway", message, "upstream_error", f"upstream_{kind}")

    async def _receive(self, request: Request) -> bytes | BodyStream:
        length = request.content_length
        if length is not None and length > self._body_bytes_max:
            stream = BodyStream(request, bytes_max=self._body_bytes_max)
            stream.too_large = True
            return stream
        answer_expect(request)
        body, whole = await read_body(request, self._gate_body_bytes_max)
        return body if whole else BodyStream(request, body, self._body_bytes_max)

    async def _large(
        self, request: Request, reply: Reply, body: BodyStream, dialect: Dialect, started_s: float
    ) -> Reply:
        """A body over the gate's limit streams through ungated; one over the hard cap is refused (field case S09)."""
        ruling = Ruling(decision=policy.unscored("bypass:oversize"), mode="off", ms=0.0)
        reply.extra += ruling.headers()
        try:
            if body.too_large:
                return await self._refuse(reply)
            response = await self.send(request, body)
        except UpstreamMissing as exc:
            return await (self._refuse(reply) if body.too_large else self.fault(reply, exc))
        fault = await self._pass_on(response, reply)
        self._conclude(Answer(response, ruling, dialect=dialect), reply, fault, started_s)
        return reply

    async def _refuse(self, reply: Reply) -> Reply:
        """413. The rest of the body is read and dropped after it, so that the client sees an answer and no reset."""
        reply.keep_alive = False
        message = (
            f"the request body is larger than {self._body_bytes_max} bytes; raise body_bytes_max in the configuration "
            "or WHETHERMAN_BODY_BYTES_MAX if the model server takes more"
        )
        return await reply.send_error(
            413, "Request Entity Too Large", message, "invalid_request_error", "request_too_large"
        )

    async def _pass_on(
        self, response: UpstreamResponse, reply: Reply, held: bytes = b"", tally: Tally | None = None
    ) -> str:
        """Relay; returns the fault ("" for none)."""
        try:
            await relay(response, reply, held, tally)
        except UpstreamReset as exc:
            self._counters.add("upstream_failures_total", (("kind", "reset"),))
            log.warning("event=upstream_reset status=%d detail=%r", response.status, str(exc))
            reply.abort()
            return "upstream_reset"
        finally:
            response.abort()  # no effect once released
        return ""

    def _conclude(self, answer: Answer, reply: Reply, fault: str, started_s: float) -> None:
        """Count and log the committed decision, once."""
        ruling, decision = answer.ruling, answer.ruling.decision
        calls = answer.tally.end() if answer.tally is not None else 0
        if not fault and reply.status < 400:  # an error says nothing about how the model takes it
            self._gating.learn(ruling, calls)
        self._counters.gate_ms(ruling.ms)
        applied = "yes" if ruling.applied else "no"
        labels = (("kind", "chat"), ("decision", decision.label), ("applied", applied), ("reason", decision.reason))
        self._counters.add("requests_total", labels)
        if decision.reason == "backed_off":
            self._counters.add("backed_off_total", (("cause", decision.cause),))
        if answer.tally is not None and not fault and reply.status == 200:
            called = "yes" if calls else "no"
            self._counters.add(
                "outcomes_total", (("decision", decision.label), ("applied", applied), ("called", called))
            )
        total_ms = (time.perf_counter() - started_s) * 1e3
        if self._recorder is not None:
            self._recorder(
                ruling,
                calls=calls if answer.tally is not None and not fault else -1,
                status=reply.status,
                fault=fault,
                total_ms=total_ms,
                tokens_withheld=answer.tokens_withheld,
            )
        if not log.isEnabledFor(logging.INFO):
            return
        chat, plan = ruling.chat, ruling.plan
        log.info(
            "event=chat decision=%s applied=%s reason=%s mode=%s verdict=%s confidence=%.3f p_need=%.3f engine=%s "
            "gate_ms=%.3f total_ms=%.1f status=%d calls=%d tools=%d messages=%d stream=%s plan=%s repeats=%d "
            "tokens_withheld=%d profile=%s fault=%s",
            decision.label,
            applied,
            decision.reason,
            ruling.mode,
            decision.verdict,
            decision.confidence,
            decision.p_need,
            decision.engine,
            ruling.ms,
            total_ms,
            reply.status,
            calls,
            len(chat.tools) if chat else 0,
            len(chat.messages) if chat else 0,
            "yes" if chat and chat.stream else "no",
            plan.mode if plan else "-",
            ruling.repeats,
            answer.tokens_withheld,
            ruling.profile if decision.reason != "profile_unknown" and ruling.profile else "-",
            fault or "-",
        )


def answer_expect(request: Request) -> None:
    """Send 100 Continue to a client that waits for it before it sends the body (RFC 9110 section 10.1.1)."""
    if request.headers.get("expect", "").lower() == "100-continue" and request.version >= (1, 1):
        request.connection.proceed()


def _add_key(headers: Headers, key: str) -> None:
    if not any(name.lower() in (b"authorization", b"x-api-key") for name, _ in headers):
        headers.append((b"Authorization", b"Bearer " + key.encode("utf-8")))
