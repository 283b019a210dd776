"""Has the agent been making the same call, with the same result, since the user last spoke?

Small agents repeat a call 30 times (field case D13). A rule finds this without a model: the same name and canonical
arguments have come back with the same result twice, and nothing new came back in between. An edit between two test runs
is something new, and so is a result that changes (polling). What is not finished, or failed for the moment, may be
asked for some more times. What a write reports may change in its figures alone: the
same mail, sent again, has another id. From the third time on that is a loop too.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

import msgspec

from whetherman_edge.dialects.chat import ChatView, OpenCalls
from whetherman_edge.gate.tool_effect import effect, name_tokens

REPEATS_MIN = 2
# Calls without arguments that act on the world step it on ("volume_up", "next_page"): twice is often meant.
STEPPING_REPEATS_MIN = 3
# A result that has changed before may change again, and so may one that says so: wait for more of the same.
POLLING_REPEATS_MIN = 4
# A state is a state where it is named as one, or where the result says little else: a handbook has a "building 7" too.
_STATES = (
    r"(?:pending|running|queued|processing|starting|waiting|busy|in[ _-]?progress"
    r"|not (?:yet |been )*(?:ready|finished|done|complete|completed|available))(?![a-z])"
)
_STATE_CHARS_MAX = 40
_STATE = re.compile(r"(?<![a-z])" + _STATES, re.IGNORECASE)
_UNFINISHED_CHARS_MAX = 400
_UNFINISHED = re.compile(
    r"(?:status|state|phase)\W{1,5}" + _STATES + r"|(?<![a-z])(?:try again|retry|too many requests|rate[ _-]?limit"
    r"|timed[ _-]?out|timeout|temporarily|unavailable)(?![a-z])",
    re.IGNORECASE,
)
_WAITS = frozenset({"wait", "sleep"})
# Marks the result of a write that differs from an earlier one in its figures alone.
_ALIKE = "\0"
# Marks a result with pictures: these are not compared, so it is news whatever its words are.
_PICTURED = "\1"
_DIGITS = re.compile(r"\d+")


class LoopReport(msgspec.Struct, frozen=True, gc=False):
    """``repeats``: how often the last call came back with the same result in this user turn, 0 when it is no repeat.

    ``looping``: the agent is to be steered to a text answer. ``tool``: the tool called.
    """

    repeats: int = 0
    looping: bool = False
    tool: str = ""


_QUIET = LoopReport()


class _Came(NamedTuple):
    """A call and what it came back with."""

    name: str
    arguments: str
    result: str


def inspect(chat: ChatView) -> LoopReport:
    """Look at the calls and results since the last user turn. Pairs by id, and by order where ids are missing or
    repeat.

    Only the last step counts: an agent that repeated itself earlier and has moved on is not looping. Every call of the
    last step must be a repeat.
    """
    if chat.last_role != "tool":
        return _QUIET
    steps = _steps(chat)
    if len(steps) < REPEATS_MIN:
        return _QUIET
    times: dict[_Came, int] = {}
    news_at: dict[_Came, int] = {}
    n_news = 0
    for step in steps:
        n_news_before = n_news
        for came in step:
            if came not in times:
                n_news += 1
            elif news_at[came] != n_news_before:
                times[came] = 0  # something new came back since it was last seen: counting starts again
        for came in step:
            times[came] = times.get(came, 0) + 1
            news_at[came] = n_news
    repeats = min(times[came] for came in steps[-1])
    if repeats < REPEATS_MIN:
        return _QUIET
    last = steps[-1][-1]
    polled = any(_may_change(chat, came) for came in steps[-1]) or (
        not last.result.startswith(_ALIKE)
        and any(came[:2] == last[:2] and came.result != last.result for step in steps for came in step)
    )
    return LoopReport(repeats=repeats, looping=repeats >= _repeats_needed(chat, last, polled=polled), tool=last.name)


def _steps(chat: ChatView) -> list[list[_Came]]:
    """Calls with their results since the last user turn, one list for each assistant turn, each pair once in it.

    A result that belongs to no call is a step of its own, which repeats nothing.
    """
    waiting = OpenCalls()
    calls = [call for message in chat.messages[chat.last_user_index + 1 :] for call in message.calls]
    made = Counter([(call.name, call.arguments) for call in calls])
    again = {name for (name, arguments), n in made.items() if n > 1 and arguments != "{}"}
    writers = {tool.name for tool in chat.tools if tool.name in again and effect(tool) == "write"}
    told: dict[_Came, str] = {}
    steps: list[list[_Came]] = []
    opened = True
    for index in range(chat.last_user_index + 1, len(chat.messages)):
        message = chat.messages[index]
        if message.calls:
            waiting.offer(message.calls)
            opened = True
        elif message.role == "tool":
            call = waiting.take(message.tool_call_id, message.tool_name)
            came = _Came("", str(index), "") if call is None else _Came(call.name, call.arguments, message.text)
            if message.n_media:
                came = came._replace(result=f"{_PICTURED}{index}")
            elif came.name in writers and came.arguments != "{}" and made[came[:2]] > 1:
                came = _alike(came, told)
            if opened or call is None:
                steps.append([came])
            elif came not in steps[-1]:
                steps[-1].append(came)
            opened = call is None
    return steps


def _alike(came: _Came, told: dict[_Came, str]) -> _Came:
    """The same for all results of a write that differ from the first one in their figures. told: those first ones."""
    masked = came._replace(result=_ALIKE + _DIGITS.sub("0", came.result))
    return came if told.setdefault(masked, came.result) == came.result else masked


def _may_change(chat: ChatView, came: _Came) -> bool:
    """True for a call that only waits, and for a result that says it is not the last word; never for a write, which
    would be made again.
    """
    if not _WAITS.isdisjoint(name_tokens(came.name)):
        return True
    text = came.result
    brief = len(text) <= _STATE_CHARS_MAX and _STATE.search(text) is not None
    if not brief and (len(text) > _UNFINISHED_CHARS_MAX or _UNFINISHED.search(text) is None):
        return False
    return not any(tool.name == came.name and effect(tool) == "write" for tool in chat.tools)


def _repeats_needed(chat: ChatView, last: _Came, *, polled: bool) -> int:
    if polled:
        return POLLING_REPEATS_MIN
    tool = next((tool for tool in chat.tools if tool.name == last.name), None)
    if last.arguments == "{}" and tool is not None and effect(tool) in ("write", "unknown"):
        return STEPPING_REPEATS_MIN
    return REPEATS_MIN
