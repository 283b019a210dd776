"""Client of the decision socket: ask a running Whetherman Edge without HTTP.

    with DecisionClient("/run/user/1000/whetherman.sock") as client:
        client.route("will it rain in Oslo?", {"weather": "Forecast", "mail": "Send an e-mail"})["choice"]
        client.decide({"model": "m", "messages": [...], "tools": [...]})["decision"]

One connection, one request at a time, blocking; use one client per thread. On the wire: a 4-byte big-endian length,
then msgpack (see service/decision_socket.py). Raises DecisionError for a request the daemon turns down, OSError for a
socket that is gone, TimeoutError after ``timeout_s``; after either of the last two the client is closed.
"""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgspec


class DecisionError(Exception):
    """The daemon's error reply. ``kind`` is its machine-readable type."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class DecisionClient:
    """Blocking client. ``path``: the socket file, with or without a ``unix:`` prefix."""

    def __init__(self, path: str, timeout_s: float = 5.0) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.connect(path.removeprefix("unix:"))
        except OSError:
            self._socket.close()
            raise

    def decide(self, request: dict[str, Any] | bytes, **fields: Any) -> dict[str, Any]:
        """What the gate makes of one chat body (a dict, or its JSON as bytes): the object of ``POST /v1/decide``."""
        return self.call("decide", request=request, **fields)

    def route(self, query: str, options: dict[str, Any]) -> dict[str, Any]:
        """Which option fits the query: ``choice``, ``probabilities``, ``confidence``, ``ms``."""
        return self.call("route", query=query, options=options)

    def call(self, op: str, **fields: Any) -> dict[str, Any]:
        """Send one request and wait for its reply."""
        payload = msgspec.msgpack.encode({"op": op, **fields})
        try:
            self._socket.sendall(struct.pack(">I", len(payload)) + payload)
            reply = msgspec.msgpack.decode(self._read(struct.unpack(">I", self._read(4))[0]), type=dict[str, Any])
        except OSError:
            self._socket.close()  # a reply that comes late would be taken for the next request's
            raise
        if "error" in reply:
            raise DecisionError(reply["error"]["type"], reply["error"]["message"])
        result: dict[str, Any] = reply["result"]
        return result

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            data += (part := self._socket.recv(size - len(data)))
            if not part:
                raise ConnectionError("the daemon closed the decision socket")
        return bytes(data)

    def __enter__(self) -> DecisionClient:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._socket.close()
