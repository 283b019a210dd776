"""Framing of the decision socket: 4-byte big-endian length, then that many bytes. Sans-I/O: bytes in, frames out."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from whetherman_edge.errors import WhethermanError

LENGTH = struct.Struct(">I")

FRAME_BYTES_MAX = 4 * 1024 * 1024
"""One frame. Chat bodies with long histories and large schemas stay under 1 MiB; a longer one is not ours to hold."""


class FrameError(WhethermanError):
    """The bytes are not frames of ours. The stream cannot be followed any further."""


class FrameParser:
    """Splits a byte stream into frames. Give it bytes as they arrive, in any portions.

    Holds at most one incomplete frame: never more than ``frame_bytes_max`` plus one portion.
    """

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._buffer = bytearray()
        self._frame_bytes_max = frame_bytes_max

    @property
    def is_between_frames(self) -> bool:
        """True when no part of a frame is waiting for its rest."""
        return not self._buffer

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[bytes]:
        """Yield each frame's payload that ``data`` completes, in order.

        Raises FrameError for a length of 0 or above the limit, after the frames before it were yielded. The iterator
        must be run to its end before the next call.
        """
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= LENGTH.size:
                (length,) = LENGTH.unpack_from(buffer, start)
                if not 0 < length <= self._frame_bytes_max:
                    raise FrameError(
                        f"expected a frame of 1 to {self._frame_bytes_max} bytes, got a length of {length}; "
                        "a frame is 4 bytes of big-endian length and that many bytes of msgpack"
                    )
                end = start + LENGTH.size + length
                if len(buffer) < end:
                    break
                payload = bytes(memoryview(buffer)[start + LENGTH.size : end])
                start = end
                yield payload
        finally:
            del buffer[:start]


def frame(payload: bytes) -> bytes:
    """A payload with its length in front. Raises FrameError when it is empty or its length does not fit."""
    if not 0 < len(payload) <= FRAME_BYTES_MAX:
        raise FrameError(f"expected a payload of 1 to {FRAME_BYTES_MAX} bytes, got {len(payload)}")
    return LENGTH.pack(len(payload)) + payload
