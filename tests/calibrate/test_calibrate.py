"""``calibrate`` from end to end, against scripted agents whose needs are known."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from tests.fakes.agents import Faults, ScriptedUpstream
from whetherman_edge.calibrate import cli
from whetherman_edge.calibrate.agent import AgentClient
from whetherman_edge.calibrate.capability_probe import Found
from whetherman_edge.calibrate.conclude import Conclusion, conclude
from whetherman_edge.calibrate.episode import ANYTHING, Steer, run_episode
from whetherman_edge.calibrate.labels import label, outcome
from whetherman_edge.calibrate.plan import Item
from whetherman_edge.calibrate.probe import Probe
from whetherman_edge.calibrate.report import Report, text
from whetherman_edge.calibrate.run_log import RunLine, RunLog, StepLine
from whetherman_edge.calibrate.runner import SPARE_STEPS, Budget, Measured, Runner, Settings
from whetherman_edge.cli import main
from whetherman_edge.profiles.schema import Profile, parse_profile, serialize_profile

ITEMS = cli.pack(1)


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of lines need not reach the disk here; ``test_run_log`` says that they do."""
    monkeypatch.setattr("whetherman_edge.calibrate.run_log.os.fsync", lambda _descriptor: None)


def free(probe: Probe) -> bool:
    """A small agent: it can do alone what needs no call at all."""
    return not probe.reference.calls


def some(items: Sequence[Item], *, each: int) -> list[Item]:
    """So many probes of every generator."""
    taken: dict[str, int] = {}
    found = []
    for item in items:
        name = item.probe.generator
        taken[name] = taken.get(name, 0) + 1
        if taken[name] <= each:
            found.append(item)
    return found


async def no_pause(_seconds: float) -> None:
    """Retries need not wait here."""


async def measure(
    upstream: ScriptedUpstream, items: Sequence[Item], log: RunLog, settings: Settings | None = None
) -> Measured:
    async with AgentClient(upstream.url, "fake", pause=no_pause) as client:
        return await Runner(client, items, log, settings or Settings(kind="llamacpp", runs=1, runs_max=1)).measure()


async def report_of(
    items: Sequence[Item], log: RunLog, measured: Measured, *, before: Profile | None = None, **changes: float
) -> Report:
    wanted = Conclusion(
        name="fake",
        model="fake",
        kind="llamacpp",
        quantisation="",
        engine="static",
        alpha=changes.get("alpha", 0.05),
        delta=0.1,
        budget=Budget(),
        created="2026-01-01T00:00:00+00:00",
        version="0",
        before=before,
    )
    return await conclude(wanted, items, log, measured)


def probe_with_calls(expect: str = "ACT") -> Probe:
    return next(item.probe for item in ITEMS if item.probe.expect == expect and item.probe.reference.calls)


async def test_labels_are_those_of_the_agent(tmp_path: Path) -> None:
    items = some(ITEMS, each=1)[::3]
    probes = [item.probe for item in items]
    clumsy = {probe.id for probe in probes[::7] if not free(probe)}
    with (
        ScriptedUpstream(probes, free, lambda probe: probe.id not in clumsy) as upstream,
        RunLog.open(tmp_path / "runs.jsonl") as log,
    ):
        measured = await measure(upstream, items, log)
        assert measured.end == "complete"
        assert measured.n_open == 0
        for item in items:
            runs = [run for run in log.runs if run.probe == item.probe.id]
            state = label(outcome(runs, measured.arm)).state
            wanted = "not_needed" if free(item.probe) else "lost" if item.probe.id in clumsy else "needed"
            assert state == wanted, item.probe.id


def record(log: RunLog, items: Sequence[Item], alone: Callable[[Probe], bool], *, arm: str = "note:reason") -> Measured:
    """The log that a whole calibration of an agent leaves, without running one."""
    step = StepLine(100, 20, 0.2, 1.0, cached=50)
    for item in items:
        for index, (which, success) in enumerate((("with", True), (arm, alone(item.probe)), (arm, alone(item.probe)))):
            log.add(
                RunLine(
                    probe=item.probe.id,
                    probe_sha=item.sha,
                    arm=which,
                    index=max(index - 1, 0),
                    success=success,
                    n_calls=len(item.probe.reference.calls) if which == "with" else 0,
                    steps=(step,) * (2 if which == "with" else 1),
                )
            )
    return Measured(end="complete", found=Found(shows_tools=True), arm=arm, capability=ANYTHING)


