"""Two changes for servers that take less than their clients send. Both are off unless the user turns them on.

``strip_unsupported``: a model that takes no tools answers with an error as soon as some are sent (field case C11); the
request goes out once more without them, and later ones for that model do so at once. ``map_developer``: the role
developer goes out as system (R12).
"""

from __future__ import annotations

import logging

from whetherman_edge.dialects.developer import developer_as_system
from whetherman_edge.dialects.dialect import Dialect
from whetherman_edge.errors import ViewError
from whetherman_edge.ledger.counters import Counters
from whetherman_edge.proxy.gating import Gating
from whetherman_edge.proxy.persuasion import Answer, Send
from whetherman_edge.proxy.request import Request
from whetherman_edge.proxy.tool_refusal import read_refusal

log = logging.getLogger(__name__)

# Headers that speak of the very bytes of a body, which then stays as it is.
_OF_THE_BYTES = ("content-md5", "digest", "content-digest")


class Repairs:
    """``strip_unsupported``, ``map_developer``: what the user turned on."""

    def __init__(
        self, send: Send, gating: Gating, counters: Counters, *, strip_unsupported: bool, map_developer: bool
    ) -> None:
        self._send = send
        self._gating = gating
        self._counters = counters
        self._strip_unsupported = strip_unsupported
        self._map_developer = map_developer

    def roles(self, request: Request, body: bytes, dialect: Dialect) -> bytes:
        """The body in the client's place; a compressed, signed or odd one, and a subscription's, stays as it is."""
        headers = request.headers
        if not self._map_developer or headers.get("content-encoding", "identity").lower() != "identity":
            return body
        if any(name in headers for name in _OF_THE_BYTES):
            return body
        if dialect.untouchable is not None and dialect.untouchable(headers):
            return body
        try:
            mapped = developer_as_system(body)
        except ViewError:
            return body
        if mapped is not body:
            self._counters.add("roles_mapped_total")
        return mapped

    async def without_tools(self, request: Request, answer: Answer, dialect: Dialect) -> Answer:
        """The answer, or that to the same request without its tools, when the server said that it takes none.

        For requests that went out as they came; ``Persuasion`` sees to those that were changed.

        Raises UpstreamMissing; UpstreamReset when the error breaks off.
        """
        response, ruling = answer.response, answer.ruling
        if not self._strip_unsupported or response.status < 400 or answer.held or ruling.applied or not ruling.plain:
            return answer
        try:
            answer.held, takes_none = await read_refusal(response)
            if not takes_none:
                return answer
            sent, bare = self._gating.without_tools(ruling)
            if not bare.applied:
                return answer
            response.release()
            self._counters.add("resent_total", (("cause", "tools_unsupported"),))
            log.warning("event=tools_unsupported hint=requests_for_this_model_go_out_without_tools")
            return Answer(await self._send(request, sent, edited=True), bare, dialect=dialect)
        except BaseException:
            response.abort()
            raise
