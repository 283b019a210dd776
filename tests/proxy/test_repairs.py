"""strip_unsupported and map_developer (field cases C11, R12): what they change; without them nothing does."""

from __future__ import annotations

import gzip
import json

import pytest

from tests.fakes.chats import CHAT, body_of, metric, said
from tests.fakes.client import post
from tests.fakes.upstream import completion, reply
from whetherman_edge.dialects.developer import developer_as_system
from whetherman_edge.errors import ViewError

REFUSAL = {"error": "registry.ollama.ai/library/gemma3:1b does not support tools"}
FLAT = {"type": "function", "name": "search", "parameters": {"type": "object", "properties": {}}}
MESSAGES_TOOL = {"name": "search", "description": "Search.", "input_schema": {"type": "object", "properties": {}}}
BODIES = {
    "/v1/chat/completions": {**CHAT, "tool_choice": "auto", "parallel_tool_calls": True},
    "/api/chat": CHAT,
    "/v1/responses": {"model": "m", "input": "hi", "tools": [FLAT]},
    "/v1/messages": {
        "model": "m",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [MESSAGES_TOOL],
    },
}


def refusing(refusal: object = REFUSAL, status: str = "400 Bad Request", **how):
    return reply(refusal, status=status, **how)


@pytest.mark.parametrize("mode", ["shadow", "enforce"])
@pytest.mark.parametrize("path", BODIES)
async def test_c11_one_retry_without_tools_flagged_and_remembered(upstream, serve, judge, path, mode):
    upstream.script(refusing())
    body = BODIES[path]
    async with serve(strip_unsupported=True, mode=mode, force="ACT") as url:
        first, second = [await post(url, body, path) for _ in range(2)]
        other = await post(url, {**body, "model": "another"}, path)
        assert await metric(url, 'resent_total{cause="tools_unsupported"}') == 1
    assert [answer.status for answer in (first, second, other)] == [200, 200, 200]
    assert said(first) == said(second) == ("ACT", "yes", "tools_unsupported")
    assert said(other)[1] == "no"
    sent = [json.loads(seen.body) for seen in upstream.requests]
    assert ["tools" in one for one in sent] == [True, False, False, True]
    assert (
        sent[1]
        == sent[2]
        == {k: v for k, v in body.items() if k not in ("tools", "tool_choice", "parallel_tool_calls")}
    )
    assert upstream.requests[0].body == body_of(body)


@pytest.mark.parametrize("intervention", ["note", "none"])
@pytest.mark.parametrize("status", ["400 Bad Request", "404 Not Found"])
async def test_c11_a_steered_request_too_costs_one_retry_and_its_edit_is_not_blamed(
    upstream, serve, judge, intervention, status
):
    upstream.script(refusing(status=status))
    async with serve(strip_unsupported=True, force="ANSWER", intervention=intervention, upstream_kind="vllm") as url:
        first = await post(url, CHAT)
        assert [said(one) for one in (first, await post(url, CHAT))] == [("ACT", "yes", "tools_unsupported")] * 2
        causes = ("tools_unsupported", "refused")
        assert [await metric(url, f'resent_total{{cause="{cause}"}}') for cause in causes] == [1, 0]
        other = await post(url, {**CHAT, "model": "another"})
    assert (first.status, said(other)[:2]) == (200, ("ANSWER", "yes"))
    assert ["tools" in json.loads(seen.body) for seen in upstream.requests] == [True, False, False, True]


async def test_c11_another_error_of_a_steered_request_is_handled_as_ever(upstream, serve, judge):
    upstream.script(refusing({"error": "no such field"}), reply(completion()), refusing({"error": "nobody"}, "401 No"))
    async with serve(strip_unsupported=True, force="ANSWER", intervention="note") as url:
        assert said(await post(url, CHAT)) == ("ANSWER", "no", "refused")
        rejected = await post(url, {**CHAT, "model": "another"})
    assert (rejected.status, rejected.json()) == (401, {"error": "nobody"})
    assert len(upstream.requests) == 3


@pytest.mark.parametrize(
    ("refusal", "status"),
    [
        ({"error": {"message": "tools param requires --jinja flag"}}, "500 Internal Server Error"),
        ({"error": {"message": "No endpoints found that support tool use. To learn more"}}, "404 Not Found"),
    ],
)
@pytest.mark.parametrize("encoding", [None, "gzip"])
async def test_c11_as_other_servers_say_it(upstream, serve, judge, refusal, status, encoding):
    upstream.script(refusing(refusal, status, encoding=encoding))
    async with serve(strip_unsupported=True) as url:
        assert (await post(url, CHAT)).json() == completion()


