"""Labels from runs, and the run that would decide next."""

from __future__ import annotations

import pytest

from whetherman_edge.calibrate.labels import Arm, Label, Outcome, label, next_arm, outcome
from whetherman_edge.calibrate.probe import Expect
from whetherman_edge.calibrate.run_log import RunLine

T, F = True, False


@pytest.mark.parametrize(
    ("with_tools", "without", "state", "proof", "worse"),
    [
        ((), (), "open", None, False),
        ((T,), (), "open", None, False),
        ((), (T,), "open", None, False),  # right without once, at temperature 0: luck perhaps
        ((T,), (T,), "open", None, False),
        ((F,), (T,), "open", None, True),
        ((T,), (T, T), "not_needed", False, False),
        ((), (T, T), "not_needed", False, False),
        ((F,), (T, T), "not_needed", False, True),
        ((T,), (F,), "needed", True, False),
        ((T, T, T), (F, F, F), "needed", True, False),
        ((F,), (), "lost", None, False),
        ((F, F), (F,), "lost", None, False),
        ((F, F), (T, F), "soft", False, True),
        ((T, T), (T, F), "soft", True, False),
        ((T, T, F), (T, F, T), "soft", False, False),
        ((T, T, T), (T, T, F), "soft", None, False),
        ((T, F, F), (F, F, F), "soft", None, False),
    ],
)
def test_label(
    with_tools: tuple[bool, ...], without: tuple[bool, ...], state: str, proof: bool | None, worse: bool
) -> None:
    found = label(Outcome(with_tools, without))
    assert (found.state, found.proof, found.worse_with_tools) == (state, proof, worse)


def test_a_lost_probe_weighs_nothing_and_a_mixed_one_less() -> None:
    assert label(Outcome((F,), (F,))) == Label("lost")
    mixed = label(Outcome((T, T, T, F), (F, F, F, T)))
    assert 0.0 < mixed.needed < 1.0
    assert 0.0 < mixed.weight < 1.0


def test_only_the_chosen_arm_counts_in_the_order_of_the_runs() -> None:
    runs = [
        RunLine(probe="p", probe_sha="", arm=arm, index=index, success=success)
        for arm, index, success in [("with", 1, F), ("note:reason", 0, T), ("with", 0, T), ("strip:reason", 0, F)]
    ]
    assert outcome(runs, "note:reason") == Outcome((T, F), (T,))


def play(expect: Expect, with_tools: bool, without: bool, *, thorough: bool = False) -> list[Arm]:
    """The runs that are made on a probe whose arms always come out like this."""
    made: list[Arm] = []
    found = Outcome()
    while (arm := next_arm(found, expect, thorough=thorough)) is not None:
        made.append(arm)
        assert len(made) <= 10
        if arm == "with":
            found = Outcome((*found.with_tools, with_tools), found.without)
        else:
            found = Outcome(found.with_tools, (*found.without, without))
    return made


@pytest.mark.parametrize(
    ("expect", "with_tools", "without", "runs"),
    [
        ("ACT", T, F, ["with", "without"]),
        ("ACT", F, F, ["with"]),
        ("ACT", T, T, ["with", "without", "without"]),
        ("ANSWER", T, T, ["without", "without"]),
        ("", T, F, ["without", "with", "without", "with"]),
        ("ANSWER", F, F, ["without", "with"]),
    ],
)
def test_a_probe_is_left_as_soon_as_it_is_decided(
    expect: Expect, with_tools: bool, without: bool, runs: list[Arm]
) -> None:
    assert play(expect, with_tools, without) == runs


def test_with_time_each_arm_is_run_three_times_and_five_where_mixed() -> None:
    assert play("ACT", T, F, thorough=True) == ["without"] * 3 + ["with"] * 3
    assert play("ANSWER", T, T, thorough=True) == ["without"] * 3
    assert next_arm(Outcome((), (T, F, T)), "", thorough=True) == "without"
    assert next_arm(Outcome((), (T, F, T, T, T)), "", thorough=True) == "with"
    assert next_arm(Outcome((T, T, F, T, T), (T, F, T, T, T)), "", thorough=True) is None
