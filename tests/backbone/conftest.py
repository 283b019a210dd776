"""Real weights for the tests marked ``model``: the base from the project's own store, quantised by its own code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from whetherman_edge.backbone import store
from whetherman_edge.backbone.llama import Network
from whetherman_edge.backbone.progress import ConsoleProgress
from whetherman_edge.backbone.quantise import quantise


@pytest.fixture(scope="session")
def gemma_base() -> Path:
    """Gemma 3 270M as published (q4_k_m, 18 blocks)."""
    return store.ensure("gemma-3-270m", ConsoleProgress()).path


@pytest.fixture(scope="session")
def gemma_q4(gemma_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first 12 blocks, q4_0: what the daemon runs has this shape."""
    path = tmp_path_factory.mktemp("weights") / "gemma-12-q4_0.gguf"
    quantise(gemma_base, path, "q4_0", 12, n_threads=1)
    return path


@pytest.fixture(scope="session")
def gemma_q8(gemma_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first 12 blocks, q8_0: the daemon's weights but for the adapter."""
    path = tmp_path_factory.mktemp("weights") / "gemma-12-q8_0.gguf"
    quantise(gemma_base, path, "q8_0", 12, n_threads=1)
    return path


@pytest.fixture(scope="session", params=["f16", "q4_0"])
def whole(
    request: pytest.FixtureRequest, gemma_base: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Network, float]]:
    """All 18 blocks in a precision, and the cosine that two ways to the same state must reach in it."""
    path = tmp_path_factory.mktemp("weights") / f"gemma-{request.param}.gguf"
    quantise(gemma_base, path, request.param, n_threads=1)
    network = Network(path)
    yield network, {"f16": 0.9999, "q4_0": 0.9995}[request.param]
    network.close()
    path.unlink()
