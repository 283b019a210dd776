"""One frozen Config, where each of its values came from, and the messages for values that are wrong.

Precedence: flag, then environment (``WHETHERMAN_<KEY>``; an empty one counts as not set), then the TOML file, then the
default. The file is ``--config``'s argument, else ``WHETHERMAN_CONFIG``, else ``config.toml`` in the user's folder.
"""

from __future__ import annotations

import difflib
import fnmatch
import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
import platformdirs

from whetherman_edge.errors import ConfigError
from whetherman_edge.gate.verdict import Engine, Label, Mode
from whetherman_edge.profiles.payoff import ToolCost

UpstreamKind = Literal["auto", "openai", "ollama", "llamacpp", "vllm", "lmstudio", "anthropic", "unknown"]
InterventionMode = Literal["auto", "note", "none", "strip", "prefill", "prune"]
LogLevel = Literal["debug", "info", "warning", "error"]
LedgerMode = Literal["on", "text", "off"]
DeveloperRole = Literal["developer", "system"]

ENV_PREFIX = "WHETHERMAN_"
SECRET_KEYS = frozenset({"api_key", "upstream_api_key"})

# A gate deadline above this would be felt as lag by a person typing; DESIGN 3.7 fixes it as the hard cap.
GATE_DEADLINE_MS_MAX = 3_000
# Parsing more would hold the event loop; larger bodies are relayed ungated.
GATE_BODY_BYTES_MAX = 8 << 20

