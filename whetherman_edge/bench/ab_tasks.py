"""Tasks of ``bench ab``: the test split of the probe pack, or When2Tool's JSON Lines with working worlds."""

from __future__ import annotations

import ast
import hashlib
import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from whetherman_edge.bench import ab_worlds, judging
from whetherman_edge.calibrate.probe import Call, Check, Probe, Reference, Tool, World
from whetherman_edge.errors import ConfigError

# When2Tool's checker reads the first \boxed{} of the final text.
SYSTEM: Final = "Put your final answer in \\boxed{}."
_DIFFICULTY: Final = {"easy": 1, "medium": 2, "hard": 3}


class When2ToolTask(Probe, frozen=True, kw_only=True):
    """One task of a file. ``environments``: name and parameters of each; ``answer``: the expected one."""

    environments: tuple[tuple[str, dict[str, Any]], ...]
    instruction: str
    answer: str

    def open(self) -> World:
        """Working tools, fresh for one run."""
        functions: dict[str, ab_worlds.Function] = {}
        for name, parameters in self.environments:
            functions |= ab_worlds.functions_of(name, parameters, self.instruction, self.answer) or {}
        offered = {tool.name: functions[tool.name] for tool in self.tools}
        return ab_worlds.Toolbox(offered, {tool.name: tool.parameters.get("required", ()) for tool in self.tools})

    def check(self, reply: str, world: World, calls: Sequence[Call]) -> Check:  # noqa: ARG002
        """Judge the final text; how it was found does not count."""
        return check_answer(reply, self.answer)


class Tasks(msgspec.Struct, frozen=True):
    """What is run. ``sha256``: of all tasks in their order, limited or not. ``left_out``: how many tasks of each
    environment that has no world here.
    """

    source: str
    probes: tuple[Probe, ...]
    sha256: str
    left_out: dict[str, int] = {}


def pack(seed: int) -> Tasks:
    """The test split of the probe pack, in a shuffled order, so that a cut run has seen every kind."""
    from whetherman_edge.calibrate import probes

    return _tasks(f"probe pack, test split, seed {seed}", probes.draw(seed, split="test"), seed, {})


def from_file(path: Path, seed: int) -> Tasks:
    """Tasks of a When2Tool file. Raises ConfigError for lines that do not fit, or when nothing is left."""
    left_out: dict[str, int] = {}
    found: list[Probe] = []
    for number, row in enumerate(judging.read_lines(path), 1):
        try:
            probe, unknown = _task(row)
        except (KeyError, TypeError, AttributeError) as exc:
            raise ConfigError(
                f"{path}: line {number}: expected id, instruction, environments, expected, tools; {exc!r} is missing "
                "or of another kind"
            ) from exc
        if probe is not None:
            found.append(probe)
        else:
            left_out[unknown] = left_out.get(unknown, 0) + 1
    if not found:
        raise ConfigError(f"{path}: expected tasks of known environments, got only {', '.join(left_out) or 'no lines'}")
    return _tasks(path.name, found, seed, left_out)


def limited(tasks: Tasks, limit: int | None) -> Tasks:
    """The first ``limit`` tasks, taken in turn from each family and difficulty, so that all are there."""
    if limit is None or limit >= len(tasks.probes):
        return tasks
    kinds: dict[tuple[str, int], list[Probe]] = {}
    for probe in tasks.probes:
        kinds.setdefault((probe.family, probe.difficulty), []).append(probe)
    chosen = list(_in_turn(list(kinds.values())))[:limit]
    return msgspec.structs.replace(tasks, probes=tuple(chosen))


def shuffled(probes: Sequence[Probe], seed: int) -> tuple[Probe, ...]:
    """The same order for the same seed."""
    ordered = list(probes)
    random.Random(seed).shuffle(ordered)
    return tuple(ordered)


def check_answer(reply: str, answer: str) -> Check:
    """When2Tool's rule: the first boxed text, as Python values or as words. Without a box: the reply, or its last line.

    A model that answers "40" and no more has answered.
    """
    boxed = _boxed(reply)
    if boxed is not None:
        candidates = [boxed]
    else:
        lines = [line for line in reply.strip().splitlines() if line.strip(" `")]
        candidates = [reply.strip(), *lines[-1:]]
    hit = any(_same(one, answer) for one in candidates)
    shown = candidates[0][:60] if candidates else ""
    return Check(hit, "the expected answer" if hit else f"expected {answer[:60]!r}, got {shown!r}")


def _tasks(source: str, probes: Sequence[Probe], seed: int, left_out: dict[str, int]) -> Tasks:
    ordered = shuffled(probes, seed)
    digest = hashlib.sha256()
    for probe in ordered:
        digest.update(json.dumps([probe.id, probe.messages]).encode())
    return Tasks(source, ordered, digest.hexdigest()[:16], left_out)


def _task(row: dict[str, Any]) -> tuple[When2ToolTask | None, str]:
    """The task, or None and what has no world."""
    instruction, answer = row["instruction"], str(row["expected"]["answer"])
    environments = tuple((one["name"], one.get("parameters") or {}) for one in row["environments"])
    names = "+".join(sorted(name for name, _ in environments))
    functions: set[str] = set()
    for name, parameters in environments:
        made = ab_worlds.functions_of(name, parameters, instruction, answer)
        if made is None:
            return None, name
        functions |= set(made)
    tools = tuple(
        Tool(one["function"]["name"], one["function"]["description"], one["function"]["parameters"])
        for one in row["tools"]
    )
    unknown = [tool.name for tool in tools if tool.name not in functions]
    if unknown:
        return None, f"{names}.{unknown[0]}"
    steps = row["expected"].get("steps")
    family = names.removesuffix("Env") + (" in steps" if row.get("multi_step") else "")
    task = When2ToolTask(
        id=str(row["id"]),
        generator=f"when2tool:{names}",
        kind="first",
        family=family,
        difficulty=_DIFFICULTY.get(row.get("difficulty", ""), 2),
        hops=len(steps) if steps else 1,
        expect="",
        messages=({"role": "system", "content": SYSTEM}, {"role": "user", "content": instruction}),
        tools=tools,
        reference=Reference((), f"\\boxed{{{answer}}}"),
        environments=environments,
        instruction=instruction,
        answer=answer,
    )
    return task, ""


def _in_turn(lists: Sequence[Sequence[Probe]]) -> Iterator[Probe]:
    for at in range(max(map(len, lists), default=0)):
        yield from (one[at] for one in lists if at < len(one))


def _boxed(text: str) -> str | None:
    r"""What the first ``\boxed{}`` holds, braces inside it balanced; None without one."""
    found = re.search(r"\\boxed\s*\{", text)
    if not found:
        return None
    depth, start = 1, found.end()
    for at in range(start, len(text)):
        depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0:
            return text[start:at]
    return text[start:]


def _same(got: str, wanted: str) -> bool:
    got, wanted = _bare(got), _bare(wanted)
    if got == wanted:
        return True
    try:
        left, right = ast.literal_eval(got), ast.literal_eval(wanted)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return False
    return bool(left == right)


def _bare(text: str) -> str:
    """Without the wrapping that models put around an answer, white space and case evened out."""
    text = text.strip().strip("`$*").strip()
    wrapped = re.fullmatch(r"\\(?:text|mathrm|mathbf|texttt)\{(.*)\}", text, re.DOTALL)
    text = wrapped[1] if wrapped else text
    text = text.replace("\\_", "_").replace("\\,", "").rstrip(".")
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text) if "[" not in text and "(" not in text else text
    return " ".join(text.split()).casefold()
