"""A calibration that is gone on with: what a further look costs, and what it may cost the server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from tests.calibrate.test_calibrate import ITEMS, free, measure, no_pause, record, report_of, some
from tests.fakes.agents import Faults, ScriptedUpstream
from whetherman_edge.calibrate import cli
from whetherman_edge.calibrate.agent import AgentClient
from whetherman_edge.calibrate.plan import Plan
from whetherman_edge.calibrate.report import text
from whetherman_edge.calibrate.run_log import LookLine, RunLog
from whetherman_edge.calibrate.runner import Budget, Runner, Settings
from whetherman_edge.cli import main
from whetherman_edge.errors import UsageError
from whetherman_edge.profiles.risk import DELTA, look_level
from whetherman_edge.profiles.schema import (
    ByKind,
    Counted,
    Proof,
    Risk,
    Tau,
    parse_profile,
    proven_kinds,
    serialize_profile,
    taus,
)
from whetherman_edge.service.discovery import Served

PROOF = Proof(60, 50, 0, 5, 0.0471, {"ANSWER": Counted(5, 0)})


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """See ``test_calibrate``."""
    monkeypatch.setattr("whetherman_edge.calibrate.run_log.os.fsync", lambda _descriptor: None)


def looks(log: RunLog) -> list[LookLine]:
    return [line for line in log.lines if isinstance(line, LookLine)]


async def test_every_further_look_at_new_data_spends_its_part_and_the_same_look_nothing(tmp_path: Path) -> None:
    kept = [item for item in ITEMS if item.split == "fit"]
    calibrate = [item for item in ITEMS if item.split == "calibrate"]
    with RunLog.open(tmp_path / "runs.jsonl") as log:
        few = some(kept + calibrate, each=1)
        await report_of(ITEMS, log, record(log, few, free))
        assert looks(log) == [], "so few needed steps could not pass: that was no look"
        more = [item for item in some(ITEMS, each=6) if item not in few]
        measured = record(log, more, free)
        first = await report_of(ITEMS, log, measured)
        assert [look.level for look in looks(log)] == [look_level(DELTA, 0)] * 2
        assert await report_of(ITEMS, log, measured) == first
        assert len(looks(log)) == 2
        measured = record(log, [item for item in ITEMS if item not in few + more], free)
        second = await report_of(ITEMS, log, measured)
    with RunLog.open(tmp_path / "runs.jsonl") as log:
        assert sorted(look.level for look in looks(log)) == [look_level(DELTA, 1)] * 2 + [look_level(DELTA, 0)] * 2
    for report in (first, second):
        assert report.profile is not None
        assert report.profile.calibrated
        parse_profile(serialize_profile(report.profile), "fake")


async def test_what_was_proven_stands_when_the_calibration_goes_on(tmp_path: Path) -> None:
    """A few probes more are too few for a second look, whose error is a tenth of the first one's."""
    more = some(ITEMS, each=3)
    last = [item for item in ITEMS if item not in more][:10]
    with RunLog.open(tmp_path / "runs.jsonl") as log:
        first = (await report_of(ITEMS, log, record(log, more, free))).profile
        assert first is not None
        assert proven_kinds(first) == {"first", "later"}
        measured = record(log, last, free)
        alone = (await report_of(ITEMS, log, measured)).profile
        assert alone is not None
        assert not alone.calibrated, "by itself the look proves nothing"
        report = await report_of(ITEMS, log, measured, before=first)
        second = report.profile
        assert second is not None
        assert (second.layer, second.risk) == (first.layer, first.risk)
        assert list(taus(second.tau)) == list(taus(first.tau))
        assert text(report).count("as proven before") == 2
        half = msgspec.structs.replace(first, tau=Tau(answer=ByKind(first=0.5)), risk=Risk(0.05, 0.1, first=PROOF))
        third = (await report_of(ITEMS, log, measured, before=half)).profile
        other = msgspec.structs.replace(first, agent=msgspec.structs.replace(first.agent, model="another"))
        foreign = (await report_of(ITEMS, log, measured, before=other)).profile
    assert third is not None
    assert third.risk is not None
    assert (third.layer, third.risk.first, third.tau.at("ANSWER", "first")) == (first.layer, PROOF, 0.5)
    parse_profile(serialize_profile(third), "fake")
    assert foreign is not None
    assert not foreign.calibrated


def test_a_proven_profile_is_not_written_over_by_one_that_proves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For example where the backbone's weights are missing now, and the fit falls back to the static gate."""
    few = some(ITEMS, each=1)
    with RunLog.open(tmp_path / "runs.jsonl") as log:
        report = asyncio.run(report_of(few, log, record(log, few, free)))
    bare = report.profile
    assert bare is not None
    assert not bare.calibrated
    proven = msgspec.structs.replace(bare, tau=Tau(answer=ByKind(first=0.5)), risk=Risk(0.05, 0.1, first=PROOF))
    path = tmp_path / "fake.json"
    arguments = ["calibrate", "--agent-endpoint", "http://127.0.0.1:9", "--model", "fake", "--name", "fake", "--resume"]

    async def made(*_arguments: object) -> object:
        return report

    monkeypatch.setattr(cli, "_calibrate", made)
    path.write_bytes(serialize_profile(proven))
    assert main([*arguments, "--dir", str(tmp_path)]) == 0
    assert parse_profile(path.read_bytes(), "fake") == proven
    assert "stays as it is" in capsys.readouterr().err
    path.write_bytes(serialize_profile(msgspec.structs.replace(bare, version="older")))
    assert main([*arguments, "--dir", str(tmp_path)]) == 0
    assert parse_profile(path.read_bytes(), "fake") == bare


