"""Composition root: makes every long-lived object, hands them down, and owns start, drain and stop.

Order of start: sockets (a taken port must fail at once), upstream, gate, then accepting. Order of stop: no new
connections, running requests get ``drain_timeout_s``, then what is left is cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, TypedDict

import uvloop

from whetherman_edge import __version__, composition
from whetherman_edge.composition import Gate
from whetherman_edge.config import Config, Loaded, merged
from whetherman_edge.dialects.registry import PATHS
from whetherman_edge.errors import UsageError, WhethermanError
from whetherman_edge.ledger.counters import Counters
from whetherman_edge.ledger.live import LiveLedger
from whetherman_edge.proxy import decide, models
from whetherman_edge.proxy.app import App, Handler
from whetherman_edge.proxy.endpoints import Health
from whetherman_edge.proxy.exchange import Exchange
from whetherman_edge.proxy.guard import Guard, check_bind
from whetherman_edge.proxy.http_server import HttpServer
from whetherman_edge.proxy.page import Page
from whetherman_edge.proxy.recording import Recorder
from whetherman_edge.proxy.systemone import PATH as SYSTEMONE_PATH
from whetherman_edge.proxy.systemone import SystemOne, UpstreamFirst
from whetherman_edge.proxy.upstream import Target, Upstream
from whetherman_edge.router.decision import Choice
from whetherman_edge.router.typed_questions import TypedJudge
from whetherman_edge.service import logs
from whetherman_edge.service.decision_socket import DecisionSocket, Handlers
from whetherman_edge.service.notify import Notifier, take_listeners, take_notifier
from whetherman_edge.service.sockets import bind_tcp, bind_unix, unlink_unix

log = logging.getLogger(__name__)

# A request makes a few hundred containers that die by reference count; at Python's 700 each would bring a collection.
GC_THRESHOLD = 5_000
# A client that connected just before the drain has sent its request: it is in the kernel, and is served too.
FRESH_S = 0.5
FRESH_LOOK_S = 0.01
KIND_PAUSE_FIRST_S = 2.0
KIND_PAUSE_MAX_S = 600.0


def run(read: Callable[[], Loaded]) -> None:
    """Serve until SIGTERM or SIGINT; SIGHUP reads the settings again.

    ``read``: reads all sources of settings. Raises UsageError and EnvironmentFault leaves when it cannot start.
    """
    loaded = read()
    logs.configure(loaded.config.log_level)
    notifier, passed = take_notifier(), take_listeners()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(loaded, read, notifier, passed))


async def _serve(
    loaded: Loaded, read: Callable[[], Loaded], notifier: Notifier, passed: Sequence[socket.socket]
) -> None:
    stop, reload = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    starting = asyncio.current_task()
    terminal = next((fd for fd in (0, 1, 2) if os.isatty(fd)), None)

    def end() -> None:
        notifier.send("STOPPING=1")
        stop.set()
        if starting is not None:  # a download or a model that loads would otherwise be waited for
            starting.cancel()

    def hang_up() -> None:
        if terminal is not None and not os.isatty(terminal):  # our terminal was closed: that is what HUP once meant
            end()
        else:
            reload.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    loop.add_signal_handler(signal.SIGHUP, hang_up)
    try:
        async with _started(loaded, passed) as daemon:
            starting = None
            gc.collect()
            gc.freeze()  # what was made at start stays; collections need not walk it again and again
            gc.set_threshold(GC_THRESHOLD)
            async with notifier.beating():
                notifier.send("READY=1", daemon.status)
                reloading = asyncio.create_task(_reload_on(reload, daemon, read, notifier), name="reload")
                await stop.wait()
                notifier.draining(daemon.config.drain_timeout_s)
                reloading.cancel()
            log.info("event=draining")
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
        log.info("event=stopped_while_starting")


async def _reload_on(asked: asyncio.Event, daemon: Daemon, read: Callable[[], Loaded], notifier: Notifier) -> None:
    """Reload whenever it is asked for; what cannot be used costs one log line, and the old settings stay."""
    while True:
        await asked.wait()
        asked.clear()
        notifier.send("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")
        try:
            daemon.reload((await asyncio.to_thread(read)).config)
        except WhethermanError as exc:
            log.error("event=reload_refused detail=%r hint=the_old_settings_stay", str(exc))
        except Exception as exc:
            log.error("event=reload_refused hint=the_old_settings_stay", exc_info=exc)
        notifier.send("READY=1", daemon.status)


@contextlib.asynccontextmanager
async def running(loaded: Loaded, passed: Sequence[socket.socket] = ()) -> AsyncIterator[list[str]]:
    """The daemon, serving inside the block; yields the URLs it listens on.

    ``passed``: listening sockets of the service manager; they take the place of our own, and stay when we end.
    """
    async with _started(loaded, passed) as daemon:
        yield daemon.urls


@contextlib.asynccontextmanager
async def _started(loaded: Loaded, passed: Sequence[socket.socket]) -> AsyncIterator[Daemon]:
    config = loaded.config
    listeners = _passed(config, passed) if passed else _listeners(loaded)
    decision_listener = None
    # Our socket files go while we still listen: later, another daemon may have put its own in their place.
    files = contextlib.ExitStack()
    if config.listen and not passed:
        files.callback(unlink_unix, config.listen.removeprefix("unix:"))
    try:
        if config.decision_socket:
            decision_listener = bind_unix(config.decision_socket.removeprefix("unix:"))
            files.callback(unlink_unix, config.decision_socket.removeprefix("unix:"))
        counters = Counters()
        gate = composition.open_gate(config, counters)
        if gate.fault:
            log.error("event=gate_missing detail=%r", gate.fault)
        gate.check_profiles(config, starting=True)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(asyncio.to_thread, gate.close)
            stack.push_async_callback(gate.save_field)
            keeping = asyncio.create_task(gate.keep_field(), name="field")
            stack.callback(keeping.cancel)
            gate.start()
            target = await _target(config, gate, stack)
            ledger = LiveLedger(config.ledger != "off", counters)
            stack.push_async_callback(asyncio.to_thread, ledger.close)
            daemon = Daemon(config, target, gate, counters, ledger, listeners)
            stack.callback(daemon.close)
            await _decision_socket(decision_listener, gate, stack)
            gate.warm_up()
            async with _accepting(daemon, listeners, files):
                log.info("event=listening urls=%s upstream=%s", ",".join(daemon.urls), target.url)
                await daemon.warn_unreachable()
                yield daemon
    finally:
        files.close()
        for listener in (*listeners, decision_listener):
            if listener is not None:
                listener.close()


class Daemon:
    """What serves, and what of it a reload can change.

    ``config``: the settings in force. ``app``: the front door, the same for life. ``urls``: where it listens.
    """

    def __init__(
        self,
        config: Config,
        target: Target,
        gate: Gate,
        counters: Counters,
        ledger: LiveLedger,
        listeners: Sequence[socket.socket],
    ) -> None:
        self.config = config
        self.urls = [_url(listener) for listener in listeners]
        self._listeners = listeners
        self._gate = gate
        self._counters = counters
        self._ledger = ledger
        self._asking: asyncio.Task[None] | None = None
        self._connect(target)
        self.app = App(counters=counters, **_handlers(config, self._upstream, gate, counters, ledger))
        self._announce()

    @property
    def status(self) -> str:
        """For the service manager."""
        return f"STATUS=listening on {', '.join(self.urls)}"

    def reload(self, read: Config) -> None:
        """Go on with new settings; requests that are being served keep the old ones.

        Raises ConfigError, ProfileNotFound or ProfileError, and then nothing has changed.
        """
        config, changed, waiting = merged(self.config, read)
        for listener in self._listeners:
            if listener.family != socket.AF_UNIX:
                check_bind(listener.getsockname()[0], config.api_key)
        moved = not {"upstream", "upstream_kind"}.isdisjoint(changed)
        target = Target.parse(config.upstream) if moved else self._upstream.target
        self._gate.check_profiles(config)
        self.config = config
        logs.configure(config.log_level)
        if moved:
            self._gate.learned.start_anew("unknown" if config.upstream_kind == "auto" else config.upstream_kind)
        if moved or "idle_timeout_s" in changed:
            self.close()
            self._connect(target)
        self._gate.configure(config)
        self._ledger.recording = config.ledger != "off"
        self.app.serve_with(**_handlers(config, self._upstream, self._gate, self._counters, self._ledger))
        log.info("event=reloaded changed=%s", ",".join(changed) or "nothing")
        if waiting:
            log.warning("event=reload_needs_restart keys=%s hint=their_old_values_stay_until_then", ",".join(waiting))
        self._announce()

    async def warn_unreachable(self) -> None:
        """Look whether the upstream is there; the first request would find out too late."""
        if not await self._upstream.reachable(1.0):
            url = self._upstream.target.url
            log.warning("event=upstream_unreachable upstream=%s hint=requests_get_502_until_it_is_up", url)

    def close(self) -> None:
        """Close idle connections to the upstream, and stop asking what it is."""
        self._upstream.close()
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None

    def _connect(self, target: Target) -> None:
        """The kind of an upstream that the user named is found out beside, not before, serving."""
        self._upstream = Upstream(target, idle_timeout_s=self.config.idle_timeout_s)
        if self.config.upstream not in ("", "embedded") and self.config.upstream_kind == "auto":
            self._asking = asyncio.create_task(_learn_kind(target.url, self._gate), name="upstream-kind")

    def _announce(self) -> None:
        if self.config.force is not None:
            log.warning("event=forced decision=%s hint=for_tests_of_the_wiring_only", self.config.force)


def _listeners(loaded: Loaded) -> list[socket.socket]:
    config = loaded.config
    listeners: list[socket.socket] = []
    try:
        if loaded.listens_tcp:
            check_bind(config.host, config.api_key)
            listeners.append(bind_tcp(config.host, config.port))
        if config.listen:
            listeners.append(bind_unix(config.listen.removeprefix("unix:")))
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _passed(config: Config, passed: Sequence[socket.socket]) -> list[socket.socket]:
    """The service manager's sockets. Raises ConfigError for an address that needs an API key, where none is set."""
    try:
        for listener in passed:
            if listener.family != socket.AF_UNIX:
                check_bind(listener.getsockname()[0], config.api_key)
    except BaseException:
        for listener in passed:
            listener.close()
        raise
    return list(passed)


