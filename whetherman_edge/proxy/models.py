"""``GET /v1/models``: the upstream's list, and ours beside it.

OpenAI clients read ``data``, System One clients read ``models`` (name, description, release_date); one object serves
both. What the upstream wrote stays as it is, byte for byte, but for its own ``models`` array where it has one (as
llama.cpp does): our entries follow, and entries that lack one of the three strings get it, since one incomplete entry
makes the official SDK refuse the whole list.

An upstream that does not answer is a 502, as on any relayed path: clients use this list to see whether the model server
is up. A System One client is told by its headers and gets our entries alone: its decisions do not need the upstream.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import msgspec

from whetherman_edge.dialects.system_one import Refusal
from whetherman_edge.dialects.system_one_answer import MODELS
from whetherman_edge.errors import UpstreamMissing
from whetherman_edge.proxy.exchange import Exchange
from whetherman_edge.proxy.inflate import inflate
from whetherman_edge.proxy.relay import Reply
from whetherman_edge.proxy.request import Request
from whetherman_edge.proxy.upstream import UpstreamResponse

log = logging.getLogger(__name__)

PATH = "/v1/models"

LIST_BYTES_MAX = 8 * 1024 * 1024
"""A hosted router lists a few hundred models in under 1 MB. A longer answer is passed on unmerged."""

SYSTEM_ONE_WAIT_S = 3.0
"""How long a System One client waits for the upstream's part; its SDK gives up after 10 s."""

_SDK_HEADERS = ("x-typesafe-sdk", "x-typesafe-runtime")
_SDK_AGENTS = ("jevcompat", "typesafe", "systemone", "system-one")
_REWRITTEN = frozenset({b"content-length", b"content-encoding", b"content-md5", b"digest", b"etag"})
_REQUIRED = ("name", "description", "release_date")
UNKNOWN_DATE = "1970-01-01"


class Models:
    """The merged list, asked for through ``exchange``."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def handle(self, request: Request, reply: Reply) -> Reply:
        """One GET (or HEAD, which is relayed)."""
        for_system_one = speaks_system_one(request.headers)
        try:
            async with asyncio.timeout(SYSTEM_ONE_WAIT_S if for_system_one else None):
                response = await self._exchange.send(request, b"", encoded=False)
                if request.method == "HEAD" or (response.status != 200 and not for_system_one):
                    return await self._exchange.pass_on(response, reply)
                body, complete = await self._body(response)
        except TimeoutError:
            log.info("event=models_local cause=timeout")
            return await self._ours(reply)
        except UpstreamMissing as exc:
            if for_system_one:
                log.info("event=models_local cause=%s", type(exc).__name__)
                return await self._ours(reply)
            return await self._exchange.fault(reply, exc)
        if response.status != 200:
            response.abort()
            return await self._ours(reply)
        return await self._merged(response, body, complete, reply, for_system_one=for_system_one)

    async def _body(self, response: UpstreamResponse) -> tuple[bytes, bool]:
        try:
            return await response.read(LIST_BYTES_MAX)
        except BaseException:
            response.abort()
            raise

    async def _merged(
        self, response: UpstreamResponse, body: bytes, complete: bool, reply: Reply, *, for_system_one: bool
    ) -> Reply:
        merged = merge(body, _encoding(response)) if complete else None
        if merged is not None:
            response.release()
            passed = reply.passed_on(response.headers)
            headers = [(name, value) for name, value in passed if name.lower() not in _REWRITTEN]
            return await reply.send(response.status, response.reason, merged, headers)
        if for_system_one:
            response.abort()
            return await self._ours(reply)
        return await self._exchange.pass_on(response, reply, body)

    async def _ours(self, reply: Reply) -> Reply:
        return await reply.send(200, "OK", ours_alone(), [(b"Content-Type", b"application/json")])


def speaks_system_one(headers: Mapping[str, str]) -> bool:
    """True for clients of the System One API: the official SDKs by their headers, others by their User-Agent."""
    if any(name in headers for name in _SDK_HEADERS):
        return True
    return headers.get("user-agent", "").lower().startswith(_SDK_AGENTS)


def merge(body: bytes, encoding: str = "") -> bytes | None:
    """An upstream's list with ours in it; None when the body is not a JSON object that can take it."""
    try:
        fields = msgspec.json.decode(inflate(body, encoding, LIST_BYTES_MAX), type=dict[str, msgspec.Raw])
        theirs = msgspec.json.decode(fields["models"]) if "models" in fields else []
    except (msgspec.MsgspecError, Refusal, RecursionError):
        return None
    if theirs is None:
        theirs = []
    if not isinstance(theirs, list):
        return None
    merged = [*(_completed(entry) for entry in theirs), *MODELS]
    fields.setdefault("object", msgspec.Raw(b'"list"'))
    fields.setdefault("data", msgspec.Raw(b"[]"))
    fields["models"] = msgspec.Raw(msgspec.json.encode(merged))
    return msgspec.json.encode(fields)


def ours_alone() -> bytes:
    """The list without an upstream."""
    return msgspec.json.encode({"object": "list", "data": [], "models": MODELS})


def _completed(entry: object) -> object:
    """A foreign entry with the three strings that System One clients insist on; all its own fields kept."""
    if not isinstance(entry, dict):
        return entry
    name = next((entry[key] for key in ("name", "model", "id", "key") if isinstance(entry.get(key), str)), "unnamed")
    given = dict(zip(_REQUIRED, (name, "Model of the upstream server.", UNKNOWN_DATE), strict=True))
    return {**entry, **{key: value for key, value in given.items() if not isinstance(entry.get(key), str)}}


def _encoding(response: UpstreamResponse) -> str:
    return (response.header(b"content-encoding") or b"").decode("ascii", "replace")
