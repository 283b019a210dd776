"""Runs Python that an agent wrote: a child process with limits on time, memory, files, and no way out.

The child takes its own limits before it reads the program: 2 s of CPU, 512 MiB of address space, no file larger than
1 MiB, no new processes, no sockets, no writing, reading only below its folder and Python's own. Audit hooks are no wall
against a determined attacker; they keep a small model's program from doing harm.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

SECONDS_MAX: Final = 20.0
"""By the clock, which a busy machine runs down while nothing happens; what computes is ended by its 2 s of CPU."""
OUTPUT_CHARS_MAX: Final = 700

_LIMITS: Final = r"""
import ast, math, re, json, datetime, itertools, collections, statistics, random, string, fractions, decimal
import calendar, functools, importlib, os, sys, traceback
try:
    import resource
    for what, amount in (("RLIMIT_CPU", 2), ("RLIMIT_AS", 1 << 29), ("RLIMIT_FSIZE", 1 << 20), ("RLIMIT_NOFILE", 32)):
        try:
            resource.setrlimit(getattr(resource, what), (amount, amount))
        except (ValueError, OSError, AttributeError):
            pass
except ImportError:
    pass
program = sys.stdin.read()
roots = tuple(os.path.realpath(p) for p in (os.getcwd(), sys.prefix, sys.base_prefix, os.path.dirname(os.__file__)))
refused = ("socket.", "subprocess.", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.system", "os.remove",
           "os.rename", "os.rmdir", "os.mkdir", "os.kill", "os.link", "os.symlink", "os.chmod", "os.truncate",
           "shutil.", "ctypes.", "os.putenv", "signal.", "fcntl.", "ftplib.", "smtplib.", "urllib.", "webbrowser.",
           "resource.setrlimit")
def guard(event, args):
    if event.startswith(refused):
        raise PermissionError(event + " is not allowed here")
    if event == "open":
        path, mode, flags = (tuple(args) + (None, None))[:3]
        if (isinstance(mode, str) and set(mode) & set("wax+")) or (isinstance(flags, int) and flags & 3):
            raise PermissionError("writing is not allowed here")
        if isinstance(path, (str, bytes)) and not os.path.realpath(os.fsdecode(path)).startswith(roots):
            raise PermissionError("reading is allowed below this folder only")
sys.dont_write_bytecode = True
sys.addaudithook(guard)
"""
_PROGRAM: Final = (
    _LIMITS
    + r"""
try:
    tree = ast.parse(program, "program")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    space = {"__name__": "__main__"}
    exec(compile(tree, "program", "exec"), space)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), "program", "eval"), space)
        if value is not None:
            print(value)
except SystemExit:
    pass
except BaseException as error:
    print(f"{type(error).__name__}: {error}")
"""
)
_TESTS: Final = (
    _LIMITS
    + r"""
passed, failed = 0, []
sys.path.insert(0, os.getcwd())
for name in sorted(os.listdir(".")):
    if not (name.startswith("test_") and name.endswith(".py")) or (program.strip() and program.strip() != name):
        continue
    try:
        module = importlib.import_module(name[:-3])
    except BaseException as error:
        failed.append(f"{name}: {type(error).__name__}: {error}")
        continue
    for test in [t for t in vars(module) if t.startswith("test_")]:
        try:
            getattr(module, test)()
            passed += 1
        except BaseException as error:
            failed.append(f"{name}::{test}: {type(error).__name__}: {error}")
print(f"{passed} passed, {len(failed)} failed")
print("\n".join(failed[:5]))
"""
)


def run_program(program: str) -> str:
    """What the program printed, or its error; the value of a last line that is an expression is printed too."""
    with tempfile.TemporaryDirectory(prefix="whetherman-") as folder:
        return _run(_PROGRAM, program, Path(folder))


def run_tests(folder: Path, only: str = "") -> str:
    """Runs the test functions of ``folder``'s test files: "2 passed, 1 failed" and the first failures."""
    return _run(_TESTS, only, folder)


def _run(driver: str, text: str, folder: Path) -> str:
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", "-c", driver],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=folder,
        env={"PYTHONIOENCODING": "utf-8", "LANG": "C.UTF-8"},
        start_new_session=True,
    )
    try:
        output, _ = child.communicate(text.encode("utf-8", "replace"), timeout=SECONDS_MAX)
    except subprocess.TimeoutExpired:
        _end(child)
        return "error: the program ran too long"
    if child.returncode < 0 and not output:
        return "error: the program was stopped: too much time or memory"
    shown = output.decode("utf-8", "replace").strip()
    return shown[:OUTPUT_CHARS_MAX] or "(no output; print the result)"


def _end(child: subprocess.Popen[bytes]) -> None:
    if hasattr(os, "killpg"):
        os.killpg(child.pid, signal.SIGKILL)
    else:
        child.kill()
    child.communicate()
