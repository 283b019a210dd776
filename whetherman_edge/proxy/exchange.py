"""READ FIRST. One request, bytes in to bytes out, one line a stage."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable

from aiohttp import web

from whetherman_edge.errors import UpstreamMissing, UpstreamReset
from whetherman_edge.ledger.counters import Counters
from whetherman_edge.proxy.relay import BodyStream, Reply, forwardable, read_body, relay
from whetherman_edge.proxy.upstream import Headers, Upstream, UpstreamResponse

log = logging.getLogger(__name__)

# Bodies up to this are read before they are sent, so that a stale keep-alive socket costs one retry and no error;
# larger ones (Ollama blob uploads are gigabytes) stream through and use a fresh connection.
WHOLE_BODY_BYTES_MAX = 1 << 20


class Exchange:
    """Relays and gates requests to one upstream."""

    def __init__(
        self, upstream: Upstream, counters: Counters, *, api_key: str = "", upstream_api_key: str = ""
    ) -> None:
        self._upstream = upstream
        self._counters = counters
        self._api_key = api_key
        self._upstream_api_key = upstream_api_key

    async def relay(self, request: web.BaseRequest, reply: Reply) -> Reply:
        """Relay a request that is none of the gate's business: any method, path, query and body."""
        body: bytes | AsyncIterable[bytes]
        length = request.content_length
        if not request.body_exists:
            body = b""
        elif length is not None and length <= WHOLE_BODY_BYTES_MAX:
            await answer_expect(request)
            body, _ = await read_body(request, WHOLE_BODY_BYTES_MAX)
        else:
            await answer_expect(request)
            body = BodyStream(request)
        return await self._through(request, reply, body)

    async def send(self, request: web.BaseRequest, body: bytes, *, encoded: bool = True) -> UpstreamResponse:
        """Send a request upstream for a handler that reads the answer itself. Raises UpstreamMissing.

        ``encoded=False`` asks for a body without content coding.
        """
        return await self._send(request, body, encoded=encoded)

    async def pass_on(self, response: UpstreamResponse, reply: Reply) -> Reply:
        """Relay an answer got from ``send``, untouched."""
        return await self._relay(response, reply)

    async def fault(self, reply: Reply, exc: UpstreamMissing) -> Reply:
        """Tell the client that the upstream is away."""
        return await self._upstream_fault(reply, exc)

    async def _through(self, request: web.BaseRequest, reply: Reply, body: bytes | AsyncIterable[bytes]) -> Reply:
        try:
            response = await self._send(request, body)
        except UpstreamMissing as exc:
            return await self._upstream_fault(reply, exc)
        return await self._relay(response, reply)

    async def _send(
        self, request: web.BaseRequest, body: bytes | AsyncIterable[bytes], *, encoded: bool = True
    ) -> UpstreamResponse:
        length = len(body) if isinstance(body, bytes) else None
        headers = forwardable(request.raw_headers, length, self._api_key)
        if not encoded:
            headers = [pair for pair in headers if pair[0].lower() not in (b"accept-encoding", b"if-none-match")]
        if self._upstream_api_key:
            _add_key(headers, self._upstream_api_key)
        chunked = length is None and request.content_length is None
        return await self._upstream.send(request.method, request_target(request), headers, body, chunked=chunked)

    async def _relay(self, response: UpstreamResponse, reply: Reply) -> Reply:
        try:
            await relay(response, reply)
        except UpstreamReset as exc:
            self._counters.add("upstream_failures_total", (("kind", "reset"),))
            log.warning("event=upstream_reset status=%d detail=%r", response.status, str(exc))
            reply.abort()
        except (ConnectionError, asyncio.CancelledError) as exc:
            self._counters.add("client_closed_total")
            log.info("event=client_closed status=%d", response.status)
            if isinstance(exc, asyncio.CancelledError):
                raise
            reply.keep_alive = False
        finally:
            response.abort()  # no effect once released
        return reply

    async def _upstream_fault(self, reply: Reply, exc: UpstreamMissing) -> Reply:
        """502: which upstream, what happened, how to set another."""
        kind = "reset" if isinstance(exc, UpstreamReset) else "connect"
        self._counters.add("upstream_failures_total", (("kind", kind),))
        log.warning("event=upstream_%s upstream=%s detail=%r", kind, self._upstream.target.url, str(exc))
        message = (
            f"the model server did not answer: {exc}. Upstream is {self._upstream.target.url}; set another with "
            "--upstream, WHETHERMAN_UPSTREAM or the configuration key upstream"
        )
        return await reply.send_error(502, "Bad Gateway", message, "upstream_error", f"upstream_{kind}")


def request_target(request: web.BaseRequest) -> bytes:
    """The request target as the client wrote it: raw escapes, query and all; origin form also for a proxy-style one."""
    target: str = request._message.path
    if not target.startswith("/") and "://" in target:
        target = "/" + target.split("://", 1)[1].partition("/")[2]
    return target.encode("utf-8", "surrogateescape")


async def answer_expect(request: web.BaseRequest) -> None:
    """Send 100 Continue to a client that waits for it before it sends the body (RFC 9110 section 10.1.1)."""
    if request.headers.get("Expect", "").lower() == "100-continue" and request.version >= (1, 1):
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # nothing of the final response has gone out


def _add_key(headers: Headers, key: str) -> None:
    if not any(name.lower() in (b"authorization", b"x-api-key") for name, _ in headers):
        headers.append((b"Authorization", b"Bearer " + key.encode("utf-8")))
