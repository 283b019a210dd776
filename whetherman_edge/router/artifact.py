"""The router's one file: a safetensors layout, mapped read-only and checked before anything reads it.

    8 bytes little-endian header length | JSON header | data section

The header's ``__metadata__`` carries ``format``, ``version`` and ``sha256`` of the data section. The file is hashed
with plain reads (page cache, not resident memory) and then mapped, so that processes share its pages and an untouched
row of the table costs nothing. Every way a file can be wrong ends in ArtifactError.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import numpy as np
import numpy.typing as npt

from whetherman_edge.errors import ArtifactError

FORMAT: Final = "whetherman-router"
VERSION: Final = "1"
HEADER_BYTES_MAX: Final = 1 << 20  # a few dozen sections need 4 KiB; safetensors itself stops at 100 MB
FILE_BYTES_MAX: Final = 64 << 20  # the shipped file is under 10 MB; a larger one is not ours
READ_BYTES: Final = 1 << 18  # hashing block: small, because it is resident while we hash

DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "I32": np.dtype("<i4"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
}


class Section(msgspec.Struct, frozen=True):
    """Where one array lies: ``offset`` counts from the start of the file, in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


class Artifact:
    """An open router file. Arrays are read-only views of the mapping; they keep it alive."""

    def __init__(self, path: Path, buffer: mmap.mmap, sections: Mapping[str, Section], sha256: str) -> None:
        self.path = path
        self.sha256 = sha256
        self._buffer = buffer
        self._sections = sections

    def __contains__(self, name: str) -> bool:
        return name in self._sections

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all sections, sorted."""
        return tuple(sorted(self._sections))

    def array(self, name: str, dtype: str, ndim: int) -> npt.NDArray[Any]:
        """The section ``name`` as a read-only view.

        Raises ArtifactError when it is absent or of another dtype or rank.
        """
        section = self._sections.get(name)
        if section is None:
            raise self._fault(f"expected a section {name!r}, found {', '.join(self.names) or 'none'}")
        if section.dtype != dtype or len(section.shape) != ndim:
            raise self._fault(
                f"expected section {name!r} as {dtype} of rank {ndim}, found {section.dtype} {list(section.shape)}"
            )
        count = 1
        for length in section.shape:
            count *= length
        flat = np.frombuffer(self._buffer, dtype=DTYPES[dtype], count=count, offset=section.offset)
        return flat.reshape(section.shape)

    def text(self, name: str) -> bytes:
        """A one-dimensional byte section, copied out."""
        return self.array(name, "U8", 1).tobytes()

    def json(self, name: str) -> dict[str, Any]:
        """A byte section that holds one JSON object."""
        try:
            value = json.loads(self.text(name))
        except (ValueError, RecursionError) as exc:
            raise self._fault(f"expected JSON in section {name!r}") from exc
        if not isinstance(value, dict):
            raise self._fault(f"expected a JSON object in section {name!r}, found {type(value).__name__}")
        return value

    def _fault(self, what: str) -> ArtifactError:
        return fault(self.path, what)


def fault(path: Path, what: str) -> ArtifactError:
    """An ArtifactError that names the file, the finding and the fix."""
    return ArtifactError(
        f"router artifact {path}: {what}. Reinstall the package, rebuild it with "
        "`python -m convert.build_router`, or unset WHETHERMAN_ROUTER."
    )


def open_artifact(path: Path | str) -> Artifact:
    """Map and check the file at ``path``.

    Raises ArtifactError for a missing, unreadable, truncated, corrupt, foreign or newer file.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if not 8 < size <= FILE_BYTES_MAX:
                raise fault(path, f"expected 9 to {FILE_BYTES_MAX} bytes, found {size}")
            prefix = file.read(8)
            header_size = int.from_bytes(prefix, "little")
            if header_size > min(HEADER_BYTES_MAX, size - 8):
                raise fault(path, f"header length {header_size} does not fit a file of {size} bytes")
            raw = file.read(header_size)
            metadata, sections = parse_header(path, raw, size)
            sha256, data_sha256 = _digests(file, prefix + raw)
            if data_sha256 != metadata["sha256"]:
                raise fault(path, "sha256 of the data does not match its header: the file is corrupt or truncated")
            buffer = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    except OSError as exc:
        raise fault(path, f"cannot be read ({exc.strerror or exc})") from exc
    return Artifact(path, buffer, sections, sha256)


