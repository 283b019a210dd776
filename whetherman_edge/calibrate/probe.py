"""What a probe is: one task with an exact checker, and the small world in which its tools really work.

``kind`` "first": the decision before the first step of a task. "later": the decision inside a recorded trajectory,
whose tool calls and results are part of ``messages``; its world opens in the state that those calls left behind.
Messages are in the OpenAI chat form (arguments of recorded calls are JSON text). Nothing here does I/O; worlds do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec

Kind = Literal["first", "later"]
Split = Literal["fit", "calibrate", "test"]
Expect = Literal["ACT", "ANSWER", "ASK", "DECLINE", ""]
"""What a careful person would do; "" where it depends on the agent (arithmetic, knowledge)."""
Effect = Literal["read", "write"]


class Tool(msgspec.Struct, frozen=True):
    """A tool as the model sees it. ``parameters``: a JSON schema object. ``effect``: whether a call changes state."""

    name: str
    description: str
    parameters: dict[str, Any]
    effect: Effect = "read"

    def openai(self) -> dict[str, Any]:
        """The entry of a chat request's ``tools`` array."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


class Call(msgspec.Struct, frozen=True):
    """One call that was made in a run, and the text it returned."""

    name: str
    arguments: dict[str, Any]
    result: str = ""


class Check(msgspec.Struct, frozen=True):
    """Verdict of a checker; ``why`` names the first thing that was wrong, or what was right."""

    success: bool
    why: str


class Reference(msgspec.Struct, frozen=True):
    """One run that solves the probe: the calls from its decision point on (no results), then the final reply."""

    calls: tuple[Call, ...]
    reply: str


class World(Protocol):
    """The state that a probe's tools act on; one per run.

    ``call`` returns the tool's result text and never raises: wrong arguments and unknown tools give an error text, as
    a real tool would. ``close`` frees what the world holds (a temporary folder, a database) and may be called twice.
    """

    def call(self, name: str, arguments: dict[str, Any]) -> str: ...

    def close(self) -> None: ...


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """One task. Subclasses say what its world is and how it is checked.

    ``generator``: what drew it; splits go by it. ``family``: what it is about (chat, knowledge, arithmetic, context,
    lookup, action, sufficient, hop, retry, pagination, comparison, ask, decline, ...). ``difficulty``: 1 to 3.
    ``hops``: expected number of calls from the decision point on. ``scenario``: shared by probes that are not
    independent of each other; empty for most.
    """

    id: str
    generator: str
    kind: Kind
    family: str
    difficulty: int
    hops: int
    expect: Expect
    messages: tuple[dict[str, Any], ...]
    tools: tuple[Tool, ...]
    reference: Reference
    scenario: str = ""

    @property
    def group(self) -> str:
        """What ``profiles.risk.Step.group`` wants: probes of one group are not independent."""
        return self.scenario or self.id

    @property
    def any_reply(self) -> bool:
        """True when any reply in words passes, so that it does not matter which decision the agent was steered to."""
        return False

    def open(self) -> World:
        """A fresh world for one run."""
        raise NotImplementedError

    def check(self, reply: str, world: World, calls: Sequence[Call]) -> Check:
        """Judge a finished run: the final text, the world after it, and the calls made in it (recorded ones not)."""
        raise NotImplementedError
