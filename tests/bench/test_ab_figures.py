"""The figures of ``bench ab`` on runs made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from whetherman_edge.bench import ab_figures, ab_hop
from whetherman_edge.bench.ab_figures import Prices, compare, mcnemar
from whetherman_edge.bench.ab_log import Run, Step

SKIP = Step(label="ANSWER", applied=True, reason="scored")


def run(gate: str, task: int, success: bool, **fields: Any) -> Run:
    values: dict[str, Any] = {
        "repeat": 0,
        "family": "lookup",
        "difficulty": 1,
        "kind": "first",
        "group": str(task),
        "why": "",
        "calls": 1,
        "steps": (Step(),),
        "requests": 2,
        "reused": 0,
        "prompt_tokens": 100,
        "output_tokens": 10,
        "cached_tokens": 0,
        "seconds": 2.0,
    }
    return Run(gate=gate, task=str(task), success=success, **(values | fields))


def test_pairs_wins_and_losses() -> None:
    none = [run("none", task, task < 6) for task in range(10)]
    own = [run("own", task, task in (0, 1, 2, 3, 4, 8, 9), calls=0, seconds=1.0) for task in range(10)]
    paired = compare([*none, *own], ("none", "own"), "none", Prices(), 0)["gates"]["own"]["against_none"]
    assert (paired["won"], paired["lost"], paired["success_points"]) == (2, 1, 10.0)
    assert paired["success_points_low"] < 10.0 < paired["success_points_high"]
    assert paired["change"]["calls"] == {"share": -1.0, "low": -1.0, "high": -1.0}
    assert paired["change"]["seconds"]["share"] == -0.5
    assert paired["change"]["usd"] is None, "nothing was priced"


def test_only_what_every_gate_has_finished_counts() -> None:
    runs = [run("none", 0, True), run("none", 1, True), run("own", 0, True), run("own", 1, False, error="HTTP 500")]
    figures = compare(runs, ("none", "own"), "none", Prices(), 0)
    assert (figures["n_runs"], figures["n_started"]) == (1, 2)
    assert figures["gates"]["own"]["success"]["n"] == 1


def test_a_false_skip_is_a_skip_that_failed_where_the_ungated_run_did_not() -> None:
    none = [run("none", 0, True), run("none", 1, True), run("none", 2, False), run("none", 3, True)]
    own = [
        run("own", 0, False, steps=(SKIP,)),
        run("own", 1, True, steps=(SKIP,)),
        run("own", 2, False, steps=(SKIP,)),  # there was nothing to lose
        run("own", 3, False),  # no skip: the agent's own bad luck
    ]
    own_figures = compare([*none, *own], ("none", "own"), "none", Prices(), 0)["gates"]["own"]
    assert (own_figures["false_skips"]["k"], own_figures["false_skips"]["n"]) == (1, 2)
    assert [one["task"] for one in own_figures["false_skip_tasks"]] == ["0"]
    assert own_figures["applied"] == {"ANSWER (scored)": 3}


def test_tasks_that_hang_together_are_drawn_together() -> None:
    alone = [(run("none", task, True), run("own", task, task % 2 == 0)) for task in range(40)]
    tied = [(run("none", task, True, group=str(task % 2)), gated) for task, (_, gated) in enumerate(alone)]
    narrow, wide = ab_figures.against(alone, Prices(), 1), ab_figures.against(tied, Prices(), 1)
    assert narrow["success_points"] == wide["success_points"] == -50.0
    assert wide["success_points_low"] == -100.0
    assert wide["success_points_high"] >= 0.0
    assert narrow["success_points_low"] > -70
    assert narrow["mcnemar_p"] < 0.001 < wide["mcnemar_p"] == 1.0


def test_pairs_that_never_differ_prove_no_more_than_their_number() -> None:
    pairs = [(run("none", task, True), run("own", task, True)) for task in range(400)]
    few, many = ab_figures.against(pairs[:30], Prices(), 1), ab_figures.against(pairs, Prices(), 1)
    assert few["success_points"] == many["success_points"] == 0.0
    assert few["success_points_low"] < -5.0 < many["success_points_low"] < 0.0 < many["success_points_high"]


def test_repeats_of_a_task_make_nothing_surer_than_the_task_is() -> None:
    def gates(repeats: int) -> Any:
        runs = [run("none", task, True, repeat=r) for task in range(20) for r in range(repeats)]
        runs += [run("own", task, task >= 5, repeat=r) for task in range(20) for r in range(repeats)]
        return compare(runs, ("none", "own"), "none", Prices(), 0)["gates"]["own"]

    once, often = gates(1), gates(8)
    assert often["success"]["n"] == 160
    for key in ("low", "high"):
        assert often["success"][key] == once["success"][key]
    assert often["against_none"]["mcnemar_p"] == once["against_none"]["mcnemar_p"] == 0.0625
    assert often["against_none"]["lost"] == 40


@pytest.mark.parametrize(
    ("body", "good"),
    [
        (b'{"choices":[{"message":{"content":"hi"}}]}', True),
        (b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\ndata: [DONE]\n\n', True),
        (b'{"error":{"message":"model crashed"}}', False),
        (b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\ndata: {"error":{"message":"crashed"}}\n\n', False),
        (b'{"choices":[]}', False),
        (b"", False),
    ],
)
def test_an_error_in_a_200_is_not_kept_as_the_reply_for_ever(body: bytes, good: bool) -> None:
    assert ab_hop.is_reply(body) is good


@pytest.mark.parametrize(("won", "lost", "p"), [(0, 0, 1.0), (1, 1, 1.0), (0, 6, 0.03125), (8, 1, 0.0390625)])
def test_mcnemar_is_exact(won: int, lost: int, p: float) -> None:
    assert mcnemar(won, lost) == pytest.approx(p)
    assert mcnemar(lost, won) == pytest.approx(p)


def test_prices() -> None:
    figures = compare([run("none", 0, True)], ("none",), "none", Prices(prompt_usd=2.0, output_usd=10.0), 0)
    assert figures["gates"]["none"]["usd"] == pytest.approx(300e-6)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2}}', (7, 2, None)),
        (
            b'data: {"usage":{"prompt_tokens":9,"completion_tokens":3},"timings":{"cache_n":4}}\n\ndata: [DONE]\n\n',
            (9, 3, 4),
        ),
        (b"no JSON", (None, None, None)),
        (b"[" * 100_000, (None, None, None)),
    ],
)
def test_the_servers_own_counts(body: bytes, expected: tuple[int | None, ...]) -> None:
    usage = ab_hop.usage_of(body)
    assert (usage.get("prompt_tokens"), usage.get("completion_tokens"), usage.get("cache_n")) == expected
