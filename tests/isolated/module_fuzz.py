"""Loads a build of the native module by path and feeds it arguments of every kind; run under AddressSanitizer.

``python tests/isolated/module_fuzz.py build/sanitize/_native.abi3.so [RUNS]``. A call answers or raises ValueError or
TypeError; anything else, and any read outside a buffer, is the end of the process. The C tests do not see module.c.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import random
import sys
from types import ModuleType
from typing import Any

import numpy as np

RUNS_DEFAULT = 30_000
SIZES = [0, 1, 2, 3, 4, 15, 16, 17, 64, 255, 256]
DTYPES = [np.int8, np.uint8, np.int32, np.uint32, np.float32, np.float64, np.int64]
# What each function takes, so that most arguments are right and the calls get past the first check.
SIGNATURES: dict[str, list[Any]] = {
    "pool_i8_into": [(np.int8, 2), (np.int32, 1), (np.int32, 1)],
    "cosine_i8_into": [(np.int32, 1), (np.int8, 2), (np.float64, 1), (np.float64, 1)],
    "gather_sum_f32_into": [(np.float32, 2), (np.uint32, 1), (np.float64, 1)],
    "hash_ngrams_into": ["text", "int", "int", "int", (np.uint32, 1)],
    "ngram_sum_f32_into": ["text", "int", "int", (np.float32, 2), (np.float64, 1)],
    "dense_head_f32_into": [
        *((np.float32, 1), (np.float32, 2), (np.float32, 1), (np.float32, 1), (np.float32, 2), (np.float32, 1)),
        *((np.float32, 3), (np.int32, 1), (np.int32, 1), (np.int32, 1), (np.int32, 1), (np.float32, 2)),
        *((np.float32, 1), (np.float32, 2), (np.float32, 1), (np.float32, 1), (np.float32, 1), (np.float64, 1)),
    ],
}


def load(path: str) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader("_native", path)
    spec = importlib.util.spec_from_file_location("_native", path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


class Arguments:
    """Draws arguments; the sizes of one call are drawn from few values, so that lengths often agree."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.sizes = self.random.choices(SIZES, k=2)

    def array(self, dtype: Any, n_dims: int) -> np.ndarray[Any, Any]:
        if self.random.random() < 0.03:
            dtype = self.random.choice(DTYPES)
        if self.random.random() < 0.03:
            n_dims = self.random.randrange(4)
        shape = tuple(self.random.choice(self.sizes) for _ in range(n_dims))
        if n_dims > 2:
            shape = shape[:2] + (1,) * (n_dims - 2)
        n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        exact = bytearray(self.random.randbytes(n_bytes) if self.random.random() < 0.3 else n_bytes)
        array = np.frombuffer(exact, dtype).reshape(shape)
        if array.size and np.issubdtype(dtype, np.integer) and self.random.random() < 0.8:
            array[...] = np.arange(array.size).reshape(shape) % max(1, min(self.sizes))
        return array[::2] if n_dims and self.random.random() < 0.02 else array

    def dense_head(self) -> list[Any]:
        """Shapes that fit together, but for one in five calls, and indices that may point outside."""
        n, units, dim, columns, hidden, classes = (self.random.choice([0, 1, 2, 5, 8, 9]) for _ in range(6))
        rows, projections, alone, pairs = (self.random.choice([0, 1, 2, 3]) for _ in range(4))
        joined = units + columns * (alone + pairs)
        room = max(dim, n) + projections * columns + joined + hidden + classes
        shapes: list[tuple[Any, tuple[int, ...]]] = [
            *((np.float32, shape) for shape in ((n,), (rows, dim), (n,), (n,), (n, units), (units,))),
            (np.float32, (projections, dim, columns)),
            *((np.int32, (length,)) for length in (projections, alone, pairs, pairs)),
            *((np.float32, shape) for shape in ((joined, hidden), (hidden,), (hidden, classes), (classes,), (1,))),
            *((np.float32, (room,)), (np.float64, (classes,))),
        ]
        if self.random.random() < 0.2:
            at = self.random.randrange(len(shapes))
            dtype, shape = shapes[at]
            shapes[at] = dtype, tuple(max(0, length + self.random.choice([-1, 1])) for length in shape)
        return [self._filled(dtype, shape) for dtype, shape in shapes]

    def _filled(self, dtype: Any, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        if dtype == np.int32:
            return np.array(self.random.choices([0, 0, 0, 1, 2, -1, 3], k=shape[0]), np.int32)
        n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return np.frombuffer(bytearray(self.random.randbytes(n_bytes)), dtype).reshape(shape)

    def draw(self, kind: Any) -> Any:
        if self.random.random() < 0.01:
            return self.random.choice([None, "text", 3, -1, 2**70, b"", [], object()])
        if kind == "text":
            return self.random.randbytes(self.random.choice(self.sizes))
        if kind == "int":
            return self.random.choice([0, 1, 4, 31, 256, 2**31, 2**32 - 1, -1, 2**64])
        return self.array(*kind)


def main(path: str, runs: int = RUNS_DEFAULT) -> int:
    module = load(path)
    rows = [module.bind("serial"), module.bind("best")]
    answered = refused = 0
    for run in range(runs):
        arguments = Arguments(run)
        name = arguments.random.choice(list(SIGNATURES))
        fitting = name == "dense_head_f32_into" and arguments.random.random() < 0.8
        values = arguments.dense_head() if fitting else [arguments.draw(kind) for kind in SIGNATURES[name]]
        if arguments.random.random() < 0.01:
            values.pop()
        for row in rows:
            try:
                row[name](*values)
                answered += 1
            except (ValueError, TypeError):
                refused += 1
    print(f"module fuzz: {runs} runs, {answered} calls answered, {refused} refused, nothing else ({rows[1]['isa']})")
    return 0 if min(answered, refused) > runs // 20 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:])))
