"""Loads a build of the native module by path and feeds the gate's functions records of every kind; run under ASan.

``python tests/isolated/gate_fuzz.py build/sanitize/_native.abi3.so [RUNS]``. Whole records, made by the module and by
hand in small sizes, and the same with bytes changed, cut off or added. A call answers or raises ValueError or
TypeError; anything else, and any read outside a buffer, is the end of the process.
"""

from __future__ import annotations

import random
import struct
import sys
from typing import Any

import numpy as np

from tests.isolated.module_fuzz import load

RUNS_DEFAULT = 20_000
DIM, COLUMNS, UNITS, HIDDEN, SCALARS = 8, 5, 4, 6, 122
WORDS = [
    "[PAD]",
    "[UNK]",
    "send",
    "##ing",
    "mail",
    "a",
    "b",
    "##b",
    "?",
    ".",
    "1",
    "##2",
    "\u2026",
    "the",
    '"',
    "@",
    "_",
]
VOCABULARY = "\n".join(WORDS).encode()
PIECES = [
    "send",
    "SENDING",
    "mail",
    "abb",
    "12",
    "a@b",
    '"a mail"',
    "`x",
    "?",
    "Bob",
    "the\n",
    "\u2026",
    "é",
    "[MASK]",
    "\x01",
    "\u1100\uac01",
    "\u4e2d\U0001f600",
    "\U0001d160\U00011446\U0001d165",
    "x\u0301" * 40,
    "\U0001d165" * 33,
]
TEXT_COUNTS = [0, 1, 3, 4]


class Parts:
    """Whole arguments of one run, of sizes that belong together."""

    def __init__(self, row: dict[str, Any], seed: int) -> None:
        self.random = random.Random(seed)
        self.row = row
        n = len(WORDS)
        self.offsets, self.slots = bytearray(4 * (n + 1)), bytearray(4 * 64)
        row["wordpiece_index_into"](VOCABULARY, n, self.offsets, self.slots)
        self.table = np.arange(n * DIM, dtype=np.int64).astype(np.int8).tobytes()
        self.stem = np.arange(n, dtype=np.int32).tobytes()
        self.idf = np.array([0, 0, *[1.5] * (n - 2)], np.float32).tobytes()
        self.room = bytearray(64 << 10)

    def tables(self) -> list[Any]:
        return [VOCABULARY, self.offsets, self.slots, 1]

    def text(self) -> bytes:
        return " ".join(self.random.choices(PIECES[:11] if self.random.random() < 0.9 else PIECES, k=8)).encode()

    def record_arguments(self) -> list[Any]:
        return [self.text(), *self.tables(), self.table, self.stem, self.idf, DIM, COLUMNS, self.room]

    def record(self) -> bytearray:
        while (n_bytes := self.row["text_record_into"](*self.record_arguments())) is None:
            pass
        return bytearray(self.room[:n_bytes])

    def doubles(self, n: int) -> bytes:
        return np.array([self.random.uniform(-1, 1) for _ in range(n)]).tobytes()

    def floats(self, n: int) -> bytes:
        return np.array([self.random.uniform(-1, 1) for _ in range(n)], np.float32).tobytes()

    def integers(self, n: int, below: int) -> bytes:
        return np.array(sorted(self.random.randrange(below) for _ in range(n)), np.int32).tobytes()

    def tools(self) -> tuple[bytes, bytes, bytes]:
        """The record of 1 to 3 tools, its rows and their norms."""
        n, examples, known, stems = self.random.randint(1, 3), self.random.randrange(3), self.random.randrange(2), 4
        header = struct.pack("<12i", n, DIM, COLUMNS, examples, known, stems, stems, n * 2, n, stems, stems, 1)
        body = [
            *(self.doubles(size) for size in (n, 5, n, 4 * n, known, 2 * stems)),
            *(self.floats(size) for size in (n * DIM, DIM, n * COLUMNS, COLUMNS, n)),
            *(self.integers(examples, n), self.integers(2 * known, 1), self.integers(4 * n, 9)),
            *(self.integers(stems, len(WORDS)), self.integers(stems, len(WORDS))),
            *(np.arange(0, 2 * n + 1, 2, dtype=np.int32).tobytes(), self.integers(2 * n, len(WORDS))),
            *(np.arange(n + 1, dtype=np.int32).tobytes(), self.integers(n, len(WORDS))),
            *(
                self.integers(stems, len(WORDS)),
                np.arange(stems + 1, dtype=np.int32).tobytes(),
                self.integers(stems, n),
            ),
        ]
        n_rows = 4 * n + examples
        return header + b"".join(body), self.random.randbytes(n_rows * DIM), self.doubles(n_rows)

    def weights(self) -> bytes:
        header = struct.pack("<8i", DIM, SCALARS, UNITS, COLUMNS, HIDDEN, 2, 2, 3)
        joined = UNITS + COLUMNS * 4
        return b"".join(
            [
                header,
                *(self.doubles(size) for size in (4, 3, 4, 96, 12)),
                *(self.floats(size) for size in (SCALARS, SCALARS)),
                np.array([4.0], np.float32).tobytes(),
                *(self.floats(size) for size in (SCALARS * UNITS, UNITS, 8 * DIM * COLUMNS, joined * HIDDEN, HIDDEN)),
                *(self.floats(size) for size in (HIDDEN * 4, 4)),
                *(self.integers(2, 8), self.integers(2, 8), self.integers(2, 8), self.integers(3, SCALARS)),
            ]
        )

    def forward(self) -> list[Any]:
        tools, rows, norms = self.tools() if self.random.random() < 0.8 else (b"", b"", b"")
        n = struct.unpack_from("<i", tools)[0] if tools else 0
        now, before = self.random.randrange(5), self.random.randrange(5)
        counts = [self.random.choice(TEXT_COUNTS) for _ in range(13)]
        numbers = struct.pack("<16i", *counts, self.random.randrange(3), now, before)
        optional = [self.floats(12), bytes(2 * n), *([self.random.choice([b"", bytes([1] * n)])] * 2)]
        return [
            *(self.weights(), bytearray(8192), bytearray(4 * SCALARS), numbers, *(self.record() for _ in range(6))),
            *(part if self.random.random() < 0.8 else b"" for part in optional),
            *(self.doubles(1), self.random.choice([b"", self.doubles(4)]), tools, rows, norms),
            *(self.record() for _ in range(now + before)),
        ]

    def ngrams(self) -> list[Any]:
        fields = [[self.text(), self.random.randrange(2**32), self.random.randrange(32), 0.5] for _ in range(3)]
        return [
            self.floats(16 * 4),
            bytearray(64),
            self.random.choice([0, 32, 33]),
            20.0,
            *(part for field in fields for part in field),
        ]

    def spoiled(self, value: Any) -> Any:
        """The value changed: bytes written over, cut off or added; another type now and then."""
        if self.random.random() < 0.05 or not isinstance(value, bytes | bytearray):
            return self.random.choice([None, -1, 0, 2**40, 0.5, "text", b"", bytearray(), object()])
        changed = bytearray(value)
        kind = self.random.random()
        if kind < 0.2:
            del changed[self.random.randrange(len(changed) + 1) :]
        elif kind < 0.3:
            changed += self.random.randbytes(self.random.randrange(9))
        elif changed:
            for _ in range(self.random.choice([1, 2, 8])):
                limit = len(changed) if self.random.random() < 0.5 else min(len(changed), 64)
                at = self.random.randrange(limit)
                changed[at : at + 4] = self.random.choice(
                    [b"\xff\xff\xff\xff", b"\x00\x00\x00\x80", b"\xff\xff\xff\x7f", self.random.randbytes(4)]
                )[: len(changed) - at]
        return changed


