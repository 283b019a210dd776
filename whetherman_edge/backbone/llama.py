"""llama.cpp driven for hidden states: the only module that imports ``llama_cpp``, and it does so on first use.

What a plain embedding call does wrong for us (measured, see DESIGN.md "The backbone"): it marks every prompt token as
an output and multiplies each by the 262,144-row vocabulary, which costs more than the network itself. Here no token
needs logits: the graph is stopped in the scheduler's eval callback as soon as the wanted layer's output exists, so
the layers above it and the vocabulary product never run. Keys and values of the layers below are already written by
then, and a context always stops at the same layer, so what lies above is never missed.

Nothing here is thread-safe: one thread owns a Context (abetlen/llama-cpp-python#471).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from whetherman_edge.backbone.capture import Capture, ggml_of
from whetherman_edge.backbone.rows import Q8_0, Rows, row_bytes
from whetherman_edge.errors import ArtifactError, EnvironmentFault

I32Vector = npt.NDArray[np.int32]
F32Vector = npt.NDArray[np.float32]
F32Matrix = npt.NDArray[np.float32]

ABORTED: Final = 2
"""What ``llama_decode`` returns when the abort callback said stop; the micro-batch under way left no trace in the
cache.
"""
NO_SLOT: Final = 1
"""What ``llama_decode`` returns when the key-value cells do not suffice; nothing was changed."""


OPENMP: Final = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}
"""How llama.cpp's threads wait for each other, read when libgomp is loaded. By default they spin for milliseconds at
each of some 500 barriers a decode; where another program (the model server!) wants the core, two threads then took 4 to
13 times as long as one. Some microseconds of spinning keep the idle machine fast and cost the busy one nothing.
"""


ROWS_TABLE: Final = "token_embd.weight"
MADV_DONTNEED: Final = 4
"""Linux's number for it, on every architecture but Alpha."""


class DecodeFault(EnvironmentFault):
    """``llama_decode`` failed for a reason other than an abort; the context must be thrown away."""


class Aborted(Exception):
    """The decode was stopped by the flag. ``n_done`` tokens of the call are in the cells, ``states``: the rows so
    far.
    """

    def __init__(self, n_done: int, states: F32Matrix) -> None:
        super().__init__(f"aborted after {n_done} tokens")
        self.n_done, self.states = n_done, states


@functools.cache
def load_library() -> Any:
    """The ``llama_cpp`` module, silenced. Raises EnvironmentFault with the command that installs it."""
    for name, value in OPENMP.items():
        os.environ.setdefault(name, value)
    try:
        import llama_cpp
    except Exception as exc:  # a broken build raises OSError, RuntimeError, AttributeError, ... at import
        raise EnvironmentFault(
            f"expected a working llama-cpp-python, importing it failed ({type(exc).__name__}); "
            "install it with `pip install 'whetherman-edge[gemma]'` (needs a C++ compiler)"
        ) from exc
    library: Any = llama_cpp
    callback = library.llama_log_callback(_ignore_log)
    library.llama_log_set(callback, ctypes.c_void_p(0))
    library.llama_backend_init()
    _KEPT_ALIVE.append(callback)
    return library


_KEPT_ALIVE: Final[list[Any]] = []
"""llama.cpp keeps only the address of its log callback."""


def _ignore_log(_level: int, _text: bytes, _user: Any) -> None:
    """llama.cpp prints hundreds of lines while loading; failures come back as return values."""


