"""One suite, three sets of kernels: the NumPy reference, native serial, and the best this machine runs."""

from __future__ import annotations

import pytest

from whetherman_edge.kernels import Kernels, load

SETS = [
    pytest.param("reference", id="reference"),
    pytest.param("serial", id="native-serial", marks=pytest.mark.native),
    pytest.param("best", id="native-best", marks=pytest.mark.native),
]


def load_or_skip(name: str) -> Kernels:
    """A pure-Python install has one set only; ``make test`` turns the skip into a failure."""
    try:
        kernels = load(name)
    except Exception as exc:
        pytest.skip(f"no compiled kernels: {exc}")
    if name != "reference" and kernels.backend == "reference":
        pytest.skip("no compiled kernels")
    return kernels


@pytest.fixture(scope="session", params=SETS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return load_or_skip(request.param)


@pytest.fixture(scope="session", params=SETS[1:])
def native_kernels(request: pytest.FixtureRequest) -> Kernels:
    return load_or_skip(request.param)
