"""Reads one tensor out of llama.cpp's compute graph and stops the graph there.

llama.cpp asks an eval callback about each node of the graph, first "do you want to see it?" and, once it is computed,
"here it is; go on?". Answering no ends the computation of that micro-batch (ggml-backend.cpp, compute_splits). The
callback here wants exactly one node, copies its rows and ends.

Two implementations, one behaviour: the native one in ``whetherman_edge.kernels._native`` needs no interpreter lock
(about a thousand questions a decode), the ctypes twin is used where the module is missing.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import numpy as np
import numpy.typing as npt

F32Matrix = npt.NDArray[np.float32]

NAME_BYTES: Final = 64
"""GGML_MAX_NAME."""


class State(ctypes.Structure):
    """Shared with the native callback (native/src/capture.c); field order is the contract between the two."""

    _fields_ = [
        ("get_name", ctypes.c_void_p),  # const char * ggml_get_name(tensor)
        ("get_bytes", ctypes.c_void_p),  # size_t ggml_nbytes(tensor)
        ("get_data", ctypes.c_void_p),  # void * ggml_get_data(tensor)
        ("out", ctypes.c_void_p),  # float[rows_max * width]
        ("out_bytes", ctypes.c_size_t),
        ("seen_bytes", ctypes.c_size_t),  # bytes copied since reset; 0 = the node was not reached or had no rows
        ("stop", ctypes.c_int32),  # set from any thread: the abort callback answers yes
        ("overflow", ctypes.c_int32),  # the node was larger than out
        ("name", ctypes.c_char * NAME_BYTES),
    ]


class Capture:
    """One wanted tensor. Keep it alive as long as the context it is installed in.

    name: graph name, as ``l_out-11`` or ``result_norm``. rows_max, width: shape of the float32 buffer it is copied to.
    """

    def __init__(self, lib: Any, name: str, *, rows_max: int, width: int, native: bool | None = None) -> None:
        self.name, self.width = name, width
        self._buffer = np.zeros((rows_max, width), dtype=np.float32)
        ggml = ggml_of(lib)
        self.state = State(
            get_name=_address(ggml.ggml_get_name),
            get_bytes=_address(ggml.ggml_nbytes),
            get_data=_address(ggml.ggml_get_data),
            out=self._buffer.ctypes.data,
            out_bytes=self._buffer.nbytes,
            name=name.encode(),
        )
        addresses = _native_addresses() if native is not False else None
        if native and addresses is None:
            raise RuntimeError("the native capture was asked for, but the compiled module is not there")
        self.native = addresses is not None
        if addresses is not None:
            self._eval = lib.ggml_backend_sched_eval_callback(addresses[0])
            self._abort = lib.ggml_abort_callback(addresses[1])
        else:
            ggml.ggml_get_name.argtypes, ggml.ggml_get_name.restype = [ctypes.c_void_p], ctypes.c_char_p
            ggml.ggml_nbytes.argtypes, ggml.ggml_nbytes.restype = [ctypes.c_void_p], ctypes.c_size_t
            ggml.ggml_get_data.argtypes, ggml.ggml_get_data.restype = [ctypes.c_void_p], ctypes.c_void_p
            self._ggml = ggml
            self._eval = lib.ggml_backend_sched_eval_callback(self._on_node)
            self._abort = lib.ggml_abort_callback(self._on_abort)

    def install(self, params: Any) -> None:
        """Puts both callbacks into llama.cpp's context parameters."""
        pointer = ctypes.c_void_p(ctypes.addressof(self.state))
        params.cb_eval, params.cb_eval_user_data = self._eval, pointer
        params.abort_callback, params.abort_callback_data = self._abort, pointer

    def reset(self) -> None:
        """Forget the last rows."""
        self.state.seen_bytes = 0
        self.state.overflow = 0

    def rows(self) -> F32Matrix:
        """What the last decode left: (n, width) float32, a view that the next decode overwrites."""
        if self.state.overflow:
            raise RuntimeError(f"{self.name} is larger than the {self._buffer.nbytes} bytes kept for it")
        return self._buffer[: self.state.seen_bytes // (4 * self.width)]

    def stop(self, on: bool) -> None:
        """Set or clear the flag that ends a decode under way; may be called from any thread."""
        self.state.stop = 1 if on else 0

    def _on_node(self, tensor: int, ask: bool, _user: Any) -> bool:
        if self._ggml.ggml_get_name(tensor) != self.state.name:
            return not ask
        n_bytes = self._ggml.ggml_nbytes(tensor)
        if ask:
            return bool(n_bytes)
        if n_bytes > self.state.out_bytes:
            self.state.overflow = 1
        else:
            ctypes.memmove(self.state.out, self._ggml.ggml_get_data(tensor), n_bytes)
            self.state.seen_bytes = n_bytes
        return False

    def _on_abort(self, _user: Any) -> bool:
        return bool(self.state.stop)


def ggml_of(lib: Any) -> Any:
    """The library that exports the tensor accessors; llama.cpp ships them in libggml-base beside libllama."""
    try:
        from llama_cpp import _ggml as binding

        return binding.libggml
    except (ImportError, AttributeError):
        return lib._lib


def _address(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address, "a resolved C function has an address"
    return address


def _native_addresses() -> tuple[int, int] | None:
    try:
        from whetherman_edge.kernels import _native  # type: ignore[attr-defined,unused-ignore]

        eval_address, abort_address, state_bytes = _native.capture_addresses()
    except (ImportError, AttributeError):
        return None
    if state_bytes != ctypes.sizeof(State):
        return None
    return eval_address, abort_address
