"""Which part of a prompt's keys and values is already there. Pure bookkeeping: no llama.cpp, no clock.

Every entry is a token sequence held in one of llama.cpp's sequences; sequences share cells, so copying a prefix costs
no memory and no time. Two kinds of entry: a ``root`` holds a tools block (computed once per tool set, kept longest),
a ``session`` holds a root plus the dialogue so far and grows in place. ``plan`` says what to do for a prompt; the
caller does it on the context and reports back with ``commit`` or ``forget``.

What a sequence holds may have lost its front where blocks have a sliding window (``llama.Context.first``). A prefix of
it is of use only while the window before the prefix's end is whole: a short prefix of a long sequence may be gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

SCRATCH_CELLS: Final = 64
"""Cells kept free beyond what a plan needs: llama.cpp looks for room a micro-batch at a time."""


class Entry(msgspec.Struct):
    """One cached sequence. ``tokens``: what it holds. ``shared``: leading tokens whose cells belong to a root."""

    seq: int
    tokens: npt.NDArray[np.int32]
    root: bool
    shared: int
    used: int


class Plan(msgspec.Struct, frozen=True):
    """What to do before decoding a prompt.

    ``evict``: sequences to clear. ``source``: sequence to copy the first ``n_reused`` tokens from, or -1 (``seq``
    itself already has them, or nothing is reused). ``seq``: where the prompt goes; it is to be cut at
    ``n_reused``. ``holder``: the sequence whose prefix is reused, or -1. ``root``: a sequence set aside for this
    tools block, or -1 when a root holds it already. ``seq`` and ``root`` are the caller's until ``commit`` or
    ``forget``.
    """

    seq: int
    n_reused: int
    source: int
    holder: int
    root: int
    evict: tuple[int, ...]


class PrefixCache:
    """Entries within ``n_seq`` sequences and ``n_cells`` cells, least recently used first out.

    ``first``: the first position that is still held for a sequence; ``window``: see ``is_whole``.
    """

    def __init__(self, n_seq: int, n_cells: int, first: Callable[[int], int] = lambda _seq: 0, window: int = 0) -> None:
        self.n_cells = n_cells
        self._first = first
        self._window = window
        self._free = list(range(n_seq - 1, -1, -1))
        self._entries: dict[int, Entry] = {}
        self._tick = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> list[Entry]:
        """Entries, least recently used first."""
        return sorted(self._entries.values(), key=lambda e: e.used)

    @property
    def cells(self) -> int:
        """Cells in use."""
        return sum(len(e.tokens) - e.shared for e in self._entries.values())

    def plan(self, ids: Sequence[int], n_tools: int) -> Plan:
        """How to reuse most of ``ids``, whose first ``n_tools`` are the tools block.

        A session is continued in place when the prompt goes on from it (all but its cue matches beyond the
        tools block); otherwise the longest common prefix is copied from whatever holds it. Raises ValueError
        if ``ids`` can never fit.
        """
        prompt = np.asarray(ids, dtype=np.int32)
        if len(prompt) + SCRATCH_CELLS > self.n_cells:
            raise ValueError(f"a prompt of {len(prompt)} tokens does not fit in {self.n_cells} cells")
        broken = [e.seq for e in self._entries.values() if not self.holds(e.seq, len(e.tokens))]
        for seq in broken:
            self.forget(seq)
        best, n_best = None, 0
        for entry in self._entries.values():
            n = common_prefix(entry.tokens, prompt)
            if not self.holds(entry.seq, min(n, len(prompt) - 1)):
                continue
            if n > n_best or (n == n_best and n > n_tools and best is not None and best.root):
                best, n_best = entry, n
        n_reused = min(n_best, len(prompt) - 1)  # the last token is always decoded: its state is the answer
        in_place = best is not None and not best.root and n_reused > n_tools and 2 * n_reused >= len(best.tokens)
        no_root = self._find_root(prompt[:n_tools]) is None
        keep = {best.seq} if best is not None and n_reused else set()
        evict = (*broken, *self._make_room(len(prompt) - n_reused, keep, n_seq=(not in_place) + no_root))
        root = self._free.pop() if no_root and len(self._free) > (not in_place) else -1
        if best is None or not n_reused:
            return Plan(self._free.pop(), 0, -1, -1, root, evict)
        if in_place:
            del self._entries[best.seq]
            return Plan(best.seq, n_reused, -1, best.seq, root, evict)
        return Plan(self._free.pop(), n_reused, best.seq, best.seq, root, evict)

    def holds(self, seq: int, n_tokens: int) -> bool:
        """Whether the first ``n_tokens`` of a sequence can be gone on from."""
        return is_whole(self._first(seq), n_tokens, self._window)

    def reserve(self) -> int:
        """A free sequence, the caller's until ``commit`` or ``forget``; -1 when there is none."""
        return self._free.pop() if self._free else -1

    def commit(self, seq: int, ids: Sequence[int], *, root: bool, shared: int) -> None:
        """``seq`` now holds ``ids``."""
        self._tick += 1
        tokens = np.asarray(ids, dtype=np.int32)
        self._entries[seq] = Entry(seq, tokens, root, min(shared, len(tokens)), self._tick)

    def forget(self, seq: int) -> None:
        """``seq`` is empty again. Cells of a root that is gone belong to the sessions that still hold them."""
        gone = self._entries.pop(seq, None)
        if gone is not None and gone.root:
            for entry in self._entries.values():
                if entry.shared and common_prefix(entry.tokens, gone.tokens) == len(gone.tokens):
                    entry.shared = 0
        if seq not in self._free:
            self._free.append(seq)

    def _find_root(self, block: npt.NDArray[np.int32]) -> Entry | None:
        """The root that holds exactly this tools block; it counts as used."""
        for entry in self._entries.values():
            if entry.root and np.array_equal(entry.tokens, block):
                self._tick += 1
                entry.used = self._tick
                return entry
        return None

    def _make_room(self, n_new: int, keep: set[int], *, n_seq: int) -> tuple[int, ...]:
        """Evicts until ``n_new`` cells and ``n_seq`` sequences are free: sessions before roots, oldest first."""
        evicted: list[int] = []
        order = sorted((e for e in self._entries.values() if e.seq not in keep), key=lambda e: (e.root, e.used))
        for entry in order:
            enough = self.cells + n_new + SCRATCH_CELLS <= self.n_cells
            if enough and len(self._free) >= n_seq:
                break
            evicted.append(entry.seq)
            self.forget(entry.seq)
        return tuple(evicted)


def is_whole(first: int, n_tokens: int, window: int) -> bool:
    """Whether a token behind ``n_tokens`` finds all it attends to in a sequence that is held from ``first`` on.

    window: number of positions it attends to in blocks with a sliding window, itself among them; 0: everything.
    """
    return first <= (max(0, n_tokens - window + 1) if window else 0)


def common_prefix(a: npt.NDArray[np.int32], b: npt.NDArray[np.int32]) -> int:
    """Number of leading tokens that are equal."""
    n = min(len(a), len(b))
    differing = np.flatnonzero(a[:n] != b[:n])
    return int(differing[0]) if len(differing) else n
