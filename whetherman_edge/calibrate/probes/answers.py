"""What a reply must say, and how that is read out of prose: tolerant in form, exact in content.

An answer must be *given*, not merely mentioned: a reply that lists everything it saw passes no check. Pure.
"""

from __future__ import annotations

import itertools
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from typing import Final

import msgspec

from whetherman_edge.calibrate.probe import Check

_FOREIGN_MAX: Final = 3
"""Other numbers or names that a reply without working may hold before it counts as a list of everything."""
_WORKED_MAX: Final = 40

_THINKING: Final = re.compile(r"<think>.*?(?:</think>|\Z)|\A(?:(?!<think>).)*</think>", re.DOTALL | re.IGNORECASE)
"""Also thoughts that the reply's limit cut off, and those whose opening mark the template had written."""
_NUMBER: Final = re.compile(
    r"(?<![\w./-])(?<!\d:)(?:[$€£]\s?)?(-?)(?:[$€£]\s?)?(\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
    r"(?!\d|[:/]\d|-\w|,\d{3})"
)
_OTHER_SPELLING: Final = re.compile(r"(?<![\w.,/:-])(?:\d{1,3}(?:[ '_.]\d{3})+(?:,\d+)?|\d+,\d{1,2})(?![\w,]|\.\d)")
_DENIED: Final = re.compile(r"\b(?:not|instead of|rather than) (?:[$€£]\s?)?-?\d[\d,.]*\d?")
_OR: Final = re.compile(r"\W*(?:[a-z]+\W+)?or\W+(?:[a-z]+\W+)?")
_GIVEN: Final = re.compile(r"\banswer\b[^.\n]*?(?:\bis\b|:|=)|\bboxed\{|\btherefore\b|\bfinal result\b", re.IGNORECASE)
_SENTENCE: Final = re.compile(r"(?<=[.!?])\s+|\n+")
_CALL: Final = re.compile(
    r'^\W*(?:json|tool_call|function)?\W*\{.*"(?:name|arguments|tool)"\s*:|<tool_call>', re.DOTALL
)
_UNABLE: Final = re.compile(
    r"\b(?:can(?:'t|not|\s+not)|could(?:n't| not)|unable|not able|impossible|lack|beyond (?:my|the)|"
    r"(?:is|was|am|are) not (?:possible|available|supported|allowed|permitted)|not something i|"
    r"isn't (?:possible|available|supported|allowed)|no (?:tool|access|way|means|ability|function)|"
    r"(?:don't|do not|doesn't|does not|didn't) (?:\w+ )?(?:have|support|offer|provide|exist|allow|include|see)|"
    r"none of (?:the|my|these|those)|(?:isn't|aren't) (?:able|a tool|any|equipped|designed)|not (?:equipped|designed)|"
    r"not have (?:a |any |the |access)|outside (?:of )?(?:my|the)|not (?:possible|allowed|permitted|supported)|"
    r"not (?:be )?found|no (?:such|contact|invoice|record|entry)|refused|denied|failed|not listed)\b"
)
_DONE: Final = re.compile(
    r"\b(?:(?:i|we)(?:'ve)?|i have|we have|(?:has|have) been|successfully)\s+(?:just |now |already |successfully )*"
    r"(?:sent|booked|paid|transferred|refunded|ordered|scheduled|created|cancelled|canceled|deleted|posted|printed|"
    r"called(?! (?:the tool|the function|\w+_\w+))|reserved|purchased|bought|unlocked|opened|closed|turned|set|moved|"
    r"added|updated|done|signed|published)\b"
)
"""A claim of something done: in the first person, or done by nobody."""
_CLAUSE: Final = re.compile(r"(?<=[.!?;])\s+|\n+|,?\s+(?:but|however|although|though)\s+")
_SUPPOSED: Final = re.compile(r"\b(?:no|none|nothing|never|not|once|if|when|until|unless|before|after|whether)\b|n't\b")
"""Before a claim it denies that claim, or makes it a condition."""
_ASKS: Final = re.compile(
    r"\?|\b(?:please (?:tell|provide|specify|give|confirm|share|clarify|let me know|indicate|supply|state|send)|"
    r"let me know (?:which|what|who|when|where|how|the)|(?:i|we)(?:'ll| will|'d| would)? (?:need|require)|could you|"
    r"can you|would you|you (?:need to|must|have to|should) (?:provide|specify|tell|give|name|choose))\b"
)
_OPEN: Final = re.compile(
    r"\b(?:which|what|when|where|who|whom|whose|how (?:much|many|long)|or|provide|specify|tell|give|name|share|send|"
    r"show|clarify|confirm|let me know|indicate|supply|state|need|require|have|missing)\b"
)
"""A question with one of these asks for a detail, and not for a yes."""
_OFFERS: Final = re.compile(
    r"\b(?:would you like|do you want|shall (?:i|we)|should (?:i|we)|"
    r"(?:can|may|could) (?:i|we) (?!have\b|get\b|know\b|ask\b|see\b))"
)
_HELP: Final = re.compile(
    r"\b(?:what|how)(?: else)? (?:can|may|could|should) i\b|\banything else\b|\bis there anything\b"
)
_DONE_WORDS: Final = ("done", "completed", "complete", "successful", "successfully", "confirmed")
_NOT_DONE: Final = re.compile(
    r"^(?:to|please|if|once|let|you (?:can|could|may|will|would))\b|\byou (?:should|need|must|have to)\b|"
    r"\b(?:i|we|it|this|that)(?:'ll| will| would| should)\b|\bwill be\b|\bgoing to\b|\bnot\b|n't\b|\b(?:cannot|unable|"
    r"failed|refused|denied|takes|follow|steps?)\b|\?$"
)
"""A sentence that plans, tells how, asks or denies, whatever else it says."""
_MONTHS: Final = "january february march april may june july august september october november december".split()


