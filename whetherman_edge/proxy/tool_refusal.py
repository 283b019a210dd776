"""What servers say when a model takes no tools (field case C11)."""

from __future__ import annotations

from whetherman_edge.dialects.system_one import Refusal
from whetherman_edge.proxy.inflate import inflate
from whetherman_edge.proxy.upstream import UpstreamResponse

# An error is a sentence; what is longer is not read to its end.
ERROR_BYTES_MAX = 64 << 10
# In the words of Ollama; of llama.cpp's server without --jinja; of OpenRouter; of Groq.
_NO_TOOLS = (
    b"does not support tools",
    b"tools param requires --jinja",
    b"no endpoints found that support tool use",
    b"`tool calling` is not supported with this model",
)


async def read_refusal(response: UpstreamResponse) -> tuple[bytes, bool]:
    """Read an error; returns what was read of it, and whether it says that the model takes no tools.

    Raises UpstreamReset when the error breaks off.
    """
    error, whole = await response.read(ERROR_BYTES_MAX)
    return error, whole and _refuses_tools(error, response.header(b"content-encoding") or b"")


def _refuses_tools(error: bytes, coding: bytes) -> bool:
    try:
        plain = inflate(error, coding.decode("latin-1"), ERROR_BYTES_MAX).lower()
    except Refusal:
        return False
    return any(words in plain for words in _NO_TOOLS)
