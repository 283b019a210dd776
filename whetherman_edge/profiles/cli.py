"""``whetherman-edge profile list|show|import|export``."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from whetherman_edge.errors import ProfileError, UsageError
from whetherman_edge.gate.verdict import STEP_KINDS
from whetherman_edge.profiles import field
from whetherman_edge.profiles.payoff import explain, payoff_of
from whetherman_edge.profiles.schema import FILE_BYTES_MAX, Profile, basis_of, parse_profile, taus
from whetherman_edge.profiles.store import ProfileStore, Stored, write_atomically

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]


def register(verbs: Verbs) -> None:
    """Add ``profile`` and its four actions; each sets ``run``, a function of the parsed arguments."""
    add_arguments(verbs.add_parser("profile", help="profiles: list, show, import, export"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of ``profile`` to its parser."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|show|import|export")
    listing = actions.add_parser("list", help="what there is, and what each one allows")
    listing.add_argument("--json", action="store_true", help="as one JSON array")
    listing.set_defaults(run=run_list)
    show = actions.add_parser("show", help="what a profile says")
    show.add_argument("name")
    show.add_argument("--json", action="store_true", help="the file as it is")
    show.set_defaults(run=run_show)
    importing = actions.add_parser("import", help="check a profile file and keep it")
    importing.add_argument("file", metavar="FILE", help="the file; - for standard input")
    importing.add_argument("--name", help="name to keep it under (default: the file's)")
    importing.add_argument(
        "--force", action="store_true", help="replace a profile of that name, and take one of another engine"
    )
    importing.set_defaults(run=run_import)
    exporting = actions.add_parser("export", help="write a profile's file somewhere else")
    exporting.add_argument("name")
    exporting.add_argument("file", nargs="?", default="-", metavar="FILE", help="where to (default: standard output)")
    exporting.add_argument("--force", action="store_true", help="replace an existing file")
    exporting.set_defaults(run=run_export)


def run(args: argparse.Namespace) -> int:
    """Run the action that was parsed."""
    return int(args.run(args))


def run_list(args: argparse.Namespace) -> int:
    """One line a profile; exit 0 also when some are broken, which the line says."""
    store = ProfileStore(check=_fits)
    stored = store.list()
    records = field.read(field.default_path(), time.time())
    if args.json:
        sys.stdout.write(msgspec.json.encode([_row(entry, records) for entry in stored]).decode() + "\n")
        return 0
    rows = [("NAME", "STATE", "AGENT", "ENGINE", "DECIDES", "CREATED")]
    for entry in stored:
        row = _row(entry, records)
        agent = f"{row['agent']} {row['quantisation']}".rstrip()
        rows.append((row["name"], row["state"], agent, row["engine"], row["decides"], row["created"]))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for line in rows:
        sys.stdout.write("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() + "\n")
    for entry in stored:
        if entry.fault:
            sys.stderr.write(f"{entry.path}: {entry.fault}\n")
    if any(row[1] == "calibrated" for row in rows):
        from whetherman_edge.config import default_config_path

        sys.stdout.write(
            f'to use one: "MODEL" = "NAME" under [agents] in {default_config_path()}, MODEL as your requests name it; '
            "`whetherman-edge doctor` says the line for the models of your server\n"
        )
    sys.stdout.write(f"directory: {store.writable_dir}\n")
    return 0


def run_show(args: argparse.Namespace) -> int:
    """The file, or a summary of it."""
    store = ProfileStore()
    if args.json:
        sys.stdout.write(store.read(args.name).decode("utf-8", "replace"))
        return 0
    profile = store.load(args.name)
    for key, value in _summary(args.name, store.find(args.name), profile):
        sys.stdout.write(f"{key:<14}{value}\n")
    return 0


def run_import(args: argparse.Namespace) -> int:
    """Validate, copy, print where it is now."""
    if args.file == "-":
        if not args.name:
            raise UsageError("profile import -: expected --name NAME, as standard input has no file name")
        data = sys.stdin.buffer.read(FILE_BYTES_MAX + 1)
    else:
        source = Path(args.file)
        try:
            with source.open("rb") as file:
                data = file.read(FILE_BYTES_MAX + 1)
        except OSError as exc:
            raise UsageError(f"profile import: {source} cannot be read: {exc.strerror}; check the path") from exc
    name = args.name or Path(args.file).stem
    profile = parse_profile(data, name)
    try:
        _fits(profile, name)
    except ProfileError as exc:
        if not args.force:
            raise ProfileError(f"{exc}; --force keeps it all the same") from exc
        sys.stderr.write(f"whetherman-edge: {exc}\n")
    path = ProfileStore().save(name, data, overwrite=args.force)
    sys.stdout.write(f"{path}\n")
    return 0


def run_export(args: argparse.Namespace) -> int:
    """Write the file's bytes as they are."""
    data = ProfileStore().read(args.name)
    if args.file == "-":
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return 0
    path = Path(args.file)
    if path.exists() and not args.force:
        raise UsageError(f"profile export: {path} exists already; choose another file, or use --force")
    write_atomically(path, data)
    sys.stdout.write(f"{path}\n")
    return 0


def _fits(profile: Profile, name: str) -> None:
    """Raise ProfileError for a profile of another artifact than the packaged one; the engine brings NumPy, so late."""
    from whetherman_edge.engine import check_packaged

    check_packaged(profile, name)


