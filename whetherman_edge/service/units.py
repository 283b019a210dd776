"""The texts of the service files: systemd user and system units, and a launchd agent. Pure: values in, text out.

Each hardening line was started with the daemon's own work behind it: compiled kernels, memory-mapped tables, uvloop,
and llama.cpp's threads. ``systemd/`` in the source tree holds the same texts for packagers.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import plistlib

import msgspec

from whetherman_edge.service.notify import CLOSING_S

NAME = "whetherman-edge"
LABEL = "org.whetherman.edge"
SYSTEM_CONFIG = "/etc/whetherman/config.toml"
SYSTEM_SECRETS = "/etc/whetherman/secrets.env"
MARK = "Written by `whetherman-edge service install`; own lines go into a drop-in (systemctl edit). Text sha256: "
PORT = 8088

# Beginnings of addresses that can be bound before the network is up; a path is one too.
_EVERYWHERE_OR_HERE = ("127.", "0.0.0.0:", "[::1]:", "[::]:", "/")
_UNKNOWN = "# Not where the configuration says"


class Place(msgspec.Struct, frozen=True):
    """What differs between machines. ``python``, ``config`` and ``log`` are absolute paths.

    ``listen``: the addresses of the socket unit, as ListenStream= has them; () where it cannot have the daemon's.
    ``drain_s``: ``drain_timeout_s`` of the configuration, for launchd, which cannot be told of another one later.
    """

    python: str
    config: str
    log: str = ""
    listen: tuple[str, ...] = (f"127.0.0.1:{PORT}",)
    drain_s: float = 10.0


# Holds in every manager, also an unprivileged one: these are system-call filters and flags, no mounts.
_FILTERS = """\
NoNewPrivileges=yes
# uvloop's event descriptors and llama.cpp's worker threads are all in @system-service.
SystemCallFilter=@system-service
SystemCallFilter=~@privileged @resources
# llama.cpp pins and nices its threads; without these its start-up fails.
SystemCallFilter=sched_setaffinity sched_setscheduler setpriority
SystemCallErrorNumber=EPERM
SystemCallArchitectures=native
# Nothing here compiles code at run time: the kernels and llama.cpp are plain shared objects.
MemoryDenyWriteExecute=yes
# AF_NETLINK: glibc looks at the interfaces to sort the addresses of a name.
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
UMask=0077
"""

_RUN = """\
Type=notify
NotifyAccess=main
ExecStart={python} -m whetherman_edge serve --config {config}
# Settings and profiles are read again; sockets and running requests stay (`systemctl reload`).
ExecReload=/bin/kill -HUP $MAINPID
# Weights that have to be fetched first (--upstream embedded) take minutes.
TimeoutStartSec=15min
# For the drain_timeout_s that is the default; the daemon asks for more when it stops with a longer one.
TimeoutStopSec=30s
WatchdogSec=60s
Restart=on-failure
# A taken port is tried again after a while, and given up after five times; a wrong setting (2) will not mend itself.
RestartSec=5s
RestartPreventExitStatus=2
"""

# systemd restarts at most this often; then the unit stays failed and `service status` says why.
_LIMIT = """\
StartLimitIntervalSec=300s
StartLimitBurst=5
"""


def system_service(place: Place) -> str:
    """The system unit: a user of its own, and no view of anybody's home.

    The configuration is readable by that user, so by all; keys go into SYSTEM_SECRETS, which systemd reads as root.
    """
    run = _RUN.format(python=place.python, config=place.config)
    return _marked(f"""\
[Unit]
Description=Whetherman Edge: forecasts whether a model call needs its tools
Documentation=https://github.com/whetherman/whetherman-edge
After=network.target ollama.service
{_LIMIT}
[Service]
{run}# WHETHERMAN_API_KEY=… and WHETHERMAN_UPSTREAM_API_KEY=…, in a file that only root may read.
EnvironmentFile=-{SYSTEM_SECRETS}
DynamicUser=yes
StateDirectory=whetherman
StateDirectoryMode=0700
CacheDirectory=whetherman
ConfigurationDirectory=whetherman
Environment=XDG_STATE_HOME=%S XDG_DATA_HOME=%S XDG_CACHE_HOME=%C XDG_CONFIG_HOME=%E