class Network:
    """Weights and vocabulary of one GGUF file, memory-mapped.

    Raises ArtifactError when the file cannot be loaded.
    """

    def __init__(self, path: Path) -> None:
        self.lib = load_library()
        params = self.lib.llama_model_default_params()
        params.n_gpu_layers = 0
        self.handle = self.lib.llama_model_load_from_file(str(path).encode(), params)
        if not self.handle:
            raise ArtifactError(f"expected a GGUF model that llama.cpp can load, {path.name} is not; reinstall it")
        self.path = path
        self.vocab = self.lib.llama_model_get_vocab(self.handle)
        self.n_embd = int(self.lib.llama_model_n_embd(self.handle))
        self.n_layer = int(self.lib.llama_model_n_layer(self.handle))
        self.bos = int(self.lib.llama_vocab_bos(self.vocab))
        self.window = int(self.lib.llama_model_n_swa(self.handle))
        """Tokens that a block with a sliding window attends to; 0 where all blocks attend to everything."""
        release_pages(path)
        self.rows = self._open_rows()
        """The embedding table, where we read it ourselves; else llama.cpp does."""
        trim_heap()

    def _open_rows(self) -> Rows | None:
        found = tensor_of(self.lib, self.path, ROWS_TABLE)
        buffer = ctypes.create_string_buffer(64)
        self.lib.llama_model_meta_val_str(self.handle, b"general.architecture", buffer, len(buffer))
        if found is None or found[2] != Q8_0 or buffer.value != b"gemma3":
            return None
        if found[1] != self.lib.llama_vocab_n_tokens(self.vocab) * row_bytes(self.n_embd):
            return None
        # Gemma's graph multiplies the rows that it looks up, and leaves alone those it is given.
        try:
            return Rows(self.path, found[0], found[1], self.n_embd, np.sqrt(np.float32(self.n_embd)))
        except OSError:  # gone since it was mapped
            return None

    def tokenize(self, text: str) -> list[int]:
        """Token ids of plain text: strings that look like control tokens stay text."""
        return self._tokenize(text, special=False)

    def control(self, token: str) -> int:
        """Id of one control token. Raises ArtifactError if the vocabulary does not have it as a single token."""
        ids = self._tokenize(token, special=True)
        if len(ids) != 1:
            raise ArtifactError(f"expected {token!r} to be one token of {self.path.name}, it is {len(ids)}")
        return ids[0]

    def _tokenize(self, text: str, special: bool) -> list[int]:
        data = text.encode("utf-8", "replace")
        room = len(data) + 8
        buffer = (self.lib.llama_token * room)()
        n = self.lib.llama_tokenize(self.vocab, data, len(data), buffer, room, False, special)
        if n < 0:
            raise DecodeFault(f"expected at most {room} tokens for {len(data)} bytes, got {-n}")
        return list(buffer[:n])

    def close(self) -> None:
        """Frees the weights; contexts must be closed first."""
        if self.handle:
            self.lib.llama_model_free(self.handle)
            self.handle = None
            if self.rows is not None:
                self.rows.close()
            trim_heap()


def release_pages(path: Path) -> None:
    """Drop the pages of a mapped file from this process (Linux; elsewhere nothing happens).

    llama.cpp reads the whole file ahead when it maps it, 178 MB of embedding table included, of which a few rows are
    ever used. The mapping is of a file and never written, so a page that is needed comes back from the page cache.
    """
    try:
        wanted, maps = str(path.resolve()), Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
        madvise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError, TypeError):
        return
    madvise.argtypes, madvise.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    for line in maps.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5] == wanted and "w" not in fields[1]:
            first, _, end = fields[0].partition("-")
            madvise(int(first, 16), int(end, 16) - int(first, 16), MADV_DONTNEED)


