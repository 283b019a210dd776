"""A model server whose agent is a script: it knows the reference solution of every probe, and which ones it can do
alone. In a thread of its own, so that a command in another process can talk to it.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from whetherman_edge.calibrate.episode import REFUSED
from whetherman_edge.calibrate.probe import Probe
from whetherman_edge.gate.wordings import FIRST_STEP, LATER_STEP, LOOP, PREFIXES

LOST = "I cannot say."
_NOTES = (*FIRST_STEP.values(), *LATER_STEP.values())


class Faults:
    """What the server does wrong. ``refuse``: so many requests get ``status`` first, and are
    to wait ``retry_after`` seconds. ``garbage``: replies are no JSON.
    ``ignores_tools``: the prompt does not grow with tools. ``hold_after``: after so many requests it waits for ever.
    ``writes_calls``: calls stand in the text. ``leaks``: steering does not help. ``loops``: with all results there, the
    last call is made again until a note says that it would not help. ``wanders``: it calls on and on, each time with
    other arguments.
    """

    def __init__(
        self,
        *,
        refuse: int = 0,
        status: int = 429,
        garbage: bool = False,
        ignores_tools: bool = False,
        hold_after: int | None = None,
        writes_calls: bool = False,
        leaks: bool = False,
        loops: bool = False,
        wanders: bool = False,
        retry_after: str = "0",
    ) -> None:
        self.refuse = refuse
        self.status = status
        self.garbage = garbage
        self.ignores_tools = ignores_tools
        self.hold_after = hold_after
        self.writes_calls = writes_calls
        self.leaks = leaks
        self.loops = loops
        self.wanders = wanders
        self.retry_after = retry_after


class ScriptedUpstream:
    """``alone``: whether the agent solves a probe without calls. ``able``: whether it solves it with them."""

    def __init__(
        self,
        probes: Sequence[Probe],
        alone: Callable[[Probe], bool],
        able: Callable[[Probe], bool] = lambda _probe: True,
        faults: Faults | None = None,
    ) -> None:
        self._probes = sorted(probes, key=lambda probe: -len(probe.messages))
        self._alone = alone
        self._able = able
        self.faults = faults or Faults()
        self.n_requests = 0
        self.held = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._let_go = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self.url = ""

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application(client_max_size=1 << 24)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/props", self._props)
        runner = web.AppRunner(app)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        self._loop.run_forever()
        self._let_go.set()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _props(self, _request: web.Request) -> web.Response:
        return web.json_response({"default_generation_settings": {}, "total_slots": 1, "chat_template": ""})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.n_requests += 1
        if self.faults.hold_after is not None and self.n_requests > self.faults.hold_after:
            self.held.set()
            await self._let_go.wait()
            raise web.HTTPServiceUnavailable
        if self.faults.refuse > 0:
            self.faults.refuse -= 1
            headers = {"retry-after": self.faults.retry_after}
            return web.json_response({"error": {"message": "slow down"}}, status=self.faults.status, headers=headers)
        if self.faults.garbage:
            return web.Response(body=b"\x00\xff not JSON", content_type="application/json")
        content, calls = self._reply(body)
        seen = {"messages": body["messages"]} if self.faults.ignores_tools else body
        n_prompt = len(json.dumps([seen.get("tools"), seen["messages"]])) // 4
        return await self._stream(request, content, calls, n_prompt)

    async def _stream(
        self, request: web.Request, content: str, calls: list[dict[str, Any]], n_prompt: int
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        delta: dict[str, Any] = {"role": "assistant", "content": content} if content else {"role": "assistant"}
        if calls:
            delta["tool_calls"] = [{"index": place, "type": "function", **call} for place, call in enumerate(calls)]
        finish = "tool_calls" if calls else "stop"
        n_output = max(1, len(json.dumps(delta)) // 4)
        usage = {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_output,
            "prompt_tokens_details": {"cached_tokens": n_prompt // 2},
        }
        for event in (
            {"choices": [{"index": 0, "delta": delta}]},
            {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]},
            {"choices": [], "usage": usage},
        ):
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    def _reply(self, body: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
        messages = body["messages"]
        probe = self._find(messages)
        steered = not body.get("tools") or body.get("tool_choice") == "none" or _noted(messages)
        if probe is None:  # the capability probe
            name = body["tools"][0]["function"]["name"] if body.get("tools") else ""
            if steered:
                return "Good morning.", []
            return "", [{"id": "c0", "function": {"name": name, "arguments": "{}"}}]
        if not self._able(probe):
            return (probe.reference.reply if steered and self._alone(probe) else LOST), []
        if any(REFUSED in str(message.get("content")) for message in messages):
            return LOST, []
        n_done = sum(message["role"] == "tool" for message in messages[len(probe.messages) :])
        calls = probe.reference.calls
        if steered and not self.faults.leaks:
            return (probe.reference.reply if self._alone(probe) else LOST), []
        again = bool(calls) and self.faults.loops and LOOP not in json.dumps(messages)
        if self.faults.wanders and calls:
            arguments = json.dumps({"step": n_done})
            return "", [{"id": f"c{n_done}", "function": {"name": calls[0].name, "arguments": arguments}}]
        if n_done < len(calls) or again:
            call = calls[min(n_done, len(calls) - 1)]
            arguments = json.dumps(call.arguments)
            if self.faults.writes_calls:
                return f'```json\n{{"name": "{call.name}", "arguments": {arguments}}}\n```', []
            return "", [{"id": f"c{n_done}", "function": {"name": call.name, "arguments": arguments}}]
        return probe.reference.reply, []

    def _find(self, messages: Sequence[dict[str, Any]]) -> Probe | None:
        for probe in self._probes:
            if len(probe.messages) <= len(messages) and all(
                mine["role"] == theirs["role"]
                and str(theirs.get("content") or "").startswith(str(mine.get("content") or ""))
                for mine, theirs in zip(probe.messages, messages, strict=False)
            ):
                return probe
        return None


def _noted(messages: Sequence[dict[str, Any]]) -> bool:
    last = messages[-1]
    if last["role"] == "assistant":
        return last.get("content") in PREFIXES.values()
    return any(note in str(message.get("content")) for message in messages for note in _NOTES)
