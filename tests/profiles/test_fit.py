"""The layer: recovers a known one, keeps the shared gate without evidence, refuses what cannot be fitted."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from whetherman_edge.errors import UsageError
from whetherman_edge.profiles.fit import fit_layer
from whetherman_edge.profiles.risk import ALPHA, DELTA, GRID, Step, choose
from whetherman_edge.profiles.schema import Layer

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


def test_where_no_group_can_be_held_out_the_shared_gate_stays() -> None:
    x, uniform, _ = _steps(24, seed=3)
    prior = 2.0 * x[:, 0]
    fit = fit_layer(x, (uniform < 0.5).astype(float), NAMES, prior, ["one"] * 24)
    logits = np.array([np.log(p / (1 - p)) for p in (fit.layer.p_need(row.tolist()) for row in x)])
    assert logits == pytest.approx(prior, abs=0.05)


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


def _like(x: np.ndarray, sign: float) -> Layer:
    """An agent's layer in units of its own: it needs a call where the last feature is high, or low for sign -1."""
    mean, scale = x.mean(axis=0) + 0.3, x.std(axis=0) * 1.7
    return Layer(NAMES, tuple(mean), tuple(scale), (0.0, 0.0, sign * 6.0), sign * 1.1, 2.0)


def test_a_like_agents_layer_helps_where_own_steps_are_few_and_its_units_do_not_matter() -> None:
    x, uniform, groups = _steps(40, seed=1)
    known = _like(x, 1.0)
    truth = np.array([known.p_need(row.tolist()) for row in x])
    needed = (uniform < truth).astype(float)
    alone = fit_layer(x, needed, NAMES, -x[:, 0], groups)
    leaning = fit_layer(x, needed, NAMES, -x[:, 0], groups, known=known)
    assert leaning.leans
    assert leaning.log_loss < alone.log_loss
    p = np.array([leaning.layer.p_need(row.tolist()) for row in x])
    assert np.abs(p - truth).mean() < 0.1


def test_a_misleading_agents_layer_is_not_leaned_on() -> None:
    x, uniform, groups = _steps(80, seed=2)
    needed = (uniform < 1 / (1 + np.exp(-2.0 * (x[:, 2] - 1)))).astype(float)
    alone = fit_layer(x, needed, NAMES, x[:, 2] - 1, groups)
    misled = fit_layer(x, needed, NAMES, x[:, 2] - 1, groups, known=_like(x, -1.0))
    assert not misled.leans
    assert misled.layer == alone.layer


def test_a_layer_on_other_features_is_left_alone() -> None:
    x, uniform, groups = _steps(40)
    other = msgspec.structs.replace(_like(x, 1.0), features=("a", "b", "c"))
    fit = fit_layer(x, (uniform < 0.5).astype(float), NAMES, x[:, 0], groups, known=other)
    assert not fit.leans


def test_at_most_delta_of_a_thousand_agents_with_a_misleading_neighbour_are_unsafe() -> None:
    """And with a shared gate that misleads as well: thresholds are proven on the agent's own split, so a bad layer
    costs skips, not safety.
    """
    rng = np.random.default_rng(23)
    unsafe = n_useful = 0
    for seed in range(20):
        x, uniform, _ = _steps(40, seed=100 + seed)
        steepness = rng.uniform(0.5, 3.0)

        def needs(x: np.ndarray, u: np.ndarray, steepness: float = steepness) -> np.ndarray:
            return u < 1 / (1 + np.exp(-steepness * (x[:, 2] - 1)))

        opposite = _like(x, -1.0)
        groups = [str(number) for number in range(len(x))]
        needed = needs(x, uniform).astype(float)
        layer = fit_layer(x, needed, NAMES, -x[:, 2], groups, known=opposite).layer
        weights = np.array(layer.weights) / np.array(layer.scale)
        offset = layer.bias - float(weights @ np.array(layer.mean))

        def skip_score(x: np.ndarray, layer: Layer = layer, w: np.ndarray = weights, b: float = offset) -> np.ndarray:
            return 1 / (1 + np.exp(np.clip(x @ w + b, -30, 30) / layer.temperature))

        crowd, u, _ = _steps(20_000, seed=500 + seed)
        population = np.sort(skip_score(crowd[needs(crowd, u)]))
        for draw in range(50):
            own, u, _ = _steps(120, seed=1_000 + 50 * seed + draw)
            steps = [Step(float(s), bool(y)) for s, y in zip(skip_score(own), needs(own, u), strict=True)]
            found = choose(steps, grid=GRID[::4])
            if found is not None:
                n_useful += found.n_withheld > 0
                unsafe += 1 - np.searchsorted(population, found.tau) / len(population) > ALPHA
    assert unsafe <= DELTA * 1_000 + 2 * (1_000 * DELTA * (1 - DELTA)) ** 0.5
    assert n_useful > 0
