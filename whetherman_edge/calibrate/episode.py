"""One run of an agent on one probe: the loop of model, calls and tools, with or without steering.

A steered request is changed by the very code the daemon uses (``gate.intervention``, ``dialects``), so what is measured
here is what will happen there.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from whetherman_edge.calibrate.agent import AgentClient, Reply, tool_names
from whetherman_edge.calibrate.probe import Call, Probe, World
from whetherman_edge.calibrate.written_calls import ToolCall
from whetherman_edge.dialects import openai_chat
from whetherman_edge.dialects.registry import apply
from whetherman_edge.dialects.tool_cache import ToolCache
from whetherman_edge.errors import ViewError
from whetherman_edge.gate import loop_guard
from whetherman_edge.gate.intervention import Capability, InterventionSettings, plan
from whetherman_edge.gate.verdict import Decision, Label

STEPS_MAX = 8
REFUSALS_MAX = 2
CALLS_A_STEP_MAX = 16
"""Calls of one reply that are made; a model that has run wild writes hundreds, and each may start a process."""
REFUSED = "Refused: no tool can be called now. Answer without one."
_TOO_MANY = f"Error: at most {CALLS_A_STEP_MAX} calls at once; nothing was done."
_UNREADABLE = "Error: the arguments are not a JSON object; nothing was done."

SteerMode = Literal["note", "none", "strip", "prefill"]


class Steer(msgspec.Struct, frozen=True, kw_only=True):
    """How a request is changed before it goes out.

    ``label``: the decision that is carried out. ``mode``, ``wording``: the intervention under test. ``capability``:
    what the upstream can do; ``ANYTHING`` to try a mode whatever the table says. ``on_call``: a call that comes all the
    same is refused (a label needs a run without calls), or relayed, as the daemon does, after the request was sent
    again unmodified where the tools had been withheld. ``steps``: steps of the run that are steered, from the first on;
    None for all.
    """

    label: Label = "ANSWER"
    mode: SteerMode = "note"
    wording: str = "reason"
    capability: Capability
    on_call: Literal["refuse", "relay"] = "refuse"
    steps: int | None = None

    def edit(self, body: bytes) -> bytes:
        """The request with the intervention in it; as it came where none is safe here.

        Raises ViewError for a body that cannot be edited.
        """
        chat = openai_chat.view(body, ToolCache())
        settings = InterventionSettings(self.mode, self.wording)
        intervention = plan(_decision(self.label, "scored"), chat, self.capability, settings)
        return body if intervention is None else apply(body, chat, intervention)


def _decision(label: Label, reason: str) -> Decision:
    p: dict[Label, float] = {label: 1.0}
    return Decision(
        label=label,
        verdict=label,
        probabilities=(0.0, p.get("ANSWER", 0.0), p.get("ASK", 0.0), p.get("DECLINE", 0.0)),
        p_need=0.0,
        confidence=1.0,
        reason=reason,
        engine="",
    )


def _guard(body: bytes, capability: Capability) -> tuple[bytes, str]:
    """What the loop guard makes of a request, and the intervention's mode; the request as it came, and "", mostly."""
    chat = openai_chat.view(body, ToolCache())
    if not loop_guard.inspect(chat).looping:
        return body, ""
    intervention = plan(_decision("ANSWER", "loop_guard"), chat, capability, InterventionSettings())
    return (body, "") if intervention is None else (apply(body, chat, intervention), intervention.mode)