def _digests(file: Any, head: bytes) -> tuple[str, str]:
    """sha256 of the whole file and of its data section; ``file`` stands at the start of the data."""
    whole, data = hashlib.sha256(head), hashlib.sha256()
    while block := file.read(READ_BYTES):
        whole.update(block)
        data.update(block)
    return whole.hexdigest(), data.hexdigest()


def parse_header(path: Path, raw: bytes, file_size: int) -> tuple[dict[str, str], dict[str, Section]]:
    """Metadata and sections of a header; ``file_size`` in bytes. Raises ArtifactError."""
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as exc:
        raise fault(path, "header is not JSON") from exc
    if not isinstance(header, dict):
        raise fault(path, "header is not a JSON object")
    metadata = header.pop("__metadata__", None)
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise fault(path, f"expected metadata format={FORMAT}, found another kind of safetensors file")
    if metadata.get("version") != VERSION:
        raise fault(path, f"expected version {VERSION}, found {str(metadata.get('version'))[:20]!r}")
    if not isinstance(metadata.get("sha256"), str):
        raise fault(path, "metadata has no sha256")
    data_start = 8 + len(raw)
    sections = {}
    for name, entry in header.items():
        sections[name] = _section(path, name, entry, data_start, file_size)
    return cast("dict[str, str]", metadata), sections


def _section(path: Path, name: str, entry: object, data_start: int, file_size: int) -> Section:
    """One checked header entry."""
    if not isinstance(entry, dict):
        raise fault(path, f"section {name[:40]!r} is not an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise fault(path, f"section {name[:40]!r} has an unknown dtype")
    if not _is_counts(shape) or not _is_counts(offsets) or len(cast("list[int]", offsets)) != 2:
        raise fault(path, f"section {name[:40]!r} has a malformed shape or offsets")
    shape, (begin, end) = cast("list[int]", shape), cast("list[int]", offsets)
    count = 1
    for length in shape:
        count *= length
    item = DTYPES[dtype].itemsize
    if not 0 <= begin <= end <= file_size - data_start or end - begin != count * item:
        raise fault(path, f"section {name[:40]!r} lies outside the file or does not match its shape")
    if (data_start + begin) % item:
        raise fault(path, f"section {name[:40]!r} is not aligned to its items")
    return Section(name=name, dtype=dtype, shape=tuple(shape), offset=data_start + begin, size_bytes=end - begin)


def _is_counts(value: object) -> bool:
    """True for a short list of non-negative integers."""
    return (
        isinstance(value, list) and len(value) <= 8 and all(type(v) is int and 0 <= v <= FILE_BYTES_MAX for v in value)
    )


def write_artifact(path: Path, arrays: Mapping[str, npt.NDArray[Any]], extra: Mapping[str, str]) -> str:
    """Write ``arrays`` in the layout above, atomically; returns the sha256 of the file. Used by ``convert/`` only.

    Sections are laid out by falling item size, so that each is aligned; the header is padded to 64 bytes.
    """
    codes = {dtype: code for code, dtype in DTYPES.items()}
    header: dict[str, Any] = {}
    blobs: list[bytes] = []
    position = 0
    for name, array in sorted(arrays.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
        blob = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": codes[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [position, position + len(blob)],
        }
        blobs.append(blob)
        position += len(blob)
    data = b"".join(blobs)
    digest = hashlib.sha256(data).hexdigest()
    header["__metadata__"] = {"format": FORMAT, "version": VERSION, "sha256": digest, **extra}
    raw = json.dumps(header, separators=(",", ":"), sort_keys=True).encode()
    raw += b" " * (-(len(raw) + 8) % 64)
    content = len(raw).to_bytes(8, "little") + raw + data
    temporary = path.with_suffix(".partial")
    temporary.write_bytes(content)
    temporary.replace(path)
    return hashlib.sha256(content).hexdigest()
