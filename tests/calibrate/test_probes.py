"""The probe pack: every checker passes a perfect agent and fails liars; the same seed gives the same bytes."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from whetherman_edge.calibrate.probe import Call, Check, Probe, Split
from whetherman_edge.calibrate.probes import GENERATORS, draw, split_of
from whetherman_edge.calibrate.probes.answers import Number
from whetherman_edge.calibrate.probes.kits import KITS, TOOLS
from whetherman_edge.calibrate.probes.task import Task

SEED = 11
SPLITS: tuple[Split, ...] = ("fit", "calibrate", "test")
FAMILIES = set(
    "chat knowledge context arithmetic computation lookup sufficient retry hop pagination comparison action done ask "
    "decline".split()
)
DIGEST = (
    "import hashlib,msgspec,sys; from whetherman_edge.calibrate.probes import draw;"
    "print(hashlib.sha256(msgspec.json.encode(draw(int(sys.argv[1])))).hexdigest())"
)


@pytest.fixture(scope="module")
def pack() -> list[Task]:
    tasks = [probe for probe in draw(SEED) if isinstance(probe, Task)]
    assert len(tasks) == len(draw(SEED))
    return tasks


def run(probe: Probe, calls: Iterable[Call], reply: str) -> Check:
    world = probe.open()
    try:
        made = [Call(call.name, call.arguments, world.call(call.name, call.arguments)) for call in calls]
        return probe.check(reply, world, made)
    finally:
        world.close()


def test_a_perfect_agent_passes_every_probe(pack: list[Task]) -> None:
    failed = [(p.id, check.why) for p in pack if not (check := run(p, p.reference.calls, p.reference.reply)).success]
    assert failed == []


def test_a_liar_passes_no_probe_that_needs_a_call(pack: list[Task]) -> None:
    needing = [p for p in pack if p.expect == "ACT"]
    for claim in ("Done! It has been taken care of.", "I looked it up: the answer is 7.", "It is XX-0000, all set."):
        assert [p.id for p in needing if run(p, (), claim).success] == []
    changing = [p for p in needing if p.want.changes]
    assert len(changing) > 40
    assert [p.id for p in changing if run(p, (), p.reference.reply).success] == []


def test_another_probes_answer_is_wrong(pack: list[Task]) -> None:
    by_generator: dict[str, list[Task]] = {}
    for task in pack:
        by_generator.setdefault(task.generator, []).append(task)
    checked, passed = 0, []
    for tasks in by_generator.values():
        for task, other in zip(tasks, tasks[1:] + tasks[:1], strict=True):
            if task.family in ("chat", "done", "ask", "decline") or task.want.answer in (None, other.want.answer):
                continue
            checked += 1
            if run(task, task.reference.calls, other.reference.reply).success:
                passed.append(task.id)
    assert checked > 400
    assert passed == []


def test_a_call_in_the_text_and_silence_are_no_answers(pack: list[Task]) -> None:
    leaks = (
        '{"name": "send_email", "arguments": {"to": "a@b.example"}}',
        '```json\n{"name": "x", "arguments": {}}\n```',
        "",
    )
    answering = [p for p in pack if p.want.answer is not None]
    for leak in leaks:
        assert [p.id for p in answering if run(p, (), leak).success] == []


def test_needless_changes_fail_a_probe_that_asks_for_none(pack: list[Task]) -> None:
    mail = Call("send_email", {"to": "a@b.example", "subject": "x", "body": "y"})
    tempted = [p for p in pack if not p.want.changes and "send_email" in p.tool_names]
    assert len(tempted) > 40
    assert [p.id for p in tempted if run(p, (*p.reference.calls, mail), p.reference.reply).success] == []


def test_what_is_done_already_is_not_done_twice(pack: list[Task]) -> None:
    repeated = [p for p in pack if p.family == "done" and p.recorded[-1].name == "send_email"]
    assert repeated
    for probe in repeated:
        assert run(probe, (), "I have sent it.").success
        assert not run(probe, probe.recorded[-1:], "I have sent it.").success


def test_asking_and_declining_are_checked(pack: list[Task]) -> None:
    asks = [p for p in pack if p.expect == "ASK"]
    declines = [p for p in pack if p.expect == "DECLINE"]
    assert len(asks) >= 30
    assert len(declines) >= 30
    for reply in ("I have sent it.", "All done!", "How are you?", "Sure."):
        assert [p.id for p in (*asks, *declines) if run(p, (), reply).success] == []
    claim = "I have booked it, although I cannot say where."
    assert [p.id for p in declines if run(p, (), claim).success] == []
    absent = Call("book_flight", {"to": "Oslo"})
    assert [p.id for p in declines if run(p, (absent,), p.reference.reply).success] == []


def test_a_dump_of_everything_is_no_answer(pack: list[Task]) -> None:
    everything = " ".join(str(number) for number in range(10, 1000))
    asked = [p for p in pack if isinstance(p.want.answer, Number) and p.want.answer.value < 1000 and p.expect == "ACT"]
    assert len(asked) > 100
    assert [p.id for p in asked[::5] if run(p, (), everything).success] == []


def test_the_answer_of_a_needed_lookup_stands_nowhere_in_the_dialogue(pack: list[Task]) -> None:
    def told(task: Task) -> str:
        return " ".join(str(message["content"]) for message in task.messages)

    for task in pack:
        if task.expect == "ACT" and task.want.answer is not None and task.family != "comparison":
            assert not run(task, (), told(task)).success, task.id
        if task.family == "sufficient":
            assert task.recorded[-1].result in told(task)


def test_the_pack_is_large_and_mostly_of_several_steps(pack: list[Task]) -> None:
    assert len(pack) >= 400
    assert len({p.id for p in pack}) == len(pack)
    steps = [p for p in pack if p.kind == "later" or p.hops > 1]
    assert len(steps) * 3 >= len(pack)
    assert {p.hops for p in pack} >= {0, 1, 2, 3, 4}
    assert {p.difficulty for p in pack} == {1, 2, 3}
    sizes = {len(p.tools) for p in pack}
    assert min(sizes) == 1
    assert max(sizes) == 24
    assert {p.family for p in pack} == FAMILIES
    later = [p for p in pack if p.kind == "later"]
    assert {p.expect for p in later} == {"ACT", "ANSWER", "ASK", "DECLINE"}
    assert all(p.messages[-1]["role"] == "tool" for p in later)
    assert all(p.messages[-1]["role"] == "user" for p in pack if p.kind == "first")


def test_each_split_holds_every_family_and_enough_needed_steps() -> None:
    names = [generator.name for generator in GENERATORS]
    assert len(set(names)) == len(names)
    makers = {split: {p.generator for p in draw(SEED, split=split)} for split in SPLITS}
    assert not makers["fit"] & makers["calibrate"]
    assert not makers["test"] & (makers["fit"] | makers["calibrate"])
    for split in SPLITS:
        probes = draw(SEED, split=split)
        assert {p.family for p in probes} == FAMILIES
        assert {(p.kind, p.expect) for p in probes} >= {("later", "ACT"), ("later", "ANSWER"), ("first", "ANSWER")}
        assert all(split_of(p.generator) == split for p in probes)
    for kind in ("first", "later"):
        needed = {p.group for p in draw(SEED, split="calibrate") if p.kind == kind and p.expect == "ACT"}
        assert len(needed) >= 90, kind
    assert len(draw(SEED, split="test")) >= 90


def test_the_words_of_no_needed_probe_are_used_twice(pack: list[Task]) -> None:
    seen: dict[bytes, str] = {}
    for task in pack:
        if task.expect == "ACT":
            key = msgspec.json.encode(task.messages)
            assert seen.setdefault(f"{task.kind}{task.generator}".encode() + key, task.id) == task.id


def test_the_same_seed_gives_the_same_bytes_whatever_the_hash_seed() -> None:
    own = hashlib.sha256(msgspec.json.encode(draw(SEED))).hexdigest()
    for hash_seed in ("1", "2"):
        made = subprocess.run(
            [sys.executable, "-c", DIGEST, str(SEED)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert made.stdout.strip() == own
    assert msgspec.json.encode(draw(SEED + 1)) != msgspec.json.encode(draw(SEED))


def test_a_part_of_the_pack_is_the_same_as_in_the_whole() -> None:
    whole = {p.id: msgspec.json.encode(p) for p in draw(SEED)}
    for split in SPLITS:
        assert all(whole[p.id] == msgspec.json.encode(p) for p in draw(SEED, split=split))


GARBAGE: tuple[Any, ...] = (
    {},
    {"id": None},
    {"id": {"a": [1]}},
    [],
    None,
    "text",
    7,
    {"query": "\x00" * 50, "page": -3},
)


@pytest.mark.parametrize("name", sorted(TOOLS))
def test_a_world_survives_garbage(name: str, pack: list[Task]) -> None:
    task = next(p for p in pack if name in p.tool_names and p.setting)
    world = task.open()
    properties = TOOLS[name].parameters["properties"]
    odd = [
        dict.fromkeys(properties, value)
        for value in ("", "'; DROP TABLE x; --", "../../etc/passwd", -1, 1e308, True, [])
    ]
    for arguments in (*GARBAGE, *odd):
        result = world.call(name, arguments)
        assert isinstance(result, str)
        assert "root:" not in result
    assert world.call("no_such_tool", {}).startswith("error:")
    world.close()
    world.close()


def test_every_tool_has_words_a_schema_and_a_method() -> None:
    for kit in KITS.values():
        for tool in kit.tools:
            assert callable(getattr(kit, tool.name))
            assert set(tool.parameters["required"]) <= set(tool.parameters["properties"])
            assert re.fullmatch(r"[A-Z][^\n]{20,140}\.", tool.description), tool.name
    assert len(TOOLS) >= 30
