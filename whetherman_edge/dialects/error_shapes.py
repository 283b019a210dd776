"""How the clients of each dialect read an error. ``src`` in it says that it is ours, not the upstream's."""

from __future__ import annotations

from typing import Any


def openai_error(message: str, kind: str, code: str, src: str) -> dict[str, Any]:
    """``{"error": {"message", "type", "param", "code"}}``."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code, "src": src}}


def ollama_error(message: str, _kind: str, code: str, src: str) -> dict[str, Any]:
    """``{"error": "…"}``: a plain text, which is what Ollama's clients show."""
    return {"error": message, "code": code, "src": src}


# Anthropic's types are a closed set; what is not among them is an api_error.
_ANTHROPIC_KINDS = {
    "invalid_request_error": "invalid_request_error",
    "authentication_error": "authentication_error",
    "permission_error": "permission_error",
}


def anthropic_error(message: str, kind: str, code: str, src: str) -> dict[str, Any]:
    """``{"type": "error", "error": {"type", "message"}}``."""
    kind = "request_too_large" if code == "request_too_large" else _ANTHROPIC_KINDS.get(kind, "api_error")
    return {"type": "error", "error": {"type": kind, "message": message, "code": code, "src": src}}


def detail_error(message: str, kind: str, _code: str, _src: str) -> dict[str, Any]:
    """``{"detail": {"error_type", "message"}}``: what System One clients read."""
    return {"detail": {"error_type": kind, "message": message}}
