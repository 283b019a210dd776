"""``bench ab``: the agent with and without the gate, on whole tasks, end to end.

Every gate is served on the product's own request path in front of the agent's model server, and the same agent loop
runs each task under each of them. See ``ab_gates`` for what is compared and ``ab_figures`` for what is counted.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whetherman_edge.errors import UsageError, WhethermanError

if TYPE_CHECKING:
    from whetherman_edge.bench.ab_gates import Gates, Setting
    from whetherman_edge.bench.ab_run import Plan
    from whetherman_edge.bench.ab_tasks import Tasks

    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]

RUNS, REPLIES, FIGURES, PAGE = "runs.jsonl", "replies.jsonl", "ab.json", "ab.html"
KEY_VARIABLE = "WHETHERMAN_UPSTREAM_API_KEY"


def register(verbs: Verbs) -> None:
    """Add ``bench ab``."""
    parser = verbs.add_parser("ab", help="an agent on whole tasks, under each gate and under none")
    parser.add_argument("--agent-endpoint", required=True, metavar="URL", help=f"key in {KEY_VARIABLE}")
    parser.add_argument("--model", required=True, metavar="M", help="model name as in requests")
    parser.add_argument("--tasks", type=Path, metavar="FILE", help="When2Tool JSON Lines; default: probe pack")
    parser.add_argument("--gates", metavar="LIST", help="comma-separated; default: all that can be run")
    parser.add_argument("--profile", default="", metavar="NAME", help="the agent's own profile")
    parser.add_argument("--other-profile", default="", metavar="NAME", help="another agent's profile")
    parser.add_argument("--engine", choices=("static", "gemma", "auto"), default="auto", help="default: %(default)s")
    parser.add_argument("--gate-deadline-ms", type=int, default=250, metavar="MS", help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="runs a task; the first one is greedy")
    parser.add_argument("--temperature", type=float, default=0.7, metavar="T", help="of later repeats")
    parser.add_argument("--limit", type=int, metavar="N", help="only N tasks, of all kinds in turn")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of pack, order and sampling")
    parser.add_argument("--max-steps", type=int, default=8, metavar="N", help="requests a run at most")
    parser.add_argument("--max-tokens", type=int, default=512, metavar="N", help="output tokens a reply at most")
    parser.add_argument("--oracle-replays", type=int, default=2, metavar="K", help="latest step the oracle stops at")
    parser.add_argument("--no-reuse", action="store_true", help="ask again also for what was asked byte for byte")
    parser.add_argument("--price-prompt", type=float, default=0.0, metavar="USD", help="a million prompt tokens")
    parser.add_argument("--price-output", type=float, default=0.0, metavar="USD", help="a million output tokens")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of log, figures and report; default: ab-MODEL")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to FILE")
    parser.add_argument("--resume", action="store_true", help="go on with the log in --out")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Run, print, write. Ctrl-C ends it with the figures of what was done; ``--resume`` goes on."""
    from whetherman_edge.bench import ab_tasks
    from whetherman_edge.calibrate.agent import check_endpoint

    check_endpoint(parsed.agent_endpoint)
    for name in ("repeats", "max_steps", "max_tokens", "limit"):
        if getattr(parsed, name) is not None and getattr(parsed, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')}: expected at least 1, got {getattr(parsed, name)}")
    found = ab_tasks.from_file(parsed.tasks, parsed.seed) if parsed.tasks else ab_tasks.pack(parsed.seed)
    for name, count in sorted(found.left_out.items()):
        sys.stderr.write(f"left out: {count} tasks of {name}, which has no world here\n")
    tasks = ab_tasks.limited(found, parsed.limit)
    out = parsed.out or Path("ab-" + re.sub(r"[^A-Za-z0-9._-]+", "-", parsed.model))
    return asyncio.run(_bench(parsed, tasks, out))


async def _bench(parsed: argparse.Namespace, tasks: Tasks, out: Path) -> int:
    from whetherman_edge.bench.ab_gates import Gates, Setting
    from whetherman_edge.bench.ab_hop import Hop
    from whetherman_edge.bench.ab_log import RunLog
    from whetherman_edge.bench.ab_run import Bench, Plan, progress
    from whetherman_edge.service import discovery

    setting = Setting(
        model=parsed.model,
        kind=await discovery.kind_of(parsed.agent_endpoint),
        key=os.environ.get(KEY_VARIABLE, ""),
        profile=parsed.profile,
        other=parsed.other_profile,
        engine=parsed.engine,
        deadline_ms=parsed.gate_deadline_ms,
    )
    hop = Hop(parsed.agent_endpoint, None if parsed.no_reuse else out / REPLIES)
    gates = Gates(setting, hop)
    names = chosen(parsed.gates, setting)
    plan = Plan(
        model=parsed.model,
        key=setting.key,
        gates=names,
        repeats=parsed.repeats,
        temperature=parsed.temperature,
        seed=parsed.seed,
        max_steps=parsed.max_steps,
        max_tokens=parsed.max_tokens,
        replays=parsed.oracle_replays,
    )
    log = RunLog(out / RUNS)
    about = _about(parsed, tasks, setting, gates, plan)
    log.open(about, resume=parsed.resume)
    cut = ""
    async with hop.serving(), gates.opened(names) as served:
        try:
            await Bench(plan, served, hop, log, progress).run(tasks.probes)
        except (WhethermanError, asyncio.CancelledError) as exc:
            cut = str(exc) or "it was interrupted"
    _write(parsed, list(log.runs.values()), names, about | {"cut": cut, "left_out": tasks.left_out}, out)
    if cut:
        sys.stderr.write(f"the bench ended early: {cut}; go on with --resume\n")
    return 1 if cut else 0


def chosen(wanted: str | None, setting: Setting) -> tuple[str, ...]:
    """The gates to run, none always first. Raises UsageError for names that are none, or lack their profile."""
    from whetherman_edge.bench.ab_gates import GATES, NONE

    missing = {name for name in ("own", "tau") if not setting.profile} | ({"other"} if not setting.other else set())
    missing |= {"shared"} if setting.engine == "static" else set()
    if wanted is None:
        for name in sorted(missing):
            sys.stderr.write(f"left out: gate {name}, which needs --profile, --other-profile or another --engine\n")
        return tuple(name for name in GATES if name not in missing)
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    unknown = [name for name in names if name not in GATES]
    if unknown:
        raise UsageError(f"--gates: expected names of {', '.join(GATES)}, got {unknown[0]!r}")
    lacking = [name for name in names if name in missing]
    if lacking:
        raise UsageError(f"--gates: {lacking[0]} needs --profile, --other-profile or another --engine")
    return (NONE, *dict.fromkeys(name for name in names if name != NONE))


def _about(parsed: argparse.Namespace, tasks: Tasks, setting: Setting, gates: Gates, plan: Plan) -> dict[str, Any]:
    """What is measured; runs of anything else must not be mixed with it."""
    from whetherman_edge import __version__
    from whetherman_edge.profiles.schema import serialize_profile

    profiles = {
        role: f"{name} {hashlib.sha256(serialize_profile(gates.profile(name))).hexdigest()[:12]}"
        for role, name in (("own", setting.profile), ("other", setting.other))
        if name
    }
    return {
        "version": __version__,
        "endpoint_kind": setting.kind,
        "model": setting.model,
        "tasks": tasks.source,
        "tasks_sha256": tasks.sha256,
        "profiles": profiles,
        "engine": setting.engine,
        "gate_deadline_ms": setting.deadline_ms,
        "temperature": plan.temperature,
        "seed": plan.seed,
        "max_steps": plan.max_steps,
        "max_tokens": plan.max_tokens,
        "oracle_replays": plan.replays,
        "reuse": not parsed.no_reuse,
    }


def _write(
    parsed: argparse.Namespace, runs: Sequence[Any], names: Sequence[str], about: dict[str, Any], out: Path
) -> None:
    from whetherman_edge.bench import ab_figures, ab_page
    from whetherman_edge.bench.ab_gates import GATES, NONE

    prices = ab_figures.Prices(parsed.price_prompt, parsed.price_output)
    figures = {"about": about} | ab_figures.compare(runs, names, NONE, prices, parsed.seed)
    text = json.dumps(figures, indent=1, ensure_ascii=False) + "\n"
    for path in (out / FIGURES, *([parsed.json] if parsed.json else [])):
        path.write_text(text, encoding="utf-8")
    (out / PAGE).write_text(ab_page.page(figures, GATES), encoding="utf-8")
    for line in ab_page.lines(figures):
        sys.stdout.write(line + "\n")
    sys.stdout.write(f"report: {out / PAGE}\n")
