"""Where the members of an object and the elements of an array lie in a JSON text: byte spans, nothing decoded.

msgspec does the scanning: it splits a container into raw values at C speed (checking their syntax on the way), and as
every raw value is a verbatim slice of the text, its length is all we need to walk from one to the next. A repeated key
shows itself on that walk, because the decoder kept the last value only: such an object is refused, never guessed at.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from whetherman_edge.errors import OverLimit, ViewError

# Top-level keys of a chat body: the APIs have about 40.
MEMBERS_MAX = 1_024
# Values in all of a body: each costs up to half a microsecond and holds the loop. 1,024 tools of ten arguments and
# 4,096 turns stay below it; a body of 8 MiB that is all "{}," would have two million.
VALUES_MAX = 131_072

_WS = rb"[ \t\n\r]*+"
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_key = re.compile(_WS + rb"(" + _STRING + rb")" + _WS + rb":" + _WS, re.DOTALL)
_gap = re.compile(_WS + rb"([,\]}])")
_space = re.compile(_WS)
_string = re.compile(_STRING, re.DOTALL)
_BEFORE_VALUES = b",[{"
# A body spelled with spaces shows one within its first key.
_FIRST_KEY_BYTES = 64
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_elements = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_str = msgspec.json.Decoder(str).decode


class Span(NamedTuple):
    """Half-open range of byte offsets into the body."""

    start: int
    end: int


class Member(NamedTuple):
    """One member of an object: where its key's quote starts, and where its value lies."""

    start: int
    value: Span


def refuse_crowded(body: bytes) -> None:
    """Raises OverLimit for a body that may hold more than VALUES_MAX values, before anything of it is decoded.

    A short body cannot. Commas and opening brackets stand before every value but the first, and in texts: those are
    left out where there are not too many of them either.
    """
    if len(body) <= 2 * VALUES_MAX or _separators(body) <= VALUES_MAX:
        return
    if body.count(b'"') <= 4 * VALUES_MAX and _separators(_string.sub(b"", body)) <= VALUES_MAX:
        return
    raise OverLimit(f"expected at most {VALUES_MAX:,} JSON values; the body is relayed as it came")


def _separators(text: bytes) -> int:
    return len(text) - len(text.translate(None, _BEFORE_VALUES))


def whole(body: bytes) -> Span:
    """The span of the one JSON value a body holds, without white space around it.

    Raises ViewError for a byte order mark and for bytes that are not UTF-8; the syntax is checked by ``members``.
    """
    if body.startswith(b"\xef\xbb\xbf"):
        raise ViewError("expected JSON, got a byte order mark first; the body is relayed as it came")
    if not body.isascii():
        try:
            body.decode()
        except UnicodeDecodeError as exc:
            raise ViewError(
                f"expected UTF-8: {exc.reason} at byte {exc.start}; the body is relayed as it came"
            ) from exc
    return Span(_skip_space(body, 0), len(body.rstrip(b" \t\n\r")))


def members(body: bytes, span: Span) -> dict[str, Member]:
    """The members of the object at ``span``, by decoded key, in their order.

    Raises ViewError when no valid object lies there, or when a key comes twice: we would not know which one counts.
    """
    return walk_members(body, span, split_members(memoryview(body)[span.start : span.end]))


def split_members(text: bytes | memoryview) -> dict[str, msgspec.Raw]:
    """Raw values of an object by decoded key; of a repeated key the last.  Raises ViewError when it is no object."""
    try:
        return _decode_members(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ViewError(f"expected a JSON object: {exc}; the body is relayed as it came") from exc


def walk_members(body: bytes, span: Span, raw_values: dict[str, msgspec.Raw]) -> dict[str, Member]:
    """Spans of what ``split_members`` found in the object at ``span``.  Raises ViewError on repeated keys."""
    found: dict[str, Member] = {}
    position = span.start + 1
    for _ in raw_values:
        key = _key.match(body, position)
        assert key is not None, "the decoder saw one more member than there is"
        name = _decode_key(key[1])
        value = bytes(raw_values[name])
        if name in found or not body.startswith(value, key.end()):
            raise ViewError(f"expected each key once, {name[:40]!r} comes twice; the body is relayed as it came")
        end = key.end() + len(value)
        gap = _gap.match(body, end)
        if gap is None:  # two values of one key, the last a prefix of the first: 1 and 12
            raise ViewError(f"expected each key once, {name[:40]!r} comes twice; the body is relayed as it came")
        found[name] = Member(key.start(1), Span(key.end(), end))
        position = gap.end()
    if position != span.end and raw_values:
        raise ViewError("expected each key once, one comes twice; the body is relayed as it came")
    return found


def refuse_repeated_keys(body: bytes, raw_values: dict[str, msgspec.Raw]) -> None:
    """Raises ViewError when a key comes twice in the object that is the whole body, OverLimit for too many keys.

    The two usual spellings, no white space or one space behind each colon and comma, are settled by counting: the
    members and their punctuation fill the body exactly. Anything else is walked.
    """
    n_members = len(raw_values)
    if n_members > MEMBERS_MAX:
        raise OverLimit(f"expected at most {MEMBERS_MAX:,} keys, got {n_members:,}; the body is relayed as it came")
    n_bytes = 1 + 4 * n_members  # braces, and for each member two quotes, a colon and a comma, the last one's not
    for key, raw in raw_values.items():
        n_bytes += len(key) + memoryview(raw).nbytes
    if n_bytes == len(body):
        return
    if n_bytes + 2 * n_members - 1 == len(body) and body.count(b'": ', 0, _FIRST_KEY_BYTES) > 0:
        return
    walk_members(body, whole(body), raw_values)


def elements(body: bytes, span: Span) -> list[Span]:
    """The elements of the array at ``span``.  Raises ViewError when no valid array lies there."""
    try:
        raw_values = _decode_elements(memoryview(body)[span.start : span.end])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ViewError(f"expected a JSON array: {exc}; the body is relayed as it came") from exc
    found: list[Span] = []
    position = span.start + 1
    for raw in raw_values:
        start = _skip_space(body, position)
        end = start + memoryview(raw).nbytes
        found.append(Span(start, end))
        gap = _gap.match(body, end)
        assert gap is not None, "the decoder saw an element where none ends"
        position = gap.end()
    return found


def _skip_space(body: bytes, position: int) -> int:
    match = _space.match(body, position)
    assert match is not None
    return match.end()


def _decode_key(quoted: bytes) -> str:
    if b"\\" in quoted:
        return _decode_str(quoted)
    return quoted[1:-1].decode()
