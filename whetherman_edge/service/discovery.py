"""Finds a local model server, and tells its kind from what it answers.

Only GET requests of a few bytes; a chat call is never sent, so no model is loaded or woken by it. ``discover`` looks at
the usual ports of Ollama, LM Studio and llama.cpp at the same time; ``kind_of`` looks at one given upstream. The kind
decides how an intervention is written (``proxy.capability``); a wrong guess costs an intervention, never an answer.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

DISCOVER_TIMEOUT_S = 0.3
"""A local server answers a GET in milliseconds; a closed port at once. A busy laptop gets some slack."""
KIND_TIMEOUT_S = 2.0
"""For an upstream the user named: it may be another machine."""
MODELS_MAX = 200
"""Of one server; what a hosted API lists beyond it nobody measured here."""
ANSWER_BYTES_MAX = 1 << 18
"""A model list beyond this (hosted APIs list hundreds) still tells its kind by its headers."""

# Hosted APIs: known by name, so that nothing is sent to them before a client sends something.
_HOSTED = {"api.anthropic.com": "anthropic", "api.openai.com": "openai"}
# What servers write as ``owned_by`` in /v1/models.
_OWNERS = {
    "library": "ollama",
    "organization_owner": "lmstudio",
    "organization-owner": "lmstudio",
    "llamacpp": "llamacpp",
    "vllm": "vllm",
}
_USUAL_PORTS = {11434: "ollama", 1234: "lmstudio", 8080: "llamacpp", 8000: "vllm"}


class Found(msgspec.Struct, frozen=True):
    """A model server that answered. ``url``: its base without a path; ``kind``: as in ``--upstream-kind``."""

    url: str
    kind: str
    name: str


class Served(msgspec.Struct, frozen=True):
    """A model that a server has: its name as in requests, its quantisation and its file, "" where it does not say."""

    name: str
    quantisation: str = ""
    file: str = ""


class Answer(msgspec.Struct, frozen=True):
    """What is looked at of a response: status, the Server header in lower case, and its JSON (None if it is none)."""

    status: int
    server: str
    json: Any = None


class Candidate(msgspec.Struct, frozen=True):
    """Where a kind of server usually listens, its name for people, and a path that only its kind answers this way."""

    kind: str
    name: str
    url: str
    path: str


def candidates(environ: Mapping[str, str] | None = None) -> tuple[Candidate, ...]:
    """The places to look at, best first. ``OLLAMA_HOST``, which moves Ollama, is honoured."""
    values = os.environ if environ is None else environ
    ollama = _ollama_url(values.get("OLLAMA_HOST", ""))
    return (
        Candidate("ollama", "Ollama", ollama, "/api/version"),
        Candidate("lmstudio", "LM Studio", "http://127.0.0.1:1234", "/v1/models"),
        Candidate("llamacpp", "llama.cpp", "http://127.0.0.1:8080", "/props"),
    )


async def discover(places: tuple[Candidate, ...] | None = None, timeout_s: float = DISCOVER_TIMEOUT_S) -> list[Found]:
    """Every place that answers as its kind, in the order of the places. Takes ``timeout_s`` at most; never raises."""
    places = candidates() if places is None else places
    async with _session() as session, asyncio.TaskGroup() as group:
        tasks = [group.create_task(_ask(session, place.url, place.path, timeout_s)) for place in places]
    return [
        Found(place.url, place.kind, place.name)
        for place, task in zip(places, tasks, strict=True)
        if _recognise(place.path, task.result()) == place.kind
    ]


async def kind_of(url: str, timeout_s: float = KIND_TIMEOUT_S) -> str:
    """The kind of a given upstream (``http(s)://…`` or ``unix:PATH``).

    Returns ollama, lmstudio, llamacpp, vllm, anthropic, openai (a model list in the OpenAI form, or a hosted name), or
    unknown. A server that is not up yet is guessed from its port. Never raises; takes ``timeout_s`` for each of at most
    four questions, and stops at the first that gets no answer.
    """
    host, port = _host_and_port(url)
    if host in _HOSTED:
        return _HOSTED[host]
    socket_path = url.removeprefix("unix:") if url.startswith("unix:") else ""
    base = "http://localhost" if socket_path else url.rstrip("/").removesuffix("/v1").rstrip("/")
    looks_openai = False
    async with _session(socket_path) as session:
        # The model list comes first: every kind has it, so that a server is spared an error line in its log.
        for path in ("/v1/models", "/api/version", "/version", "/props"):
            answer = await _ask(session, base, path, timeout_s)
            if answer is None:
                return "openai" if looks_openai else _USUAL_PORTS.get(port, "unknown")
            if (kind := _recognise(path, answer)) is not None:
                return kind
            looks_openai = looks_openai or (path == "/v1/models" and _is_model_list(answer))
    return "openai" if looks_openai else "unknown"


async def models_of(url: str, kind: str = "auto", timeout_s: float = KIND_TIMEOUT_S) -> list[Served]:
    """The models that a server has, as far as it tells. Never raises."""
    if kind == "auto":
        kind = await kind_of(url, timeout_s)
    socket_path = url.removeprefix("unix:") if url.startswith("unix:") else ""
    base = "http://localhost" if socket_path else url.rstrip("/").removesuffix("/v1").rstrip("/")
    async with _session(socket_path) as session:

        async def rows(path: str, key: str) -> list[dict[str, Any]]:
            answer = await _ask(session, base, path, timeout_s)
            found = answer.json.get(key) if answer is not None and isinstance(answer.json, dict) else None
            return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []

        told: list[tuple[Any, Any, str]]
        if kind == "ollama":
            listed = await rows("/api/tags", "models")
            details = [row["details"] if isinstance(row.get("details"), dict) else {} for row in listed]
            told = [(row.get("name"), d.get("quantization_level"), "") for row, d in zip(listed, details, strict=True)]
        elif kind == "lmstudio":
            told = [(row.get("id"), row.get("quantization"), "") for row in await rows("/api/v0/models", "data")]
        else:
            props = await _ask(session, base, "/props", timeout_s) if kind == "llamacpp" else None
            path = props.json.get("model_path", "") if props is not None and isinstance(props.json, dict) else ""
            told = [(row.get("id"), "", str(path)) for row in await rows("/v1/models", "data")]
    return [
        Served(name, level if isinstance(level, str) else "", file)
        for name, level, file in told[:MODELS_MAX]
        if isinstance(name, str)
    ]


def _recognise(path: str, answer: Answer | None) -> str | None:
    """The kind that an answer on ``path`` proves, or None."""
    if answer is None:
        return None
    if answer.server.startswith("llama.cpp"):  # on every response, also on 503 while it loads
        return "llamacpp"
    body = answer.json
    if not isinstance(body, dict):
        return None
    # LM Studio says 200 to any path, with this text.
    if str(body.get("error", "")).startswith("Unexpected endpoint or method"):
        return "lmstudio"
    if answer.status != 200:
        return None
    if path == "/v1/models" and _is_model_list(answer):
        return _kind_by_owner(body["data"])
    if path == "/api/version" and isinstance(body.get("version"), str):
        return "ollama"
    if path == "/version" and isinstance(body.get("version"), str):
        return "vllm"
    if path == "/props" and "default_generation_settings" in body:
        return "llamacpp"
    return None


def _is_model_list(answer: Answer) -> bool:
    body = answer.json
    return answer.status == 200 and isinstance(body, dict) and body.get("object") == "list" and "data" in body


def _kind_by_owner(models: object) -> str | None:
    """By the first model that has a known owner. ``models`` may be null: an Ollama without models."""
    for model in models if isinstance(models, list) else ():
        owner = model.get("owned_by") if isinstance(model, dict) else None
        if isinstance(owner, str) and owner in _OWNERS:
            return _OWNERS[owner]
    return None


async def _ask(session: aiohttp.ClientSession, base: str, path: str, timeout_s: float) -> Answer | None:
    """One GET. None when nobody answers in time or in HTTP."""
    try:
        async with asyncio.timeout(timeout_s), session.get(base + path, allow_redirects=False) as response:
            raw = await response.content.read(ANSWER_BYTES_MAX)
            while len(raw) < ANSWER_BYTES_MAX and (more := await response.content.read(ANSWER_BYTES_MAX - len(raw))):
                raw += more
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return None
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        body = None
    return Answer(response.status, response.headers.get("Server", "").lower(), body)


def _host_and_port(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        return parts.hostname or "", parts.port or 0
    except ValueError:
        return "", 0


def _session(socket_path: str = "") -> aiohttp.ClientSession:
    connector = aiohttp.UnixConnector(socket_path) if socket_path else aiohttp.TCPConnector()
    return aiohttp.ClientSession(connector=connector, trust_env=False, headers={"Accept": "application/json"})


def _ollama_url(host: str) -> str:
    """Ollama's own rules for ``OLLAMA_HOST``, as far as a client on this machine needs them.

    It may have a scheme, a host, a port or any of them alone; an address to listen on everywhere means loopback for us.
    """
    text = host.strip().strip("\"'")
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
    except ValueError:  # half an IPv6 address
        return "http://127.0.0.1:11434"
    try:
        port = parts.port
    except ValueError:
        port = None
    default_port = {"http": 11434, "https": 443}.get(parts.scheme, 11434)
    if "://" in text and parts.scheme == "http":
        default_port = 80
    name = parts.hostname or "127.0.0.1"
    if name in ("0.0.0.0", "::"):
        name = "127.0.0.1"
    scheme = parts.scheme if parts.scheme in ("http", "https") else "http"
    return f"{scheme}://{f'[{name}]' if ':' in name else name}:{port or default_port}"
