"""A task of the pack: a Probe that is plain data through and through, so that a pack can be compared byte for byte."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from whetherman_edge.calibrate.probe import Call, Check, Probe, World

from .answers import Answer, Talk, holds, judge, numbers, plain
from .kits import KITS
from .world import Room, Setting


class Want(msgspec.Struct, frozen=True):
    """What a finished run must show. ``answer``: None where any reply will do (the state is what counts).

    ``changes``: the records that must differ in the world, no more and no fewer; in a record a number must be equal, a
    text must be equal but for case and blanks, and a list of texts names words that the field must hold.
    """

    answer: Answer | None = None
    changes: tuple[dict[str, Any], ...] = ()


class Task(Probe, frozen=True, kw_only=True):
    """A probe over the kits. ``setting``: the world's plain data. ``recorded``: calls before the decision point."""

    setting: Setting
    want: Want
    recorded: tuple[Call, ...] = ()

    def open(self) -> Room:
        room = Room(KITS, self.tools, self.setting)
        for call in self.recorded:
            room.call(call.name, call.arguments)
        return room

    def check(self, reply: str, world: World, calls: Sequence[Call]) -> Check:
        assert isinstance(world, Room)
        changed = world.changes()
        state = _state(changed, self.want.changes)
        if not state.success or self.want.answer is None:
            return state
        absent = [call.name for call in calls if call.name not in self.tool_names]
        if absent and self.expect == "DECLINE":
            return Check(False, f"it called {absent[0][:40]!r}, which is not there")
        return judge(self.want.answer, reply, self.question)

    @property
    def any_reply(self) -> bool:
        return isinstance(self.want.answer, Talk)

    @property
    def tool_names(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self.tools)

    @property
    def question(self) -> str:
        """What the user wrote, all turns."""
        return "\n".join(message["content"] for message in self.messages if message["role"] == "user")


def _state(changed: Sequence[Mapping[str, Any]], wanted: Sequence[Mapping[str, Any]]) -> Check:
    left = list(changed)
    for record in wanted:
        hit = next((index for index, other in enumerate(left) if _agrees(record, other)), None)
        if hit is None:
            near = next((other for other in left if other["kit"] == record["kit"]), None)
            return Check(
                False, f"expected in the state {_short(record)}, found {_short(near) if near else 'no change'}"
            )
        del left[hit]
    if left:
        return Check(False, f"changed what nobody asked for: {_short(left[0])}")
    return Check(True, "the state is as asked" if wanted else "nothing was changed")


def _agrees(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    return all(key in found and _same(value, found[key]) for key, value in wanted.items())


def _same(wanted: Any, found: Any) -> bool:
    if isinstance(wanted, list | tuple):
        text = plain(str(found))
        return all(holds(text, str(word)) or _numeric(str(word), text) for word in wanted)
    if isinstance(wanted, str):
        return isinstance(found, str) and " ".join(wanted.lower().split()) == " ".join(found.lower().split())
    if isinstance(wanted, bool) or not isinstance(wanted, int | float):
        return bool(wanted == found)
    return isinstance(found, int | float) and abs(wanted - found) < 0.006


def _numeric(word: str, text: str) -> bool:
    values = numbers(word)
    return len(values) == 1 and values[0] in numbers(text)


def _short(record: Mapping[str, Any] | None) -> str:
    return json.dumps(record, ensure_ascii=False)[:160]
