"""The soak, short: agents on one worker, random deadlines and departures, every answer compared with a fresh one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).resolve().parents[1] / "isolated" / "backbone_soak.py"


@pytest.mark.model
@pytest.mark.slow
def test_no_answer_is_wrong_and_nothing_is_left_over(gemma_q8: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(SOAK), str(gemma_q8), "--seconds", "15", "--toolsets", "2", "--steps", "3"]
    command += ["--json", str(tmp_path / "f")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "f").read_text())
    assert figures["outcomes"]["right"] > 0
    assert figures["cosine_worst"] >= figures["cosine_floor"]
    assert figures["counts"]["answered_from_results"] == 0
    assert figures["left_waiting"] == 0
    assert figures["resident_mb"]["max"] < 350
