"""``whetherman-edge calibrate``: measure one agent, write its profile and a report."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final, get_args

import msgspec

from whetherman_edge import __version__
from whetherman_edge.calibrate.agent import AgentClient, check_endpoint
from whetherman_edge.calibrate.run_log import RunLog
from whetherman_edge.calibrate.runner import Budget, Measured, Progress, Runner, Settings
from whetherman_edge.config import UpstreamKind
from whetherman_edge.errors import ProfileError, UsageError
from whetherman_edge.profiles.risk import ALPHA, DELTA
from whetherman_edge.profiles.store import ProfileStore, default_dirs, is_name, write_atomically

if TYPE_CHECKING:
    from whetherman_edge.calibrate.plan import Item
    from whetherman_edge.calibrate.probe import Kind
    from whetherman_edge.calibrate.report import Report
    from whetherman_edge.profiles.schema import Profile

    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]

_BUDGET: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|usd)", re.IGNORECASE)
_SECONDS: Final = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_SHOW_EVERY_S: Final = 30.0


def register(verbs: Verbs) -> None:
    """Add ``calibrate``."""
    parser = verbs.add_parser(
        "calibrate",
        help="measure one agent and write its profile",
        description="Measure one agent on probes with exact checkers, and write a profile that is safe by measurement.",
    )
    parser.add_argument("--agent-endpoint", required=True, metavar="URL", help="the agent's model server")
    parser.add_argument("--model", required=True, help="model name, as in requests")
    parser.add_argument("--name", required=True, help="name of the profile")
    parser.add_argument("--budget", action="append", default=[], metavar="30m|2.5usd", help="most to spend; may repeat")
    parser.add_argument("--price", metavar="IN,OUT", help="USD for a million prompt and output tokens")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="runs at a time (default 1: one slot)")
    parser.add_argument("--resume", action="store_true", help="go on with the log of that name, or only fit again")
    parser.add_argument("--key-env", metavar="NAME", help="environment variable with the API key")
    parser.add_argument("--kind", choices=get_args(UpstreamKind), default="auto", help="kind of the model server")
    parser.add_argument("--quantisation", default="", help="of the model (default: what the server says)")
    parser.add_argument("--engine", choices=("static", "gemma", "auto"), default="auto", help="gate to fit on")
    parser.add_argument("--seed", type=int, default=1, help="seed that the probes are drawn from (default 1)")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="runs of each arm on a probe (default 3)")
    parser.add_argument("--max-tokens", type=int, default=512, metavar="N", help="of one reply (default 512)")
    parser.add_argument("--alpha", type=float, default=ALPHA, help="largest false-skip rate (default %(default)s)")
    parser.add_argument("--delta", type=float, default=DELTA, help="1 - confidence (default %(default)s)")
    parser.add_argument(
        "--dir", type=Path, metavar="DIR", help="where profile and log go (default: the user's profiles)"
    )
    parser.add_argument("--alone", action="store_true", help="start from no other agent's profile")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run)


def parse_budget(values: list[str], price: str | None) -> Budget:
    """``30m``, ``2.5usd``, or both. Raises UsageError; USD need a price."""
    seconds: float | None = None
    usd: float | None = None
    for value in values:
        match = _BUDGET.fullmatch(value.strip())
        if match is None or float(match[1]) <= 0.0:
            raise UsageError(f"--budget: expected minutes or dollars, as 30m or 2.5usd, got {value!r}")
        unit = match[2].lower()
        if unit == "usd":
            usd = float(match[1])
        else:
            seconds = float(match[1]) * _SECONDS[unit]
    usd_in, usd_out = _price(price)
    if usd is not None and not usd_in + usd_out > 0.0:
        raise UsageError("--budget in usd: expected --price IN,OUT as well (USD for a million tokens), got none")
    return Budget(seconds, usd, usd_in, usd_out)


def run(args: argparse.Namespace) -> int:
    """Measure, fit, write. 0: a profile was written; 1: none could be; the report says why."""
    budget = parse_budget(args.budget, args.price)
    _check(args)
    key = os.environ.get(args.key_env, "") if args.key_env else ""
    if args.key_env and not key:
        raise UsageError(f"--key-env: expected an API key in the environment variable {args.key_env}, got none")
    folder = args.dir or default_dirs()[0]
    place = folder / f"{args.name}.calibration"
    log_path = place / "runs.jsonl"
    if log_path.exists() and not args.resume:
        raise UsageError(f"{log_path} exists already; --resume goes on with it, or choose another --name")
    if (folder / f"{args.name}.json").exists() and not args.resume:
        raise UsageError(f"profile {args.name!r} exists already in {folder}; choose another --name, or --resume")
    report = asyncio.run(_calibrate(args, key, budget, log_path))
    write_atomically(place / "report.json", msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    from whetherman_edge.calibrate.report import page, text

    write_atomically(place / "report.html", page(report))
    if report.profile is not None:
        from whetherman_edge.profiles.schema import serialize_profile

        path = folder / f"{args.name}.json"
        kept = _before(path, args.name)
        if kept is not None and kept.calibrated and not report.profile.calibrated:
            sys.stderr.write(f"profile: {path} stays as it is: it proves what this fit does not\n")
        else:
            ProfileStore([folder]).save(args.name, serialize_profile(report.profile), overwrite=args.resume)
            sys.stderr.write(f"profile: {path}\n")
    sys.stderr.write(f"report: {place / 'report.html'}\n")
    if args.json:
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    else:
        sys.stdout.write(text(report))
    if report.profile is None:
        sys.stderr.write(f"whetherman-edge: no profile: {report.reason}\n")
        return 1
    return 0


async def _calibrate(args: argparse.Namespace, key: str, budget: Budget, log_path: Path) -> Report:
    from whetherman_edge.calibrate.conclude import Conclusion, conclude

    items = pack(args.seed)
    known = _known(args)
    before = _before(log_path.parent.parent / f"{args.name}.json", args.name)
    kind = args.kind if args.kind != "auto" else await _kind(args.agent_endpoint)
    quantisation = args.quantisation or await _quantisation(args.agent_endpoint, kind, args.model)
    settings = Settings(
        workers=args.workers,
        runs=args.runs,
        runs_max=max(args.runs, 5) if args.runs >= 3 else args.runs,
        budget=budget,
        kind=kind,
        local=kind in ("ollama", "llamacpp", "lmstudio"),
        seed=args.seed,
        alpha=args.alpha,
        delta=args.delta,
        proven=_proven(before, args),
    )
    with RunLog.open(log_path) as log:
        async with AgentClient(args.agent_endpoint, args.model, key, max_tokens=args.max_tokens) as client:
            measured = await Runner(client, items, log, settings, known=known, show=_Shown()).measure()
            retried = client.n_retried
        sys.stderr.write("\n")
        return await conclude(
            Conclusion(
                name=args.name,
                model=args.model,
                kind=kind,
                quantisation=quantisation,
                engine=args.engine,
                alpha=args.alpha,
                delta=args.delta,
                budget=budget,
                created=datetime.now(UTC).isoformat(timespec="seconds"),
                version=__version__,
                retried=retried,
                before=before,
            ),
            items,
            log,
            measured,
            known,
        )


def _before(path: Path, name: str) -> Profile | None:
    """The profile that an earlier invocation made of this calibration, if it is there and can be used."""
    from whetherman_edge.profiles.schema import parse_profile

    try:
        return parse_profile(path.read_bytes(), name)
    except (OSError, ProfileError):
        return None


def _proven(before: Profile | None, args: argparse.Namespace) -> frozenset[Kind]:
    """Kinds of step that need no further proof, as far as that can be told before the gate is opened."""
    from whetherman_edge.profiles.schema import proven_kinds

    if before is None or before.risk is None or before.agent.model != args.model:
        return frozenset()
    same = (before.risk.alpha, before.risk.delta) == (args.alpha, args.delta)
    same = same and args.engine in ("auto", before.engine.name)
    return proven_kinds(before) if same else frozenset()


def _known(args: argparse.Namespace) -> list[tuple[str, Profile]]:
    """Profiles of other agents, the user's and the shipped ones; of engines that are not loaded too."""
    if args.alone:
        return []
    stored = ProfileStore().list()
    return [(one.name, one.profile) for one in stored if one.profile is not None and one.name != args.name]