async def test_a_needy_agent_gets_thresholds_that_skip_what_is_not_needed(tmp_path: Path) -> None:
    with RunLog.open(tmp_path / "runs.jsonl") as log:
        report = await report_of(ITEMS, log, record(log, ITEMS, free))
    profile = report.profile
    assert profile is not None
    assert (profile.intervention.mode, profile.intervention.wording) == ("note", "reason")
    assert profile.agent.model == "fake"
    assert profile.calibrated
    assert report.fitted is not None
    for kind, threshold in report.fitted["thresholds"].items():
        assert threshold["bound"] <= 0.05, kind
        assert threshold["n_needed"] >= 45
        assert threshold["n_withheld"] >= 5
        assert profile.tau.at("ANSWER", kind) is not None
    parse_profile(serialize_profile(profile), "fake")
    assert profile.payoff["call_s"] > 0.0
    own = [item.probe for item in ITEMS if item.split == "calibrate"]
    kinds = {(probe.kind, probe.generator) for probe in own if probe.reference.calls}
    assert report.breadth is not None
    assert report.breadth.first + report.breadth.later == len(kinds)
    assert report.breadth.tools_max == max(len(probe.tools) for probe in own)
    assert f"with up to {report.breadth.tools_max} tools" in text(report)


async def test_refitting_gives_the_same_profile(tmp_path: Path) -> None:
    items = some(ITEMS, each=2)
    with RunLog.open(tmp_path / "runs.jsonl") as log:
        measured = record(log, items, free)
        reports = [await report_of(items, log, measured) for _ in range(2)]
    assert reports[0] == reports[1]


async def test_too_few_needed_steps_prove_nothing_and_the_report_says_how_many_would(tmp_path: Path) -> None:
    items = some(ITEMS, each=1)
    with RunLog.open(tmp_path / "runs.jsonl") as log:
        report = await report_of(items, log, record(log, items, free))
    assert report.profile is not None
    assert not report.profile.calibrated
    assert any("more probes would settle it" in line for line in report.more)


async def test_an_agent_that_solves_nothing_with_tools_gets_no_thresholds(tmp_path: Path) -> None:
    with RunLog.open(tmp_path / "runs.jsonl") as log:
        record(log, ITEMS, free)
        lines = [msgspec.structs.replace(run, success=run.success and run.arm != "with") for run in log.runs]
        log.lines[:] = lines
        measured = Measured(end="complete", found=Found(shows_tools=True), arm="note:reason", capability=ANYTHING)
        report = await report_of(ITEMS, log, measured)
    assert report.profile is None
    assert "some needed and some not" in report.reason
    assert report.totals["worse_with_tools"] == report.totals["not_needed"]


async def test_a_big_agent_that_answers_easy_and_medium_tasks_alone_keeps_its_lookups(tmp_path: Path) -> None:
    def alone(probe: Probe) -> bool:
        return free(probe) or (probe.expect == "" and probe.difficulty <= 2)

    with RunLog.open(tmp_path / "runs.jsonl") as log:
        report = await report_of(ITEMS, log, record(log, ITEMS, alone))
    assert report.fitted is not None
    hops = [row for row in report.labels if row["family"] == "hop"]
    assert hops
    assert all(set(row) == {"split", "kind", "family", "needed"} for row in hops)
    for threshold in report.fitted["thresholds"].values():
        assert threshold is None or threshold["n_false_skips"] <= 0.05 * threshold["n_needed"]


async def test_runs_on_another_version_of_a_probe_do_not_count(tmp_path: Path) -> None:
    items = some(ITEMS, each=1)
    with RunLog.open(tmp_path / "runs.jsonl") as log:
        measured = record(log, [msgspec.structs.replace(item, sha="old") for item in items], free)
        report = await report_of(items, log, measured)
    assert report.spent.n_runs == 0
    assert report.totals == {}


async def test_calls_in_the_text_count_as_calls(tmp_path: Path) -> None:
    probe = probe_with_calls()
    with ScriptedUpstream([probe], free, faults=Faults(writes_calls=True)) as upstream:
        async with AgentClient(upstream.url, "fake") as client:
            episode = await run_episode(client, probe)
    assert episode.success, episode.why
    assert episode.n_calls == len(probe.reference.calls)
    assert episode.steps[0].reply.from_content