{_FILTERS}CapabilityBoundingSet=
ProtectSystem=strict
# Weights under /home are not seen: they belong into /var/cache/whetherman (`model install` as this unit), or name their
# folder with BindReadOnlyPaths= in a drop-in.
ProtectHome=yes
PrivateTmp=yes
PrivateDevices=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectClock=yes
ProtectHostname=yes
ProtectProc=invisible
RemoveIPC=yes
# This machine only. For a model server elsewhere, in a drop-in: IPAddressAllow= with its address and that of the name
# server, or IPAddressDeny= (empty) to lift the fence.
IPAddressDeny=any
IPAddressAllow=localhost

[Install]
WantedBy=multi-user.target
""")


def user_service(place: Place) -> str:
    """The user's unit: runs as the user, so weights, profiles and configuration are where commands have them."""
    return _marked(f"""\
[Unit]
Description=Whetherman Edge: forecasts whether a model call needs its tools
Documentation=https://github.com/whetherman/whetherman-edge
{_LIMIT}
[Service]
{_RUN.format(python=place.python, config=place.config)}
# What needs mounts (ProtectSystem=, ProtectHome=) or the kernel's packet filter (IPAddressDeny=) is not here: a user's
# manager may not do it everywhere, and the files of the user are what this unit is meant to see.
{_FILTERS}
[Install]
WantedBy=default.target
""")


def socket_unit(place: Place) -> str:
    """Starts the service with the first connection; that one waits in the kernel's queue until the gate is warm.

    It listens where the daemon itself would, and in the same way.
    """
    streams = "".join(f"ListenStream={address}\n" for address in place.listen)
    if not place.listen:  # never started by us, and a unit without any address cannot even be disabled
        streams = f"{_UNKNOWN}; `service install --on-demand` says why it cannot.\nListenStream=127.0.0.1:{PORT}\n"
    if any(not address.startswith(_EVERYWHERE_OR_HERE) for address in place.listen):
        streams += "# A machine gets its addresses later than its sockets.\nFreeBind=yes\n"
    if any(address.startswith("/") for address in place.listen):
        streams += "# For whoever runs the unit alone, and gone with it, as with the daemon's own.\n"
        streams += "SocketMode=0600\nRemoveOnStop=yes\n"
    return _marked(f"""\
[Unit]
Description=Whetherman Edge, started on demand

[Socket]
{streams}Accept=no
Backlog=512

[Install]
WantedBy=sockets.target
""")


def launch_agent(place: Place) -> str:
    """A launchd agent. Every path is absolute: launchd has no PATH, no working directory and no shell.

    Only a crash is restarted. An exit with an error, such as 3 for a taken port, is not: launchd cannot tell codes
    apart, and would try for ever (field case O08).
    """
    value = {
        "Label": LABEL,
        "ProgramArguments": [place.python, "-m", "whetherman_edge", "serve", "--config", place.config],
        "RunAtLoad": True,
        "KeepAlive": {"Crashed": True},
        "ThrottleInterval": 30,
        "ExitTimeOut": math.ceil(place.drain_s + CLOSING_S),
        "ProcessType": "Interactive",
        "Umask": 0o077,
        "WorkingDirectory": "/",
        "StandardOutPath": "/dev/null",
        "StandardErrorPath": place.log,
    }
    text = plistlib.dumps(value, sort_keys=False).decode("utf-8")
    head, _, rest = text.partition("<plist")
    body = "<plist" + rest
    return f"{head}<!-- {MARK}{_sha256(body)} -->\n{body}"


def config_in(text: str) -> str:
    """The configuration that a unit names, "" where it names none."""
    words: list[str] = []
    if "<plist" in text:
        with contextlib.suppress(Exception):  # edited by hand: plistlib and its XML parser have many errors
            words = [str(word) for word in plistlib.loads(text.encode("utf-8"))["ProgramArguments"]]
    else:
        words = [word for line in text.splitlines() if line.startswith("ExecStart=") for word in line.split()]
    return words[words.index("--config") + 1] if "--config" in words[:-1] else ""


def listen_in(text: str) -> list[str]:
    """What a socket unit says about its addresses, what it does not know of them included."""
    return [line for line in text.splitlines() if line.startswith(("ListenStream=", _UNKNOWN))]


def is_ours(text: str) -> bool:
    """Whether we wrote a file."""
    return MARK in text


def is_untouched(text: str) -> bool:
    """Whether a file of ours is as we wrote it."""
    _, mark, rest = text.partition(MARK)
    sha256, body = rest[:64], rest[64:].removeprefix(" -->").removeprefix("\n")
    return bool(mark) and _sha256(body) == sha256


def _marked(text: str) -> str:
    return f"# {MARK}{_sha256(text)}\n{text}"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
