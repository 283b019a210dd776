"""Writes a GGUF again in another quantisation, with fewer blocks: llama.cpp's own quantiser, without its program.

``derive`` makes f16, q8_0 and q4_0 in NumPy; the mixed kinds (q4_k_m) and the non-linear ones (iq4_nl) exist only in
llama.cpp. The embedding table keeps its type: it is 178 of the base's 253 MB, is never multiplied by here, and only
the rows of tokens in use are ever paged in, so making it smaller would buy nothing.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from whetherman_edge.backbone.llama import load_library
from whetherman_edge.errors import ArtifactError

Progress = Callable[[int, int], None]
"""Called with (bytes written so far, bytes of the source: an upper bound that the last call repeats)."""

KINDS: Final = {
    "f16": "LLAMA_FTYPE_MOSTLY_F16",
    "q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0",
    "q4_k_m": "LLAMA_FTYPE_MOSTLY_Q4_K_M",
    "q4_0": "LLAMA_FTYPE_MOSTLY_Q4_0",
    "iq4_nl": "LLAMA_FTYPE_MOSTLY_IQ4_NL",
}
"""Kind to llama.cpp's file type. A Gemma 3 270M row of 640 is no multiple of 256, so q4_k_m is mostly Q5_0 there."""
PURE: Final = ("q8_0", "q4_0", "iq4_nl")
"""Kinds where every projection gets the same type: then all of them run on llama.cpp's repacked kernels."""
END_OF_LIST: Final = -1
POLL_S: Final = 0.25


def quantise(
    source: Path,
    target: Path,
    kind: str,
    keep_layers: int | None = None,
    *,
    n_threads: int = 0,
    progress: Progress | None = None,
) -> None:
    """Write ``target`` from ``source``. Atomic: a half-written file never has the final name.

    kind: one of KINDS. keep_layers: blocks kept, counted from the bottom; None keeps all. n_threads: 0 for all cores.

    Raises ArtifactError for an unknown kind, a source llama.cpp cannot read, or a number of blocks it does not have;
    EnvironmentFault without llama.cpp; OSError when the directory cannot be written.
    """
    if kind not in KINDS:
        raise ArtifactError(f"expected a quantisation of {', '.join(KINDS)}, got {kind!r}")
    lib = load_library()
    n_layers = _count_layers(lib, source)
    if keep_layers is not None and not 1 <= keep_layers <= n_layers:
        raise ArtifactError(f"expected to keep 1 to {n_layers} blocks of {source.name}, got {keep_layers}")
    params = lib.llama_model_quantize_default_params()
    params.nthread = n_threads
    params.ftype = getattr(lib, KINDS[kind])
    params.allow_requantize = True
    params.pure = kind in PURE
    params.token_embedding_type = lib.GGML_TYPE_Q8_0
    dropped = range(keep_layers if keep_layers is not None else n_layers, n_layers)
    indices = (ctypes.c_int32 * (len(dropped) + 1))(*dropped, END_OF_LIST)
    if len(dropped):
        params.prune_layers = ctypes.cast(indices, ctypes.POINTER(ctypes.c_int32))
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".partial")
    os.close(handle)
    partial = Path(name)
    try:
        status = _run(lib, source, partial, params, progress)
        if status != 0:
            raise ArtifactError(f"expected llama.cpp to write {source.name} as {kind}, it failed with {status}")
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.chmod(0o644)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _run(lib: Any, source: Path, partial: Path, params: Any, progress: Progress | None) -> int:
    """llama.cpp reports no progress, so the file it writes is watched instead. ctypes drops the interpreter lock."""
    status: list[int] = []

    def work() -> None:
        status.append(lib.llama_model_quantize(str(source).encode(), str(partial).encode(), ctypes.byref(params)))

    thread = threading.Thread(target=work, name="quantise")
    thread.start()
    total = source.stat().st_size
    while thread.is_alive():
        thread.join(POLL_S)
        if progress is not None:
            progress(min(partial.stat().st_size, total), total)
    if progress is not None and status == [0]:
        progress(total, total)
    return status[0]


def _count_layers(lib: Any, source: Path) -> int:
    """Blocks of a GGUF; the weights are only mapped."""
    params = lib.llama_model_default_params()
    params.n_gpu_layers = 0
    handle = lib.llama_model_load_from_file(str(source).encode(), params)
    if not handle:
        raise ArtifactError(f"expected a GGUF model that llama.cpp can load, {source.name} is not; fetch it again")
    try:
        return int(lib.llama_model_n_layer(handle))
    finally:
        lib.llama_model_free(handle)