def main(path: str, runs: int = RUNS_DEFAULT) -> int:
    module = load(path)
    rows = [module.bind("serial"), module.bind("best")]
    whole = answered = refused = 0
    for run in range(runs):
        parts = Parts(rows[run % 2], run)
        calls: dict[str, list[Any]] = {
            "gate_forward": parts.forward(),
            "text_record_into": parts.record_arguments(),
            "wordpiece_into": [parts.text(), *parts.tables(), bytearray(4 * parts.random.randrange(40))],
            "token_fields": [
                tuple(parts.text().decode() for _ in range(parts.random.randrange(4))),
                *parts.record_arguments()[1:9],
                parts.random.randrange(385),
                bytearray(),
            ],
            "tool_rows_into": [parts.integers(3 * 2 * DIM, 99), b"\0\1", 0.5, bytearray(4 * 2 * DIM)],
            "wordpiece_index_into": [VOCABULARY, len(WORDS), bytearray(4 * (len(WORDS) + 1)), bytearray(256)],
            "ngram_fields_into": parts.ngrams(),
        }
        name = parts.random.choice([*["gate_forward"] * 6, *calls])
        values = calls[name]
        if name == "token_fields" and parts.random.random() < 0.7:
            values[10] = bytearray(4 * DIM * len(values[0]))
        spoil = run % 4 != 0
        for _ in range(parts.random.choice([1, 1, 2]) if spoil else 0):
            at = parts.random.randrange(len(values))
            values[at] = parts.spoiled(values[at])
        try:
            rows[run % 2][name](*values)
            answered += 1
            whole += not spoil
        except (ValueError, TypeError):
            refused += 1
            if not spoil and name != "ngram_fields_into":
                raise
    print(f"gate fuzz: {runs} runs, {answered} calls answered ({whole} whole), {refused} refused, nothing else")
    return 0 if min(answered, refused) > runs // 20 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:])))