async def test_c11_the_retrys_own_error_is_relayed_and_there_is_no_third_request(upstream, serve, judge):
    upstream.default = refusing()
    async with serve(strip_unsupported=True) as url:
        answer = await post(url, CHAT)
    assert (answer.status, answer.json()) == (400, REFUSAL)
    assert len(upstream.requests) == 2


@pytest.mark.parametrize("keys", [{}, {"strip_unsupported": True}])
async def test_c11_other_errors_and_the_default_are_relayed(upstream, serve, judge, keys):
    refusal = REFUSAL if not keys else {"error": "context length exceeded"}
    upstream.default = refusing(refusal, chunked=True)
    async with serve(**keys) as url:
        answer = await post(url, CHAT)
    assert (answer.status, answer.json()) == (400, refusal)
    assert [seen.body for seen in upstream.requests] == [body_of(CHAT)]


async def test_c11_a_forced_call_and_a_request_that_is_off_get_the_servers_own_word(upstream, serve, judge):
    upstream.default = refusing()
    async with serve(strip_unsupported=True) as url:
        assert (await post(url, {**CHAT, "tool_choice": "required"})).status == 400
        assert (await post(url, CHAT, x_whetherman_mode="off")).status == 400
    assert len(upstream.requests) == 2


async def test_c11_an_upstream_that_dies_before_the_retry_is_a_502(upstream, serve, judge):
    async def reset(_seen, wire):
        wire.reset()

    upstream.script(refusing(), reset, reset)
    async with serve(strip_unsupported=True) as url:
        answer = await post(url, CHAT)
    assert answer.status == 502
    assert answer.json()["error"]["src"] == "whetherman-edge"


DEVELOPER = (
    b'{"model" : "m","messages":[ {"role":"developer","content":"never \\"developer\\""},\n '
    b'{"content":"developer","role": "user"}],"x":"developer"}'
)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat", "/v1/responses"])
async def test_r12_map_developer_changes_the_role_and_no_other_byte(upstream, serve, judge, path):
    body = DEVELOPER.replace(b'"messages"', b'"input"') if path == "/v1/responses" else DEVELOPER
    async with serve(map_developer="system", mode="shadow") as url:
        assert (await post(url, body, path)).status == 200
        assert await metric(url, "roles_mapped_total") == 1
    assert upstream.last.body == body.replace(b'"role":"developer"', b'"role":"system"')
    assert upstream.last.header("Content-Length") == str(len(upstream.last.body)).encode()


async def test_r12_what_is_steered_is_mapped_too(upstream, serve, judge):
    body = {**CHAT, "messages": [{"role": "developer", "content": "x"}, *CHAT["messages"]]}
    async with serve(map_developer="system", mode="enforce", force="ANSWER", intervention="note") as url:
        assert said(await post(url, body))[:2] == ("ANSWER", "yes")
    assert [turn["role"] for turn in upstream.last.json()["messages"]] == ["system", "user"]


async def test_r12_what_is_compressed_or_odd_or_has_no_such_role_passes(upstream, serve, judge):
    packed = gzip.compress(DEVELOPER, mtime=0)
    async with serve(map_developer="system") as url:
        await post(url, packed, Content_Encoding="gzip")
        await post(url, DEVELOPER[:-1])
        await post(url, DEVELOPER, Digest="sha-256=x")
        await post(url, CHAT)
    assert [seen.body for seen in upstream.requests] == [packed, DEVELOPER[:-1], DEVELOPER, body_of(CHAT)]


def test_r12_the_edit_itself():
    assert developer_as_system(b'{"input":"developer"}') == b'{"input":"developer"}'
    assert developer_as_system(b'{"messages":"developer","input":["developer",{"role":"developer"}]}') == (
        b'{"messages":"developer","input":["developer",{"role":"system"}]}'
    )
    assert developer_as_system(b'{"messages":[{"role":null},{"x":"developer"},{}]}').endswith(b"{}]}")
    for broken in (b'["developer"]', b'{"messages":["developer"', b'{"messages":[{"role":"developer","role":"x"}]}'):
        with pytest.raises(ViewError):
            developer_as_system(broken)