@pytest.mark.parametrize("writes", [False, True])
async def test_calls_that_come_in_spite_of_a_note_are_refused_or_relayed(writes: bool) -> None:
    probe = probe_with_calls()
    with ScriptedUpstream([probe], free, faults=Faults(leaks=True, writes_calls=writes)) as upstream:
        async with AgentClient(upstream.url, "fake") as client:
            refused = await run_episode(client, probe, steer=Steer(capability=ANYTHING))
            relayed = await run_episode(client, probe, steer=Steer(capability=ANYTHING, on_call="relay"))
    assert not refused.success
    assert refused.n_calls == 0
    assert refused.n_refused > 0
    assert relayed.success, relayed.why
    assert any(step.resent for step in relayed.steps) == writes


async def test_an_agent_that_repeats_its_call_is_measured_behind_the_loop_guard() -> None:
    probe = probe_with_calls()
    with ScriptedUpstream([probe], free, faults=Faults(loops=True)) as upstream:
        async with AgentClient(upstream.url, "fake") as client:
            bare = await run_episode(client, probe)
            guarded = await run_episode(client, probe, guarded=ANYTHING)
    assert not bare.success
    assert bare.unfinished
    assert guarded.success, guarded.why
    assert [step.steered for step in guarded.steps[-2:]] == [False, True]
    assert guarded.n_calls == len(probe.reference.calls) + 1


async def test_a_run_that_wanders_ends_a_few_steps_beyond_what_its_task_needs(tmp_path: Path) -> None:
    item = next(item for item in ITEMS if item.probe.expect == "ACT" and item.probe.hops == 1)
    with (
        ScriptedUpstream([item.probe], free, faults=Faults(wanders=True)) as upstream,
        RunLog.open(tmp_path / "runs.jsonl") as log,
    ):
        await measure(upstream, [item], log)
    (run,) = [run for run in log.runs if run.arm == "with"]
    assert (len(run.steps), run.unfinished, run.success) == (1 + SPARE_STEPS, True, False)


def run_cli(upstream: ScriptedUpstream, folder: Path, *more: str) -> int:
    arguments = [
        "calibrate",
        "--agent-endpoint",
        upstream.url,
        "--model",
        "fake",
        "--name",
        "fake",
        "--kind",
        "llamacpp",
    ]
    return main([*arguments, "--engine", "static", "--dir", str(folder), *more])


def test_an_upstream_that_ignores_tools_gets_no_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedUpstream([], free, faults=Faults(ignores_tools=True)) as upstream:
        assert run_cli(upstream, tmp_path) == 1
        assert upstream.n_requests == 2
    assert "never sees the tools" in capsys.readouterr().err
    assert not (tmp_path / "fake.json").exists()
    report = json.loads((tmp_path / "fake.calibration" / "report.json").read_bytes())
    assert report["end"] == "unusable"


async def test_a_storm_of_429_is_sat_out(tmp_path: Path) -> None:
    items = some(ITEMS, each=1)[:10]
    faults = Faults(refuse=5)
    with (
        ScriptedUpstream([item.probe for item in items], free, faults=faults) as upstream,
        RunLog.open(tmp_path / "runs.jsonl") as log,
    ):
        measured = await measure(upstream, items, log)
    assert measured.end == "complete"
    assert faults.refuse == 0


async def test_a_server_that_turns_to_garbage_ends_the_calibration_and_keeps_what_there_is(tmp_path: Path) -> None:
    items = some(ITEMS, each=1)
    faults = Faults()
    with (
        ScriptedUpstream([item.probe for item in items], free, faults=faults) as upstream,
        RunLog.open(tmp_path / "runs.jsonl") as log,
    ):
        async with AgentClient(upstream.url, "fake", pause=no_pause, retries=1) as client:

            def break_it(_progress: object) -> None:
                faults.garbage = len(log.runs) >= 30

            settings = Settings(kind="llamacpp", runs=1, runs_max=1)
            measured = await Runner(client, items, log, settings, show=break_it).measure()
        assert measured.end == "server"
        assert "in a row" in measured.reason
        assert len(log.runs) == 30
        assert measured.n_open > 0


async def test_the_budget_in_dollars_is_kept(tmp_path: Path) -> None:
    budget = Budget(usd=0.02, usd_in=1.0, usd_out=1.0)
    with (
        ScriptedUpstream([item.probe for item in ITEMS], free) as upstream,
        RunLog.open(tmp_path / "runs.jsonl") as log,
    ):
        measured = await measure(upstream, ITEMS, log, Settings(kind="llamacpp", budget=budget))
        prompt, output, _ = log.spent()
    assert measured.end == "budget"
    assert 0.02 <= budget.cost(prompt, output) < 0.023  # one response over at most