async def _target(config: Config, gate: Gate, stack: contextlib.AsyncExitStack) -> Target:
    """Where the model server is.

    What looks for model servers and runs one is imported when it is needed: it brings an HTTP client, a downloader and
    three megabytes.
    """
    if config.upstream in ("", "embedded"):
        from whetherman_edge.service import model_server

        server = await model_server.resolve(config.upstream, config.upstream_kind, stack)
        gate.learned.kind = server.kind
        return Target.parse(server.url)
    return Target.parse(config.upstream)


async def _learn_kind(url: str, gate: Gate) -> None:
    """Ask the upstream what it is, again and more rarely while it is not up."""
    from whetherman_edge.service import discovery

    pause_s = KIND_PAUSE_FIRST_S
    while True:
        gate.learned.kind = await discovery.kind_of(url)
        log.info("event=upstream_kind kind=%s", gate.learned.kind)
        if gate.learned.kind != "unknown" or pause_s > KIND_PAUSE_MAX_S:
            return
        await asyncio.sleep(pause_s)
        pause_s *= 4


async def _decision_socket(listener: socket.socket | None, gate: Gate, stack: contextlib.AsyncExitStack) -> None:
    """Serve the decision socket until ``stack`` closes."""
    if listener is None:
        return

    async def route(query: str, options: Mapping[str, Any]) -> Choice:
        if gate.router is None:
            raise UsageError(gate.fault)
        choice = await gate.router.route(query, options)
        return await gate.second_opinion(query, options, choice)

    async def decide_one(body: bytes, profile: str) -> decide.Record:
        return await decide.decide(gate.gating, {"x-whetherman-profile": profile} if profile else {}, body)

    server = DecisionSocket(Handlers(route=route, decide=decide_one))
    await server.start(listener)
    stack.push_async_callback(server.stop)


