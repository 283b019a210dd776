"""When2Tool's tasks as probes: working tools, the published checker, and what is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from whetherman_edge.bench import ab_tasks, ab_worlds
from whetherman_edge.errors import ConfigError


def row(environment: str, tools: dict[str, list[str]], instruction: str, answer: str, **more: Any) -> dict[str, Any]:
    """A line of the file. tools: name to its required arguments."""
    offered = [
        {
            "type": "function",
            "function": {"name": name, "description": name, "parameters": {"type": "object", "required": required}},
        }
        for name, required in tools.items()
    ]
    parameters = more.pop("parameters", {})
    return {
        "id": more.pop("id", 1),
        "difficulty": "easy",
        "instruction": instruction,
        "environments": [{"name": environment, "tools": list(tools), "parameters": parameters}],
        "expected": {"answer": answer},
        "tools": offered,
        **more,
    }


def tasks(tmp_path: Path, *rows: dict[str, Any]) -> ab_tasks.Tasks:
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return ab_tasks.from_file(path, 0)


CORPUS = [
    {"id": "doc1", "title": "Egypt", "text": "Cairo is the capital of Egypt."},
    {"id": "doc2", "title": "Peru", "text": "Lima is the capital of Peru."},
]
YEARS = {"parameters": {"corpus": {"humans landed on the Moon": "In 1969.", "the war of 1812 began": "In 1812."}}}


@pytest.mark.parametrize(
    ("environment", "tool", "arguments", "expected", "more"),
    [
        ("CalculatorEnv", "evaluate_expression", {"expression": "(40880268647*3)//2"}, "61320402970", {}),
        ("StatisticsEnv", "compute_stat", {"data": "[1, 2, 3, 4]", "stat_type": "median"}, "2.5", {}),
        ("StatisticsEnv", "compute_stat", {"data": [2, 4, 4, 4, 5, 5, 7, 9], "stat_type": "std"}, "2.0", {}),
        ("CountingEnv", "combination", {"n": 83, "k": 12}, "96851050941060", {}),
        ("MatrixEnv", "matrix_determinant", {"matrix": [[10, 11, 14], [12, 3, 15], [10, 3, 8]]}, "468", {}),
        ("MatrixEnv", "matrix_multiply", {"matrix_a": [[1, 2]], "matrix_b": [[3], [4]]}, "[[11]]", {}),
        ("PrimeEnv", "nth_prime", {"n": 27}, "103", {}),
        ("PrimeEnv", "factorize", {"n": 143}, "[[11, 1], [13, 1]]", {}),
        ("RetrieverEnv", "search_corpus", {"query": "capital of Peru"}, "doc2", {"parameters": {"corpus": CORPUS}}),
        ("RetrieverEnv", "read_doc", {"doc_id": "doc1"}, "Cairo is the capital", {"parameters": {"corpus": CORPUS}}),
        ("HistoricalYearEnv", "lookup_year", {"event": "first humans on the Moon landed"}, "In 1969.", YEARS),
        ("HashEnv", "compute_hash", {"input_string": "a", "algorithm": "md5"}, "0cc175b9c0f1b6a831c399e269772661", {}),
        ("DecodingEnv", "decode", {"encoded_message": "CLJAVY", "encoding_type": "caesar", "key": "7"}, "VECTOR", {}),
        ("DecodingEnv", "decode", {"encoded_message": "-... .-.", "encoding_type": "morse"}, "BR", {}),
        ("ListManipulationEnv", "sort", {"values": [[3, 1], [2, 5]], "axis": 0}, "[[2, 1], [3, 5]]", {}),
        ("ListManipulationEnv", "insert", {"values": [1, 3], "index": 1, "value": 2}, "[1, 2, 3]", {}),
        ("ListManipulationEnv", "remove", {"values": [[1, 2], [3, 4]], "index": 0, "axis": 1}, "[[2], [4]]", {}),
        ("DateTimeEnv", "date_add", {"date": "2022-12-28", "days": 14}, "2023-01-11", {}),
        ("DateTimeEnv", "day_of_week", {"date": "2017-09-01"}, "Friday", {}),
        (
            "ScheduleEnv",
            "find_free_slots",
            {"busy": [["09:27", "10:12"]], "day_start": "09:00", "day_end": "11:00", "min_duration": 30},
            '[["10:12", "11:00"]]',
            {},
        ),
        ("RegexMatchEnv", "regex_match", {"pattern": r"\d+", "text": "a1b22"}, "['1', '22']", {}),
        ("CodeExecutorEnv", "run_code", {"code": "print(sum(range(5)))"}, "10", {}),
    ],
)
def test_the_tools_work(
    tmp_path: Path, environment: str, tool: str, arguments: dict[str, Any], expected: str, more: dict[str, Any]
) -> None:
    (probe,) = tasks(tmp_path, row(environment, {tool: list(arguments)}, "Do it.", "?", **more)).probes
    world = probe.open()
    assert expected in world.call(tool, arguments)
    assert world.call(tool, {}).startswith("error: missing argument")
    assert world.call("nothing", {}).startswith("error: there is no tool")
    world.close()


def test_wrong_arguments_give_an_error_text(tmp_path: Path) -> None:
    line = row("MatrixEnv", {"matrix_trace": ["matrix"]}, "Trace?", "4")
    world = tasks(tmp_path, line).probes[0].open()
    for wrong in ("text", [[1, 2]], 5, [[1, "x"], [2, 3]]):
        assert world.call("matrix_trace", {"matrix": wrong}).startswith("error:")


def test_what_only_the_tool_can_know_comes_from_the_task(tmp_path: Path) -> None:
    asked = "What is the SDBM_CUSTOM hash of 'c0wr'? Answer with only the hex string."
    world = tasks(tmp_path, row("HashEnv", {"compute_hash": []}, asked, "1c4628147f17abf6")).probes[0].open()
    own = {"input_string": "c0wr", "algorithm": "sdbm_custom"}
    other = {"input_string": "c0wx", "algorithm": "sdbm_custom"}
    assert world.call("compute_hash", own) == "1c4628147f17abf6"
    assert world.call("compute_hash", other) != "1c4628147f17abf6"
    assert world.call("compute_hash", other) == world.call("compute_hash", other)


@pytest.mark.parametrize(
    ("reply", "answer", "right"),
    [
        ("So \\boxed{40} it is, not \\boxed{41}.", "40", True),
        ("So \\boxed{41} it is, not \\boxed{40}.", "40", False),
        ("\\boxed{[1,2, 3]}", "[1, 2, 3]", True),
        ("\\boxed{\\text{Nile }}", "nile", True),
        ("\\boxed{1,234,567}", "1234567", True),
        ("\\boxed{{'a': {1}}}", "{'a': {1}}", True),
        ("40", "40", True),
        ("Let me see.\n40", "40", True),
        ("It is 40, I think.", "40", False),
        ("", "40", False),
        ("\\boxed{}", "0", False),
    ],
)
def test_the_published_checker(reply: str, answer: str, right: bool) -> None:
    assert ab_tasks.check_answer(reply, answer).success is right


def test_tasks_without_a_world_are_named_and_left_out(tmp_path: Path) -> None:
    known = row("PrimeEnv", {"is_prime": ["n"]}, "Is 7 prime?", "True")
    found = tasks(
        tmp_path,
        known,
        row("SubmarineEnv", {"dive": []}, "Dive.", "done", id=2),
        row("PrimeEnv", {"is_prime": ["n"], "sieve": []}, "Sieve.", "done", id=3),
    )
    assert [probe.id for probe in found.probes] == ["1"]
    assert found.left_out == {"SubmarineEnv": 1, "PrimeEnv.sieve": 1}
    with pytest.raises(ConfigError, match="known environments, got only SubmarineEnv"):
        tasks(tmp_path, row("SubmarineEnv", {"dive": []}, "Dive.", "done"))
    with pytest.raises(ConfigError, match="line 1: expected id, instruction"):
        tasks(tmp_path, {"id": 1, "instruction": "?"})


def test_a_limit_takes_from_all_kinds_and_a_larger_one_adds(tmp_path: Path) -> None:
    rows = [
        row(name, {tool: ["n"]}, f"{tool} {number}", "1", id=f"{name}{number}")
        for name, tool in (("PrimeEnv", "is_prime"), ("CountingEnv", "factorial"))
        for number in range(5)
    ]
    found = tasks(tmp_path, *rows)
    few, more = ab_tasks.limited(found, 4), ab_tasks.limited(found, 7)
    assert sorted(probe.family for probe in few.probes) == ["Counting", "Counting", "Prime", "Prime"]
    assert more.probes[:4] == few.probes
    assert few.sha256 == more.sha256 == found.sha256
    assert ab_tasks.limited(found, 99) is found


def test_every_environment_names_its_tools() -> None:
    parameters = {"corpus": {}}
    for name in ab_worlds._ENVIRONMENTS:
        assert ab_worlds.functions_of(name, parameters, "", "")
