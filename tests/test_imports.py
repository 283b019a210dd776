"""The shape of the code, read from its syntax trees: who may import whom, what is banned, how long things may be."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "whetherman_edge"

# For each part of the package, the parts it may import besides itself and errors. The first matching name counts, so a
# module may be listed before its package. "*" is anything.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "errors": (),
    "client": (),
    "config": ("gate.verdict", "profiles.payoff"),
    "kernels": (),
    "dialects": (),
    "router.cli": ("config", "engine", "dialects", "kernels"),
    "router": ("kernels", "dialects"),
    "profiles.cli": ("config", "engine", "gate.verdict"),
    "profiles": ("gate.verdict",),
    "gate": ("dialects.chat", "router", "profiles.schema", "profiles.payoff", "kernels"),
    "backbone.cli": ("config",),
    "backbone": ("dialects.chat", "kernels._native"),
    "engine": ("dialects.chat", "gate", "kernels", "profiles.schema", "router", "backbone"),
    "ledger": ("config",),
    "proxy": ("config", "dialects", "gate", "profiles", "ledger.counters", "ledger.entry", "__version__"),
    "service": ("config", "backbone"),
    "calibrate.cli": ("config", "profiles", "service.discovery", "__version__"),
    "calibrate": ("config", "dialects", "engine", "gate", "profiles", "router", "__version__"),
    "bench": ("*",),
    "composition": ("*",),
    "daemon": ("*",),
    "cli": ("*",),
    "__main__": ("cli",),
    "__init__": (),
}
NEVER_FROM_DAEMON = ("cli", "bench", "calibrate")  # the daemon does not know who starts it

PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
# Outside modules: where they are banned or, with "only", the one place where they are not.
BANNED: dict[str, set[str]] = {
    "gate": {"asyncio", "socket", "os", "time", "logging"},  # pure: values in, values out
    "proxy": {"numpy"},
    "dialects": {"asyncio", "socket", "os", "time", "logging", "numpy"},
    "kernels": {"asyncio", "socket", "time", "logging"},
}
ONLY: dict[str, str] = {"llama_cpp": "backbone", "xllamacpp": "service"}
LAZY = {"llama_cpp", "xllamacpp", "zstandard"}  # slow to load, or not there at all: inside a function

MODULE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70
BAD_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "base", "manager"}

SOURCES = sorted(path for path in PACKAGE.rglob("*.py"))
SCRIPTS = sorted(path for folder in ("convert", "tests") for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    """Dotted name inside the package: "gate.policy", "cli"; a package's __init__ is the package."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def matches(name: str, pattern: str) -> bool:
    return pattern == "*" or name == pattern or name.startswith(pattern + ".")


def imports(tree: ast.AST, package: str) -> Iterator[tuple[str, int, bool]]:
    """(absolute dotted name, line, inside a function) of each import; ``from a import b`` gives a.b."""
    inside = {
        id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef) for n in ast.walk(f)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno, id(node) in inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            above = parents[: len(parents) - node.level + 1] if node.level else []
            source = ".".join(filter(None, [*above, node.module]))
            yield from ((f"{source}.{alias.name}", node.lineno, id(node) in inside) for alias in node.names)


def faults(tree: ast.AST, name: str) -> Iterator[str]:
    """What is wrong with the imports of one module of the package."""
    part = next((p for p in MAY_IMPORT if matches(name, p) or (p == "cli" and name.startswith("cli"))), None)
    if part is None:
        yield f"{name}: a new part of the package; say in tests/test_imports.py what it may import"
        return
    own = name.split(".")[0]
    for imported, line, lazy in imports(tree, f"whetherman_edge.{name.rpartition('.')[0]}".rstrip(".")):
        outside = imported.split(".")[0]
        if outside == "whetherman_edge":
            inner = imported.removeprefix("whetherman_edge.")
            allowed = (own, "errors", *MAY_IMPORT[part])
            if not any(matches(inner, pattern) for pattern in allowed):
                yield f"line {line}: {name} imports {inner}; it may import {', '.join(allowed)}"
            if part in ("composition", "daemon") and inner.split(".")[0] in NEVER_FROM_DAEMON:
                yield f"line {line}: {name} imports {inner}"
            continue
        banned = next((names for p, names in BANNED.items() if matches(name, p)), set())
        if outside in banned | PICKLES:
            yield f"line {line}: {name} must not import {outside}"
        if outside in ONLY and not matches(name, ONLY[outside]):
            yield f"line {line}: {outside} belongs to {ONLY[outside]} alone"
        if outside in LAZY and not lazy:
            yield f"line {line}: {outside} is imported inside the function that needs it"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_go_one_way(path: Path) -> None:
    assert list(faults(ast.parse(path.read_text("utf-8")), name_of(path))) == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("gate.policy", "import time"),
        ("gate.policy", "from os import path"),
        ("gate.policy", "from whetherman_edge.proxy import app"),
        ("gate.policy", "from whetherman_edge.dialects.openai_chat import view"),
        ("gate.policy", "from ..proxy import app"),
        ("proxy.app", "def f():\n import numpy as np"),
        ("proxy.app", "from whetherman_edge.router.scorer import Scorer"),
        ("proxy.app", "from whetherman_edge.ledger import records"),
        ("backbone.worker", "import llama_cpp"),
        ("proxy.app", "def f():\n import llama_cpp"),
        ("router.table", "import pickle"),
        ("calibrate.runner", "from whetherman_edge.proxy.app import App"),
        ("daemon", "from whetherman_edge.cli import main"),
        ("somewhere.new", "import re"),
    ],
)
def test_the_walker_sees_what_is_banned(name: str, source: str) -> None:
    assert len(list(faults(ast.parse(source), name))) == 1


@pytest.mark.parametrize("path", [*SOURCES, *SCRIPTS], ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_pickled_and_nothing_is_too_long(path: Path) -> None:
    text = path.read_text("utf-8")
    tree = ast.parse(text)
    assert path.stem not in BAD_NAMES
    assert text.count("\n") <= MODULE_LINES_MAX
    assert not {name.split(".")[0] for name, _, _ in imports(tree, "")} & PICKLES
    long = [
        f"{node.name}: {length} lines"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or 0) - node.lineno + 1) > FUNCTION_LINES_MAX
    ]
    assert long == []
    pickled = [
        f"line {node.lineno}"
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword)
        and node.arg == "allow_pickle"
        and not (isinstance(node.value, ast.Constant) and node.value.value is False)
    ]
    assert pickled == []
