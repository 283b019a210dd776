"""Notices that a client has left while nothing is read from it.

Where more has come than is kept (a body that the upstream does not take, requests sent ahead), the reading stops, and
with it the news of the client's end: its FIN stands behind bytes that nobody reads, often still in the client's own
kernel. Linux tells both ends apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import struct
from pathlib import Path
from typing import Any

# A client that left must be seen within 500 ms (field case S05).
LOOK_EVERY_S = 0.2
_GONE = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR
# States of the client's own socket once it has closed: FIN-WAIT-1 and -2, TIME-WAIT, LAST-ACK, CLOSING.
_CLOSED_STATES = frozenset({b"04", b"05", b"06", b"09", b"0B"})
_TABLES = {socket.AF_INET: Path("/proc/net/tcp"), socket.AF_INET6: Path("/proc/net/tcp6")}


class DepartureWatch:
    """Aborts a client's transport when the client has left; made when the reading stops, stopped when it goes on."""

    __slots__ = ("_loop", "_timer", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._timer = loop.call_later(LOOK_EVERY_S, self._look)

    def stop(self) -> None:
        """Look no more."""
        self._timer.cancel()

    def _look(self) -> None:
        if self._transport.is_closing():
            return
        if has_left(self._transport.get_extra_info("socket")):
            self._transport.abort()
            return
        self._timer = self._loop.call_later(LOOK_EVERY_S, self._look)


def has_left(connected: Any) -> bool:
    """True when the peer of a connected socket has closed it for certain; False also when that cannot be told."""
    if connected is None:
        return False
    poll = select.poll()
    poll.register(connected.fileno(), _GONE)
    if any(events & _GONE for _, events in poll.poll(0)):
        return True
    with contextlib.suppress(OSError, ValueError):
        return _closed_on_this_machine(connected.getpeername(), connected.getsockname())
    return False


def _closed_on_this_machine(peer: Any, own: Any) -> bool:
    """Look the client's end up in the kernel's table; on another machine, or in another namespace, it is not there."""
    if not isinstance(peer, tuple):
        return False  # a Unix socket, of which poll tells all
    host = str(peer[0]).removeprefix("::ffff:")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    wanted = [_row_address(family, peer), _row_address(family, own)]
    for line in _TABLES[family].read_bytes().splitlines():
        fields = line.split(None, 4)
        if fields[1:3] == wanted:
            return fields[3] in _CLOSED_STATES
    return False


def _row_address(family: socket.AddressFamily, address: Any) -> bytes:
    """An address as the table has it: 32-bit words in the machine's byte order, and the port."""
    packed = socket.inet_pton(family, str(address[0]).removeprefix("::ffff:").partition("%")[0])
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return b"".join(b"%08X" % word for word in words) + b":%04X" % address[1]
