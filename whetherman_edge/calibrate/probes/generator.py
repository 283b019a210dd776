"""What a generator is, and the hand that makes a task from what it drew.

A generator is a function ``(rng, draft) -> Task``. ``rng`` is its own stream, drawn from the pack's seed, its name and
the number of the task, so adding a generator changes no other's tasks. Every text of an answer is drawn, never known.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final

import msgspec

from whetherman_edge.calibrate.probe import Call, Expect, Kind, Reference, Split

from .answers import Answer
from .kits import KITS, TOOLS
from .task import Task, Want
from .world import Room, Setting

_SLATE_SIZES: Final = (1, 2, 2, 3, 3, 4, 4, 5, 6, 8, 12, 24)
"""Numbers of tools that tasks show; every tool costs the agent about 80 prompt tokens, so most slates are short."""
_ATTEMPTS: Final = 8


class Draft(msgspec.Struct):
    """What a generator starts from: its name, family and kind, the number of the task, and the extra tools on show."""

    name: str
    family: str
    kind: Kind
    index: int
    seed: int
    slate: int

    def task(
        self,
        *,
        user: str | Sequence[dict[str, Any]],
        tools: Sequence[str],
        calls: Sequence[tuple[str, dict[str, Any]]] = (),
        reply: str,
        answer: Answer | None = None,
        expect: Expect,
        setting: Setting | None = None,
        changes: Sequence[dict[str, Any]] = (),
        recorded: Sequence[tuple[str, dict[str, Any]]] = (),
        difficulty: int = 1,
        without: Sequence[str] = (),
        system: str = "",
        scenario: str = "",
    ) -> Task:
        """A task. ``tools``: the ones it needs; others of the catalogue fill the slate, never those in ``without``.
        ``scenario``: what tasks of one text share.
        ``recorded``: calls before the decision point, made here for real so that their results are true.
        """
        names = _slate(tools, self.slate, without)
        shown = tuple(TOOLS[name] for name in names)
        history = [{"role": "user", "content": user}] if isinstance(user, str) else list(user)
        if system:
            history.insert(0, {"role": "system", "content": system})
        made: list[Call] = []
        if recorded:
            room = Room(KITS, shown, setting or {})
            made = [Call(name, arguments, room.call(name, arguments)) for name, arguments in recorded]
            room.close()
            for number, call in enumerate(made, 1):
                history += _turns(call, f"call_{number}")
        return Task(
            id=f"{self.name}-{self.seed}-{self.index}",
            generator=self.name,
            kind=self.kind,
            family=self.family,
            difficulty=difficulty,
            hops=len(calls),
            expect=expect,
            messages=tuple(history),
            tools=shown,
            reference=Reference(tuple(Call(name, arguments) for name, arguments in calls), reply),
            setting=setting or {},
            want=Want(answer, tuple(changes)),
            recorded=tuple(made),
            scenario=scenario and f"{self.name}/{scenario}",
        )


Maker = Callable[[Random, Draft], Task]


class Generator(msgspec.Struct, frozen=True):
    """A maker with its name, family, kind and split, and how many tasks a pack holds of it."""

    name: str
    family: str
    kind: Kind
    split: Split
    count: int
    make: Maker

    def draw(self, seed: int) -> list[Task]:
        """This generator's tasks of one seed. They share two slates of tools at most, so that a server's prefix cache
        holds their tools.
        """
        sizes = Random(f"{seed}/{self.name}/slates")
        slates = [sizes.choice(_SLATE_SIZES), sizes.choice(_SLATE_SIZES)]
        out: list[Task] = []
        for index in range(self.count):
            size = slates[index * 2 // max(self.count, 1)]
            draft = Draft(self.name, self.family, self.kind, index, seed, size)
            for attempt in range(_ATTEMPTS):  # two tasks with the same words would be one task
                task = self.make(Random(f"{seed}/{self.name}/{index}/{attempt}"), draft)
                if all(task.messages != other.messages for other in out):
                    break
            out.append(task)
        return out


class Book(list[Generator]):
    """The generators of one module, in the order in which they are written down."""

    def add(self, name: str, family: str, kind: Kind, split: Split, count: int) -> Callable[[Maker], Maker]:
        """A decorator that enters a maker."""

        def enter(make: Maker) -> Maker:
            self.append(Generator(name, family, kind, split, count, make))
            return make

        return enter


def _slate(needed: Sequence[str], size: int, without: Sequence[str]) -> list[str]:
    others = [name for name in TOOLS if name not in needed and name not in without]
    # one order for all tasks of a generator with the same slate: seeded by what they share
    shared = Random(f"{size}/{'/'.join(needed)}")
    names = [*needed, *shared.sample(others, min(max(size - len(needed), 0), len(others)))]
    shared.shuffle(names)
    return names


def _turns(call: Call, key: str) -> list[dict[str, Any]]:
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": key, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": key, "content": call.result},
    ]
