"""Quantisation by depth: speed and size of the first blocks of the backbone, side by side.

    python -m convert.depth_study BASE.gguf [--kinds q8_0,q4_k_m,q4_0,iq4_nl] [--depths 8,10,12,15,18] [--json FILE]

One thread, and that thread's own processor time: what other programs do disturbs it least. The combinations take turns,
so that what disturbs one disturbs all. Accuracy of a head at a depth is `convert.fit_head`'s part: ``--accuracy FILE``
puts its figures (JSON: depth to a number) beside.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from whetherman_edge.backbone.llama import Context, Network
from whetherman_edge.backbone.quantise import quantise

TEXT = (
    "search_mail(query*, limit, since): Search the user's mail items by free text, date range or identifier.\n" * 14
    + "User: Could you look up the latest invoice for order 13 and tell me what changed since last Tuesday?\n" * 4
)
PREFILL, STEP = 300, 30


def spent_ms(context: Context, ids: list[int]) -> tuple[float, float]:
    """Processor milliseconds of a prefill of PREFILL tokens and of STEP more behind it."""
    context.truncate(0, 0)
    times = [time.thread_time()]
    context.decode(0, ids[:PREFILL], 0, (PREFILL - 1,))
    times.append(time.thread_time())
    context.decode(0, ids[PREFILL:], PREFILL, (STEP - 1,))
    times.append(time.thread_time())
    return (times[1] - times[0]) * 1e3, (times[2] - times[1]) * 1e3


def study(base: Path, kinds: list[str], depths: list[int], rounds: int, folder: Path) -> list[dict[str, object]]:
    """One row a kind and depth: file and block bytes, best processor time of ``rounds`` rounds."""
    rows: list[dict[str, object]] = []
    for kind in kinds:
        cells: dict[int, tuple[Network, Context, list[int]]] = {}
        best = {depth: (float("inf"), float("inf")) for depth in depths}
        for depth in depths:
            path = folder / f"{kind}-{depth}.gguf"
            quantise(base, path, kind, depth)
            network = Network(path)
            ids = [network.bos, *network.tokenize(TEXT)][: PREFILL + STEP]
            context = Context(network, layer=depth - 1, n_cells=1024, n_seq=1, n_threads=1)
            cells[depth] = (network, context, ids)
        for _ in range(rounds):
            for depth, (_, context, ids) in cells.items():
                prefill, step = spent_ms(context, ids)
                best[depth] = (min(best[depth][0], prefill), min(best[depth][1], step))
        for depth, (network, context, _) in cells.items():
            context.close()
            network.close()
            row = {
                "kind": kind,
                "depth": depth,
                "file_mb": round((folder / f"{kind}-{depth}.gguf").stat().st_size / 1e6, 1),
                "prefill_ms_a_token": round(best[depth][0] / PREFILL, 3),
                "step_ms": round(best[depth][1], 1),
            }
            rows.append(row)
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
            (folder / f"{kind}-{depth}.gguf").unlink()
    return rows


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("base", type=Path)
    parser.add_argument("--kinds", default="q8_0,q4_k_m,q4_0,iq4_nl")
    parser.add_argument("--depths", default="8,10,12,15,18")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--accuracy", type=Path, metavar="FILE", help="figures of a head by depth, put beside")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        depths = [int(depth) for depth in parsed.depths.split(",")]
        rows = study(parsed.base, parsed.kinds.split(","), depths, parsed.rounds, Path(folder))
    if parsed.accuracy is not None:
        figures = json.loads(parsed.accuracy.read_text())
        for row in rows:
            row["accuracy"] = figures.get(str(row["depth"]))
    if parsed.json is not None:
        parsed.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
