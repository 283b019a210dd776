"""The store and the ``profile`` verb, on folders of their own."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import pytest

from tests.profiles.samples import SHA256, profile_of
from whetherman_edge import engine
from whetherman_edge.errors import ProfileError, ProfileNotFound, UsageError
from whetherman_edge.profiles import cli, field, store
from whetherman_edge.profiles.schema import EngineArtifact, Profile, basis_of, serialize_profile
from whetherman_edge.profiles.store import ProfileStore, is_name

GOOD = serialize_profile(profile_of())


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    user, shipped = tmp_path / "user", tmp_path / "shipped"
    shipped.mkdir()
    return user, shipped


def test_saved_loaded_listed_and_read(folders: tuple[Path, Path]) -> None:
    profiles = ProfileStore(folders)
    path = profiles.save("qwen2.5-0.5b", GOOD)
    assert path == folders[0] / "qwen2.5-0.5b.json"
    assert path.stat().st_mode & 0o777 == 0o644
    assert profiles.load("qwen2.5-0.5b") == profile_of()
    assert profiles.read("qwen2.5-0.5b") == GOOD
    assert [entry.name for entry in profiles.list()] == ["qwen2.5-0.5b"]
    assert list(folders[0].iterdir()) == [path]  # nothing temporary is left


def test_the_users_profile_comes_before_a_shipped_one(folders: tuple[Path, Path]) -> None:
    (folders[1] / "a.json").write_bytes(serialize_profile(profile_of(version="shipped")))
    profiles = ProfileStore(folders)
    assert profiles.load("a").version == "shipped"
    profiles.save("a", GOOD)
    assert profiles.load("a").version == "0.1.0"
    assert len(profiles.list()) == 1


def test_an_unknown_name_gets_a_hint(folders: tuple[Path, Path]) -> None:
    profiles = ProfileStore(folders)
    with pytest.raises(ProfileNotFound, match="there are none"):
        profiles.load("laptop")
    profiles.save("laptop-qwen", GOOD)
    with pytest.raises(ProfileNotFound, match="did you mean 'laptop-qwen'"):
        profiles.load("laptop-qwem")
    with pytest.raises(ProfileNotFound, match="there are laptop-qwen"):
        profiles.load("zzz")


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "a\\b", ".hidden", "-flag", "a..b", "x" * 65, "a\0b", "ä", "a b", "a\n"]
)
def test_a_name_is_never_a_path(folders: tuple[Path, Path], name: str) -> None:
    assert not is_name(name)
    (folders[1].parent / "x.json").write_bytes(GOOD)
    profiles = ProfileStore((folders[1], folders[0]))
    with pytest.raises(ProfileNotFound):
        profiles.load(name)
    with pytest.raises(UsageError):
        profiles.save(name, GOOD)


def test_what_is_no_profile_is_not_kept(folders: tuple[Path, Path]) -> None:
    profiles = ProfileStore(folders)
    with pytest.raises(ProfileError):
        profiles.save("a", b"{}")
    assert not folders[0].exists()
    profiles.save("a", GOOD)
    with pytest.raises(UsageError, match="exists already"):
        profiles.save("a", GOOD)
    profiles.save("a", serialize_profile(profile_of(version="2")), overwrite=True)
    assert profiles.load("a").version == "2"


def test_broken_files_are_listed_as_such(folders: tuple[Path, Path]) -> None:
    (folders[1] / "broken.json").write_text("{")
    (folders[1] / "notes.txt").write_text("hi")
    (folders[1] / ".new-x.json").write_bytes(GOOD)
    (folders[1] / "folder.json").mkdir()
    (entry,) = ProfileStore(folders).list()
    assert (entry.name, entry.profile) == ("broken", None)
    assert "copy the file again" in entry.fault


def test_a_profile_that_does_not_fit_is_refused_on_load(folders: tuple[Path, Path]) -> None:
    def check(_: Profile, name: str) -> None:
        raise ProfileError(f"profile {name!r}: another engine")

    ProfileStore(folders).save("a", GOOD)
    profiles = ProfileStore(folders, check)
    with pytest.raises(ProfileError, match="another engine"):
        profiles.load("a")
    assert profiles.list()[0].fault.endswith("another engine")


def test_a_profile_is_read_again_when_its_file_changes(folders: tuple[Path, Path]) -> None:
    profiles = ProfileStore(folders)
    path = profiles.save("a", GOOD)
    first = profiles.load("a")
    assert profiles.load("a") is first
    path.write_bytes(serialize_profile(profile_of(version="changed")))
    os.utime(path, ns=(1, 1))
    assert profiles.load("a").version == "changed"


def test_a_profile_whose_file_breaks_stays_as_it_was_read(
    folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    profiles = ProfileStore(folders)
    path = profiles.save("a", GOOD)
    first = profiles.load("a")
    path.write_bytes(b"{")
    os.utime(path, ns=(1, 1))
    assert [profiles.load("a") for _ in range(3)] == [first] * 3
    assert [record.getMessage().split()[0] for record in caplog.records] == ["event=profile_refused"]
    with pytest.raises(ProfileError):
        profiles.reload("a")
    path.write_bytes(serialize_profile(profile_of(version="mended")))
    os.utime(path, ns=(2, 2))
    assert profiles.load("a").version == "mended"
    path.unlink()
    with pytest.raises(ProfileNotFound):
        profiles.load("a")


@pytest.fixture
def command(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(store, "default_dirs", lambda: folders)
    monkeypatch.setattr(engine, "packaged_sha256", lambda: SHA256)

    def run(*args: str) -> int:
        parser = argparse.ArgumentParser()
        cli.register(parser.add_subparsers())
        return cli.run(parser.parse_args(["profile", *args]))

    return run


def test_the_verb_imports_lists_shows_and_exports(
    command: object, folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(command)
    source = tmp_path / "laptop.json"
    source.write_bytes(GOOD)
    assert command("import", str(source)) == 0
    assert command("import", str(source), "--name", "other") == 0
    (folders[1] / "broken.json").write_text("{")
    capsys.readouterr()
    assert command("list") == 0
    listed = capsys.readouterr()
    assert [line.split()[:2] for line in listed.out.splitlines()[1:4]] == [
        ["broken", "broken"],
        ["laptop", "calibrated"],
        ["other", "calibrated"],
    ]
    assert "broken.json" in listed.err
    assert command("list", "--json") == 0
    assert [row["state"] for row in json.loads(capsys.readouterr().out)] == ["broken", "calibrated", "calibrated"]
    assert command("show", "laptop") == 0
    shown = capsys.readouterr().out
    assert "ANSWER from 0.9, DECLINE from 0.95" in shown
    assert "at most 5.0% of needed calls withheld, with confidence 90% (1 of 120 needed" in shown
    assert "measured      not stated" in shown
    assert command("show", "laptop", "--json") == 0
    assert capsys.readouterr().out.encode() == GOOD
    target = tmp_path / "copy.json"
    assert command("export", "laptop", str(target)) == 0
    assert target.read_bytes() == GOOD
    with pytest.raises(UsageError, match="exists already"):
        command("export", "laptop", str(target))
    assert command("export", "laptop", str(target), "--force") == 0


@pytest.mark.parametrize(
    ("scored", "looped", "state"),
    [("leaked", "", "calibrate again"), ("", "leaked", "calibrated"), ("", "", "calibrated")],
)
def test_what_the_field_showed_is_shown_by_what_withheld(
    command: object, tmp_path: Path, capsys: pytest.CaptureFixture[str], scored: str, looped: str, state: str
) -> None:
    """Calibration mends thresholds; it does nothing for a rule."""
    assert callable(command)
    source = tmp_path / "laptop.json"
    source.write_bytes(GOOD)
    assert command("import", str(source)) == 0
    record = field.FieldRecord(
        basis=basis_of(profile_of()),
        at_s=time.time(),
        tests={"leaked": (4, 0.5), "ignored": (0, 0.0)},
        n_applied=4,
        stopped=scored,
        loop_guard=field.CauseRecord({"leaked": (3, 500.0)}, 7, looped),
    )
    field.write(field.default_path(), {"profile:laptop": record}, time.time())
    capsys.readouterr()
    assert command("show", "laptop") == 0
    shown = capsys.readouterr().out
    assert "scored: 4 interventions; evidence against them (100 stops): leaked 0.5 of 4\n" in shown
    assert "loop guard: 7 interventions; evidence against them (100 stops): leaked 5e+02 of 3\n" in shown
    assert ("scored: stopped: the evidence of 'leaked' turned against it; calibrate again\n" in shown) == bool(scored)
    assert ("loop guard: stopped: the evidence of 'leaked' turned against it\n" in shown) == bool(looped)
    assert command("list", "--json") == 0
    assert [row["state"] for row in json.loads(capsys.readouterr().out)] == [state]


def test_a_profile_of_another_engine_is_taken_by_force_only_and_listed_as_unusable(
    command: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(command)
    source = tmp_path / "old.json"
    source.write_bytes(serialize_profile(profile_of(engine=EngineArtifact(name="static", sha256="cd" * 32))))
    with pytest.raises(ProfileError, match="fitted on static cdcdcdcdcdcd…, loaded is static abababababab"):
        command("import", str(source))
    assert command("import", str(source), "--force") == 0
    assert "calibrate again" in capsys.readouterr().err
    assert command("list") == 0
    listed = capsys.readouterr()
    assert listed.out.splitlines()[1].split()[:2] == ["old", "unusable"]
    assert "fitted on static" in listed.err


def test_the_verb_says_what_is_wrong(command: object, tmp_path: Path) -> None:
    assert callable(command)
    with pytest.raises(UsageError, match="cannot be read"):
        command("import", str(tmp_path / "absent.json"))
    with pytest.raises(UsageError, match="--name"):
        command("import", "-")
    with pytest.raises(ProfileNotFound):
        command("show", "absent")
    bad = tmp_path / "bad.json"
    bad.write_text('{"schema": 1}')
    with pytest.raises(ProfileError, match="calibrate again"):
        command("import", str(bad))
