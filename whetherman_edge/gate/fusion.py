"""Both stages' opinions put together. Pure; the backbone's part comes as plain numbers.

One logistic layer for each phase of a dialogue, on log-probabilities of both stages and on how sure the pointer head is
of a tool, fitted on predictions for dialogues that neither stage had seen.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from whetherman_edge.gate.verdict import LABELS, PHASES, Verdict

F64Vector = npt.NDArray[np.float64]

N_INPUTS: Final = 10
"""Backbone log-probabilities (4), static ones (4), the pointer's best tool probability, its "none" probability."""


class Opinion(msgspec.Struct, frozen=True, gc=False):
    """What the backbone says of one request.

    ``log_p``: log-probabilities in the order of LABELS. ``pointer_best``, ``pointer_none``: probability of the
    pointer's best offered tool and of none of them, 0.0 without a pointer.
    """

    log_p: tuple[float, float, float, float]
    pointer_best: float = 0.0
    pointer_none: float = 0.0


class Fusion:
    """weights: (len(PHASES), N_INPUTS, 4), bias: (len(PHASES), 4). Raises ValueError for other shapes."""

    def __init__(self, weights: npt.NDArray[np.float32], bias: npt.NDArray[np.float32]) -> None:
        if weights.shape != (len(PHASES), N_INPUTS, len(LABELS)) or bias.shape != (len(PHASES), len(LABELS)):
            expected = (len(PHASES), N_INPUTS, len(LABELS))
            raise ValueError(f"fusion: expected weights {expected} and a bias, got {weights.shape} and {bias.shape}")
        self._weights = weights.astype(np.float64)
        self._bias = bias.astype(np.float64)

    def verdict(self, static: Verdict, opinion: Opinion) -> Verdict:
        """The final verdict: fused probabilities, the static stage's other inputs of a profile, engine "gemma".

        Raises ValueError when the opinion is not finite.
        """
        static_log_p = static.fused[: len(LABELS)]
        inputs = np.array((*opinion.log_p, *static_log_p, opinion.pointer_best, opinion.pointer_none))
        if not np.isfinite(inputs).all():
            raise ValueError("expected finite numbers of both stages")
        log_p = _log_softmax(inputs @ self._weights[static.phase] + self._bias[static.phase])
        act, answer, ask, decline = (math.exp(value) for value in log_p)
        return msgspec.structs.replace(
            static,
            probabilities=(act, answer, ask, decline),
            engine="gemma",
            fused=(*log_p, *static.fused[len(LABELS) :]),
        )


def _log_softmax(logits: F64Vector) -> list[float]:
    top = float(logits.max())
    total = top + math.log(float(np.exp(logits - top).sum()))
    return [value - total for value in logits.tolist()]
