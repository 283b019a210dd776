"""``doctor``'s checks of what lies around the gate: files and their rights, the service unit, the upstream, the clock.

Each returns a state and one line; a line that is not "ok" says what to do.
"""

from __future__ import annotations

import asyncio
import difflib
import errno
import os
import socket
import sqlite3
import stat
import sys
import time
from collections.abc import Iterable
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Literal

import aiohttp

from whetherman_edge.backbone.store import models_dir
from whetherman_edge.config import DOCS, ENV_PREFIX, SECRET_KEYS, Loaded, default_config_path
from whetherman_edge.ledger import queries, records
from whetherman_edge.profiles.schema import measured_on, quantisation_in
from whetherman_edge.service import discovery, units

State = Literal["ok", "note", "fail"]
Result = tuple[State, str]

PROBE_TIMEOUT_S = 2.0
# Not before this version was written; a laptop whose battery was empty wakes in 1970 or 2000.
EARLIEST_S = 1_735_689_600.0
SKEW_S_MAX = 300.0
BYTES_PER_TOKEN = 4
# Room that the model needs for its answer, beside the prompt.
ANSWER_TOKENS = 512
# Ollama's default until a request or OLLAMA_CONTEXT_LENGTH says otherwise.
OLLAMA_CONTEXT = 4_096
# Variables that are no settings: where files are, and what tests and builds need.
_OTHER_VARIABLES = tuple("BACKBONE CACHE CONFIG EMBEDDED_MODEL KERNELS MODELS ROUTER REQUIRE_NATIVE".split())
_UNIT_FOLDERS = ("/etc/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system")


def environment() -> Result:
    """Variables with our prefix that nobody reads are typing errors."""
    known = {*(key.upper() for key in DOCS), *_OTHER_VARIABLES}
    names = [name.removeprefix(ENV_PREFIX) for name in os.environ if name.startswith(ENV_PREFIX)]
    strange = sorted(name for name in names if name not in known and not name.startswith("TEST_"))
    if strange:
        near = difflib.get_close_matches(strange[0], known, 1)
        hint = f"; did you mean {ENV_PREFIX}{near[0]}?" if near else "; `config show` lists the settings"
        return "fail", f"{ENV_PREFIX}{strange[0]} is no setting{hint}"
    return "ok", f"{len(names)} {ENV_PREFIX}* variables"


def permissions(loaded: Loaded) -> Result:
    """Keys must not lie open, and the folders that are written to must be ours to write."""
    files = {origin.removeprefix("file ") for origin in loaded.origins.values() if origin.startswith("file ")}
    keys = [key for key in sorted(SECRET_KEYS) if loaded.origins.get(key, "").startswith("file ")]
    for name in files:
        mode = os.stat(name).st_mode
        if mode & 0o022:
            return "fail", f"{name} can be changed by other users; chmod go-w {name}"
        if keys and mode & 0o044:
            return "fail", f"{name} holds {keys[0]} and can be read by other users; chmod 600 {name}"
    for what, folder in (("state", records.default_path().parent), ("models", models_dir())):
        blocked = _not_writable(folder)
        if blocked:
            return "fail", f"the {what} folder {folder} cannot be written: {blocked}"
    try:
        records.check_private(records.default_path())
    except records.Unsafe as exc:
        return "fail", str(exc)
    return "ok", f"state in {records.default_path().parent}, models in {models_dir()}"


def _not_writable(folder: Path) -> str:
    """Why a folder, or the nearest one above it that exists, cannot be written; "" when it can."""
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    if os.access(there, os.W_OK | os.X_OK):
        return ""
    try:
        read_only = bool(os.statvfs(there).f_flag & os.ST_RDONLY)
    except OSError as exc:
        return exc.strerror or type(exc).__name__
    if read_only:
        return f"{there} is read-only; under systemd that is ProtectSystem= or ProtectHome=, not the file's rights"
    return f"{there} belongs to somebody else; chown it to user {os.geteuid()}"


def ledger() -> Result:
    """That the file is a sound database, and how full it is."""
    path = records.default_path()
    try:
        with queries.reading(path) as db:
            if db is None:
                return "ok", f"none yet; {path} is made with the first decision"
            verdict = db.execute("PRAGMA quick_check(1)").fetchone()[0]
            n, newest_s = db.execute("SELECT count(*), max(at_s) FROM decisions").fetchone()
    except sqlite3.Error as exc:
        return "fail", f"{path} cannot be read ({exc}); move it away, a new one is made"
    if verdict != "ok":
        return "fail", f"{path} is damaged ({verdict}); move it away, a new one is made"
    if newest_s and newest_s > time.time() + SKEW_S_MAX:
        return "fail", f"{path} holds decisions of the future: the clock was set back; set it, or move the ledger away"
    return "ok", f"{n:,} decisions, {path.stat().st_size / 1e6:.1f} MB of {records.BYTES_MAX / 1e6:.0f} MB"


