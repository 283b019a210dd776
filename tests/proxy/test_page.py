"""``/whetherman/`` and its data: what is shown, and who is kept out (DNS rebinding, foreign pages, path tricks)."""

from __future__ import annotations

import asyncio
import re

import pytest

from tests.fakes.chats import looping
from tests.fakes.client import Client, once, post
from tests.fakes.upstream import PATIENCE_S, completion, reply, tool_call
from whetherman_edge.ledger import records
from whetherman_edge.proxy import page

TOOL = {"type": "function", "function": {"name": "search", "description": "Search the web for pages."}}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "PROMPTTEXT what is a lease?"}], "tools": [TOOL]}
EVIL = "<script>alert(1)</script>\r\nX-Evil: 1"


@pytest.fixture(autouse=True)
def _own_ledger(monkeypatch, tmp_path):
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path))
    monkeypatch.setattr(records, "FLUSH_EVERY_S", 0.0)


async def data(url: str, query: str = "", n: int = 1) -> dict:
    """The page's data, once ``n`` decisions are written."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            shown = (await once(url, "GET", page.DATA + query)).json()
            if shown["rows"] >= n:
                return shown
            await asyncio.sleep(0.01)


async def test_a_decision_is_recorded_and_shown(serve, judge, tmp_path):
    async with serve() as url:
        await post(url, CHAT, x_session_id="SESSIONSECRET")
        shown = await data(url)
        metrics = (await once(url, "GET", "/metrics")).body
    row = shown["rows_list"][0]
    assert (row["decision"], row["agent"], row["status"], row["calls"], row["tools"]) == ("ACT", "m", 200, 0, 1)
    assert row["text"] == ""
    assert row["request_bytes"] > 0
    assert b"whetherman_ledger_written_total 1" in metrics
    stored = b"".join(one.read_bytes() for one in tmp_path.iterdir())
    assert b"PROMPTTEXT" not in stored
    assert b"SESSIONSECRET" not in stored


async def test_what_withheld_or_would_have_is_recorded(upstream, serve, judge):
    upstream.default = reply(completion(None, tool_calls=[tool_call()]))
    async with serve(mode="enforce", intervention="strip") as url:
        await post(url, CHAT)
        for n in range(4):
            await post(url, {**looping(3), "model": "m"}, x_session_id=f"s{n}")
        shown = await data(url, n=5)
    assert [(row["reason"], row["cause"]) for row in reversed(shown["rows_list"])] == [
        ("need", ""),
        *[("leaked_call", "loop_guard")] * 3,
        ("backed_off", "loop_guard"),
    ]
    (agent,) = shown["agents"]
    assert [agent[key] for key in ("leaked", "loop_guard_leaked", "backed_off", "loop_guard_backed_off")] == [
        3,
        3,
        1,
        1,
    ]


async def test_text_is_kept_on_request_only(serve, judge):
    async with serve(ledger="text") as url:
        await post(url, CHAT)
        assert (await data(url))["rows_list"][0]["text"].startswith("PROMPTTEXT")


async def test_off_records_nothing(serve, judge, tmp_path):
    async with serve(ledger="off") as url:
        await post(url, CHAT)
        shown = (await once(url, "GET", page.DATA)).json()
    assert (shown["recording"], shown["rows"]) == (False, 0)
    assert list(tmp_path.iterdir()) == []


async def test_a_ledger_that_cannot_be_written_costs_no_request(serve, judge, tmp_path):
    (tmp_path / records.NAME).symlink_to("/dev/full")
    async with serve() as url:
        answers = [await post(url, CHAT) for _ in range(3)]
        assert [one.status for one in answers] == [200, 200, 200]


async def test_a_broken_ledger_is_said_not_hidden(serve, judge, tmp_path):
    (tmp_path / records.NAME).write_bytes(b"no database at all " * 100)
    async with serve(ledger="off") as url:
        answer = await once(url, "GET", page.DATA)
    assert (answer.status, answer.json()["error"]["code"]) == (503, "ledger_unreadable")


async def test_the_files_are_whole_and_strict(serve, judge):
    async with serve() as url:
        answers = {path: await once(url, "GET", path) for path in page.FILES}
        head = await once(url, "HEAD", page.PREFIX)
    for answer in answers.values():
        assert answer.status == 200
        assert "default-src 'none'" in (answer.header("Content-Security-Policy") or "")
        assert "unsafe" not in (answer.header("Content-Security-Policy") or "")
        assert answer.header("X-Content-Type-Options") == "nosniff"
        assert answer.header("X-Frame-Options") == "DENY"
    assert (head.status, head.body) == (200, b"")
    html = answers[page.PREFIX].body.decode()
    script = answers[page.PREFIX + "page.js"].body.decode()
    assert not re.search(r"https?://", html)  # no external request
    assert not re.search(r"<script>|\son\w+=|style=", html)  # nothing inline
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function", script)


@pytest.mark.parametrize(
    "target",
    [
        "/whetherman/../etc/passwd",
        "/whetherman/..%2f..%2fetc%2fpasswd",
        "/whetherman/%2e%2e/records.py",
        "/whetherman/page.html",
        "/whetherman//page.js",
        "/whetherman/page.js/",
        "/whetherman/page.js%00",
        "/whetherman/ledger.sqlite3",
        "/whetherman/\\..\\x",
        "/whetherman",
    ],
)
async def test_path_tricks_end_in_404(serve, judge, upstream, target):
    async with serve() as url:
        answer = await once(url, "GET", target)
    assert answer.status in (400, 404)
    assert b"root:" not in answer.body
    assert upstream.requests == []


@pytest.mark.parametrize("path", [page.PREFIX, page.DATA, page.PREFIX + "page.js"])
@pytest.mark.parametrize(
    "headers", [{"Host": "rebound.example:8088"}, {"Origin": "https://evil.example"}, {"Origin": "null"}]
)
async def test_s19_foreign_pages_and_rebound_names_see_nothing(serve, judge, path, headers):
    async with serve() as url:
        answer = await once(url, "GET", path, **headers)
    assert answer.status == 403
    assert answer.header("Access-Control-Allow-Origin") is None


async def test_the_data_needs_the_key_and_the_page_does_not(serve, judge):
    async with serve(api_key="k") as url:
        statuses = [(await once(url, "GET", path)).status for path in (*page.FILES, page.DATA)]
        known = await once(url, "GET", page.DATA, x_api_key="k")
    assert statuses == [200, 200, 200, 401]
    assert known.status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
async def test_nothing_can_be_written(serve, judge, method):
    async with serve() as url:
        assert (await once(url, method, page.DATA)).status == 405


@pytest.mark.parametrize("query", ["?limit=-1", "?limit=9e9", "?before=x", "?agent=%27%20OR%201=1", "?limit=%D9%A1"])
async def test_odd_questions_are_answered(serve, judge, query):
    async with serve() as url:
        assert (await once(url, "GET", page.DATA + query)).status == 200


async def test_names_of_agents_and_tools_stay_text(serve, judge, upstream):
    """What a client or a model made up is JSON in our data, and never a header."""
    upstream.default = reply(completion(None, tool_calls=[tool_call(EVIL)]))
    evil = {**CHAT, "model": EVIL, "tools": [{"type": "function", "function": {"name": EVIL}}]}
    async with serve() as url:
        answer = await post(url, evil)
        shown = await data(url)
    assert shown["rows_list"][0]["agent"] == EVIL
    assert answer.header("X-Evil") is None
    assert not any("script" in value for name, value in answer.raw_headers if name.lower().startswith("x-whetherman"))


async def test_many_at_once_are_all_recorded(serve, judge):
    async def talk(url: str) -> None:
        async with Client(url) as client:
            for _ in range(5):
                assert (await client.post(CHAT)).status == 200

    async with serve() as url:
        await asyncio.gather(*(talk(url) for _ in range(10)))
        shown = await data(url, n=50)
    assert (shown["rows"], shown["dropped"]) == (50, {"queue": 0, "storage": 0})
