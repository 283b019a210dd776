"""The role developer written as system, for templates that know no other (field case R12)."""

from __future__ import annotations

from whetherman_edge.dialects.json_spans import elements, members, refuse_crowded
from whetherman_edge.dialects.splice import Splicer

_ROLE = b'"developer"'
# Chat completions and Ollama, and Responses; in the latter a plain string is no list of turns.
_TURNS = ("messages", "input")


def developer_as_system(body: bytes) -> bytes:
    """The body with ``system`` in place of every turn's role ``developer``; every other byte stays.

    Raises ViewError for a body that cannot be edited with certainty.
    """
    if _ROLE not in body:
        return body
    refuse_crowded(body)
    splicer = Splicer(body)
    edited, position = [], 0
    turns = [span for key in _TURNS if splicer.raw(key).startswith(b"[") for span in elements(body, splicer.span(key))]
    for span in sorted(turns):
        if body[span.start : span.start + 1] != b"{":
            continue
        role = members(body, span).get("role")
        if role is not None and body[role.value.start : role.value.end] == _ROLE:
            edited += [body[position : role.value.start], b'"system"']
            position = role.value.end
    return b"".join([*edited, body[position:]]) if edited else body
