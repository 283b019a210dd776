"""``bench ab`` from its command line, against agents whose needs are known exactly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.bench.ab_agent import Need, ScriptedAgent
from whetherman_edge import cli
from whetherman_edge.bench import ab
from whetherman_edge.calibrate import fitting, probes
from whetherman_edge.calibrate.labels import Outcome
from whetherman_edge.calibrate.plan import Item
from whetherman_edge.calibrate.probe import Probe
from whetherman_edge.engine import Router, StaticEngine
from whetherman_edge.profiles import schema
from whetherman_edge.profiles.fit import Fit
from whetherman_edge.profiles.risk import ALPHA
from whetherman_edge.profiles.schema import Agent, EngineArtifact, Profile, Risk, Tau, serialize_profile

MODEL = "scripted"
ALONE = ("arithmetic", "computation", "knowledge")


def needs_lookups(probe: Probe) -> bool:
    """A big agent: easy and medium questions by itself, everything that stands elsewhere by a call."""
    return bool(probe.reference.calls) and not (probe.family in ALONE and probe.difficulty <= 2)


async def calibrated(needs: Need, engine: StaticEngine) -> Profile:
    """The profile that ``calibrate`` would fit on this agent's own runs; a known need stands for the runs."""
    packed = [probe for probe in probes.draw(1) if probes.split_of(probe.generator) != "test"]
    items = [Item(probe, probes.split_of(probe.generator), probe.id) for probe in packed]
    outcomes = {probe.id: Outcome((True,) * 3, (not needs(probe),) * 3) for probe in packed}

    def made(fit: Fit) -> Profile:
        return Profile(
            schema=schema.SCHEMA_VERSION,
            agent=Agent("unknown", MODEL),
            engine=EngineArtifact("static", engine.sha256),
            layer=fit.layer,
            tau=Tau(),
            risk=None,
            created="2026-01-01T00:00:00+00:00",
            version="0.1.0",
        )

    rows = await fitting.rows_of(items, outcomes, engine, MODEL)
    tried = [item.probe.kind for item in items if item.split == "calibrate"]
    n_tried: dict[schema.StepKind, int] = {"first": tried.count("first"), "later": tried.count("later")}
    fitted = await fitting.fit_rows(rows, engine, made, n_tried=n_tried, alpha=ALPHA)
    tau, risk = schema.proven(fitted.thresholds, alpha=ALPHA, delta=0.1)
    return msgspec.structs.replace(made(fitted.fit), tau=tau, risk=risk)


@pytest.fixture(scope="module")
def own() -> Profile:
    return asyncio.run(calibrated(needs_lookups, StaticEngine(Router())))


def opposite(profile: Profile) -> Profile:
    """The profile of an agent that needs a call just where this one does not."""
    layer = profile.layer
    turned = msgspec.structs.replace(layer, weights=tuple(-w for w in layer.weights), bias=-layer.bias)
    risk = Risk(0.05, 0.1, 200, 60, 1, n_needed=120)
    return msgspec.structs.replace(profile, layer=turned, tau=Tau(answer=0.5), risk=risk)


