"""Listening sockets: bound before anything else starts, with errors that say what to do."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from whetherman_edge.errors import ConfigError, EnvironmentFault, PortTaken

BACKLOG = 512
# Only the user who runs the daemon may connect.
UNIX_MODE = 0o600
# A starting daemon holds the lock for about a millisecond, or one second while a stale socket's owner does not answer.
LOCK_WAIT_S = 3.0
LOCK_PAUSE_S = 0.01


def bind_tcp(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises PortTaken, or ConfigError for a host that is not ours to bind."""
    name = host.strip("[]")
    try:
        infos = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as exc:
        raise ConfigError(f"host: cannot resolve {host!r}: {exc.strerror}") from exc
    # "localhost" may mean ::1 and 127.0.0.1; the IPv4 one is what clients try, so it goes first.
    family, kind, proto, _, address = min(infos, key=lambda info: info[0] != socket.AF_INET)
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as exc:
        listener.close()
        if exc.errno == errno.EADDRINUSE:
            raise PortTaken(
                f"port {port} on {host} is taken by another program; stop it, or choose another with --port"
            ) from exc
        if exc.errno == errno.EACCES:
            raise EnvironmentFault(
                f"port {port} on {host} needs privileges; choose one above 1023 with --port"
            ) from exc
        raise ConfigError(f"host: cannot listen on {host}:{port}: {exc.strerror}") from exc
    listener.setblocking(False)
    return listener


def bind_unix(path: str) -> socket.socket:
    """A listening Unix socket with mode 0600.

    A socket file that nobody listens on any more is replaced; one that answers, any other kind of file, and a symbolic
    link are left alone. The file is created under a restrictive umask, so that there is no moment with wider access.
    Two daemons that start at once take turns, so that neither removes the socket that the other has just made.
    Raises PortTaken and ConfigError.
    """
    file = Path(path)
    check_length(path)
    with _alone_in(file.parent):
        _clear_stale(file)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            listener.bind(path)
        except OSError as exc:
            listener.close()
            if exc.errno == errno.EADDRINUSE:
                raise PortTaken(f"socket {path} is taken by another program") from exc
            raise ConfigError(f"listen: cannot create the socket {path}: {exc.strerror}") from exc
        finally:
            os.umask(before)
        listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


def check_length(path: str) -> None:
    """Raise ConfigError for a path that no Unix socket can have."""
    if len(os.fsencode(path)) > 107:  # sun_path of Linux, with its closing NUL; macOS has 104
        raise ConfigError(f"listen: expected a socket path of at most 107 bytes, got {len(os.fsencode(path))}")


def unlink_unix(path: str) -> None:
    """Remove our socket file at shutdown; quiet when it has gone already."""
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, so that looking for a stale socket and making ours is one step for all daemons.

    A folder that cannot be opened cannot be locked; binding there fails with a better message.
    """
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield
        return
    try:
        deadline_s = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as exc:
                if exc.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    break  # a file system without locks; the check itself still holds for all but simultaneous starts
                if time.monotonic() > deadline_s:
                    raise PortTaken(f"folder {folder} is locked by another program; choose another path") from exc
            time.sleep(LOCK_PAUSE_S)
        yield
    finally:
        os.close(handle)


def _clear_stale(file: Path) -> None:
    try:
        mode = os.lstat(file).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        what = "a symbolic link" if stat.S_ISLNK(mode) else "another kind of file"
        raise ConfigError(f"listen: {file} exists and is {what}; remove it or choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(file))
        except (ConnectionRefusedError, FileNotFoundError):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file)
            return
        except OSError as exc:
            raise PortTaken(f"socket {file} is in use and does not answer: {exc.strerror}") from exc
    raise PortTaken(f"socket {file} is taken by another program; stop it, or choose another path with --listen")
