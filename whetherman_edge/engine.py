"""The gate's static engine, opened once: table, kernels, scorer and head, behind what the proxy asks.

Everything that imports numpy on the daemon's side of the gate is here, so that ``proxy`` does not (STYLE 1).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from whetherman_edge.dialects.chat import ChatView
from whetherman_edge.errors import ArtifactError
from whetherman_edge.gate.verdict import Verdict
from whetherman_edge.kernels import Kernels, load
from whetherman_edge.profiles.schema import Tau
from whetherman_edge.router.card import cards_of
from whetherman_edge.router.decision import Choice
from whetherman_edge.router.scorer import Scorer
from whetherman_edge.router.table import RouterTable

try:
    from whetherman_edge.gate.static_gate import FUSED_NAMES, StaticGate
except ModuleNotFoundError:  # TEMPORARY until gate.static_gate is in
    FUSED_NAMES, StaticGate = (), None

# Options embedded in one go: 16 new ones take about a millisecond, 255 would hold every other request for 20.
ROUTE_PORTION = 16

log = logging.getLogger(__name__)


class StaticEngine:
    """A judge (``proxy.gating.Judge``) that answers at once, without leaving the event loop."""

    def __init__(self, table: RouterTable, kernels: Kernels) -> None:
        self.table = table
        self.kernels = kernels
        self.scorer = Scorer(table, kernels)
        self.gate = StaticGate.open(self.scorer, kernels, None) if StaticGate else None

    @classmethod
    def open(cls) -> StaticEngine:
        """Open the packaged artifacts, or the router that WHETHERMAN_ROUTER names. Raises ArtifactError."""
        return cls(RouterTable.open(None), load())

    @property
    def fused_names(self) -> tuple[str, ...]:
        """Names of ``Verdict.fused``."""
        return tuple(FUSED_NAMES)

    @property
    def default_tau(self) -> Tau:
        """The shipped operating point."""
        if self.gate is None:
            return Tau()
        tau = self.gate.default_tau
        return Tau(answer=tau.get("ANSWER"), ask=tau.get("ASK"), decline=tau.get("DECLINE"))

    async def judge(self, chat: ChatView, _deadline_s: float) -> Verdict:
        """The static verdict; takes a fraction of a millisecond, so nothing here waits."""
        if self.gate is None:
            raise ArtifactError("no static gate in this build")
        return self.gate.judge(chat)

    async def route(self, query: str, options: Mapping[str, Any]) -> Choice:
        """As ``Scorer.route``, but the event loop gets its turn while options never seen before are embedded.

        Raises RequestError.
        """
        if len(options) > ROUTE_PORTION:
            cards = cards_of(options)
            for start in range(0, len(cards), ROUTE_PORTION):
                self.scorer.prepare(cards[start : start + ROUTE_PORTION])
                await asyncio.sleep(0)
        return self.scorer.route(query, options)

    def tool_probabilities(self, chat: ChatView) -> Mapping[str, float]:
        """The ToolRouter's view of the offered tools, for the last user message."""
        query = chat.messages[chat.last_user_index].text if chat.last_user_index >= 0 else ""
        scores = self.scorer.score(query, self.scorer.slate(chat.tools, chat.toolset_key))
        return {tool.name: float(p) for tool, p in zip(chat.tools, scores.probability, strict=True)}
