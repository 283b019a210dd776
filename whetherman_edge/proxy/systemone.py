"""``POST /v1/systemone``: typed decisions over HTTP. The contract is in dialects/system_one, the engine behind a Judge.

body     = inflate(read_body(client))               # proxy.inflate
asked    = system_one.parse(body)                   # dialects
answers  = judge, question by question              # router.typed_questions, or the gate for its own labels
response = system_one_answer.serialize(answers)
"""

from __future__ import annotations

import asyncio
import http
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import msgspec

from whetherman_edge.dialects import system_one, system_one_answer
from whetherman_edge.dialects.system_one import Choice, Question, Refusal, State
from whetherman_edge.dialects.system_one_answer import Judge, Judgement
from whetherman_edge.errors import EnvironmentFault, RequestError, UpstreamMissing, ViewError
from whetherman_edge.gate.verdict import LABELS, Verdict, check_verdict
from whetherman_edge.ledger.counters import Counters
from whetherman_edge.proxy.exchange import Exchange, answer_expect
from whetherman_edge.proxy.inflate import inflate
from whetherman_edge.proxy.relay import Reply, read_body
from whetherman_edge.proxy.request import Request
from whetherman_edge.proxy.upstream import Headers

log = logging.getLogger(__name__)

PATH = "/v1/systemone"

LOOP_HELD_S_MAX = 0.001
"""After this long without a pause the other requests of the loop get their turn, between two portions of work."""

RERANK_BELOW = 0.8
"""Choices whose confidence is lower are offered to the backbone, where there is one."""

# The upstream has no such path: 404 and 405 by the book, 501 from minimal servers.
_NOT_SERVED = frozenset({404, 405, 501})

GateJudge = Callable[[bytes], Awaitable[Verdict]]
"""The gate's verdict on an OpenAI chat body. Raises ViewError when the body is none, EnvironmentFault or TimeoutError
when there is no verdict to be had."""


class Rerank(Protocol):
    """The seam for a second, slower opinion (the backbone) on choices the static router is unsure of."""

    async def __call__(self, state: State, question: Choice, judgement: Judgement) -> Judgement | None:
        """A better judgement, or None to keep the one given. Keeps its own deadline, and its errors to itself."""


class Answered(msgspec.Struct, frozen=True):
    """A whole HTTP answer."""

    status: int
    headers: Headers
    body: bytes


