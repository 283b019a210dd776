"""``POST /v1/decide``, and what the command line and the decision socket share with it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from whetherman_edge.dialects import registry
from whetherman_edge.dialects.json_spans import VALUES_MAX, refuse_crowded
from whetherman_edge.errors import OverLimit, RequestError
from whetherman_edge.gate.verdict import LABELS
from whetherman_edge.proxy.exchange import answer_expect
from whetherman_edge.proxy.gating import Gating, Ruling
from whetherman_edge.proxy.relay import Reply, read_body
from whetherman_edge.proxy.request import Request

PATH = "/v1/decide"


class _Message(msgspec.Struct):
    role: str


class _Chat(msgspec.Struct):
    """The least that a chat body must have to be decided on; the view is more tolerant, a person with a typo is not."""

    messages: list[_Message]
    tools: list[dict[str, msgspec.Raw]] | None = None


class _Response(msgspec.Struct):
    """The same of a Responses body."""

    input: str | list[dict[str, msgspec.Raw]]
    tools: list[dict[str, msgspec.Raw]] | None = None


_decode_chat = msgspec.json.Decoder(_Chat).decode
_decode_response = msgspec.json.Decoder(_Response).decode
_PATH = re.compile(r" - at `\$(.*)`$")
_STEP = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")
# Reasons that mean: the body could not be decided on.
_UNREADABLE = {
    "view_error": "expected a chat body without repeated keys, with a list of messages",
    "bypass:encoding": "expected a body without content coding, or gzip, deflate or zstd",
    "profile_unknown": "expected a profile that exists and fits this engine; `whetherman-edge profile list` shows them",
}


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One decision as DESIGN 7 writes it; ``applied`` is "yes" or "no" as in the header."""

    id: Any = None
    verdict: str
    decision: str
    probabilities: dict[str, float]
    confidence: float
    p_need: float
    engine: str
    ms: float
    applied: str
    reason: str


class DecideEndpoint:
    """``POST /v1/decide``: one chat body in, one Record out; nothing is sent upstream."""

    def __init__(self, gating: Gating, body_bytes_max: int) -> None:
        self._gating = gating
        self._body_bytes_max = body_bytes_max

    async def handle(self, request: Request, reply: Reply) -> Reply:
        """200 with a Record; 400 for what is no JSON, 413, 422 for JSON that is no chat body."""
        answer_expect(request)
        body, whole = await read_body(request, self._body_bytes_max)
        if not whole:
            reply.keep_alive = False
            message = f"expected at most {self._body_bytes_max} bytes"
            return await reply.send_error(
                413, "Request Entity Too Large", message, "invalid_request_error", "request_too_large"
            )
        try:
            record = await decide(self._gating, request.headers, body)
        except RequestError as exc:
            status, reason = (400, "Bad Request") if exc.kind == "json_invalid" else (422, "Unprocessable Entity")
            return await reply.send_json(status, reason, error_value(exc))
        return await reply.send_json(200, "OK", record)


async def decide(gating: Gating, headers: Mapping[str, str], body: bytes, identity: Any = None) -> Record:
    """The Record of one chat body. ``headers``: the request's, for mode and profile. Raises RequestError."""
    if "content-encoding" not in headers:
        check(body)
    ruling = await gating.rule(headers, body, registry.of_body(body))
    problem = _UNREADABLE.get(ruling.decision.reason)
    if problem is not None:
        raise RequestError(problem, kind=ruling.decision.reason.replace(":", "_"))
    return record_of(ruling, identity)


def check(body: bytes) -> None:
    """Raise RequestError unless the body is a JSON object with a list of messages that have roles, or with an input."""
    try:
        refuse_crowded(body)
        (_decode_response if registry.of_body(body) is registry.OPENAI_RESPONSES else _decode_chat)(body)
    except OverLimit as exc:
        raise RequestError(f"expected at most {VALUES_MAX:,} JSON values", ("body",), "too_long") from exc
    except msgspec.ValidationError as exc:
        text = str(exc)
        path = _PATH.search(text)
        steps = _STEP.findall(path.group(1)) if path else []
        loc = ("body", *(name or (int(index) if index.isdigit() else "*") for name, index in steps))
        missing = re.search(r"missing required field `(\w+)`", text)
        if missing:
            loc = (*loc, missing.group(1))
            raise RequestError(f"expected the field {missing.group(1)!r}, got none", loc, "missing") from exc
        raise RequestError(_PATH.sub("", text).replace("`", "'"), loc, "type_error") from exc
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise RequestError(f"expected a JSON object: {exc}", ("body",), "json_invalid") from exc


def record_of(ruling: Ruling, identity: Any = None) -> Record:
    """A ruling as a Record."""
    decision = ruling.decision
    return Record(
        id=identity,
        verdict=decision.verdict,
        decision=decision.label,
        probabilities={label: round(p, 6) for label, p in zip(LABELS, decision.probabilities, strict=True)},
        confidence=round(decision.confidence, 6),
        p_need=round(decision.p_need, 6),
        engine=decision.engine,
        ms=round(ruling.ms, 3),
        applied="yes" if ruling.applied else "no",
        reason=decision.reason,
    )


def described(exc: RequestError) -> str:
    """An error in one line: which field, and what is wrong with it."""
    return f"{_field(exc)}: {exc}"


def _field(exc: RequestError) -> str:
    return ".".join(str(step) for step in exc.loc)


def error_value(exc: RequestError) -> dict[str, Any]:
    """An error as JSON: OpenAI's shape, and where and what in FastAPI's."""
    error = {
        "message": described(exc),
        "type": "invalid_request_error",
        "param": _field(exc),
        "code": exc.kind,
        "src": "whetherman-edge",
    }
    return {"error": error, "detail": [{"loc": list(exc.loc), "msg": str(exc), "type": exc.kind}]}
