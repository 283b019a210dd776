"""The real thing: a llama.cpp server with real weights, a hop that records what reaches it, the daemon as a process.

Weights come through the project's own store, so a machine without them fetches them once; where that fails the tests
fail, they do not skip.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.fakes.upstream import TIME_FACTOR
from whetherman_edge.backbone import store
from whetherman_edge.backbone.progress import ConsoleProgress
from whetherman_edge.service import embedded

START_S = 120.0 * TIME_FACTOR
"""A cold start of a model on a busy two-core machine; nothing is measured here."""


@dataclass
class Recorded:
    """One request that reached the model server: its request line and its exact body bytes."""

    line: str
    body: bytes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.body).hexdigest()

    def json(self):
        return json.loads(self.body)


class RecordingHop:
    """A TCP relay in front of the model server that keeps every request. It changes nothing in either direction."""

    def __init__(self, port: int) -> None:
        self._upstream_port = port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="recording-hop")
        self.seen: list[Recorded] = []
        self.url = ""

    def __enter__(self) -> RecordingHop:
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(START_S)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_exc: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(START_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def chats(self) -> list[Recorded]:
        return [one for one in self.seen if one.line.startswith("POST /v1/chat/completions")]

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._relay, "127.0.0.1", 0)

    async def _close(self) -> None:
        self._server.close()
        tasks = asyncio.all_tasks(self._loop) - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._upstream_port)
        try:
            back = asyncio.create_task(self._copy(up_reader, writer))
            await self._requests(reader, up_writer)
            up_writer.close()
            await back
        finally:
            writer.close()
            up_writer.close()

    async def _requests(self, reader: asyncio.StreamReader, up_writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
                body = await reader.readexactly(int(length[1])) if length else b""
                self.seen.append(Recorded(head.split(b"\r\n", 1)[0].decode(), body))
                up_writer.write(head + body)
                await up_writer.drain()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
            writer.close()


@dataclass
class Daemon:
    """``whetherman-edge serve`` as a process. ``log``: its stderr lines so far."""

    process: subprocess.Popen[str]
    url: str = ""
    log: list[str] = field(default_factory=list)

    def interrupt(self) -> int:
        """What Ctrl-C does. Returns the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(START_S)


@contextlib.contextmanager
def serving(*flags: str, home: Path, env: dict[str, str] | None = None) -> Iterator[Daemon]:
    """Starts the daemon on a free port with an empty home, and ends it with SIGTERM."""
    command = [sys.executable, "-m", "whetherman_edge", "serve", "--port", "0", *flags]
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("WHETHERMAN_", "XDG_"))}
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        cwd=home,
        env={**clean, "HOME": str(home), "PYTHONPATH": str(Path(__file__).resolve().parents[2]), **(env or {})},
    )
    daemon = Daemon(process)
    listening = threading.Event()

    def drain() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            daemon.log.append(line.rstrip("\n"))
            if (match := re.search(r"event=listening urls=(http://[^,\s]+)", line)) is not None:
                daemon.url = match[1]
                listening.set()
        listening.set()

    reader = threading.Thread(target=drain)
    reader.start()
    try:
        assert listening.wait(START_S * 5), daemon.log
        assert daemon.url, "\n".join(daemon.log)
        yield daemon
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(START_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        reader.join()
        assert process.stderr is not None
        process.stderr.close()


@pytest.fixture(scope="session")
def weights() -> Callable[[str], store.Installed]:
    """Installs weights by name through the store; fails, with the store's message, where that is not possible."""
    return lambda name: store.ensure(name, ConsoleProgress())


@pytest.fixture(scope="session")
def llama_port(weights: Callable[[str], store.Installed]) -> Iterator[int]:
    """A real llama.cpp server with Qwen2.5-Coder 0.5B, tools template included; one for the whole run."""
    command = embedded.child_command(weights("qwen-0.5b").path, "qwen-0.5b", 0)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        yield int(json.loads(server.stdout.readline())["url"].rsplit(":", 1)[1])
        server.kill()


@pytest.fixture
def hop(llama_port: int) -> Iterator[RecordingHop]:
    with RecordingHop(llama_port) as relay:
        yield relay
