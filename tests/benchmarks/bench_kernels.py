"""Nanoseconds a call of each kernel: NumPy reference, native serial, native best. One question, one table.

``python tests/benchmarks/bench_kernels.py [--json FILE]``. The sizes are those of a request: a 12-token query, 30 and
600 prototypes (10 and 200 tools in three channels), an 85-byte user text, the heads of the shipped gate. The sets take
turns, so a busy machine slows all three alike; read the ratios. Outputs are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from whetherman_edge.kernels import NGRAM_ALL, DenseWeights, Kernels, load, norms_i8

TEXT = b"Could you please set a reminder for tomorrow at 9 to call my mother about the flight?"
SAMPLE_NS = 200_000
"""Calls are timed in batches of about this long, so that reading the clock does not count."""
SAMPLES = 200

Case = Callable[[Kernels], Any]


def dense_weights(rng: np.random.Generator) -> DenseWeights:
    """The gate's sizes: 122 scalars, 64 scalar units, 8 projections of a 256-column row to 48, 96 hidden units."""

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float32)

    alone, left, right = (np.array(picks, np.int32) for picks in ((0, 3, 4, 5, 7), (0, 0, 1), (2, 6, 3)))
    return DenseWeights(
        mean=normal(122),
        scale=normal(122),
        scalar_weight=normal(122, 64),
        scalar_bias=normal(64),
        projection=normal(8, 256, 48),
        projected_rows=np.array([0, 0, 1, 2, 3, 4, 5, 6], np.int32),
        alone=alone,
        left=left,
        right=right,
        hidden_weight=normal(64 + 8 * 48, 96),
        hidden_bias=normal(96),
        out_weight=normal(96, 4),
        out_bias=normal(4),
        limit=np.array([4.0], np.float32),
    )


def cases() -> dict[str, Case]:
    rng = np.random.default_rng(0)
    table = rng.integers(-127, 128, (29_528, 256), dtype=np.int8)
    ids, many_ids = (rng.integers(0, 29_528, n).astype(np.int32) for n in (12, 256))
    few, many = (rng.integers(-127, 128, (n, 256), dtype=np.int8) for n in (30, 600))
    few_norms, many_norms = norms_i8(few), norms_i8(many)
    pooled = load("reference").pool_i8(table, ids)
    out = np.empty(256, np.int32)
    weights = rng.standard_normal((1 << 15, 4)).astype(np.float32)
    buckets = load("reference").hash_ngrams(TEXT, 1, 1 << 15)
    features = rng.standard_normal(122).astype(np.float32)
    dense, head = rng.standard_normal((7, 256)).astype(np.float32), dense_weights(rng)
    one, none, cell = np.zeros((1, 1), np.int8), np.empty(0, np.int32), np.zeros(1, np.int32)
    return {
        "call overhead (pool_i8_into, 1 x 1, no ids)": lambda k: k.pool_i8_into(one, none, cell),
        "pool_i8, 12 ids x 256": lambda k: k.pool_i8(table, ids),
        "pool_i8_into, 12 ids x 256": lambda k: k.pool_i8_into(table, ids, out),
        "pool_i8, 256 ids x 256": lambda k: k.pool_i8(table, many_ids),
        "cosine_i8, 30 x 256": lambda k: k.cosine_i8(pooled, few, few_norms),
        "cosine_i8, 600 x 256": lambda k: k.cosine_i8(pooled, many, many_norms),
        f"hash_ngrams, {len(TEXT)} bytes, {buckets.size} n-grams": lambda k: k.hash_ngrams(TEXT, 1, 1 << 15),
        f"gather_sum_f32, {buckets.size} x 4": lambda k: k.gather_sum_f32(weights, buckets),
        f"ngram_sum_f32, {len(TEXT)} bytes x 4": lambda k: k.ngram_sum_f32(TEXT, 1, NGRAM_ALL, weights),
        "dense_head_f32, the gate's sizes": lambda k: k.dense_head_f32(features, dense, head),
    }


def equal(a: Any, b: Any) -> bool:
    pairs = zip(a, b, strict=True) if isinstance(a, tuple) else [(a, b)]
    return all(np.array_equal(x, y) or np.allclose(x, y, rtol=1e-4) for x, y in pairs)  # close: dense_head_f32 only


def sample(call: Case, kernels: Kernels, calls: int) -> float:
    start = time.perf_counter_ns()
    for _ in range(calls):
        call(kernels)
    return (time.perf_counter_ns() - start) / calls


def measure(call: Case, sets: list[Kernels]) -> list[dict[str, float]]:
    """ns a call, p50 and p99 over batches, for each set; the sets take turns batch by batch."""
    batches = [max(1, int(SAMPLE_NS / sample(call, kernels, 20))) for kernels in sets]
    times: list[list[float]] = [[] for _ in sets]
    for _ in range(SAMPLES):
        for row, kernels, calls in zip(times, sets, batches, strict=True):
            row.append(sample(call, kernels, calls))
    return [{"ns_p50": float(np.percentile(row, 50)), "ns_p99": float(np.percentile(row, 99))} for row in times]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    json_path = parser.parse_args().json
    sets = [load("reference"), load("serial"), load("best")]
    names = ["reference", "native serial", f"native best ({sets[2].isa})"]
    print(f"{platform.machine()}, Python {platform.python_version()}, NumPy {np.__version__}; ns a call, p50 / p99")
    print(f"{'':44}" + "".join(f"{name:>24}" for name in names))
    report: dict[str, Any] = {}
    for title, call in cases().items():
        expected = call(sets[0])
        assert all(equal(expected, call(kernels)) for kernels in sets[1:]), title
        rows = measure(call, sets)
        report[title] = dict(zip(names, rows, strict=True))
        print(f"{title:44}" + "".join(f"{row['ns_p50']:>14,.0f} /{row['ns_p99']:>8,.0f}" for row in rows))
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=2) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
