"""The log survives a kill, and refuses what is no log."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from whetherman_edge.calibrate.run_log import RunLine, RunLog, SpentLine, StartLine, StepLine
from whetherman_edge.errors import EnvironmentFault

START = StartLine("http://x", "m", 1, "0")
SPENT = SpentLine(10, 2, 0.5)
RUN = RunLine(probe="p", probe_sha="s", arm="with", index=0, success=True, steps=(StepLine(10, 2, 0.1, 0.5, cached=4),))


def written(path: Path) -> bytes:
    with RunLog.open(path) as log:
        for line in (START, SPENT, RUN):
            log.add(line)
    return path.read_bytes()


def test_what_was_added_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "runs.jsonl"
    written(path)
    with RunLog.open(path) as log:
        assert log.lines == [START, SPENT, RUN]
        assert log.runs == [RUN]
        assert log.spent() == (10, 2, 0.5)


@pytest.mark.parametrize("torn", [b'{"t":"run","probe":"q', b'{"t":"run"', b"\x00\x00\x00", b"\x00\x00\n"])
def test_a_torn_last_line_is_cut_off_and_the_file_goes_on(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "runs.jsonl"
    data = written(path)
    path.write_bytes(data + torn)
    with RunLog.open(path) as log:
        assert log.lines == [START, SPENT, RUN]
        log.add(SPENT)
    assert path.read_bytes().startswith(data)
    with RunLog.open(path) as log:
        assert log.lines == [START, SPENT, RUN, SPENT]


def test_a_torn_line_in_the_middle_is_no_kill(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_bytes(b"not a line\n" + written(tmp_path / "other.jsonl"))
    with pytest.raises(EnvironmentFault, match="line 1"):
        RunLog.open(path)


def test_runs_that_the_server_failed_say_nothing(tmp_path: Path) -> None:
    with RunLog.open(tmp_path / "runs.jsonl") as log:
        log.add(RunLine(probe="p", probe_sha="s", arm="with", index=0, success=False, error="HTTP 500"))
        assert log.runs == []


def test_two_calibrations_do_not_write_one_log(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    with RunLog.open(path) as log:
        log.add(START)
        with pytest.raises(EnvironmentFault, match="another calibration"):
            RunLog.open(path)
        log.add(RUN)
    with RunLog.open(path) as log:
        assert log.lines == [START, RUN]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(EnvironmentFault, match="--dir"):
        RunLog.open(tmp_path / "file" / "runs.jsonl")


def test_every_line_is_on_the_disk_when_add_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "runs.jsonl"
    sizes: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda _descriptor: sizes.append(path.stat().st_size))
    data = written(path)
    assert sizes == [len(b"".join(data.splitlines(keepends=True)[:n])) for n in (1, 2, 3)]
