"""The profiles that come with the package: sound, on the packaged gate, with their reports, and found."""

from __future__ import annotations

import json
import lzma
import tomllib
from pathlib import Path

import pytest

from tests.profiles.samples import profile_of
from whetherman_edge.calibrate.probes import draw
from whetherman_edge.calibrate.run_log import RunLog
from whetherman_edge.calibrate.runner import digest
from whetherman_edge.cli import main
from whetherman_edge.engine import check_packaged
from whetherman_edge.gate.static_gate import packaged_sha256
from whetherman_edge.profiles import store
from whetherman_edge.profiles.schema import EngineArtifact, Found, Profile, parse_profile, serialize_profile

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "profiles"


def test_every_shipped_profile_is_sound_fits_the_packaged_gate_and_has_its_report() -> None:
    names = sorted(path.stem for path in FOLDER.glob("*.json"))
    for name in names:
        assert store.is_name(name)
        profile = parse_profile((FOLDER / f"{name}.json").read_bytes(), name)
        check_packaged(profile, name)
        report = json.loads((FOLDER / "reports" / f"{name}.json").read_bytes())
        assert report["profile"] == json.loads(serialize_profile(profile))
        page = (FOLDER / "reports" / f"{name}.html").read_text("utf-8")
        assert profile.agent.model in page
        assert profile.found, "the calibration of a like agent starts from it"
    reports = {path.stem for path in (FOLDER / "reports").glob("*")} if (FOLDER / "reports").is_dir() else set()
    assert reports == set(names)


def test_an_installed_package_looks_where_the_wheel_puts_them() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["scikit-build"]
    wheel = next(one for one in build["overrides"] if one["if"].get("state") == "wheel")
    places = [place for place, source in wheel["wheel"]["packages"].items() if source == "profiles"]
    assert [ROOT / place for place in places] == [store.default_dirs()[1]]
    assert store.default_dirs()[2] == FOLDER, "and a checkout where they are"


def shipped(folder: Path, monkeypatch: pytest.MonkeyPatch, profile: Profile) -> None:
    """Puts a profile where the shipped ones are, beside an empty folder of the user's."""
    (folder / "shipped" / "reports").mkdir(parents=True)
    (folder / "shipped" / "small.json").write_bytes(serialize_profile(profile))
    (folder / "shipped" / "reports" / "small.json").write_bytes(b"{}")
    monkeypatch.setattr(store, "default_dirs", lambda: (folder / "user", folder / "shipped"))


def test_a_shipped_profile_of_the_packaged_gate_is_listed_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {
        "light": Found(needed=2),
        "sum": Found(needed=1, lost=1),
        "poem": Found(not_needed=2),
        "odd": Found(lost=1),
    }
    shipped(tmp_path, monkeypatch, profile_of(engine=EngineArtifact("static", packaged_sha256()), found=found))
    assert main(["profile", "list"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[1].split()[:2] == ["small", "calibrated"]
    assert len(rows) == 4, "its report is no profile"
    assert "Q4_K_M" in rows[1]
    assert '"MODEL" = "NAME" under [agents]' in rows[2]
    assert main(["profile", "show", "small"]) == 0
    shown = capsys.readouterr().out
    assert "qwen2.5-0.5b-instruct" in shown
    assert "needed calls in 2 of 4 kinds of task" in shown


def test_one_of_another_gate_is_listed_as_unusable_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shipped(tmp_path, monkeypatch, profile_of(engine=EngineArtifact("static", "0" * 64)))
    assert main(["profile", "list"]) == 0
    told = capsys.readouterr()
    assert told.out.splitlines()[1].split()[:2] == ["small", "unusable"]
    assert "calibrate again with this version" in told.err


def test_a_shipped_log_can_be_gone_on_with(tmp_path: Path) -> None:
    """Its runs are of probes of today's pack: a log of probes that have changed since would start from nothing."""
    known = {probe.id: digest(probe) for probe in draw(1)}
    for path in sorted((FOLDER / "logs").glob("*")):
        assert path.name.endswith(".jsonl.xz")
        target = tmp_path / path.stem
        target.write_bytes(lzma.decompress(path.read_bytes()))
        with RunLog.open(target) as log:
            runs = log.runs
        assert runs
        assert all(known.get(run.probe) == run.probe_sha for run in runs)
