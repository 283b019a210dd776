"""POST /v1/systemone over HTTP, and the model list that is merged with the upstream's."""

from __future__ import annotations

import asyncio
import gzip
import json
import sys
import types
import zlib
from typing import Any

import backports.zstd
import pytest
import zstandard

from tests.fakes.client import once, post
from tests.fakes.upstream import FakeUpstream, hang, reply
from whetherman_edge.dialects import system_one as s1
from whetherman_edge.dialects.json_spans import VALUES_MAX
from whetherman_edge.dialects.system_one import Refusal
from whetherman_edge.dialects.system_one_answer import MODELS, Judgement
from whetherman_edge.errors import ArtifactError, ViewError
from whetherman_edge.gate.verdict import Verdict
from whetherman_edge.ledger.counters import Counters
from whetherman_edge.proxy import inflate as inflating
from whetherman_edge.proxy import models
from whetherman_edge.proxy.inflate import inflate
from whetherman_edge.proxy.models import merge
from whetherman_edge.proxy.systemone import SystemOne

PATH = "/v1/systemone"
ASK: dict[str, Any] = {
    "model": "jev-latest",
    "state": "I was charged twice for my invoice.",
    "questions": {
        "team": {"type": "choice", "criteria": {"Billing": "Payments and invoices", "Weather": "Forecasts"}},
        "refund": {"type": "noul", "instructions": "Is it about an invoice?"},
        "anger": {"type": "score", "criteria": ["Calm", "Furious"]},
    },
}


async def test_an_answer(serve, upstream):
    async with serve() as url:
        answer = await post(url, ASK, PATH)
    got = answer.json()
    assert answer.status == 200
    assert answer.header("content-type") == "application/json"
    assert answer.header("x-typesafe-request-id").startswith("req_")
    assert got["model"] == "whetherman-edge-0"
    assert got["answers"]["team"]["choice"] == "Billing"
    assert got["answers"]["refund"]["noul"] > 0.5
    assert got["answers"]["anger"]["legend"] == {"0": "Calm", "1": "Furious"}
    assert got["usage"]["input_tokens"] > 0
    assert got["x_engine"] == "static"
    assert b"/v1/systemone" not in {seen.target for seen in upstream.requests}


async def test_the_route_api_and_a_choice_agree(serve):
    from whetherman_edge.router.scorer import Scorer
    from whetherman_edge.router.table import RouterTable

    options = {f"tool_{i}": f"does thing number {i} with files" for i in range(40)}
    routed = Scorer(RouterTable.open()).route(ASK["state"], options)
    async with serve() as url:
        body = {**ASK, "questions": {"q": {"type": "choice", "criteria": options}}}
        got = (await post(url, body, PATH)).json()["answers"]["q"]
    assert got["choice"] == routed.choice
    assert got["probabilities"] == pytest.approx(dict(routed.probabilities), abs=2e-6)


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [
        ("zstd", zstandard.ZstdCompressor().compress),
        ("ZSTD", backports.zstd.compress),
        ("gzip", gzip.compress),
        ("deflate", zlib.compress),
        ("identity", bytes),
    ],
)
async def test_compressed_bodies(serve, encoding, pack):
    async with serve() as url:
        plain = (await post(url, ASK, PATH)).json()["answers"]
        answer = await post(url, pack(json.dumps(ASK).encode()), PATH, Content_Encoding=encoding)
    assert answer.status == 200
    assert answer.json()["answers"] == plain


@pytest.mark.parametrize(
    ("body", "headers", "status", "error_type"),
    [
        (b"{}", {"Content_Encoding": "br"}, 415, "unsupported_content_encoding"),
        (b"{}", {"Content_Encoding": "gzip, zstd"}, 415, "unsupported_content_encoding"),
        (b"not zstd", {"Content_Encoding": "zstd"}, 400, "invalid_content_encoding"),
        (zstandard.compress(b" " * (s1.BODY_BYTES_MAX + 1)), {"Content_Encoding": "zstd"}, 413, "request_too_large"),
        (b" " * (s1.BODY_BYTES_MAX + 1), {}, 413, "request_too_large"),
        (b'{"state":[' + b"{}," * VALUES_MAX + b"{}]}", {}, 413, "request_too_large"),
        (b"--x", {"Content_Type": "multipart/form-data; boundary=x"}, 415, "unsupported_media_type"),
        ({**ASK, "model": "gpt-5"}, {}, 404, "not_found"),
    ],
)
async def test_refusals_have_the_documented_shape(serve, body, headers, status, error_type):
    async with serve() as url:
        answer = await post(url, body, PATH, **headers)
    assert answer.status == status
    assert answer.header("content-type") == "application/json"
    detail = answer.json()["detail"]
    assert detail["error_type"] == error_type
    assert detail["message"]


