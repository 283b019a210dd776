"""The front door: who may enter, which handler takes a request, and what browsers are told.

No routing framework: our own paths are a dictionary, gated paths are another, everything else is relayed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from whetherman_edge.dialects.registry import error_shape
from whetherman_edge.ledger.counters import Counters
from whetherman_edge.proxy import page
from whetherman_edge.proxy.guard import Guard
from whetherman_edge.proxy.relay import Reply
from whetherman_edge.proxy.request import Request
from whetherman_edge.proxy.upstream import Headers

log = logging.getLogger(__name__)

Handler = Callable[[Request, Reply], Awaitable[Reply]]

# Probes carry no key, and say nothing that needs one; nor do the static files of the page.
OPEN_PATHS = frozenset({"/livez", "/readyz", "/health", *page.FILES})
_CORS_EXPOSED = b"x-whetherman-decision, x-whetherman-applied, x-whetherman-reason, x-whetherman-confidence, "
_CORS_EXPOSED += b"x-whetherman-engine, x-whetherman-ms"


class App:
    """What ``HttpServer`` hands each request to.

    ``own``: (method, path) to handler, for what is ours. ``gated``: POST path to handler. ``relay``: all the rest.
    ``active``: how many requests are being served.
    """

    def __init__(
        self,
        *,
        guard: Guard,
        counters: Counters,
        own: Mapping[tuple[str, str], Handler],
        gated: Mapping[str, Handler],
        relay: Handler,
    ) -> None:
        self._counters = counters
        self.serve_with(guard=guard, own=own, gated=gated, relay=relay)
        self._replies: set[Reply] = set()
        self.draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def serve_with(
        self,
        *,
        guard: Guard,
        own: Mapping[tuple[str, str], Handler],
        gated: Mapping[str, Handler],
        relay: Handler,
    ) -> None:
        """Serve requests by these handlers from now on; those being served keep theirs."""
        self._guard = guard
        self._own = dict(own)
        self._own_paths = frozenset(path for _, path in own)
        self._gated = dict(gated)
        self._relay = relay

    @property
    def active(self) -> int:
        return len(self._replies)

    def drain(self) -> None:
        """From now on every reply is the last one on its connection."""
        self.draining = True
        for reply in self._replies:
            reply.keep_alive = False

    async def drained(self, timeout_s: float) -> bool:
        """Wait until no request is being served; False when ``timeout_s`` passed first."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            log.warning("event=drain_timeout active=%d", self.active)
            return False
        return True

    def add(self, method: str, path: str, handler: Handler) -> None:
        """Add a path of our own."""
        self._own[method, path] = handler
        self._own_paths |= {path}

    async def handle(self, request: Request) -> bool:
        """Serve one request; returns whether its connection may serve another one."""
        reply = Reply(request)
        self._replies.add(reply)
        self._idle.clear()
        reply.error_shape = error_shape(request.path)
        if self.draining:
            reply.keep_alive = False
        try:
            await self._serve(request, reply)
        except (ConnectionError, asyncio.CancelledError) as exc:
            event = "drain_cut" if self.draining else "client_closed"
            self._counters.add(f"{event}_total")
            log.info("event=%s path=%s status=%d", event, _logged_path(request), reply.status)
            if isinstance(exc, asyncio.CancelledError):
                raise
            reply.keep_alive = False
        except Exception as exc:
            log.exception("event=internal_error path=%s kind=%s", _logged_path(request), type(exc).__name__)
            if reply.started:
                reply.abort()
            else:
                await reply.send_error(
                    500, "Internal Server Error", "internal error", "internal_error", "internal_error"
                )
        finally:
            self._replies.discard(reply)
            if not self._replies:
                self._idle.set()
        self._counters.add("responses_total", (("status", f"{reply.status // 100}xx"),))
        return reply.keep_alive

    async def _serve(self, request: Request, reply: Reply) -> Reply:
        path = request.path
        origin = request.headers.get("origin")
        if origin is not None and self._guard.origin_allowed(origin):
            reply.extra = _cors(origin)
            reply.cross_origin = True
            if request.method == "OPTIONS" and "access-control-request-method" in request.headers:
                return await self._preflight(request, reply)
        refusal = self._guard.check(
            request.headers, over_tcp=request.connection.over_tcp, needs_key=path not in OPEN_PATHS
        )
        if refusal is not None:
            log.warning("event=refused status=%d code=%s path=%s", refusal.status, refusal.code, _logged_path(request))
            if request.has_body:
                reply.keep_alive = False
            return await reply.send_error(refusal.status, refusal.reason, refusal.message, refusal.kind, refusal.code)
        if request.method == "CONNECT" or _offers_websocket(request):
            # Codex tries a WebSocket first; 426 makes it fall back at once (field case S16). Any other offer, such as
            # the h2c of every JDK client, may be passed over (RFC 9110 section 7.8): the request is served as it is.
            reply.keep_alive = False
            return await reply.send_error(
                426, "Upgrade Required", "only HTTP is served here", "invalid_request_error", "upgrade_not_supported"
            )
        if request.method == "POST" and path in self._gated:
            return await self._gated[path](request, reply)
        handler = self._own.get((request.method, path))
        if handler is None and request.method == "HEAD":
            handler = self._own.get(("GET", path))
        if handler is not None:
            return await handler(request, reply)
        if path in self._own_paths:
            allowed = ", ".join(sorted(method for method, own in self._own if own == path))
            reply.extra.append((b"Allow", allowed.encode("ascii")))
            return await reply.send_error(
                405,
                "Method Not Allowed",
                f"expected {allowed} on {path}",
                "invalid_request_error",
                "method_not_allowed",
            )
        if path.startswith(page.PREFIX) or path == page.PREFIX[:-1]:
            return await page.missing(request, reply)
        return await self._relay(request, reply)

    async def _preflight(self, request: Request, reply: Reply) -> Reply:
        wanted = request.headers.get("access-control-request-headers", "")
        headers = [
            (b"Access-Control-Allow-Methods", b"GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"),
            (b"Access-Control-Allow-Headers", wanted.encode("utf-8", "surrogateescape") or b"*"),
            (b"Access-Control-Max-Age", b"600"),
        ]
        return await reply.send(204, "No Content", b"", headers)


def _cors(origin: str) -> Headers:
    return [
        (b"Access-Control-Allow-Origin", origin.encode("utf-8", "surrogateescape")),
        (b"Access-Control-Expose-Headers", _CORS_EXPOSED),
        (b"Vary", b"Origin"),
    ]


def _offers_websocket(request: Request) -> bool:
    if "upgrade" not in request.headers:
        return False
    offers = ",".join(request.all_of("upgrade"))
    return any(offer.strip().lower().partition("/")[0] == "websocket" for offer in offers.split(","))


def _logged_path(request: Request) -> str:
    """The path without its query, which may hold a key (field case O10)."""
    return request.path[:200]
