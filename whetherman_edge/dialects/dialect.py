"""What a dialect is: one value that says how its requests are read and edited and how its replies are read.

``registry`` has the values; nothing else in the program asks which dialect a request came in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from whetherman_edge.dialects.chat import ChatView, Intervention
from whetherman_edge.dialects.tool_cache import ToolCache


class Piece(msgspec.Struct, frozen=True, gc=False):
    """What one alternative says in one JSON value. ``n_calls``: calls that begin in it. Reasoning is only counted."""

    choice: int
    text: str = ""
    n_calls: int = 0
    n_reasoning_chars: int = 0


class ReplyReader(Protocol):
    """Reads the JSON values of one reply in order: one for a whole reply, one for each event or line of a stream."""

    @property
    def n_calls(self) -> int:
        """Calls seen so far."""

    def read(self, data: bytes, /) -> list[Piece] | None:
        """The pieces of one value, [] when it says nothing yet; None when it is no reply (an error, no JSON)."""


class StreamSplitter(Protocol):
    """Splits a stream into the bytes of its values; ``sse.EventReader`` and ``ndjson.LineReader``."""

    def feed(self, piece: bytes, /) -> list[bytes]:
        """Values that this piece completes, in order."""

    def close(self) -> list[bytes]:
        """A value that the end of the stream cut off."""


ErrorShape = Callable[[str, str, str, str], Any]
"""(message, kind, code, src) to the JSON value of an error of ours, as the dialect's clients read errors."""


class Dialect(msgspec.Struct, frozen=True):
    """One wire format.

    ``view``: a request body to a ChatView; raises ViewError. ``edit``: writes an Intervention into the bytes of the
    body that the view came from; raises ViewError when that is not certain. ``splitter`` and ``reader``: for a stream
    and for what is in it (``reader`` also reads whole replies). ``stream_type``: media type of a stream.
    ``call_marks``: bytes of which one stands in every value that holds a call. ``error``: shape of our errors.
    ``untouchable``: by the request's headers, whether it must go out as it came (a subscription's credentials).
    """

    name: str
    view: Callable[[bytes, ToolCache], ChatView]
    edit: Callable[[bytes, ChatView, Intervention], bytes]
    splitter: Callable[[], StreamSplitter]
    reader: Callable[[], ReplyReader]
    call_marks: tuple[bytes, ...]
    error: ErrorShape
    stream_type: bytes = b"text/event-stream"
    untouchable: Callable[[Mapping[str, str]], bool] | None = None
