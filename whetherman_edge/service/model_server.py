"""Which model server stands behind the daemon: the one given, one found on this machine, or the embedded one.

``python -m whetherman_edge.service.model_server`` prints the ``--upstream`` that ``make serve`` uses: the one that is
configured, else one that is found, else ``embedded``. ``serve`` alone never falls back to the embedded server: a
service that starts before its model server must not answer from a toy.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from contextlib import AsyncExitStack, suppress

import msgspec

from whetherman_edge.backbone import store
from whetherman_edge.backbone.progress import ConsoleProgress
from whetherman_edge.backbone.weights import DEFAULT_EMBEDDED
from whetherman_edge.config import load_config
from whetherman_edge.errors import UpstreamMissing, WhethermanError
from whetherman_edge.service import discovery, embedded

log = logging.getLogger(__name__)


class ModelServer(msgspec.Struct, frozen=True):
    """``url``: ``http(s)://…`` or ``unix:PATH``. ``kind``: never ``auto``."""

    url: str
    kind: str


async def resolve(upstream: str, kind: str, stack: AsyncExitStack) -> ModelServer:
    """Turns the settings ``upstream`` and ``upstream_kind`` into a server that has an address.

    "" looks for one on this machine; ``embedded`` fetches its weights if they are not there, starts it, and leaves its
    end to ``stack``. Raises UpstreamMissing (nothing found), EnvironmentFault and ArtifactError (embedded). A cancel
    stops a download or a start cleanly.
    """
    if upstream == "embedded":
        return ModelServer(await _open_embedded(stack), "llamacpp")
    if upstream:
        return ModelServer(upstream, await discovery.kind_of(upstream) if kind == "auto" else kind)
    found = await discovery.discover()
    if not found:
        raise UpstreamMissing(
            f"expected a model server on this machine, looked for {_looked_for()}, none answers; start one, or name it "
            "with --upstream URL, or use --upstream embedded for a small built-in one"
        )
    first, *others = found
    log.info("event=upstream_found name=%r url=%s", first.name, first.url)
    for other in others:
        log.info("event=upstream_also_found name=%r url=%s hint=choose_it_with_--upstream", other.name, other.url)
    return ModelServer(first.url, first.kind if kind == "auto" else kind)


async def _open_embedded(stack: AsyncExitStack) -> str:
    embedded.check_installed()
    name = os.environ.get("WHETHERMAN_EMBEDDED_MODEL") or DEFAULT_EMBEDDED
    weights = await _weights(name)
    server = embedded.EmbeddedServer(weights.path, name)
    stack.push_async_callback(server.stop)
    url = await server.start()
    if weights.tools is False:
        log.warning(
            "event=embedded_ignores_tools model=%s hint=it_answers_but_never_calls_a_tool;"
            "_for_tool_calls_set_WHETHERMAN_EMBEDDED_MODEL=qwen-0.5b",
            name,
        )
    return url


async def _weights(name: str) -> store.Installed:
    """The weights of that name, fetched in a thread if need be; a cancel of ours ends the download."""
    cancel = threading.Event()
    work = asyncio.ensure_future(asyncio.to_thread(store.ensure, name, ConsoleProgress(), cancel=cancel))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        cancel.set()
        with suppress(Exception):
            await work
        raise


def _looked_for() -> str:
    return ", ".join(f"{place.name} at {place.url}" for place in discovery.candidates())


def main() -> int:
    """Prints one upstream on stdout and why on stderr."""
    try:
        configured = load_config().config.upstream
    except WhethermanError:
        configured = ""  # serve reads the same settings next and says what is wrong with them
    if configured:
        sys.stdout.write(f"{configured}\n")
        return 0
    found = asyncio.run(discovery.discover())
    if found:
        sys.stderr.write(f"found {found[0].name} at {found[0].url}\n")
        sys.stdout.write(f"{found[0].url}\n")
    else:
        sys.stderr.write(f"looked for {_looked_for()}: none answers; using the small built-in model server\n")
        sys.stdout.write("embedded\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
