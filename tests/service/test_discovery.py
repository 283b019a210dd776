"""Which model server is it? Answers are what the real ones send; nothing but GET may ever reach them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from whetherman_edge.errors import UpstreamMissing
from whetherman_edge.service import discovery, model_server

KNOWN = discovery.candidates({})
NOT_FOUND = (404, {"error": {"message": "File Not Found", "type": "not_found_error", "code": 404}})
LOADING = (503, {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}})


def models(owner: str) -> tuple[int, object]:
    return 200, {"object": "list", "data": [{"id": "m", "object": "model", "created": 1, "owned_by": owner}]}


async def test_an_answer_that_no_decoder_takes_is_no_server_and_no_crash():
    async def deep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 200000\r\n\r\n" + b"[" * 200_000)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(deep, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert await discovery.discover((discovery.Candidate("llamacpp", "llama.cpp", url, "/props"),), 60.0) == []
        assert await discovery.kind_of(url) == "unknown"
        assert await discovery.models_of(url, "openai") == []


class FakeServer:
    """Answers GETs from a table (path, or ``*``) and records every request."""

    def __init__(self, table: dict[str, tuple[int, object]], header: str = "x") -> None:
        self.table = table
        self.header = header
        self.seen: list[tuple[str, str]] = []
        self.url = ""
        self.port = 0

    async def handle(self, request: web.BaseRequest) -> web.Response:
        self.seen.append((request.method, request.path))
        status, body = self.table.get(request.path) or self.table.get("*") or NOT_FOUND
        text = body if isinstance(body, str) else json.dumps(body).replace("PATH", request.path)
        return web.Response(
            status=status, text=text, headers={"Server": self.header, "Content-Type": "application/json"}
        )


@contextlib.asynccontextmanager
async def serving(server: FakeServer, unix: str = "") -> AsyncIterator[FakeServer]:
    runner = web.ServerRunner(web.Server(server.handle, handler_cancellation=True))
    await runner.setup()
    site = web.UnixSite(runner, unix) if unix else web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    if not unix:
        server.port = runner.addresses[0][1]
        server.url = f"http://127.0.0.1:{server.port}"
    try:
        yield server
    finally:
        await runner.cleanup()
        assert all(method == "GET" for method, _ in server.seen)
        assert not any("chat" in path or "generate" in path for _, path in server.seen)


OLLAMA = {"/v1/models": models("library"), "/api/version": (200, {"version": "0.32.15"})}
OLLAMA_EMPTY = {"/v1/models": (200, {"object": "list", "data": None}), "/api/version": (200, {"version": "0.32.15"})}
LMSTUDIO = {
    "/v1/models": models("organization_owner"),
    "*": (200, {"error": "Unexpected endpoint or method. (GET PATH)"}),
}
LMSTUDIO_EMPTY = {
    "/v1/models": (200, {"object": "list", "data": []}),
    "*": (200, {"error": "Unexpected endpoint or method. (GET PATH)"}),
}
LLAMACPP = {"/v1/models": models("llamacpp"), "/props": (200, {"default_generation_settings": {}, "total_slots": 1})}
VLLM = {"/v1/models": models("vllm"), "/version": (200, {"version": "0.11.0"})}
VLLM_WITH_KEY = {"/v1/models": (401, {"error": "Unauthorized"}), "/version": (200, {"version": "0.11.0"})}
GENERIC = {"/v1/models": models("me")}


@pytest.mark.parametrize(
    ("table", "header", "kind", "requests"),
    [
        (OLLAMA, "", "ollama", 1),
        (OLLAMA_EMPTY, "", "ollama", 2),
        (LMSTUDIO, "", "lmstudio", 1),
        (LMSTUDIO_EMPTY, "", "lmstudio", 2),
        (LLAMACPP, "llama.cpp", "llamacpp", 1),
        (LLAMACPP, "a reverse proxy", "llamacpp", 1),
        ({"/v1/models": LOADING, "/props": LOADING}, "llama.cpp", "llamacpp", 1),
        (VLLM, "uvicorn", "vllm", 1),
        (VLLM_WITH_KEY, "uvicorn", "vllm", 3),
        (GENERIC, "", "openai", 4),
        ({}, "nginx", "unknown", 4),
        ({"*": (200, "<html>a web page</html>")}, "Apache", "unknown", 4),
        ({"*": (200, "[1, 2]")}, "", "unknown", 4),
        ({"*": (200, '{"object": "list", "data": [null, {"owned_by": 7}]}')}, "", "openai", 4),
        ({"*": (301, "")}, "", "unknown", 4),
    ],
)
async def test_kind_of(table, header, kind, requests):
    async with serving(FakeServer(table, header)) as server:
        assert await discovery.kind_of(server.url) == kind
        assert len(server.seen) == requests


@pytest.mark.parametrize("suffix", ["/v1", "/v1/", "/"])
async def test_kind_of_takes_urls_with_v1(suffix):
    async with serving(FakeServer(OLLAMA)) as server:
        assert await discovery.kind_of(server.url + suffix) == "ollama"
        assert server.seen == [("GET", "/v1/models")]


async def test_kind_of_a_unix_socket(tmp_path):
    path = str(tmp_path / "s")
    async with serving(FakeServer(LLAMACPP, "llama.cpp"), unix=path):
        assert await discovery.kind_of(f"unix:{path}") == "llamacpp"


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("https://api.openai.com/v1", "openai"),
        ("https://api.anthropic.com", "anthropic"),
        ("unix:/nowhere/at/all", "unknown"),
        ("http://127.0.0.1:notaport", "unknown"),
        ("http://", "unknown"),
    ],
)
async def test_kind_without_an_answer(url, kind):
    assert await discovery.kind_of(url) == kind


async def test_a_server_that_is_not_up_yet_is_guessed_by_its_port(unused_tcp_port, monkeypatch):
    url = f"http://127.0.0.1:{unused_tcp_port}"
    assert await discovery.kind_of(url) == "unknown"
    monkeypatch.setitem(discovery._USUAL_PORTS, unused_tcp_port, "ollama")
    assert await discovery.kind_of(url) == "ollama"


def places(ollama: str, lmstudio: str, llamacpp: str) -> tuple[discovery.Candidate, ...]:
    urls = (ollama, lmstudio, llamacpp)
    return tuple(
        discovery.Candidate(place.kind, place.name, url, place.path) for place, url in zip(KNOWN, urls, strict=True)
    )


async def test_discover_keeps_the_order_and_asks_each_once(unused_tcp_port):
    closed = f"http://127.0.0.1:{unused_tcp_port}"
    async with serving(FakeServer(LMSTUDIO)) as one, serving(FakeServer(LLAMACPP, "llama.cpp")) as two:
        found = await discovery.discover(places(closed, one.url, two.url))
        assert [(place.kind, place.url) for place in found] == [("lmstudio", one.url), ("llamacpp", two.url)]
        assert one.seen == [("GET", "/v1/models")]
        assert two.seen == [("GET", "/props")]


async def test_discover_is_not_fooled_by_others_on_these_ports():
    async with (
        serving(FakeServer({"*": (200, "<html></html>")}, "Jetty")) as one,
        serving(FakeServer(GENERIC)) as two,
        serving(FakeServer(OLLAMA)) as three,
    ):
        assert await discovery.discover(places(one.url, two.url, three.url)) == []


async def test_discover_does_not_wait_for_a_server_that_hangs():
    class Hanging(FakeServer):
        async def handle(self, request: web.BaseRequest) -> web.Response:
            self.seen.append((request.method, request.path))
            await asyncio.Event().wait()  # until the client goes away
            raise AssertionError

    async with serving(Hanging({})) as hanging, serving(FakeServer(OLLAMA)) as ollama:
        found = await discovery.discover(places(ollama.url, hanging.url, hanging.url))
        assert [place.kind for place in found] == ["ollama"]
        assert len(hanging.seen) == 2


@pytest.mark.parametrize(
    ("value", "url"),
    [
        ("http://[::1", "http://127.0.0.1:11434"),
        ("", "http://127.0.0.1:11434"),
        ("0.0.0.0", "http://127.0.0.1:11434"),
        ("0.0.0.0:11500", "http://127.0.0.1:11500"),
        (":11500", "http://127.0.0.1:11500"),
        ("example.test", "http://example.test:11434"),
        ("http://10.0.0.2", "http://10.0.0.2:80"),
        ("https://ollama.test", "https://ollama.test:443"),
        ("[::]:11435", "http://127.0.0.1:11435"),
        ("[::1]:11435", "http://[::1]:11435"),
        ("127.0.0.1:bad", "http://127.0.0.1:11434"),
    ],
)
def test_ollama_host(value, url):
    assert discovery.candidates({"OLLAMA_HOST": value})[0].url == url


async def test_resolve_says_where_it_looked(monkeypatch, unused_tcp_port):
    closed = f"http://127.0.0.1:{unused_tcp_port}"
    monkeypatch.setattr(discovery, "candidates", lambda: places(closed, closed, closed))
    async with contextlib.AsyncExitStack() as stack:
        with pytest.raises(UpstreamMissing, match=rf"Ollama at {closed}.*--upstream URL.*--upstream embedded"):
            await model_server.resolve("", "auto", stack)


async def test_resolve_takes_what_it_finds_and_what_it_is_told():
    async with serving(FakeServer(OLLAMA)) as server, contextlib.AsyncExitStack() as stack:
        assert await model_server.resolve(server.url, "auto", stack) == model_server.ModelServer(server.url, "ollama")
        server.seen.clear()
        assert await model_server.resolve(server.url, "vllm", stack) == model_server.ModelServer(server.url, "vllm")
        assert server.seen == []  # a kind that is given is not asked for


async def test_resolve_finds_a_local_server(monkeypatch, unused_tcp_port):
    closed = f"http://127.0.0.1:{unused_tcp_port}"
    async with serving(FakeServer(OLLAMA)) as server, contextlib.AsyncExitStack() as stack:
        monkeypatch.setattr(discovery, "candidates", lambda: places(server.url, closed, closed))
        assert await model_server.resolve("", "auto", stack) == model_server.ModelServer(server.url, "ollama")
