"""The gate's two heads and their blend: fitted here, evaluated at run time by ``gate.static_gate``.

Each ``fit_*`` returns plain arrays; each ``*_logits`` is the batch form of what the run time computes for one request.
Everything is seeded and runs on one thread, so the same data gives the same artifact.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_matrix

from convert.gate_data import N_BUCKETS, Matrix
from whetherman_edge.gate.heads import ALONE, LEFT, PROJECTED, PROJECTIONS, RIGHT, SCALAR_LIMIT
from whetherman_edge.gate.verdict import PHASES

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Arrays = dict[str, npt.NDArray[Any]]

# Weight of derived items against a hand-labelled dialogue (1.0), by kind; chosen on held-out domains.
KIND_WEIGHTS: Final = {
    "dialogue": 1.0,
    "prefix": 0.3,
    "prefix_first": 0.1,
    "swapped": 0.0,
    "public": 0.2,
    "few_tools": 0.3,
    "small_talk": 0.5,
}
ACCEPT_MAIN: Final = 0.75  # target of the gold label where others are acceptable too; they share the rest


def item_weights(matrix: Matrix) -> F32:
    """Training weight of each item."""
    return np.array([KIND_WEIGHTS[k] for k in matrix.kind], np.float32)


def soft_targets(matrix: Matrix) -> F32:
    """(n, 4): the gold label, or a share for every acceptable one."""
    targets = np.zeros((len(matrix), 4), np.float32)
    for i, gold in enumerate(matrix.gold):
        others = [c for c in np.flatnonzero(matrix.accept[i]) if c != gold]
        targets[i, gold] = ACCEPT_MAIN if others else 1.0
        targets[i, others] = (1.0 - ACCEPT_MAIN) / len(others) if others else 0.0
    return targets


def ngram_rows(matrix: Matrix, rows: npt.NDArray[np.intp]) -> csr_matrix:
    """The hashed n-grams as a sparse matrix."""
    counts = np.diff(matrix.offsets)[rows]
    spans = [slice(matrix.offsets[i], matrix.offsets[i + 1]) for i in rows]
    data = np.concatenate([matrix.scale[span] for span in spans])
    columns = np.concatenate([matrix.buckets[span] for span in spans])
    pointers = np.concatenate([[0], np.cumsum(counts)])
    found = csr_matrix((data, columns.astype(np.int32), pointers), shape=(len(rows), N_BUCKETS))
    found.sum_duplicates()
    return found


def fit_ngrams(matrix: Matrix, rows: npt.NDArray[np.intp], strength: float = 1.5) -> Arrays:
    """Multinomial logistic regression on the hashed n-grams: ``ngram_weights`` (buckets, 4), ``ngram_bias`` (4,)."""
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=strength, max_iter=60, tol=1e-3)
    model.fit(ngram_rows(matrix, rows), matrix.gold[rows], sample_weight=item_weights(matrix)[rows])
    return {"ngram_weights": model.coef_.T.astype(np.float32).copy(), "ngram_bias": model.intercept_.astype(np.float64)}


def ngram_logits(arrays: Arrays, matrix: Matrix, rows: npt.NDArray[np.intp]) -> F64:
    """(n, 4) logits of the n-gram head."""
    return np.asarray(ngram_rows(matrix, rows) @ arrays["ngram_weights"].astype(np.float64) + arrays["ngram_bias"])


def fit_scaling(matrix: Matrix, rows: npt.NDArray[np.intp]) -> Arrays:
    """Mean and reciprocal deviation of each scalar."""
    x = matrix.scalars[rows]
    return {"scalar_mean": x.mean(0), "scalar_scale": (1.0 / (x.std(0) + 1e-3)).astype(np.float32)}


def scaled(arrays: Arrays, scalars: F32) -> F32:
    """Standardised scalars, cut at SCALAR_LIMIT deviations."""
    limited = (scalars - arrays["scalar_mean"]) * arrays["scalar_scale"]
    return np.clip(limited, -SCALAR_LIMIT, SCALAR_LIMIT).astype(np.float32)


def _network(n_scalars: int, dim: int, seed: int) -> Any:
    import torch
    from torch import nn

    torch.manual_seed(seed)

    class Network(nn.Module):
        """See ``gate.heads`` for the run-time form."""

        def __init__(self) -> None:
            super().__init__()
            self.scalar = nn.Linear(n_scalars, 64)
            self.projection = nn.Parameter(torch.randn(len(PROJECTED), dim, PROJECTIONS) * dim**-0.5)
            self.drop = nn.Dropout(0.4)
            self.hidden = nn.Linear(64 + 8 * PROJECTIONS, 96)
            self.out = nn.Linear(96, 4)

        def forward(self, x: Any, d: Any) -> Any:
            projected = torch.einsum("nbd,bdp->nbp", d[:, list(PROJECTED)], self.projection)
            joined = torch.cat(
                [
                    torch.relu(self.scalar(x)),
                    torch.relu(projected[:, list(ALONE)]).flatten(1),
                    (projected[:, list(LEFT)] * projected[:, list(RIGHT)]).flatten(1),
                ],
                1,
            )
            return self.out(self.drop(torch.relu(self.hidden(self.drop(joined)))))

    return Network()


def fit_dense(
    matrix: Matrix, rows: npt.NDArray[np.intp], scaling: Arrays, seed: int = 0, epochs: int = 6, batch: int = 96
) -> Arrays:
    """The dense head: scalars, projected text vectors and their products through one hidden layer."""
    import torch

    torch.set_num_threads(1)
    rng = np.random.default_rng(seed)
    net = _network(matrix.scalars.shape[1], matrix.dense.shape[2], seed)
    x = torch.from_numpy(scaled(scaling, matrix.scalars[rows]))
    d = torch.from_numpy(matrix.dense[rows])
    t = torch.from_numpy(soft_targets(matrix)[rows] * 0.95 + 0.05 / 4)
    w = torch.from_numpy(item_weights(matrix)[rows])
    optimiser = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=1e-3)
    steps = epochs * (len(rows) // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, total_steps=steps + 1, pct_start=0.15)
    net.train()
    for _ in range(epochs):
        order = torch.from_numpy(rng.permutation(len(rows)))
        for start in range(0, len(rows) - batch + 1, batch):
            at = order[start : start + batch]
            logp = torch.log_softmax(net(x[at], d[at].float()), 1)
            loss = (-(t[at] * logp).sum(1) * w[at]).mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    state = {k: v.detach().numpy().astype(np.float32) for k, v in net.state_dict().items()}
    found = {"dense_" + k.replace(".", "_"): v.T if k.endswith("weight") else v for k, v in state.items()}
    return {k: np.ascontiguousarray(v) for k, v in found.items()}


def dense_logits(arrays: Arrays, scaling: Arrays, matrix: Matrix, rows: npt.NDArray[np.intp]) -> F64:
    """(n, 4) logits of the dense head."""
    a = {k.removeprefix("dense_"): v for k, v in arrays.items()}
    x, d = scaled(scaling, matrix.scalars[rows]), matrix.dense[rows].astype(np.float32)
    projected = np.einsum("nbd,bdp->nbp", d[:, list(PROJECTED)], a["projection"], optimize=True)
    joined = np.concatenate(
        [
            np.maximum(x @ a["scalar_weight"] + a["scalar_bias"], 0),
            np.maximum(projected[:, list(ALONE)], 0).reshape(len(rows), -1),
            (projected[:, list(LEFT)] * projected[:, list(RIGHT)]).reshape(len(rows), -1),
        ],
        axis=1,
    )
    hidden = np.maximum(joined @ a["hidden_weight"] + a["hidden_bias"], 0)
    return np.asarray(hidden @ a["out_weight"] + a["out_bias"], np.float64)


def log_softmax(logits: F64) -> F64:
    """Row-wise log-probabilities."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def fit_blend(heads: list[F64], matrix: Matrix, rows: npt.NDArray[np.intp], strength: float = 0.05) -> Arrays:
    """Multinomial logistic regression on the heads' log-probabilities, one for each phase of a dialogue.

    Fitted as one layer with a difference for each later phase, so that the phases learn from each other, on out-of-fold
    predictions and well regularised: it also sets the temperature. Returns ``blend_weights`` (phases, 4 heads, 4) and
    ``blend_bias`` (phases, 4).
    """
    from sklearn.linear_model import LogisticRegression

    inputs = np.concatenate([log_softmax(h) for h in heads], axis=1)
    later = matrix.phase[rows, None] == np.arange(1, len(PHASES))
    parts = [inputs, *(inputs * mark[:, None] for mark in later.T), later.astype(np.float64)]
    model = LogisticRegression(C=strength, max_iter=1000).fit(np.concatenate(parts, axis=1), matrix.gold[rows])
    shared, *differences = np.split(model.coef_.T[: len(PHASES) * inputs.shape[1]], len(PHASES))
    offsets = model.coef_.T[len(PHASES) * inputs.shape[1] :]
    return {
        "blend_weights": np.stack([shared, *(shared + d for d in differences)]),
        "blend_bias": np.stack([model.intercept_, *(model.intercept_ + o for o in offsets)]),
    }


def probabilities(arrays: Arrays, heads: list[F64], phase: npt.NDArray[np.int8]) -> F64:
    """(n, 4) class probabilities of the blend; phase: (n,)."""
    inputs = np.concatenate([log_softmax(h) for h in heads], axis=1)
    logits = np.einsum("ni,nic->nc", inputs, arrays["blend_weights"][phase]) + arrays["blend_bias"][phase]
    return np.exp(log_softmax(logits))