_Port = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
_DeadlineMs = Annotated[int, msgspec.Meta(ge=1, le=GATE_DEADLINE_MS_MAX)]
_Bytes = Annotated[int, msgspec.Meta(ge=1024, le=1 << 31)]
_Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=86_400.0)]
_Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every setting of the daemon. ``DOCS`` below says what each means; units are in the names.

    ``None`` for ``mode`` means: enforce under a calibrated profile or ``force``, else shadow. ``body_bytes_max`` is the
    hard cap of gated paths (providers accept 32 MB, so it must be above).
    """

    host: str = "127.0.0.1"
    port: _Port = 8088
    listen: str = ""
    upstream: str = ""
    upstream_kind: UpstreamKind = "auto"
    upstream_api_key: str = ""
    api_key: str = ""
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    profile: str = ""
    agents: dict[str, str] = {}
    mode: Mode | None = None
    engine: Engine = "auto"
    force: Label | None = None
    intervention: InterventionMode = "auto"
    loop_guard: bool = True
    always_keep: tuple[str, ...] = ()
    never_gate_models: tuple[str, ...] = ()
    gate_deadline_ms: _DeadlineMs = 250
    shadow_share: _Share = 0.05
    tools: dict[str, ToolCost] = {}
    body_bytes_max: _Bytes = 64 << 20
    idle_timeout_s: _Seconds = 0.0
    drain_timeout_s: _Seconds = 10.0
    decision_socket: str = ""
    prefer_upstream_systemone: bool = False
    strip_unsupported: bool = False
    map_developer: DeveloperRole = "developer"
    log_level: LogLevel = "info"
    ledger: LedgerMode = "on"

    @property
    def gate_body_bytes_max(self) -> int:
        """What the gate reads at most; larger bodies are relayed ungated."""
        return min(GATE_BODY_BYTES_MAX, self.body_bytes_max)

    def profile_for_model(self, model: str) -> str:
        """Profile name that ``[agents]`` gives a model: an exact name first, then the longest matching glob."""
        exact = self.agents.get(model)
        if exact is not None:
            return exact
        matches = [glob for glob in self.agents if fnmatch.fnmatchcase(model, glob)]
        return self.agents[max(matches, key=len)] if matches else ""


DOCS: dict[str, str] = {
    "host": "address to listen on; anything but loopback needs api_key",
    "port": "TCP port; 0 picks a free one",
    "listen": "unix:PATH to listen on a Unix socket (instead of TCP, unless port is set too)",
    "upstream": "model server: http(s)://HOST:PORT with or without /v1, unix:PATH, or embedded; empty finds one",
    "upstream_kind": "auto, openai, ollama, llamacpp, vllm, lmstudio, anthropic or unknown",
    "upstream_api_key": "bearer key sent to the upstream when the client sent none of its own",
    "api_key": "key that clients must send (Authorization: Bearer or x-api-key); never forwarded",
    "allowed_hosts": "further Host names accepted beside the loopback names and the bound host",
    "allowed_origins": "browser origins accepted beside the loopback ones; globs",
    "profile": "profile used when neither the request nor [agents] names one",
    "agents": "table: model name or glob = profile name",
    "mode": "off, shadow or enforce; unset: enforce where a calibrated profile allows it, else shadow",
    "engine": "static, gemma (the backbone judges every request), or auto (where the static stage is unsure)",
    "force": "ACT, ANSWER, ASK or DECLINE: fixes the verdict; for tests of the wiring only",
    "intervention": "auto (per upstream kind and profile), note, none, strip, prefill or prune",
    "loop_guard": "steer to a text answer when the same call came back with the same result twice",
    "always_keep": "tool name globs that no trim removes",
    "never_gate_models": "model name globs that are relayed ungated",
    "gate_deadline_ms": "the gate's time; past it the request goes out as it came",
    "shadow_share": "share of an agent's interventions that are left out in enforce, so that savings stay measured",
    "tools": "table: tool name or glob = usd and latency_ms of a call, side_effect = true for one never to be saved",
    "body_bytes_max": "larger bodies on gated paths are refused with 413",
    "idle_timeout_s": "longest silence accepted from the upstream; 0: any",
    "drain_timeout_s": "time that running requests get after SIGTERM (launchd: `service install` again after a change)",
    "decision_socket": "unix:PATH of the framed msgpack decision socket",
    "prefer_upstream_systemone": "relay /v1/systemone when the upstream serves it itself",
    "strip_unsupported": "ask once more without the tools when the model server says that its model takes none",
    "map_developer": "system: messages of the role developer go out as system, for templates without that role",
    "log_level": "debug, info, warning or error",
    "ledger": "record decisions on this machine: on (no text of a prompt), text (its first 300 characters too), or off",
}

# What a running daemon cannot change: sockets are bound, and engine and backbone are loaded, once.
FIXED = ("host", "port", "listen", "decision_socket", "engine")
# These hold too, unless both the old and the new upstream are addresses: what finds or runs a server does so at start.
_FIXED_WITHOUT_ADDRESS = ("upstream", "upstream_kind")

_FIELDS: dict[str, Any] = {field.name: field for field in msgspec.structs.fields(Config)}
_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_LISTS = frozenset({"allowed_hosts", "allowed_origins", "always_keep", "never_gate_models"})
_ELIDED_MAX = 60


class Loaded(msgspec.Struct, frozen=True):
    """A Config and, for each key, its origin: ``default``, ``file PATH``, ``env NAME`` or ``flag --NAME``."""

    config: Config
    origins: dict[str, str]

    @property
    def listens_tcp(self) -> bool:
        """False when only a Unix socket is served: ``listen`` is given, and neither host nor port was set by anyone."""
        return not self.config.listen or "port" in self.origins or "host" in self.origins

    def shown(self) -> dict[str, dict[str, Any]]:
        """Key to ``{"value", "origin"}`` in the order of Config; secrets masked."""
        values = msgspec.structs.asdict(self.config)
        return {
            key: {
                "value": "********" if key in SECRET_KEYS and value else value,
                "origin": self.origins.get(key, "default"),
            }
            for key, value in values.items()
        }


def merged(running: Config, read: Config) -> tuple[Config, tuple[str, ...], tuple[str, ...]]:
    """What a reload makes of a running daemon's settings and those just read.

    Returns the settings that hold from now on, the keys whose value changed, and those whose new value needs a restart.
    """
    found = running.upstream not in ("", "embedded") and read.upstream not in ("", "embedded")
    fixed = FIXED if found else FIXED + _FIXED_WITHOUT_ADDRESS
    differing = [key for key in _FIELDS if getattr(running, key) != getattr(read, key)]
    waiting = tuple(key for key in differing if key in fixed)
    changed = tuple(key for key in differing if key not in fixed)
    settings = msgspec.structs.replace(running, **{key: getattr(read, key) for key in changed})
    return settings, changed, waiting


def default_config_path() -> Path:
    """``config.toml`` in the platform's per-user configuration folder."""
    return Path(platformdirs.user_config_dir("whetherman")) / "config.toml"


