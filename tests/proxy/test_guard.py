"""Host, Origin and key (field case S19)."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.fakes.client import once, post
from tests.fakes.upstream import reply
from whetherman_edge.errors import ConfigError
from whetherman_edge.proxy.guard import Guard, check_bind

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def verdict(guard: Guard, **headers: str) -> int:
    named = {name.replace("_", "-").lower(): value for name, value in headers.items()}
    refusal = guard.check(named, over_tcp=True)
    return refusal.status if refusal else 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8088", 200),
        ("127.0.0.1:8088", 200),
        ("127.9.9.9", 200),
        ("[::1]:8088", 200),
        ("app.localhost:1", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("evil.com:80@localhost", 403),
        ("evil.com@127.0.0.1:8088", 403),
        ("evil.com/@localhost", 403),
        ("localhost/x", 403),
        ("localhost?x", 403),
        ("localhost#x", 403),
        ("127.0.0.1.evil.example", 403),
        ("10.0.0.5:8088", 403),
        ("", 403),
        ("[", 403),
        ("box.lan", 403),
    ],
)
def test_s19_foreign_hosts_are_refused(host, status):
    assert verdict(Guard(host="127.0.0.1"), Host=host) == status


def test_configured_and_bound_hosts_are_served():
    guard = Guard(host="192.168.1.7", allowed_hosts=("box.lan", "*.corp.example"))
    assert [verdict(guard, Host=h) for h in ("192.168.1.7:1", "box.lan", "a.corp.example", "other.lan")] == [
        200,
        200,
        200,
        403,
    ]
    everywhere = Guard(host="0.0.0.0")
    assert [verdict(everywhere, Host=h) for h in ("10.0.0.5:8088", "rebound.example")] == [200, 403]


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:3000", 200),
        ("http://127.0.0.1", 200),
        ("https://evil.example", 403),
        ("null", 403),
        ("file://", 403),
        ("http://localhost.evil.example", 403),
    ],
)
def test_s19_cross_site_origins_are_refused(origin, status):
    assert verdict(Guard(host="127.0.0.1"), Origin=origin) == status


def test_s19_allowed_origins_are_served():
    guard = Guard(host="127.0.0.1", allowed_origins=("null", "vscode-webview://*", "https://ui.example"))
    for origin in ("null", "vscode-webview://abc", "https://ui.example"):
        assert verdict(guard, Origin=origin) == 200


def test_the_key_is_taken_from_either_header_and_compared_whole():
    guard = Guard(host="127.0.0.1", api_key="sésame")
    assert verdict(guard, Authorization="Bearer sésame") == 200
    assert verdict(guard, Authorization="bearer sésame") == 200
    assert verdict(guard, x_api_key="sésame") == 200
    for headers in ({}, {"x_api_key": "sésam"}, {"Authorization": "Basic sésame"}, {"Authorization": "Bearer "}):
        assert verdict(guard, **headers) == 401


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "box.lan"])
def test_a_public_bind_needs_a_key(host):
    with pytest.raises(ConfigError, match="api_key"):
        check_bind(host, "")
    check_bind(host, "key")
    check_bind("127.0.0.1", "")
    check_bind("localhost", "")
    check_bind("::1", "")


async def test_s19_host_is_rewritten_and_origin_not_forwarded(upstream, serve):
    async with serve(allowed_origins=("null",)) as url:
        answer = await post(url, CHAT, Host="localhost:1234", Origin="null")
        preflight = await once(
            url, "OPTIONS", "/v1/chat/completions", Origin="null", Access_Control_Request_Method="POST"
        )
    assert answer.status == 200
    assert answer.header("Access-Control-Allow-Origin") == "null"
    assert upstream.last.header("host") == upstream.url.removeprefix("http://").encode()
    assert "origin" not in upstream.last.names()
    assert preflight.status == 204
    assert len(upstream.requests) == 1


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_s19_an_upstream_with_an_opinion_on_origins_does_not_double_ours(upstream, serve, method):
    theirs = {"Access_Control_Allow_Origin": "*", "Access_Control_Allow_Credentials": "true"}
    upstream.default = reply({"data": []}, **theirs, Access_Control_Expose_Headers="x-request-id")
    origin = "http://localhost:3000"
    path = "/v1/models" if method == "GET" else "/v1/chat/completions"
    async with serve() as url:
        ours = await once(url, method, path, b"{}" if method == "POST" else b"", Origin=origin)
        plain = await once(url, method, path, b"{}" if method == "POST" else b"")
    words = [(name.lower(), value) for name, value in ours.raw_headers if name.lower().startswith("access-control-")]
    assert [value for name, value in words if name == "access-control-allow-origin"] == [origin]
    assert ("access-control-allow-credentials", "true") not in words
    assert ("access-control-expose-headers", "x-request-id") in words
    assert plain.header("access-control-allow-origin") == "*"


async def test_refusals_reach_no_upstream_and_name_the_setting(upstream, serve):
    async with serve() as url:
        host = await post(url, CHAT, Host="evil.example")
        origin = await post(url, CHAT, Origin="https://evil.example")
    assert (host.status, origin.status) == (403, 403)
    assert "allowed_hosts" in host.json()["error"]["message"]
    assert "allowed_origins" in origin.json()["error"]["message"]
    assert upstream.requests == []


async def test_our_key_is_checked_and_never_forwarded(upstream, serve):
    async with serve(api_key="ours", upstream_api_key="theirs") as url:
        assert (await post(url, CHAT)).status == 401
        assert (await post(url, CHAT, Authorization="Bearer ours")).status == 200
        assert upstream.last.header("authorization") == b"Bearer theirs"
        await post(url, CHAT, x_api_key="ours", Authorization="Bearer mine")
        assert upstream.last.header("authorization") == b"Bearer mine"
        assert upstream.last.header("x-api-key") is None
        assert (await once(url, "GET", "/livez")).status == 200
        assert (await once(url, "GET", "/metrics")).status == 401


async def test_o10_no_key_nor_prompt_in_any_log(upstream, serve, caplog):
    caplog.set_level("DEBUG", logger="whetherman_edge")
    chat = {"model": "m", "messages": [{"role": "user", "content": "PROMPTTEXT"}]}
    async with serve(api_key="OURKEY") as url:
        await post(url, chat, Authorization="Bearer WRONGKEY")
        await post(url, chat, "/v1/chat/completions?key=QUERYKEY", Authorization="Bearer OURKEY", x_api_key="OTHERKEY")
        await upstream.stop()
        await post(url, json.dumps(chat).encode()[:-1], "/v1/x?key=QUERYKEY", Authorization="Bearer OURKEY")
        await asyncio.sleep(0)
    assert caplog.records
    for word in ("PROMPTTEXT", "OURKEY", "WRONGKEY", "QUERYKEY", "OTHERKEY"):
        assert word not in caplog.text
