"""The sending half of one socket: what both the client's and the upstream's connections do alike."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import cast

_LINGER_RESET = struct.pack("ii", 1, 0)


class Sending(asyncio.Protocol):
    """Writes with back-pressure. ``transport`` is None until the connection is made, and stays when it is lost."""

    __slots__ = ("_drained", "_loop", "_lost", "transport")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._drained: asyncio.Future[None] | None = None
        self._lost = False
        self.transport: asyncio.Transport | None = None

    @property
    def connected(self) -> bool:
        """Bytes can still be sent."""
        return not self._lost and self.transport is not None and not self.transport.is_closing()

    def write(self, data: bytes) -> None:
        """Send bytes, or keep them until the peer takes them. Raises ConnectionResetError when it has gone."""
        transport = self.transport
        if self._lost or transport is None or transport.is_closing():
            raise ConnectionResetError("the connection was closed")
        transport.write(data)

    @property
    def stalled(self) -> bool:
        """The peer takes no more bytes for now: ``drain`` would wait."""
        return self._drained is not None

    async def drain(self) -> None:
        """Wait while the peer takes no more bytes. Raises ConnectionResetError when the connection goes."""
        if self._lost:
            raise ConnectionResetError("the connection was closed")
        if self._drained is not None:
            await self._drained

    def close(self) -> None:
        """Close, after what is written has been sent."""
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        """Close at once."""
        if self.transport is not None:
            self.transport.abort()

    def reset(self) -> None:
        """Abort with a TCP reset: for a peer that must not take what it has for a whole message, or reads no more."""
        connected = self.transport.get_extra_info("socket") if self.transport is not None else None
        if connected is not None and connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RESET)
        self.abort()

    # ---- for the event loop --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's are not asyncio's by inheritance

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._lost = True
        if self._drained is not None:
            if not self._drained.done():
                self._drained.set_exception(ConnectionResetError("the connection was closed"))
                self._drained.exception()  # seen, also when nobody waits
            self._drained = None

    def pause_writing(self) -> None:
        if self._drained is None:
            self._drained = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._drained is not None:
            if not self._drained.done():
                self._drained.set_result(None)
            self._drained = None
