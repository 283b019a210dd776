"""Sends prepared HTTP requests over keep-alive connections and times them; a process of its own.

``python -m whetherman_edge.bench.load_client`` reads one JSON job a line from stdin and writes one JSON result a line.
Job: ``{"port", "bodies": [text…], "requests", "connections"}``; result: ``{"latency_ms": [...], "wall_s", "errors"}``.
With one connection each request waits for the last; with more, each connection keeps one request in flight.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time
from typing import Any

RECEIVE_BYTES = 1 << 18


class _Connection:
    """One keep-alive connection with at most one request in flight."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=60)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = b""
        self.sent_at_s = 0.0
        self.failed = False

    def send(self, request: bytes) -> None:
        self.sent_at_s = time.perf_counter()
        self.sock.sendall(request)

    def receive(self) -> bool:
        """Read what is there; True when the response is whole."""
        data = self.sock.recv(RECEIVE_BYTES)
        if not data:
            raise ConnectionError("the server closed the connection")
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = self._buffer[:end].lower()
        at = head.find(b"content-length:")
        if at >= 0:
            whole = len(self._buffer) >= end + 4 + int(head[at + 15 :].split(b"\r\n", 1)[0])
        else:
            whole = self._buffer.endswith(b"\r\n0\r\n\r\n")
        if whole:
            self.failed = not head.startswith(b"http/1.1 200")
            self._buffer = b""
        return whole


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """Run one job; see the module."""
    requests = [_request(job["port"], body.encode()) for body in job["bodies"]]
    connections = [_Connection(job["port"]) for _ in range(job["connections"])]
    latency_ms: list[float] = []
    errors = 0
    n_sent = 0
    started_s = time.perf_counter()
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection.sock, selectors.EVENT_READ, connection)
            connection.send(requests[n_sent % len(requests)])
            n_sent += 1
        while len(latency_ms) < job["requests"]:
            for key, _ in selector.select(60):
                connection = key.data
                if not connection.receive():
                    continue
                latency_ms.append((time.perf_counter() - connection.sent_at_s) * 1e3)
                errors += connection.failed
                if n_sent < job["requests"]:
                    connection.send(requests[n_sent % len(requests)])
                    n_sent += 1
    wall_s = time.perf_counter() - started_s
    for connection in connections:
        connection.sock.close()
    return {"latency_ms": latency_ms, "wall_s": wall_s, "errors": errors}


def _request(port: int, body: bytes) -> bytes:
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nUser-Agent: OpenAI/Python 1.99\r\n"
        b"Accept: application/json\r\nAccept-Encoding: gzip, deflate\r\nAuthorization: Bearer unused\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (port, len(body), body)
    )


if __name__ == "__main__":
    for line in sys.stdin:
        sys.stdout.write(json.dumps(run_job(json.loads(line))) + "\n")
        sys.stdout.flush()
