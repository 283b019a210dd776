"""The tools of the probes work for real, and hold their borders."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from whetherman_edge.calibrate.probes.kits import KITS, TOOLS, sandbox
from whetherman_edge.calibrate.probes.kits.calculation import evaluate
from whetherman_edge.calibrate.probes.world import Room, Setting


def room(*names: str, **setting: object) -> Room:
    made: Setting = dict(setting)
    return Room(KITS, [TOOLS[name] for name in names], made)


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("2 + 3 * 4", "14"),
        ("(18.5 + 3) * 42", "903"),
        ("2^10", "1024"),
        ("1,200 / 7", "171.4285714286"),
        ("sqrt(2)", "1.4142135624"),
        ("1/0", "error: division by zero"),
        ("__import__('os')", "error:"),
        ("(1).__class__", "error:"),
        ("9**9**9", "error:"),
        ("factorial(5000)", "error:"),
        ("'a' * 10", "error:"),
        ("", "error:"),
    ],
)
def test_the_calculator_is_exact_and_only_a_calculator(expression: str, result: str) -> None:
    said = room("calculator").call("calculator", {"expression": expression})
    assert said == result or (result == "error:" and said.startswith(result))


def test_units_dates_and_patterns() -> None:
    world = room("convert_units", "date_add", "days_between", "regex_find")
    assert world.call("convert_units", {"value": "26.2", "from_unit": "miles", "to_unit": "km"}) == "42.164813 km"
    assert world.call("convert_units", {"value": 100, "from_unit": "C", "to_unit": "F"}) == "212 F"
    assert world.call("convert_units", {"value": 1, "from_unit": "kg", "to_unit": "km"}).startswith("error: cannot")
    assert world.call("date_add", {"date": "2026-01-31", "amount": 1, "unit": "months"}).startswith("2026-02-28")
    assert world.call("days_between", {"start": "2026-02-28", "end": "2026-03-01"}) == "1 days"
    assert world.call("regex_find", {"pattern": r"\d+", "text": "a1 b22"}) == "2 matches: 1, 22"
    assert world.call("regex_find", {"pattern": "(a+)+$", "text": "a" * 40}).startswith("error:")


def test_the_sandbox_runs_programs_and_nothing_else(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("hidden", "utf-8")
    assert sandbox.run_program("x = 6\nx * 7") == "42"
    assert "ZeroDivisionError" in sandbox.run_program("1/0")
    assert "hidden" not in sandbox.run_program(f"print(open({str(secret)!r}).read())")
    assert "not allowed" in sandbox.run_program(f"open({str(tmp_path / 'new')!r}, 'w')")
    assert not (tmp_path / "new").exists()
    for program in (
        "import socket\nsocket.socket()",
        "import subprocess\nsubprocess.run(['true'])",
        "import os\nos.system('true')",
        "import os\nos.fork()",
    ):
        assert "PermissionError" in sandbox.run_program(program)
    assert "HOME" not in sandbox.run_program("import os\nprint(sorted(os.environ))")


def test_the_sandbox_ends_what_does_not_end() -> None:
    assert sandbox.run_program("while True: pass").startswith("error: the program")
    assert "MemoryError" in sandbox.run_program("'x' * (1 << 33)")
    assert len(sandbox.run_program("print('x' * 100000)")) <= sandbox.OUTPUT_CHARS_MAX


def test_the_repository_is_real_and_goes_away() -> None:
    files = {
        "part.py": "def two():\n    return 3\n",
        "test_part.py": "from part import two\n\ndef test_two():\n    assert two() == 2\n",
    }
    world = room("read_file", "replace_in_file", "run_tests", "search_files", repository={"files": files})
    assert world.call("run_tests", {}).startswith("0 passed, 1 failed\ntest_part.py::test_two")
    assert world.call("search_files", {"text": "return"}) == "part.py:2: return 3"
    assert world.call("replace_in_file", {"path": "part.py", "old": "return 3", "new": "return 2"}) == "replaced"
    assert world.call("run_tests", {}).startswith("1 passed, 0 failed")
    assert [change["path"] for change in world.changes()] == ["part.py"]
    assert world.call("read_file", {"path": "/etc/passwd"}).startswith("error: no file")
    kit = world._kits["repository"]
    folder = kit.folder  # type: ignore[attr-defined]
    assert os.path.isdir(folder)
    assert world.call("run_tests", {"file": "./test_part.py"}).startswith("1 passed, 0 failed")
    assert world.call("run_tests", {"file": "tundra_test.py"}).startswith("error: no file"), "and not 0 failed"
    world.close()
    assert not os.path.isdir(folder)


def test_sql_reads_and_never_writes() -> None:
    tables = {"t": {"columns": ["a", "b"], "rows": [[1, "x"], [2, "y"], [4, "y"]]}}
    world = room("run_sql", "column_stats", database={"tables": tables})
    assert world.call("run_sql", {"query": "SELECT sum(a) AS s FROM t WHERE b = 'y'"}) == "s\n6"
    for query in ("DELETE FROM t", "ATTACH '/tmp/x.db' AS x", "PRAGMA table_info(t)", "SELECT 1; SELECT 2", "nonsense"):
        assert world.call("run_sql", {"query": query}).startswith("error: ")
    endless = "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT count(*) FROM c"
    assert world.call("run_sql", {"query": endless}).startswith("error: SQL")
    stats = {"table": "t", "column": "a", "operation": "mean", "where_column": "b", "where_value": "y"}
    assert world.call("column_stats", stats) == "3"


def test_faults_come_first_and_then_the_tool_works() -> None:
    world = room(
        "find_contact", mail={"contacts": {"Ada Brandt": "ada@x.example"}}, faults={"find_contact": ["timed out"]}
    )
    assert world.call("find_contact", {"name": "Ada"}) == "error: timed out"
    assert world.call("find_contact", {"name": "ada"}) == "Ada Brandt: ada@x.example"


def test_side_effects_stay_in_the_state() -> None:
    world = room(
        "set_device",
        "pay_invoice",
        "create_event",
        home={"devices": {"attic light": "off"}},
        payments={"invoices": {"IN-1": {"customer": "A", "amount": 5, "status": "open"}}},
        calendar={},
    )
    assert world.changes() == []
    for value in ("21", 21, "21.0", "21°C", "21 °C", "21 degrees", "21 degrees Celsius", "21c"):
        assert world.call("set_device", {"device": "attic light", "value": value}) == "attic light is now 21"
    assert world.call("set_device", {"device": "attic light", "value": "music"}) == "attic light is now music"
    world.call("set_device", {"device": "Attic Light", "value": "ON"})
    assert world.call("pay_invoice", {"id": "in-1"}) == "paid 5 EUR"
    assert world.call("pay_invoice", {"id": "in-1"}).startswith("error: IN-1 is paid")
    world.call("create_event", {"title": "t", "date": "2026-03-04", "start": "9:05"})
    changed = {record["kit"]: record for record in world.changes()}
    assert changed["home"]["value"] == "on"
    assert changed["payments"]["amount"] == 5
    assert changed["calendar"]["start"] == "09:05"


def test_two_events_are_two_though_an_old_one_is_cancelled_between_them() -> None:
    events = [{"id": "ev1", "title": "a", "date": "2026-03-04", "start": "08:00"}]
    world = room("create_event", "cancel_event", calendar={"events": events})
    made = {"title": "t", "date": "2026-03-04", "start": "9:05"}
    world.call("create_event", made)
    world.call("cancel_event", {"id": "ev1"})
    world.call("create_event", made)
    assert [record["what"] for record in world.changes()] == ["created", "created", "cancelled"]


def test_a_mail_goes_to_the_address_that_stands_beside_a_name() -> None:
    world = room("send_email", mail={})
    world.call("send_email", {"to": "Rosa Varga <rosa@x.example>", "subject": "s", "body": "b"})
    assert [record["to"] for record in world.changes()] == ["rosa@x.example"]


def test_a_pattern_that_would_run_for_ever_is_ended() -> None:
    world = room("regex_find")
    assert world.call("regex_find", {"pattern": r"[A-Z]-\d", "text": "A-1 b-2 'C-3\n"}) == "2 matches: A-1, C-3"
    assert world.call("regex_find", {"pattern": "x", "text": "y"}) == "0 matches"
    assert world.call("regex_find", {"pattern": "(", "text": "y"}).startswith("error: pattern: ")
    endless = {"pattern": r"^(\w+\s?)*$", "text": "a" * 60 + "!"}
    assert world.call("regex_find", endless).startswith("error: the program")


def test_a_comma_between_arguments_is_no_thousands_separator() -> None:
    assert evaluate("gcd(12,180)") == 12
    assert evaluate("max(1,200)") == 200
    assert evaluate("1,200 + 1") == 1201
