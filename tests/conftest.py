"""Shared by all tests: ``tests`` is importable, and nothing of the user's own configuration reaches a test."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # --import-mode=importlib leaves sys.path alone; the fakes are imported by name
    sys.path.insert(0, str(ROOT))

# No timed assertions: a busy machine is no bug. WHETHERMAN_TEST_EXAMPLES=5000 digs deeper.
settings.register_profile(
    "whetherman",
    deadline=None,
    max_examples=int(os.environ.get("WHETHERMAN_TEST_EXAMPLES", "60")),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("whetherman")


@pytest.fixture(autouse=True)
def _no_user_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of whoever runs the tests, in WHETHERMAN_* or in the configuration folder, do not count."""
    keep = ("WHETHERMAN_TEST_", "WHETHERMAN_REQUIRE_", "WHETHERMAN_ROUTER", "WHETHERMAN_MODELS")
    for name in list(os.environ):
        if name.startswith("WHETHERMAN_") and not name.startswith(keep):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True, scope="session")
def _no_user_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Decisions that tests make are not recorded among the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.delenv("STATE_DIRECTORY", raising=False)
        yield


@pytest.fixture(autouse=True)
def _no_field_evidence(_no_user_state: None) -> None:
    """What one test's requests showed of an agent does not count in the next one."""
    (Path(os.environ["XDG_STATE_HOME"]) / "whetherman" / "agents.json").unlink(missing_ok=True)
