"""``whetherman-edge doctor``: what this installation has, what is wrong, and what to do about it."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import platform
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from whetherman_edge import __version__, cli_doctor_checks
from whetherman_edge.config import Loaded, default_config_path, load_config
from whetherman_edge.errors import WhethermanError

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]

State = Literal["ok", "note", "fail"]


class Finding(msgspec.Struct, frozen=True):
    """One line of the report. ``note`` costs nothing but speed or comfort; ``fail`` makes the exit code 1."""

    name: str
    state: State
    detail: str


def register(verbs: Verbs) -> None:
    """Add ``doctor``."""
    doctor = verbs.add_parser("doctor", help="check this installation and say what is wrong")
    doctor.add_argument("--json", action="store_true", help="as one JSON object")
    doctor.add_argument("--config", metavar="FILE", help="TOML file (default: WHETHERMAN_CONFIG, else the user's)")
    doctor.set_defaults(run=_run)


def _run(parsed: argparse.Namespace) -> int:
    findings = [*examine(parsed.config)]
    failed = any(finding.state == "fail" for finding in findings)
    if parsed.json:
        value = {"ok": not failed, "checks": [msgspec.to_builtins(finding) for finding in findings]}
        print(json.dumps(value, indent=2))
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            print(f"{finding.state:<4}  {finding.name:<{width}}  {finding.detail}")
    return 1 if failed else 0


def examine(config_path: str | None) -> Iterable[Finding]:
    """Run every check; one that breaks is a finding, never an exception."""
    yield Finding(
        "version", "ok", f"whetherman-edge {__version__}, Python {platform.python_version()} {sys.executable}"
    )
    yield Finding("machine", "ok", f"{platform.system()} {platform.machine()}")
    loaded: Loaded | None = None
    try:
        loaded = load_config({}, path=config_path)
    except WhethermanError as exc:
        yield Finding("config", "fail", str(exc))
    else:
        files = sorted({o.removeprefix("file ") for o in loaded.origins.values() if o.startswith("file ")})
        yield Finding("config", "ok", files[0] if files else f"defaults; no file at {default_config_path()}")
    for name, check in _CHECKS:
        yield _guarded(name, check)
    if loaded is not None:
        for name, check in _around(loaded):
            yield _guarded(name, check)


def _guarded(name: str, check: Callable[[], tuple[State, str]]) -> Finding:
    try:
        state, detail = check()
    except WhethermanError as exc:
        return Finding(name, "fail", str(exc))
    except Exception as exc:
        return Finding(name, "fail", f"{type(exc).__name__}: {exc}")
    return Finding(name, state, detail)


def _kernels() -> tuple[State, str]:
    from whetherman_edge.kernels import load

    kernels = load()
    if kernels.backend == "native":
        return "ok", f"backend: native, isa: {kernels.isa}"
    return (
        "note",
        "backend: reference (NumPy); works, slower. For the compiled kernels install a C compiler and reinstall",
    )


def _router() -> tuple[State, str]:
    from whetherman_edge.router.table import RouterTable

    return "ok", f"sha256 {RouterTable.open(None).sha256[:16]}…"


def _gate() -> tuple[State, str]:
    from whetherman_edge.engine import Router, StaticEngine

    return "ok", f"static gate, sha256 {StaticEngine(Router()).sha256[:16]}…"


def _artifacts() -> tuple[State, str]:
    """Hash every packaged artifact that has a manifest naming its sha256."""
    folder = Path(__file__).resolve().parent / "artifacts"
    checked = 0
    for manifest in sorted(folder.glob("*.json")):
        value = json.loads(manifest.read_text(encoding="utf-8"))
        own = {"file": manifest.with_suffix(".safetensors").name, "sha256": value.get("sha256")}
        for part in (own, *value.values()):  # a manifest names its one file, or each part its own
            if not isinstance(part, dict) or not part.get("sha256") or not (folder / str(part.get("file"))).is_file():
                continue
            name, expected = part["file"], part["sha256"]
            got = hashlib.sha256((folder / name).read_bytes()).hexdigest()
            if got != expected:
                return "fail", f"{name}: expected sha256 {expected[:16]}…, got {got[:16]}…; reinstall the package"
            checked += 1
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    return ("ok", f"{', '.join(files)}; {checked} verified by manifest") if files else ("fail", f"none in {folder}")


def _gemma() -> tuple[State, str]:
    """Opens what the daemon would open: manifest, heads, llama.cpp and the weights."""
    from whetherman_edge.engine import Router, StaticEngine, open_engine

    router = Router()
    engine = open_engine("auto", StaticEngine(router), router.table.sha256)
    if engine.stage is None:
        return "fail", f"{engine.fault}"
    engine.stage.start()
    fault, missing = engine.stage.settled(), engine.state == "missing"
    engine.stage.stop()
    if fault:
        return "note" if missing else "fail", f"the static stage serves alone: {fault}"
    manifest = engine.stage.manifest
    return "ok", f"backbone: {manifest.base.name}, {manifest.quantisation}, sha256 {manifest.sha256[:16]}…"


def _upstream(url: str, kind: str) -> tuple[State, str]:
    """The configured model server, or those that are found."""
    if url == "embedded":
        from whetherman_edge.service import embedded

        embedded.check_installed()
        return "ok", "embedded"
    if url:
        return cli_doctor_checks.upstream(url, kind)
    from whetherman_edge.service import discovery

    found = asyncio.run(discovery.discover())
    if found:
        return "ok", ", ".join(f"{one.name} at {one.url}" for one in found)
    return "note", "no model server found on the usual ports; start one, or use --upstream embedded"


def _servers(url: str, kind: str) -> list[tuple[str, str]]:
    """The configured model server, or those that are found."""
    if url:
        return [(url, kind)]
    from whetherman_edge.service import discovery

    return [(one.url, one.kind) for one in asyncio.run(discovery.discover())]


def _around(loaded: Loaded) -> Iterable[tuple[str, Callable[[], tuple[State, str]]]]:
    """The checks that depend on the settings."""
    url, kind = loaded.config.upstream, loaded.config.upstream_kind
    yield "permissions", lambda: cli_doctor_checks.permissions(loaded)
    yield "port", lambda: cli_doctor_checks.port(loaded)
    yield "upstream", lambda: _upstream(url, kind)
    remote = url if url != "embedded" else ""
    if remote:
        yield "context", lambda: cli_doctor_checks.context(remote, kind)
    yield "profiles", lambda: cli_doctor_checks.profiles(loaded, _servers(remote, kind) if url != "embedded" else ())
    yield "clock", lambda: cli_doctor_checks.clock(remote)


_CHECKS: tuple[tuple[str, Callable[[], tuple[State, str]]], ...] = (
    ("kernels", _kernels),
    ("artifacts", _artifacts),
    ("router", _router),
    ("gate", _gate),
    ("gemma", _gemma),
    ("environment", cli_doctor_checks.environment),
    ("package", cli_doctor_checks.files_of_the_package),
    ("ledger", cli_doctor_checks.ledger),
    ("unit", cli_doctor_checks.unit),
)
