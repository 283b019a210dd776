"""``--upstream embedded``: a real llama.cpp server in a child process, kept running while the daemon runs.

``EmbeddedServer(weights, alias)`` starts ``service.embedded_server`` on a free loopback port, waits until it answers
``/health``, and starts it again on the same port when it dies. The child never outlives the daemon: its stdin closes
with us, on Linux the kernel kills it as well, and ``stop`` ends it. It runs in a session of its own, so a Ctrl-C in the
terminal reaches the daemon alone.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic

from whetherman_edge.errors import EnvironmentFault

CTX_TOKENS = 8192
"""Room for an agent's system text, a dozen tools and a few turns; SmolLM2 was trained to this length."""
READY_TIMEOUT_S = 300.0
"""Loading is a second on a fast disk; a cold spinning disk and a 1 GB file may take minutes."""
SAY_EVERY_S = 2.0
HEALTH_TIMEOUT_S = 10.0
TERM_GRACE_S = 3.0
BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 30.0
HEALTHY_AFTER_S = 60.0
"""A server that lived this long earned a quick restart again."""
STDERR_LINES = 12
LINE_BYTES_MAX = 1 << 16

log = logging.getLogger(__name__)


def child_command(weights: Path, alias: str, port: int) -> list[str]:
    """Command line of the child; ``port`` 0 lets the kernel choose."""
    module = "whetherman_edge.service.embedded_server"
    fixed = ["--weights", str(weights), "--alias", alias, "--port", str(port), "--ctx-tokens", str(CTX_TOKENS)]
    return [sys.executable, "-m", module, *fixed, "--parent", str(os.getpid())]


def check_installed() -> None:
    """Raises EnvironmentFault, with the fix, when the llama.cpp wheel is not in this environment."""
    if importlib.util.find_spec("xllamacpp") is None:
        raise EnvironmentFault(
            "expected the package xllamacpp (a prebuilt llama.cpp server) for --upstream embedded, found none; "
            "run `pip install 'whetherman-edge[embedded]'`, or name a server of yours with --upstream URL"
        )


