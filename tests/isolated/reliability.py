"""The reliability run: mixed traffic through a real daemon while everything around it fails, and every byte compared.

    python -m tests.isolated.reliability --minutes 30 --clients 50 --json FILE

The clients and the model server live here and know what each other said; the daemon is a process behind a listening
socket that this script holds, as systemd does, so that not even a restart may refuse a client. Counted as a failure is
whatever a client saw that the model server (or the client itself) did not cause, any changed byte on a request that is
reported as unchanged, any growth, and a ledger that a kill left in disorder. Exit code 0 or 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("WHETHERMAN_TEST_TIME_FACTOR", "18")  # a client waits three minutes for each part of an answer

from tests.fakes.client import Answer, Client, Truncated
from tests.isolated.supervised import DRAIN_S, Supervised
from tests.isolated.traffic import HostileUpstream, Plan, Planner

# A cache that fills is no leak: growth is looked at in the second half of the longest life, and may be this much.
RSS_GROWTH_KB_MAX = 8 << 10
FD_SPARE = 8
# A short run sees caches fill, and a machine that does other things; it says its figures and does not judge them.
SAMPLES_MIN = 120
GONE_MS_P99_MAX = 2_000.0
KEPT_PLANS = 4_000
LISTED = 20
_STEERED = ('mode = "enforce"\nforce = "ANSWER"', 'mode = "enforce"\nforce = "ASK"\nintervention = "note"')
SETTINGS = (
    'mode = "shadow"',
    _STEERED[0],
    'mode = "off"',
    'mode = "shadow"\nledger = "text"\nlog_level = "debug"',
    _STEERED[1],
    'mode = "shadow"\nidle_timeout_s = 60.0',
)
BROKEN = ('mode = "sha', "mode = 3", 'profile = "nobody"')


@dataclass
class Seen:
    """What a client got: ``kind``: whole, cut (``answer`` holds what came), reset (not a byte), hung."""

    kind: str
    began_s: float
    ended_s: float
    answer: Answer | None = None


class Run:
    """One run. ``faults``: what must not be; ``tally``: what happened."""

    def __init__(self, minutes: float, clients: int, think_s: float, seed: int, folder: Path) -> None:
        self.length_s = minutes * 60.0
        self.n_clients, self.think_s = clients, think_s
        self.faults: list[str] = []
        self.tally: Counter[str] = Counter()
        self.plans: dict[int, Plan] = {}
        self.upstream = HostileUpstream(self.plans)
        self.daemon = Supervised(folder)
        self.steering: list[tuple[float, float]] = []  # when requests may have been changed
        self.ms: list[float] = []
        self.samples: list[tuple[int, float, int, int]] = []  # life, seconds, RSS in KB, descriptors
        self._planner = Planner(seed)
        self._random = random.Random(seed + 1)
        self._over = asyncio.Event()
        self._began_s = 0.0
        self._setting = 0

    async def run(self) -> dict:
        """All of it; returns the figures."""
        await self.upstream.start()
        self.daemon.configure(self.upstream.url, SETTINGS[0])
        try:
            await self.daemon.start()
            self._began_s = time.monotonic()
            await self._through_time()
            await self._still()
            await self.daemon.terminate()
            self._check_ledger("after the last SIGTERM")
        finally:
            self.daemon.stop()
            await self.upstream.stop()
        self._check_growth()
        self._check_log()
        return self._figures()

    async def _through_time(self) -> None:
        clients = [asyncio.create_task(self._client()) for _ in range(self.n_clients)]
        part = self.length_s
        others = [
            asyncio.create_task(task)
            for task in (
                self._every(max(3.0, part / 90), self._reload),
                self._every(max(7.0, part / 20), self._upstream_dies),
                self._every(max(5.0, part / 25), self._backbone_fails),
                self._every(max(16.0, part / 8), self._disk_fills),
                self._every(1.0, self._sample),
            )
        ]
        for share, end in ((0.6, "term"), (0.68, "kill"), (0.76, "term"), (0.84, "kill"), (0.92, "term")):
            await asyncio.sleep(max(0.0, self._began_s + part * share - time.monotonic()))
            await (self._restart() if end == "term" else self._kill())
        await asyncio.sleep(max(0.0, self._began_s + part - time.monotonic()))
        self._over.set()
        done = await asyncio.gather(*clients, *others, return_exceptions=True)
        self.faults += [f"the run itself: {one!r}" for one in done if isinstance(one, BaseException)]

    async def _every(self, period_s: float, do) -> None:
        while not self._over.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), period_s)
                return
            await do()

    async def _client(self) -> None:
        connection: Client | None = None
        while not self._over.is_set():
            plan = self._planner.draw()
            self.plans[plan.number] = plan
            if len(self.plans) > KEPT_PLANS:
                del self.plans[next(iter(self.plans))]
            mode = "off" if self._random.random() < 0.05 else ""
            connection, seen = await self._exchange(connection, plan, mode)
            self._judge(plan, seen, mode)
            await asyncio.sleep(self._random.expovariate(1.0 / self.think_s))
        if connection is not None:
            connection.abort()

    async def _exchange(self, connection: Client | None, plan: Plan, mode: str) -> tuple[Client | None, Seen]:
        """One request; once more on a fresh connection where a kept one had been closed, as every HTTP client does."""
        began_s = time.monotonic()
        reused = connection is not None
        for fresh in (False, True):
            if connection is None or fresh:
                connection = await Client(self.daemon.url).__aenter__()
            kind, answer = await self._ask(connection, plan, mode)
            if kind != "reset" or not reused or fresh:
                break
            self.tally["retried_on_a_closed_connection"] += 1
        seen = Seen(kind, began_s, time.monotonic(), answer)
        keeps = kind == "whole" and answer is not None and (answer.header("Connection") or "") != "close"
        if keeps and self._random.random() > 0.1:
            return connection, seen
        assert connection is not None
        connection.abort()
        return None, seen

    async def _ask(self, client: Client, plan: Plan, mode: str) -> tuple[str, Answer | None]:
        headers = {"x_number": str(plan.number), "Content_Type": "application/json", "Authorization": "Bearer sk-KEY"}
        if mode:
            headers["x_whetherman_mode"] = mode
        try:
            if plan.breaks_upload:
                headers["Content_Length"] = str(len(plan.body))
                await client.start("POST", plan.path, plan.body[: len(plan.body) // 2], **headers)
                client.abort()
                return "left", None
            await client.start("POST", plan.path, plan.body, **headers)
            if plan.vanish_s is not None:
                await asyncio.sleep(plan.vanish_s)
                plan.left_at_s = time.monotonic()
                client.abort()
                return "left", None
            answer = await client.head()
        except (asyncio.IncompleteReadError, ConnectionError):
            return "reset", None
        except TimeoutError:
            return "hung", None
        try:
            return "whole", await client.rest(answer)
        except Truncated:
            return "cut", answer
        except TimeoutError:
            return "hung", answer

    def _judge(self, plan: Plan, seen: Seen, mode: str) -> None:
        """Whether the client saw what it must have seen, and the model server too."""
        self.tally[f"asked_{plan.dialect}_{'stream' if plan.streams else 'whole'}"] += 1
        self.tally[f"saw_{seen.kind}"] += 1
        killed = any(seen.began_s < to and at < seen.ended_s for at, to in self.daemon.kills)
        dead = any(seen.began_s < to and at < seen.ended_s for at, to in self.upstream.dead)
        steered = any(seen.began_s < to and at < seen.ended_s for at, to in self.steering) and not mode
        answer, attempts = seen.answer, plan.attempts
        if not steered and any(attempt.body != plan.body for attempt in attempts):
            self._fault(plan, "bytes changed outside enforce")
        if not steered and any(attempt.status for attempt in attempts[:-1]) and not killed:
            self._fault(plan, "asked twice")
        if seen.kind == "hung":
            self._fault(plan, f"no answer after {seen.ended_s - seen.began_s:.1f} s")
            return
        if seen.kind == "left" or killed:
            self.tally["not_judged_killed"] += killed
            if plan.breaks_upload and attempts:
                self._fault(plan, "half an upload reached the model server")
            return
        last = attempts[-1] if attempts else None
        excuse = dead or (last is not None and not last.whole)
        if answer is None:
            self._fault(plan, f"reset after {seen.ended_s - seen.began_s:.1f} s")
            return
        if answer.status == 502 and b'"src":"whetherman-edge"' in answer.body:
            self.tally["502_by_the_upstream"] += 1
            if not excuse:
                self._fault(plan, "502, and the model server did nothing")
            return
        if last is None:
            self._fault(plan, f"{answer.status} from nobody: {answer.body[:80]!r}")
            return
        applied = answer.header("x-whetherman-applied") == "yes"
        self.tally["steered" if applied else "as_it_came"] += 1
        if applied == (last.body == plan.body):
            self._fault(plan, f"applied={applied}, and the body that counts says otherwise")
        if seen.kind == "cut":
            if not excuse or not last.sent.startswith(answer.body):
                self._fault(plan, f"cut after {len(answer.body)} bytes (excuse: {excuse})")
        elif answer.status != last.status or answer.body != last.sent or not last.whole:
            self._fault(plan, f"{answer.status} of {last.status}, {len(answer.body)} of {len(last.sent)} bytes")
        elif plan.fault == "none" and not steered and not dead:
            self.ms.append((seen.ended_s - seen.began_s) * 1e3)

    def _fault(self, plan: Plan, what: str) -> None:
        at_s = time.monotonic() - self._began_s
        sent = [f"{attempt.status}{'' if attempt.whole else ' in part'}" for attempt in plan.attempts]
        self.faults.append(f"{at_s:.1f} s, {plan.path} {plan.fault}, asked {sent}: {what}")

    async def _reload(self) -> None:
        if not self.daemon.ready.is_set():
            return
        if self._random.random() < 0.2:
            self.daemon.configure(self.upstream.url, self._random.choice(BROKEN))
            self.tally["reloads_refused"] += await self.daemon.reload("reload_refused")
            self.daemon.configure(self.upstream.url, SETTINGS[self._setting])
            return
        before = SETTINGS[self._setting]
        self._setting = (self._setting + 1) % len(SETTINGS)
        after = SETTINGS[self._setting]
        if after in _STEERED:
            self.steering.append((time.monotonic(), float("inf")))
        self.daemon.configure(self.upstream.url, after)
        self.tally["reloads"] += await self.daemon.reload("reloaded")
        if before in _STEERED and self.daemon.ready.is_set():
            # Requests that began before the reload keep the old settings; they overlap it, so the interval may end.
            self.steering = [(at, time.monotonic() if to == float("inf") else to) for at, to in self.steering]

    async def _upstream_dies(self) -> None:
        await self.upstream.die()
        await asyncio.sleep(self._random.uniform(0.3, 2.0))
        await self.upstream.start()
        self.tally["upstream_deaths"] += 1

    async def _backbone_fails(self) -> None:
        wedge = self._random.random() < 0.5
        if await self.daemon.fail_backbone(wedge=wedge):
            self.tally["backbone_wedged" if wedge else "backbone_killed"] += 1

    async def _disk_fills(self) -> None:
        self.daemon.fill_disk()
        self.tally["disk_full"] += 1
        await asyncio.sleep(max(3.0, self.length_s / 60))
        self.daemon.free_disk()

    async def _sample(self) -> None:
        if self.daemon.ready.is_set() and (found := self.daemon.looked_at()) is not None:
            self.samples.append((self.daemon.life, time.monotonic() - self._began_s, *found))
            await self.daemon.read_metrics()

    async def _restart(self) -> None:
        await self.daemon.terminate()
        self._check_ledger("after SIGTERM")
        self.tally["sigterm_under_load"] += 1
        await self.daemon.start()

    async def _kill(self) -> None:
        await self.daemon.kill()
        self._check_ledger("after kill -9")
        self.tally["kill_9_under_load"] += 1
        await self.daemon.start()

    async def _still(self) -> None:
        """No client and no model server any more: all descriptors but those of the start must go."""
        await self.daemon.read_metrics()
        if self.tally["disk_full"] and not self.daemon.recorded_again:
            self.faults.append("the ledger did not go on after the disk had space again")
        await self.upstream.die()
        async with asyncio.timeout(DRAIN_S):
            while (found := self.daemon.looked_at()) and found[1] > self.daemon.fds_at_start + FD_SPARE:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        self.tally["fds_at_start"], self.tally["fds_at_the_end"] = self.daemon.fds_at_start, found[1] if found else -1
        await self.daemon.read_metrics()

    def _check_ledger(self, when: str) -> None:
        self.faults += [f"ledger {when}: {fault}" for fault in self.daemon.ledger_faults()]

    def _longest(self) -> list[tuple[int, float, int, int]]:
        lives = Counter(life for life, *_ in self.samples)
        return [sample for sample in self.samples if sample[0] == lives.most_common(1)[0][0]] if lives else []

    def _growth_kb(self) -> float:
        rss = [kb for _, _, kb, _ in self._longest()]
        quarter = len(rss) // 4
        return statistics.median(rss[-quarter:]) - statistics.median(rss[quarter : 2 * quarter]) if quarter else 0.0

    def _check_growth(self) -> None:
        judged = len(self._longest()) >= SAMPLES_MIN
        if judged and self._growth_kb() > RSS_GROWTH_KB_MAX:
            self.faults.append(f"memory grew by {self._growth_kb():.0f} KB from the second quarter to the last")
        fds_max = 2 * self.n_clients + 64 + 40
        if max((fds for *_, fds in self.samples), default=0) > fds_max:
            self.faults.append(f"more than {fds_max} descriptors")
        if self.upstream.never_gone:
            self.faults.append(f"{self.upstream.never_gone} requests of clients that left were never cancelled")
        if judged and (p99 := _quantile(self.upstream.gone_ms, 0.99)) > GONE_MS_P99_MAX:
            self.faults.append(f"clients that left were noticed after {p99:.0f} ms (p99)")

    def _check_log(self) -> None:
        self.faults += [f"log: {line}" for line in self.daemon.bad_lines]

    def _figures(self) -> dict:
        longest = self._longest()
        times, rss = [at for _, at, _, _ in longest], [kb for _, _, kb, _ in longest]
        slope = (
            statistics.linear_regression(times[len(times) // 4 :], rss[len(rss) // 4 :]).slope if len(rss) > 8 else 0
        )
        n_asked = sum(n for name, n in self.tally.items() if name.startswith("asked_"))
        return {
            "minutes": self.length_s / 60,
            "clients": self.n_clients,
            "requests": n_asked,
            "requests_a_second": round(n_asked / self.length_s, 1),
            "faults": len(self.faults),
            "first_faults": self.faults[:LISTED],
            "what_happened": dict(sorted(self.tally.items())),
            "upstream_saw": dict(sorted(self.upstream.seen.items())),
            "ms": {name: round(_quantile(self.ms, q), 1) for name, q in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))},
            "client_gone_ms": {
                name: round(_quantile(self.upstream.gone_ms, q))
                for name, q in (("p50", 0.5), ("p99", 0.99), ("max", 1))
            },
            "rss_kb": {
                "start_of_longest_life": rss[0] if rss else 0,
                "max": max(rss, default=0),
                "second_quarter_to_last": round(self._growth_kb()),
                "slope_an_hour": round(slope * 3600),
            },
            # Looked at once a second: a gap says how long this script itself got no processor.
            "longest_gap_s": round(max((b - a for a, b in itertools.pairwise(times)), default=0.0), 1),
            "fds": {"max": max((fds for *_, fds in self.samples), default=0)},
            "disk": self.daemon.disk,
            "ledger": dict(self.daemon.ledger_totals),
            "log_events": dict(sorted(self.daemon.events.items())),
        }


def _quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))] if values else 0.0


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Mixed traffic through a daemon while everything around it fails.")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--think", type=float, default=0.05, metavar="SECONDS", help="mean pause of a client")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", metavar="FILE", help="figures go here too")
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="reliability-") as folder:
        run = Run(parsed.minutes, parsed.clients, parsed.think, parsed.seed, Path(folder))
        figures = asyncio.run(run.run())
    text = json.dumps(figures, indent=2)
    print(text)
    if parsed.json:
        Path(parsed.json).write_text(text + "\n")
    return 1 if figures["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
