"""What each kind of upstream can do: the one table that says how tools are withheld from it (field case R17).

Sources are the field cases of ``docs`` named beside each entry; a kind that is not known gets the note, which no server
can refuse. What an upstream shows in operation (a refused prefill) is kept per model by the exchange.
"""

from __future__ import annotations

import msgspec

from whetherman_edge.gate.intervention import Capability

CAPABILITIES: dict[str, Capability] = {
    # The API itself: "none" is honoured, and refuses parallel_tool_calls beside it (R03).
    "openai": Capability("openai", honours_none=True, none_needs_note=False),
    # "none" is accepted and ignored on every endpoint (R05). Templates render earlier calls without a tools list too.
    "ollama": Capability("ollama", ignores_tool_choice=True, accepts_strip_with_history=True, cache_local=True),
    # "none" leaves the tools in the prompt and only turns the parsing of calls off: with a sentence it is a note whose
    # calls come back as text. So: strip at first, then the note. Calls and results without a tools list are accepted.
    "llamacpp": Capability(
        "llamacpp", honours_none=True, accepts_strip_with_history=True, cache_local=True, prefill="trailing"
    ),
    "lmstudio": Capability("lmstudio", accepts_strip_with_history=True, cache_local=True),
    # The tools stay in the prompt unless --exclude-tools-when-tool-choice-none is set (R06): say it in words too.
    "vllm": Capability("vllm", honours_none=True, prefill="continue_flags"),
    # Withholding by "none" alone: removed definitions are refused beside earlier tool turns (R17).
    "anthropic": Capability("anthropic", honours_none=True, none_needs_note=False),
    "unknown": Capability("unknown"),
}


# What a dialect cannot say, whatever the server behind it could do.
_IN_DIALECT: dict[str, dict[str, Capability]] = {
    # No tool choice, and who speaks it is Ollama or does as Ollama does.
    "ollama": dict.fromkeys(CAPABILITIES, CAPABILITIES["ollama"]),
    # No trailing assistant item is continued.
    "openai_responses": {kind: msgspec.structs.replace(c, prefill="no") for kind, c in CAPABILITIES.items()},
    # Anthropic's current models refuse a trailing assistant turn; vLLM's flags are not part of the format.
    "anthropic": {kind: msgspec.structs.replace(c, prefill="no") for kind, c in CAPABILITIES.items()},
}


def capability_of(kind: str, dialect: str = "openai_chat") -> Capability:
    """The capability of an upstream kind in a dialect; the cautious one for a kind that is not in the table."""
    table = _IN_DIALECT.get(dialect, CAPABILITIES)
    return table.get(kind, table["unknown"])