async def test_an_invalid_body_is_a_422_with_its_faults(serve):
    async with serve() as url:
        answer = await post(url, {"state": "x", "questions": {"q": {"type": "choice", "criteria": {}}}}, PATH)
    assert answer.status == 422
    assert answer.json()["detail"][0]["loc"] == ["body", "questions", "q", "choice", "criteria"]


async def test_a_content_type_is_not_insisted_on(serve):
    async with serve() as url:
        answer = await post(url, ASK, PATH, Content_Type="application/x-www-form-urlencoded")
    assert answer.status == 200


async def test_other_methods_are_405_in_the_same_shape(serve):
    async with serve() as url:
        answer = await once(url, "GET", PATH)
    assert answer.status == 405
    assert answer.header("allow") == "POST"
    assert answer.json()["detail"]["error_type"] == "method_not_allowed" or answer.json()["detail"]["message"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [({}, 401), ({"Authorization": "Bearer wrong"}, 401), ({"Authorization": "Bearer k3y"}, 200)],
)
async def test_the_key(serve, headers, status):
    async with serve(api_key="k3y") as url:
        answer = await post(url, ASK, PATH, **headers)
    assert answer.status == status
    if status == 401:
        assert answer.json()["detail"]["error_type"] == "authentication_error"


async def test_a_large_request_leaves_room_for_others(serve):
    """A thousand questions with new texts are answered while a probe is served in between."""
    many = {f"q{i}": {"type": "noul", "instructions": f"Is it about subject {i} of {i * 7}?"} for i in range(1000)}
    async with serve() as url:
        big = asyncio.ensure_future(post(url, {**ASK, "questions": many}, PATH))
        probe = await once(url, "GET", "/livez")
        assert probe.status == 200
        answer = await big
    assert len(answer.json()["answers"]) == 1000


# --- an upstream that serves the path itself -----------------------------------------------------------------------


async def test_by_default_the_upstream_is_not_asked(serve, upstream):
    upstream.default = reply({"answers": "theirs"})
    async with serve() as url:
        assert (await post(url, ASK, PATH)).json()["model"] == "whetherman-edge-0"
    assert b"/v1/systemone" not in {seen.target for seen in upstream.requests}


async def test_an_upstream_can_be_preferred(serve, upstream):
    upstream.default = reply({"answers": "theirs"})
    body = zstandard.compress(json.dumps(ASK).encode())
    async with serve(prefer_upstream_systemone=True) as url:
        answer = await post(url, body, PATH, Content_Encoding="zstd")
    assert answer.json() == {"answers": "theirs"}
    assert upstream.last.body == body
    assert upstream.last.target == b"/v1/systemone"


@pytest.mark.parametrize("status", ["404 Not Found", "405 Method Not Allowed", "501 Not Implemented"])
async def test_a_preferred_upstream_without_the_path_is_stood_in_for(serve, upstream, status):
    upstream.default = reply({"error": "no such path"}, status=status)
    async with serve(prefer_upstream_systemone=True) as url:
        answer = await post(url, ASK, PATH)
    assert answer.json()["model"] == "whetherman-edge-0"


async def test_a_preferred_upstream_that_is_away_is_stood_in_for(serve):
    async with serve(prefer_upstream_systemone=True, upstream="http://127.0.0.1:1") as url:
        answer = await post(url, ASK, PATH)
        assert answer.json()["model"] == "whetherman-edge-0"
        assert (await post(url, b" " * (s1.BODY_BYTES_MAX + 1), PATH)).status == 413


async def test_a_preferred_upstreams_own_refusal_is_relayed(serve, upstream):
    upstream.default = reply(
        {"detail": {"error_type": "max_tokens_exceeded", "message": "m"}}, status="400 Bad Request"
    )
    async with serve(prefer_upstream_systemone=True) as url:
        assert (await post(url, ASK, PATH)).status == 400


# --- the engine behind it ------------------------------------------------------------------------------------------


class EvenJudge:
    """Even probabilities, and a record of what was asked."""

    def __init__(self) -> None:
        self.asked: list[s1.Question] = []

    def portions(self, question):
        return iter(())

    def judge(self, state, question):
        self.asked.append(question)
        n = len(getattr(question, "options", ())) or len(getattr(question, "levels", ())) or 1
        return Judgement((1 / n,) * n, "even")


