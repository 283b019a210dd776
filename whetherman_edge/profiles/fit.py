"""The logistic layer of one agent, fitted on its own probes. NumPy; pure.

Few probes, many features: the layer is pulled towards what the engine already says (its own p(need), distilled into the
features), not towards zero. Without evidence an agent keeps the shared gate; with it the gate bends. The layer of an
agent measured before may stand in for the shared gate, where cross-validation on this agent's probes prefers it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from whetherman_edge.errors import UsageError
from whetherman_edge.profiles.schema import Layer

F64 = npt.NDArray[np.float64]

PENALTIES: Final = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Strengths of the pull, in observations."""
FOLDS: Final = 5
_NEWTON_STEPS: Final = 40
_LOGIT_MAX: Final = 30.0
_TEMPERATURES: Final = np.exp(np.linspace(np.log(0.4), np.log(4.0), 61))


class Fit(msgspec.Struct, frozen=True):
    """A fitted layer. ``penalty``: the pull that cross-validation chose. ``log_loss``: cross-validated, nats a step;
    ``prior_log_loss``: that of the shared gate on the same steps. ``out_of_fold``: (n,) p(need) of each step by a layer
    that never saw its group. ``leans``: the pull was towards the known layer, not towards the shared gate.
    """

    layer: Layer
    penalty: float
    log_loss: float
    prior_log_loss: float
    out_of_fold: F64
    leans: bool = False


def fit_layer(
    x: F64,
    needed: F64,
    features: Sequence[str],
    prior_logit: F64,
    groups: Sequence[str],
    *,
    weights: F64 | None = None,
    known: Layer | None = None,
    seed: int = 0,
) -> Fit:
    """Fit p(need) on fused features.

    x: (n, len(features)) float64, the engine's fused values. needed: (n,) in [0, 1], soft where runs disagreed.
    prior_logit: (n,) the engine's own log-odds of a need. groups: (n,) steps of one group stay in one fold. weights:
    (n,) observation weights, default 1. known: the layer of a like agent on the same features.

    Raises UsageError when there is nothing to fit: too few steps, one class only, values that are not finite.
    """
    n = len(needed)
    if x.shape != (n, len(features)) or prior_logit.shape != (n,) or len(groups) != n:
        raise UsageError(f"expected {n} rows of {len(features)} features, got {x.shape}")
    if not (np.isfinite(x).all() and np.isfinite(needed).all() and np.isfinite(prior_logit).all()):
        raise UsageError("expected finite features and labels; a probe's engine output is not a number")
    if n < 8 or needed.max() < 0.5 or needed.min() > 0.5:
        raise UsageError(f"expected at least 8 measured steps, some needed and some not, got {n}; measure more probes")
    mean = x.mean(axis=0)
    scale = x.std(axis=0)
    scale = np.where(scale > 1e-9, scale, 1.0)
    z = np.hstack([(x - mean) / scale, np.ones((n, 1))])
    mass = np.ones(n) if weights is None else weights.astype(np.float64)
    pulls = [_distilled(z, np.clip(prior_logit, -_LOGIT_MAX, _LOGIT_MAX))]
    if known is not None and known.features == tuple(features):
        pulls.append(_in_units(known, mean, scale))
    fold = _folds(groups, seed)
    if len(set(groups)) < 2:  # nothing can be held out, so nothing speaks for leaving the shared gate
        return _as_it_was(z, pulls[0], features, mean, scale, prior_logit, needed, mass)
    best = (np.inf, PENALTIES[-1], np.zeros(n), pulls[0])
    for prior in pulls:
        for penalty in PENALTIES:
            logits = _out_of_fold(z, needed, mass, fold, prior, penalty)
            loss = _log_loss(logits, needed, mass)
            if loss < best[0]:
                best = (loss, penalty, logits, prior)
    loss, penalty, logits, prior = best
    temperature = _temperature(logits, needed, mass)
    beta = _newton(z, needed, mass, prior, penalty)
    layer = Layer(
        features=tuple(features),
        mean=tuple(mean.tolist()),
        scale=tuple(scale.tolist()),
        weights=tuple(beta[:-1].tolist()),
        bias=float(beta[-1]),
        temperature=temperature,
    )
    return Fit(
        layer,
        penalty,
        _log_loss(logits / temperature, needed, mass),
        _log_loss(np.clip(prior_logit, -_LOGIT_MAX, _LOGIT_MAX), needed, mass),
        _sigmoid(logits / temperature),
        prior is not pulls[0],
    )


