"""aiohttp's low-level server, with errors of the HTTP parser in the shape that all our errors have.

aiohttp's own answer is plain text with the offending line in it, which may hold a key (field case O10).
"""

from __future__ import annotations

import logging

import msgspec
from aiohttp.web_protocol import RequestHandler
from aiohttp.web_request import BaseRequest
from aiohttp.web_response import Response, StreamResponse
from aiohttp.web_server import Server

log = logging.getLogger(__name__)

# Long header lines (cookies, JWTs) are the client's and the upstream's business; aiohttp's own default is 8,190.
HEAD_LINE_BYTES_MAX = 64 << 10


class _Handler(RequestHandler):
    __slots__ = ()

    @property
    def waits(self) -> bool:
        """It waits for a request; none is being read or served."""
        return self._waiter is not None and not self._waiter.done()

    @property
    def fresh(self) -> bool:
        """No request has come yet."""
        return self._request_count == 0

    def handle_error(
        self,
        request: BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002  # quotes the offending line
    ) -> StreamResponse:
        """The answer to what is no HTTP, and the end of the connection. Nothing that the client sent is quoted."""
        kind = type(exc).__name__ if exc is not None else "none"
        log.warning("event=bad_http status=%d kind=%s", status, kind)
        if request.writer.output_size > 0:
            raise ConnectionError("a response was under way when the request turned out to be no HTTP")
        error = {
            "message": f"expected a proper HTTP/1.1 request, got one that cannot be read ({kind}); raw spaces, control "
            "characters and letters beyond ASCII in the request target must be percent-encoded",
            "type": "invalid_request_error" if status < 500 else "internal_error",
            "param": None,
            "code": "bad_http" if status < 500 else "internal_error",
            "src": "whetherman-edge",
        }
        headers = {"Content-Type": "application/json", "Server": "whetherman-edge"}
        response = Response(status=status, body=msgspec.json.encode({"error": error}), headers=headers)
        response.force_close()
        return response


class HttpServer(Server):
    """``aiohttp.web.Server`` that makes our handlers."""

    def __call__(self) -> RequestHandler:
        return _Handler(self, loop=self._loop, **self._kwargs)

    @property
    def has_fresh(self) -> bool:
        """Whether there is a connection on which no request has come yet."""
        return any(isinstance(one, _Handler) and one.fresh for one in self._connections)

    def close_waiting(self, *, fresh: bool) -> None:
        """Close the connections that wait for a request; ``fresh``: those that wait for their first one too.

        aiohttp's own ``pre_shutdown`` closes them all: then a request that is on its way to us on a new connection is
        refused, which no client takes for a connection that had grown old, and the rest of an upload is dropped.
        """
        for one in list(self._connections):
            if isinstance(one, _Handler) and one.waits and (fresh or not one.fresh):
                one.close()
