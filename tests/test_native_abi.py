"""The compiled module: one for every Python from 3.11, nothing but the stable ABI, and buildable without Python.h."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

NATIVE = Path(__file__).resolve().parents[1] / "native"
MODULE_FUZZ = Path(__file__).resolve().parent / "isolated" / "module_fuzz.py"
GATE_FUZZ = MODULE_FUZZ.with_name("gate_fuzz.py")
BUILD_TIMEOUT_S = 300

# Every CPython name the module uses, and the version whose stable ABI has it, from Misc/stable_abi.toml.
STABLE_SINCE = {
    "PyBuffer_Release": (3, 11),
    "PyCMethod_New": (3, 9),
    "PyCapsule_GetPointer": (3, 2),
    "PyCapsule_New": (3, 2),
    "PyDict_New": (3, 2),
    "PyDict_SetItem": (3, 2),
    "PyDict_SetItemString": (3, 2),
    "PyErr_Clear": (3, 2),
    "PyErr_Format": (3, 2),
    "PyErr_Occurred": (3, 2),
    "PyExc_TypeError": (3, 2),
    "PyExc_ValueError": (3, 2),
    "PyFloat_AsDouble": (3, 2),
    "PyFloat_FromDouble": (3, 2),
    "PyLong_AsUnsignedLongLong": (3, 2),
    "PyLong_FromSsize_t": (3, 2),
    "PyModuleDef_Init": (3, 5),
    "PyObject_GetBuffer": (3, 11),
    "PyTuple_GetItem": (3, 2),
    "PyTuple_New": (3, 2),
    "PyTuple_SetItem": (3, 2),
    "PyTuple_Size": (3, 2),
    "PyUnicode_AsUTF8AndSize": (3, 10),
    "PyUnicode_FromString": (3, 2),
    "Py_BuildValue": (3, 2),
    "Py_DecRef": (3, 2),
}


def module_path() -> Path:
    _native = pytest.importorskip("whetherman_edge.kernels._native")
    return Path(_native.__file__)


def tool(name: str) -> str:
    """A program from the environment's own bin, else from the PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    assert found is not None, f"expected {name}; it comes with the test extra or with gcc"
    return found


def symbols(path: Path, *options: str) -> set[str]:
    output = subprocess.run([tool("nm"), "-D", *options, str(path)], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1].partition("@")[0] for line in output.splitlines() if line.strip()}


@pytest.mark.native
def test_the_file_and_the_wheel_say_abi3() -> None:
    assert module_path().name == "_native.abi3.so"
    tags = re.findall(
        r"^Tag: (.*)$", importlib.metadata.distribution("whetherman-edge").read_text("WHEEL") or "", re.MULTILINE
    )
    assert tags
    assert all(tag.startswith("cp311-abi3-") for tag in tags)


@pytest.mark.native
@pytest.mark.skipif(sys.platform != "linux", reason="reads ELF symbols")
def test_only_the_stable_abi_of_3_11_is_used() -> None:
    path = module_path()
    used = {name for name in symbols(path, "--undefined-only") if name.startswith(("Py", "_Py"))}
    assert used <= STABLE_SINCE.keys(), f"not known to be stable: {used - STABLE_SINCE.keys()}"
    assert max(STABLE_SINCE[name] for name in used) <= (3, 11)
    assert {name for name in symbols(path, "--defined-only") if not name.startswith("_")} == {"PyInit__native"}


def test_the_stand_in_header_declares_what_the_module_uses() -> None:
    header = (NATIVE / "src" / "stable_abi.h").read_text("utf-8")
    declared = set(re.findall(r"\b((?:Py|PyExc)[A-Za-z0-9]*_[A-Za-z0-9_]+)(?:\(|;)", header))
    assert STABLE_SINCE.keys() <= declared


@pytest.mark.native
def test_the_module_builds_and_behaves_without_python_h(tmp_path: Path) -> None:
    """As on a Debian with gcc and python3 but no python3-dev."""
    configure = [tool("cmake"), "-S", str(NATIVE), "-B", str(tmp_path), "-G", "Ninja", "-DWH_WITHOUT_PYTHON_H=ON"]
    configure += [f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", "-DWH_WERROR=ON"]
    for command in (configure, [tool("cmake"), "--build", str(tmp_path)]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    built = tmp_path / "_native.abi3.so"
    for script in (MODULE_FUZZ, GATE_FUZZ):
        done = subprocess.run(
            [sys.executable, str(script), str(built), "2000"],
            capture_output=True,
            text=True,
            timeout=BUILD_TIMEOUT_S,
            check=False,
            env=os.environ | {"PYTHONPATH": str(NATIVE.parent)},
        )
        assert done.returncode == 0, done.stdout + done.stderr
    if sys.platform == "linux":
        assert symbols(built, "--undefined-only") >= symbols(module_path(), "--undefined-only") & STABLE_SINCE.keys()


LAYOUT = """
#include <stddef.h>
#include <stdio.h>
{include}
#define SIZE(type) printf(#type " %zu\\n", sizeof(type))
#define AT(type, member) printf(#type "." #member " %zu\\n", offsetof(type, member))
int main(void) {{
    SIZE(PyModuleDef); AT(PyModuleDef, m_name); AT(PyModuleDef, m_doc); AT(PyModuleDef, m_size);
    AT(PyModuleDef, m_methods); AT(PyModuleDef, m_slots); AT(PyModuleDef, m_free);
    SIZE(PyMethodDef); AT(PyMethodDef, ml_name); AT(PyMethodDef, ml_meth); AT(PyMethodDef, ml_flags);
    SIZE(PyModuleDef_Slot);
    SIZE(Py_buffer); AT(Py_buffer, buf); AT(Py_buffer, obj); AT(Py_buffer, len); AT(Py_buffer, itemsize);
    AT(Py_buffer, readonly); AT(Py_buffer, ndim); AT(Py_buffer, format); AT(Py_buffer, shape); AT(Py_buffer, strides);
    printf("%d %d %d %d %d %d\\n", METH_NOARGS, METH_O, METH_FASTCALL, PyBUF_WRITABLE, PyBUF_FORMAT, PyBUF_ND);
    return 0;
}}
"""


@pytest.mark.native
def test_the_stand_in_header_has_the_layout_of_python_h(tmp_path: Path) -> None:
    headers = Path(sysconfig.get_path("include"))
    ours = layout(tmp_path, "ours", '#include "stable_abi.h"', NATIVE / "src")
    assert "Py_buffer 80" in ours
    if (headers / "Python.h").exists():  # else there is nothing to compare with: the installed module is this build
        include = "#define Py_LIMITED_API 0x030B0000\n#include <Python.h>"
        assert layout(tmp_path, "theirs", include, headers) == ours


def layout(folder: Path, name: str, include: str, headers: Path) -> str:
    source, program = folder / f"{name}.c", folder / name
    source.write_text(LAYOUT.format(include=include))
    subprocess.run([tool("gcc"), "-std=c11", f"-I{headers}", str(source), "-o", str(program)], check=True)
    return subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
