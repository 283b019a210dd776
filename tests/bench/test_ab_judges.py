"""Stand-ins of `bench ab`: what they let through is what the product would."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from tests.fakes.judge import ScriptedJudge
from tests.gate.chats import chat_of, user
from whetherman_edge.bench.ab_judges import NEED_LOGIT, SURE, AtOperatingPoint, SharedScore, stand_in
from whetherman_edge.gate.policy import PolicySettings, SessionState, decide
from whetherman_edge.gate.verdict import PHASES, Verdict
from whetherman_edge.profiles.schema import InterventionChoice, Tau
from whetherman_edge.proxy.gating import Judge

POINT = (Tau(answer=0.8, decline=0.6), Tau(answer=0.95), Tau())
FALLBACK = (Tau(answer=0.3), Tau(), Tau(answer=0.8))


class Engine(ScriptedJudge):
    """Answers at once."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__()
        self.verdict = verdict
        self.default_tau = POINT

    def judge(self, chat, deadline_s, profile=None):
        return self.verdict


@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize("p_need", [0.0, 0.04, 0.1, 0.25, 0.5, 0.9, 1.0])
def test_a_gate_without_a_profile_decides_by_each_phase_s_threshold(p_need: float, fallback: bool) -> None:
    chat = chat_of(user("What is the capital of Norway?"))
    for phase, answers in itertools.product(range(len(PHASES)), (True, False)):
        rest = (1.0 - p_need, 0.0, 0.0) if answers else (0.0, 0.0, 1.0 - p_need)
        verdict = Verdict((p_need, *rest), "static", phase=phase, fallback=fallback)
        product = PolicySettings(default_tau=POINT, fallback_tau=FALLBACK)
        expected = decide(verdict, chat, None, SessionState(), product)
        judge: Judge = AtOperatingPoint(Engine(verdict), FALLBACK)
        found = judge.judge(chat, 0.0)
        assert isinstance(found, Verdict)
        profile = stand_in(SURE, InterventionChoice())
        settings = PolicySettings(fused_names=NEED_LOGIT, default_tau=judge.default_tau)
        assert decide(found, chat, profile, SessionState(), settings).label == expected.label, (phase, answers)


async def test_a_verdict_that_is_awaited_is_moved_too() -> None:
    verdict = Verdict((0.15, 0.85, 0.0, 0.0), "gemma")
    later = ScriptedJudge()
    later.verdict, later.default_tau = verdict, POINT
    chat = chat_of(user("hello"))
    moved = await AtOperatingPoint(later).judge(chat, 0.0)
    plain = await SharedScore(later).judge(chat, 0.0)
    assert moved.fused[0] - plain.fused[0] == pytest.approx(1.3863, abs=1e-3)
    assert msgspec.structs.replace(moved, fused=()) == verdict
