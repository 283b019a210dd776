"""Which probe comes next, and which intervention is taken."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

import pytest

from whetherman_edge.calibrate import interventions
from whetherman_edge.calibrate.capability_probe import Found
from whetherman_edge.calibrate.cli import pack
from whetherman_edge.calibrate.labels import Outcome
from whetherman_edge.calibrate.plan import BARREN_AFTER, BARREN_FAMILY_AFTER, IN_A_ROW, Item, Plan, stratum
from whetherman_edge.calibrate.probe import Probe
from whetherman_edge.calibrate.run_log import RunLine, StepLine

ITEMS = pack(1)


def settle(
    plan: Plan, needed: Callable[[Probe], bool], able: Callable[[Probe], bool] = lambda _probe: True, n: int = 10_000
) -> list[Item]:
    """Follow the plan's quick pass for ``n`` probes, every one coming out as the functions say; the probes in order."""
    outcomes: dict[str, Outcome] = {}
    order: list[Item] = []
    while len(order) < n:
        item = plan.next(outcomes, {}, thorough=False)
        if item is None:
            break
        order.append(item)
        found = Outcome()
        while (arm := plan.next_arm(item, found, thorough=False)) is not None:
            if arm == "with":
                found = Outcome((*found.with_tools, able(item.probe)), found.without)
            else:
                found = Outcome(found.with_tools, (*found.without, not needed(item.probe)))
        outcomes[item.probe.id] = found
    return order


def needs_calls(probe: Probe) -> bool:
    return bool(probe.reference.calls)


def test_every_probe_comes_once() -> None:
    order = settle(Plan(ITEMS), needs_calls)
    assert len(order) == len(ITEMS)
    assert len({item.probe.id for item in order}) == len(ITEMS)


def test_needed_steps_of_the_calibration_split_come_first_and_both_splits_get_their_share() -> None:
    order = settle(Plan(ITEMS), needs_calls, n=120)
    counts = Counter((item.split, item.probe.expect == "ACT") for item in order)
    assert counts["calibrate", True] >= 50
    assert counts["fit", True] >= 10
    assert counts["fit", False] >= 10
    assert counts["calibrate", False] >= 8


def test_a_short_budget_proves_one_kind_before_it_turns_to_the_other() -> None:
    plan = Plan(ITEMS)
    plan.focus = "first"
    order = settle(plan, needs_calls, n=250)
    wanted = [item.probe.kind for item in order if item.split == "calibrate" and item.probe.expect == "ACT"]
    assert set(wanted[: plan.targets["first"] - 15]) == {"first"}
    assert "later" in wanted
    sought = [(item.split, item.probe.kind, item.probe.expect) == ("calibrate", "first", "ACT") for item in order[:70]]
    assert sum(sought) >= 35


def test_what_the_agent_cannot_do_is_put_off() -> None:
    def able(probe: Probe) -> bool:
        return probe.family != "hop"

    order = settle(Plan(ITEMS), needs_calls, able)
    hops = [place for place, item in enumerate(order) if item.probe.family == "hop"]
    generators = {item.probe.generator for item in ITEMS if item.probe.family == "hop"}
    early = [place for place in hops if place < len(order) - len(hops)]
    assert len(early) <= BARREN_AFTER * len(generators)
    assert len(order) == len(ITEMS)


def test_a_family_that_bears_nothing_is_put_off_with_its_untried_generators() -> None:
    def able(probe: Probe) -> bool:
        return probe.family != "retry" or probe.kind != "later"

    order = settle(Plan(ITEMS), needs_calls, able)
    tried = [place for place, item in enumerate(order) if not able(item.probe)]
    generators = {item.probe.generator for item in ITEMS if not able(item.probe)}
    assert len(generators) * BARREN_AFTER > 2 * BARREN_FAMILY_AFTER, "or the family could not be told from them"
    early = [place for place in tried if place < len(order) - len(tried)]
    assert len(early) <= BARREN_FAMILY_AFTER + BARREN_AFTER
    assert len(order) == len(ITEMS)


def test_time_goes_to_the_kind_of_step_that_has_not_enough_yet() -> None:
    plan = Plan(ITEMS, proven=("first",))
    order = settle(plan, needs_calls, n=120)
    assert sum(item.probe.kind == "later" for item in order) > 0.7 * len(order)
    assert any(item.probe.kind == "first" for item in order)


def n_tools(item: Item) -> int:
    return len(item.probe.tools)


def test_probes_with_the_same_tools_come_in_rows_so_that_a_prefix_cache_holds_the_tools() -> None:
    order = settle(Plan(ITEMS), needs_calls, n=200)
    alike = [
        stratum(one) == stratum(other) and one.probe.tools == other.probe.tools
        for one, other in itertools.pairwise(order)
    ]
    assert sum(alike) > 0.35 * len(order)
    longest = max(len(row) for row in "".join("x" if like else " " for like in alike).split())
    assert longest < 2 * IN_A_ROW
    assert len({item.probe.generator for item in order}) > 70, "and still many generators are seen"


def test_long_prompts_wait_while_their_stratum_has_short_ones() -> None:
    order = settle(Plan(ITEMS), needs_calls)
    for kind in ("first", "later"):
        for split in ("fit", "calibrate"):
            row = [item for item in order if (item.split, item.probe.kind, item.probe.expect) == (split, kind, "ACT")]
            short = [place for place, item in enumerate(row) if n_tools(item) <= 3]
            long = [place for place, item in enumerate(row) if n_tools(item) >= 12]
            assert max(short) < min(long), (split, kind)


