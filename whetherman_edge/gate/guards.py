"""Rules that no probability may override (DESIGN 3.5): each vetoes one decision; the request then goes out as it came.

A guard fires on clear evidence only, because a veto costs a needless call; a missed one costs what the threshold
already allows. The evidence is English: imperative write verbs in the user's last turn, and the words of tool names.
Requests in other languages are left to the model and its threshold.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from whetherman_edge.dialects.chat import ChatView, Message, Tool
from whetherman_edge.gate.tool_effect import effect, is_write_verb, name_tokens, objects, singular, verbs

TOOLSETS_CACHED_MAX = 64  # as many as the dialects keep
TURNS_CACHED_MAX = 128  # a user's turn is looked at again on each step that follows it
# The request stands at the front or the end of a turn; what lies between in a long one is pasted material.
_HEAD_CHARS = 600
_TAIL_CHARS = 300

_CLAUSE_END = re.compile(r"\.+(?=\s|$)|[!?;\n]+|,\s+(?=(?:and|then|but|please|also)\b)|\s+(?:and then|then)\s+")
_WORD = re.compile(r"[A-Za-z][A-Za-z'\u2019]*")
# What may stand before the verb of a request. "why do you …", "how would I …" do not match, so questions about an
# action are no action (D07); neither does a negation (D12).
_LEAD = re.compile(
    r"^\W*(?:(?:ok(?:ay)?|yes|yeah|yep|sure|right|great|good|perfect|thanks|thank you|hi|hey|hello|so|now|then|and|but"
    r"|also|next|finally|first|just|please|pls|kindly|go ahead and|let's|lets|let us|feel free to|be sure to"
    r"|make sure to|(?:can|could|will|would) you(?: please| kindly| just| also| now)*|i (?:want|need)(?: you)? to"
    r"|i'd like(?: you)? to|i would like(?: you)? to|you (?:can|should|must|need to|have to)|help me|try to"
    r"|in addition|instead|actually|alright|cool|fine|done|[a-z]+,)\W+)*",
    re.IGNORECASE,
)
# Longer turns than this say more than yes.
_APPROVAL_CHARS_MAX = 80
_APPROVAL = re.compile(
    r"^\W*(?:(?:ok(?:ay)?|yes|yeah|yep|sure|please|perfect|great|right|absolutely|(?:sounds|looks) good)\W+)*"
    r"(?:yes|yeah|yep|sure|ok(?:ay)?|go ahead|do it|do that|do so|please do|go for it|confirmed?|approved?|proceed"
    r"|that's right|correct|make it so)\b(?:\W+(?:please|thanks|thank you|and|now|go ahead|do it|do that))*\W*$",
    re.IGNORECASE,
)
_GENERIC_OFFER = re.compile(
    r"(?:help you|assist you|help with|anything else|else i can|can i do for you)[^?]*\?", re.IGNORECASE
)
# A result that says the step failed or found nothing: the action may be impossible, and saying so is an answer.
_FAILURE = re.compile(
    r"error|denied|fail|not found|unauthori|forbidden|\bno\b.{0,20}(?:match|found|result)|\[\]|null", re.IGNORECASE
)
_RESULT_CHARS = 400
_HOW_MANY = re.compile(r"\bhow (?:many|much)\b", re.IGNORECASE)
# One that stands by itself: not in a date, a time of day, or a name such as EU-6836.
_NUMBER = re.compile(r"(?<![\w.:/#-])\d+(?:[.,]\d+)*(?![\d:/]|-\w)")
_DEMAND = re.compile(r"(?:use|call|run|invoke|execute|trigger|try|fire)\b", re.IGNORECASE)
_NAME_LEADS = re.compile(r"[^\W_]")
# A tool name that is also an English word proves nothing when it stands in a sentence ("search", "weather", "Read").
_NAME_SHAPE = re.compile(r"[_\-.:/0-9]|[a-z][A-Z]")


def action_wanted(chat: ChatView) -> bool:
    """True when the user's last turn asks for a side effect that an offered tool has, and none was called since.

    Vetoes ANSWER. Evidence: a demand to use a tool by its exact name, an imperative write verb that stands in the
    tool's name, one of the tool's kind (``WRITE_GROUPS``) with a shared object word, or a short approval of an
    assistant turn that proposed such a thing.
    On later steps only the verb in the name counts, and only while the last result reports no failure: on the authored
    training dialogues the rest no longer tells a pending action from one that cannot be done.
    """
    index = chat.last_user_index
    if index < 0:
        return False
    text = _clipped(chat.messages[index].text)
    called = {call.name for message in chat.messages[index:] for call in message.calls}
    if any(tool.name not in called for tool in _demanded(chat, text)):
        return True
    writers = _writers(chat.tools)
    if not writers or any(tool.name in called for tool in writers):
        return False
    requests = list(_imperatives(text))
    if not requests and _approves(chat, index):
        requests = list(_proposed(_clipped(chat.messages[index - 1].text)))
    if chat.last_role == "tool":
        if _FAILURE.search(chat.messages[-1].text[:_RESULT_CHARS]):
            return False
        return any(verb in name_tokens(tool.name) for verb, _ in requests for tool in writers)
    return any(
        verb in name_tokens(tool.name) or _matches(tool, verb, words) for verb, words in requests for tool in writers
    )


def tool_named(chat: ChatView) -> frozenset[str]:
    """Offered tools whose exact name stands in the last user turn or, in a shape no word has, in a system text (D09).

    Vetoes DECLINE, and pins the tool. A name that could be a plain word counts only in backticks or quotes, or before a
    word like "tool" or "function".
    """
    found = set()
    index = chat.last_user_index
    user_text = chat.messages[index].text if index >= 0 else ""
    system_texts = [message.text for message in chat.messages if message.role == "system"]
    for tool in chat.tools:
        if _names(user_text, tool.name) or any(_names(text, tool.name) for text in system_texts):
            found.add(tool.name)
    return frozenset(found)


def number_missing(chat: ChatView) -> bool:
    """True when the user asks how many or how much, and no result since then holds a number. Vetoes ANSWER.

    What came back are names to look up further: the part's number, not yet its stock. Where the agent could count what
    was listed, the veto costs a request that goes out as it came.
    """
    index = chat.last_user_index
    if chat.last_role != "tool" or index < 0 or not _HOW_MANY.search(_clipped(chat.messages[index].text)):
        return False
    results = (message.text for message in chat.messages[index + 1 :] if message.role == "tool")
    return not any(_NUMBER.search(text) for text in results)


def asks_itself(chat: ChatView) -> bool:
    """True when the client offers its own question tool (ask_user, clarify, …). Vetoes ASK."""
    return any(effect(tool) == "question" for tool in chat.tools)


def just_asked(chat: ChatView) -> bool:
    """True when the last user turn answers a question of the assistant's. Vetoes ASK: never twice in a row.

    A generic offer ("How can I help you?") is no question in this sense.
    """
    index = chat.last_user_index
    for position in range(index - 1, -1, -1):
        message = chat.messages[position]
        if message.role == "assistant":
            return _is_question(message)
        if message.role == "user":
            return False
    return False


def lookup_first(chat: ChatView) -> bool:
    """True when a read-only tool that was not tried yet can resolve what the user refers to (D11). Vetoes ASK.

    Evidence: the user asks for a side effect on some object ("the old tunnel"), a write tool for it is offered, and so
    is a read-only tool about the same object that needs nothing but a search text.
    """
    index = chat.last_user_index
    if index < 0:
        return False
    writers = _writers(chat.tools)
    if not writers:
        return False
    called = {call.name for message in chat.messages[index:] for call in message.calls}
    for verb, words in _imperatives(_clipped(chat.messages[index].text)):
        for writer in writers:
            about = objects(writer) & words
            if not about or not _matches(writer, verb, words) or _creates(verb):
                continue
            for reader in chat.tools:
                if reader.name in called or effect(reader) != "read" or not (objects(reader) & about):
                    continue
                if _needs_only_text(reader):
                    return True
    return False


@lru_cache(maxsize=TOOLSETS_CACHED_MAX)
def _writers(tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
    """The tools of a list that change something."""
    return tuple([tool for tool in tools if effect(tool) == "write"])


def _demanded(chat: ChatView, text: str) -> list[Tool]:
    """Tools that the user tells the agent to use, by name: "call get_weather for Oslo"."""
    named = [tool for tool in chat.tools if tool.name in text]
    if not named:
        return []
    clauses = [clause[lead.end() :] for clause in _CLAUSE_END.split(text) if (lead := _LEAD.match(clause))]
    demands = [clause for clause in clauses if _DEMAND.match(clause)]
    return [tool for tool in named if any(_names(clause, tool.name) for clause in demands)]


def _approves(chat: ChatView, index: int) -> bool:
    """The user turn says yes and little else to an assistant turn."""
    text = chat.messages[index].text
    answers = index > 0 and chat.messages[index - 1].role == "assistant"
    return answers and len(text) <= _APPROVAL_CHARS_MAX and _APPROVAL.match(text) is not None


def _creates(verb: str) -> bool:
    return verb in _CREATING


_CREATING = frozenset(
    "create add make new insert register generate send post write compose draft book buy order record".split()
)
_TEXT_ARGUMENTS = frozenset("query q search text keyword keywords term name pattern filter limit page".split())


def _needs_only_text(tool: Tool) -> bool:
    return all(not p.required or p.name.lower() in _TEXT_ARGUMENTS for p in tool.parameters)


def _clipped(text: str) -> str:
    if len(text) <= _HEAD_CHARS + _TAIL_CHARS:
        return text
    return text[:_HEAD_CHARS] + "\n" + text[-_TAIL_CHARS:]


@lru_cache(maxsize=TURNS_CACHED_MAX)
def _imperatives(text: str) -> tuple[tuple[str, frozenset[str]], ...]:
    """Write verbs that open a clause, each with the clause's words in the singular.

    A clause of the kind "how do I delete …" or "don't delete …" opens with another word, so it yields nothing.
    """
    found: list[tuple[str, frozenset[str]]] = []
    for clause in _CLAUSE_END.split(text):
        lead = _LEAD.match(clause)
        rest = clause[lead.end() :] if lead else clause
        words = [word.lower() for word in _WORD.findall(rest)]
        if not words:
            continue
        verb = words[0]
        if is_write_verb(verb) and (len(words) > 1):
            found.append((verb, frozenset([singular(word) for word in words[1:]])))
    return tuple(found)


def _proposed(text: str) -> Iterator[tuple[str, frozenset[str]]]:
    """Write verbs of a proposal ("Shall I delete the branch?"), wherever they stand, each with all its words."""
    for clause in re.split(r"[.!?;\n]+", text):
        words = [word.lower() for word in _WORD.findall(clause)]
        bag = frozenset(singular(word) for word in words)
        for word in words:
            verb = next((form for form in _base_forms(word) if is_write_verb(form)), None)
            if verb is not None:
                yield verb, bag


def _base_forms(word: str) -> tuple[str, ...]:
    """What a word may be a form of: "deleting" of delete, "setting" of set."""
    if not word.endswith("ing") or len(word) < 6:
        return (word,)
    stem = word[:-3]
    return (stem, stem + "e", stem[:-1])


def _matches(tool: Tool, verb: str, words: frozenset[str]) -> bool:
    return verb in verbs(tool) and bool(objects(tool) & words)


def _names(text: str, name: str) -> bool:
    """True when ``text`` holds ``name`` as a whole and it cannot be just a word."""
    start = text.find(name)
    while start >= 0:
        end = start + len(name)
        before, after = text[start - 1 : start], text[end : end + 1]
        if (
            not _NAME_LEADS.match(before or " ")
            and before != "_"
            and not _NAME_LEADS.match(after or " ")
            and after != "_"
        ):
            if _NAME_SHAPE.search(name):
                return True
            if before in "`'\"" and before and after == before:
                return True
            if re.match(r"\s+(?:tool|function)\b|\(", text[end : end + 12]):
                return True
        start = text.find(name, end)
    return False


def _is_question(message: Message) -> bool:
    text = message.text.rstrip().rstrip("*_)\"'`")
    return not message.calls and text.endswith("?") and not _GENERIC_OFFER.search(text[-160:])
