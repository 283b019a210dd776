"""How a decision is carried out on this upstream: one Intervention, chosen by capability (DESIGN 4). Pure.

``dialects.registry.apply`` writes it into the bytes. Nothing here is volatile and nothing is added ahead of the last
user turn, so prompt caches keep what they have (C01, C02).
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Mapping
from typing import Literal

import msgspec

from whetherman_edge.dialects.chat import ChatView, Intervention, InterventionMode
from whetherman_edge.gate import loop_guard
from whetherman_edge.gate.guards import tool_named
from whetherman_edge.gate.policy import SessionState
from whetherman_edge.gate.verdict import Decision, Label
from whetherman_edge.gate.wordings import DEFAULT_WORDING, PREFIXES, sentence

Prefill = Literal["no", "trailing", "continue_flags"]
NotePosition = Literal["result", "user"]


class Capability(msgspec.Struct, frozen=True):
    """What is known of an upstream kind; ``proxy.capability`` has the table.

    ``honours_none``: ``tool_choice: "none"`` keeps structured calls from coming. ``ignores_tool_choice``: it is
    accepted and has no effect. ``none_needs_note``: the tools stay in the prompt all the same, so a sentence must say
    it too. ``accepts_strip_with_history``: no error when earlier turns hold calls and the tools are gone.
    ``cache_local``: a changed prompt front costs this machine a prefill. ``prefill``: how a trailing assistant turn is
    continued, if at all. ``note_position``: on later steps the note stands behind the last tool result, or behind the
    last user turn.
    """

    kind: str
    honours_none: bool = False
    ignores_tool_choice: bool = False
    none_needs_note: bool = True
    accepts_strip_with_history: bool = False
    cache_local: bool = False
    prefill: Prefill = "no"
    note_position: NotePosition = "result"


class InterventionSettings(msgspec.Struct, frozen=True):
    """``mode``: auto, or the one the profile or the configuration asks for; used where it is safe, else the next best.

    ``always_keep``: tool name globs that no trim removes. ``prune_threshold``: tools whose probability reaches it stay,
    however many; ``prune_keep_min``: at least so many stay.
    """

    mode: Literal["auto", "note", "none", "strip", "prefill", "prune"] = "auto"
    wording: str = DEFAULT_WORDING
    note_position: Literal["auto", "result", "user"] = "auto"
    always_keep: tuple[str, ...] = ()
    prune_threshold: float = 0.05
    prune_keep_min: int = 5


# Families that think whether or not the request says so; a prefill takes their thinking away or is refused (R13).
_THINKING_MODELS = re.compile(
    r"qwq|qwen-?3|deepseek-?r1|gpt-oss|\bo[134]\b|think|reason|magistral|glm-?4\.[5-9]|phi-?4-r", re.IGNORECASE
)


def plan(
    decision: Decision,
    chat: ChatView,
    capability: Capability,
    settings: InterventionSettings,
    session: SessionState = SessionState(),  # noqa: B008  # an immutable value
) -> Intervention | None:
    """The intervention for a decision other than ACT; None when there is none that is safe here (the request is
    relayed).

    An answer that must be JSON is withheld for without a sentence, which would break the schema (R15); so is an ANSWER
    to a turn without text, which has no place for one.
    """
    if decision.label == "ACT":
        return None
    looping = decision.reason == "loop_guard"
    ignored = session.notes_ignored or (looping and loop_guard.inspect(chat).repeats > loop_guard.REPEATS_MIN)
    mode = _mode(chat, capability, settings, session, ignored=ignored)
    if mode == "prefill":
        return Intervention(
            mode="prefill", prefix=PREFIXES[decision.label], continue_flags=capability.prefill == "continue_flags"
        )
    words = sentence(
        decision.label,
        settings.wording,
        later=chat.last_role == "tool",
        looping=looping,
    )
    targets = _note_targets(chat, capability, settings)
    if chat.structured_output:
        words, targets = "", ()
    elif not targets:
        words, mode = "", _mode_without_words(mode, decision.label, chat, capability, settings)
    if mode == "strip":
        return Intervention(mode="strip", strip=True, sentence=words, note_at=targets)
    if mode == "none":
        needed = capability.none_needs_note or decision.label != "ANSWER" or looping
        if needed:
            return Intervention(mode="none", forbid=True, sentence=words, note_at=targets)
        return Intervention(mode="none", forbid=True)
    return Intervention(mode="note", sentence=words, note_at=targets) if words else None


def plan_client_none(chat: ChatView, capability: Capability) -> Intervention | None:
    """Carry out the client's own ``tool_choice: "none"`` where the upstream would ignore it (R05); None elsewhere."""
    if chat.tool_choice != "none" or not capability.ignores_tool_choice or chat.n_other_tools:
        return None
    if chat.has_tool_history and not capability.accepts_strip_with_history:
        return None
    return Intervention(mode="strip", strip=True)


