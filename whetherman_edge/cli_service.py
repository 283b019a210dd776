"""``whetherman-edge service``: install, uninstall and status of the systemd or launchd service."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from whetherman_edge.service import install
from whetherman_edge.service.install import Plan

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]


def register(verbs: Verbs) -> None:
    """Add ``service``."""
    service = verbs.add_parser("service", help="run as a service of systemd or launchd: install, uninstall, status")
    actions = service.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, run, text in (
        ("install", _run_install, "write the unit files and a configuration where there is none, and start"),
        ("uninstall", _run_uninstall, "stop, and remove the unit files; configuration and ledger stay"),
        ("status", _run_status, "whether it runs; exit code 1 when not"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        scope = action.add_mutually_exclusive_group()
        scope.add_argument("--user", dest="scope", action="store_const", const="user", help="for you alone (default)")
        scope.add_argument("--system", dest="scope", action="store_const", const="system", help="for the machine")
        action.add_argument("--config", metavar="FILE", help="configuration file of the service")
        action.add_argument("--print", action="store_true", help="show the files and commands; write and run nothing")
        if name == "install":
            action.add_argument("--on-demand", action="store_true", help="start with the first connection (systemd)")
            action.add_argument("--no-start", action="store_true", help="write the files only")
        if name == "status":
            action.add_argument("--json", action="store_true", help="as one JSON object")
        action.set_defaults(run=run, scope="user")


def _plan(parsed: argparse.Namespace) -> Plan:
    config = Path(parsed.config) if parsed.config else None
    return install.plan(parsed.scope, config=config, on_demand=getattr(parsed, "on_demand", False))


def _run_install(parsed: argparse.Namespace) -> int:
    wanted = _plan(parsed)
    if parsed.print:
        for file in wanted.files:
            print(f"==> {file.path} (mode {file.mode:o}{', only if missing' if file.keep else ''})\n{file.text}")
        _print_commands(() if parsed.no_start else wanted.start)
        return 0
    print("\n".join(install.install(wanted, start=not parsed.no_start)))
    return 0


def _run_uninstall(parsed: argparse.Namespace) -> int:
    wanted = _plan(parsed)
    if parsed.print:
        print("\n".join(f"would remove {file.path}" for file in wanted.units if file.path.is_file()))
        _print_commands(wanted.stop)
        return 0
    print("\n".join(install.uninstall(wanted)))
    return 0


def _run_status(parsed: argparse.Namespace) -> int:
    wanted = _plan(parsed)
    if parsed.print:
        print("\n".join(str(file.path) for file in wanted.files))
        return 0
    runs, shown = install.status(wanted)
    if parsed.json:
        print(json.dumps({"running": runs, **shown}, indent=2))
    else:
        print("\n".join(f"{name:<15} {value}" for name, value in {"running": "yes" if runs else "no", **shown}.items()))
    return 0 if runs else 1


def _print_commands(commands: tuple[tuple[str, ...], ...]) -> None:
    print("\n".join(f"$ {' '.join(command)}" for command in commands))