async def test_the_budget_in_minutes_counts_what_was_spent_before(tmp_path: Path) -> None:
    now = 0.0
    path = tmp_path / "runs.jsonl"

    def clock() -> float:
        nonlocal now
        now += 0.05
        return now

    with ScriptedUpstream([item.probe for item in ITEMS], free) as upstream:
        for more_s, goes_on in ((20.0, True), (5.0, True), (0.0, False)):
            with RunLog.open(path) as log:
                before, spent_s = len(log.lines), log.spent()[2]
                settings = Settings(kind="llamacpp", budget=Budget(seconds=spent_s + more_s))
                async with AgentClient(upstream.url, "fake") as client:
                    measured = await Runner(client, ITEMS, log, settings, clock=clock).measure()
                assert measured.end == "budget"
                assert (len(log.lines) > before) is goes_on


def test_a_kill_in_the_middle_costs_one_run(tmp_path: Path) -> None:
    log_path = tmp_path / "fake.calibration" / "runs.jsonl"
    faults = Faults(hold_after=60)
    with ScriptedUpstream([item.probe for item in ITEMS], free, faults=faults) as upstream:
        arguments = ["--agent-endpoint", upstream.url, "--model", "fake", "--name", "fake", "--kind", "llamacpp"]
        command = [sys.executable, "-m", "whetherman_edge", "calibrate", *arguments, "--dir", str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            assert upstream.held.wait(120)
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
        kept = log_path.read_bytes()
        with log_path.open("ab") as file:
            file.write(b'{"t":"run","probe":"')  # what a kill inside a write leaves
        faults.hold_after = None
        assert run_cli(upstream, tmp_path) == 2  # not without --resume
        more = ("--resume", "--budget", "0.06usd", "--price", "1,1")
        assert run_cli(upstream, tmp_path, *more) == 0
        n_requests = upstream.n_requests
        assert run_cli(upstream, tmp_path, *more) == 0
        assert upstream.n_requests <= n_requests + 1
    assert log_path.read_bytes().startswith(kept)
    with RunLog.open(log_path) as log:
        runs = [(run.probe, run.arm, run.index) for run in log.lines if isinstance(run, RunLine)]
    assert len(runs) > 30
    assert len(runs) == len(set(runs))
    parse_profile((tmp_path / "fake.json").read_bytes(), "fake")


def test_a_log_of_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedUpstream([], free, faults=Faults(ignores_tools=True)) as upstream:
        run_cli(upstream, tmp_path)
        arguments = ["calibrate", "--agent-endpoint", upstream.url, "--model", "other", "--name", "fake", "--resume"]
        assert main([*arguments, "--dir", str(tmp_path), "--kind", "llamacpp"]) == 2
    assert "not of 'other'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "price", "budget"),
    [
        ([], None, Budget()),
        (["30m"], None, Budget(seconds=1800.0)),
        (["1.5h"], None, Budget(seconds=5400.0)),
        (["2.5usd"], "0.15,0.6", Budget(usd=2.5, usd_in=0.15, usd_out=0.6)),
        (["10min", "1USD"], "1,2", Budget(seconds=600.0, usd=1.0, usd_in=1.0, usd_out=2.0)),
    ],
)
def test_budgets(values: list[str], price: str | None, budget: Budget) -> None:
    assert cli.parse_budget(values, price) == budget


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--budget", "soon"), "30m or 2.5usd"),
        (("--budget", "0m"), "30m or 2.5usd"),
        (("--budget", "2usd"), "--price"),
        (("--price", "1"), "IN,OUT"),
        (("--workers", "0"), "--workers"),
        (("--alpha", "1.5"), "--alpha"),
        (("--key-env", "WHETHERMAN_NO_SUCH_KEY"), "WHETHERMAN_NO_SUCH_KEY"),
    ],
)
def test_wrong_flags(tmp_path: Path, more: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["calibrate", "--agent-endpoint", "http://127.0.0.1:9", "--model", "m", "--name", "n"]
    assert main([*arguments, "--dir", str(tmp_path), *more]) == 2
    assert message in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def test_the_report_is_a_page_that_needs_no_network(tmp_path: Path) -> None:
    with ScriptedUpstream([item.probe for item in ITEMS], free) as upstream:
        assert run_cli(upstream, tmp_path, "--budget", "0.05usd", "--price", "1,1") == 0
    page = (tmp_path / "fake.calibration" / "report.html").read_text("utf-8")
    assert "Calibration of fake" in page
    assert "http://" not in page.replace(upstream.url, "")
    assert "https://" not in page
    stored = msgspec.json.decode((tmp_path / "fake.calibration" / "report.json").read_bytes())
    assert stored["end"] == "budget"
    assert stored["spent"]["usd"] >= 0.05
