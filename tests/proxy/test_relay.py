"""The wire: what goes in comes out. Field cases by their id."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import select
import socket

import pytest

from tests.fakes.client import Client, Truncated, once, post
from tests.fakes.upstream import (
    PATIENCE_S,
    TIME_FACTOR,
    FakeUpstream,
    Seen,
    Wire,
    completion,
    delta,
    hang,
    reply,
    stream,
    text_stream,
)

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    "target",
    [
        "/v1/models",
        "/api/tags?x=1&x=2&empty=",
        "/v1/files/a%2Fb%20c%zz?q=%E2%82%AC+%2B",
        "//double//slash/../dots/./?a=b?c=d",
        "/v1/x;p=1,2:3@4!$&'()*+~?q=[]{}|^`\\",
        "/%C3%A9?key=%00",
    ],
)
async def test_s18_any_target_reaches_the_upstream_byte_for_byte(upstream, serve, target):
    async with serve() as url:
        answer = await once(url, "GET", target)
    assert answer.status == 200
    assert upstream.last.target == target.encode()


@pytest.mark.parametrize("method", ["GET", "DELETE", "PUT", "PATCH", "OPTIONS", "POST"])
async def test_any_method_and_body_reach_the_upstream(upstream, serve, method):
    body = bytes(range(256))
    async with serve() as url:
        answer = await once(url, method, "/any/path", body)
    assert answer.status == 200
    assert (upstream.last.method, upstream.last.body) == (method, body)


async def test_request_without_a_body_gets_no_framing_headers(upstream, serve):
    async with serve() as url:
        await once(url, "GET", "/v1/models")
    assert upstream.last.names().isdisjoint({"content-length", "transfer-encoding"})


async def test_headers_travel_in_order_and_spelling_but_not_hop_by_hop(upstream, serve):
    head = (
        b"POST /v1/embeddings HTTP/1.1\r\nhost: localhost:1\r\nX-B: 1\r\nx-a:  two \r\nX-B: \xe9\xff\r\n"
        b"Connection: keep-alive, X-Named\r\nX-Named: gone\r\nKeep-Alive: timeout=5\r\nTE: trailers\r\n"
        b"Proxy-Authorization: Basic abc\r\nx-whetherman-mode: off\r\nX-Session-Id: 7\r\nAuthorization: Bearer k\r\n"
        b"Content-Length: 2\r\nCookie: a=b; c=d\r\n\r\n{}"
    )
    async with serve() as url, Client(url) as client:
        await client.send(head)
        await client.rest(await client.head())
    assert upstream.last.headers == [
        (b"Host", upstream.url.removeprefix("http://").encode()),
        (b"X-B", b"1"),
        (b"x-a", b"two"),
        (b"X-B", b"\xe9\xff"),
        (b"Authorization", b"Bearer k"),
        (b"Content-Length", b"2"),
        (b"Cookie", b"a=b; c=d"),
    ]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/chat/completions"])
async def test_connection_takes_no_framing_away_so_a_body_is_never_a_request(upstream, serve, path):
    body = b"DELETE /api/delete HTTP/1.1\r\nHost: x\r\n\r\n"
    named = "keep-alive, Content-Length, content-type, content-encoding, Host, authorization, accept"
    async with serve() as url, Client(url) as client:
        for _ in range(2):
            await client.request("POST", path, body, Connection=named, Authorization="Bearer k", Content_Type="a/b")
    assert [(seen.method, seen.body) for seen in upstream.requests] == [("POST", body)] * 2
    assert upstream.last.header("content-length") == b"%d" % len(body)
    assert upstream.last.header("authorization") == b"Bearer k"
    assert upstream.last.header("content-type") == b"a/b"


async def test_connection_takes_no_framing_away_from_a_response(upstream, serve):
    async def answer(_seen: Seen, wire: Wire) -> None:
        head = b"HTTP/1.1 200 OK\r\nConnection: content-length, x-hop\r\nX-Hop: 1\r\nContent-Length: 2\r\n\r\n"
        await wire.send(head + b"ok")

    upstream.script(answer)
    async with serve() as url:
        got = await once(url, "GET", "/x")
    assert (got.raw_headers, got.body) == ([("Content-Length", "2")], b"ok")


async def test_response_headers_travel_but_not_hop_by_hop(upstream, serve):
    async def answer(_seen: Seen, wire: Wire) -> None:
        await wire.send(
            b"HTTP/1.1 201 Made It\r\nServer: fake\r\nset-cookie: a=1\r\nSet-Cookie: b=2\r\nX-Latin: \xe9\r\n"
            b"Connection: keep-alive, X-Hop\r\nX-Hop: gone\r\nKeep-Alive: timeout=5\r\nContent-Length: 2\r\n\r\nok"
        )

    upstream.script(answer)
    async with serve() as url:
        got = await once(url, "GET", "/x")
    assert got.status == 201
    assert got.raw_headers == [
        ("Server", "fake"),
        ("set-cookie", "a=1"),
        ("Set-Cookie", "b=2"),
        ("X-Latin", "\xe9"),
        ("Content-Length", "2"),
    ]


@pytest.mark.parametrize(("base", "sent"), [("", b"/v1/models"), ("/v1", b"/v1/models"), ("/v1/", b"/v1/models")])
async def test_upstream_with_and_without_v1_mean_the_same(upstream, serve, base, sent):
    async with serve(upstream=upstream.url + base) as url:
        await once(url, "GET", "/v1/models")
    assert upstream.last.target == sent


async def test_a_path_in_the_upstream_url_is_kept(upstream, serve):
    async with serve(upstream=upstream.url + "/api/v1") as url:
        await once(url, "GET", "/v1/models?a=1")
    assert upstream.last.target == b"/api/v1/models?a=1"


async def test_head_204_and_304_have_no_body_and_keep_the_connection(upstream, serve):
    async def empty(seen: Seen, wire: Wire) -> None:
        status = {b"/204": "204 No Content", b"/304": "304 Not Modified"}.get(seen.target, "200 OK")
        await wire.head(status, **({} if status[0:3] == "204" else {"Content_Length": "17"}))

    upstream.default = empty
    async with serve() as url, Client(url) as client:
        for method, target, status in (("HEAD", "/x", 200), ("GET", "/204", 204), ("GET", "/304", 304)):
            answer = await client.request(method, target)
            assert (answer.status, answer.body) == (status, b"")
            assert answer.header("Transfer-Encoding") is None
        upstream.default = reply({"ok": 1})
        assert (await client.request("GET", "/y")).json() == {"ok": 1}


async def test_informational_responses_are_passed_over(upstream, serve):
    async def early(_seen: Seen, wire: Wire) -> None:
        await wire.send(b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n")
        await wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    upstream.script(early)
    async with serve() as url:
        answer = await once(url, "GET", "/x")
    assert (answer.status, answer.body) == (200, b"ok")


async def test_s14_chunked_reply_is_framed_for_http_1_1_and_1_0(upstream, serve):
    value = completion("x" * 200_000)
    upstream.default = reply(value, chunked=True)
    async with serve() as url:
        new = await post(url, CHAT)
        old = await once(url, "POST", "/v1/chat/completions", json.dumps(CHAT).encode(), version="1.0")
    assert new.header("Transfer-Encoding") == "chunked"
    assert old.header("Transfer-Encoding") is None
    assert old.header("Connection") == "close"
    assert new.json() == old.json() == value


async def test_http_1_0_keep_alive_is_honoured_when_the_length_is_known(upstream, serve):
    async with serve() as url, Client(url) as client:
        for _ in range(2):
            answer = await client.request("GET", "/x", version="1.0", Connection="keep-alive")
            assert answer.header("Connection") == "keep-alive"
            assert answer.status == 200


async def test_s07_content_encoding_and_bytes_agree(upstream, serve):
    value = completion("compressed " * 50)
    upstream.script(
        reply(value, encoding="gzip"), reply(b"".join(text_stream("a", "b")), encoding="gzip", chunked=True)
    )
    async with serve() as url:
        whole = await post(url, CHAT, Accept_Encoding="gzip")
        events = await post(url, {**CHAT, "stream": True}, Accept_Encoding="gzip")
    assert whole.header("Content-Encoding") == events.header("Content-Encoding") == "gzip"
    assert json.loads(gzip.decompress(whole.body)) == value
    assert gzip.decompress(events.body) == b"".join(text_stream("a", "b"))


async def test_s07_gzip_request_goes_on_as_it_came(upstream, serve):
    body = gzip.compress(json.dumps(CHAT).encode())
    async with serve() as url:
        answer = await post(url, body, Content_Encoding="gzip")
    assert answer.status == 200
    assert upstream.last.body == body
    assert upstream.last.header("content-encoding") == b"gzip"


async def test_s02_odd_event_streams_are_relayed_untouched(upstream, serve):
    events = [
        b": OPENROUTER PROCESSING\n\n",
        b'data:{"a":1}\r\n\r\n',
        b"event: x\nid: 7\nretry: 10\ndata: {\ndata: }\n\n",
        b"data: half",
        b" of it\n\n:\n\n\n\ndata: [DONE]\n\n",
    ]
    upstream.script(stream(events))
    async with serve() as url:
        answer = await post(url, {**CHAT, "stream": True})
    assert answer.body == b"".join(events)


async def test_s03_tool_calls_in_ollamas_order_are_relayed_unaltered(upstream, serve):
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    events = [
        delta(tool_calls=[call]),
        delta(tool_calls=[{**call, "id": "d"}]),
        delta(finish="stop"),
        b"data: [DONE]\n\n",
    ]
    upstream.script(stream(events))
    async with serve() as url:
        answer = await post(url, {**CHAT, "stream": True})
    assert answer.body == b"".join(events)


async def test_stream_events_arrive_one_by_one(upstream, serve):
    go_on = asyncio.Event()

    async def two(_seen: Seen, wire: Wire) -> None:
        await wire.head(Content_Type="text/event-stream", Transfer_Encoding="chunked")
        await wire.chunk(b"data: 1\n\n")
        await go_on.wait()
        await wire.chunk(b"data: 2\n\n")
        await wire.last_chunk()

    upstream.script(two)
    async with serve() as url, Client(url) as client:
        await client.start("POST", "/v1/chat/completions", json.dumps({**CHAT, "stream": True}).encode())
        answer = await client.head()
        assert await client.chunk() == b"data: 1\n\n"  # while the upstream waits for us
        go_on.set()
        assert (await client.rest(answer)).body == b"data: 2\n\n"


async def test_s10_head_goes_out_before_the_first_token(upstream, serve):
    upstream.script(stream_after_head := _HeadThenHang())
    async with serve() as url, Client(url) as client:
        await client.start("POST", "/v1/chat/completions", json.dumps({**CHAT, "stream": True}).encode())
        answer = await client.head()
        assert answer.status == 200
        assert not stream_after_head.closed


class _HeadThenHang:
    closed = False

    async def __call__(self, _seen: Seen, wire: Wire) -> None:
        await wire.head(Content_Type="text/event-stream", Transfer_Encoding="chunked")
        self.closed = await wire.until_closed()


async def test_s10_no_read_timeout_unless_configured(upstream, serve):
    upstream.script(stream(text_stream("slow"), pause_s=0.3), stream(text_stream("slow"), pause_s=0.3))
    async with serve() as url:
        assert (await post(url, {**CHAT, "stream": True})).body == b"".join(text_stream("slow"))
    async with serve(idle_timeout_s=0.1) as url:
        with pytest.raises(Truncated):
            await post(url, {**CHAT, "stream": True})


@pytest.mark.parametrize("streaming", [False, True])
async def test_s05_client_gone_before_the_first_byte_closes_the_upstream(upstream, serve, streaming):
    upstream.default = hang
    async with serve() as url:
        client = Client(url)
        async with client:
            arrived = asyncio.ensure_future(upstream.next_request())
            await client.start("POST", "/v1/chat/completions", json.dumps({**CHAT, "stream": streaming}).encode())
            seen = await arrived
            client.abort()
            async with asyncio.timeout(0.5 * TIME_FACTOR):
                await seen.closed.wait()


async def test_s05_client_gone_inside_a_stream_closes_the_upstream(upstream, serve):
    async def endless(_seen: Seen, wire: Wire) -> None:
        await wire.head(Content_Type="text/event-stream", Transfer_Encoding="chunked")
        while not wire.closed.is_set():
            await wire.chunk(b"data: x\n\n")
            await asyncio.sleep(0.01)

    upstream.script(endless)
    async with serve() as url, Client(url) as client:
        await client.start("POST", "/v1/chat/completions", json.dumps({**CHAT, "stream": True}).encode())
        await client.head()
        await client.chunk()
        client.abort()
        async with asyncio.timeout(0.5 * TIME_FACTOR):
            await upstream.last.closed.wait()


@pytest.mark.skipif(not hasattr(select, "POLLRDHUP"), reason="the kernel does not tell")
@pytest.mark.parametrize("target", ["/v1/chat/completions", "/api/blobs/x"])
@pytest.mark.parametrize("listen", ["tcp", "unix"])
async def test_s05_client_gone_inside_an_upload_that_nobody_takes_closes_the_upstream(serve, tmp_path, target, listen):
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        keys = {"listen": f"unix:{tmp_path}/s"} if listen == "unix" else {}
        async with serve(upstream=f"http://127.0.0.1:{server.getsockname()[1]}", **keys) as url, Client(url) as client:
            size = 40 << 20
            head = f"POST {target} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n"
            upload = asyncio.ensure_future(client.send(head.encode() + bytes(size)))
            taken, _ = await loop.sock_accept(server)
            with taken:
                await loop.sock_recv(taken, 1)
                await _until_stalled(client)
                client.abort()
                watch = select.poll()
                watch.register(taken, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
                events = await asyncio.to_thread(watch.poll, 1000 * PATIENCE_S)
            await asyncio.gather(upload, return_exceptions=True)
    assert events


async def _until_stalled(client: Client) -> None:
    """Until the daemon takes no more of what this client sends."""
    left, before = client.writer.transport.get_write_buffer_size(), -1
    async with asyncio.timeout(PATIENCE_S):
        while left != before:
            await asyncio.sleep(0.1 * TIME_FACTOR)
            before, left = left, client.writer.transport.get_write_buffer_size()


async def test_s06_stale_keep_alive_costs_no_client_an_error(upstream, serve):
    async def then_fin(_seen: Seen, wire: Wire) -> None:
        await stream(text_stream("a"))(_seen, wire)
        await asyncio.sleep(0.005)
        wire.fin()

    upstream.default = then_fin
    async with serve() as url, Client(url) as client:
        for _ in range(200):
            answer = await client.post({**CHAT, "stream": True})
            assert answer.status == 200
            assert answer.body.endswith(b"data: [DONE]\n\n")
    assert len(upstream.requests) == 200


async def test_s06_a_reused_socket_that_dies_silently_is_retried_once(upstream, serve):
    async def die(_seen: Seen, wire: Wire) -> None:
        wire.reset()

    async with serve() as url:
        await post(url, CHAT)
        upstream.script(die)
        answer = await post(url, CHAT)
    assert answer.status == 200
    assert len(upstream.requests) == 3
    assert upstream.requests[1].connection == upstream.requests[0].connection != upstream.requests[2].connection


async def test_s06_no_retry_on_a_fresh_socket_nor_after_a_response_byte(upstream, serve):
    async def die(_seen: Seen, wire: Wire) -> None:
        wire.reset()

    async def half_a_head(_seen: Seen, wire: Wire) -> None:
        await wire.send(b"HTTP/1.1 200")
        await asyncio.sleep(0.02)
        wire.reset()

    async with serve() as url:
        upstream.script(die)
        assert (await post(url, CHAT)).status == 502
        assert len(upstream.requests) == 1
        await post(url, CHAT)
        upstream.script(half_a_head)
        assert (await post(url, CHAT)).status == 502
    assert len(upstream.requests) == 3


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
async def test_s11_reset_inside_a_response_never_looks_complete(upstream, serve, framing, version):
    async def broken(_seen: Seen, wire: Wire) -> None:
        extra = {"chunked": {"Transfer_Encoding": "chunked"}, "length": {"Content_Length": "1000"}, "close": {}}[
            framing
        ]
        await wire.head(Content_Type="text/event-stream", **extra)
        for event in text_stream("a", "b")[:2]:
            await (wire.chunk(event) if framing == "chunked" else wire.send(event))
        await asyncio.sleep(0.05)
        wire.reset()

    upstream.script(broken)
    async with serve() as url, Client(url) as client:
        await client.start("POST", "/v1/chat/completions", json.dumps({**CHAT, "stream": True}).encode(), version)
        with pytest.raises(Truncated) as caught:
            await client.rest(await client.head())
    assert b"[DONE]" not in caught.value.args[0]


async def test_upstream_down_is_a_502_that_says_how_to_set_it(upstream, serve):
    await upstream.stop()
    async with serve() as url:
        answer = await post(url, CHAT)
    assert answer.status == 502
    error = answer.json()["error"]
    assert error["src"] == "whetherman-edge"
    for part in (upstream.url, "--upstream", "WHETHERMAN_UPSTREAM"):
        assert part in error["message"]


async def test_garbage_from_the_upstream_is_a_502(upstream, serve):
    async def garbage(_seen: Seen, wire: Wire) -> None:
        await wire.send(b"\x16\x03\x01 this is not HTTP\r\n\r\n")
        await wire.until_closed()

    upstream.script(garbage)
    async with serve() as url:
        answer = await post(url, CHAT)
    assert answer.status == 502
    assert "this is not" not in answer.body.decode()


async def test_s08_our_errors_leave_the_connection_usable(upstream, serve):
    async def die(_seen: Seen, wire: Wire) -> None:
        wire.reset()

    upstream.script(die)
    async with serve() as url, Client(url) as client:
        first = await client.post(CHAT)
        assert first.status == 502
        assert int(first.header("Content-Length") or 0) == len(first.body)
        assert first.header("Transfer-Encoding") is None
        assert (await client.post(CHAT)).json() == completion()


async def test_expect_100_continue_is_answered(upstream, serve):
    body = json.dumps(CHAT).encode()
    async with serve() as url, Client(url) as client:
        await client.send(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body)
        )
        assert (await client.head()).status == 100
        await client.send(body)
        answer = await client.rest(await client.head())
    assert answer.status == 200
    assert upstream.last.body == body
    assert "expect" not in upstream.last.names()


async def test_s09_uploads_on_other_paths_stream_without_a_cap(upstream, serve):
    part = b"\x00\x01" * 32_768
    async with serve(body_bytes_max=1024) as url, Client(url) as client:
        await client.send(b"POST /api/blobs/x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(64):
            await client.send(b"%x\r\n%b\r\n" % (len(part), part))
        await client.send(b"0\r\n\r\n")
        answer = await client.rest(await client.head())
    assert answer.status == 200
    assert upstream.last.body == part * 64


@pytest.mark.parametrize("side", ["client", "upstream", "both"])
async def test_o09_unix_sockets_on_either_side(serve, tmp_path, side):
    fake = await FakeUpstream().start(str(tmp_path / "up.sock") if side != "client" else "")
    keys = {"upstream": fake.url}
    if side != "upstream":
        keys["listen"] = f"unix:{tmp_path / 'w.sock'}"
    try:
        async with serve(**keys) as url:
            answer = await post(url, CHAT)
            if side != "upstream":
                assert (tmp_path / "w.sock").stat().st_mode & 0o777 == 0o600
        assert answer.status == 200
        host = fake.last.header("host")
        assert host == (b"localhost" if side != "client" else fake.url.removeprefix("http://").encode())
        assert not (tmp_path / "w.sock").exists()
    finally:
        await fake.stop()


async def test_drain_lets_a_running_request_finish(upstream, serve):
    go_on = asyncio.Event()

    async def wait(_seen: Seen, wire: Wire) -> None:
        await go_on.wait()
        await reply(completion("late"))(_seen, wire)

    upstream.script(wait)
    async with contextlib.AsyncExitStack() as stack:
        async with serve(drain_timeout_s=PATIENCE_S) as url:
            client = await stack.enter_async_context(Client(url))
            arrived = asyncio.ensure_future(upstream.next_request())
            await client.start("POST", "/v1/chat/completions", json.dumps(CHAT).encode())
            await arrived
            asyncio.get_running_loop().call_later(0.05, go_on.set)
        answer = await client.rest(await client.head())
    assert answer.json() == completion("late")
