"""systemd's two small protocols, without libsystemd: readiness messages out, listening sockets in.

sd_notify(3): datagrams to the socket that ``NOTIFY_SOCKET`` names. sd_listen_fds(3): sockets from descriptor 3 on,
meant for the process that ``LISTEN_PID`` names and no other. Outside systemd every function here does nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, MutableMapping

from whetherman_edge.errors import ConfigError

log = logging.getLogger(__name__)

LISTEN_FDS_START = 3
# A unit has one or two sockets; a number beyond this is a mistake, not a wish.
LISTEN_FDS_MAX = 16
# systemd asks for a message within the time; half of it is what sd_watchdog_enabled(3) recommends.
WATCHDOG_SHARE = 0.5
# What ends behind the drain: the backbone's thread, the ledger's last batch, an embedded model server.
CLOSING_S = 20.0


class Notifier:
    """Sends state to the service manager. ``watchdog_s``: how often it wants to hear from us; 0.0: never."""

    def __init__(self, address: str = "", watchdog_s: float = 0.0) -> None:
        self._address = address
        self.watchdog_s = watchdog_s

    def send(self, *lines: str) -> bool:
        """Send ``KEY=value`` lines as one datagram; False when there is no manager, or it does not listen."""
        if not self._address:
            return False
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
                channel.setblocking(False)
                channel.sendto("\n".join(lines).encode("utf-8"), address)
        except OSError as exc:
            log.warning("event=notify_failed errno=%s", exc.errno)
            return False
        return True

    def draining(self, drain_s: float) -> None:
        """Have the manager wait for the drain and what ends behind it, however short the unit's TimeoutStopSec= is.

        That is of the day when the unit was written; the drain's time may have been set since, also by a reload.
        """
        self.send(f"EXTEND_TIMEOUT_USEC={round((drain_s + CLOSING_S) * 1e6)}")

    @contextlib.asynccontextmanager
    async def beating(self) -> AsyncIterator[None]:
        """Send the watchdog's heartbeat from the event loop inside the block: a loop that hangs is restarted."""
        if not self._address or self.watchdog_s <= 0.0:
            yield
            return
        beat = asyncio.create_task(self._beat(), name="watchdog")
        try:
            yield
        finally:
            beat.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await beat

    async def _beat(self) -> None:
        while True:
            self.send("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_s * WATCHDOG_SHARE)


def take_notifier(environ: MutableMapping[str, str] | None = None, pid: int | None = None) -> Notifier:
    """The manager's channel; its variables are removed, so that a model server we start does not speak for us.

    An address that is neither a path nor an abstract name (``@…``) is of a newer protocol, and left alone.
    """
    values = os.environ if environ is None else environ
    address = values.pop("NOTIFY_SOCKET", "")
    usec, meant = values.pop("WATCHDOG_USEC", ""), values.pop("WATCHDOG_PID", "")
    if not address.startswith(("/", "@")) or len(address) < 2:
        address = ""
    mine = not meant or meant == str(os.getpid() if pid is None else pid)
    watchdog_s = int(usec) / 1e6 if mine and usec.isdecimal() else 0.0
    return Notifier(address, watchdog_s)


def take_listeners(
    environ: MutableMapping[str, str] | None = None, pid: int | None = None, first: int = LISTEN_FDS_START
) -> list[socket.socket]:
    """The listening sockets that systemd passed to this process; [] when there are none, or they are not for us.

    The variables are removed either way. Raises ConfigError for a descriptor that is no listening stream socket.
    """
    values = os.environ if environ is None else environ
    meant, count_text = values.pop("LISTEN_PID", ""), values.pop("LISTEN_FDS", "")
    values.pop("LISTEN_FDNAMES", None)
    if meant != str(os.getpid() if pid is None else pid) or not count_text.isdecimal():
        return []
    count = int(count_text)
    if count > LISTEN_FDS_MAX:
        raise ConfigError(f"LISTEN_FDS: expected at most {LISTEN_FDS_MAX} sockets, got {count}; fix the .socket unit")
    taken: list[socket.socket] = []
    try:
        taken.extend(_listening(fd) for fd in range(first, first + count))
    except ConfigError:
        for listener in taken:
            listener.close()
        raise
    return taken


def _listening(fd: int) -> socket.socket:
    expected = f"descriptor {fd} from systemd: expected a listening stream socket (ListenStream=, Accept=no)"
    try:
        listener = socket.socket(fileno=fd)
    except OSError as exc:
        raise ConfigError(f"{expected}, got none: {exc.strerror}") from exc
    families = (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX)
    if listener.family not in families or listener.type != socket.SOCK_STREAM or not _accepts(listener):
        listener.detach()
        raise ConfigError(f"{expected}, got another kind; fix the .socket unit")
    listener.set_inheritable(False)
    listener.setblocking(False)
    return listener


def _accepts(listener: socket.socket) -> bool:
    try:
        return listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
    except OSError:
        return True  # macOS has no such question for Unix sockets
