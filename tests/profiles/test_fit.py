"""The layer: recovers a known one, keeps the shared gate without evidence, refuses what cannot be fitted."""

from __future__ import annotations

import numpy as np
import pytest

from whetherman_edge.errors import UsageError
from whetherman_edge.profiles.fit import fit_layer

NAMES = ("log_p_act", "tool_p1", "n_results")


def _steps(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, list[str]]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 3)) * (1.0, 0.2, 2.0) + (0.0, 0.5, 1.0)
    return x, rng.random(n), [f"g{i // 4}" for i in range(n)]


def test_an_agent_that_contradicts_the_shared_gate_is_learned() -> None:
    x, uniform, groups = _steps(800)
    truth = 1 / (1 + np.exp(-(1.5 * (x[:, 2] - 1))))
    needed = (uniform < truth).astype(float)
    fit = fit_layer(x, needed, NAMES, x[:, 0], groups)
    p = np.array([fit.layer.p_need(row.tolist()) for row in x])
    assert np.abs(p - truth).mean() < 0.05
    assert fit.log_loss < fit.prior_log_loss - 0.2
    assert 0.7 < fit.layer.temperature < 1.5


def test_with_little_evidence_the_shared_gate_stays() -> None:
    x, uniform, groups = _steps(24, seed=3)
    prior = 2.0 * x[:, 0]
    needed = (uniform < 1 / (1 + np.exp(-prior))).astype(float)
    fit = fit_layer(x, needed, NAMES, prior, groups)
    logits = np.array([np.log(p / (1 - p)) for p in (fit.layer.p_need(row.tolist()) for row in x)])
    assert np.corrcoef(logits, prior)[0, 1] > 0.9


def test_out_of_fold_predictions_know_nothing_of_their_group() -> None:
    """Labels that are noise: in-sample they can be learned, out of fold they must not be."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(60, 30))
    needed = (rng.random(60) < 0.5).astype(float)
    names = tuple(f"f{i}" for i in range(30))
    fit = fit_layer(x, needed, names, np.zeros(60), [str(i) for i in range(60)])
    assert fit.log_loss > 0.6


@pytest.mark.parametrize(
    ("needed", "message"),
    [
        (np.ones(20), "some needed and some not"),
        (np.zeros(20), "some needed and some not"),
        (np.full(20, np.nan), "finite"),
    ],
)
def test_what_cannot_be_fitted_is_refused(needed: np.ndarray, message: str) -> None:
    x, _, groups = _steps(20)
    with pytest.raises(UsageError, match=message):
        fit_layer(x, needed, NAMES, x[:, 0], groups)