CHAT = {
    "messages": [{"role": "user", "content": "weather in Oslo?"}],
    "tools": [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}],
}
GATE_QUESTION = {"gate": {"type": "choice", "criteria": dict.fromkeys(["DECLINE", "ACT", "ANSWER", "ASK"])}}


async def asked(service: SystemOne, state: Any, questions: Any = GATE_QUESTION) -> Any:
    body = json.dumps({"state": state, "questions": questions}).encode()
    answered = await service.respond(body, {})
    assert answered.status == 200
    return json.loads(answered.body)["answers"]


async def test_the_gate_answers_for_its_own_labels():
    bodies = []

    async def gate(body: bytes) -> Verdict:
        bodies.append(json.loads(body))
        return Verdict((0.7, 0.15, 0.1, 0.05), "static")

    service = SystemOne(EvenJudge(), Counters(), gate=gate)
    answer = (await asked(service, CHAT))["gate"]
    assert answer["choice"] == "ACT"
    assert answer["probabilities"] == {"DECLINE": 0.05, "ACT": 0.7, "ANSWER": 0.15, "ASK": 0.1}
    assert answer["x_engine"] == "gate-static"
    assert bodies == [CHAT]
    for names in (["get_weather"], [{"name": "get_weather", "description": "d"}]):
        await asked(service, {**CHAT, "tools": names})
        assert bodies[-1]["tools"][0]["function"]["name"] == "get_weather"
        assert bodies[-1]["tools"][0]["type"] == "function"


@pytest.mark.parametrize(
    "state",
    ["text", [], {"messages": []}, {"messages": CHAT["messages"]}, {**CHAT, "tools": []}, {**CHAT, "messages": "x"}],
)
async def test_without_a_chat_with_tools_the_router_answers(state):
    async def gate(body: bytes) -> Verdict:
        raise AssertionError("not asked")

    service = SystemOne(EvenJudge(), Counters(), gate=gate)
    assert (await asked(service, state))["gate"]["x_engine"] == "even"


@pytest.mark.parametrize("error", [ViewError("no chat"), ArtifactError("missing"), TimeoutError()])
async def test_a_gate_without_a_verdict_is_stood_in_for(error):
    async def gate(body: bytes) -> Verdict:
        raise error

    service = SystemOne(EvenJudge(), Counters(), gate=gate)
    assert (await asked(service, CHAT))["gate"]["x_engine"] == "even"


@pytest.mark.parametrize("broken", [(float("nan"), 0.5, 0.3, 0.2), (0.0, 0.0, 0.0, 0.0), (-1.0, 1.0, 1.0, 0.0)])
async def test_a_gate_whose_values_cannot_be_right_is_stood_in_for(broken, caplog):
    async def gate(body: bytes) -> Verdict:
        return Verdict(broken, "gemma")

    service = SystemOne(EvenJudge(), Counters(), gate=gate)
    assert (await asked(service, CHAT))["gate"]["x_engine"] == "even"
    assert "event=systemone_gate_failed" in caplog.text


async def test_a_gate_that_raises_is_stood_in_for(caplog):
    async def gate(body: bytes) -> Verdict:
        raise ValueError("expected finite log-probabilities")

    service = SystemOne(EvenJudge(), Counters(), gate=gate)
    assert (await asked(service, CHAT))["gate"]["x_engine"] == "even"
    assert "event=systemone_gate_failed" in caplog.text


async def test_other_labels_are_the_routers_business():
    async def gate(body: bytes) -> Verdict:
        raise AssertionError("not asked")

    service = SystemOne(EvenJudge(), Counters(), gate=gate)
    questions = {"q": {"type": "choice", "criteria": dict.fromkeys(["ACT", "ANSWER", "ASK"])}}
    assert (await asked(service, CHAT, questions))["q"]["x_engine"] == "even"


async def test_unsure_choices_can_get_a_second_opinion():
    async def rerank(state, question, judgement):
        return Judgement((0.0, 1.0), "backbone") if question.options[0].name == "a" else None

    service = SystemOne(EvenJudge(), Counters(), rerank=rerank)
    questions = {
        "q": {"type": "choice", "criteria": {"a": None, "b": None}},
        "kept": {"type": "choice", "criteria": {"c": None, "d": None}},
        "n": {"type": "noul", "instructions": "x"},
    }
    answers = await asked(service, "s", questions)
    assert (answers["q"]["choice"], answers["q"]["x_engine"]) == ("b", "backbone")
    assert answers["kept"]["x_engine"] == "even"


