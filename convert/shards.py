"""Safetensors files read one tensor at a time: a single file or the shards of an index, bfloat16 included.

The safetensors package's NumPy reader has no bfloat16, which most checkpoints are; the format is a JSON header and flat
bytes, so it is mapped and read here. Nothing is held in memory but the tensor (or the rows) asked for.
"""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from whetherman_edge.errors import ArtifactError

F32 = npt.NDArray[np.float32]
INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
HEADER_MAX: Final = 100_000_000
_DTYPES: Final = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


class Entry(msgspec.Struct, frozen=True):
    """Where one tensor lies: a key of _DTYPES, its shape in NumPy's order, first and last byte after the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Shard:
    """One safetensors file, mapped. Raises ArtifactError when it is missing, cut short or no safetensors file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                head = file.read(8)
                length = int.from_bytes(head, "little")
                if len(head) < 8 or length > HEADER_MAX:
                    raise ArtifactError(f"{path.name}: expected a safetensors file, it does not begin like one")
                header = json.loads(file.read(length))
                self._start = 8 + length
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as exc:
            raise ArtifactError(f"{path.name}: expected a safetensors file to read: {exc.strerror or exc}") from exc
        except ValueError as exc:  # JSON, UTF-8
            raise ArtifactError(f"{path.name}: expected a safetensors header, it is broken or cut short") from exc
        header.pop("__metadata__", None)
        try:
            self.entries = {name: msgspec.convert(entry, Entry) for name, entry in header.items()}
        except (msgspec.ValidationError, AttributeError) as exc:
            raise ArtifactError(f"{path.name}: expected a safetensors header, {exc}") from exc
        end = self._start + max((e.data_offsets[1] for e in self.entries.values()), default=0)
        if end != len(self._map):
            raise ArtifactError(
                f"{path.name}: expected {end} bytes, it has {len(self._map)}; the file is cut short, fetch it again"
            )
        for name, entry in self.entries.items():
            self._check(name, entry)

    def _check(self, name: str, entry: Entry) -> None:
        if entry.dtype not in _DTYPES:
            raise ArtifactError(f"{self.path.name}: {name} is {entry.dtype}; expected one of {', '.join(_DTYPES)}")
        wanted = int(np.prod(entry.shape, dtype=np.int64)) * np.dtype(_DTYPES[entry.dtype]).itemsize
        if entry.data_offsets[0] < 0 or entry.data_offsets[1] - entry.data_offsets[0] != wanted:
            raise ArtifactError(f"{self.path.name}: {name} has a shape that does not fit its bytes")

    def rows(self, name: str, start: int = 0, end: int | None = None) -> F32:
        """Rows ``start`` to ``end`` of a tensor (all of it by default) as float32."""
        entry = self.entries[name]
        kind = np.dtype(_DTYPES[entry.dtype])
        flat = np.frombuffer(
            self._map, kind, int(np.prod(entry.shape, dtype=np.int64)), self._start + entry.data_offsets[0]
        )
        part = flat.reshape(entry.shape)[start:end]
        if entry.dtype == "BF16":  # the upper half of a float32
            return (part.astype(np.uint32) << 16).view(np.float32)
        return part.astype(np.float32)


class Weights:
    """Every tensor of a folder, whichever file it is in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        names = _files(folder)
        self.shards = [Shard(folder / name) for name in sorted(set(names.values()) or {SINGLE})]
        self._of = {name: shard for shard in self.shards for name in shard.entries}
        missing = sorted(set(names) - set(self._of))
        if missing:
            raise ArtifactError(f"{folder.name}: the index promises {missing[0]!r}, no shard has it")

    def __contains__(self, name: str) -> bool:
        return name in self._of

    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return sorted(self._of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises ArtifactError when there is no such tensor."""
        if name not in self._of:
            raise ArtifactError(f"{self.folder.name}: expected a tensor {name!r}, there is none")
        return self._of[name].entries[name].shape

    def rows(self, name: str, start: int = 0, end: int | None = None) -> F32:
        """As Shard.rows. Raises ArtifactError when there is no such tensor."""
        self.shape(name)
        return self._of[name].rows(name, start, end)


def _files(folder: Path) -> dict[str, str]:
    """Tensor name to file name by the index; empty when the folder has one file."""
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX)
        names = index.get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(v, str) and Path(v).name == v for v in names.values()):
            raise ArtifactError(f"{INDEX}: expected a weight_map of tensor to file names")
        return names
    if not (folder / SINGLE).is_file():
        pickled = sorted(p.name for p in folder.glob("*.bin"))
        hint = f" ({pickled[0]} is a pickle, which is not read: save it as safetensors)" if pickled else ""
        raise ArtifactError(f"{folder}: expected {SINGLE} or {INDEX}, there is neither{hint}")
    return {}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ArtifactError."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except OSError as exc:
        raise ArtifactError(f"{path.name}: expected a file to read: {exc.strerror or exc}") from exc
    except ValueError as exc:
        raise ArtifactError(f"{path.name}: expected JSON ({exc})") from exc
    if not isinstance(value, dict):
        raise ArtifactError(f"{path.name}: expected a JSON object")
    return value