class _Handlers(TypedDict):
    """What App serves with."""

    guard: Guard
    own: dict[tuple[str, str], Handler]
    gated: dict[str, Handler]
    relay: Handler


def _handlers(config: Config, upstream: Upstream, gate: Gate, counters: Counters, ledger: LiveLedger) -> _Handlers:
    exchange = Exchange(
        upstream,
        counters,
        gate.gating,
        gate_body_bytes_max=config.gate_body_bytes_max,
        body_bytes_max=config.body_bytes_max,
        api_key=config.api_key,
        upstream_api_key=config.upstream_api_key,
        recorder=Recorder(ledger.record, text=config.ledger == "text") if ledger.recording else None,
        strip_unsupported=config.strip_unsupported,
        map_developer=config.map_developer == "system",
    )
    typed = TypedJudge(gate.router.scorer) if gate.router is not None else None
    systemone = SystemOne(typed, counters, gate=gate.verdict_on if gate.engine is not None else None, fault=gate.fault)
    serve_systemone = (
        UpstreamFirst(systemone, exchange).handle if config.prefer_upstream_systemone else systemone.handle
    )

    def count() -> None:
        gate.count()
        ledger.count()

    states = (gate.backbone, count, gate.field)
    health = Health(upstream, gate.learned, counters, lambda: gate.fault, __version__, *states)
    guard = Guard(
        host=config.host,
        api_key=config.api_key,
        allowed_hosts=config.allowed_hosts,
        allowed_origins=config.allowed_origins,
    )
    return _Handlers(
        guard=guard,
        own={
            ("GET", "/livez"): health.livez,
            ("GET", "/readyz"): health.readyz,
            ("GET", "/health"): health.health,
            ("GET", "/metrics"): health.metrics,
            ("GET", models.PATH): models.Models(exchange).handle,
            ("POST", SYSTEMONE_PATH): serve_systemone,
            **Page(ledger.shown).paths(),
            ("POST", decide.PATH): decide.DecideEndpoint(gate.gating, config.gate_body_bytes_max).handle,
        },
        gated={path: functools.partial(exchange.chat, dialect=dialect) for path, dialect in PATHS.items()},
        relay=exchange.relay,
    )


