"""Puts llama-cpp-python into this environment: PyPI has its source only, so pip compiles it for the machine it is on.

That takes 6 to 8 minutes on two cores the first time; pip keeps the wheel in the user's cache, and another environment
on the same machine gets it in seconds. The build uses the machine's own instructions: never carry it to another one.
Compiling is the only step here that may fail on a healthy machine (no compiler), and then the static stage serves.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections import deque

from whetherman_edge.backbone.fetch import end_child
from whetherman_edge.backbone.progress import Progress
from whetherman_edge.errors import EnvironmentFault

REQUIREMENTS = ("llama-cpp-python>=0.3.16", "gguf>=0.10")
CMAKE_ARGS = "-DLLAVA_BUILD=OFF"
"""Leaves out the multimodal library, a third of the work."""
COMPILERS = ("c++", "g++", "clang++")
LAST_LINES = 4
# Ninja writes "[12/87] Building …", Makefiles "[ 12%] Building …".
_NINJA = re.compile(r"\[(\d+)/(\d+)\]")
_MAKE = re.compile(r"\[ *(\d+)%\]")


def is_installed() -> bool:
    """Whether what the backbone needs can be imported here; does not import it."""
    return all(importlib.util.find_spec(name) is not None for name in ("llama_cpp", "gguf"))


def ensure(progress: Progress) -> None:
    """Install llama.cpp and the ``gguf`` package unless they are there. Blocking, minutes the first time.

    Raises EnvironmentFault without pip or a C++ compiler, or when the build fails, with its last words.
    """
    if is_installed():
        return
    if importlib.util.find_spec("pip") is None:
        raise EnvironmentFault(
            f"expected pip in this environment ({sys.prefix}), found none; run `python -m ensurepip` there"
        )
    if importlib.util.find_spec("llama_cpp") is None and not has_compiler():
        raise EnvironmentFault(
            "expected a C++ compiler to build llama.cpp, found none; install one (Debian: apt-get install g++), then "
            "run the command again; until then the static stage serves"
        )
    progress.note("llama.cpp: fetching and compiling it for this machine; 6 to 8 minutes on 2 cores the first time")
    _run(command(), progress)
    importlib.invalidate_caches()
    if not is_installed():
        raise EnvironmentFault("pip said that it installed llama-cpp-python and gguf, but they cannot be found")
    progress.note("llama.cpp: installed")


def has_compiler() -> bool:
    """Whether a C++ compiler is on the path, or named by ``CXX``."""
    named = os.environ.get("CXX", "").split()
    return any(shutil.which(name) for name in (*named[:1], *COMPILERS))


def command() -> list[str]:
    """The pip command; verbose, because the compiler's lines are the progress."""
    options = "--verbose --no-input --disable-pip-version-check --progress-bar=off"
    return [sys.executable, "-m", "pip", "install", *options.split(), *REQUIREMENTS]


def step_of(line: str) -> tuple[int, int] | None:
    """(steps done, steps in all) that a build's line tells of."""
    if (found := _NINJA.search(line)) is not None:
        return int(found[1]), int(found[2])
    if (found := _MAKE.search(line)) is not None:
        return int(found[1]), 100
    return None


def _run(arguments: list[str], progress: Progress) -> None:
    env = {**os.environ, "CMAKE_ARGS": os.environ.get("CMAKE_ARGS", CMAKE_ARGS), "PYTHONUNBUFFERED": "1"}
    child = subprocess.Popen(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=env,
        start_new_session=True,  # a Ctrl-C reaches us, and we end the compilers
        encoding="utf-8",
        errors="replace",
    )
    _RUNNING.append(child)
    assert child.stdout is not None
    last: deque[str] = deque(maxlen=LAST_LINES)
    total = 0
    try:
        for line in child.stdout:
            if line.strip():
                last.append(line.strip())
            step = step_of(line)
            if step is None or step[1] < 10:  # CMake's own small checks count up to two or three
                continue
            if step[1] != total:
                total = step[1]
                progress.begin("llama.cpp", total, 0, unit="steps")
            progress.at(step[0])
        child.wait()
    finally:
        if total:
            progress.end()
        end_child(child)
        _RUNNING.remove(child)
        child.stdout.close()
    if child.returncode != 0:
        raise EnvironmentFault(
            f"expected pip to build llama-cpp-python, it failed (exit {child.returncode}): {' | '.join(last)[:800]}; "
            "the static stage serves meanwhile"
        )


_RUNNING: list[subprocess.Popen[str]] = []


def end_all() -> None:
    """End the builds of this process, from any thread."""
    for child in tuple(_RUNNING):  # its own thread removes it meanwhile
        end_child(child)