@pytest.fixture
def profiles(own: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs "own" and "other" where the user's profiles are."""
    folder = tmp_path / "profiles"
    folder.mkdir()
    monkeypatch.setattr("whetherman_edge.profiles.store.default_dirs", lambda: (folder,))
    (folder / "own.json").write_bytes(serialize_profile(own))
    (folder / "other.json").write_bytes(serialize_profile(opposite(own)))


Bench = Callable[..., Any]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Runs the command line in a thread of its own and returns (exit code, figures)."""

    async def run(agent: ScriptedAgent, *flags: str, out: str = "out") -> tuple[int, dict[str, Any]]:
        command = ["bench", "ab", "--agent-endpoint", agent.url, "--model", MODEL, "--engine", "static"]
        command += ["--gate-deadline-ms", "3000", "--out", str(tmp_path / out), *flags]
        monkeypatch.setattr("sys.argv", ["whetherman-edge", *command])
        code = await asyncio.to_thread(cli.main, command)
        path = tmp_path / out / ab.FIGURES
        return code, json.loads(path.read_text()) if path.exists() else {}

    return run


def chosen(monkeypatch: pytest.MonkeyPatch, *families: str, most: int = 6) -> list[Probe]:
    """Makes the test split a small one: up to ``most`` probes of each family."""
    seen: dict[str, int] = {}
    found = []
    for probe in probes.draw(0, split="test"):
        if probe.family in families and seen.get(probe.family, 0) < most:
            seen[probe.family] = seen.get(probe.family, 0) + 1
            found.append(probe)
    monkeypatch.setattr(probes, "draw", lambda seed, *, split=None: found)
    return found


def success(figures: dict[str, Any], gate: str) -> float:
    return figures["gates"][gate]["success"]["share"]


@pytest.mark.usefixtures("profiles")
async def test_gates_separate_as_they_must(bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = chosen(monkeypatch, "chat", "knowledge", "sufficient", "lookup", "hop", most=5)
    async with ScriptedAgent(found, needs_lookups, eager=True) as agent:
        code, figures = await bench(agent, "--profile", "own", "--other-profile", "other")
    assert code == 0
    gates = figures["gates"]
    assert list(gates) == [name for name in ab_gates() if name != "shared"], "static engine: no shared backbone"
    assert success(figures, "none") == 1.0
    assert success(figures, "oracle") >= success(figures, "own") > success(figures, "other")
    assert gates["other"]["false_skips"]["k"] == len(gates["other"]["false_skip_tasks"]) > 0
    assert gates["oracle"]["calls"] < gates["own"]["calls"] < gates["none"]["calls"]
    assert gates["own"]["against_none"]["change"]["tokens"]["share"] < 0
    assert gates["none"]["applied"] == {}
    assert gates["always_prompt"]["prompt_tokens"] > gates["none"]["prompt_tokens"]
    assert gates["prompted"]["requests"] > gates["none"]["requests"], "the question itself counts"
    assert gates["prompted"]["calls"] == gates["none"]["calls"], "this model says YES always"
    page = (tmp_path / "out" / ab.PAGE).read_text()
    assert "http" not in page.replace("http-equiv", ""), "self-contained"
    assert page.count("<svg") > len(gates)
    assert "prefers-color-scheme:dark" in page


def ab_gates() -> Sequence[str]:
    from whetherman_edge.bench.ab_gates import GATES

    return list(GATES)


@pytest.mark.usefixtures("profiles")
async def test_a_big_agent_keeps_all_later_lookups(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    many = ("hop", "pagination", "comparison", "retry", "lookup")
    found = chosen(monkeypatch, *many, *ALONE, "chat", most=40)
    async with ScriptedAgent(found, needs_lookups, eager=True) as agent:
        code, figures = await bench(agent, "--profile", "own", "--gates", "own")
    assert code == 0
    paired = figures["gates"]["own"]["against_none"]
    assert paired["lost"] == 0, figures["gates"]["own"]["false_skip_tasks"]
    assert figures["gates"]["own"]["applied"], "and it does skip something"
    assert figures["families"]["hop"]["own"]["success"] == figures["families"]["hop"]["none"]["success"]


async def test_same_bytes_are_asked_for_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    found = chosen(monkeypatch, "lookup", most=3)
    async with ScriptedAgent(found, needs_lookups) as agent:
        _, figures = await bench(agent, "--gates", "loop_guard")
        n_asked = len(agent.bodies)
        assert n_asked == sum(1 + len(probe.reference.calls) for probe in found)
        await bench(agent, "--gates", "loop_guard", "--no-reuse", out="again")
        assert len(agent.bodies) - n_asked == 2 * n_asked
    gates = figures["gates"]
    assert gates["loop_guard"]["reused_runs"] == len(found)
    assert gates["none"]["reused_runs"] == 0
    assert gates["loop_guard"]["prompt_tokens"] == gates["none"]["prompt_tokens"] > 0


async def test_a_killed_bench_goes_on(bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = chosen(monkeypatch, "lookup", "chat", most=3)
    flags = ("--gates", "loop_guard,rules")
    async with ScriptedAgent(found, needs_lookups) as agent:
        _, whole = await bench(agent, *flags, out="whole")
        runs, replies = tmp_path / "whole" / ab.RUNS, tmp_path / "whole" / ab.REPLIES
        kept = runs.read_bytes().splitlines(keepends=True)[:6]
        cut = tmp_path / "cut"
        cut.mkdir()
        (cut / ab.RUNS).write_bytes(b"".join(kept) + b'{"gate":"rules","ta')  # killed while a row was written
        (cut / ab.REPLIES).write_bytes(replies.read_bytes()[:-7])
        assert (await bench(agent, *flags, out="cut"))[0] == 2, "a log is there already"
        n_asked = len(agent.bodies)
        code, figures = await bench(agent, *flags, "--resume", out="cut")
        assert code == 0
        assert len(agent.bodies) - n_asked == 1, "all but the torn reply was kept"
        assert (await bench(agent, "--gates", "rules", "--seed", "7", "--resume", out="cut"))[0] == 2
    assert figures["n_runs"] == whole["n_runs"] == len(found)
    for gate in ("none", "loop_guard", "rules"):
        assert success(figures, gate) == success(whole, gate)
        assert figures["gates"][gate]["calls"] == whole["gates"][gate]["calls"]


async def test_later_repeats_are_sampled_each_with_its_seed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    found = chosen(monkeypatch, "chat", most=1)
    async with ScriptedAgent(found, needs_lookups) as agent:
        _, figures = await bench(agent, "--gates", "none", "--repeats", "3", "--seed", "5", "--temperature", "0.9")
        sent = [(body["temperature"], body["seed"]) for body in agent.bodies]
    assert sent == [(0.0, 5), (0.9, 6), (0.9, 7)]
    assert figures["n_runs"] == 3


async def test_a_server_that_is_gone_ends_the_bench_with_what_was_done(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = chosen(monkeypatch, "chat", most=6)
    monkeypatch.setattr("whetherman_edge.calibrate.agent.RETRIES_MAX", 0)
    async with ScriptedAgent(found, needs_lookups) as agent:
        agent.status = 400
        code, figures = await bench(agent, "--gates", "loop_guard")
    assert code == 1
    assert figures["n_runs"] == 0
    assert "failed 5 runs in a row" in figures["about"]["cut"]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--gates", "best"), "expected names of none, loop_guard"),
        (("--gates", "own"), "own needs --profile"),
        (("--gates", "shared"), "another --engine"),
        (("--repeats", "0"), "expected at least 1"),
        (("--profile", "nobody", "--gates", "own"), "no profile named 'nobody'"),
    ],
)
async def test_wrong_flags_are_told(
    bench: Bench, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], told: str
) -> None:
    async with ScriptedAgent([], needs_lookups) as agent:
        assert (await bench(agent, *flags))[0] == 2
    assert told in capsys.readouterr().err