@contextlib.asynccontextmanager
async def _accepting(
    daemon: Daemon, listeners: Sequence[socket.socket], files: contextlib.ExitStack
) -> AsyncIterator[None]:
    """Accept connections inside the block; remove the socket ``files`` and drain after it."""
    app = daemon.app
    loop = asyncio.get_running_loop()
    server = HttpServer(app.handle)
    servers = []
    for listener in listeners:
        if listener.family == socket.AF_UNIX:
            servers.append(await loop.create_unix_server(server, sock=listener))
        else:
            servers.append(await loop.create_server(server, sock=listener))
    try:
        yield
    finally:
        files.close()
        for accepting in servers:
            accepting.close()
        app.drain()
        ends_s = loop.time() + daemon.config.drain_timeout_s
        fresh_until_s = min(ends_s, loop.time() + FRESH_S)
        server.close_waiting(fresh=False)
        while server.has_fresh and loop.time() < fresh_until_s:  # noqa: ASYNC110 - the kernel says nothing
            await asyncio.sleep(FRESH_LOOK_S)
        server.close_waiting(fresh=True)
        await app.drained(max(0.0, ends_s - loop.time()))
        await server.shutdown(0.1)


def _url(listener: socket.socket) -> str:
    name = listener.getsockname()
    if isinstance(name, str):
        return f"unix:{name}"
    host = f"[{name[0]}]" if listener.family == socket.AF_INET6 else name[0]
    return f"http://{host}:{name[1]}"
