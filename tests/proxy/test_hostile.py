"""Clients that break HTTP: an answer in the 400s or a closed connection, and nothing reaches the upstream."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.fakes.chats import CHAT
from tests.fakes.client import Client, post
from tests.fakes.upstream import PATIENCE_S

BODY = b'{"model":"m","messages":[]}'
POST = b"POST / HTTP/1.1\r\nHost: localhost\r\n"
BAD = {
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
    "no version": b"GET /v1/models\r\n\r\n",
    "space in the target": b"GET /v1/mo dels HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "control character in a header": b"GET / HTTP/1.1\r\nHost: localhost\r\nX: a\x00b\r\n\r\n",
    "header without a name": b"GET / HTTP/1.1\r\nHost: localhost\r\n: x\r\n\r\n",
    "line folding": b"GET / HTTP/1.1\r\nHost: localhost\r\nX: a\r\n b\r\n\r\n",
    "negative length": b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "length and chunked": POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked twice": POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "huge header": b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 200_000 + b"\r\n\r\n",
    "many headers": b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: 1\r\n" * 5000 + b"\r\n",
    "two hosts": b"GET /x HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_requests_are_answered_and_go_nowhere(upstream, serve, judge, name):
    async with serve() as url:
        async with Client(url) as client:
            await client.send(BAD[name])
            client.writer.write_eof()
            async with asyncio.timeout(PATIENCE_S):
                try:
                    answer = await client.reader.read()
                except ConnectionError:
                    answer = b""
        assert answer == b"" or answer.split(b" ", 2)[1][:1] == b"4", answer[:200]
        assert upstream.requests == []
        assert (await post(url, CHAT)).status == 200


async def test_o10_what_is_no_http_gets_an_error_of_ours_that_quotes_nothing(upstream, serve, judge, caplog):
    lines = [
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer SECRET\x01\r\n\r\n",
        b"GET /\xc3\xbc?SECRET HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01SECRET\r\n\r\n",
    ]
    async with serve() as url:
        for line in lines:
            async with Client(url) as client:
                await client.send(line)
                answer = await client.rest(await client.head())
                assert await client.reader.read() == b""
            assert answer.status == 400
            error = answer.json()["error"]
            assert (error["type"], error["code"], error["src"]) == (
                "invalid_request_error",
                "bad_http",
                "whetherman-edge",
            )
            assert b"SECRET" not in answer.body
            assert "aiohttp" not in str(answer.raw_headers)
    assert caplog.text.count("event=bad_http") == 3
    assert "SECRET" not in caplog.text
    assert upstream.requests == []


async def test_a_broken_chunk_inside_a_body_reaches_no_upstream_as_a_whole_request(upstream, serve, judge):
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with serve() as url:
        async with Client(url) as client:
            await client.send(head + b'5\r\n{"mod\r\nZZ\r\nrest')
            async with asyncio.timeout(PATIENCE_S):
                try:
                    answer = await client.reader.read()
                except ConnectionError:
                    answer = b""
        assert answer == b"" or answer.split(b" ", 2)[1][:1] == b"4", answer[:200]
        assert upstream.requests == []
        assert (await post(url, CHAT)).status == 200


async def test_requests_on_one_connection_do_not_mix(upstream, serve, judge):
    one = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
    async with serve() as url, Client(url) as client:
        await client.send(one * 20)
        answers = [await client.rest(await client.head()) for _ in range(20)]
    assert {answer.status for answer in answers} == {200}
    assert [seen.body for seen in upstream.requests] == [BODY] * 20


async def test_random_bytes_never_end_the_daemon(upstream, serve, judge):
    chance = random.Random(7)
    good = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
    async with serve() as url:
        for _ in range(60):
            data = bytearray(good)
            for _ in range(chance.randrange(1, 6)):
                data[chance.randrange(len(data))] = chance.randrange(256)
            async with Client(url) as client:
                await client.send(bytes(data))
                client.writer.write_eof()
                async with asyncio.timeout(PATIENCE_S):
                    try:
                        await client.reader.read()
                    except ConnectionError:
                        pass
        assert (await post(url, CHAT)).status == 200
