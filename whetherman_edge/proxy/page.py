"""``/whetherman/``: the live page and its data. Static files from the package, JSON from the ledger.

The four paths are exact; nothing in a request names a file. The data needs the API key where one is set; the page
itself says nothing that does. Scripts and styles come from here alone (Content-Security-Policy), so a name that a model
made up cannot run even where the page failed to escape it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any

from whetherman_edge.proxy.relay import Reply
from whetherman_edge.proxy.request import Request
from whetherman_edge.proxy.upstream import Headers

log = logging.getLogger(__name__)

PREFIX = "/whetherman/"
DATA = PREFIX + "data.json"
FILES: dict[str, tuple[str, bytes]] = {
    PREFIX: ("page.html", b"text/html; charset=utf-8"),
    PREFIX + "page.js": ("page.js", b"text/javascript; charset=utf-8"),
    PREFIX + "page.css": ("page.css", b"text/css; charset=utf-8"),
}
CSP = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; "
    b"form-action 'none'; frame-ancestors 'none'"
)
SECURITY: Headers = [
    (b"Content-Security-Policy", CSP),
    (b"X-Content-Type-Options", b"nosniff"),
    (b"X-Frame-Options", b"DENY"),
    (b"Referrer-Policy", b"no-referrer"),
    (b"Cross-Origin-Opener-Policy", b"same-origin"),
    (b"Cross-Origin-Resource-Policy", b"same-origin"),
    (b"Cache-Control", b"no-store"),
]
QUERY_CHARS_MAX = 200

Query = Callable[[Mapping[str, str]], dict[str, Any]]


class Page:
    """Handlers of the page. ``query``: the parameters of the URL to what the page shows; runs in a thread."""

    def __init__(self, query: Query) -> None:
        self._query = query
        folder = resources.files("whetherman_edge.ledger") / "page"
        self._files = {path: (folder / name).read_bytes() for path, (name, _) in FILES.items()}

    def paths(self) -> dict[tuple[str, str], Any]:
        """(method, path) to handler."""
        return {**{("GET", path): self.file for path in FILES}, ("GET", DATA): self.data}

    async def file(self, request: Request, reply: Reply) -> Reply:
        """One of the static files."""
        path = request.path
        return await reply.send(200, "OK", self._files[path], [(b"Content-Type", FILES[path][1]), *SECURITY])

    async def data(self, request: Request, reply: Reply) -> Reply:
        """What the page shows, as JSON; 503 while the ledger cannot be read."""
        asked = {key: value[:QUERY_CHARS_MAX] for key, value in request.query.items()}
        try:
            value = await asyncio.to_thread(self._query, asked)
        except Exception as exc:
            log.warning("event=page_failed error=%s", type(exc).__name__)
            message = "the ledger cannot be read now; `whetherman-edge doctor` says why"
            return await reply.send_error(503, "Service Unavailable", message, "server_error", "ledger_unreadable")
        return await reply.send_json(200, "OK", value, SECURITY)


async def missing(_request: Request, reply: Reply) -> Reply:
    """404 for every other path below ours: none of them is the upstream's."""
    message = f"expected {PREFIX} or one of its files"
    return await reply.send_error(404, "Not Found", message, "invalid_request_error", "not_found")