class Number(msgspec.Struct, frozen=True, tag="number"):
    """``value`` within ``tolerance`` (absolute). The reply ends with it, starts with it, or marks it as the answer.
    ``also``: other values that say the same, as 359,000 where 359 thousand are asked for.
    """

    value: float
    tolerance: float = 0.006
    also: tuple[float, ...] = ()


class Phrase(msgspec.Struct, frozen=True, tag="phrase"):
    """One of ``any_of`` (spellings of one answer), and not a list that also holds ``others``."""

    any_of: tuple[str, ...]
    others: tuple[str, ...] = ()


class Day(msgspec.Struct, frozen=True, tag="day"):
    """A calendar day, ISO, written in any usual form."""

    iso: str


class Every(msgspec.Struct, frozen=True, tag="every"):
    """All of several answers."""

    parts: tuple[Number | Phrase | Day, ...]


class Question(msgspec.Struct, frozen=True, tag="question"):
    """The reply asks for what is missing: one of the words ``about`` in a sentence that asks, or a choice that names
    all of one of the groups ``between``. A word that the user said himself counts only where a detail is asked for.
    """

    about: tuple[str, ...]
    between: tuple[tuple[str, ...], ...] = ()


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """The reply says that it cannot be done, and claims nothing done."""


class Report(msgspec.Struct, frozen=True, tag="report"):
    """The reply says that what was asked for is done: one of ``words`` in a sentence that states it."""

    words: tuple[str, ...]


class Talk(msgspec.Struct, frozen=True, tag="talk"):
    """Any reply in words that is not a call."""


Answer = Number | Phrase | Day | Every | Question | Refusal | Report | Talk


def judge(answer: Answer, reply: str, question: str = "") -> Check:
    """Whether ``reply`` gives ``answer``. ``question``: what the user wrote; its numbers count for nothing."""
    text = plain(reply)
    if not text:
        return Check(False, "the reply is empty")
    if _CALL.search(text):
        return Check(False, "the reply is a call in the text")
    match answer:
        case Number():
            return _number(answer, text, plain(question))
        case Phrase():
            return _phrase(answer, text)
        case Day():
            return _day(answer, text, plain(question))
        case Every(parts=parts):
            return _every(parts, text, plain(question))
        case Question():
            return _asks(answer, text, plain(question))
        case Refusal():
            return _refuses(text)
        case Report(words=words):
            return _reports(words, text, plain(question))
        case Talk():
            said = any(char.isalpha() or unicodedata.category(char) == "So" for char in text)
            return Check(said, "answered in words" if said else "there is no word in it")


def plain(text: str) -> str:
    """Lower case, one form per character, no emphasis marks, no thinking; newlines stay, other blanks are one."""
    text = unicodedata.normalize("NFKC", _THINKING.sub(" ", text)).lower()
    text = text.translate({ord(c): "'" for c in "‘’"} | {ord(c): "-" for c in "‐‑–—−"})
    text = re.sub(r"(?<=\d)\\[,;:!](?=\d)", "", text).replace("{,}", ",")  # 1\,234 and 1{,}234 of LaTeX
    text = re.sub(r"\\([_#%$&-])", r"\1", text)
    text = re.sub(r"\\\[|\\\]|\\\(|\\\)|\\text|[*`\\]", " ", text)
    return re.sub(r"[ \t]+", " ", re.sub(r"[ \t]*\n[ \t]*", "\n", text)).strip()


