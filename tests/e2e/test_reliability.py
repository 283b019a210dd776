"""The reliability run, short: everything that fails in it fails here too, a few times each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.client import Client, Truncated
from tests.isolated.traffic import HostileUpstream, Planner

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]


def test_mixed_traffic_while_everything_around_the_daemon_fails(tmp_path):
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "tests.isolated.reliability", "--json", str(figures)]
    done = subprocess.run(
        [*command, "--minutes", "0.4", "--clients", "6", "--seed", "7"],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    found = json.loads(figures.read_text()) if figures.exists() else {"first_faults": [done.stderr[-2000:]]}
    assert (done.returncode, found["first_faults"]) == (0, [])
    happened = found["what_happened"]
    for event in ("reloads", "upstream_deaths", "disk_full", "kill_9_under_load", "sigterm_under_load", "saw_cut"):
        assert happened[event] > 0, event
    assert happened["steered"] > 0
    assert happened["as_it_came"] > happened["steered"]


async def test_its_model_server_never_sends_a_whole_reply_to_a_client_that_is_to_leave():
    """The daemon would keep such a connection, and the next request on it find nobody: a fault of the run's own."""
    planner = Planner(7)
    plans = [plan for plan in (planner.draw() for _ in range(3000)) if plan.vanish_s is not None]
    begun = [plan for plan in plans if plan.fault == "stall_body" and not plan.streams]
    assert {plan.chunked for plan in begun} == {True, False}
    upstream = await HostileUpstream({plan.number: plan for plan in begun}).start()
    for plan in begun[:20]:
        async with Client(upstream.url) as client:
            await client.start("POST", plan.path, plan.body, x_number=str(plan.number))
            answer = await client.head()
            client.writer.write_eof()
            with pytest.raises(Truncated):
                await client.rest(answer)
    await upstream.stop()
