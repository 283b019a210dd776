"""Which set ``load`` gives, and what it says when there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from whetherman_edge import kernels
from whetherman_edge.errors import ConfigError

ISOLATED = Path(__file__).resolve().parents[1] / "isolated"


def test_reference_is_always_there() -> None:
    loaded = kernels.load("reference")
    assert (loaded.backend, loaded.isa) == ("reference", "numpy")


@pytest.mark.native
def test_best_is_native_where_the_module_is_built() -> None:
    """The build that fell back to pure Python must not pass unnoticed."""
    assert kernels.load("best").backend == "native"
    assert kernels.load("serial").isa == "serial"
    assert kernels.load(kernels.load("best").isa).isa == kernels.load("best").isa


def test_the_environment_chooses_unless_the_caller_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHETHERMAN_KERNELS", "reference")
    assert kernels.load().backend == "reference"
    monkeypatch.setenv("WHETHERMAN_KERNELS", "no such set")
    assert kernels.load("reference").isa == "numpy"


@pytest.mark.native
@pytest.mark.parametrize("name", ["avx1024", "", "SERIAL"])
def test_an_unknown_set_names_the_choices(name: str) -> None:
    if not name:
        assert kernels.load(name).isa  # empty means: not chosen
        return
    with pytest.raises(ConfigError, match=r"'serial'.*'reference'"):
        kernels.load(name)


def test_without_the_module_best_falls_back_and_a_named_set_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(kernels, "_native", raising=False)
    monkeypatch.setitem(sys.modules, "whetherman_edge.kernels._native", None)
    assert kernels.load("best").backend == "reference"
    with pytest.raises(ConfigError, match="C compiler"):
        kernels.load("serial")


@pytest.mark.native
def test_no_call_leaks(tmp_path: Path) -> None:
    """Good and refused calls, many times over, in a process of their own: objects and memory stay level."""
    script = ISOLATED / "kernel_leaks.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
