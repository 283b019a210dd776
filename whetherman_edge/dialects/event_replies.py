"""What replies of Responses and Messages say, whole or event by event; a view, the bytes go on as they are.

Both write typed events, so one value says either something, or nothing yet, or that the reply is an error.
"""

from __future__ import annotations

from typing import Any

import msgspec

from whetherman_edge.dialects.dialect import Piece
from whetherman_edge.dialects.openai_responses import CLIENT_CALLS

_decode = msgspec.json.Decoder(dict[str, Any]).decode


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        return _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _string(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _objects(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


class ResponsesReader:
    """``/v1/responses``: a response object, or ``response.*`` events."""

    __slots__ = ("_keys",)

    def __init__(self) -> None:
        self._keys: set[object] = set()

    @property
    def n_calls(self) -> int:
        """Calls seen so far; those that the server made itself do not count."""
        return len(self._keys)

    def read(self, data: bytes) -> list[Piece] | None:
        """See ``dialect.ReplyReader``."""
        value = _object(data)
        if value is None:
            return None
        if value.get("object") == "response":
            return self._whole(value)
        kind = _string(value.get("type"))
        if kind in ("error", "response.failed") or not kind.startswith("response."):
            return None
        if kind in ("response.output_text.delta", "response.refusal.delta"):
            return [Piece(0, text=_string(value.get("delta")))]
        if kind.startswith("response.reasoning") and kind.endswith(".delta"):
            return [Piece(0, n_reasoning_chars=len(_string(value.get("delta"))))]
        if kind in ("response.output_item.added", "response.output_item.done"):
            item = value.get("item")
            n_calls = self._count(item, value.get("output_index")) if isinstance(item, dict) else 0
            return [Piece(0, n_calls=n_calls)] if n_calls else []
        return []

    def _whole(self, value: dict[str, Any]) -> list[Piece] | None:
        if value.get("error") is not None:
            return None
        texts: list[str] = []
        n_calls = n_reasoning = 0
        for index, item in enumerate(_objects(value.get("output"))):
            n_calls += self._count(item, index)
            parts = _objects(item.get("content"))
            if item.get("type") == "message":
                texts += [_string(part.get("text") or part.get("refusal")) for part in parts]
            elif item.get("type") == "reasoning":
                parts += _objects(item.get("summary"))
                n_reasoning += sum(len(_string(part.get("text"))) for part in parts)
        return [Piece(0, "\n".join(texts), n_calls, n_reasoning)]

    def _count(self, item: dict[str, Any], index: Any) -> int:
        """1 for a call that was not seen before."""
        if _string(item.get("type")) not in CLIENT_CALLS:
            return 0
        before = len(self._keys)
        self._keys.add(index if isinstance(index, int) else _string(item.get("call_id")))
        return len(self._keys) - before


class MessagesReader:
    """``/v1/messages``: a message, or ``message_*`` and ``content_block_*`` events."""

    __slots__ = ("_n_calls",)

    def __init__(self) -> None:
        self._n_calls = 0

    @property
    def n_calls(self) -> int:
        """Calls seen so far; ``server_tool_use`` does not count."""
        return self._n_calls

    def read(self, data: bytes) -> list[Piece] | None:
        """See ``dialect.ReplyReader``."""
        value = _object(data)
        kind = value.get("type") if value is not None else None
        if value is None or kind == "error" or not isinstance(kind, str):
            return None
        if kind == "message":
            return self._piece(_objects(value.get("content")))
        if kind == "content_block_start":
            return self._piece(_objects([value.get("content_block")]))
        if kind == "content_block_delta":
            return self._piece(_objects([value.get("delta")]))
        return [] if kind in _SILENT else None

    def _piece(self, blocks: list[dict[str, Any]]) -> list[Piece]:
        texts: list[str] = []
        n_calls = n_reasoning = 0
        for block in blocks:
            kind = block.get("type")
            if kind == "tool_use":
                n_calls += 1
            elif kind in ("text", "text_delta"):
                texts.append(_string(block.get("text")))
            elif kind in ("thinking", "thinking_delta"):
                n_reasoning += len(_string(block.get("thinking")))
        self._n_calls += n_calls
        piece = Piece(0, "\n".join(texts), n_calls, n_reasoning)
        return [piece] if piece.text or n_calls or n_reasoning else []


_SILENT = frozenset({"message_start", "content_block_stop", "message_delta", "message_stop", "ping"})