def _row(entry: Stored, records: dict[str, field.FieldRecord]) -> dict[str, Any]:
    profile = entry.profile
    row: dict[str, Any] = {"name": entry.name, "path": str(entry.path), "sha256": entry.sha256, "fault": entry.fault}
    if profile is None:
        return row | {
            "state": "broken",
            "agent": "-",
            "quantisation": "",
            "engine": "-",
            "decides": "-",
            "created": "-",
        }
    state = "unusable" if entry.fault else "calibrated" if profile.calibrated else "not calibrated"
    record = records.get(f"profile:{entry.name}")
    if state == "calibrated" and record is not None and record.basis == basis_of(profile):
        state = "calibrate again" if record.advice or record.stopped else state
    return row | {
        "state": state,
        "agent": f"{profile.agent.kind}:{profile.agent.model}",
        "quantisation": profile.agent.quantisation,
        "engine": f"{profile.engine.name}:{profile.engine.sha256[:12]}",
        "decides": ",".join(dict.fromkeys(label for label, _, tau in taus(profile.tau) if tau is not None))
        or "nothing",
        "created": profile.created[:10],
    }


def _decides(profile: Profile) -> list[str]:
    """Each decision that is made, with its thresholds: ``ANSWER from 0.9 on first steps and 0.95 on later steps``."""
    lines = []
    for label, pair in itertools.groupby(taus(profile.tau), key=lambda one: one[0]):
        by_kind = {kind: tau for _, kind, tau in pair if tau is not None}
        if len(set(by_kind.values())) == 1 and len(by_kind) == len(STEP_KINDS):
            lines.append(f"{label} from {by_kind['first']:g}")
        elif by_kind:
            lines.append(f"{label} from " + " and ".join(f"{tau:g} on {kind} steps" for kind, tau in by_kind.items()))
    return lines


def _field(name: str, profile: Profile) -> list[tuple[str, str]]:
    """What the daemon's requests showed of this agent, where there is any."""
    record = field.read(field.default_path(), time.time()).get(f"profile:{name}")
    if record is None or record.basis != basis_of(profile):
        return []
    lines = []
    if record.advice:
        lines.append(f"in shadow: {record.advice}")
    for cause, shown in record.by_cause().items():
        if cause == "loop_guard" and not shown.n_applied:
            continue
        name, advice = ("loop guard", "") if cause == "loop_guard" else ("scored", "; calibrate again")
        if shown.stopped:
            lines.append(f"{name}: stopped: the evidence of {shown.stopped!r} turned against it{advice}")
        tests = ", ".join(f"{key} {e:.2g} of {n}" for key, (n, e) in shown.tests.items() if n)
        lines.append(f"{name}: {shown.n_applied} interventions; evidence against them (100 stops): {tests or 'none'}")
    return [("in the field" if not place else "", line) for place, line in enumerate(lines)]


def _payoff(profile: Profile) -> list[tuple[str, str]]:
    """The payoff in words and numbers, with the strictest threshold that decides."""
    payoff = payoff_of(profile.payoff)
    if payoff is None:
        inputs = ", ".join(f"{key} {value:g}" for key, value in profile.payoff.items())
        return [("payoff", f"{inputs or '-'}: not all that is needed was measured, so what is safe is worth it")]
    tau = min((value for _, _, value in taus(profile.tau) if value is not None), default=None)
    return [("payoff" if not place else "", line) for place, line in enumerate(explain(payoff, tau))]


def _proven(profile: Profile) -> list[str]:
    """What was proven, a line for each kind of step."""
    risk = profile.risk
    if risk is None:
        return ["nothing: the daemon stays in shadow with this profile"]
    claim = f"at most {risk.alpha:.1%} of needed calls withheld, with confidence {1 - risk.delta:.0%}"
    if risk.plain:
        needed = "an unstated number of" if risk.n_needed is None else str(risk.n_needed)
        counts = f"{risk.n_false_skips} of {needed} needed, {risk.n_withheld} of {risk.n_measured} measured withheld"
        return [f"{claim} ({counts})"]
    lines = []
    for kind in STEP_KINDS:
        proof = risk.first if kind == "first" else risk.later
        if proof is None:
            lines.append(f"{kind} steps: nothing, every call is left alone")
        else:
            lines.append(
                f"{kind} steps: {claim} (bound {proof.bound:.1%}: {proof.n_false_skips} of {proof.n_needed} needed; "
                f"{proof.n_withheld} of {proof.n_measured} measured withheld)"
            )
    return lines


def _breadth(profile: Profile) -> str:
    """How many kinds of task showed a needed call; the profile counts both splits and both kinds of step together."""
    if not profile.found:
        return "not stated: this profile does not say over how many kinds of task"
    n = sum(found.needed > 0 for found in profile.found.values())
    return f"needed calls in {n} of {len(profile.found)} kinds of task, those of the fit included"


def _summary(name: str, path: Path, profile: Profile) -> list[tuple[str, str]]:
    agent, steering = profile.agent, profile.intervention
    return [
        ("name", name),
        ("file", str(path)),
        ("agent", f"{agent.model} on {agent.kind}" + (f", {agent.quantisation}" if agent.quantisation else "")),
        ("engine", f"{profile.engine.name} {profile.engine.sha256}"),
        ("decides", ", ".join(_decides(profile)) or "nothing"),
        *(("proven" if not place else "", line) for place, line in enumerate(_proven(profile))),
        ("measured", _breadth(profile)),
        ("intervention", steering.mode + (f", wording {steering.wording}" if steering.wording else "")),
        ("interactive", "yes" if profile.interactive else "no: ASK is never decided"),
        ("layer", f"{len(profile.layer.features)} features, temperature {profile.layer.temperature:g}"),
        *_payoff(profile),
        *_field(name, profile),
        ("created", f"{profile.created} by Whetherman Edge {profile.version}"),
    ]