async def test_the_quantisation_is_what_the_server_says(monkeypatch: pytest.MonkeyPatch) -> None:
    async def models_of(_url: str, _kind: str) -> list[Served]:
        return models

    monkeypatch.setattr("whetherman_edge.service.discovery.models_of", models_of)
    models = [Served("a:1b", "Q4_K_M"), Served("b:1b", "Q8_0")]
    assert await cli._quantisation("http://x/v1", "ollama", "b:1b") == "Q8_0"
    assert await cli._quantisation("http://x/v1", "ollama", "c:1b") == ""
    models = [Served("alias", file="/models/Coder-1B-Q4_K_M.gguf")]
    assert await cli._quantisation("http://x/v1", "llamacpp", "any name does") == "Q4_K_M"
    models = []
    assert await cli._quantisation("http://x/v1", "openai", "m") == ""


def test_a_further_look_seeks_more_needed_steps_and_a_proven_kind_none() -> None:
    first, second = Plan(ITEMS), Plan(ITEMS, looks={"first": 1}, proven=("later",))
    assert first.targets["first"] < second.targets["first"]
    assert second.targets["later"] == 0
    assert Plan(ITEMS, alpha=0.1).targets["first"] < first.targets["first"]


async def test_the_plan_knows_the_claim_and_the_looks(tmp_path: Path) -> None:
    with RunLog.open(tmp_path / "runs.jsonl") as log:
        log.add(LookLine("later", "0" * 64, "x", look_level(DELTA, 0)))
        async with AgentClient("http://127.0.0.1:9", "fake") as client:
            plan = Runner(client, ITEMS, log, Settings(alpha=0.1, proven=frozenset({"first"})))._plan
    assert plan.targets == Plan(ITEMS, alpha=0.1, looks={"later": 1}, proven=("first",)).targets


async def test_requests_that_the_server_refuses_end_nothing_when_they_are_few_probes(tmp_path: Path) -> None:
    items = some(ITEMS, each=1)
    faults = Faults()
    with (
        ScriptedUpstream([item.probe for item in items], free, faults=faults) as upstream,
        RunLog.open(tmp_path / "runs.jsonl") as log,
    ):
        async with AgentClient(upstream.url, "fake", pause=no_pause) as client:

            def refuse_some(_progress: object) -> None:
                if len(log.runs) == 40 and faults.status != 400:
                    faults.refuse, faults.status = 8, 400  # four probes, twice each

            settings = Settings(kind="llamacpp", runs=1, runs_max=1)
            measured = await Runner(client, items, log, settings, show=refuse_some).measure()
    assert measured.end == "complete"
    assert measured.n_open == 4


async def test_a_spent_budget_needs_no_server(tmp_path: Path) -> None:
    settings = Settings(kind="llamacpp", budget=Budget(usd=0.02, usd_in=1.0, usd_out=1.0))
    path = tmp_path / "runs.jsonl"
    with ScriptedUpstream([item.probe for item in ITEMS], free) as upstream:
        with RunLog.open(path) as log:
            assert (await measure(upstream, ITEMS, log, settings)).end == "budget"
        n_requests = upstream.n_requests
        with RunLog.open(path) as log:
            measured = await measure(upstream, ITEMS, log, settings)
        assert measured.end == "budget"
        assert upstream.n_requests == n_requests


async def test_a_wait_that_the_budget_does_not_reach_to_is_not_waited(tmp_path: Path) -> None:
    items = some(ITEMS, each=1)[:4]
    waited: list[float] = []

    async def pause(seconds: float) -> None:
        waited.append(seconds)

    faults = Faults(refuse=1000, retry_after="500")
    settings = Settings(kind="llamacpp", budget=Budget(seconds=300.0))
    with (
        ScriptedUpstream([item.probe for item in items], free, faults=faults) as upstream,
        RunLog.open(tmp_path / "runs.jsonl") as log,
    ):
        async with AgentClient(upstream.url, "fake", pause=pause) as client:
            assert (await Runner(client, items, log, settings).measure()).end == "budget"
    assert waited == []


async def test_probes_of_another_seed_are_not_mixed(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    with ScriptedUpstream([item.probe for item in ITEMS[:1]], free) as upstream:
        with RunLog.open(path) as log:
            await measure(upstream, ITEMS[:1], log)
        with RunLog.open(path) as log, pytest.raises(UsageError, match="--seed 1, not 2"):
            await measure(upstream, ITEMS[:1], log, Settings(kind="llamacpp", seed=2))


async def test_replies_of_another_length_are_not_mixed(tmp_path: Path) -> None:
    items = some(ITEMS, each=1)[:4]
    path = tmp_path / "runs.jsonl"
    with ScriptedUpstream([item.probe for item in items], free) as upstream:
        with RunLog.open(path) as log:
            await measure(upstream, items, log)
        with RunLog.open(path) as log:
            async with AgentClient(upstream.url, "fake", max_tokens=80) as client:
                with pytest.raises(UsageError, match="--max-tokens 512, not 80"):
                    await Runner(client, items, log, Settings(kind="llamacpp")).measure()
