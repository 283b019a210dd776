"""Agents on one backbone worker: mixed tool sets, deadlines and cancellations at random. No wrong result, no leak.

    python tests/isolated/backbone_soak.py WEIGHTS.gguf [--seconds 600] [--agents 4] [--toolsets 8] [--steps 5]
        [--cells 3072] [--layer 9] [--json FILE]

Each agent grows dialogues over a few tool sets and asks under a random deadline, sometimes going away in between. The
right states are computed before, each on a worker that has seen nothing; every answer of the soak is compared with
them. No answer comes from kept results, and there are fewer cells than the prompts need together.

The floor is measured first. A batch of another shape rounds otherwise, with nothing reused at all: the largest angle
between two such runs of one prompt is this file's radius of rounding. An answer of the soak is put together from
batches of many shapes; it and the right state both lie within one radius of the exact one, so within two of each other.
Two radii can be wider than what lies between two prompts that are much alike, so an answer must also be nearer to its
own right state than to any other's, and so must be every run that the floor is measured with.

Exit 1 on a state below the floor or nearer to another prompt's, a request without an outcome, more memory at the end
than in the middle, or (with --stall-ms) an event loop that was held longer.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np

from whetherman_edge.backbone.prompt import Prompt, render
from whetherman_edge.backbone.worker import Overloaded, States, Worker, WorkerSettings
from whetherman_edge.bench.workload import chat
from whetherman_edge.dialects.openai_chat import view
from whetherman_edge.dialects.tool_cache import ToolCache
from whetherman_edge.errors import EnvironmentFault

CHUNKS = (16, 48, 112)
"""Batch shapes of the runs that the floor is measured with."""
FLOOR_MIN = 0.998
"""A radius that wide would be no rounding."""
TICK_S = 0.005
GROWTH_MB_MAX = 24.0


def prompts_of(n_toolsets: int, n_steps: int) -> dict[tuple[int, int], Prompt]:
    """(tool set, step) to its prompt; step n + 1 continues step n."""
    cache, found = ToolCache(), {}
    for family in range(n_toolsets):
        whole = chat(family, n_tools=2 + 3 * (family % 5), n_turns=2 * n_steps, family=family + 1)
        for step in range(n_steps):
            body = {**whole, "messages": whole["messages"][: 2 + 2 * step]}
            found[family, step] = render(view(json.dumps(body).encode(), cache), "compact")
    return found


def reference(
    path: Path, settings: WorkerSettings, prompts: dict[tuple[int, int], Prompt]
) -> dict[tuple[int, int], States]:
    """States with nothing reused: a new worker for each prompt."""
    found = {}
    for key, prompt in prompts.items():
        worker = Worker(path, settings)
        worker.start()
        found[key] = worker.submit(prompt).future.result()
        worker.stop()
    return found


def floor_of(
    path: Path, settings: WorkerSettings, prompts: dict[tuple[int, int], Prompt], right: dict[tuple[int, int], States]
) -> tuple[float, list[tuple[int, int]]]:
    """Cosine of twice the largest angle between a prompt's right states and those of a fresh run in other batches, and
    the prompts whose fresh runs are nearer to another's right state.
    """
    some = dict(list(prompts.items())[:: max(len(prompts) // 12, 1)])
    least, confused = 1.0, []
    for chunk in CHUNKS:
        other = reference(path, msgspec.structs.replace(settings, chunk=chunk), some)
        least = min(least, *(likeness(states, right[key]) for key, states in other.items()))
        confused += [key for key, states in other.items() if nearest(states, right) != key]
    return float(np.cos(2 * np.arccos(least))), confused


def nearest(states: States, right: dict[tuple[int, int], States]) -> tuple[int, int]:
    """The prompt whose right last state is most like this one."""
    return max(right, key=lambda key: cosine(states.last, right[key].last))


def between_steps(right: dict[tuple[int, int], States]) -> float:
    """The largest cosine between the last states of different prompts: what a mix-up would look like."""
    last = np.array([states.last for states in right.values()], np.float64)
    last /= np.linalg.norm(last, axis=1, keepdims=True)
    return float((last @ last.T - 2 * np.eye(len(last))).max())


def likeness(a: States, b: States) -> float:
    """The least cosine of all states of one answer; -1 where they are of other tools."""
    if a.tool_names != b.tool_names:
        return -1.0
    return min(cosine(a.last, b.last), cosine(a.tools, b.tools))


def resident_mb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    a, b = np.atleast_2d(a).astype(np.float64), np.atleast_2d(b).astype(np.float64)
    if a.shape != b.shape:
        return -1.0
    return float(((a * b).sum(1) / np.sqrt((a * a).sum(1) * (b * b).sum(1))).min())


class Soak:
    def __init__(
        self,
        worker: Worker,
        prompts: dict[tuple[int, int], Prompt],
        right: dict[tuple[int, int], States],
        floor: float,
    ):
        self.worker, self.prompts, self.right, self.floor = worker, prompts, right, floor
        self.outcomes: Counter[str] = Counter()
        self.worst = 1.0
        self.stalls_ms: list[float] = []
        self.memory_mb: list[float] = []
        self.n_toolsets = 1 + max(family for family, _ in prompts)
        self.n_steps = 1 + max(step for _, step in prompts)

    async def agent(self, number: int, until_s: float) -> None:
        chance = random.Random(number)
        while time.monotonic() < until_s:
            family = chance.randrange(self.n_toolsets)
            for step in range(chance.randrange(1, self.n_steps + 1)):
                await self.ask((family, step), f"agent{number}", chance)
                await asyncio.sleep(chance.random() * 0.05)

    async def ask(self, key: tuple[int, int], caller: str, chance: random.Random) -> None:
        try:
            job = self.worker.submit(self.prompts[key], caller)
        except Overloaded:
            self.outcomes["full"] += 1
            return
        leaves = chance.random() < 0.2
        left_s = chance.random() * 0.1 if leaves else chance.choice((0.05, 0.25, 1.0, 30.0))
        try:
            async with asyncio.timeout(left_s):
                states = await asyncio.wrap_future(job.future)
        except TimeoutError:
            self.worker.abandon(job)
            self.outcomes["left" if leaves else "late"] += 1
            return
        except EnvironmentFault as exc:
            self.outcomes["fault" if "another request" not in str(exc) else "gave way"] += 1
            return
        score = likeness(states, self.right[key])
        self.worst = min(self.worst, score)
        own = nearest(states, self.right) == key
        self.outcomes["right" if score >= self.floor and own else "wrong"] += 1

    async def watch(self, until_s: float) -> None:
        """How late the loop is to its own tick."""
        ticks = 0
        while time.monotonic() < until_s:
            due_s = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            self.stalls_ms.append((time.monotonic() - due_s) * 1e3)
            ticks += 1
            if ticks % 200 == 0:
                self.memory_mb.append(resident_mb())


async def run(soak: Soak, agents: int, seconds: float) -> None:
    until_s = time.monotonic() + seconds
    gc.freeze()
    async with asyncio.TaskGroup() as group:
        group.create_task(soak.watch(until_s))
        for number in range(agents):
            group.create_task(soak.agent(number, until_s))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("weights", type=Path)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--toolsets", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--layer", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cells", type=int, default=3_072, help="fewer than the prompts need together")
    parser.add_argument(
        "--stall-ms", type=float, default=0.0, help="fail when the loop was held longer (0: report only)"
    )
    parser.add_argument("--json", type=Path)
    parsed = parser.parse_args()
    # Fewer cells than the prompts need together, so that prefixes are thrown out all the time.
    settings = WorkerSettings(
        parsed.layer, n_cells=parsed.cells, n_seq=8, n_threads=parsed.threads, tools_max=1_024, results_max=0
    )
    prompts = prompts_of(parsed.toolsets, parsed.steps)
    right = reference(parsed.weights, settings, prompts)
    (floor, confused), mixed_up = floor_of(parsed.weights, settings, prompts, right), between_steps(right)
    if confused or not FLOOR_MIN < floor <= 1.0:
        sys.stderr.write(f"the floor {floor:.6f} is too low to tell (other prompts: {mixed_up:.6f}; {confused})\n")
        return 1
    worker = Worker(parsed.weights, settings)
    worker.start()
    soak = Soak(worker, prompts, right, floor)
    asyncio.run(run(soak, parsed.agents, parsed.seconds))
    worker.stop()
    stalls = np.asarray(soak.stalls_ms)
    memory = np.asarray(soak.memory_mb or [resident_mb()])
    growth = float(memory[-len(memory) // 4 :].mean() - memory[len(memory) // 2 :][: max(len(memory) // 4, 1)].mean())
    figures = {
        "seconds": parsed.seconds,
        "agents": parsed.agents,
        "outcomes": dict(soak.outcomes),
        "cosine_worst": round(soak.worst, 6),
        "cosine_floor": round(floor, 6),
        "cosine_of_other_prompts": round(mixed_up, 6),
        "loop_late_ms": {"p50": round(float(np.median(stalls)), 2), "p99": round(float(np.quantile(stalls, 0.99)), 2),
                         "max": round(float(stalls.max()), 2), "over_20": int((stalls > 20).sum()), "n": len(stalls)},
        "resident_mb": {"max": round(float(memory.max()), 1), "growth_last_half": round(growth, 1)},
        "counts": {name: getattr(worker.counts, name) for name in worker.counts.__struct_fields__},
        "left_waiting": worker.waiting,
    }  # fmt: skip
    sys.stdout.write(json.dumps(figures, indent=1) + "\n")
    if parsed.json:
        parsed.json.write_text(json.dumps(figures, indent=1) + "\n")
    bad = soak.outcomes["wrong"] or soak.outcomes["fault"] or worker.counts.failed or not soak.outcomes["right"]
    stalled = parsed.stall_ms and stalls.max() > parsed.stall_ms
    return int(bool(bad or stalled or growth > GROWTH_MB_MAX))


if __name__ == "__main__":
    sys.exit(main())
