"""A tiny router artifact: a seeded table over a few dozen words, the same layout as the shipped one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from whetherman_edge.kernels import load
from whetherman_edge.router.artifact import write_artifact
from whetherman_edge.router.scorer import Scorer
from whetherman_edge.router.table import DEFAULT_PATH, SPECIALS, RouterTable

CONFIG = {
    "mix": [7.0, 3.0, 2.0, 0.0],
    "lexical": [[0.5, 0.5, 0.0], [0.5, 0.25, 0.0], [0.0, 0.0, 1.0]],
    "name_share": 1.0,
    "has_parameters_bias": 0.0,
    "calibration": [1.7, 0.0, 1.0],
}


@pytest.fixture(scope="session")
def kernels():
    return load("reference")


@pytest.fixture(scope="session")
def table(kernels):
    return RouterTable.open(DEFAULT_PATH, kernels)


@pytest.fixture
def scorer(table, kernels):
    return Scorer(table, kernels)


@pytest.fixture
def tiny(tmp_path) -> Path:
    """Path of a valid artifact of 8 KB or less."""
    words = "a weather rain forecast mail send inbox ##s ##ing , . ?".split()
    tokens = [*SPECIALS, *words]
    rng = np.random.default_rng(7)
    rows = rng.integers(-127, 128, (len(tokens), 8), dtype=np.int8)
    rows[: len(SPECIALS)] = 0
    path = tmp_path / "tiny.safetensors"
    arrays = {
        "table": rows,
        "vocab": np.frombuffer("\n".join(tokens).encode(), dtype=np.uint8),
        "stem": np.arange(len(tokens), dtype=np.int32),
        "idf": np.ones(len(tokens), dtype=np.float32),
        "config": np.frombuffer(json.dumps(CONFIG).encode(), dtype=np.uint8),
    }
    write_artifact(path, arrays, {})
    return path