def load_config(
    flags: Mapping[str, str] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    path: str | Path | None = None,
) -> Loaded:
    """Read and merge all sources.

    ``flags``: key to the text given on the command line. ``path``: the file named by ``--config``. Raises ConfigError
    naming the source, the key, what was expected and what came.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    file_path = _file_path(path, environ)
    if file_path is not None:
        for key, value in _read_file(file_path).items():
            values[key] = _checked(key, value, f"config file {file_path}")
            origins[key] = f"file {file_path}"
    for key in _FIELDS:
        name = ENV_PREFIX + key.upper()
        text = environ.get(name)
        if text:
            values[key] = _from_text(key, text, f"environment variable {name}")
            origins[key] = f"env {name}"
    for key, text in (flags or {}).items():
        flag = "--" + key.replace("_", "-")
        values[key] = _from_text(key, text, f"flag {flag}")
        origins[key] = f"flag {flag}"
    config = Config(**values)
    _check_together(config)
    return Loaded(config=config, origins=origins)


def _file_path(path: str | Path | None, environ: Mapping[str, str]) -> Path | None:
    named = path or environ.get(ENV_PREFIX + "CONFIG")
    if named:
        found = Path(named).expanduser()
        if not _is_file(found):
            raise ConfigError(f"config file {found}: expected a TOML file, found none there")
        return found
    found = default_config_path()
    return found if _is_file(found) else None


def _is_file(path: Path) -> bool:
    """Raises ConfigError where a folder on the way may not be looked into, or the path is none."""
    try:
        return path.is_file()
    except OSError as exc:
        raise ConfigError(f"config file {path}: cannot be looked for: {exc.strerror}") from exc


def _read_file(path: Path) -> dict[str, Any]:
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"config file {path}: expected TOML, got a syntax error: {exc}") from exc
    except OSError as exc:
        raise ConfigError(f"config file {path}: cannot be read: {exc.strerror}") from exc
    for key in raw:
        if key not in _FIELDS:
            close = difflib.get_close_matches(key, _FIELDS, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "known keys: " + ", ".join(_FIELDS)
            raise ConfigError(f"config file {path}: unknown key {key!r}; {hint}")
    return raw


def _from_text(key: str, text: str, source: str) -> Any:
    """Turn the text of a flag or environment variable into the key's type."""
    kind = _FIELDS[key].type
    if key in _LISTS:
        return _checked(key, [part.strip() for part in text.split(",") if part.strip()], source)
    if key == "agents":
        pairs = [part.partition("=") for part in text.split(",") if part.strip()]
        if any(not separator for _, separator, _ in pairs):
            raise ConfigError(f"{source}: expected GLOB=PROFILE[,GLOB=PROFILE…], got {_elided(text)}")
        return {glob.strip(): name.strip() for glob, _, name in pairs}
    if key == "tools":
        try:
            return _checked(key, json.loads(text), source)
        except (ValueError, RecursionError) as exc:
            raise ConfigError(f"{source}: expected a JSON object of tool name = costs, got {_elided(text)}") from exc
    if kind is bool:
        value = _BOOLEANS.get(text.strip().lower())
        if value is None:
            raise ConfigError(f"{source}: expected true or false, got {_elided(text)}")
        return value
    try:
        return _validated(kind, text, strict=False)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"{source}: expected {_expected(key)}, got {_elided(text)}") from exc


def _checked(key: str, value: Any, source: str) -> Any:
    try:
        return _validated(_FIELDS[key].type, value, strict=True)
    except msgspec.ValidationError as exc:
        shown = "a secret of another type" if key in SECRET_KEYS else _elided(value)
        raise ConfigError(f"{source}: key {key!r}: expected {_expected(key)}, got {shown}") from exc


def _validated(kind: Any, value: Any, *, strict: bool) -> Any:
    return msgspec.convert(value, kind, strict=strict)


def _expected(key: str) -> str:
    """What a key accepts, in words."""
    kind = _FIELDS[key].type
    options = [option for part in (kind, *get_args(kind)) for option in get_args(part) if isinstance(option, str)]
    if options:
        return "one of " + ", ".join(dict.fromkeys(options))
    if key in _LISTS:
        return "a list of strings"
    if key == "agents":
        return "a table of model glob = profile name"
    if key == "tools":
        return "a table of tool name = usd, latency_ms (numbers of at least 0) and side_effect (true or false)"
    meta = next((part for part in get_args(kind) if isinstance(part, msgspec.Meta)), None)
    plain = get_args(kind)[0] if meta is not None else kind
    words = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}[plain]
    return f"{words} in {meta.ge:,}..{meta.le:,}" if meta is not None else words


def _elided(value: Any) -> str:
    text = repr(value) if isinstance(value, str) else json.dumps(value, default=str)
    name = {str: "a string", bool: "a boolean", int: "an integer", float: "a number", list: "a list"}.get(type(value))
    text = text if len(text) <= _ELIDED_MAX else text[:_ELIDED_MAX] + "…"
    return f"{text} ({name})" if name else text


def _check_together(config: Config) -> None:
    for key in ("listen", "decision_socket"):
        value = getattr(config, key)
        if value and not (value.startswith("unix:") and len(value) > len("unix:")):
            raise ConfigError(f"{key}: expected unix:PATH, got {_elided(value)}")
    if config.upstream not in ("", "embedded") and not config.upstream.startswith(("http://", "https://", "unix:")):
        raise ConfigError(
            f"upstream: expected http://HOST:PORT, https://HOST, unix:PATH or embedded, got {_elided(config.upstream)}"
        )