def trim_heap() -> None:
    """Give back what was freed (glibc; elsewhere nothing happens). It would be kept for the thread that had it, and the
    vocabulary of one worker is 57 MB.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


class _Reading(ctypes.Structure):
    """gguf_init_params."""

    _fields_ = [("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p)]


_READER: Final[tuple[tuple[str, list[Any], Any], ...]] = (
    ("gguf_init_from_file", [ctypes.c_char_p, _Reading], ctypes.c_void_p),
    ("gguf_find_tensor", [ctypes.c_void_p, ctypes.c_char_p], ctypes.c_int64),
    ("gguf_get_data_offset", [ctypes.c_void_p], ctypes.c_size_t),
    ("gguf_get_tensor_offset", [ctypes.c_void_p, ctypes.c_int64], ctypes.c_size_t),
    ("gguf_get_tensor_size", [ctypes.c_void_p, ctypes.c_int64], ctypes.c_size_t),
    ("gguf_get_tensor_type", [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int),
    ("gguf_free", [ctypes.c_void_p], None),
)


def tensor_of(lib: Any, path: Path, name: str) -> tuple[int, int, int] | None:
    """(first byte, number of bytes, ggml's type) of a tensor in a GGUF file; None where llama.cpp does not say."""
    reader = ggml_of(lib)
    try:
        for function, arguments, result in _READER:
            entry = getattr(reader, function)
            entry.argtypes, entry.restype = arguments, result
    except AttributeError:
        return None
    handle = reader.gguf_init_from_file(str(path).encode(), _Reading(True, None))
    if not handle:
        return None
    try:
        index = reader.gguf_find_tensor(handle, name.encode())
        if index < 0:
            return None
        first = reader.gguf_get_data_offset(handle) + reader.gguf_get_tensor_offset(handle, index)
        return first, reader.gguf_get_tensor_size(handle, index), reader.gguf_get_tensor_type(handle, index)
    finally:
        reader.gguf_free(handle)


class Context:
    """Key-value cells and the compute graph, stopping at one layer.

    ``layer``: 0-based block whose output is read, or ``n_layer`` for the state after the final norm. ``n_cells``:
    tokens held over all sequences. ``n_seq``: number of sequences. ``chunk``: tokens a decode call (and a
    micro-batch).
    """

    def __init__(
        self, network: Network, *, layer: int, n_cells: int, n_seq: int, chunk: int = 256, n_threads: int = 2
    ) -> None:
        if not 0 <= layer <= network.n_layer:
            raise ArtifactError(f"expected a layer from 0 to {network.n_layer}, got {layer}")
        self.network, self.layer, self.n_cells, self.n_seq, self.chunk = network, layer, n_cells, n_seq, chunk
        lib = self.lib = network.lib
        name = "result_norm" if layer == network.n_layer else f"l_out-{layer}"
        self.rows_are_outputs = layer >= network.n_layer - 1
        """In the last block llama.cpp keeps only rows flagged as outputs."""
        self.capture = Capture(lib, name, rows_max=chunk, width=network.n_embd)
        params = lib.llama_context_default_params()
        params.n_ctx = n_cells
        params.n_batch = params.n_ubatch = chunk
        params.n_seq_max = n_seq
        params.n_threads = params.n_threads_batch = n_threads
        params.kv_unified = True  # sequences share cells, so a prefix is copied by reference
        params.swa_full = True  # else a sliding-window cache cannot be rolled back
        params.offload_kqv = False
        params.op_offload = False
        params.no_perf = True
        self.capture.install(params)
        self.handle = lib.llama_init_from_model(network.handle, params)
        if not self.handle:
            raise DecodeFault(f"expected a context of {n_cells} cells and {n_seq} sequences, llama.cpp refused it")
        self.memory = lib.llama_get_memory(self.handle)
        self._open_batch(network.rows)
        self.beat_s = time.monotonic()
        """When the last micro-batch was begun; a watchdog's sign of life."""

    def _open_batch(self, rows: Rows | None) -> None:
        lib, chunk, width = self.lib, self.chunk, self.network.n_embd
        self._rows = rows
        self._batch = batch = lib.llama_batch_init(chunk, 0 if rows is None else width, 1)
        self._inputs = None if rows is None else _array(batch.embd, ctypes.c_float, (chunk, width))
        self._tokens = _array(batch.token, ctypes.c_int32, (chunk,)) if rows is None else None
        self._positions = _array(batch.pos, ctypes.c_int32, (chunk,))
        self._flags = _array(batch.logits, ctypes.c_int8, (chunk,))
        _array(batch.n_seq_id, ctypes.c_int32, (chunk,))[:] = 1
        self._sequences = [batch.seq_id[i] for i in range(chunk)]

    def check_rows(self) -> bool:
        """Whether the rows that we look up lead to the state that llama.cpp's own lead to; where not, it looks them up
        from now on. Another version's graph may do other things with what it is given. The cells must be empty.
        """
        if (rows := self._rows) is None:
            return True
        bos = (self.network.bos,)
        ours = self.decode(0, bos, 0, (0,))
        self.truncate(0, 0)
        self.lib.llama_batch_free(self._batch)
        self._open_batch(None)
        theirs = self.decode(0, bos, 0, (0,))
        self.truncate(0, 0)
        if not np.allclose(ours, theirs, rtol=1e-3, atol=1e-3):
            return False
        self.lib.llama_batch_free(self._batch)
        self._open_batch(rows)
        return True

    def decode(self, seq: int, tokens: Sequence[int], position: int, wanted: Sequence[int] = ()) -> F32Matrix:
        """Appends ``tokens`` to sequence ``seq`` from ``position`` on.

        wanted: ascending offsets into ``tokens`` whose states are returned.
        Returns (len(wanted), n_embd) float32, copies. Raises Aborted when the stop flag was seen, DecodeFault
        otherwise.
        """
        states = np.empty((len(wanted), self.network.n_embd), dtype=np.float32)
        taken, start = 0, 0
        while start < len(tokens):
            piece = tokens[start : start + self.chunk]
            end = start + len(piece)
            here = [w - start for w in wanted[taken:] if w < end]
            self._fill(seq, piece, position + start)
            if self.rows_are_outputs:
                self._flags[here] = 1
            self.capture.reset()
            self.beat_s = time.monotonic()
            status = self.lib.llama_decode(self.handle, self._batch)
            if status == ABORTED:
                raise Aborted(start, states[:taken])
            if status != 0:
                raise DecodeFault(f"expected llama_decode to return 0, got {status} at token {start} of {len(tokens)}")
            if here:
                rows = self.capture.rows()
                expected = len(here) if self.rows_are_outputs else len(piece)
                if len(rows) != expected:
                    raise DecodeFault(f"expected {expected} rows of {self.capture.name}, got {len(rows)}")
                states[taken : taken + len(here)] = rows if self.rows_are_outputs else rows[here]
                taken += len(here)
            start = end
        return states

    def _fill(self, seq: int, tokens: Sequence[int], position: int) -> None:
        """The batch holds these tokens, none an output."""
        n = self._batch.n_tokens = len(tokens)
        if self._tokens is not None:
            self._tokens[:n] = tokens
        elif self._rows is not None and self._inputs is not None:
            self._rows.look_up(tokens, self._inputs[:n])
        self._positions[:n] = np.arange(position, position + n)
        self._flags[:n] = 0
        for sequence in self._sequences[:n]:
            sequence[0] = seq

    def run(self, seq: int, tokens: Sequence[int]) -> None:
        """All blocks and the last token's logits, nothing captured: what a plain program does. For benchmarks.

        Raises DecodeFault.
        """
        for start in range(0, len(tokens), self.chunk):
            piece = tokens[start : start + self.chunk]
            self._fill(seq, piece, start)
            self._flags[len(piece) - 1] = start + len(piece) == len(tokens)
            if (status := self.lib.llama_decode(self.handle, self._batch)) != 0:
                raise DecodeFault(f"expected llama_decode to return 0, got {status} at token {start} of {len(tokens)}")

    def copy(self, source: int, target: int, n_tokens: int) -> None:
        """Shares the first ``n_tokens`` of ``source`` with the empty sequence ``target``; no keys or values move."""
        self.lib.llama_memory_seq_cp(self.memory, source, target, 0, n_tokens)

    def truncate(self, seq: int, n_tokens: int) -> None:
        """Drops everything of ``seq`` from position ``n_tokens`` on."""
        if not self.lib.llama_memory_seq_rm(self.memory, seq, n_tokens, -1):
            raise DecodeFault(f"expected sequence {seq} to be cut at {n_tokens}, llama.cpp refused")

    def length(self, seq: int) -> int:
        """Number of tokens llama.cpp holds for ``seq``."""
        return int(self.lib.llama_memory_seq_pos_max(self.memory, seq)) + 1

    def first(self, seq: int) -> int:
        """First position that is still held for ``seq`` in every block; a position beyond any prompt when none is.

        In blocks with a sliding window llama.cpp gives a cell of a single sequence to other tokens once it lies outside
        of that sequence's window, also with ``swa_full``.
        """
        position = int(self.lib.llama_memory_seq_pos_min(self.memory, seq))
        return position if position >= 0 else self.n_cells

    def save(self, seq: int) -> bytes:
        """Keys and values of ``seq`` (about 17 KB a token at 18 layers)."""
        size = self.lib.llama_state_seq_get_size(self.handle, seq)
        buffer = (ctypes.c_uint8 * size)()
        written = self.lib.llama_state_seq_get_data(self.handle, buffer, size, seq)
        return bytes(memoryview(buffer)[:written])

    def restore(self, seq: int, data: bytes) -> bool:
        """Loads what ``save`` gave into ``seq``; False when llama.cpp does not take it (other version, no room)."""
        buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        if self.lib.llama_state_seq_set_data(self.handle, buffer, len(data), seq) != 0:
            return True
        self.truncate(seq, 0)
        return False

    def close(self) -> None:
        """Frees the cells and the batch."""
        if self.handle:
            self.lib.llama_batch_free(self._batch)
            self.lib.llama_free(self.handle)
            self.handle = None


def _array(pointer: Any, kind: Any, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """What a pointer of llama.cpp's points to."""
    return np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(kind)), shape)
