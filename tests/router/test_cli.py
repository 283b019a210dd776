"""``whetherman-edge route`` as a user types it."""

from __future__ import annotations

import io
import json
import sys

import pytest

from whetherman_edge.cli import main

OPTIONS = {"weather": "Weather forecast for a city.", "music": "Play a song.", "mail": None}
OPENAI = [
    {
        "type": "function",
        "function": {"name": n, "description": d or "", "parameters": {"type": "object", "properties": {}}},
    }
    for n, d in OPTIONS.items()
]
MCP = {"tools": [{"name": n, "description": d, "inputSchema": {"properties": {"q": {}}}} for n, d in OPTIONS.items()]}


def write(path, value):
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return str(path)


def lines(text):
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(autouse=True)
def _no_backbone(tmp_path, monkeypatch):
    """The ToolRouter alone: weights on the machine that runs the tests do not count."""
    monkeypatch.setenv("WHETHERMAN_BACKBONE", str(tmp_path / "none.json"))


@pytest.mark.parametrize("tools", [OPTIONS, OPENAI, MCP])
def test_one_query(tmp_path, capsys, tools):
    assert main(["route", "will it rain", "--tools", write(tmp_path / "t.json", tools)]) == 0
    (answer,) = lines(capsys.readouterr().out)
    assert set(answer) == {"id", "choice", "probabilities", "confidence", "ms"}
    assert answer["choice"] == "weather"
    assert list(answer["probabilities"]) == list(OPTIONS)
    assert answer["ms"] > 0


def test_a_file_of_queries(tmp_path):
    rows = [
        {"id": "a", "query": "will it rain", "options": OPTIONS},
        {"id": 2, "query": "put on a song"},
        {"query": "lookup", "options": {"find": {"description": "Look something up", "parameters": ["q"]}, "x": None}},
    ]
    path = write(tmp_path / "in.jsonl", "\n".join(json.dumps(r) for r in rows) + "\n\n")
    out = tmp_path / "out.jsonl"
    assert main(["route", "--jsonl", path, "--tools", write(tmp_path / "t.json", OPTIONS), "--out", str(out)]) == 0
    answers = lines(out.read_text(encoding="utf-8"))
    assert [(a["id"], a["choice"]) for a in answers] == [("a", "weather"), (2, "music"), (None, "find")]


def test_bad_lines_are_named_and_the_others_done(tmp_path, capsys):
    good = json.dumps({"id": 1, "query": "will it rain", "options": OPTIONS})
    bad = [
        "not json",
        "[]",
        '{"id": 3}',
        '{"query": "x", "options": {"a": null, "a": "b"}}',
        '{"query": "x", "options": {"a": 1, "b": null}}',
        '{"id": 1e999, "query": "x", "options": {"a": null, "b": null}}',
        '{"id": ' + "1" * 5_000 + ', "query": "x", "options": {"a": null, "b": null}}',
    ]
    path = write(tmp_path / "in.jsonl", "\n".join([good, *bad, good]))
    assert main(["route", "--jsonl", path]) == 1
    captured = capsys.readouterr()
    assert [a["choice"] for a in lines(captured.out)] == ["weather", "weather"]
    for number in range(2, 9):
        assert f"line {number}:" in captured.err
    assert "line 9" not in captured.err
    assert "line 2: expected JSON" in captured.err
    assert "line 4: query: " in captured.err
    assert "line 6: options.a: " in captured.err
    assert "(option_type)\n" in captured.err
    assert "appears twice" in captured.err


@pytest.mark.parametrize(
    "bad",
    [
        {"query": "\ud800", "options": OPTIONS},
        {"query": "rain", "options": {"a": "\udfff", "b": None}},
        {"query": "rain", "options": {"\ud800": "x", "b": None}},
        {"id": "\ud800", "query": "rain", "options": OPTIONS},
        {"query": "rain", "options": {"a": {"examples": ["\ud83d"]}, "b": None}},
    ],
)
def test_half_a_surrogate_pair_fails_its_line_only(tmp_path, capsys, bad):
    good = {"id": "\U0001f327", "query": "will it rain \U0001f327", "options": OPTIONS}
    path = write(tmp_path / "in.jsonl", "\n".join(json.dumps(row) for row in (good, bad, good)))
    assert main(["route", "--jsonl", path]) == 1
    printed = capsys.readouterr()
    assert [answer["id"] for answer in lines(printed.out)] == ["\U0001f327"] * 2
    assert "line 2" in printed.err
    assert "surrogate" in printed.err


def test_a_query_argument_that_is_not_utf8_exits_2(tmp_path, capsys):
    assert main(["route", "rain \udcff", "--tools", write(tmp_path / "t.json", OPTIONS)]) == 2
    assert main(["route", "rain", "--tools", write(tmp_path / "t.json", {"a": "\ud800", "b": None})]) == 2
    assert capsys.readouterr().err.count("surrogate") == 2


def test_a_line_that_is_not_utf8_is_named(tmp_path, capsys):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"query": "\xff"}\n' + json.dumps({"query": "rain", "options": OPTIONS}).encode())
    assert main(["route", "--jsonl", str(path)]) == 1
    captured = capsys.readouterr()
    assert "line 1: expected UTF-8" in captured.err
    assert len(lines(captured.out)) == 1


def test_stdin(monkeypatch, capsys):
    class Stdin:
        buffer = io.BytesIO(json.dumps({"id": 1, "query": "rain", "options": OPTIONS}).encode())

    monkeypatch.setattr(sys, "stdin", Stdin())
    assert main(["route", "--jsonl", "-"]) == 0
    assert lines(capsys.readouterr().out)[0]["id"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["route"], "expected a QUERY"),
        (["route", "rain"], "expected --tools"),
        (["route", "rain", "--jsonl", "x", "--tools", "y"], "not both"),
        (["route", "rain", "--tools", "absent.json"], "cannot be read"),
        (["route", "--jsonl", "absent.jsonl"], "cannot be read"),
    ],
)
def test_usage_errors_exit_2(arguments, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("{", "expected JSON"),
        ("3", "expected an object of name"),
        ('[{"name": "a"}, {"name": "a"}]', "is taken by an earlier tool"),
        ('[{"name": "a"}, 3]', "tool 1: expected an object"),
        ('[{"description": "x"}]', "non-empty string as its name"),
        ('{"a": null, "a": null}', "appears twice"),
        ('{"a": NaN, "b": null}', "NaN is not JSON"),
        ('{"a": null}', "at least 2 options"),
    ],
)
def test_bad_tools_files_exit_2(tmp_path, capsys, tools, message):
    assert main(["route", "rain", "--tools", write(tmp_path / "t.json", tools)]) == 2
    assert message in capsys.readouterr().err


def test_a_broken_artifact_exits_3(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WHETHERMAN_ROUTER", write(tmp_path / "router", "not a router"))
    assert main(["route", "rain", "--tools", write(tmp_path / "t.json", OPTIONS)]) == 3
    assert "WHETHERMAN_ROUTER" in capsys.readouterr().err


def test_an_engine_that_is_not_there_says_so_once(tmp_path, capsys):
    rows = "\n".join(json.dumps({"query": "rain", "options": OPTIONS}) for _ in range(3))
    assert main(["route", "--jsonl", write(tmp_path / "in.jsonl", rows), "--engine", "gemma"]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("static router answers") == 1
    assert len(lines(captured.out)) == 3
