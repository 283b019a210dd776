"""Which model server stands behind the daemon: the one given, one found on this machine, or the embedded one."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from contextlib import AsyncExitStack, suppress

import msgspec

from whetherman_edge.backbone import store
from whetherman_edge.backbone.progress import ConsoleProgress
from whetherman_edge.backbone.weights import DEFAULT_EMBEDDED
from whetherman_edge.errors import UpstreamMissing
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
        looked = ", ".join(f"{place.name} at {place.url}" for place in discovery.candidates())
        raise UpstreamMissing(
            f"expected a model server on this machine, looked for {looked}, none answers; start one, or name it with "
            "--upstream URL, or use --upstream embedded for a small built-in one"
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