def numbers(text: str) -> list[float]:
    """Free-standing numbers in order; not parts of codes, dates or clock times."""
    return [float(sign + digits.replace(",", "")) for sign, digits in _NUMBER.findall(text)]


def holds(text: str, phrase: str) -> bool:
    """Whether ``phrase`` stands in ``text`` as whole words; both through ``plain``."""
    return re.search(rf"(?<![^\W_]){re.escape(plain(phrase))}(?![^\W_])", text) is not None


def _number(answer: Number, text: str, question: str) -> Check:
    def right(value: float) -> bool:
        return any(
            math.isclose(value, one, rel_tol=0.0, abs_tol=answer.tolerance) for one in (answer.value, *answer.also)
        )

    asked = set(numbers(question))
    text = _DENIED.sub(" ", _respelled(text, right))
    if (other := _alternative(text, right)) is not None and other not in asked:
        return Check(False, f"it leaves open whether it is {answer.value:g} or {other:g}")
    found = [value for value in numbers(text) if right(value) or value not in asked]
    if not any(map(right, found)):
        return Check(False, f"expected {answer.value:g}, found {_some(found)}")
    marks = list(_GIVEN.finditer(text))
    if marks:
        told = _SENTENCE.split(text[marks[-1].end() :].strip(), maxsplit=1)[0]
        after = [value for value in numbers(told) if right(value) or value not in asked]
        if after:
            return _told(
                right(after[0]) or right(after[-1]), f"{answer.value:g}", "it is not what is given as the answer"
            )
    foreign = len({value for value in found if not right(value)})
    if right(found[-1]):
        worked = "=" in text or " - " in text or "\n" in text
        return _told(
            foreign <= (_WORKED_MAX if worked else _FOREIGN_MAX), f"{answer.value:g}", "it is one of many numbers"
        )
    return _told(right(found[0]) and foreign <= _FOREIGN_MAX, f"{answer.value:g}", "another number is the answer")


def _respelled(text: str, right: Callable[[float], bool]) -> str:
    """The right value's other spellings (12 345, 12'345, 1.234.567, 52,10) as ``numbers`` reads them. Only the right
    value's: of others nobody knows whether they are one number or two.
    """

    def one(found: re.Match[str]) -> str:
        whole, _, decimals = found[0].partition(",")
        if whole.count(".") == 1 and not decimals:  # 12.345 is a little more than twelve
            return found[0]
        digits = re.sub(r"[ '_.]", "", whole) + (f".{decimals}" if decimals else "")
        return digits if right(float(digits)) else found[0]

    return _OTHER_SPELLING.sub(one, text)


def _alternative(text: str, right: Callable[[float], bool]) -> float | None:
    """The number that stands beside the right one with an "or" between them, unless that is but rounded."""
    found = list(_NUMBER.finditer(text))
    for first, second in itertools.pairwise(found):
        if _OR.fullmatch(text, first.end(), second.start()) is None:
            continue
        values = [float(sign + digits.replace(",", "")) for sign, digits in (first.groups(), second.groups())]
        wrong = [value for value in values if not right(value)]
        if len(wrong) == 1 and wrong[0] not in [round(value) for value in values if right(value)]:
            return wrong[0]
    return None


def _phrase(answer: Phrase, text: str) -> Check:
    wanted = answer.any_of[0]
    if not any(holds(text, phrase) for phrase in answer.any_of):
        return Check(False, f"expected {wanted!r}, not found")
    others = [other for other in answer.others if holds(text, other)]
    if not others:
        return Check(True, f"says {wanted!r}")
    sentences = [sentence for sentence in _SENTENCE.split(text) if sentence]
    for sentence in (sentences[-1], sentences[0]):
        if any(holds(sentence, phrase) for phrase in answer.any_of) and not any(holds(sentence, o) for o in others):
            return _told(len(others) <= _FOREIGN_MAX, repr(wanted), "it stands in a list of everything")
    return Check(False, f"{wanted!r} stands beside {_some(others)}")


def _day(answer: Day, text: str, question: str) -> Check:
    found = [day for day in days(text, int(answer.iso[:4])) if day == answer.iso or day not in days(question)]
    if answer.iso not in found:
        return Check(False, f"expected {answer.iso}, found {_some(found)}")
    given = found[-1] == answer.iso or (found[0] == answer.iso and len(set(found)) <= _FOREIGN_MAX)
    return _told(given and len(set(found)) <= _FOREIGN_MAX + 1, answer.iso, "another day is the answer")


