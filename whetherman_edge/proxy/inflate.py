"""Compressed bodies: ``Content-Encoding: zstd`` (what System One SDKs send), ``gzip`` and ``deflate``.

Output is bounded while it is produced, so a small body cannot become a large one. Pure.
"""

from __future__ import annotations

import importlib.util
import sys
import zlib
from collections.abc import Callable

from whetherman_edge.dialects.system_one import Refusal

ZSTD_WINDOW_BYTES_MAX = 8 * 1024 * 1024
"""RFC 8878 asks decoders to support at least 8 MB; a larger window only serves to take our memory."""

ZSTD_AVAILABLE = sys.version_info >= (3, 14) or importlib.util.find_spec("zstandard") is not None

_WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


def inflate(body: bytes, encoding: str, bytes_max: int) -> bytes:
    """Undo one content coding. ``encoding``: the header's value, "" or "identity" for none.

    Raises `Refusal`: 415 for a coding that is not served, 400 for a broken body, 413 when more than ``bytes_max`` bytes
    would come out.
    """
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return body
    decoder = _DECODERS.get(name)
    if decoder is None or (name == "zstd" and not ZSTD_AVAILABLE):
        accepted = ", ".join(sorted(name for name in _DECODERS if name != "zstd" or ZSTD_AVAILABLE))
        hint = "; install the zstd extra: pip install 'whetherman-edge[zstd]'" if name == "zstd" else ""
        raise Refusal(
            415,
            "unsupported_content_encoding",
            f"expected a body without Content-Encoding or with one of {accepted}, got {name[:40]!r}{hint}",
        )
    inflated, complete = decoder(body, bytes_max)
    if len(inflated) > bytes_max:
        raise Refusal(413, "request_too_large", f"expected a body of at most {bytes_max} bytes once it is unpacked")
    if not complete:
        raise Refusal(
            400, "invalid_content_encoding", f"expected a whole {name} body, got one that is cut off or broken"
        )
    return inflated


class StreamInflater:
    """Undoes one content coding of a body that comes in pieces, at most ``bytes_max`` bytes of it.

    ``readable``: False for a coding that is not read piece by piece, which is every one but gzip, deflate and none.
    """

    __slots__ = ("_left", "_zlib", "readable")

    def __init__(self, encoding: str, bytes_max: int) -> None:
        name = encoding.strip().lower()
        self._left = bytes_max
        self._zlib = zlib.decompressobj(_WINDOW_BITS[name]) if name in _WINDOW_BITS else None
        self.readable = self._zlib is not None or name in ("", "identity")

    def feed(self, piece: bytes) -> bytes | None:
        """What the next piece unpacks to; None when the body is broken or longer than the bound."""
        if self._zlib is None:
            plain = piece
        else:
            try:
                plain = self._zlib.decompress(piece, self._left + 1)
            except zlib.error:
                return None
        self._left -= len(plain)
        return plain if self._left >= 0 else None


def _gzip(body: bytes, bytes_max: int) -> tuple[bytes, bool]:
    return _zlib(body, bytes_max, _WINDOW_BITS["gzip"])


def _deflate(body: bytes, bytes_max: int) -> tuple[bytes, bool]:
    return _zlib(body, bytes_max, _WINDOW_BITS["deflate"])


def _zlib(body: bytes, bytes_max: int, wbits: int) -> tuple[bytes, bool]:
    """At most ``bytes_max + 1`` bytes, and whether the stream ended properly and nothing follows it."""
    inflater = zlib.decompressobj(wbits)
    try:
        inflated = inflater.decompress(body, bytes_max + 1)
    except zlib.error:
        return b"", False
    return inflated, inflater.eof and not inflater.unused_data


def _zstd(body: bytes, bytes_max: int) -> tuple[bytes, bool]:
    """As `_zlib`, for one or more zstd frames."""
    if sys.version_info >= (3, 14):
        return _zstd_standard_library(body, bytes_max)
    import zstandard

    unpacker = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES_MAX)
    try:
        with unpacker.stream_reader(body, read_across_frames=True) as reader:
            inflated = reader.read(bytes_max + 1)
            while len(inflated) <= bytes_max and (more := reader.read(bytes_max + 1 - len(inflated))):
                inflated += more
        if len(inflated) > bytes_max:
            return inflated, True
        # The reader does not tell a cut-off frame from a whole one; now that the size is known, a second pass does.
        rest = body
        while rest:
            frame = unpacker.decompressobj()
            frame.decompress(rest)
            if not frame.eof:
                return b"", False
            rest = frame.unused_data
    except zstandard.ZstdError:
        return b"", False
    return inflated, bool(body)


def _zstd_standard_library(body: bytes, bytes_max: int) -> tuple[bytes, bool]:
    """As `_zstd`, with the module that Python has from 3.14 on."""
    from compression import zstd

    options = {zstd.DecompressionParameter.window_log_max: ZSTD_WINDOW_BYTES_MAX.bit_length() - 1}
    inflated, rest = b"", body
    try:
        while rest:
            frame = zstd.ZstdDecompressor(options=options)
            inflated += frame.decompress(rest, bytes_max + 1 - len(inflated))
            if len(inflated) > bytes_max:
                return inflated, True
            if not frame.eof:
                return b"", False
            rest = frame.unused_data
    except zstd.ZstdError:
        return b"", False
    return inflated, bool(body)


_DECODERS: dict[str, Callable[[bytes, int], tuple[bytes, bool]]] = {
    "zstd": _zstd,
    "gzip": _gzip,
    "x-gzip": _gzip,
    "deflate": _deflate,
}
