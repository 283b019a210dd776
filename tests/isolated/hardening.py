"""Every hardening line of the unit against what it would break: tried without it, with it alone, and in the whole unit.

Run by ``system_manager.sh PYTHON hardening`` under a systemd that is process 1 of namespaces of its own. Prints a
table, and on the last line how many rows are not as they should be. ``forbidden.py`` makes the attempts.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.isolated.forbidden import MARK
from whetherman_edge.service import units

UNITS = Path("/run/systemd/system")
OUT = Path("/run/wh/out")
PROBE = "/run/wh/base/bin/python3 -I -S /run/wh/src/tests/isolated/forbidden.py"
NOBODY = "User=nobody\n"
LOOKS, LOOK_S = 15, 0.2
# Of the service's own lines, those about its running and not about its sandbox.
_RUNNING = (
    "Type NotifyAccess ExecStart ExecReload TimeoutStartSec TimeoutStopSec WatchdogSec Restart RestartSec "
    "RestartPreventExitStatus"
).split()
_FILTER = "SystemCallFilter=@system-service\nSystemCallFilter=~@privileged @resources\n"
_PINS = "SystemCallFilter=sched_setaffinity sched_setscheduler setpriority\n"
_FENCE = "IPAddressDeny=any\nIPAddressAllow=localhost\n"


@dataclass(frozen=True)
class Row:
    """``lines``: of the unit. ``probe``: a function of forbidden.py. ``user``: whom it is tried as without and alone.

    ``works``: it must be possible, in the whole unit as well.
    """

    lines: str
    probe: str
    user: str = ""
    works: bool = False
    killed: bool = False

    @property
    def name(self) -> str:
        return self.lines.strip().replace("\n", ", ")


ROWS = (
    Row("NoNewPrivileges=yes", "suid", NOBODY),
    Row(_FILTER, "reboot", killed=True),
    Row(_FILTER, "chroot", killed=True),
    Row(_FILTER, "limits", killed=True),
    Row(_FILTER + _PINS, "pin", works=True),
    Row(_FILTER + "SystemCallErrorNumber=EPERM", "reboot"),
    Row("SystemCallArchitectures=native", "int80"),
    Row("MemoryDenyWriteExecute=yes", "write_execute"),
    Row("RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK", "packet"),
    Row("RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK", "families", works=True),
    Row("RestrictNamespaces=yes", "namespace"),
    Row("RestrictRealtime=yes", "realtime"),
    Row("RestrictSUIDSGID=yes", "set_suid"),
    Row("LockPersonality=yes", "personality"),
    Row("UMask=0077", "umask"),
    Row("CapabilityBoundingSet=", "capability"),
    Row("ProtectSystem=strict", "system"),
    Row("ProtectSystem=strict", "etc"),
    Row("ProtectHome=yes", "home"),
    Row("PrivateTmp=yes", "temporary"),
    Row("PrivateDevices=yes", "device"),
    Row("ProtectKernelTunables=yes", "tunable"),
    Row("ProtectKernelModules=yes", "module"),
    Row("ProtectKernelLogs=yes", "kernel_log"),
    Row("ProtectControlGroups=yes", "cgroup"),
    Row("ProtectClock=yes", "clock"),
    Row("ProtectHostname=yes", "hostname"),
    Row("ProtectProc=invisible", "processes", NOBODY),
    Row("RemoveIPC=yes", "ipc", NOBODY),
    Row(_FENCE, "network"),
    Row("DynamicUser=yes", "secrets"),
    Row("EnvironmentFile=-/etc/whetherman/secrets.env", "key", works=True),
    Row("StateDirectory=whetherman\nStateDirectoryMode=0700\nCacheDirectory=whetherman", "state", works=True),
)


def whole() -> str:
    """The service section of the system unit, without what is about running it."""
    text = units.system_service(units.Place(python="/run/wh/venv/bin/python", config=units.SYSTEM_CONFIG))
    section = text.partition("[Service]\n")[2].partition("\n[Install]")[0]
    return "\n".join(line for line in section.splitlines() if line.partition("=")[0] not in _RUNNING)


def missing() -> list[str]:
    """Lines of the whole unit that no row tries."""
    tried = "\n".join(row.lines for row in ROWS).splitlines()
    # XDG_*: where the daemon looks; that its ledger lies there is in system_manager.sh.
    passed = ("Environment=", "ConfigurationDirectory=", "#")
    return [line for line in whole().splitlines() if line and line not in tried and not line.startswith(passed)]


def _unit(name: str, lines: str, probes: list[str]) -> None:
    (UNITS / f"wh-{name}.service").write_text(
        f"[Unit]\nDefaultDependencies=no\n[Service]\nType=oneshot\nExecStart={PROBE} {' '.join(probes)}\n"
        f"StandardOutput=append:{OUT}/{name}\nStandardError=append:{OUT}/{name}.err\n"
        f"Environment=LD_LIBRARY_PATH=/run/wh/base/lib\n{lines}\n"
    )


def _run(name: str) -> dict[str, str]:
    """Start a unit, which returns when it has ended; what it said by probe."""
    subprocess.run(["systemctl", "start", f"wh-{name}.service"], capture_output=True, check=False)
    path = OUT / name
    said = dict(line.split("\t", 1) for line in path.read_text().splitlines()) if path.exists() else {}
    if "ipc" in said:
        left = _left_behind()
        said["ipc"] = f"done: {left} left behind" if left else "removed at its end"
    return said


def _left_behind() -> int:
    """How much shared memory is left; it is removed. The manager removes it a moment after the unit has ended."""
    for _ in range(LOOKS):
        if not (segments := _segments()):
            return 0
        time.sleep(LOOK_S)
    for one in segments:
        subprocess.run(["ipcrm", "-m", one], check=True)
    return len(segments)


def _segments() -> list[str]:
    return [row.split()[1] for row in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]]


def main() -> int:
    """The table."""
    OUT.mkdir()
    probes = list(dict.fromkeys(row.probe for row in ROWS))
    _unit("without-root", "", [row.probe for row in ROWS if not row.user])
    _unit("without-nobody", NOBODY, [row.probe for row in ROWS if row.user])
    _unit("whole", whole(), probes)
    for number, row in enumerate(ROWS):
        _unit(f"alone-{number}", row.user + row.lines, [row.probe])
    subprocess.run(["systemctl", "daemon-reload"], check=True)
    without, within = _run("without-root") | _run("without-nobody"), _run("whole")
    wrong = missing()
    for line in wrong:
        sys.stdout.write(f"NOT TRIED: {line}\n")
    sys.stdout.write(f"{'line':62} {'attempt':14} {'without':34} {'alone':34} whole unit\n")
    for number, row in enumerate(ROWS):
        alone = _run(f"alone-{number}").get(row.probe, "nothing")
        found = [without.get(row.probe, "nothing"), alone, within.get(row.probe, "nothing")]
        done = [one.startswith("done") for one in found]
        proper = done[1:] == [True, True] if row.works else done == [True, False, False]
        if row.killed:
            proper = proper and alone == "killed by SIGSYS"
        if not proper:
            wrong.append(row.name)
        said = [one.removeprefix("done: ")[:33] for one in found]
        mark = "" if proper else "   <- NOT AS IT SHOULD BE"
        sys.stdout.write(f"{row.name[:61]:62} {row.probe:14} {said[0]:34} {said[1]:34} {said[2]}{mark}\n")
    sys.stdout.write(f"{len(ROWS)} rows, {len(wrong)} not as they should be\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    (Path("/home") / MARK).write_text("somebody's\n")
    (Path("/var/tmp") / MARK).write_text("somebody else's\n")
    sys.exit(main())
