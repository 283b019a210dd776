"""What a backbone says of many prompts, kept on disk as it comes.

A pass over the dialogues that the fusion is fitted on takes ten minutes on an idle machine and hours on a busy one.
What was read before a stop is not read again, nor what an earlier pass with the same weights has read.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from whetherman_edge.backbone.prompt import Prompt

F64 = npt.NDArray[np.float64]

SAVE_EVERY: Final = 50


def key_of(prompt: Prompt, weights: str) -> bytes:
    """Digest of a prompt for one set of weights, its digest ``weights``."""
    return hashlib.sha256(weights.encode() + msgspec.json.encode(prompt)).digest()


def read_all(keys: Sequence[bytes], order: Sequence[int], read: Callable[[int], Sequence[float]], kept: Path) -> F64:
    """(n, width): a row each of ``keys``, from ``kept`` where it is there, else by ``read(i)`` in that order."""
    known: dict[bytes, tuple[float, ...]] = {}
    if kept.exists():
        with np.load(kept) as found:
            known = {bytes(k): tuple(v) for k, v in zip(found["keys"], found["values"].tolist(), strict=True)}
    n_new = 0
    try:
        for i in order:
            if keys[i] not in known:
                known[keys[i]] = tuple(read(i))
                n_new += 1
                if n_new % SAVE_EVERY == 0:
                    save(known, kept)
                    print(f"read: {n_new}, {len(known)} known, {len(keys)} wanted", flush=True)
    finally:
        if n_new:
            save(known, kept)
    return np.array([known[key] for key in keys])


def save(known: dict[bytes, tuple[float, ...]], kept: Path) -> None:
    """Write all of it, atomically. Keys as (n, 32) uint8: NumPy's byte strings lose trailing zeros."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    partial = kept.with_suffix(".partial.npz")
    keys = np.frombuffer(b"".join(known), dtype=np.uint8).reshape(len(known), -1)
    np.savez(partial, keys=keys, values=np.array(list(known.values()), dtype=np.float64))
    os.replace(partial, kept)