async def test_without_an_engine_it_is_unavailable_and_says_why():
    service = SystemOne(None, Counters(), fault="router artifact missing; reinstall")
    answered = await service.respond(json.dumps(ASK).encode(), {})
    assert answered.status == 503
    assert json.loads(answered.body)["detail"] == {
        "error_type": "engine_unavailable",
        "message": "router artifact missing; reinstall",
    }


# --- compressed bodies, the decoder itself -------------------------------------------------------------------------


def _frames(data: bytes) -> dict[str, bytes]:
    streamed = zstandard.ZstdCompressor().compressobj()
    unsized = streamed.compress(data) + streamed.flush()
    sized = zstandard.compress(data)
    return {"sized": sized, "unsized": unsized, "two": sized + unsized}


@pytest.fixture(params=["zstandard", "standard library"])
def zstd_module(request, monkeypatch):
    """Both decoders; ``compression.zstd`` of Python 3.14 is played by its backport."""
    if request.param == "standard library":
        package = types.ModuleType("compression")
        package.zstd = backports.zstd  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "compression", package)
        monkeypatch.setitem(inflating._DECODERS, "zstd", inflating._zstd_standard_library)


@pytest.mark.usefixtures("zstd_module")
def test_zstd_frames_of_every_kind():
    data = b"hello " * 500
    frames = _frames(data)
    assert inflate(frames["sized"], "zstd", 10_000) == data
    assert inflate(frames["unsized"], "zstd", 10_000) == data
    assert inflate(frames["two"], "zstd", 10_000) == data + data
    assert inflate(frames["sized"], "zstd", len(data)) == data


