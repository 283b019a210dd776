"""Installs, removes and looks at the service. Writes the files that ``plan`` names, and nothing else.

A configuration that exists is never written, whatever is in it. A unit that was edited is set aside before ours takes
its place; one that somebody else wrote is left alone, with an error that says so.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from whetherman_edge.config import DOCS, Config, Loaded, default_config_path, load_config
from whetherman_edge.errors import ConfigError, EnvironmentFault, UsageError
from whetherman_edge.service import units
from whetherman_edge.service.sockets import check_length

Scope = Literal["user", "system"]
Run = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]

COMMAND_TIMEOUT_S = 60.0
NO_ANSWER = 124  # as timeout(1) has it
_HIDDEN_HOMES = ("/home", "/root", "/run/user")


class File(msgspec.Struct, frozen=True):
    """A file of the plan. ``keep``: written only where there is none (the configuration). ``mode``: permissions."""

    path: Path
    text: str
    mode: int
    keep: bool = False


class Plan(msgspec.Struct, frozen=True):
    """What ``install`` writes and runs. ``unit``: the file whose presence means installed."""

    manager: Literal["systemd", "launchd"]
    scope: Scope
    files: tuple[File, ...]
    start: tuple[tuple[str, ...], ...]
    stop: tuple[tuple[str, ...], ...]

    @property
    def units(self) -> tuple[File, ...]:
        """The service's own files: what ``uninstall`` removes."""
        return tuple(file for file in self.files if not file.keep)


