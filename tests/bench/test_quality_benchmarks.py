"""The quality benchmarks on files of the published shapes, with the static gate that ships."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from whetherman_edge import cli

WEATHER = {
    "name": "get_weather",
    "description": "Current weather of a city.",
    "parameters": {"type": "dict", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def main(arguments: list[str]) -> int:
    """As from a shell: only the benchmark that the command line names is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["whetherman-edge", *arguments])
        return cli.main(arguments)


Write = Callable[[str, Sequence[dict[str, Any]]], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes JSON Lines."""

    def to(name: str, rows: Sequence[dict[str, Any]]) -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return to


def when2call(answer: str, question: str, tools: Sequence[dict[str, Any]] = (WEATHER,)) -> dict[str, Any]:
    """A line as the data set has it: tools are JSON texts."""
    return {"uuid": question, "question": question, "correct_answer": answer, "tools": [json.dumps(t) for t in tools]}


def test_when2call(write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        when2call("tool_call", "What is the weather in Paris right now?"),
        when2call("cannot_answer", "Book me a table for two", ()),
    ]
    out, page = tmp_path / "o.json", tmp_path / "o.html"
    command = ["bench", "when2call", str(write("mcq.jsonl", rows)), "--engine", "static"]
    assert main([*command, "--json", str(out), "--report", str(page)]) == 0
    figures = json.loads(out.read_text())["sets"]["mcq"]
    assert figures["n"] == 2
    assert figures["tool_hallucination"] == {"k": 0, "n": 1, "share": 0.0, "low": 0.0, "high": 0.7935}
    assert figures["recall"]["cannot_answer"]["share"] == 1.0, "without tools there is nothing to call"
    assert "When2Call" in page.read_text()
    assert "macro-F1" in capsys.readouterr().out


def test_bfcl_type_names_become_json_schema(write: Write, tmp_path: Path) -> None:
    row = {"id": "irrelevance_0", "question": [[{"role": "user", "content": "Write a poem"}]], "function": [WEATHER]}
    write("BFCL_v4_irrelevance.json", [row])
    out = tmp_path / "o.json"
    command = ["bench", "bfcl", "--folder", str(tmp_path), "--set", "irrelevance", "--engine", "static"]
    assert main([*command, "--json", str(out)]) == 0
    figures = json.loads(out.read_text())["sets"]["irrelevance"]
    assert figures["n"] == 1
    assert figures["right"]["n"] == 1

    from whetherman_edge.bench.bfcl import items

    (item,) = items(tmp_path, "irrelevance")
    assert item["request"]["tools"][0]["function"]["parameters"]["type"] == "object"


def test_when2tool_with_labels_of_an_agent(write: Write, tmp_path: Path) -> None:
    tool = {"type": "function", "function": {**WEATHER, "parameters": {"type": "object", "properties": {}}}}
    rows = [
        {"id": i, "difficulty": d, "instruction": text, "tools": [tool]}
        for i, d, text in ((1, "easy", "Say hello."), (2, "hard", "What is the weather in Paris right now?"))
    ]
    labels = write("needed.jsonl", [{"id": "1", "needed": False}, {"id": "2", "needed": True}])
    out = tmp_path / "o.json"
    path = write("tasks.jsonl", rows)
    assert main(["bench", "when2tool", str(path), "--needed", str(labels), "--engine=static", f"--json={out}"]) == 0
    sets = json.loads(out.read_text())["sets"]
    assert sets["hard against easy"]["auroc"] in (0.0, 1.0)
    assert sets["against the agent's labels"]["false_skips"]["n"] == 1


def test_decisions_score_what_decide_wrote(write: Write, tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function", "function": WEATHER}]}
    gold = write("gold.jsonl", [{"id": "a", "gold": "ANSWER", "request": body}])
    predictions = tmp_path / "p.jsonl"
    assert main(["decide", str(gold), "--jsonl", "--engine", "static", "--out", str(predictions)]) == 0
    scored, direct = tmp_path / "s.json", tmp_path / "d.json"
    assert main(["bench", "decisions", str(gold), str(predictions), "--json", str(scored)]) == 0
    assert main(["bench", "decisions", str(gold), "--engine", "static", "--json", str(direct)]) == 0
    assert json.loads(scored.read_text())["sets"] == json.loads(direct.read_text())["sets"]


@pytest.mark.parametrize(
    ("benchmark", "text", "message"),
    [
        ("when2call", '{"question": "x", "correct_answer": "maybe"}', "line 1: expected question and correct_answer"),
        ("when2call", "not json", "line 1: expected a JSON object"),
        ("when2call", '{"question": "x", "correct_answer": "direct", "tools": ["{"]}', "tools: expected JSON texts"),
        ("when2tool", '{"id": 1}', "line 1: expected instruction and tools"),
        ("decisions", '{"id": 1, "gold": "MAYBE"}', "expected gold to be one of ACT"),
        ("decisions", '{"id": 1, "gold": "ACT"}', "expected a request to judge"),
        ("decisions", "[]", "expected a JSON object, got list"),
    ],
)
def test_bad_lines_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], benchmark: str, text: str, message: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text + "\n")
    assert main(["bench", benchmark, str(path), "--engine", "static"]) != 0
    assert message in capsys.readouterr().err


def test_a_missing_prediction_is_named(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    gold = write("gold.jsonl", [{"id": "a", "gold": "ACT"}])
    predictions = write("p.jsonl", [{"id": "b"}])
    assert main(["bench", "decisions", str(gold), str(predictions)]) != 0
    assert "expected a decision for id 'a'" in capsys.readouterr().err
