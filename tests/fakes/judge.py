"""Scripted verdicts: what a gate may do to the daemon, without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from whetherman_edge.dialects.chat import ChatView
from whetherman_edge.errors import ArtifactError
from whetherman_edge.gate.later import Later
from whetherman_edge.gate.operating_point import NEVER
from whetherman_edge.gate.verdict import LABELS, Label, Verdict


def verdict(label: Label = "ACT", p: float = 0.97, engine: str = "static") -> Verdict:
    """A verdict for ``label`` with probability ``p``."""
    rest = (1.0 - p) / 3.0
    return Verdict(probabilities=tuple(p if one == label else rest for one in LABELS), engine=engine)  # type: ignore[arg-type]


class ScriptedJudge:
    """``mode``: fixed, hang, held (until ``released``), raise, missing or invalid. ``views``: what it was shown."""

    def __init__(self, label: Label = "ACT", p: float = 0.97) -> None:
        self.mode = "fixed"
        self.verdict = verdict(label, p)
        self.views: list[ChatView] = []
        self.cancelled = asyncio.Event()
        self.entered = asyncio.Event()
        self.released = asyncio.Event()
        self.probabilities: Mapping[str, float] = {}
        self.fused_names: tuple[str, ...] = ()
        self.default_tau = NEVER

    def judge(self, chat: ChatView, deadline_s: float, profile=None) -> Later[Verdict]:
        return Later(lambda: self._judged(chat))

    async def _judged(self, chat: ChatView) -> Verdict:
        self.views.append(chat)
        self.entered.set()
        match self.mode:
            case "hang" | "held":
                try:
                    await (self.released if self.mode == "held" else asyncio.Event()).wait()
                except asyncio.CancelledError:
                    self.cancelled.set()
                    raise
            case "raise":
                raise RuntimeError("PROMPTTEXT in an exception")
            case "missing":
                raise ArtifactError("expected gate_static.safetensors, found none")
            case "invalid":
                return Verdict(probabilities=(0.9, 0.9, 0.9, float("nan")), engine="static")
        return self.verdict

    def tool_probabilities(self, chat: ChatView) -> Mapping[str, float]:
        return self.probabilities