def port(loaded: Loaded) -> Result:
    """Free, ours already, or somebody else's."""
    config = loaded.config
    if not loaded.listens_tcp or config.port == 0:
        return "ok", config.listen or "any free port"
    host = config.host.strip("[]")
    where = f"[{host}]:{config.port}" if ":" in host else f"{host}:{config.port}"
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, config.port))
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE:
                return "fail", f"cannot listen on {where}: {exc.strerror}; choose another with --host or --port"
        else:
            return "ok", f"{where} is free"
    health = asyncio.run(_get(f"http://{where}", "/health"))[0]
    if isinstance(health, dict) and "upstream_kind" in health:
        return "ok", f"{where} is served by whetherman-edge {health.get('version')}"
    return "fail", f"{where} is taken by another program; stop it, or choose another port with --port"


def upstream(url: str, kind: str) -> Result:
    """Whether the configured model server answers, what it is, and what that means for interventions."""
    from whetherman_edge.proxy.capability import capability_of
    from whetherman_edge.proxy.upstream import Target, Upstream

    target = Target.parse(url)
    if not asyncio.run(Upstream(target).reachable(PROBE_TIMEOUT_S)):
        return (
            "fail",
            (
                f"{url} does not accept connections; start the model server, or set another with --upstream, "
                "WHETHERMAN_UPSTREAM or the configuration key upstream"
            ),
        )
    found = asyncio.run(discovery.kind_of(url)) if kind == "auto" else kind
    able = capability_of(found)
    words = [f'tool_choice "none" {"works" if able.honours_none else "is ignored: notes are used instead"}']
    if found == "unknown":
        return "note", f"{url} answers, but its kind is unknown; set --upstream-kind. {words[0]}"
    return "ok", f"{url} is {found}; {words[0]}"


def profiles(loaded: Loaded, servers: Iterable[tuple[str, str]]) -> Result:
    """Models of the servers (address, kind) that a stored profile was measured on, and how to give it to them."""
    from whetherman_edge.engine import check_packaged
    from whetherman_edge.profiles.store import ProfileStore
    from whetherman_edge.profiles.suggestions import advice, suggest

    config = loaded.config
    stored = ProfileStore(check=check_packaged).list()
    files = sorted({o.removeprefix("file ") for o in loaded.origins.values() if o.startswith("file ")})
    file = files[0] if files else str(default_config_path())
    models = [model for url, kind in servers for model in asyncio.run(discovery.models_of(url, kind))]
    found = []
    for served in models:
        model = served.name
        near = suggest(stored, model, served.quantisation or quantisation_in(served.file), config.engine)
        given = config.profile_for_model(model)
        if near is None or (given and near.likeness != "requantised"):
            continue
        if config.profile and not given and measured_on(near.profile, model) and near.likeness != "requantised":
            continue
        found.append(advice(near, model, file))
    if found:
        return "note", "; ".join(found)
    n = sum(one.profile is not None and one.profile.calibrated and not one.fault for one in stored)
    return "ok", f"{n} can be used; {len(models)} models of the server, none of them measured and without its profile"


def context(url: str, kind: str) -> Result:
    """The server's context against the largest recorded request: Ollama cuts silently what is beyond it."""
    n_ctx, source = asyncio.run(_context_tokens(url, kind))
    if n_ctx <= 0:
        return "ok", "the model server does not tell its context size"
    largest = _largest_request_bytes()
    wanted = largest // BYTES_PER_TOKEN + ANSWER_TOKENS
    if largest and wanted > n_ctx:
        return (
            "fail",
            (
                f"{n_ctx:,} tokens ({source}), but the largest recorded request needs about {wanted:,}: its start, the "
                "tools, is cut off without a word. Raise it (Ollama: OLLAMA_CONTEXT_LENGTH or num_ctx; llama.cpp: -c), "
                "or offer fewer tools"
            ),
        )
    if not largest:
        return "ok", f"{n_ctx:,} tokens ({source}); no recorded request to compare with yet"
    return "ok", f"{n_ctx:,} tokens ({source}); the largest recorded request needs about {wanted:,}"


async def _context_tokens(url: str, kind: str) -> tuple[int, str]:
    if kind == "auto":
        kind = await discovery.kind_of(url)
    if kind == "llamacpp":
        props = (await _get(url, "/props"))[0]
        settings = props.get("default_generation_settings") if isinstance(props, dict) else None
        n_ctx = settings.get("n_ctx") if isinstance(settings, dict) else None
        return (n_ctx, "llama.cpp, each slot") if isinstance(n_ctx, int) else (0, "")
    if kind == "ollama":
        loaded = (await _get(url, "/api/ps"))[0]
        models = loaded.get("models") if isinstance(loaded, dict) else None
        sizes = [one.get("context_length") for one in models or () if isinstance(one, dict)]
        known = [size for size in sizes if isinstance(size, int) and size > 0]
        if known:
            return min(known), "Ollama, the smallest of the loaded models"
        text = os.environ.get("OLLAMA_CONTEXT_LENGTH", "")
        return (int(text), "OLLAMA_CONTEXT_LENGTH") if text.isdecimal() else (OLLAMA_CONTEXT, "Ollama's usual default")
    return 0, ""


