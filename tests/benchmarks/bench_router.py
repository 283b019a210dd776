"""The router's speed; the same as ``whetherman-edge bench router``.

    python tests/benchmarks/bench_router.py [--json FILE] [--model2vec DIR]

Microseconds per whole choice (query text to probabilities), p50 and p99, warm; first calls with new tools; load time in
milliseconds; resident and proportional size of the mapped file in two processes, in KiB.
"""

from __future__ import annotations

import sys

from whetherman_edge.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "router"]
    sys.exit(main())