class SystemOne:
    """Answers System One requests. Constructed by the daemon, which chooses judge, gate and reranker.

    Without a judge (``fault`` says why: its artifact is missing or broken) every request is a 503.
    """

    def __init__(
        self,
        judge: Judge | None,
        counters: Counters,
        *,
        fault: str = "",
        gate: GateJudge | None = None,
        rerank: Rerank | None = None,
    ) -> None:
        self._judge = judge
        self._fault = fault
        self._counters = counters
        self._gate = gate
        self._rerank = rerank

    async def handle(self, request: Request, reply: Reply) -> Reply:
        """Read, answer, write."""
        body = await read_request(request, reply)
        return await self.reply(request, reply, body)

    async def reply(self, request: Request, reply: Reply, body: bytes | None) -> Reply:
        """Answer a body that was read already; None for one over the limit."""
        if body is None:
            answered = _refused(
                Refusal(413, "request_too_large", f"expected at most {system_one.BODY_BYTES_MAX} bytes")
            )
        else:
            answered = await self.respond(body, request.headers)
        self._counters.add("systemone_requests_total", (("status", f"{answered.status // 100}xx"),))
        return await reply.send(
            answered.status, http.HTTPStatus(answered.status).phrase, answered.body, answered.headers
        )

    async def respond(self, body: bytes, headers: Mapping[str, str]) -> Answered:
        """Answer one request. ``body``: as received, ``headers``: by lower-case name."""
        started_s = time.perf_counter()
        try:
            content_type = headers.get("content-type", "")
            if content_type.strip().lower().startswith("multipart/"):
                raise Refusal(
                    415,
                    "unsupported_media_type",
                    "expected application/json, got multipart/form-data: assets (images) are not supported here",
                )
            inflated = inflate(body, headers.get("content-encoding", ""), system_one.BODY_BYTES_MAX)
            asked = system_one.parse(inflated)
            if self._judge is None:
                raise Refusal(503, "engine_unavailable", self._fault)
        except RequestError as error:
            return _refused(error)
        answers = await self._answers(asked, self._judge)
        engines = sorted({answer.x_engine for answer in answers.values()})
        response = system_one_answer.Response(
            model=system_one.DECISION_MODEL,
            answers=answers,
            usage=system_one_answer.usage_of(asked),
            x_engine="+".join(engines),
            x_ms=round((time.perf_counter() - started_s) * 1e3, 3),
            x_truncated=asked.state.truncated,
        )
        return Answered(200, _headers(), system_one_answer.serialize(response))

    async def _answers(self, asked: system_one.Request, judge: Judge) -> dict[str, system_one_answer.Answer]:
        answers: dict[str, system_one_answer.Answer] = {}
        turn = _Turn()
        for name, question in asked.questions.items():
            for _ in judge.portions(question):
                await turn.give_way()
            judgement = await self._judged(asked.state, question, judge)
            if self._rerank is not None and isinstance(question, Choice):
                judgement = await self._second_opinion(asked.state, question, judgement, self._rerank)
            answers[name] = system_one_answer.answer(question, judgement)
            await turn.give_way()
        return answers

    async def _judged(self, state: State, question: Question, judge: Judge) -> Judgement:
        if self._gate is not None and isinstance(question, Choice) and question.asks_the_gate:
            judgement = await self._gates(state, question, self._gate)
            if judgement is not None:
                return judgement
        return judge.judge(state, question)

    @staticmethod
    async def _gates(state: State, question: Choice, gate: GateJudge) -> Judgement | None:
        """The gate's answer for its own four labels; None when it has none, or the state is no chat with tools."""
        body = system_one.chat_body(state)
        if body is None:
            return None
        try:
            verdict = await gate(body)
            check_verdict(verdict)
        except (ViewError, EnvironmentFault, TimeoutError) as exc:
            log.info("event=systemone_gate_passed kind=%s", type(exc).__name__)
            return None
        except Exception as exc:  # such as a value that is not finite: the question is answered all the same
            log.error("event=systemone_gate_failed", exc_info=exc)
            return None
        by_label = dict(zip(LABELS, verdict.probabilities, strict=True))
        probabilities = tuple(by_label[option.name] for option in question.options)  # type: ignore[index]
        return Judgement(probabilities, f"gate-{verdict.engine}")

    @staticmethod
    async def _second_opinion(state: State, question: Choice, judgement: Judgement, rerank: Rerank) -> Judgement:
        if system_one_answer.choice_confidence(judgement.probabilities) >= RERANK_BELOW:
            return judgement
        return await rerank(state, question, judgement) or judgement


class _Turn:
    """How long this request has held the loop."""

    def __init__(self) -> None:
        self._since_s = time.perf_counter()

    async def give_way(self) -> None:
        """Let others run when it has been long enough."""
        if time.perf_counter() - self._since_s > LOOP_HELD_S_MAX:
            await asyncio.sleep(0)
            self._since_s = time.perf_counter()


class UpstreamFirst:
    """``/v1/systemone`` for an upstream that may serve the path itself: it is asked first, we answer if it does not."""

    def __init__(self, own: SystemOne, exchange: Exchange) -> None:
        self._own = own
        self._exchange = exchange

    async def handle(self, request: Request, reply: Reply) -> Reply:
        """Relay unless the upstream is away or knows no such path."""
        body = await read_request(request, reply)
        if body is None:
            return await self._own.reply(request, reply, body)
        try:
            response = await self._exchange.send(request, body)
        except UpstreamMissing as exc:
            log.info("event=systemone_local cause=%s", type(exc).__name__)
            return await self._own.reply(request, reply, body)
        if response.status in _NOT_SERVED:
            response.abort()
            return await self._own.reply(request, reply, body)
        return await self._exchange.pass_on(response, reply)


async def read_request(request: Request, reply: Reply) -> bytes | None:
    """The body as sent; None when it is over the limit, and then the connection closes after the answer."""
    answer_expect(request)
    body, complete = await read_body(request, system_one.BODY_BYTES_MAX)
    if complete:
        return body
    reply.keep_alive = False
    return None


def _refused(error: RequestError) -> Answered:
    status, body = system_one_answer.error_status_and_body(error)
    return Answered(status, _headers(), body)


def _headers() -> Headers:
    """The SDK's ``request_id`` raises when the header is absent."""
    return [
        (b"Content-Type", b"application/json"),
        (b"x-typesafe-request-id", b"req_" + secrets.token_hex(12).encode("ascii")),
    ]
