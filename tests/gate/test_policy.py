"""Verdict to decision: thresholds, the profile's layer, guards, force, back-off, and what may be applied."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.gate.chats import WEATHER, calls, chat_of, result, says, tool, user, verdict_of
from tests.profiles.samples import profile_of
from whetherman_edge.dialects.chat import ChatView
from whetherman_edge.errors import ProfileError
from whetherman_edge.gate.policy import (
    FAILURES,
    REASONS,
    RULES,
    PolicySettings,
    SessionState,
    decide,
    decide_unscored,
    may_apply,
    mode_for,
    unscored,
)
from whetherman_edge.gate.verdict import CAUSES, Cause, Decision, Label, Verdict
from whetherman_edge.profiles.payoff import ToolCost, in_order
from whetherman_edge.profiles.schema import ByKind, Profile, Tau

SETTINGS = PolicySettings(fused_names=("best", "overlap"), default_tau=(Tau(answer=0.9, ask=0.9, decline=None),) * 3)
ASKED = chat_of(user("What is the weather like?"))
NON_ACT: tuple[Label, ...] = ("ANSWER", "ASK", "DECLINE")


def decided(
    verdict: Verdict,
    chat: ChatView = ASKED,
    profile: Profile | None = None,
    session: SessionState = SessionState(),  # noqa: B008
    settings: PolicySettings = SETTINGS,
) -> Decision:
    decision = decide(verdict, chat, profile, session, settings)
    assert decision.reason in REASONS
    return decision


def forced(label: Label, chat: ChatView = ASKED, **fields: Any) -> Decision:
    settings = msgspec.structs.replace(SETTINGS, force=label)
    return decided(verdict_of("ACT"), chat, settings=settings, **fields)


@pytest.mark.parametrize(
    ("verdict", "label", "reason"),
    [
        (verdict_of("ACT", 0.97), "ACT", "need"),
        (verdict_of("ANSWER", 0.94), "ANSWER", "scored"),
        (verdict_of("ASK", 0.94), "ASK", "scored"),
        (verdict_of("ANSWER", 0.60), "ACT", "low_confidence"),
        (verdict_of("DECLINE", 0.99), "ACT", "low_confidence"),  # tau None: never
    ],
)
def test_a_class_needs_its_threshold(verdict: Verdict, label: Label, reason: str) -> None:
    decision = decided(verdict)
    assert (decision.label, decision.reason, decision.verdict) == (label, reason, verdict.label)
    assert decision.confidence == pytest.approx(decision.probabilities[("ACT", *NON_ACT).index(label)])


def test_the_threshold_is_on_one_minus_p_need_not_on_the_class() -> None:
    split = Verdict(probabilities=(0.08, 0.47, 0.45, 0.0), engine="static")
    assert decided(split).label == "ANSWER"
    assert decided(msgspec.structs.replace(split, probabilities=(0.11, 0.5, 0.39, 0.0))).label == "ACT"


@pytest.mark.parametrize(("phase", "label"), [(0, "ANSWER"), (1, "ACT"), (2, "ACT")])
def test_without_a_profile_each_phase_has_its_threshold(phase: int, label: Label) -> None:
    point = (Tau(answer=0.9), Tau(answer=0.99), Tau())
    settings = msgspec.structs.replace(SETTINGS, default_tau=point, fallback_tau=point[::-1])
    verdict = msgspec.structs.replace(verdict_of("ANSWER", 0.94), phase=phase)
    assert decided(verdict, settings=settings).label == label
    stands_in = msgspec.structs.replace(verdict, phase=2 - phase, fallback=True)
    assert decided(stands_in, settings=settings).label == label


def test_a_profiles_layer_and_thresholds_replace_the_defaults() -> None:
    profile = profile_of(features=("overlap",), weights=(4.0,), mean=(0.5,), scale=(0.25,), tau=Tau(answer=0.95))
    need = decided(verdict_of("ANSWER", 0.94, fused=(0.0, 0.75)), profile=profile)
    assert need.p_need == pytest.approx(1 / (1 + 2.718281828**-4.0), abs=1e-6)
    assert (need.label, need.verdict, need.reason) == ("ACT", "ANSWER", "need")
    skip = decided(verdict_of("ANSWER", 0.94, fused=(0.0, 0.25)), profile=profile)
    assert (skip.label, skip.reason) == ("ANSWER", "scored")
    assert sum(skip.probabilities) == pytest.approx(1.0)
    ask = decided(verdict_of("ASK", 0.94, fused=(0.0, 0.25)), profile=profile)
    assert (ask.label, ask.reason) == ("ACT", "low_confidence")  # this profile has no threshold for ASK


def test_a_verdict_that_does_not_fit_the_layer_is_a_wiring_fault() -> None:
    with pytest.raises(ProfileError, match="fused values"):
        decide(verdict_of("ANSWER"), ASKED, profile_of(features=("overlap",)), SessionState(), SETTINGS)
    other = profile_of(features=("unheard_of",))
    with pytest.raises(ProfileError, match="unheard_of"):
        decide(verdict_of("ANSWER", fused=(0.0, 0.0)), ASKED, other, SessionState(), SETTINGS)


@pytest.mark.parametrize("label", NON_ACT)
def test_a_forced_verdict_on_a_plain_question_is_not_vetoed(label: Label) -> None:
    for text in ("What is the weather in Oslo?", "weather?", "Tell me a joke", "hi"):
        decision = forced(label, chat_of(user(text)))
        assert (decision.label, decision.verdict, decision.reason) == (label, label, "forced")


@pytest.mark.parametrize(
    ("label", "turns", "tools"),
    [
        ("ANSWER", [user("hi")], [tool("web_search", "Search the web.", query="string")]),  # D01
        ("ANSWER", [user("Hello there"), calls("greet"), result("Hello! I can…")], [tool("greet"), WEATHER]),  # D02
        (
            "ANSWER",
            [says("I suggest deleting branch old-fix."), user("why do you suggest deleting old-fix?")],
            [tool("shell", "Run a command.", required=("command",))],
        ),  # D07
        (
            "DECLINE",
            [user("turn off the living room lights")],
            [tool("terminal", "Run a command."), tool("read_file", "Read a file.")],
        ),  # D08
        ("ANSWER", [user("how's the weather in your head today?")], [WEATHER]),  # D12 a
        ("ANSWER", [user("don't check the weather, just say hi")], [WEATHER]),  # D12 b
    ],
    ids=["D01", "D02", "D07", "D08", "D12a", "D12b"],
)
def test_no_guard_stands_in_the_way_of(label: Label, turns: list[Any], tools: list[Any]) -> None:
    assert forced(label, chat_of(*turns, tools=tools)).label == label


def test_D09_and_D11_end_as_act_whatever_the_verdict() -> None:
    named = chat_of(user("run workflow_run_dispatch_round for job 7"), tools=[tool("workflow_run_dispatch_round")])
    assert {forced(label, named).label for label in ("ANSWER", "DECLINE")} == {"ACT"}
    tunnels = chat_of(user("delete the old tunnel"), tools=[tool("list_tunnels"), tool("delete_tunnel")])
    assert {forced(label, tunnels).label for label in ("ANSWER", "ASK")} == {"ACT"}


def test_forced_act_is_act() -> None:
    assert (forced("ACT").label, forced("ACT").reason) == ("ACT", "forced")


def test_guards_hold_for_forced_verdicts_too() -> None:
    action = chat_of(user("delete the old tunnel"), tools=[tool("list_tunnels"), tool("delete_tunnel")])
    assert (forced("ANSWER", action).label, forced("ANSWER", action).reason) == ("ACT", "guard:action")
    assert forced("ASK", action).reason == "guard:lookup_first"  # D11
    part = chat_of(user("How many of part 7 are left?"), calls("get_weather"), result("It is EU-6836."))
    assert forced("ANSWER", part).reason == "guard:number_missing"
    assert forced("DECLINE", part).label == "DECLINE"
    named = chat_of(user("run workflow_run_dispatch_round for job 7"), tools=[tool("workflow_run_dispatch_round")])
    assert forced("DECLINE", named).reason == "guard:tool_named"  # D09
    own = chat_of(user("book it"), tools=[WEATHER, tool("ask_user")])
    assert forced("ASK", own).reason == "guard:ask_tool"


def test_R15_no_ask_or_decline_with_a_response_format() -> None:
    chat = chat_of(user("hm"), response_format={"type": "json_schema", "json_schema": {}})
    assert forced("ASK", chat).reason == forced("DECLINE", chat).reason == "guard:structured_output"
    assert forced("ANSWER", chat).label == "ANSWER"


def test_nobody_is_asked_where_nobody_answers() -> None:
    settings = msgspec.structs.replace(SETTINGS, force="ASK", non_interactive=True)
    assert decided(verdict_of("ACT"), settings=settings).reason == "guard:non_interactive"
    profile = profile_of(features=("best",), tau=Tau(ask=0.0), interactive=False)
    assert decided(verdict_of("ASK", fused=(0.0, 0.0)), profile=profile).reason == "guard:non_interactive"


def test_ask_never_twice_in_a_row() -> None:
    after_question = chat_of(user("book a table"), says("For how many?"), user("some friends"))
    assert forced("ASK", after_question).reason == "guard:ask_twice"
    first = chat_of(user("book a table"))
    asked = SessionState().after(forced("ASK", first), first, applied=True)
    assert forced("ASK", first, session=asked).label == "ASK"  # the same request again: the same decision
    ignored = chat_of(user("book a table"), calls("get_weather"), result("rain"))
    assert forced("ASK", ignored, session=asked).reason == "guard:ask_twice"  # at most one for a user turn
    replied = chat_of(user("book a table"), says("Tell me for how many."), user("some friends"))
    assert forced("ASK", replied, session=asked).reason == "guard:ask_twice"
    later = chat_of(user("book a table"), says("…"), user("four"), says("Done."), user("book it again"))
    assert forced("ASK", later, session=asked).label == "ASK"
    assert SessionState().after(forced("ASK", first), first, applied=False) == SessionState()


def test_D13_a_loop_is_steered_to_an_answer_whatever_the_scores() -> None:
    step = [calls("get_weather", {"city": "Oslo"}), result("rain")]
    chat = chat_of(user("delete the weather"), *step, *step, tools=[WEATHER, tool("delete_weather")])
    decision = decided(verdict_of("ACT", 0.99), chat)
    assert (decision.label, decision.reason, decision.verdict) == ("ANSWER", "loop_guard", "ACT")
    off = msgspec.structs.replace(SETTINGS, loop_guard=False)
    assert decided(verdict_of("ACT", 0.99), chat, settings=off).label == "ACT"
    when_the_gate_failed = decide_unscored("gate_timeout", chat, SessionState(), SETTINGS)
    assert (when_the_gate_failed.label, when_the_gate_failed.reason) == ("ANSWER", "loop_guard")
    assert decide_unscored("gate_timeout", ASKED, SessionState(), SETTINGS) == unscored("gate_timeout")


def test_an_agent_that_does_not_go_along_is_left_alone() -> None:
    decision = decided(verdict_of("ANSWER"), session=SessionState(backed_off=("scored",)))
    assert (decision.label, decision.verdict, decision.reason) == ("ACT", "ANSWER", "backed_off")
    assert decision.cause == "scored"
    assert decided(verdict_of("ANSWER"), session=SessionState(backed_off=("loop_guard",))).label == "ANSWER"
    assert decided(verdict_of("ACT"), session=SessionState(backed_off=CAUSES)).reason == "need"


def loop() -> ChatView:
    step = [calls("get_weather", {"city": "Oslo"}), result("rain")]
    return chat_of(user("What is the weather like in Oslo?"), *step, *step, tools=[WEATHER])


@pytest.mark.parametrize(
    ("label", "backed_off", "decided_is"),
    [
        ("ANSWER", (), ("ANSWER", "loop_guard", "loop_guard")),
        ("ANSWER", ("scored",), ("ANSWER", "loop_guard", "loop_guard")),
        ("ANSWER", ("loop_guard",), ("ANSWER", "scored", "scored")),
        ("ACT", ("loop_guard",), ("ACT", "backed_off", "loop_guard")),
        ("ANSWER", CAUSES, ("ACT", "backed_off", "loop_guard")),
        ("ACT", CAUSES, ("ACT", "backed_off", "loop_guard")),
    ],
)
def test_in_a_loop_each_cause_steers_unless_it_has_backed_off(
    label: Label, backed_off: tuple[Cause, ...], decided_is: tuple[str, str, str]
) -> None:
    decision = decided(verdict_of(label), loop(), session=SessionState(backed_off=backed_off))
    assert (decision.label, decision.reason, decision.cause) == decided_is


def test_a_forced_verdict_goes_before_the_loop_guard() -> None:
    assert [(forced(label, loop()).reason, forced(label, loop()).cause) for label in ("ANSWER", "ACT")] == [
        ("forced", "scored"),
        ("forced", ""),
    ]


@pytest.mark.parametrize("backed_off", [(), ("scored",), ("loop_guard",), CAUSES])
def test_without_a_verdict_the_loop_guard_asks_for_its_own_evidence_only(backed_off: tuple[Cause, ...]) -> None:
    decision = decide_unscored("gate_timeout", loop(), SessionState(backed_off=backed_off), SETTINGS)
    if "loop_guard" in backed_off:
        assert decision == unscored("gate_timeout")
    else:
        assert (decision.label, decision.reason, decision.cause) == ("ANSWER", "loop_guard", "loop_guard")


def test_what_would_have_withheld_is_said_also_where_a_guard_forbids_it() -> None:
    action = chat_of(user("delete the old tunnel"), tools=[tool("list_tunnels"), tool("delete_tunnel")])
    vetoed = forced("ANSWER", action)
    assert (vetoed.reason, vetoed.cause) == ("guard:action", "scored")
    assert decided(verdict_of("ACT")).cause == forced("ACT").cause == unscored("need").cause == ""


@pytest.mark.parametrize("cause", CAUSES)
def test_a_skip_is_remembered_with_what_made_it_until_the_turn_after_it(cause: Cause) -> None:
    skip = msgspec.structs.replace(forced("ANSWER"), cause=cause)
    state = SessionState().after(skip, ASKED, applied=True)
    assert (state.skipped_in_turn, state.skipped_by) == (1, cause)
    step = chat_of(user("What is the weather like?"), calls("get_weather"), result("rain"))
    assert state.after(unscored("need"), step, applied=False).skipped_by == cause
    later = chat_of(user("What is the weather like?"), says("Mild."), user("And tomorrow?"))
    gone = state.after(unscored("need"), later, applied=False)
    assert (gone.skipped_in_turn, gone.skipped_by) == (0, "")


def test_O02_a_fallback_never_looks_like_a_scored_act() -> None:
    for reason in FAILURES:
        decision = unscored(reason)
        assert (decision.label, decision.reason, decision.engine, decision.confidence) == ("ACT", reason, "none", 0.0)
    assert not FAILURES & {"need", "low_confidence", "scored"}
    assert FAILURES <= REASONS.keys() >= RULES


@pytest.mark.parametrize(
    ("configured", "requested", "calibrated", "force", "mode"),
    [
        (None, None, False, None, "shadow"),
        (None, None, True, None, "enforce"),
        (None, None, False, "ASK", "enforce"),
        ("shadow", None, True, None, "shadow"),
        ("enforce", None, False, None, "enforce"),
        ("enforce", "off", True, None, "off"),
        ("shadow", "enforce", True, None, "enforce"),
        ("off", "enforce", True, None, "off"),
    ],
)
def test_O13_mode(configured: Any, requested: Any, calibrated: bool, force: Any, mode: str) -> None:
    profile = profile_of(calibrated=calibrated)
    assert mode_for(configured, requested, profile, force) == mode


def test_enforce_applies_only_what_a_profile_force_or_a_rule_stands_behind() -> None:
    scored = decided(verdict_of("ANSWER"))
    rule = msgspec.structs.replace(scored, reason="loop_guard")
    assert not may_apply(scored, "enforce", None, None)
    assert not may_apply(scored, "enforce", profile_of(calibrated=False), None)
    assert may_apply(scored, "enforce", profile_of(), None)
    assert may_apply(scored, "enforce", None, "ANSWER")
    assert may_apply(rule, "enforce", None, None)
    assert not may_apply(rule, "shadow", profile_of(), None)
    assert not may_apply(decided(verdict_of("ACT")), "enforce", profile_of(), None)


def test_what_is_forced_needs_no_gate() -> None:
    settings = PolicySettings(force="ANSWER")
    decision = decide_unscored("model_missing", ASKED, SessionState(), settings)
    assert (decision.label, decision.reason, decision.engine) == ("ANSWER", "forced", "none")
    assert decide_unscored("profile_unknown", ASKED, SessionState(), settings) == unscored("profile_unknown")
    held = decide_unscored("model_missing", ASKED, SessionState(backed_off=("scored",)), settings)
    assert (held.label, held.reason) == ("ACT", "backed_off")


WORTH = {"call_s": 10.0, "failure_s": 100.0, "cache_s": 8.0}  # a right skip saves 2 s: worth it below p(need) 0.02


def worth(payoff: dict[str, float], costs: dict[str, ToolCost], label: Label = "ANSWER", **fields: Any) -> str:
    """The reason of a decision at p(need) 0.05 that is safe by its threshold."""
    profile = profile_of(features=("best",), weights=(1.0,), tau=Tau(answer=0.5, ask=0.5, decline=0.5), payoff=payoff)
    verdict = msgspec.structs.replace(verdict_of(label, 0.94, fused=(-2.944, 0.0)), **fields)
    settings = msgspec.structs.replace(SETTINGS, tools=in_order(costs))
    return decided(verdict, profile=profile, settings=settings).reason


def test_a_skip_has_to_be_worth_it_too() -> None:
    assert worth({"call_s": 12.5}, {}) == "scored"  # without what a failure costs nothing can be weighed
    assert worth(WORTH, {}) == "not_worth_it"
    assert worth(WORTH | {"cache_s": 0.0}, {}) == "scored"
    dear = {WEATHER["function"]["name"]: ToolCost(latency_ms=5_000)}
    assert worth(WORTH, dear) == "scored"
    assert (
        worth(WORTH, {"*": ToolCost(latency_ms=5_000), WEATHER["function"]["name"]: ToolCost()}) == "not_worth_it"
    )  # the exact name


def test_a_tool_with_a_side_effect_is_never_skipped_for_its_cost() -> None:
    costs = {"*": ToolCost(usd=5.0, side_effect=True)}
    likely = {"tool": WEATHER["function"]["name"], "tool_probability": 0.9}
    assert worth(WORTH | {"cache_s": 0.0}, costs, **likely) == "guard:side_effect"
    assert worth(WORTH | {"cache_s": 0.0}, costs, "DECLINE", **likely) == "scored"
    assert worth(WORTH, costs) == "not_worth_it"  # which tool is open: its price is no reason


def test_thresholds_are_told_apart_by_the_kind_of_step() -> None:
    later = chat_of(user("What is the weather like?"), calls(WEATHER["function"]["name"]), result("It rains."))
    for tau, first, second in (
        (Tau(answer=ByKind(first=0.5)), "ANSWER", "ACT"),
        (Tau(answer=ByKind(later=0.5)), "ACT", "ANSWER"),
        (Tau(answer=0.5), "ANSWER", "ANSWER"),
    ):
        profile = profile_of(features=("best",), weights=(1.0,), tau=tau)
        verdict = verdict_of("ANSWER", 0.94, fused=(-2.944, 0.0))
        assert decided(verdict, profile=profile).label == first
        assert decided(verdict, later, profile=profile).label == second