def _largest_request_bytes() -> int:
    try:
        with queries.reading(records.default_path()) as db:
            if db is None:
                return 0
            return int(db.execute("SELECT coalesce(max(request_bytes), 0) FROM decisions").fetchone()[0])
    except sqlite3.Error:
        return 0  # the ledger's own line says so


def unit(folders: Iterable[str] = _UNIT_FOLDERS) -> Result:
    """Directives of an installed system unit that hide files it needs (field case O03)."""
    texts = []
    for folder in map(Path, folders):
        main = folder / f"{units.NAME}.service"
        if main.is_file():
            texts.append(main.read_text("utf-8", "replace"))
        texts += [one.read_text("utf-8", "replace") for one in sorted((folder / f"{main.name}.d").glob("*.conf"))]
    if not texts:
        return "ok", "no system unit"
    values: dict[str, list[str]] = {}
    for line in "\n".join(texts).splitlines():
        name, equals, value = line.strip().partition("=")
        if equals and not name.startswith("#"):
            values.setdefault(name, []).append(value.strip())
    shown = " ".join([*values.get("BindReadOnlyPaths", ()), *values.get("BindPaths", ())]).split()
    wanted = [word for word in " ".join(values.get("ExecStart", ())).split() if word.startswith("/")]
    wanted += [word.partition("=")[2] for word in " ".join(values.get("Environment", ())).split() if "=/" in word]
    wanted += [os.path.realpath(word) for word in wanted]
    for word in wanted:
        directive = _hidden_by(word, values)
        if directive and not any(word.startswith(path.split(":")[0]) for path in shown):
            return (
                "fail",
                (
                    f"{directive} of the unit hides {word}: it will look missing. Move it to /opt, /etc or "
                    f"/var/cache/whetherman, or add BindReadOnlyPaths={word} with `systemctl edit {units.NAME}`"
                ),
            )
    return "ok", "the unit hides nothing that it names"


def _hidden_by(path: str, values: dict[str, list[str]]) -> str:
    last = {name: given[-1] for name, given in values.items()}
    if last.get("ProtectHome") in ("yes", "true", "1", "tmpfs") and path.startswith(("/home/", "/root/", "/run/user/")):
        return f"ProtectHome={last['ProtectHome']}"
    if last.get("PrivateTmp") in ("yes", "true", "1") and path.startswith(("/tmp/", "/var/tmp/")):
        return "PrivateTmp=yes"
    hidden = " ".join(values.get("InaccessiblePaths", ())).split()
    return next((f"InaccessiblePaths={one}" for one in hidden if path.startswith(one.lstrip("-+"))), "")


def clock(url: str = "") -> Result:
    """Time stamps order the ledger and the back-off; a clock that is years off spoils both."""
    now_s = time.time()
    if now_s < EARLIEST_S:
        return (
            "fail",
            f"the clock says {time.strftime('%Y-%m-%d', time.gmtime(now_s))}; set it (timedatectl set-ntp true)",
        )
    if url.startswith("http"):
        said = asyncio.run(_get(url, "/"))[1]
        if said is not None and abs(said - now_s) > SKEW_S_MAX:
            return "note", f"{abs(said - now_s):.0f} s apart from the model server's; set both by NTP"
    return "ok", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now_s))


async def _get(url: str, path: str) -> tuple[Any, float | None]:
    """One small GET: its JSON and its Date; (None, None) when nothing sensible comes."""
    socket_path = url.removeprefix("unix:") if url.startswith("unix:") else ""
    connector = aiohttp.UnixConnector(socket_path) if socket_path else aiohttp.TCPConnector()
    base = "http://localhost" if socket_path else url.rstrip("/").removesuffix("/v1")
    try:
        async with (
            asyncio.timeout(PROBE_TIMEOUT_S),
            aiohttp.ClientSession(connector=connector, trust_env=False) as session,
            session.get(base + path, allow_redirects=False) as response,
        ):
            date = response.headers.get("Date")
            said = parsedate_to_datetime(date).timestamp() if date else None
            try:
                body = await response.json(content_type=None) if (response.content_length or 0) < 1 << 20 else None
            except (ValueError, RecursionError):  # "Ollama is running": no JSON, and a date all the same
                body = None
            return body, said
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return None, None


def files_of_the_package() -> Result:
    """Other users who can write into the package could run code as this one."""
    folder = Path(__file__).resolve().parent
    loose = [path for path in (folder, *folder.glob("*.py")) if os.stat(path).st_mode & stat.S_IWOTH]
    if loose:
        return "fail", f"{loose[0]} can be changed by any user; chmod o-w it"
    return "ok", f"{folder}, {sys.prefix}; configuration in {default_config_path().parent}"
