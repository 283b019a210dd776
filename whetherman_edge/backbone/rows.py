"""Rows of the embedding table, read from the file and not through llama.cpp's mapping of it.

The table is 178 of a file's 256 MB, and a token needs 680 bytes of it. Through the mapping a row brings in the 64 KB
around it, and 2 MB at once where the page cache holds the file in huge folios, as it does when the file was just
written: a few hundred words then hold the whole table, and no advice to the kernel keeps it from that (seen on Linux
6.18). What is read stays the page cache's.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

BLOCK_VALUES: Final = 32
BLOCK: Final = np.dtype([("scale", "<f2"), ("values", "i1", (BLOCK_VALUES,))])
"""ggml's Q8_0."""
Q8_0: Final = 8
"""Its number there."""


class Rows:
    """A Q8_0 table of ``width`` columns, ``n_bytes`` from a file's byte ``first`` on. ``factor``: what the network's
    graph multiplies a row by. Raises OSError when the file cannot be opened.
    """

    def __init__(self, path: Path, first: int, n_bytes: int, width: int, factor: np.float32) -> None:
        self._first, self._row_bytes, self._factor = first, row_bytes(width), factor
        self.n_rows = n_bytes // self._row_bytes
        self._vector = _Vector(0, self._row_bytes)
        self._read_cached = _reader_of_cached()
        self._file = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))

    def look_up(self, tokens: Sequence[int], out: npt.NDArray[np.float32]) -> None:
        """Write the rows of ``tokens`` into ``out``, (len(tokens), width) float32, bit for bit as llama.cpp has them.

        Raises ValueError for a token without a row, OSError when the file cannot be read.
        """
        if not 0 <= min(tokens) <= max(tokens) < self.n_rows:
            raise ValueError(f"expected tokens from 0 to {self.n_rows - 1}, got {min(tokens)} to {max(tokens)}")
        raw = np.empty((len(tokens), self._row_bytes), np.uint8)
        for index, token in enumerate(tokens):
            self._read(raw, index, self._first + token * self._row_bytes)
        blocks, values = raw.view(BLOCK), out.reshape(len(tokens), -1, BLOCK_VALUES)
        np.multiply(blocks["values"], blocks["scale"].astype(np.float32)[..., None], out=values)
        np.multiply(values, self._factor, out=values)

    def _read(self, raw: npt.NDArray[np.uint8], index: int, offset: int) -> None:
        if self._read_cached is not None:
            self._vector.first = raw.ctypes.data + index * self._row_bytes
            if self._read_cached(self._file, self._vector, 1, offset, os.RWF_NOWAIT) == self._row_bytes:
                return
        if os.preadv(self._file, [raw[index]], offset) != self._row_bytes:
            raise OSError(f"expected {self._row_bytes} bytes at {offset}, the file has ended")

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def row_bytes(width: int) -> int:
    """Bytes of a row of so many columns."""
    return width // BLOCK_VALUES * BLOCK.itemsize


class _Vector(ctypes.Structure):
    """iovec."""

    _fields_ = [("first", ctypes.c_void_p), ("n_bytes", ctypes.c_size_t)]


def _reader_of_cached() -> Any:
    """``preadv2`` that keeps the interpreter lock, for what the page cache holds; None where there is none.

    Every read of Python's own gives the lock up: a busy event loop would take it between two rows, 30 times a decision.
    """
    if not getattr(os, "RWF_NOWAIT", 0) or ctypes.sizeof(ctypes.c_void_p) < 8:  # an offset may have 32 bits there
        return None
    try:
        function: Any = ctypes.PyDLL(None).preadv2
    except (OSError, AttributeError, TypeError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.POINTER(_Vector), ctypes.c_int, ctypes.c_int64, ctypes.c_int]
    function.restype = ctypes.c_ssize_t
    return function