def pack(seed: int) -> list[Item]:
    """The probes of the fit and calibrate splits; the test split stays unseen."""
    from whetherman_edge.calibrate.plan import Item
    from whetherman_edge.calibrate.probe import Split
    from whetherman_edge.calibrate.probes import draw
    from whetherman_edge.calibrate.runner import digest

    splits: tuple[Split, Split] = ("fit", "calibrate")
    return [Item(probe, split, digest(probe)) for split in splits for probe in draw(seed, split=split)]


async def _kind(endpoint: str) -> str:
    from whetherman_edge.service.discovery import kind_of

    return await kind_of(endpoint.rstrip("/").removesuffix("/chat/completions").removesuffix("/v1"))


async def _quantisation(endpoint: str, kind: str, model: str) -> str:
    """What the server says of the model's: a proof holds for one, and should name it. "" where it does not say."""
    from whetherman_edge.profiles.schema import quantisation_in
    from whetherman_edge.service.discovery import models_of

    models = await models_of(endpoint.rstrip("/").removesuffix("/chat/completions"), kind)
    own = [served for served in models if served.name == model or len(models) == 1]
    found = next((one.quantisation or quantisation_in(one.file).upper().replace("-", "_") for one in own), "")
    if found:
        sys.stderr.write(f"quantisation: {found}, as the server says\n")
    return found