def run(probe: str, arm: str, *, success: bool = True, seconds: float = 1.0, calls: int = 0) -> RunLine:
    step = StepLine(prompt=100, output=10, ttft=0.1, seconds=seconds, cached=40)
    return RunLine(probe=probe, probe_sha="", arm=arm, index=0, success=success, n_calls=calls, steps=(step,))


def compared(**seconds: float) -> dict[str, interventions.Measured]:
    """Arms that are right throughout and take so long; with tools it takes 10 s."""
    runs = [run(probe, "with", seconds=10.0, calls=3) for probe in "abc"]
    runs += [run(probe, f"{arm}:reason", seconds=s) for probe in "abc" for arm, s in seconds.items()]
    return interventions.measure(runs)


def test_the_arm_that_saves_most_is_taken_and_a_note_where_it_is_about_equal() -> None:
    arms = ("note:reason", "strip:reason")
    assert interventions.choose(compared(note=6.0, strip=2.0), arms) == "strip:reason"
    assert interventions.choose(compared(note=2.5, strip=2.0), arms) == "note:reason"
    assert interventions.choose({}, arms) == interventions.DEFAULT_ARM


def test_an_arm_that_fails_fast_is_not_taken_for_a_quick_one() -> None:
    runs = [run(probe, "with", seconds=10.0) for probe in "abcdef"]
    runs += [run(probe, "note:reason", seconds=7.0) for probe in "abcdef"]
    runs += [run(probe, "none:reason", seconds=0.1, success=probe in "abc") for probe in "abcdef"]
    measured = interventions.measure(runs)
    assert measured["note:reason"].value_s > 0.0 > measured["none:reason"].value_s
    assert interventions.choose(measured, tuple(measured)) == "note:reason"


def test_arms_are_compared_on_the_same_probes_and_a_dropped_one_does_not_come_back() -> None:
    arms = tuple(f"{arm}:reason" for arm in ("note", "strip", "none", "prefill"))
    costs = dict(zip(arms, (4.0, 3.0, 5.0, 6.0), strict=True))
    long = [run(probe, "with", seconds=20.0) for probe in "abc"]
    long += [run(probe, arm, seconds=s) for probe in "abc" for arm, s in costs.items()]
    assert interventions.compared("abcdef", long, arms)[1] == arms[:3]
    short = [run(probe, "with", seconds=5.0) for probe in "def"]
    short += [run(probe, arm, seconds=costs[arm]) for probe in "def" for arm in arms[:3]]
    measured, tried = interventions.compared("abcdef", long + short, arms)
    assert tried == arms[:3]
    assert {m.n for m in measured.values()} == {6}
    assert interventions.measure(long + short)[arms[3]].value_s > max(m.value_s for m in measured.values())
    assert interventions.choose(measured, tried) == "note:reason"  # about as good as strip
    begun = [one for one in short if one.probe == "d"][:2]  # killed after with and note
    assert interventions.compared("abcdef", long + begun, arms)[1] == arms[:3]
    assert {m.n for m in interventions.compared("abcdef", long + begun, arms)[0].values()} == {3}


def test_an_arm_that_the_server_refuses_ends_no_comparison() -> None:
    arms = ("note:reason", "prefill:reason")
    runs = [run(probe, arm) for probe in "abcd" for arm in ("with", "note:reason")]
    measured, tried = interventions.compared("abcd", runs, arms)
    assert tried == ("note:reason",)
    assert measured["note:reason"].n == 4


def test_new_failures_cost_three_runs_each() -> None:
    runs = [run(probe, "with", seconds=10.0) for probe in "abc"]
    runs += [run(probe, "note:reason", seconds=4.0) for probe in "abc"]
    runs += [run(probe, "strip:reason", seconds=1.0, success=probe == "a") for probe in "abc"]
    measured = interventions.measure(runs)
    assert measured["note:reason"].value_s == pytest.approx(6.0)
    assert measured["strip:reason"].value_s == pytest.approx(9.0 - 3 * 10.0 * 2 / 3)
    assert measured["strip:reason"].reevaluated == 60.0
    assert interventions.choose(measured, tuple(measured)) == "note:reason"


def test_the_worst_arms_are_dropped_after_three_probes() -> None:
    arms = tuple(f"{arm}:reason" for arm in ("note", "strip", "none", "prefill"))
    few = interventions.measure([run("a", arm) for arm in ("with", *arms)])
    assert interventions.still_tried(few, arms) == arms
    measured = compared(note=2.0, strip=3.0, none=9.0, prefill=4.0)
    assert interventions.still_tried(measured, arms) == ("note:reason", "strip:reason", "prefill:reason")


def test_only_what_the_upstream_can_do_is_tried() -> None:
    assert "none:reason" not in interventions.arms(Found(honours_none=False))
    assert "prefill:reason" not in interventions.arms(Found(honours_none=True, prefill=True, thinks=True))
    assert interventions.arms(Found(honours_none=True, prefill=True)) == interventions.ALL_ARMS


def test_the_comparison_uses_easy_probes_of_the_fit_split_that_need_no_call() -> None:
    chosen = interventions.comparison_probes(ITEMS)
    assert len(chosen) == interventions.PROBES
    assert {item.split for item in chosen} == {"fit"}
    assert {item.probe.expect for item in chosen} <= {"ANSWER", ""}
    assert len({item.probe.family for item in chosen}) >= 4
    assert {item.probe.kind for item in chosen} == {"first", "later"}
