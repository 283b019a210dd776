"""What a tool does to the world, read from its name and the first words of its description.

English verbs only, as tool names are English nearly everywhere. An effect that cannot be told is ``unknown``, and the
guards then take no evidence from it.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal

from whetherman_edge.dialects.chat import Tool

Effect = Literal["read", "write", "execute", "question", "unknown"]

# Verbs of one group stand for each other: "remove the entry" asks for delete_entry.
WRITE_GROUPS: tuple[frozenset[str], ...] = tuple(
    frozenset(words.split())
    for words in (
        "create add make new insert register generate open file log record note save store write compose draft append",
        "delete remove drop erase clear purge discard trash destroy wipe unset",
        "cancel abort revoke terminate dismiss stop end close resolve unsubscribe",
        "send post publish email mail message text notify share forward reply announce tweet broadcast invite dm slack",
        "update edit change modify set rename patch replace adjust correct fix configure move reschedule shift upsert",
        "schedule book reserve order buy purchase checkout rent plan remind reschedule",
        "assign reassign transfer allocate delegate escalate",
        "enable activate switch turn start launch run play resume unlock unmute unpause",
        "disable deactivate switch turn stop halt pause mute lock shut kill quit",
        "deploy release rollback restart reboot scale merge push commit rebase install uninstall upgrade build migrate",
        "pay refund charge invoice reimburse withdraw deposit",
        "approve reject accept decline submit confirm apply sign",
        "upload import attach export backup restore archive sync copy duplicate print",
        "subscribe follow like bookmark star pin label tag",
        "call dial ring",
    )
)
_WRITE_VERBS = frozenset().union(*WRITE_GROUPS)

_READ_VERBS = frozenset(
    "get list search find read fetch lookup look query view show check browse describe retrieve count grep glob scan"
    " inspect peek track monitor compare calculate compute convert translate forecast estimate validate verify"
    " recall recommend suggest locate geocode summarize analyze ls cat head tail stat status info history diff"
    " returns gives tells what which".split()
)
# Words that are nouns in a tool's name as often as verbs ("order_status", "book_search"): they decide last.
_ALSO_NOUNS = frozenset(
    "order book note log file record text message mail email post call schedule plan track status info history label"
    " tag star pin print text draft share invoice charge report copy run build release play view check count like open"
    " new end light switch lock scale print follow sign ring slack head tail cat archive backup import export".split()
)
_VERBS: dict[str, Effect] = {**dict.fromkeys(_READ_VERBS, "read"), **dict.fromkeys(_WRITE_VERBS, "write")}
_PLAIN_VERBS = {verb: found for verb, found in _VERBS.items() if verb not in _ALSO_NOUNS}
_EXECUTE_NAMES = frozenset("bash shell terminal exec powershell zsh subprocess".split())
_EXECUTE_WHOLE = frozenset("sh cmd command console execute run run_command run_cmd execute_command run_shell".split())
_QUESTION_NAMES = frozenset(
    "ask_user ask_question ask_human ask_followup_question ask_clarification ask_for_clarification ask_user_question"
    " ask_clarifying_question clarify clarification request_clarification request_user_input request_input"
    " get_user_input user_input human_input ask_user_input prompt_user question_user ask_the_user ask_questions"
    " ask_follow_up followup_question elicit ask".split()
)
_QUESTION_ENDINGS = tuple("_" + name for name in sorted(_QUESTION_NAMES) if "_" in name)
_GENERIC = frozenset(
    "tool tools mcp api function data item items value values all by for from in of on the to with and a an user id my"
    " new info details detail status current".split()
)
_TOKEN = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_FIRST_WORD = re.compile(r"[^\W\d_]+")
_TOOLS_CACHED = 1024  # with all their text, so no more than the dialects keep parsed


def name_tokens(name: str) -> tuple[str, ...]:
    """Lower-case words of a tool name: ``mcp__git__listBranches`` -> ``mcp git list branches``."""
    return tuple([match.lower() for match in _TOKEN.findall(name)])


def singular(word: str) -> str:
    """A plural noun or third-person verb without its ending; good enough to compare two words."""
    if len(word) > 4 and word.endswith("ies"):
        return word[:-3] + "y"
    if len(word) > 4 and word.endswith(("ches", "shes", "xes", "sses", "zes")):
        return word[:-2]
    if len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is")):
        return word[:-1]
    return word


@lru_cache(maxsize=_TOOLS_CACHED)
def effect(tool: Tool) -> Effect:
    """What calling this tool does: reads, writes, runs any command, asks the user, or unknown."""
    tokens = name_tokens(tool.name)
    joined = "_".join(tokens)
    if joined in _QUESTION_NAMES or joined.endswith(_QUESTION_ENDINGS):
        return "question"
    if joined in _EXECUTE_WHOLE or not _EXECUTE_NAMES.isdisjoint(tokens):
        return "execute"
    for token in tokens:
        found = _PLAIN_VERBS.get(token)
        if found is not None:
            return found
    first = _FIRST_WORD.search(tool.description)
    if first is not None:
        word = first[0].lower()
        found = _VERBS.get(word) or _VERBS.get(singular(word))
        if found is not None:
            return found
    return _VERBS.get(tokens[0], "unknown") if tokens else "unknown"


@lru_cache(maxsize=_TOOLS_CACHED)
def verbs(tool: Tool) -> frozenset[str]:
    """The write verbs a tool answers to: those in its name or opening its description, with their group."""
    words = set(name_tokens(tool.name))
    first = _FIRST_WORD.search(tool.description)
    if first is not None:
        words.add(singular(first[0].lower()))
    found: set[str] = set()
    for group in WRITE_GROUPS:
        if group & words:
            found |= group
    return frozenset(found)


@lru_cache(maxsize=_TOOLS_CACHED)
def objects(tool: Tool) -> frozenset[str]:
    """What a tool is about: the words of its name that are no verbs, in the singular."""
    found = {singular(token) for token in name_tokens(tool.name) if token not in _GENERIC and len(token) > 2}
    plain = {token for token in found if token not in _PLAIN_VERBS}
    return frozenset(plain)


def is_write_verb(word: str) -> bool:
    """True for a verb (base form) that changes something."""
    return word in _WRITE_VERBS