ANYTHING = Capability(
    "measured", honours_none=True, accepts_strip_with_history=True, cache_local=True, prefill="trailing"
)
"""Tries whatever mode is asked for, with a sentence beside ``none``."""


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a run and what came back. ``steered``: it was changed. ``refused``: its calls were not made.

    ``resent``: the reply to the request sent again unmodified, after a call came although the tools were withheld.
    """

    reply: Reply
    steered: bool = False
    refused: bool = False
    resent: bool = False


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """A finished run.

    ``n_calls``: calls that were made; ``n_refused``: calls that came and were not. Tokens and seconds are sums over the
    steps. ``error``: the server failed, so the run says nothing about the agent. ``unfinished``: no final text within
    the steps allowed.
    """

    steps: tuple[StepRecord, ...]
    success: bool
    why: str
    calls: tuple[Call, ...] = ()
    n_calls: int = 0
    n_refused: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0
    unfinished: bool = False
    error: str = ""


async def run_episode(
    client: AgentClient,
    probe: Probe,
    *,
    steer: Steer | None = None,
    guarded: Capability | None = None,
    max_steps: int = STEPS_MAX,
    max_repeats: int | None = None,
    **extra: Any,
) -> Episode:
    """Run the agent on a probe in a fresh world, from the probe's decision point on. extra: fields of each request.

    guarded: the server's capability, to have the loop guard break repeated calls as it does in enforce without a
    profile; None for no guard. max_repeats: the run ends, unfinished, when a step has come this often in a row with the
    same calls and results.

    Raises UpstreamMissing when nothing listens at the endpoint.
    """
    world = probe.open()
    try:
        return await _run(client, probe, world, steer, guarded, max_steps, max_repeats, extra)
    finally:
        world.close()


async def _run(
    client: AgentClient,
    probe: Probe,
    world: World,
    steer: Steer | None,
    guarded: Capability | None,
    max_steps: int,
    max_repeats: int | None,
    extra: dict[str, Any],
) -> Episode:
    tools = [tool.openai() for tool in probe.tools]
    names = tool_names(tools)
    messages: list[dict[str, Any]] = [dict(message) for message in probe.messages]
    steps: list[StepRecord] = []
    made: list[Call] = []
    came: list[list[tuple[str, str, str]]] = []
    n_refused = 0
    text = ""
    for step in range(max_steps):
        active = steer if steer is not None and (steer.steps is None or step < steer.steps) else None
        step_records = await _step(client, client.body(messages, tools, **extra), names, active, guarded)
        steps += step_records
        reply = step_records[-1].reply
        if reply.error:
            return _episode(steps, made, n_refused, success=False, why="the server failed", error=reply.error)
        text = reply.content
        if not reply.calls:
            check = probe.check(text, world, made)
            return _episode(steps, made, n_refused, success=check.success, why=check.why)
        results: list[str] = []
        for place, call in enumerate(reply.calls):
            if place >= CALLS_A_STEP_MAX:
                results.append(_TOO_MANY)
            elif steps[-1].refused:
                n_refused += 1
                results.append(REFUSED)
            elif call.arguments is None:
                made.append(Call(call.name, {}, _UNREADABLE))
                results.append(_UNREADABLE)
            else:
                made.append(Call(call.name, call.arguments, world.call(call.name, call.arguments)))
                results.append(made[-1].result)
        messages += _turn(reply, step, results)
        came.append([(call.name, call.raw, result) for call, result in zip(reply.calls, results, strict=True)])
        if max_repeats is not None and len(came) >= max_repeats and all(s == came[-1] for s in came[-max_repeats:]):
            break
        if sum(record.refused for record in steps) > REFUSALS_MAX:
            break
    check = probe.check("", world, made)
    why = f"no final text in {len(steps)} steps: {check.why}"
    return _episode(steps, made, n_refused, success=check.success, why=why, unfinished=True)


async def _step(
    client: AgentClient, body: bytes, names: tuple[str, ...], steer: Steer | None, guarded: Capability | None
) -> list[StepRecord]:
    """One step: one request, or two where a withheld model called and the daemon would send it again unmodified."""
    edited, mode = body, ""
    try:
        if steer is not None:
            edited, mode = steer.edit(body), steer.mode
        elif guarded is not None:
            edited, mode = _guard(body, guarded)
    except ViewError:
        edited = body
    steered = edited != body
    reply = await client.send(edited, names)
    if not steered:
        return [StepRecord(reply=reply)]
    if not reply.calls or (steer is not None and steer.on_call == "refuse"):
        return [StepRecord(reply=reply, steered=True, refused=bool(reply.calls))]
    if mode == "note" and not reply.from_content:
        return [StepRecord(reply=reply, steered=True)]
    leaked = StepRecord(reply=reply, steered=True)
    return [leaked, StepRecord(reply=await client.send(body, names), resent=True)]


def _turn(reply: Reply, step: int, results: list[str]) -> list[dict[str, Any]]:
    """The assistant's turn and its results, as an agent keeps them: written calls become structured ones."""
    ids = [f"call_{step}_{place}" for place in range(len(reply.calls))]
    calls = [
        {"id": name, "type": "function", "function": {"name": call.name, "arguments": _raw(call)}}
        for name, call in zip(ids, reply.calls, strict=True)
    ]
    said = "" if reply.from_content else reply.content
    turn: dict[str, Any] = {"role": "assistant", "content": said, "tool_calls": calls}
    answers = [
        {"role": "tool", "tool_call_id": name, "content": result} for name, result in zip(ids, results, strict=True)
    ]
    return [turn, *answers]


def _raw(call: ToolCall) -> str:
    """The arguments as JSON text; ``{}`` for what is none, which templates could not render."""
    return "{}" if call.arguments is None else msgspec.json.encode(call.arguments).decode()


def _episode(
    steps: list[StepRecord],
    made: list[Call],
    n_refused: int,
    *,
    success: bool,
    why: str,
    unfinished: bool = False,
    error: str = "",
) -> Episode:
    replies = [record.reply for record in steps]
    return Episode(
        steps=tuple(steps),
        success=success,
        why=why,
        calls=tuple(made),
        n_calls=len(made),
        n_refused=n_refused,
        prompt_tokens=sum(reply.prompt_tokens for reply in replies),
        output_tokens=sum(reply.output_tokens for reply in replies),
        seconds=sum(reply.seconds for reply in replies),
        unfinished=unfinished,
        error=error,
    )
