"""A classification head of a PEFT adapter as the backbone's head arrays.

python -m convert.export_head BASE ADAPTER OUT.safetensors [--labels ACT,ANSWER,ASK,DECLINE]

transformers classifies the state after the final norm: W (h / rms(h) * g) + b. Ours takes h / rms(h), so g goes into W.
--labels: what the adapter's rows mean, in their order; rows are put in our order.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from convert.peft_adapter import Head, read_adapter
from whetherman_edge.errors import ArtifactError, WhethermanError
from whetherman_edge.gate.verdict import LABELS


def export_head(head: Head, norm: np.ndarray, path: Path, labels: Sequence[str] = LABELS) -> None:
    """Write ``head_weight`` (4, n_embd) and ``head_bias`` (4,). norm: the final norm's weights g (n_embd,).

    Raises ArtifactError for a head of another width or other classes. Not atomic.
    """
    if sorted(labels) != sorted(LABELS):
        raise ArtifactError(f"expected the labels {', '.join(LABELS)} in some order, got {', '.join(labels)}")
    if head.weight.shape != (len(LABELS), len(norm)):
        raise ArtifactError(f"head {head.name!r} is {head.weight.shape}, expected ({len(LABELS)}, {len(norm)})")
    order = [list(labels).index(label) for label in LABELS]
    weight = (head.weight * norm[None, :].astype(np.float32))[order]
    save_file({"head_weight": np.ascontiguousarray(weight), "head_bias": head.bias[order]}, path)


def main(arguments: list[str] | None = None) -> int:
    from convert.merge_lora import final_norm

    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    for name in ("base", "adapter", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--labels", default=",".join(LABELS))
    options = parser.parse_args(arguments)
    try:
        head = read_adapter(options.adapter).head
        if head is None:
            raise ArtifactError(f"{options.adapter}: expected a head in modules_to_save, there is none")
        partial = options.out.with_name(f".{options.out.name}.partial")
        export_head(head, final_norm(options.base), partial, options.labels.split(","))
        os.replace(partial, options.out)
    except WhethermanError as exc:
        sys.stderr.write(f"export_head: {exc}\n")
        return exc.exit_code
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
