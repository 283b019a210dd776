"""Our own endpoints: health, metrics, decide. None of them reaches the model."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.fakes.chats import CHAT, body_of, said
from tests.fakes.client import Client, once, post
from tests.fakes.judge import verdict
from tests.fakes.upstream import PATIENCE_S, reply

OWN = ("/livez", "/readyz", "/health", "/metrics")


async def test_o12_health_with_the_upstream_up(upstream, serve, judge):
    async with serve() as url:
        answers = {path: await once(url, "GET", path) for path in OWN}
        head = await once(url, "HEAD", "/readyz")
    assert {answer.status for answer in answers.values()} == {200}
    assert answers["/health"].json()["upstream"] == upstream.url
    assert (head.status, head.body) == (200, b"")
    assert upstream.requests == []


async def test_o12_health_with_the_upstream_down(upstream, serve, judge):
    await upstream.stop()
    async with serve() as url:
        answers = {path: await once(url, "GET", path) for path in OWN}
        models = await once(url, "GET", "/v1/models")
    assert [answers[path].status for path in OWN] == [200, 503, 200, 200]
    cause = answers["/readyz"].json()["causes"]["upstream"]
    assert upstream.url in cause
    assert "--upstream" in cause
    assert answers["/health"].json()["status"] == "degraded"
    assert models.status == 502


async def test_the_kind_of_a_named_upstream_is_found_out_beside_serving(upstream, serve, judge):
    upstream.default = reply({"object": "list", "data": [{"id": "qwen", "object": "model", "owned_by": "library"}]})
    async with serve(upstream_kind="auto", force="ANSWER", intervention="none") as url:
        async with asyncio.timeout(PATIENCE_S):
            while (await once(url, "GET", "/health")).json()["upstream_kind"] != "ollama":
                pass
        await post(url, CHAT)
    assert "tool_choice" not in upstream.last.json()  # Ollama ignores "none"


async def test_o12_models_is_asked_of_the_upstream(upstream, serve, judge):
    upstream.default = reply({"object": "list", "data": [{"id": "qwen"}]})
    async with serve() as url:
        answer = await once(url, "GET", "/v1/models")
    assert answer.json()["data"] == [{"id": "qwen"}]


async def test_metrics_are_prometheus_text(upstream, serve, judge):
    judge.verdict = verdict("ANSWER", 0.99)
    async with serve() as url:
        await post(url, CHAT)
        await post(url, {**CHAT, "tools": []})
        answer = await once(url, "GET", "/metrics")
    assert answer.header("Content-Type") == "text/plain; version=0.0.4; charset=utf-8"
    lines = answer.body.decode().splitlines()
    assert 'whetherman_requests_total{kind="chat",decision="ACT",applied="no",reason="bypass:no_tools"} 1' in lines
    assert "whetherman_gate_ms_count 2" in lines
    names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
    for line in lines:
        assert line.startswith("#") or float(line.rsplit(" ", 1)[1]) >= 0


async def test_own_paths_answer_405_for_other_methods(upstream, serve, judge):
    async with serve() as url:
        answer = await once(url, "PUT", "/metrics")
        decide = await once(url, "GET", "/v1/decide")
    assert (answer.status, answer.header("Allow")) == (405, "GET")
    assert (decide.status, decide.header("Allow")) == (405, "POST")
    assert upstream.requests == []


async def test_s16_a_websocket_is_told_426_and_the_next_post_works(upstream, serve, judge):
    async with serve() as url:
        upgrade = {
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec_WebSocket_Key": "x",
            "Sec_WebSocket_Version": "13",
        }
        assert (await once(url, "GET", "/v1/responses", **upgrade)).status == 426
        assert (await once(url, "GET", "/v1/responses")).status == 200
        assert (await post(url, {"model": "m", "input": "hi"}, "/v1/responses")).status == 200


@pytest.mark.parametrize("offer", ["h2c", "TLS/1.2, foo", "foo"])
async def test_s16_other_upgrades_are_passed_over_and_the_request_is_served(upstream, serve, judge, offer):
    headers = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": offer, "HTTP2_Settings": "AAEAAEAAAAIAAAABAAMAAABk"}
    async with serve() as url, Client(url) as client:
        for target in ("/v1/chat/completions", "/v1/embeddings", "/v1/chat/completions"):
            answer = await client.post(CHAT, target, **headers)
            assert (answer.status, upstream.last.json()) == (200, CHAT)
            assert upstream.last.names().isdisjoint({"upgrade", "http2-settings", "connection"})
    assert len(upstream.requests) == 3


async def test_decide_gives_a_record_and_sends_nothing_upstream(upstream, serve, judge):
    judge.verdict = verdict("DECLINE", 0.91)
    async with serve() as url:
        answer = await post(url, CHAT, "/v1/decide")
    record = answer.json()
    assert list(record) == [
        "id",
        "verdict",
        "decision",
        "probabilities",
        "confidence",
        "p_need",
        "engine",
        "ms",
        "applied",
        "reason",
    ]
    assert (record["verdict"], record["applied"], record["engine"]) == ("DECLINE", "no", "static")
    assert list(record["probabilities"]) == ["ACT", "ANSWER", "ASK", "DECLINE"]
    assert sum(record["probabilities"].values()) == pytest.approx(1.0)
    assert record["p_need"] == pytest.approx(0.03)
    assert upstream.requests == []


async def test_decide_says_what_would_be_applied(upstream, serve, judge):
    async with serve(force="ANSWER") as url:
        assert (await post(url, CHAT, "/v1/decide")).json()["applied"] == "yes"
        assert (await post(url, CHAT, "/v1/decide", x_whetherman_mode="shadow")).json()["applied"] == "no"


@pytest.mark.parametrize(
    ("body", "status", "param", "kind"),
    [
        (b"", 400, "body", "json_invalid"),
        (b'{"messages": [', 400, "body", "json_invalid"),
        (b"\xff\xfe", 400, "body", "json_invalid"),
        (b"[]", 422, "body", "type_error"),
        (b"{}", 422, "body.messages", "missing"),
        (b'{"messages": "hi"}', 422, "body.messages", "type_error"),
        (b'{"messages": [{"content": "hi"}]}', 422, "body.messages.0.role", "missing"),
        (b'{"messages": [{"role": "user"}, {"role": 7}]}', 422, "body.messages.1.role", "type_error"),
        (b'{"messages": [], "tools": {"a": 1}}', 422, "body.tools", "type_error"),
        (b'{"messages": [], "tools": [1]}', 422, "body.tools.0", "type_error"),
        (b'{"messages": [], "messages": []}', 422, "body", "view_error"),
        (b'{"messages": [], "x": ' + b"[" * 100_000, 400, "body", "json_invalid"),
    ],
)
async def test_decide_names_the_field_and_the_fault(upstream, serve, judge, body, status, param, kind):
    async with serve() as url, Client(url) as client:
        answer = await client.post(body, "/v1/decide")
        assert answer.status == status, answer.body
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == (param, kind)
        assert "expected" in error["message"].lower()
        assert answer.json()["detail"][0]["loc"][0] == "body"
        assert (await client.post(CHAT, "/v1/decide")).status == 200  # the connection stays usable


async def test_decide_refuses_what_is_too_large(upstream, serve, judge):
    async with serve(body_bytes_max=2048) as url:
        answer = await post(url, {**CHAT, "pad": "x" * 4096}, "/v1/decide")
    assert answer.status == 413


async def test_decide_with_an_unknown_profile_is_an_error_and_a_chat_is_not(upstream, serve, judge):
    async with serve() as url:
        decided = await post(url, CHAT, "/v1/decide", x_whetherman_profile="nope")
        chatted = await post(url, CHAT, x_whetherman_profile="nope")
    assert decided.status == 422
    assert decided.json()["error"]["code"] == "profile_unknown"
    assert chatted.status == 200
    assert said(chatted)[2] == "profile_unknown"
    assert json.loads(upstream.last.body) == json.loads(body_of(CHAT))