def _check(args: argparse.Namespace) -> None:
    check_endpoint(args.agent_endpoint)
    if not is_name(args.name):
        raise UsageError(f"--name: expected letters, digits or . _ + @ -, got {args.name[:64]!r}")
    for flag, value in (("--workers", args.workers), ("--runs", args.runs), ("--max-tokens", args.max_tokens)):
        if value < 1:
            raise UsageError(f"{flag}: expected at least 1, got {value}")
    for flag, rate in (("--alpha", args.alpha), ("--delta", args.delta)):
        if not 0.0 < rate < 1.0:
            raise UsageError(f"{flag}: expected a number between 0 and 1, got {rate:g}")


def _price(price: str | None) -> tuple[float, float]:
    if price is None:
        return 0.0, 0.0
    parts = price.split(",")
    try:
        usd_in, usd_out = (float(part) for part in parts)
    except ValueError:
        usd_in = usd_out = math.nan
    if not (0.0 <= usd_in < math.inf and 0.0 <= usd_out < math.inf):
        raise UsageError(f"--price: expected IN,OUT in USD for a million tokens, as 0.15,0.6, got {price!r}")
    return usd_in, usd_out


class _Shown:
    """Progress on stderr: one line that is written over on a terminal, one now and then elsewhere."""

    def __init__(self) -> None:
        self._last_s = -math.inf

    def __call__(self, progress: Progress) -> None:
        line = (
            f"{progress.phase}: {progress.n_runs} runs, {progress.n_open} probes open, needed "
            + ", ".join(f"{kind} {n} of {progress.targets[kind] or n}" for kind, n in progress.needed.items())
            + f", {progress.elapsed_s / 60:.1f} min"
        )
        if progress.left_s is not None:
            line += f", {progress.left_s / 60:.0f} min left"
        if progress.usd:
            line += f", {progress.usd:.2f} USD"
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{line}")
        elif progress.elapsed_s - self._last_s >= _SHOW_EVERY_S:
            self._last_s = progress.elapsed_s
            sys.stderr.write(line + "\n")
        sys.stderr.flush()


__all__ = ["Measured", "pack", "parse_budget", "register", "run"]
