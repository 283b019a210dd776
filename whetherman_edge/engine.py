"""The engines on the daemon's side of the gate: the ToolRouter, and the static gate that stands on it.

Everything of the daemon that imports numpy is behind this module, so that ``proxy`` does not import it (STYLE 1).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from whetherman_edge.dialects.chat import ChatView
from whetherman_edge.gate.static_gate import FUSED_NAMES, StaticGate
from whetherman_edge.gate.verdict import Verdict
from whetherman_edge.kernels import load
from whetherman_edge.profiles.schema import Tau
from whetherman_edge.router.card import cards_of
from whetherman_edge.router.decision import Choice
from whetherman_edge.router.scorer import Scorer
from whetherman_edge.router.table import RouterTable

# Options embedded in one go: 16 new ones take about a millisecond, 255 would hold every other request for 20.
ROUTE_PORTION = 16


class Router:
    """Table, kernels and scorer, opened once. Useful without a gate: typed decisions and ``route`` need no more."""

    def __init__(self) -> None:
        """Open the packaged table, or the one that WHETHERMAN_ROUTER names. Raises ArtifactError."""
        self.kernels = load()
        self.table = RouterTable.open(None)
        self.scorer = Scorer(self.table, self.kernels)

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


class StaticEngine:
    """A judge (``proxy.gating.Judge``) that answers at once: a verdict takes a fraction of a millisecond."""

    def __init__(self, router: Router) -> None:
        """Open the packaged gate. Raises ArtifactError."""
        self._scorer = router.scorer
        self._gate = StaticGate.open(router.scorer, router.kernels, None)
        self.sha256 = self._gate.sha256
        self.fused_names = FUSED_NAMES
        tau = self._gate.default_tau
        self.default_tau = Tau(answer=tau.get("ANSWER"), ask=tau.get("ASK"), decline=tau.get("DECLINE"))

    def judge(self, chat: ChatView, _deadline_s: float) -> Verdict:
        """The static verdict."""
        return self._gate.judge(chat)

    def tool_probabilities(self, chat: ChatView) -> Mapping[str, float]:
        """The ToolRouter's view of the offered tools, for the last user message."""
        query = chat.messages[chat.last_user_index].text if chat.last_user_index >= 0 else ""
        scores = self._scorer.score(query, self._scorer.slate(chat.tools, chat.toolset_key))
        return {tool.name: float(p) for tool, p in zip(chat.tools, scores.probability, strict=True)}