def plan_prune(
    chat: ChatView, probabilities: Mapping[str, float], settings: InterventionSettings
) -> Intervention | None:
    """Leave out tools that are not worth their prompt, for an ACT under ``mode = prune``; None when all stay.

    probabilities: of each offered tool, by name. Kept: every tool at the threshold or above it (C09), the best
    ``prune_keep_min`` (ties go by name, so that the order of the list does not matter, C08), those pinned by glob or
    named in the dialogue (D09), and those already called. A changed list costs a local cache its prefix: hence opt-in.
    """
    ranked = sorted(chat.tools, key=lambda tool: (-probabilities.get(tool.name, 0.0), tool.name))
    kept = {tool.name for tool in ranked[: settings.prune_keep_min]}
    kept |= {name for name, probability in probabilities.items() if probability >= settings.prune_threshold}
    kept |= {call.name for message in chat.messages for call in message.calls} | tool_named(chat)
    dropped = [tool for tool in chat.tools if tool.name not in kept and not pinned(tool.name, settings.always_keep)]
    if not dropped or (len(dropped) == len(chat.tools) and not chat.n_other_tools):
        return None
    return Intervention(mode="prune", drop_tools=frozenset(tool.key for tool in dropped))


def pinned(name: str, globs: Collection[str]) -> bool:
    """True when a tool's name matches one of the globs."""
    return any(fnmatch.fnmatchcase(name, glob) for glob in globs)


def without_prefill(capability: Capability) -> Capability:
    """The capability to remember after the upstream refused a trailing assistant turn (R13)."""
    return msgspec.structs.replace(capability, prefill="no")


def _mode(
    chat: ChatView, capability: Capability, settings: InterventionSettings, session: SessionState, *, ignored: bool
) -> InterventionMode:
    """The asked-for mode where it is safe, else the best one that is.

    ignored: a note did not help before, in this loop or with this agent; tools are then taken away, which costs a local
    server the prefill of the history, less than another round of the loop.
    """
    asked = settings.mode
    if asked == "prefill" and _may_prefill(chat, capability):
        return "prefill"
    if asked == "strip" and _may_strip(chat, capability, settings):
        return "strip"
    if asked == "none" and _may_forbid(chat, capability):
        return "none"
    if asked == "note" and not chat.structured_output:
        return "note"
    if capability.cache_local:
        first = all(message.role != "assistant" for message in chat.messages) or session.sent_stripped
        if (first or ignored or chat.structured_output) and _may_strip(chat, capability, settings):
            return "strip"
        return "note" if not chat.structured_output or not _may_forbid(chat, capability) else "none"
    return "none" if _may_forbid(chat, capability) else "note"


def _mode_without_words(
    mode: InterventionMode, label: Label, chat: ChatView, capability: Capability, settings: InterventionSettings
) -> InterventionMode:
    """The mode when no turn can take the sentence; ``note`` when none is left. ASK and DECLINE are nothing without."""
    if label != "ANSWER":
        return "note"
    if mode in ("strip", "none"):
        return mode
    if _may_strip(chat, capability, settings):
        return "strip"
    return "none" if _may_forbid(chat, capability) else "note"


def _may_strip(chat: ChatView, capability: Capability, settings: InterventionSettings) -> bool:
    """Tools may be removed: all are function tools (R07), none is pinned, and the history stands without them."""
    if chat.n_other_tools or any(pinned(tool.name, settings.always_keep) for tool in chat.tools):
        return False
    return not chat.has_tool_history or capability.accepts_strip_with_history


def _may_forbid(chat: ChatView, capability: Capability) -> bool:
    """``none`` works, and forbids nothing beside function tools."""
    return capability.honours_none and not capability.ignores_tool_choice and not chat.n_other_tools


def _may_prefill(chat: ChatView, capability: Capability) -> bool:
    thinks = chat.thinking or _THINKING_MODELS.search(chat.model) is not None
    return capability.prefill != "no" and not thinks and not chat.structured_output


def _note_targets(chat: ChatView, capability: Capability, settings: InterventionSettings) -> tuple[int, ...]:
    """Turns to append to, best first: the last user turn; on later steps the last result, when it stands at the end.

    A user turn that says nothing (content null or absent) cannot be told from the view to take a text, so it does not
    count.
    """
    last, user = len(chat.messages) - 1, chat.last_user_index
    if user >= 0 and not chat.messages[user].text and not chat.messages[user].n_media:
        user = -1
    if chat.last_role != "tool":
        return (user,) if user >= 0 else ()
    position = capability.note_position if settings.note_position == "auto" else settings.note_position
    if user < 0:
        return (last,)
    return (last, user) if position == "result" else (user, last)
