"""What this upstream and model can do, found out by asking: a dozen small requests before the real runs.

The first question decides everything: does the model get to see the tools at all? A chat template without a tools
branch drops them silently, and then there is nothing to gate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from whetherman_edge.calibrate.agent import AgentClient, Reply
from whetherman_edge.calibrate.probe import Tool
from whetherman_edge.gate.intervention import Capability
from whetherman_edge.gate.wordings import PREFIXES, sentence

# A rendered tool is at least its name, its description and its argument.
TOOL_TOKENS_MIN = 12
_REPLY_TOKENS = 160

LeakStyle = Literal["structured", "content", "none"]

LOOKUP = Tool(
    name="read_gauge",
    description="Read the current value of one of the plant's gauges by its id. Values change every minute.",
    parameters={
        "type": "object",
        "properties": {"gauge_id": {"type": "string", "description": "for example G-12"}},
        "required": ["gauge_id"],
    },
)
_ASKS = ({"role": "user", "content": "What does gauge G-12 read right now?"},)
_CHATS = "Write one short sentence that wishes me a good morning."


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What was found. ``shows_tools``: the prompt grows when tools are sent. None where a question got no answer.

    ``prompt_with``, ``prompt_without``: prompt tokens of the same dialogue, 0 where the server does not count.
    ``honours_none``: no structured call under ``tool_choice: "none"``; ``none_leaks``: but one in the text.
    ``honours_required``: a call came for a greeting. ``strips_history``: a dialogue with calls and no tools list is
    accepted. ``prefill``: a trailing assistant turn is accepted and continued. ``obeys_note``: no call in spite of a
    question that needs one. ``middle_system``: a system turn in the middle is accepted. ``streams``, ``usage``: the
    reply is a stream, and says its tokens. ``reports_cache``: cached prompt tokens are reported. ``call_style``: where
    the model's calls appear. ``thinks``: replies bring reasoning. ``trouble``: errors met, by question.
    """

    shows_tools: bool | None = None
    prompt_with: int = 0
    prompt_without: int = 0
    calls_when_needed: bool | None = None
    call_style: LeakStyle = "none"
    honours_none: bool | None = None
    none_leaks: bool | None = None
    honours_required: bool | None = None
    strips_history: bool | None = None
    prefill: bool | None = None
    obeys_note: bool | None = None
    middle_system: bool | None = None
    streams: bool = False
    usage: bool = False
    reports_cache: bool = False
    thinks: bool = False
    trouble: dict[str, str] = {}

    @property
    def usable(self) -> str:
        """Why nothing can be calibrated here; "" when it can."""
        if "plain" in self.trouble:
            return f"the model server does not answer a plain request: {self.trouble['plain']}"
        if "tools" in self.trouble:
            return f"the model server refuses requests with tools: {self.trouble['tools']}"
        if self.shows_tools is False:
            return (
                "the model never sees the tools: the prompt has "
                f"{self.prompt_with} tokens with a tool and {self.prompt_without} without. Its chat template has no "
                "place for them; use a model or a template with tool support (llama.cpp: --jinja)"
            )
        return ""

    def capability(self, kind: str, *, local: bool) -> Capability:
        """As the gate wants it. local: the server keeps its prompt cache on this machine."""
        return Capability(
            kind,
            honours_none=bool(self.honours_none),
            ignores_tool_choice=self.honours_none is False,
            none_needs_note=True,
            accepts_strip_with_history=bool(self.strips_history),
            cache_local=local,
            prefill="trailing" if self.prefill and not self.thinks else "no",
        )


async def look(client: AgentClient) -> Found:
    """Ask everything, in order; an answer that is an error is noted and does not end it.

    Raises UpstreamMissing when nothing listens there.
    """
    trouble: dict[str, str] = {}
    tools = [LOOKUP.openai()]

    async def ask(name: str, messages: Any, with_tools: bool = True, **extra: Any) -> Reply | None:
        reply = await client.complete(messages, tools if with_tools else (), max_tokens=_REPLY_TOKENS, **extra)
        if reply.error:
            trouble[name] = reply.error[:200]
            return None
        return reply

    plain = await ask("plain", _ASKS, with_tools=False)
    if plain is None:
        return Found(trouble=trouble)
    shown = await ask("tools", _ASKS)
    if shown is None:
        return Found(prompt_without=plain.prompt_tokens, trouble=trouble)
    base: dict[str, Any] = {
        "prompt_with": shown.prompt_tokens,
        "prompt_without": plain.prompt_tokens,
        "streams": shown.streamed,
        "usage": shown.prompt_tokens > 0,
        "reports_cache": shown.cached_tokens is not None,
        "thinks": plain.reasoning_chars > 0 or shown.reasoning_chars > 0,
        "calls_when_needed": bool(shown.calls),
        "call_style": "none" if not shown.calls else "content" if shown.from_content else "structured",
    }
    seen: bool | None = bool(shown.calls) or None  # a call to a tool that was not shown cannot be
    if shown.prompt_tokens and plain.prompt_tokens:
        seen = shown.prompt_tokens >= plain.prompt_tokens + TOOL_TOKENS_MIN
    if seen is False:
        return Found(shows_tools=False, trouble=trouble, **base)
    noted = [
        {
            "role": "user",
            "content": f"{_ASKS[0]['content']}\n\n{sentence('ANSWER', 'direct', later=False, looping=False)}",
        }
    ]
    none = await ask("none", _ASKS, tool_choice="none")
    required = await ask("required", [{"role": "user", "content": _CHATS}], tool_choice="required")
    history = await ask("strip", _with_history(), with_tools=False)
    prefix = PREFIXES["ANSWER"]
    filled = await ask("prefill", [{"role": "user", "content": _CHATS}, {"role": "assistant", "content": prefix}])
    note = await ask("note", noted)
    middle = await ask("middle_system", _with_system(), with_tools=False)
    return Found(
        shows_tools=seen,
        honours_none=None if none is None else not (none.calls and not none.from_content),
        none_leaks=None if none is None else none.from_content,
        honours_required=None if required is None else bool(required.calls),
        strips_history=history is not None,
        prefill=filled is not None and bool(filled.content) and not filled.calls,
        obeys_note=None if note is None else not note.calls,
        middle_system=middle is not None,
        trouble=trouble,
        **base,
    )


def _with_history() -> list[Mapping[str, Any]]:
    call = {"id": "call_1", "type": "function", "function": {"name": "read_gauge", "arguments": '{"gauge_id":"G-12"}'}}
    return [
        *_ASKS,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "4.2 bar"},
        {"role": "user", "content": "Thank you. Is that more than 4 bar?"},
    ]


def _with_system() -> list[Mapping[str, Any]]:
    return [
        {"role": "user", "content": _CHATS},
        {"role": "assistant", "content": "Good morning to you!"},
        {"role": "system", "content": "Answer in English."},
        {"role": "user", "content": "Another one, please."},
    ]
