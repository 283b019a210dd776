"""Edits on the original bytes of a chat body: what is not edited goes out as it came, spacing and escapes included.

A body that cannot be edited with certainty (repeated keys, invalid JSON, a byte order mark, a turn without text) raises
ViewError, and the proxy relays it: reject rather than guess.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

import msgspec

from whetherman_edge.dialects.json_spans import Member, Span, elements, members, whole
from whetherman_edge.errors import ViewError

_encode = msgspec.json.encode
_TEXT_PART_TYPES = (b'"text"', b'"input_text"')


class _Edit(NamedTuple):
    start: int
    end: int
    replacement: bytes


class Splicer:
    """Collects edits on one body and applies them at once.

    Every method reads the original body, so the order of calls does not matter; two edits of the same bytes are our bug
    (AssertionError).
    """

    def __init__(self, body: bytes) -> None:
        """Raises ViewError unless the body is one valid JSON object without repeated top-level keys."""
        self._body = body
        self._whole = whole(body)
        self._members: dict[str, Member] = members(body, self._whole)
        self._deleted: set[str] = set()
        self._added: list[bytes] = []
        self._edits: list[_Edit] = []

    def has(self, key: str) -> bool:
        """True when the body has that top-level key, be its value null."""
        return key in self._members

    def raw(self, key: str) -> bytes:
        """The bytes of a top-level value; b"" when the key is absent."""
        member = self._members.get(key)
        return self._body[member.value.start : member.value.end] if member else b""

    def span(self, key: str) -> Span:
        """Where a top-level value lies.  Raises ViewError when the key is absent."""
        member = self._members.get(key)
        if member is None:
            raise ViewError(f"expected {key!r} in the body; it is relayed as it came")
        return member.value

    def delete(self, *keys: str) -> None:
        """Delete top-level keys with their values and one comma each; absent ones are left alone."""
        self._deleted.update(key for key in keys if key in self._members)

    def put(self, key: str, value: bytes) -> None:
        """Set a top-level key to JSON bytes: its value is replaced in place, or the member is added as the last one."""
        member = self._members.get(key)
        if member is not None:
            self._edits.append(_Edit(member.value.start, member.value.end, value))
        else:
            self._added.append(_encode(key) + b":" + value)

    def append_text(self, message_index: int, sentence: str) -> None:
        """Append a sentence to the end of a message's text: in its content string, or in its last text part.

        A list of parts without any text gets one text part more.  Raises ViewError when the message or its content is
        of another shape, or null or absent.
        """
        content = self._message(message_index).get("content")
        if content is None:
            raise ViewError(f"expected text in messages[{message_index}].content; the body is relayed as it came")
        self.append_to(content.value, sentence)

    def append_to(self, span: Span, sentence: str, part_type: bytes = b"text") -> None:
        """Append a sentence to the text that lies at ``span``: a string, or a list of parts (see ``append_text``).

        part_type: of the text part that a list without one gets.  Raises ViewError for any other shape.
        """
        first = self._body[span.start : span.start + 1]
        if first == b'"':
            self._append_in_string(span, sentence)
        elif first == b"[":
            self._append_in_parts(span, sentence, part_type)
        else:
            raise ViewError("expected a text or a list of parts to append to; the body is relayed as it came")

    def append_message(self, message: bytes) -> None:
        """Add one message (JSON bytes) behind the last one.  Raises ViewError when there is none."""
        spans = self._array("messages")
        if not spans:
            raise ViewError("expected at least one message; the body is relayed as it came")
        self._edits.append(_Edit(spans[-1].end, spans[-1].end, b"," + message))

    def keep_elements(self, key: str, indices: Collection[int]) -> None:
        """Keep only these elements of a top-level array, as they are and in their order.

        indices: at least one of them must exist; an empty array is never written (R04).
        """
        spans = self._array(key)
        kept = [index in indices for index in range(len(spans))]
        if not any(kept):
            raise ViewError(f"expected to keep at least one element of {key!r}; the body is relayed as it came")
        self._edits.extend(_deletions(spans, kept))

    def result(self) -> bytes:
        """The edited body; the original object when nothing was asked for."""
        edits = list(self._edits)
        ordered = list(self._members.values())
        kept = [key not in self._deleted for key in self._members]
        edits.extend(_deletions([Span(m.start, m.value.end) for m in ordered], kept))
        if self._added:
            added = b",".join(self._added)
            survivors = [m for m, keep in zip(ordered, kept, strict=True) if keep]
            if survivors:
                end = survivors[-1].value.end
                edits.append(_Edit(end, end, b"," + added))
            else:
                first = self._whole.start + 1
                edits.append(_Edit(first, first, added))
        return _apply(self._body, edits) if edits else self._body

    def _array(self, key: str) -> list[Span]:
        return elements(self._body, self.span(key))

    def _message(self, index: int) -> dict[str, Member]:
        spans = self._array("messages")
        if not 0 <= index < len(spans):
            raise ViewError(f"expected messages[{index}], there are {len(spans)}; the body is relayed as it came")
        return members(self._body, spans[index])

    def _append_in_string(self, span: Span, sentence: str) -> None:
        empty = span.end - span.start == 2
        text = sentence if empty else "\n\n" + sentence
        quote = span.end - 1
        self._edits.append(_Edit(quote, quote, _encode(text)[1:-1]))

    def _append_in_parts(self, span: Span, sentence: str, part_type: bytes) -> None:
        parts = elements(self._body, span)
        for part in reversed(parts):
            text = self._text_of_part(part)
            if text is not None:
                self._append_in_string(text, sentence)
                return
        added = b'{"type":"' + part_type + b'","text":' + _encode(sentence) + b"}"
        if parts:
            self._edits.append(_Edit(parts[-1].end, parts[-1].end, b"," + added))
        else:
            self._edits.append(_Edit(span.start + 1, span.start + 1, added))

    def _text_of_part(self, part: Span) -> Span | None:
        if self._body[part.start : part.start + 1] != b"{":
            return None
        fields = members(self._body, part)
        kind, text = fields.get("type"), fields.get("text")
        if kind is None or text is None or self._body[text.value.start : text.value.start + 1] != b'"':
            return None
        return text.value if self._body[kind.value.start : kind.value.end] in _TEXT_PART_TYPES else None


def _deletions(spans: list[Span], kept: list[bool]) -> Iterable[_Edit]:
    """One edit for each run of members or elements that go, together with the commas that go with them.

    Behind a survivor the run goes from the survivor's end, so that what follows (spacing, comma or bracket) stays; a
    run at the front goes up to the first survivor.
    """
    index = 0
    while index < len(spans):
        if kept[index]:
            index += 1
            continue
        first = index
        while index < len(spans) and not kept[index]:
            index += 1
        if first > 0:
            yield _Edit(spans[first - 1].end, spans[index - 1].end, b"")
        elif index < len(spans):
            yield _Edit(spans[0].start, spans[index].start, b"")
        else:
            yield _Edit(spans[0].start, spans[-1].end, b"")


def _apply(body: bytes, edits: list[_Edit]) -> bytes:
    pieces = []
    position = 0
    for edit in sorted(edits):
        assert edit.start >= position, "two edits touch the same bytes"
        pieces.append(body[position : edit.start])
        pieces.append(edit.replacement)
        position = edit.end
    pieces.append(body[position:])
    return b"".join(pieces)