@pytest.mark.usefixtures("zstd_module")
def test_broken_zstd_is_refused():
    frames = _frames(b"hello " * 500)
    broken = [b"", b"no frame at all", frames["sized"] + b"tail"]
    broken += [frame[:cut] for frame in frames.values() for cut in (1, 5, len(frame) // 2, len(frame) - 1)]
    whole = {bytes(frame) for frame in frames.values()}
    for body in broken:
        if body in whole:
            continue
        with pytest.raises(Refusal) as caught:
            inflate(body, "zstd", 10_000)
        assert caught.value.status == 400


@pytest.mark.usefixtures("zstd_module")
def test_a_zstd_bomb_is_stopped_at_the_bound():
    bomb = zstandard.compress(bytes(256 << 20))
    assert len(bomb) < 20_000
    with pytest.raises(Refusal) as caught:
        inflate(bomb, "zstd", 1 << 20)
    assert caught.value.status == 413


@pytest.mark.usefixtures("zstd_module")
def test_a_zstd_window_above_the_limit_is_refused():
    parameters = zstandard.ZstdCompressionParameters(window_log=27)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    body = stream.compress(b"small") + stream.flush()
    with pytest.raises(Refusal):
        inflate(body, "zstd", 1 << 20)


def test_a_gzip_bomb_is_stopped_at_the_bound():
    with pytest.raises(Refusal) as caught:
        inflate(gzip.compress(bytes(64 << 20)), "gzip", 1 << 20)
    assert caught.value.status == 413


def test_without_the_package_zstd_is_a_415_that_names_it(monkeypatch):
    monkeypatch.setattr(inflating, "ZSTD_AVAILABLE", False)
    with pytest.raises(Refusal, match=r"whetherman-edge\[zstd\]") as caught:
        inflate(b"", "zstd", 100)
    assert caught.value.status == 415


# --- GET /v1/models ------------------------------------------------------------------------------------------------

OPENAI_LIST = {"object": "list", "data": [{"id": "qwen", "object": "model", "created": 1, "owned_by": "x"}], "x": 1.50}


async def test_the_upstreams_list_with_ours_in_it(serve, upstream):
    upstream.default = reply(b'{"object": "list", "data": [{"id": "qwen", "n": 1.50}], "x": [1, 2]}', ETag='"e"')
    async with serve() as url:
        answer = await once(url, "GET", "/v1/models?limit=5", Accept_Encoding="gzip", If_None_Match='"e"')
    got = answer.json()
    assert got["data"] == [{"id": "qwen", "n": 1.5}]
    assert b'[{"id": "qwen", "n": 1.50}]' in answer.body
    assert got["x"] == [1, 2]
    assert [model["name"] for model in got["models"]] == ["whetherman-edge-0", "jev-latest"]
    assert answer.header("etag") is None
    assert upstream.last.target == b"/v1/models?limit=5"
    assert not {"accept-encoding", "if-none-match"} & upstream.last.names()


async def test_an_upstream_that_compresses_all_the_same(serve, upstream):
    upstream.default = reply(OPENAI_LIST, encoding="gzip", chunked=True)
    async with serve() as url:
        answer = await once(url, "GET", "/v1/models")
    assert answer.header("content-encoding") is None
    assert answer.json()["data"] == OPENAI_LIST["data"]
    assert len(answer.json()["models"]) == 2


@pytest.mark.parametrize("body", [b"[]", b"not json", b'{"models": "none"}', b"null", b'{"models": {}}'])
async def test_a_list_that_cannot_take_ours_is_passed_on_as_it_is(serve, upstream, body):
    upstream.default = reply(body, content_type="text/plain")
    async with serve() as url:
        answer = await once(url, "GET", "/v1/models")
        for_sdk = await once(url, "GET", "/v1/models", **SDK)
    assert (answer.status, answer.body, answer.header("content-type")) == (200, body, "text/plain")
    assert for_sdk.json()["models"] == list(MODELS)


async def test_a_list_too_long_to_merge_is_passed_on_whole(serve, upstream, monkeypatch):
    monkeypatch.setattr(models, "LIST_BYTES_MAX", 1000)
    value = {"object": "list", "data": [{"id": f"model-{i}"} for i in range(500)]}
    upstream.default = reply(value, chunked=True)
    async with serve() as url:
        answer = await once(url, "GET", "/v1/models")
    assert answer.json() == value


SDK = {"X_TypeSafe_SDK": "python/0.7.5"}


@pytest.mark.parametrize("headers", [SDK, {"User_Agent": "jevcompat/0.1.1"}, {"User_Agent": "TypeSafe/1"}])
async def test_system_one_clients_get_our_list_while_the_upstream_is_away(serve, headers):
    async with serve(upstream="http://127.0.0.1:1") as url:
        answer = await once(url, "GET", "/v1/models", **headers)
    assert answer.status == 200
    assert answer.json() == {"object": "list", "data": [], "models": list(MODELS)}


async def test_other_clients_see_that_the_upstream_is_away(serve):
    async with serve(upstream="http://127.0.0.1:1") as url:
        answer = await once(url, "GET", "/v1/models")
    assert answer.status == 502
    assert answer.json()["error"]["src"] == "whetherman-edge"


async def test_a_slow_upstream_does_not_hold_a_system_one_client(serve, upstream, monkeypatch):
    monkeypatch.setattr(models, "SYSTEM_ONE_WAIT_S", 0.05)
    upstream.default = hang
    async with serve() as url:
        answer = await once(url, "GET", "/v1/models", **SDK)
    assert answer.json()["models"] == list(MODELS)


async def test_an_upstream_that_refuses(serve, upstream: FakeUpstream):
    upstream.default = reply({"error": "key"}, status="401 Unauthorized")
    async with serve() as url:
        plain = await once(url, "GET", "/v1/models")
        for_sdk = await once(url, "GET", "/v1/models", **SDK)
    assert (plain.status, plain.json()) == (401, {"error": "key"})
    assert for_sdk.json()["models"] == list(MODELS)


async def test_head_is_relayed(serve, upstream):
    upstream.default = reply(b"", X_Theirs="yes")
    async with serve() as url:
        answer = await once(url, "HEAD", "/v1/models")
    assert upstream.last.method == "HEAD"
    assert answer.header("x-theirs") == "yes"


async def test_one_model_is_relayed(serve, upstream):
    upstream.default = reply({"id": "qwen"})
    async with serve() as url:
        answer = await once(url, "GET", "/v1/models/qwen")
    assert answer.json() == {"id": "qwen"}


def test_a_models_array_of_their_own_survives_and_is_made_complete():
    theirs = [
        {"name": "qwen.gguf", "model": "qwen.gguf", "modified_at": "", "capabilities": ["completion"]},
        {"id": "no-name", "description": None},
        {"name": "whole", "description": "d", "release_date": "2026-01-01", "more": {"a": 1}},
        "odd",
        {},
    ]
    merged = json.loads(merge(json.dumps({"models": theirs, "object": "list"}).encode()) or b"")
    assert merged["object"] == "list"
    assert merged["data"] == []
    assert merged["models"] == [
        {**theirs[0], "description": "Model of the upstream server.", "release_date": "1970-01-01"},  # type: ignore[dict-item]
        {
            "id": "no-name",
            "name": "no-name",
            "description": "Model of the upstream server.",
            "release_date": "1970-01-01",
        },
        theirs[2],
        "odd",
        {"name": "unnamed", "description": "Model of the upstream server.", "release_date": "1970-01-01"},
        *MODELS,
    ]
