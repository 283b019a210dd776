"""Heads: the contract's arithmetic, and arrays that cannot be right."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.backbone import WIDTH, arrays, write_artifact
from whetherman_edge.backbone.head import Heads, normalised, open_heads
from whetherman_edge.backbone.manifest import read_manifest
from whetherman_edge.errors import ArtifactError


def random_arrays(seed: int = 0):
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(size=array.shape).astype(np.float32)
        for name, array in arrays(pointer_query=np.zeros((3, WIDTH)), pointer_key=np.zeros((3, WIDTH))).items()
    }


@given(st.integers(0, 1000))
def test_the_numbers_are_the_contract_s(seed):
    rng = np.random.default_rng(seed)
    raw = random_arrays(seed)
    h, lines = rng.normal(size=WIDTH).astype(np.float32) * 50, rng.normal(size=(5, WIDTH)).astype(np.float32)
    x = h / math.sqrt(float(np.mean(h.astype(np.float64) ** 2)) + 1e-6)
    logits = raw["head_weight"] @ x + raw["head_bias"]
    heads = Heads(raw)
    got = heads.log_probabilities(h)
    assert np.exp(got).sum() == pytest.approx(1.0)
    assert np.subtract(got, got[0]) == pytest.approx(logits - logits[0], abs=1e-4)
    pointed = heads.point(h, lines)
    t = lines / np.sqrt(np.mean(lines.astype(np.float64) ** 2, axis=1, keepdims=True) + 1e-6)
    expected = (t @ raw["pointer_key"].T) @ (raw["pointer_query"] @ x) / math.sqrt(3)
    assert pointed.logits == pytest.approx(expected, abs=1e-4)
    assert pointed.none == pytest.approx(raw["pointer_none_weight"] @ x + raw["pointer_none_bias"][0], abs=1e-4)
    p, none = pointed.probabilities()
    assert p.sum() + none == pytest.approx(1.0)


@given(st.integers(0, 1000))
def test_a_match_is_a_readout_of_the_state_and_of_the_classes(seed):
    rng = np.random.default_rng(seed)
    raw, h = random_arrays(seed), rng.normal(size=WIDTH).astype(np.float32) * 50
    heads = Heads(raw)
    expected = raw["match_state"] @ normalised(h) + raw["match_classes"] @ np.array(heads.log_probabilities(h))
    assert heads.match(h) == pytest.approx(expected, abs=1e-4)
    assert heads.match_router == pytest.approx(raw["match_router"][0])


def test_without_a_match_head_nothing_matches():
    heads = Heads(arrays(match_state=None, match_classes=None, match_router=None))
    assert (heads.has_match, heads.match_router, heads.match(np.ones(WIDTH, np.float32))) == (False, 0.0, 0.0)


def test_the_scale_of_a_state_does_not_count():
    h = np.random.default_rng(1).normal(size=WIDTH).astype(np.float32) * 30
    assert normalised(h) == pytest.approx(normalised(h * 7), abs=1e-4)


def test_huge_logits_stay_finite():
    heads = Heads(
        arrays(head_bias=np.array([1e30, 0, 0, 0], np.float32), pointer_none_bias=np.array([900.0], np.float32))
    )
    assert heads.log_probabilities(np.ones(WIDTH, np.float32))[0] == pytest.approx(0.0)
    p, none = heads.point(np.ones(WIDTH, np.float32), np.eye(3, WIDTH, dtype=np.float32)).probabilities()
    assert none == pytest.approx(1.0)
    assert np.isfinite(p).all()


def test_without_a_pointer_or_tools_nothing_is_pointed_at():
    bare = arrays(pointer_query=None, pointer_key=None, pointer_none_weight=None, pointer_none_bias=None)
    heads = Heads(bare)
    assert heads.point(np.ones(WIDTH, np.float32), np.eye(3, WIDTH, dtype=np.float32)) is None
    assert Heads(arrays()).point(np.ones(WIDTH, np.float32), np.zeros((0, WIDTH), np.float32)) is None


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_state_that_is_not_finite_is_an_error(bad):
    h = np.ones(WIDTH, np.float32)
    h[2] = bad
    heads = Heads(arrays())
    with pytest.raises(ValueError, match="finite"):
        heads.log_probabilities(h)
    with pytest.raises(ValueError, match="finite"):
        heads.point(h, np.eye(2, WIDTH, dtype=np.float32))
    with pytest.raises(ValueError, match="finite"):
        heads.match(h)


@pytest.mark.parametrize(
    "changed",
    [
        {"head_weight": np.full((4, WIDTH), np.nan, np.float32)},
        {"fusion_bias": np.full((3, 4), np.inf, np.float32)},
        {"head_weight": np.zeros((3, WIDTH), np.float32)},
        {"head_bias": None},
        {"pointer_key": np.zeros((2, WIDTH), np.float32)},
        {"pointer_none_weight": np.zeros(WIDTH + 1, np.float32)},
        {"fusion_bias": np.zeros((2, 4), np.float32)},
        {"match_state": np.zeros(WIDTH + 1, np.float32)},
        {"match_classes": np.zeros(3, np.float32)},
        {"match_router": None},
        {"match_router": np.array([np.nan], np.float32)},
    ],
)
def test_arrays_that_cannot_be_right_are_refused(tmp_path, changed):
    found = read_manifest(write_artifact(tmp_path, arrays_of=arrays(**changed)))
    with pytest.raises(ArtifactError, match=r"backbone\.safetensors: contents do not fit"):
        open_heads(found)
