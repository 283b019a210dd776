"""The daemon's own small endpoints. None of them calls the model (field case O12)."""

from __future__ import annotations

import asyncio
import resource
import sys
from collections.abc import Callable
from typing import Any

from whetherman_edge.ledger.counters import Counters
from whetherman_edge.proxy.learned import Learned
from whetherman_edge.proxy.relay import Reply
from whetherman_edge.proxy.request import Request
from whetherman_edge.proxy.upstream import Upstream

# A probe every second from several places must not become a connection storm against the model server.
READY_CACHE_S = 2.0
READY_TIMEOUT_S = 1.0


class Health:
    """``/livez``, ``/readyz``, ``/health`` and ``/metrics``.

    ``gate_fault``: returns why the gate cannot judge (missing or broken artifact), or "" when it can. ``backbone``:
    where its second stage stands; without that one the gate judges all the same. ``count``: brings the counters up to
    date. ``field``: which profiles cannot be used, and what the requests showed of agents.
    """

    def __init__(
        self,
        upstream: Upstream,
        learned: Learned,
        counters: Counters,
        gate_fault: Callable[[], str],
        version: str,
        backbone: Callable[[], dict[str, str]] = lambda: {"state": "off", "detail": ""},
        count: Callable[[], None] = lambda: None,
        field: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self._upstream = upstream
        self._learned = learned
        self._counters = counters
        self._gate_fault = gate_fault
        self._version = version
        self._backbone = backbone
        self._count = count
        self._field = field
        self._reachable = False
        self._checked_at_s = -READY_CACHE_S
        self._checking = asyncio.Lock()

    async def livez(self, _request: Request, reply: Reply) -> Reply:
        """200 while the process serves."""
        return await reply.send_json(200, "OK", {"status": "ok"})

    async def readyz(self, _request: Request, reply: Reply) -> Reply:
        """200 when the upstream accepts connections and the gate can judge; else 503 with the causes."""
        causes = await self._causes()
        if causes:
            return await reply.send_json(503, "Service Unavailable", {"status": "unready", "causes": causes})
        return await reply.send_json(200, "OK", {"status": "ok"})

    async def health(self, _request: Request, reply: Reply) -> Reply:
        """Always 200: version, upstream and its kind, and what ``/readyz`` would say."""
        causes = await self._causes()
        value = {
            "status": "degraded" if causes else "ok",
            "causes": causes,
            "version": self._version,
            "upstream": self._upstream.target.url,
            "upstream_kind": self._learned.kind,
            "backbone": self._backbone(),
            "profiles": self._field(),
        }
        return await reply.send_json(200, "OK", value)

    async def metrics(self, _request: Request, reply: Reply) -> Reply:
        """Prometheus text."""
        self._count()
        self._counters.set_gauge("resident_bytes_max", peak_resident_bytes(), "peak resident memory of the daemon")
        text = (b"Content-Type", b"text/plain; version=0.0.4; charset=utf-8")
        return await reply.send(200, "OK", self._counters.render(), [text])

    async def _causes(self) -> dict[str, str]:
        causes: dict[str, str] = {}
        if not await self._upstream_reachable():
            causes["upstream"] = (
                f"{self._upstream.target.url} does not accept connections; start the model server, or set another with "
                "--upstream, WHETHERMAN_UPSTREAM or the configuration key upstream"
            )
        fault = self._gate_fault()
        if fault:
            causes["gate"] = fault
        return causes

    async def _upstream_reachable(self) -> bool:
        async with self._checking:
            now_s = asyncio.get_running_loop().time()
            if now_s - self._checked_at_s >= READY_CACHE_S:
                self._reachable = await self._upstream.reachable(READY_TIMEOUT_S)
                self._checked_at_s = asyncio.get_running_loop().time()
        return self._reachable


def peak_resident_bytes() -> int:
    """Peak resident set size of this process (``ru_maxrss`` is in KiB on Linux, in bytes on macOS)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
