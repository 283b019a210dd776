"""Keys and values of tools blocks, kept over a restart: one file, written at stop, read at start.

Only roots are kept, so only what tools say of themselves; nothing of a dialogue reaches the disk. The file is still
derived from prompts, so it is readable by its owner alone, and one that others could have written is ignored.

Layout: MAGIC, sha256 of all that follows, header length (4 bytes, little-endian), header (JSON), then for each root its
token ids (int32), its tool states (float32) and what llama.cpp wrote of its cells.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

log = logging.getLogger(__name__)

MAGIC: Final = b"WHPREFX2"
BYTES_MAX: Final = 64 << 20
"""Of the file. A token of tools costs 1 KB a layer: some 5,000 tokens at twelve layers, a dozen tool sets."""
STALE_S: Final = 3_600.0
"""A half-written file of this age was left by a process that was killed while it wrote: a slow disk takes a minute."""
_LENGTH: Final = struct.Struct("<I")


class Key(msgspec.Struct, frozen=True):
    """What the cells depend on. Another value of any of them makes a saved file worthless. ``llama``: the version of
    llama-cpp-python, which the worker fills in once it has loaded it.
    """

    model_sha256: str
    layer: int
    style: str
    llama: str = ""


class Root(msgspec.Struct, frozen=True):
    """One tools block. ``tokens``: (n,) int32. ``states``: (n_tools, n_embd) float32 at the tool lines' ends.
    ``cells``: what ``Context.save`` gave.
    """

    tokens: npt.NDArray[np.int32]
    states: npt.NDArray[np.float32]
    cells: bytes


class _Sizes(msgspec.Struct):
    n_tokens: int
    n_states: int
    n_cells_bytes: int


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    key: Key
    n_embd: int
    roots: list[_Sizes]


def save(path: Path, key: Key, roots: Iterable[Root], *, bytes_max: int = BYTES_MAX) -> int:
    """Write the first roots that fit in ``bytes_max``; returns how many. Atomic, mode 0600. Raises OSError.

    ``roots`` may be lazy: it is not asked for another one once the file is full.
    """
    sizes: list[_Sizes] = []
    parts: list[bytes] = []
    total = n_embd = 0
    for root in roots:
        tokens, states = root.tokens.astype("<i4").tobytes(), root.states.astype("<f4").tobytes()
        total += len(tokens) + len(states) + len(root.cells)
        if total > bytes_max:
            break
        n_embd = root.states.shape[1]
        sizes.append(_Sizes(len(root.tokens), len(root.states), len(root.cells)))
        parts += (tokens, states, root.cells)
    header = msgspec.json.encode(_Header(key, n_embd, sizes))
    parts = [_LENGTH.pack(len(header)), header, *parts]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    path.parent.mkdir(parents=True, exist_ok=True)
    for other in path.parent.glob(f".{path.name}.*"):
        if time.time() - other.stat().st_mtime > STALE_S:
            other.unlink(missing_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines((MAGIC, digest.digest(), *parts))
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
    return len(sizes)


def load(path: Path, key: Key, n_embd: int, *, bytes_max: int = BYTES_MAX) -> list[Root]:
    """The roots saved under the same key; none, and a log line that says why, for any other file. Never raises."""
    try:
        with path.open("rb") as file:
            stat = os.fstat(file.fileno())
            if hasattr(os, "geteuid") and (stat.st_uid != os.geteuid() or stat.st_mode & 0o077):
                return _ignored("others_may_write_or_read_it")
            if stat.st_size > bytes_max + (1 << 20):
                return _ignored("too_large")
            data = file.read()
    except FileNotFoundError:
        return []
    except OSError as exc:
        return _ignored(type(exc).__name__)
    try:
        return _parse(data, key, n_embd)
    except _Foreign as exc:
        return _ignored(str(exc))


class _Foreign(Exception):
    """Not a file of ours, or of another model."""


def _ignored(cause: str) -> list[Root]:
    log.info("event=saved_prefixes_ignored cause=%s", cause)
    return []


def _parse(data: bytes, key: Key, n_embd: int) -> list[Root]:
    start = len(MAGIC) + hashlib.sha256().digest_size
    if not data.startswith(MAGIC) or len(data) < start + _LENGTH.size:
        raise _Foreign("not_such_a_file")
    body = memoryview(data)[start:]
    if hashlib.sha256(body).digest() != data[len(MAGIC) : start]:
        raise _Foreign("damaged")
    at = _LENGTH.size + _LENGTH.unpack_from(body)[0]
    try:
        header = msgspec.json.decode(body[_LENGTH.size : at], type=_Header)
    except msgspec.DecodeError as exc:
        raise _Foreign("damaged") from exc
    if header.key != key:
        raise _Foreign("other_weights_layer_style_or_llama_cpp")
    if header.roots and header.n_embd != n_embd:
        raise _Foreign("other_width")
    roots: list[Root] = []
    for sizes in header.roots:
        ends = [at + 4 * sizes.n_tokens]
        ends.append(ends[0] + 4 * sizes.n_states * n_embd)
        ends.append(ends[1] + sizes.n_cells_bytes)
        if ends[2] > len(body):
            raise _Foreign("damaged")
        tokens = np.frombuffer(body[at : ends[0]], dtype="<i4").astype(np.int32)
        states = np.frombuffer(body[ends[0] : ends[1]], dtype="<f4").astype(np.float32).reshape(-1, n_embd)
        roots.append(Root(tokens, states, bytes(body[ends[1] : ends[2]])))
        at = ends[2]
    return roots