class EmbeddedServer:
    """Owns the child process. ``start`` once, then ``stop``; both from the loop that runs the daemon.

    ``weights``: a GGUF file. ``alias``: the model name clients see in ``/v1/models``.
    """

    def __init__(self, weights: Path, alias: str) -> None:
        self._weights = weights
        self._alias = alias
        self._child: asyncio.subprocess.Process | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._stderr: deque[str] = deque(maxlen=STDERR_LINES)
        self._port = 0
        self._up = asyncio.Event()
        self.url = ""
        self.restarts = 0

    @property
    def ready(self) -> bool:
        """Whether the server listened and answered when last heard of."""
        return self._up.is_set()

    async def wait_ready(self) -> None:
        """Returns as soon as the server is ready, at once if it is."""
        await self._up.wait()

    @property
    def pid(self) -> int | None:
        """Process id of the running child."""
        child = self._child
        return child.pid if child is not None and child.returncode is None else None

    async def start(self) -> str:
        """Starts the server and waits until it is healthy. Returns its base URL, without a path.

        Raises EnvironmentFault if it cannot start; nothing is left running then, nor when the caller is cancelled.
        """
        check_installed()
        started_s = monotonic()
        try:
            await self._launch()
        except BaseException:
            await self._end_child()
            raise
        self._supervisor = asyncio.create_task(self._supervise(), name="embedded-supervisor")
        log.info("event=embedded_ready url=%s model=%s seconds=%.1f", self.url, self._alias, monotonic() - started_s)
        return self.url

    async def stop(self) -> None:
        """Ends the child and waits for it. Safe to call twice, and after a failed start."""
        self._up.clear()
        if self._supervisor is not None:
            self._supervisor.cancel()
            with suppress(asyncio.CancelledError):
                await self._supervisor
            self._supervisor = None
        await self._end_child()

    async def _launch(self) -> None:
        """Starts one child and sets ``url`` once it is healthy. Raises EnvironmentFault."""
        self._stderr.clear()
        child = await asyncio.create_subprocess_exec(
            *child_command(self._weights, self._alias, self._port),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=LINE_BYTES_MAX,
            start_new_session=True,
        )
        self._child = child
        assert child.stdout is not None
        assert child.stderr is not None
        drain = asyncio.create_task(self._drain(child.stderr), name="embedded-stderr")
        try:
            line = await self._first_line(child.stdout)
        except BaseException:
            drain.cancel()
            raise
        if not line:
            await child.wait()
            await drain
            raise EnvironmentFault(self._start_failure(child.returncode))
        self.url = json.loads(line)["url"]
        self._port = int(self.url.rsplit(":", 1)[1])
        await self._check_health()
        self._up.set()
        self._drain_task = drain  # keeps the task referenced; it ends with the child's stderr

    async def _first_line(self, stdout: asyncio.StreamReader) -> bytes:
        """The child's one line, or b"" when it died. Says every two seconds that it still loads."""
        reading = asyncio.ensure_future(stdout.readline())
        started_s = monotonic()
        try:
            while True:
                done, _ = await asyncio.wait({reading}, timeout=SAY_EVERY_S)
                if done:
                    return reading.result()
                waited_s = monotonic() - started_s
                if waited_s > READY_TIMEOUT_S:
                    raise EnvironmentFault(
                        f"expected the embedded server to load {self._weights.name} within {READY_TIMEOUT_S:.0f} s, "
                        "it did not; try a smaller model with WHETHERMAN_EMBEDDED_MODEL"
                    )
                log.info("event=embedded_loading model=%s seconds=%.0f", self._alias, waited_s)
        finally:
            reading.cancel()

    async def _check_health(self) -> None:
        """One GET /health over a plain connection: the listener is up and answers as llama.cpp does."""
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                try:
                    writer.write(b"GET /health HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
                    status = await reader.readline()
                finally:
                    writer.close()
        except (OSError, TimeoutError) as exc:
            raise EnvironmentFault(f"expected the embedded server to answer {self.url}/health: {exc!r}") from exc
        if b" 200 " not in status:
            raise EnvironmentFault(f"expected 200 from {self.url}/health, got {status[:60]!r}")

    async def _drain(self, stderr: asyncio.StreamReader) -> None:
        """Reads llama.cpp's log so that its pipe never fills; the last lines explain a failed start.

        Once requests run, a line could quote one. Only assertion failures, which name source lines, are logged then.
        """
        while True:
            try:
                raw = await stderr.readline()
            except ValueError:  # a line beyond LINE_BYTES_MAX; the reader has dropped it
                continue
            if not raw:
                return
            line = raw.decode("utf-8", "replace").rstrip()
            if not self.ready:
                self._stderr.append(line)
            elif "GGML_ASSERT" in line or "ggml_abort" in line:
                log.error("event=embedded_abort line=%r", line[:300])

    async def _supervise(self) -> None:
        """Starts the child again whenever it ends. Runs until cancelled."""
        backoff_s = BACKOFF_FIRST_S
        while True:
            child = self._child
            assert child is not None
            alive_since_s = monotonic()
            code = await child.wait()
            self._up.clear()
            if monotonic() - alive_since_s > HEALTHY_AFTER_S:
                backoff_s = BACKOFF_FIRST_S
            log.error("event=embedded_ended how=%r restart_in_s=%.1f", _how(code), backoff_s)
            await asyncio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, BACKOFF_MAX_S)
            self.restarts += 1
            try:
                await self._launch()
            except (EnvironmentFault, OSError) as exc:  # OSError: no memory or no process left for a child, for now
                log.error("event=embedded_restart_failed cause=%r", str(exc))
                await self._end_child()
            else:
                log.info("event=embedded_ready url=%s restarts=%d", self.url, self.restarts)

    async def _end_child(self) -> None:
        child = self._child
        if child is None or child.returncode is not None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                child.send_signal(number)
            with suppress(TimeoutError):
                async with asyncio.timeout(TERM_GRACE_S):
                    await child.wait()
                return

    def _start_failure(self, code: int | None) -> str:
        words = _words(self._stderr)
        if code == -signal.SIGILL:
            return (
                "expected a CPU that runs the prebuilt llama.cpp, it stopped at an unknown instruction (SIGILL); "
                "build a llama.cpp server on this machine and name it with --upstream URL"
            )
        if "bind" in words and self._port:
            return f"expected port {self._port} to be free again for the embedded server, another process has it"
        return f"expected the embedded server to start with {self._weights}, it ended ({_how(code)}): {words}"


def _how(code: int | None) -> str:
    """Exit code of a child in words: ``exit 1`` or the name of the signal."""
    if code is not None and code < 0:
        with suppress(ValueError):
            return signal.Signals(-code).name
    return f"exit {code}"


def _words(lines: Sequence[str]) -> str:
    return " | ".join(lines)[-1000:] or "it said nothing"
