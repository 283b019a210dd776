"""Fusion: two opinions in, one verdict out; no event loop, no model."""

from __future__ import annotations

import math

import numpy as np
import pytest

from whetherman_edge.gate.fusion import N_INPUTS, Fusion, Opinion
from whetherman_edge.gate.verdict import PHASES, Verdict

P = (0.4, 0.3, 0.2, 0.1)
LOG_P = tuple(math.log(p) for p in P)
OTHER = tuple(math.log(p) for p in (0.1, 0.2, 0.3, 0.4))
SCALARS = (5.0, -1.0)


def static(phase: int = 0) -> Verdict:
    return Verdict(P, "static", (*LOG_P, *SCALARS), tool="static_tool", tool_probability=0.6, phase=phase)


def fusion_of(backbone: float, stage: float, bias=None) -> Fusion:
    weights = np.zeros((len(PHASES), N_INPUTS, 4), np.float32)
    weights[:, :4] = np.eye(4) * backbone
    weights[:, 4:8] = np.eye(4) * stage
    return Fusion(weights, np.zeros((len(PHASES), 4), np.float32) if bias is None else bias)


def test_one_stage_alone_gives_its_own_probabilities():
    assert fusion_of(0, 1).verdict(static(), Opinion(OTHER)).probabilities == pytest.approx(P)
    assert fusion_of(1, 0).verdict(static(), Opinion(OTHER)).probabilities == pytest.approx((0.1, 0.2, 0.3, 0.4))


def test_both_together_are_their_product():
    got = fusion_of(1, 1).verdict(static(), Opinion(OTHER)).probabilities
    product = np.array(P) * np.array((0.1, 0.2, 0.3, 0.4))
    assert got == pytest.approx(product / product.sum())


def test_the_verdict_keeps_a_profile_s_inputs_in_their_places():
    got = fusion_of(1, 0).verdict(static(), Opinion(OTHER))
    assert got.engine == "gemma"
    assert not got.fallback
    assert got.fused == pytest.approx((*OTHER, *SCALARS))
    assert np.exp(got.fused[:4]) == pytest.approx(got.probabilities)


def test_each_phase_has_its_own_layer_and_the_pointer_counts():
    bias = np.zeros((len(PHASES), 4), np.float32)
    bias[2, 1] = 50.0
    fusion = fusion_of(1, 1, bias)
    assert fusion.verdict(static(0), Opinion(LOG_P)).label == "ACT"
    assert fusion.verdict(static(2), Opinion(LOG_P)).label == "ANSWER"
    weights = np.zeros((len(PHASES), N_INPUTS, 4), np.float32)
    weights[:, 8, 0], weights[:, 9, 3] = 10.0, 10.0
    pointing = Fusion(weights, np.zeros((len(PHASES), 4), np.float32))
    assert pointing.verdict(static(), Opinion(OTHER, 0.9, 0.1)).label == "ACT"
    assert pointing.verdict(static(), Opinion(OTHER, 0.1, 0.9)).label == "DECLINE"


@pytest.mark.parametrize("log_p", [(math.nan, 0.0, 0.0, 0.0), (-math.inf, 0.0, 0.0, 0.0)])
def test_what_is_not_finite_is_an_error(log_p):
    with pytest.raises(ValueError, match="finite"):
        fusion_of(1, 1).verdict(static(), Opinion(log_p))


@pytest.mark.parametrize("shape", [(2, N_INPUTS, 4), (3, 9, 4), (3, N_INPUTS, 3)])
def test_other_shapes_are_refused(shape):
    with pytest.raises(ValueError, match="fusion"):
        Fusion(np.zeros(shape, np.float32), np.zeros((3, 4), np.float32))
