"""``whetherman-edge decide``: one body, many lines, and what is wrong with them."""

from __future__ import annotations

import io
import json
import sys

import pytest

from tests.fakes.judge import ScriptedJudge, verdict
from whetherman_edge import cli, composition

TOOL = {"type": "function", "function": {"name": "search", "description": "Search the web."}}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}
KEYS = ["id", "verdict", "decision", "probabilities", "confidence", "p_need", "engine", "ms", "applied", "reason"]


@pytest.fixture(autouse=True)
def judge(monkeypatch):
    scripted = ScriptedJudge()

    def open_gate(config, counters, **keys):
        return composition.Gate(config, counters, scripted, **keys)

    monkeypatch.setattr(composition, "open_gate", open_gate)
    return scripted


@pytest.fixture
def given(monkeypatch):
    def run(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    return run


def test_one_body_from_standard_input(given, capsysbinary, judge):
    judge.verdict = verdict("ANSWER", 0.9)
    given(json.dumps(CHAT).encode())
    assert cli.main(["decide"]) == 0
    record = json.loads(capsysbinary.readouterr().out)
    assert list(record) == KEYS
    assert (record["id"], record["verdict"], record["applied"]) == (None, "ANSWER", "no")


@pytest.mark.parametrize("form", ["body", "lines"])
def test_a_byte_order_mark_is_skipped_as_route_does(given, capsysbinary, judge, form):
    judge.verdict = verdict("ANSWER", 0.9)
    data = json.dumps(CHAT if form == "body" else {"id": 1, "request": CHAT}).encode()
    given(b"\xef\xbb\xbf" + data)
    assert cli.main(["decide"] if form == "body" else ["decide", "--jsonl"]) == 0
    assert json.loads(capsysbinary.readouterr().out)["verdict"] == "ANSWER"


def test_lines_keep_ids_and_order_and_bad_ones_do_not_stop_the_rest(tmp_path, capsys):
    lines = [
        {"id": "a", "request": CHAT},
        {"id": 7, "request": {"messages": "no"}},
        {"id": "c"},
        {"id": None, "request": {**CHAT, "tools": []}},
    ]
    source, sink = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join([*map(json.dumps, lines[:3]), "{not json", "", json.dumps(lines[3])]) + "\n")
    assert cli.main(["decide", str(source), "--jsonl", "--out", str(sink)]) == 1
    got = [json.loads(line) for line in sink.read_text().splitlines()]
    assert [one["id"] for one in got] == ["a", 7, "c", None, None]
    assert [("error" in one) for one in got] == [False, True, True, True, False]
    assert got[1]["error"]["loc"] == ["body", "messages"]
    assert (got[2]["error"]["type"], got[2]["error"]["loc"]) == ("missing", ["line", "request"])
    assert (got[3]["error"]["type"], got[3]["error"]["line"], got[4]["reason"]) == (
        *("json_invalid", 4),
        "bypass:no_tools",
    )
    assert "3 of the lines" in capsys.readouterr().err


@pytest.mark.parametrize("link", [None, "symlink_to", "hardlink_to"])
@pytest.mark.parametrize(
    "args", [["decide", "--jsonl", "IN"], ["decide", "IN"], ["route", "--jsonl", "IN"], ["route", "x", "--tools", "IN"]]
)
def test_the_file_that_is_read_is_never_written(tmp_path, capsys, args, link):
    source = sink = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"id": 1, "request": CHAT}) + "\n")
    before = source.read_bytes()
    if link:
        sink = tmp_path / "out.jsonl"
        getattr(sink, link)(source)
    assert cli.main([*(str(source) if arg == "IN" else arg for arg in args), "--out", str(sink)]) == 2
    assert source.read_bytes() == before
    assert "--out" in capsys.readouterr().err


def test_all_good_lines_exit_0(given, capsysbinary):
    given(b"".join(json.dumps({"id": n, "request": CHAT}).encode() + b"\n" for n in range(3)))
    assert cli.main(["decide", "--jsonl"]) == 0
    assert [json.loads(line)["id"] for line in capsysbinary.readouterr().out.splitlines()] == [0, 1, 2]


def test_mode_and_force_tell_what_would_be_applied(given, capsysbinary, monkeypatch):
    monkeypatch.setenv("WHETHERMAN_FORCE", "ANSWER")
    given(json.dumps(CHAT).encode())
    assert cli.main(["decide", "--mode", "enforce"]) == 0
    assert json.loads(capsysbinary.readouterr().out)["applied"] == "yes"


@pytest.mark.parametrize(
    ("data", "args", "code", "part"),
    [
        (b"{", [], 2, "JSON"),
        (b'{"messages": 1}', [], 2, "messages"),
        (b"{}", ["--engine", "fast"], 2, "static, gemma, auto"),
        (b"", ["/no/such/file"], 2, "/no/such/file"),
        (b"{}", ["--out", "/no/such/folder/out"], 2, "/no/such/folder/out"),
    ],
)
def test_what_is_wrong_is_one_line_and_an_exit_code(given, capsys, data, args, code, part):
    given(data)
    assert cli.main(["decide", *args]) == code
    err = capsys.readouterr().err
    assert part in err
    assert err.count("\n") == 1


def test_an_unknown_profile_exits_2(given, capsys):
    given(json.dumps(CHAT).encode())
    assert cli.main(["decide", "--profile", "nope"]) == 2
    assert "nope" in capsys.readouterr().err