def _as_it_was(
    z: F64,
    prior: F64,
    features: Sequence[str],
    mean: F64,
    scale: F64,
    prior_logit: F64,
    needed: F64,
    mass: F64,
) -> Fit:
    """The shared gate as a layer."""
    loss = _log_loss(np.clip(prior_logit, -_LOGIT_MAX, _LOGIT_MAX), needed, mass)
    layer = Layer(
        tuple(features), tuple(mean.tolist()), tuple(scale.tolist()), tuple(prior[:-1].tolist()), float(prior[-1])
    )
    return Fit(layer, PENALTIES[-1], loss, loss, _sigmoid(z @ prior))


def _out_of_fold(z: F64, y: F64, mass: F64, fold: npt.NDArray[np.int64], prior: F64, penalty: float) -> F64:
    """(n,) logits of each step by a layer fitted on the other folds."""
    logits = np.zeros(len(y))
    for f in range(FOLDS):
        inside = fold != f
        if not inside.all() and inside.any():
            beta = _newton(z[inside], y[inside], mass[inside], prior, penalty)
            logits[~inside] = z[~inside] @ beta
    return logits


def _in_units(layer: Layer, mean: F64, scale: F64) -> F64:
    """Weights and bias that give the layer's logit from values in other units."""
    weights = np.array(layer.weights) / np.array(layer.scale)
    bias = layer.bias + float(weights @ (mean - np.array(layer.mean)))
    return np.append(weights * scale, bias) / layer.temperature


def _distilled(z: F64, logit: F64) -> F64:
    """Weights that give the engine's own logit from the features, as well as a linear layer can."""
    ridge = np.eye(z.shape[1]) * 1e-3 * len(z)
    ridge[-1, -1] = 0.0
    return np.asarray(np.linalg.solve(z.T @ z + ridge, z.T @ logit), dtype=np.float64)


def _newton(z: F64, y: F64, mass: F64, prior: F64, penalty: float) -> F64:
    """Logistic regression with penalty/2 * |beta - prior|², by damped Newton steps. The bias is pulled a tenth as
    much.
    """
    pull = np.full(z.shape[1], penalty)
    pull[-1] = penalty / 10
    beta = prior.copy()
    value = _objective(z, y, mass, prior, pull, beta)
    for _ in range(_NEWTON_STEPS):
        p = _sigmoid(z @ beta)
        gradient = z.T @ (mass * (p - y)) + pull * (beta - prior)
        hessian = (z * (mass * p * (1 - p))[:, None]).T @ z + np.diag(pull)
        step = np.linalg.solve(hessian, gradient)
        size = 1.0
        while size > 1e-4:
            trial = beta - size * step
            trial_value = _objective(z, y, mass, prior, pull, trial)
            if trial_value <= value:
                break
            size /= 2
        else:
            break
        done = value - trial_value < 1e-9 * max(1.0, abs(value))
        beta, value = trial, trial_value
        if done:
            break
    return beta


def _objective(z: F64, y: F64, mass: F64, prior: F64, pull: F64, beta: F64) -> float:
    logit = z @ beta
    loss = mass @ (np.logaddexp(0.0, logit) - y * logit)
    return float(loss + 0.5 * (pull * (beta - prior) ** 2).sum())


def _log_loss(logit: F64, y: F64, mass: F64) -> float:
    return float(mass @ (np.logaddexp(0.0, logit) - y * logit) / mass.sum())


def _temperature(logit: F64, y: F64, mass: F64) -> float:
    losses = [_log_loss(logit / t, y, mass) for t in _TEMPERATURES]
    return float(_TEMPERATURES[int(np.argmin(losses))])


def _folds(groups: Sequence[str], seed: int) -> npt.NDArray[np.int64]:
    names = sorted(set(groups))
    order = np.random.default_rng(seed).permutation(len(names))
    fold_of = {names[index]: place % FOLDS for place, index in enumerate(order)}
    return np.array([fold_of[group] for group in groups], dtype=np.int64)


def _sigmoid(x: F64) -> F64:
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * x)), dtype=np.float64)
