"""Profile files on this machine: find, list, load, import, export.

``NAME.json`` in the user's folder, else among the shipped ones. A name is never a path, and a file appears whole or not
at all.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import platformdirs

from whetherman_edge.errors import ProfileError, ProfileNotFound, UsageError
from whetherman_edge.profiles.schema import FILE_BYTES_MAX, Profile, parse_profile

log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_+@-]|\.(?!\.))*")
_NAME_CHARS_MAX = 64
_SUFFIX = ".json"

Check = Callable[[Profile, str], None]


class Stored(msgspec.Struct, frozen=True):
    """A profile file: ``profile`` is None and ``fault`` says why when it cannot be used. ``sha256``: of its bytes."""

    name: str
    path: Path
    sha256: str
    profile: Profile | None
    fault: str = ""


def default_dirs() -> tuple[Path, ...]:
    """Folders searched, in order: the user's, the package's, and in a checkout its ``profiles/``."""
    package = Path(__file__).resolve().parents[1]
    dirs = [Path(platformdirs.user_config_dir("whetherman")) / "profiles", package / "shipped" / "profiles"]
    root = package.parent
    if (root / "pyproject.toml").is_file():
        dirs.append(root / "profiles")
    return tuple(dirs)


class ProfileStore:
    """The profiles of some folders; the first is the one that is written to.

    ``check``: raises ProfileError for a profile that does not fit what is loaded (its engine, its features). Parsed
    files are kept and read again when they change on disk, so ``load`` may run for every request.
    """

    def __init__(self, dirs: Sequence[Path] | None = None, check: Check | None = None) -> None:
        self._dirs = tuple(dirs) if dirs is not None else default_dirs()
        self._check = check
        self._parsed: dict[Path, tuple[tuple[int, int], Profile]] = {}

    @property
    def writable_dir(self) -> Path:
        """Where imported profiles go."""
        return self._dirs[0]

    def load(self, name: str) -> Profile:
        """The profile of that name.  Raises ProfileNotFound, and ProfileError for a file that cannot be used.

        A file that was good and is broken now is refused, once and in the log; the profile read before stays in use.
        """
        path = self.find(name)
        try:
            stamp = _stamp(path)
        except OSError as exc:
            raise _unreadable(name, path, exc) from exc
        kept = self._parsed.get(path)
        if kept is not None and kept[0] == stamp:
            return kept[1]
        try:
            return self.reload(name)
        except ProfileError as exc:
            if kept is None:
                raise
            log.warning("event=profile_refused name=%s detail=%r hint=the_one_read_before_stays", name, str(exc))
            self._parsed[path] = (stamp, kept[1])
            return kept[1]

    def reload(self, name: str) -> Profile:
        """The profile of that name as its file is now.  Raises ProfileNotFound, ProfileError; what was read stays."""
        path = self.find(name)
        try:
            stamp = _stamp(path)
            profile = parse_profile(_read(path), name)
        except OSError as exc:
            raise _unreadable(name, path, exc) from exc
        if self._check is not None:
            self._check(profile, name)
        self._parsed[path] = (stamp, profile)
        return profile

    def find(self, name: str) -> Path:
        """The file of that name.  Raises ProfileNotFound naming close matches, or all there are."""
        if is_name(name):
            for folder in self._dirs:
                path = folder / (name + _SUFFIX)
                if path.is_file():
                    return path
        known = sorted({path.stem for path in self._paths()})
        close = difflib.get_close_matches(name, known, n=3)
        if close:
            hint = "did you mean " + " or ".join(map(repr, close)) + "?"
        elif known:
            hint = "there are " + ", ".join(known)
        else:
            hint = f"there are none: `whetherman-edge calibrate` makes one, `profile import` adds one ({self._dirs[0]})"
        raise ProfileNotFound(f"no profile named {_elided(name)}; {hint}")

    def list(self) -> list[Stored]:
        """All profiles by name, broken ones too; of two with one name the one that ``load`` would take."""
        found: dict[str, Stored] = {}
        for path in self._paths():
            if path.stem not in found:
                found[path.stem] = self._stored(path)
        return [found[name] for name in sorted(found)]

    def read(self, name: str) -> bytes:
        """The bytes of a profile's file, as they are.  Raises ProfileNotFound, ProfileError."""
        path = self.find(name)
        try:
            return _read(path)
        except OSError as exc:
            raise _unreadable(name, path, exc) from exc

    def save(self, name: str, data: bytes, *, overwrite: bool = False) -> Path:
        """Validate a profile's bytes and write them to the first folder, atomically; returns the file.

        Raises UsageError for a name that is none or is taken, ProfileError for bytes that are no profile.
        """
        if not is_name(name):
            raise UsageError(
                f"profile name: expected at most {_NAME_CHARS_MAX} letters, digits or . _ + @ -, got {_elided(name)}"
            )
        parse_profile(data, name)
        path = self._dirs[0] / (name + _SUFFIX)
        if path.exists() and not overwrite:
            raise UsageError(f"profile {name!r} exists already in {path.parent}; choose another name, or use --force")
        write_atomically(path, data)
        return path

    def _paths(self) -> Iterator[Path]:
        for folder in self._dirs:
            with contextlib.suppress(OSError):
                yield from sorted(
                    p for p in folder.iterdir() if p.suffix == _SUFFIX and is_name(p.stem) and p.is_file()
                )

    def _stored(self, path: Path) -> Stored:
        name = path.stem
        try:
            data = _read(path)
        except OSError as exc:
            return Stored(name, path, "", None, f"cannot be read: {exc.strerror}")
        sha256 = hashlib.sha256(data).hexdigest()
        try:
            profile = parse_profile(data, name)
        except ProfileError as exc:
            return Stored(name, path, sha256, None, str(exc))
        try:
            if self._check is not None:
                self._check(profile, name)
        except ProfileError as exc:
            return Stored(name, path, sha256, profile, str(exc))
        return Stored(name, path, sha256, profile)


def is_name(name: str) -> bool:
    """True for what may name a profile: it cannot leave the folder, hide, or be mistaken for a flag."""
    return len(name) <= _NAME_CHARS_MAX and _NAME.fullmatch(name) is not None


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees the old one or the new one, never a part.

    Raises ProfileError when the folder cannot be written.
    """
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".new-", delete=False) as file:
            temporary = Path(file.name)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as exc:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise ProfileError(f"{path} cannot be written: {exc.strerror}; choose another file or folder") from exc


def _unreadable(name: str, path: Path, exc: OSError) -> ProfileError:
    return ProfileError(f"profile {name!r}: {path} cannot be read: {exc.strerror}; check its permissions")


def _stamp(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(FILE_BYTES_MAX + 1)


def _elided(name: str) -> str:
    return repr(name if len(name) <= _NAME_CHARS_MAX else name[:_NAME_CHARS_MAX] + "…")
