"""The values that travel through the gate: Verdict (what the models say) and Decision (what the policy does)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from whetherman_edge.dialects.chat import ChatView

Label = Literal["ACT", "ANSWER", "ASK", "DECLINE"]
LABELS: tuple[Label, Label, Label, Label] = ("ACT", "ANSWER", "ASK", "DECLINE")
Mode = Literal["off", "shadow", "enforce"]
Engine = Literal["static", "gemma", "auto"]
Cause = Literal["scored", "loop_guard"]
CAUSES: Final[tuple[Cause, ...]] = ("scored", "loop_guard")
"""What withholds: a scored decision, by a profile or default thresholds (or one forced in its place), or the rule."""
StepKind = Literal["first", "later"]
STEP_KINDS: tuple[StepKind, StepKind] = ("first", "later")
PHASES: Final = ("first step", "later user turn", "after a result")
"""Where a dialogue stands; the gate's layers and thresholds have a part for each. A profile joins the first two."""


def step_kind(chat: ChatView) -> StepKind:
    """The kind of step that a request asks for: "later" behind tool results (the last of PHASES),
    else "first". Thresholds and what proves them are told apart by it.
    """
    return "later" if chat.last_role == "tool" else "first"


class Verdict(msgspec.Struct, frozen=True, gc=False):
    """Calibrated class probabilities for one request, before any policy.

    ``probabilities``: four floats in the order of LABELS, summing to 1. ``engine``: the stage that produced them.
    ``fused``: named inputs of a profile's logistic layer (``gate.static_gate.FUSED_NAMES``), same order, float.
    ``tool``: the ToolRouter's best tool name and ``tool_probability`` its probability (0.0 without tools).
    ``phase``: where the dialogue stands, an index of PHASES. ``fallback``: the backbone was wanted
    and did not answer in time, or cannot be asked at all, so this is the static stage's verdict in its place.
    """

    probabilities: tuple[float, float, float, float]
    engine: str
    fused: tuple[float, ...] = ()
    tool: str = ""
    tool_probability: float = 0.0
    phase: int = 0
    fallback: bool = False

    @property
    def label(self) -> Label:
        """The most probable class; ties go to the earlier label, so to ACT first."""
        return LABELS[self.probabilities.index(max(self.probabilities))]

    @property
    def p_need(self) -> float:
        """Probability that a tool call is needed now."""
        return self.probabilities[0]


def check_verdict(verdict: Verdict) -> None:
    """Raise ValueError for a verdict that cannot be right: not four probabilities that sum to one."""
    probabilities: Sequence[float] = verdict.probabilities
    total = sum(probabilities)
    if len(probabilities) != 4 or not math.isfinite(total) or abs(total - 1.0) > 1e-3:
        raise ValueError("expected four probabilities that sum to 1 from the gate")
    if min(probabilities) < 0.0:
        raise ValueError("expected probabilities of at least 0 from the gate")


class Decision(msgspec.Struct, frozen=True, gc=False):
    """What the policy does with a verdict.

    ``label``: ACT means the request goes out as it came. ``confidence``: probability of ``label`` under the calibrated
    (profile) probabilities. ``reason``: one of ``gate.policy.REASONS`` or ``bypass:*``, ``guard:*``.
    ``probabilities`` and ``p_need``: after the profile's layer, if any. ``cause``: what withholds, or would have but
    for a guard or its back-off; "" where nothing would.
    """

    label: Label
    verdict: Label
    probabilities: tuple[float, float, float, float]
    p_need: float
    confidence: float
    reason: str
    engine: str
    tool: str = ""
    cause: Cause | Literal[""] = ""
