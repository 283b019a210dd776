"""An agent's model server with a script: it knows the probes and plays an agent whose needs are known exactly."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from aiohttp import web

from whetherman_edge.calibrate.probe import Probe
from whetherman_edge.gate.wordings import FIRST_STEP, LATER_STEP, LOOP

SENTENCES = (*FIRST_STEP.values(), *LATER_STEP.values(), LOOP)
Need = Callable[[Probe], bool]


class ScriptedAgent:
    """Solves a probe by its reference: it makes the calls that it needs, then gives the right reply.

    ``needs``: whether this agent needs the probe's calls; one that lacks them gives a wrong reply. ``eager``: it makes
    a needless call where it needs none. Steered (a steering sentence, tool choice "none", or no tools), it goes along.
    ``bodies``: the chat requests that came. ``status``: other than 200, all it answers.
    """

    def __init__(self, probes: Sequence[Probe], needs: Need, *, eager: bool = False) -> None:
        self._probes = [(said(probe.messages), tools_of(probe), probe) for probe in probes]
        self._needs = needs
        self._eager = eager
        self.bodies: list[dict[str, Any]] = []
        self.url = ""
        self.status = 200

    async def __aenter__(self) -> ScriptedAgent:
        application = web.Application()
        application.router.add_post("/v1/chat/completions", self._chat)
        self._runner = web.AppRunner(application)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status)
        message = self.answer(body)
        usage = {"prompt_tokens": len(json.dumps(body)) // 4, "completion_tokens": 1 + len(json.dumps(message)) // 4}
        finish = "tool_calls" if "tool_calls" in message else "stop"
        return web.json_response(
            {"choices": [{"index": 0, "message": message, "finish_reason": finish}], "usage": usage}
        )

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """The assistant's message."""
        turns = said(body["messages"])
        if turns[0][1].startswith("An assistant has these tools"):
            return text_of("YES")
        probe = self._probe(turns, tuple(tool["function"]["name"] for tool in body.get("tools", ())))
        taken = sum(turn[0] == "assistant" for turn in turns) - sum(
            one["role"] == "assistant" for one in probe.messages
        )
        steered = not body.get("tools") or body.get("tool_choice") == "none"
        steered = steered or any(sentence in turn[1] for turn in turns for sentence in SENTENCES)
        needed = probe.reference.calls if self._needs(probe) else ()
        if taken < len(needed):
            if steered:
                return text_of("I am not sure.")
            return call_of(needed[taken].name, needed[taken].arguments, taken)
        if self._eager and not needed and not steered and taken == 0:
            return call_of(probe.tools[0].name, {}, taken)
        return text_of(probe.reference.reply)

    def _probe(self, turns: list[tuple[str, str]], tools: tuple[str, ...]) -> Probe:
        fitting = [
            (len(own), probe)
            for own, names, probe in self._probes
            if len(own) <= len(turns)
            and (not tools or tools == names)
            and all(a[0] == b[0] and b[1].startswith(a[1]) for a, b in zip(own, turns, strict=False))
        ]
        return max(fitting, key=lambda one: one[0])[1]


def said(messages: Sequence[Any]) -> list[tuple[str, str]]:
    """Roles and texts, without system turns."""
    return [(one["role"], one.get("content") or "") for one in messages if one["role"] != "system"]


def tools_of(probe: Probe) -> tuple[str, ...]:
    return tuple(tool.name for tool in probe.tools)


def text_of(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def call_of(name: str, arguments: dict[str, Any], number: int) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": f"c{number}", "type": "function", "function": function}],
    }