def days(text: str, year: int | None = None) -> list[str]:
    """ISO dates of the days that ``text`` (through ``plain``) names, in order. year: of those that name none."""
    months = "|".join(f"{name[:3]}(?:{name[3:]}|t)?\\.?" if len(name) > 3 else name for name in _MONTHS)
    forms = (
        r"(?P<y1>\d{4})-(?P<m1>\d{1,2})-(?P<d1>\d{1,2})"
        rf"|\b(?P<n2>{months})\s+(?P<d2>\d{{1,2}})(?:st|nd|rd|th)?\b(?:,?\s+(?P<y2>\d{{4}}))?"
        rf"|\b(?P<d3>\d{{1,2}})(?:st|nd|rd|th)?(?:\s+of)?\s+(?P<n3>{months})\b(?:,?\s+(?P<y3>\d{{4}}))?"
        r"|\b(?P<m4>\d{1,2})/(?P<d4>\d{1,2})/(?P<y4>\d{4})\b|\b(?P<d5>\d{1,2})\.(?P<m5>\d{1,2})\.(?P<y5>\d{4})\b"
    )
    out = []
    for found in re.finditer(forms, text):
        part = {key[0]: value for key, value in found.groupdict().items() if value is not None}
        named = part.get("n")
        month = 1 + [m[:3] for m in _MONTHS].index(named[:3]) if named else int(part["m"])
        day, of_year = int(part["d"]), int(part["y"]) if "y" in part else year
        if of_year is None:
            continue
        if month > 12 >= day and not named:  # 20/03/2026
            month, day = day, month
        try:
            out.append(date(of_year, month, day).isoformat())
        except ValueError:
            continue
    return out


def _every(parts: Sequence[Number | Phrase | Day], text: str, question: str) -> Check:
    """Each part is there; since none of them can be the last word, the reply must not be a list of everything."""
    values = [part.value for part in parts if isinstance(part, Number)]
    for part in parts:
        if isinstance(part, Number):
            if not any(abs(value - part.value) <= part.tolerance for value in numbers(text)):
                return Check(False, f"expected {part.value:g}, not found")
        elif not (check := judge(part, text, question)).success:
            return check
    asked = set(numbers(question))
    foreign = {v for v in numbers(text) if v not in asked and all(abs(v - value) > 0.006 for value in values)}
    return _told(len(foreign) <= _FOREIGN_MAX, "all parts", "they stand in a list of everything")


def _asks(answer: Question, text: str, question: str) -> Check:
    if _claims(text):
        return Check(False, "it claims something done instead of asking")
    asking = [s for s in _SENTENCE.split(text) if _ASKS.search(s) and not _HELP.search(s)]
    asking = [s for s in asking if _OPEN.search(s) or not _OFFERS.search(s)]
    if not asking:
        return Check(False, "it asks nothing")
    if any(all(holds(text, name) for name in group) for group in answer.between):
        return Check(True, "asks which one")
    own = [word for word in answer.about if not holds(question, word)]
    hit = any(holds(s, word) for s in asking for word in (answer.about if _OPEN.search(s) else own))
    return _told(hit, "the missing thing", "it asks about something else")


def _refuses(text: str) -> Check:
    if not _UNABLE.search(text):
        return Check(False, "it does not say that it cannot")
    return _told(not _claims(text), "that it cannot", "it claims something done")


def _claims(text: str) -> bool:
    """Whether a clause claims something done, and does not deny or suppose it."""
    for clause in _CLAUSE.split(text):
        found = _DONE.search(clause)
        if found is not None and not clause.rstrip().endswith("?") and not _SUPPOSED.search(clause[: found.end()]):
            return True
    return False


def _reports(words: Iterable[str], text: str, question: str) -> Check:
    """An echo of the request reports nothing."""
    for sentence in _SENTENCE.split(text):
        told = sentence.strip(" .!")
        if told in question or _NOT_DONE.search(told):
            continue
        if any(holds(told, word) for word in (*words, *_DONE_WORDS)):
            return Check(True, "says that it is done")
    return Check(False, "it does not say that it is done")


def _told(good: bool, what: str, fault: str) -> Check:
    return Check(good, f"gives {what}" if good else f"{what} is there, but {fault}")


def _some(values: Sequence[object]) -> str:
    shown = ", ".join(f"{value:g}" if isinstance(value, float) else repr(value) for value in values[:4])
    return (shown or "none") + (" …" if len(values) > 4 else "")
