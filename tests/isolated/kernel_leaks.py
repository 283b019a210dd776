"""Calls every native function many times, with arguments it takes and arguments it refuses; exits 1 when memory grows.

Run as a process of its own, so that nothing else allocates: ``python tests/isolated/kernel_leaks.py``.
"""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Callable

import numpy as np

from whetherman_edge.kernels import DenseWeights, Kernels, load, norms_i8

ROUNDS = 20_000
GROWTH_BYTES_MAX = 2 << 20
"""One leaked buffer view a round would be more than 20,000 * 100 bytes."""


def calls(kernels: Kernels) -> list[Callable[[], object]]:
    table = np.ones((50, 256), np.int8)
    norms = norms_i8(table)
    ids, bad_ids = np.arange(20, dtype=np.int32), np.array([60], np.int32)
    pooled = kernels.pool_i8(table, ids)
    weights, buckets = np.ones((64, 4), np.float32), np.arange(40, dtype=np.uint32)
    text = b"What is the weather in Lima, and should I bring a coat?"
    node, features = np.zeros(1, np.int32), np.ones(3, np.float32)
    head = DenseWeights(
        *(features, features, np.ones((3, 2), np.float32), features[:2], np.ones((1, 3, 4), np.float32)),
        *(node, node, node, node, np.ones((10, 5), np.float32), np.ones(5, np.float32)),
        *(np.ones((5, 4), np.float32), np.ones(4, np.float32), features[:1]),
    )
    return [
        lambda: kernels.pool_i8(table, ids),
        lambda: kernels.pool_i8(table, bad_ids),
        lambda: kernels.pool_i8_into(table, ids, pooled),
        lambda: kernels.pool_i8_into(table, ids, norms),  # type: ignore[arg-type]
        lambda: kernels.cosine_i8(pooled, table, norms),
        lambda: kernels.cosine_i8(pooled, table, norms[1:]),
        lambda: kernels.gather_sum_f32(weights, buckets),
        lambda: kernels.gather_sum_f32(weights, text),  # type: ignore[arg-type]
        lambda: kernels.hash_ngrams(text, 1, 1024),
        lambda: kernels.hash_ngrams(text, 1, 1000),
        lambda: kernels.ngram_sum_f32(text, 1, 31, weights),
        lambda: kernels.ngram_sum_f32(text, -1, 31, weights),
        lambda: kernels.dense_head_f32(features, np.ones((2, 3), np.float32), head),
        lambda: kernels.dense_head_f32(features[1:], np.ones((2, 3), np.float32), head),
        lambda: load("serial"),
        lambda: load("sse9"),
    ]


def run(call: Callable[[], object], rounds: int) -> None:
    for _ in range(rounds):
        try:
            call()
        except Exception:
            pass


def main() -> int:
    for number, call in enumerate(calls(load("best"))):
        run(call, 500)
        gc.collect()
        blocks, peak = sys.getallocatedblocks(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        run(call, ROUNDS)
        gc.collect()
        more_blocks = sys.getallocatedblocks() - blocks
        more_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024
        if more_blocks > 1000 or more_bytes > GROWTH_BYTES_MAX:
            print(f"call {number}: {more_blocks} blocks and {more_bytes} bytes more after {ROUNDS} calls")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