def run_command(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run one manager command; a missing program is exit code 127."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except FileNotFoundError:
        return subprocess.CompletedProcess(command, 127, "", f"{command[0]}: not found")
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(
            command, NO_ANSWER, "", f"{command[0]}: no answer in {COMMAND_TIMEOUT_S:.0f} s"
        )


def plan(
    scope: Scope,
    *,
    config: Path | None = None,
    on_demand: bool = False,
    platform: str = sys.platform,
    home: Path | None = None,
    root: Path = Path("/"),
    python: str = sys.executable,
) -> Plan:
    """The files and commands for this machine. ``root``: where a system's files are (for packagers and tests).

    ``config`` None: the one that an installed unit of ours names, so that installing again keeps it; else the usual
    one. Raises UsageError where there is no such service, ConfigError where none can be started on demand.
    """
    home = Path.home() if home is None else home
    if platform == "darwin":
        if scope == "system":
            raise UsageError("service --system: expected --user on macOS; a model on a laptop belongs to its user")
        if on_demand:
            raise UsageError("service --on-demand: expected systemd; launchd starts the agent at login, leave it out")
        return _launchd(home, config, python)
    if not platform.startswith("linux"):
        raise UsageError(f"service: expected Linux (systemd) or macOS (launchd), got {platform}; run `serve` yourself")
    if scope == "system":
        usual = root / units.SYSTEM_CONFIG.lstrip("/")
        _check_visible(python)
        folder, base = root / "etc/systemd/system", ["systemctl"]
    else:
        usual = default_config_path()
        settings = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
        folder, base = settings / "systemd/user", ["systemctl", "--user"]
    where = config or _config_of(folder / f"{units.NAME}.service") or usual
    listen = _listen_of(where, on_demand=on_demand)
    place = units.Place(python=_absolute(python), config=_unit_path(where), listen=listen)
    service = units.system_service(place) if scope == "system" else units.user_service(place)
    wanted, other = (f"{units.NAME}.{kind}" for kind in (("socket", "service") if on_demand else ("service", "socket")))
    return Plan(
        manager="systemd",
        scope=scope,
        files=(
            File(where, _template(scope), 0o644 if scope == "system" else 0o600, keep=True),
            File(folder / f"{units.NAME}.service", service, 0o644),
            File(folder / f"{units.NAME}.socket", units.socket_unit(place), 0o644),
        ),
        start=(
            (*base, "daemon-reload"),
            # From always to on demand or back: a socket does not start beside a service that runs.
            (*base, "disable", "--now", other),
            (*base, "enable", wanted),
            (*base, "restart", wanted),
        ),
        stop=((*base, "disable", "--now", f"{units.NAME}.socket", f"{units.NAME}.service"), (*base, "daemon-reload")),
    )


def _launchd(home: Path, config: Path | None, python: str) -> Plan:
    file = home / f"Library/LaunchAgents/{units.LABEL}.plist"
    where = config or _config_of(file) or home / "Library/Application Support/whetherman/config.toml"
    log = home / "Library/Logs/whetherman-edge.log"
    place = units.Place(python=_absolute(python), config=str(where.absolute()), log=str(log), drain_s=_drain_of(where))
    domain = f"gui/{os.getuid()}"
    return Plan(
        manager="launchd",
        scope="user",
        files=(File(where, _template("user"), 0o600, keep=True), File(file, units.launch_agent(place), 0o644)),
        start=(
            ("launchctl", "bootout", f"{domain}/{units.LABEL}"),
            ("launchctl", "bootstrap", domain, str(file)),
        ),
        stop=(("launchctl", "bootout", f"{domain}/{units.LABEL}"),),
    )


def _config_of(unit: Path) -> Path | None:
    """The configuration that an installed unit of ours names."""
    try:
        text = unit.read_text("utf-8", "replace")
    except OSError:
        return None
    named = units.config_in(text) if units.is_ours(text) else ""
    return Path(named) if named else None


def _listen_of(config: Path, *, on_demand: bool) -> tuple[str, ...]:
    """Where the socket unit listens: where the daemon would. () or ConfigError (if it is to be started): it cannot."""
    try:
        return _streams(load_config({}, environ={}, path=config) if os.path.lexists(config) else Loaded(Config(), {}))
    except ConfigError:
        if on_demand:
            raise
        return ()


def _drain_of(config: Path) -> float:
    """``drain_timeout_s`` of the service; the default where there is no configuration, or none that can be used."""
    with contextlib.suppress(ConfigError):
        return load_config({}, environ={}, path=config).config.drain_timeout_s
    return Config().drain_timeout_s


def _streams(loaded: Loaded) -> tuple[str, ...]:
    """What `serve` would bind, as ListenStream= says it. Raises ConfigError for what systemd has no word for."""
    config, streams = loaded.config, []
    if loaded.listens_tcp:
        if not config.port:
            raise ConfigError(
                "port: expected a number for --on-demand, got 0: a free port is only known once the service runs"
            )
        streams.append(f"{_bound(config.host)}:{config.port}")
    if config.listen:
        path = config.listen.removeprefix("unix:")
        if not os.path.isabs(path):
            raise ConfigError(f"listen: expected an absolute path for --on-demand, got {path!r}")
        check_length(path)
        streams.append(_unit_path(Path(path)))
    return tuple(streams)


def _bound(host: str) -> str:
    """The address that `serve` binds for a host; systemd looks up no names, and one looked up here may change."""
    name = host.strip("[]")
    if name.lower() == "localhost":
        return "127.0.0.1"
    address: ipaddress.IPv4Address | ipaddress.IPv6Address | None = None
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(name)
    if address is None or "%" in name:
        raise ConfigError(f"host: expected an IP address without a zone for --on-demand, got {host!r}")
    return f"[{address}]" if address.version == 6 else str(address)


def install(wanted: Plan, run: Run = run_command, *, start: bool = True) -> list[str]:
    """Write what is missing or changed, then start. Returns what was done, one line each.

    Raises ConfigError before anything is written where a file is not ours, EnvironmentFault when the manager refuses.
    """
    for file in wanted.files:
        _check(file)
    done = [_write(file) for file in wanted.files]
    if start:
        for command in wanted.start:
            result = run(command)
            if result.returncode == NO_ANSWER and "restart" in command:
                done.append("waiting  it is still starting; `whetherman-edge service status` says when it runs")
                continue
            if result.returncode and "bootout" not in command:  # there may be nothing to boot out
                raise EnvironmentFault(
                    f"{' '.join(command)}: {_last_line(result)}; the files are in place: start it with that command, "
                    "or run `whetherman-edge serve`"
                )
            done.append(f"ran      {' '.join(command)}")
    return done


def uninstall(wanted: Plan, run: Run = run_command) -> list[str]:
    """Stop, and remove the service's files where we wrote them. The configuration and the ledger stay."""
    done = []
    present = [file for file in wanted.units if file.path.is_file()]
    for file in present:
        if not units.is_ours(file.path.read_text("utf-8", "replace")):
            raise ConfigError(f"{file.path}: not written by `service install`; remove it yourself")
    if present:
        run(wanted.stop[0])
        for file in present:
            if not units.is_untouched(file.path.read_text("utf-8", "replace")):
                done.append(f"kept     {_set_aside(file.path)} (it was edited)")
            else:
                file.path.unlink()
            done.append(f"removed  {file.path}")
        for command in wanted.stop[1:]:
            run(command)
    kept = next(file.path for file in wanted.files if file.keep)
    if kept.exists():
        done.append(f"kept     {kept}")
    return done or ["nothing was installed"]


def status(wanted: Plan, run: Run = run_command) -> tuple[bool, dict[str, str]]:
    """Whether the service runs, and what the manager and the files say."""
    unit = next(file for file in wanted.units if file.path.suffix in (".service", ".plist"))
    shown = {"unit": str(unit.path), "installed": "yes" if unit.path.is_file() else "no"}
    if shown["installed"] == "yes":
        text = unit.path.read_text("utf-8", "replace")
        shown["unit_is"] = (
            "current" if text == unit.text else "edited" if not units.is_untouched(text) else "of another version"
        )
    shown["config"] = str(next(file.path for file in wanted.files if file.keep))
    if wanted.manager == "launchd":
        return _launchd_status(run, shown)
    base = list(wanted.start[0][:-1])
    properties = "ActiveState,SubState,Result,ExecMainStatus,NRestarts,StatusText,UnitFileState"
    result = run([*base, "show", f"{units.NAME}.service", f"--property={properties}"])
    if result.returncode:
        return False, {**shown, "manager": _last_line(result)}
    values = dict(line.split("=", 1) for line in result.stdout.splitlines() if "=" in line)
    shown |= {name: values[name] for name in properties.split(",") if values.get(name)}
    waiting = run([*base, "is-active", f"{units.NAME}.socket"]).stdout.strip() == "active"
    if waiting:
        shown["socket"] = "active: starts with the first connection"
    if hint := exit_hint(values.get("ExecMainStatus", "")):
        shown["hint"] = hint
    elif waiting and not _listens_as(next(file for file in wanted.units if file.path.suffix == ".socket")):
        shown["hint"] = "the socket listens elsewhere than the configuration says; `service install --on-demand` again"
    return values.get("ActiveState") == "active" or waiting, shown


def _listens_as(wanted: File) -> bool:
    """Whether the socket unit that is installed has the addresses of the one that would be."""
    with contextlib.suppress(OSError):
        return units.listen_in(wanted.path.read_text("utf-8", "replace")) == units.listen_in(wanted.text)
    return True


def _launchd_status(run: Run, shown: dict[str, str]) -> tuple[bool, dict[str, str]]:
    result = run(["launchctl", "print", f"gui/{os.getuid()}/{units.LABEL}"])
    if result.returncode:
        return False, {**shown, "manager": _last_line(result)}
    for line in result.stdout.splitlines():
        name, _, value = line.strip().partition(" = ")
        if name in ("state", "pid", "last exit code", "runs"):
            shown.setdefault(name.replace(" ", "_"), value)
    if hint := exit_hint(shown.get("last_exit_code", "").split(":")[0]):
        shown["hint"] = hint
    return shown.get("state") == "running", shown


def exit_hint(code: str) -> str:
    """What an exit code of ``serve`` means, for a person."""
    return {
        "2": "a setting is wrong; `whetherman-edge config show` says which",
        "3": "the port is taken, or a file is missing; `whetherman-edge doctor` says which",
        "226": "the manager could not set up the sandbox; a drop-in may lift the line named in the journal",
        "203": "the Python of the unit is not there, or hidden (ProtectHome=); run `service install` again",
    }.get(code, "")


def _check(file: File) -> None:
    """Raise ConfigError where writing would follow a link or replace what is not ours."""
    if file.path.is_symlink() and not file.keep:
        raise ConfigError(f"{file.path}: expected a plain file, got a symbolic link; remove it first")
    if file.path.exists() and not file.path.is_file():
        raise ConfigError(f"{file.path}: expected a plain file, got another kind; remove it first")
    if not file.keep and file.path.is_file() and not units.is_ours(file.path.read_text("utf-8", "replace")):
        raise ConfigError(f"{file.path}: not written by `service install`; move it away first, it stays as it is")


def _write(file: File) -> str:
    if file.path.exists() or file.path.is_symlink():
        if file.keep:
            return f"kept     {file.path}"
        text = file.path.read_text("utf-8", "replace")
        if text == file.text:
            return f"same     {file.path}"
        aside = "" if units.is_untouched(text) else f" (yours is now {_set_aside(file.path)})"
        _replace(file)
        return f"updated  {file.path}{aside}"
    _replace(file)
    return f"wrote    {file.path}"


def _replace(file: File) -> None:
    """Write beside and rename, so that a reader or a power cut finds the old text or the new one."""
    try:
        file.path.parent.mkdir(parents=True, exist_ok=True)
        handle, beside = tempfile.mkstemp(prefix=f".{file.path.name}.", dir=file.path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as out:
                out.write(file.text)
                os.fchmod(out.fileno(), file.mode)
            os.replace(beside, file.path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(beside)
            raise
    except OSError as exc:
        who = "; --system needs root" if exc.errno in (1, 13) else ""
        raise EnvironmentFault(f"cannot write {file.path}: {exc.strerror}{who}") from exc


def _set_aside(path: Path) -> Path:
    """Rename an edited file to the first free ``.saved`` name."""
    for number in range(1, 1_000):
        aside = path.with_name(f"{path.name}.saved{number if number > 1 else ''}")
        if not aside.exists():
            os.rename(path, aside)
            return aside
    raise EnvironmentFault(f"{path}: a thousand saved copies; remove some")


def _template(scope: Scope) -> str:
    """A configuration in which every setting is a comment: its default and what it means."""
    lines = [
        "# Settings of whetherman-edge. Flags and WHETHERMAN_* variables come before this file;",
        "# `whetherman-edge config show` prints each value and where it comes from.",
        "",
    ]
    if scope == "system":
        lines.insert(2, f"# This file is readable by all: API keys go into {units.SYSTEM_SECRETS} (mode 600).")
    for key, default in msgspec.structs.asdict(Config()).items():
        if key != "agents":
            shown = '""' if default is None else msgspec.json.encode(default).decode()
            lines += [f"# {DOCS[key]}", f"#{key} = {shown}", ""]
    return "\n".join([*lines, f"# {DOCS['agents']}", "#[agents]", ""])


def _absolute(python: str) -> str:
    if not os.path.isabs(python):
        raise EnvironmentFault(f"service: expected an absolute path of Python, got {python!r}")
    return _unit_path(Path(python))


def _check_visible(python: str) -> None:
    """Raise EnvironmentFault where the system unit's ProtectHome= would hide the program itself (field case O03)."""
    for path in (Path(python).absolute(), Path(python).resolve()):
        if any(path.is_relative_to(home) for home in _HIDDEN_HOMES):
            raise EnvironmentFault(
                f"service --system: {path} is under a home, which ProtectHome=yes of the unit hides; install into "
                "/opt (python3 -m venv /opt/whetherman), or use --user"
            )


def _unit_path(path: Path) -> str:
    """A path as a word of a unit. Raises ConfigError for what systemd would read as something else."""
    text = str(path.absolute())
    if any(not char.isprintable() or char in " \t\"'\\%$;" for char in text):
        raise ConfigError(f"service: expected a path without spaces, quotes, %, $ and ;, got {text!r}; use another")
    return text


def _last_line(result: subprocess.CompletedProcess[str]) -> str:
    lines = (result.stderr or result.stdout).strip().splitlines()
    return lines[-1] if lines else f"exit code {result.returncode}"
