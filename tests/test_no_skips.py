"""``--no-skips`` fails a run that skipped something, and only that."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PASSES = """
import pytest
def test_passes(): pass
@pytest.mark.xfail
def test_known_fault(): assert False
"""
SKIPS = """
def test_skips(): pytest.skip("no model")
"""


@pytest.mark.parametrize(("source", "exit_code"), [(PASSES, 0), (PASSES + SKIPS, 1)], ids=["no skip", "a skip"])
def test_a_skip_fails_the_run(tmp_path: Path, source: str, exit_code: int) -> None:
    (tmp_path / "test_case.py").write_text(source)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.no_skips", "--no-skips", "-q", "--rootdir", str(tmp_path)]
    command += ["-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == exit_code, done.stdout + done.stderr
    assert ("skipped, though" in done.stdout) == (exit_code == 1)
