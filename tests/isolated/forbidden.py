"""Tries what the hardening lines of the units forbid, and says how each attempt ended. Run inside a unit's sandbox.

    python forbidden.py NAME…         one line each: name, tab, "done" with what came of it, or the error

Nothing that could harm succeeds: system calls that change the machine get arguments that the kernel refuses, and a
filter refuses them before the kernel looks. So EPERM is the filter, and EINVAL or EFAULT is the kernel. Linux on x86-64
only; the standard library only.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

MARK = "whetherman-probe"
BASE = Path("/run/wh")
ELSEWHERE = ("10.9.8.7", 9)
# int 0x80 with eax 20: getpid of the 32-bit kernel interface.
INT80 = bytes.fromhex("53b814000000cd805bc3")
_ADDR_NO_RANDOMIZE = 0x0040000
_CLONE_NEWUTS = 0x04000000
_IPC_CREAT = 0o1000
_SCHED_FIFO = 1
_SYSLOG_SIZE = 10
_BY_THE_KERNEL = (errno.EINVAL, errno.EFAULT, errno.ENOSYS)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


def _call(number: int, *args: int) -> str:
    """A system call; EINVAL, EFAULT and ENOSYS say that the kernel was reached."""
    ctypes.set_errno(0)
    result = _libc.syscall(*(ctypes.c_long(one) for one in (number, *args)))
    if result == -1 and ctypes.get_errno() not in _BY_THE_KERNEL:
        raise OSError(ctypes.get_errno(), "")
    return f"reached the kernel ({errno.errorcode[ctypes.get_errno()]})" if result == -1 else f"returned {result}"


def _created(folder: Path) -> str:
    path = folder / MARK
    path.touch()
    path.unlink()
    return f"wrote {folder}"


def suid() -> str:
    """Gain another user by a set-user-ID program."""
    uid = subprocess.run([BASE / "suid-id", "-u"], capture_output=True, text=True, check=True).stdout.strip()
    if uid != "0":
        raise PermissionError(errno.EPERM, f"stays user {uid}")
    return "became user 0"


def reboot() -> str:
    """A system call that no service needs."""
    return _call(169, 1, 2, 3, 0)


def chroot() -> str:
    """A privileged one."""
    return _call(161, 0)


def limits() -> str:
    """Set a limit of resources."""
    return _call(160, 99, 0)


def pin() -> str:
    """What llama.cpp does with its threads; must go on working."""
    os.sched_setaffinity(0, os.sched_getaffinity(0))
    os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0))
    return "pinned"


def int80() -> str:
    """The 32-bit system call interface, past every 64-bit filter."""
    fd = os.open(BASE / "int80", os.O_RDONLY)
    address = _libc.mmap(None, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC, mmap.MAP_PRIVATE, fd, 0)
    pid = ctypes.CFUNCTYPE(ctypes.c_long)(address)() & 0xFFFFFFFF
    if pid != os.getpid():
        raise OSError((-pid) & 0xFF, "")
    return "32-bit getpid"


def write_execute() -> str:
    """Memory that can be written and executed."""
    prot = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
    mmap.mmap(-1, mmap.PAGESIZE, prot=prot).close()
    return "mapped"


def packet() -> str:
    """Raw packets of the network."""
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW).close()
    return "AF_PACKET"


def families() -> str:
    """The families that we need; must go on working."""
    for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK):
        socket.socket(family, socket.SOCK_DGRAM).close()
    return "UNIX, INET, INET6, NETLINK"


def namespace() -> str:
    """A namespace of its own."""
    if _libc.unshare(_CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), "")
    return "new UTS namespace"


def realtime() -> str:
    """Priority over everything else."""
    return _call(144, -1, _SCHED_FIFO, 0)


def set_suid() -> str:
    """Leave a set-user-ID file behind."""
    path = Path(os.environ.get("STATE_DIRECTORY", str(BASE / "open"))) / MARK
    path.touch()
    try:
        path.chmod(0o4755)
        return f"mode {stat.S_IMODE(path.stat().st_mode):o}"
    finally:
        path.unlink()


def personality() -> str:
    """Turn address randomisation off."""
    return _call(135, _ADDR_NO_RANDOMIZE)


def umask() -> str:
    """A file that others may read."""
    path = Path(os.environ.get("STATE_DIRECTORY", str(BASE / "open"))) / MARK
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    path.unlink()
    if not mode & 0o077:
        raise PermissionError(errno.EPERM, f"mode {mode:o}")
    return f"mode {mode:o}"


def capability() -> str:
    """What root may do: give a file away."""
    path = Path(os.environ.get("STATE_DIRECTORY", str(BASE / "open"))) / MARK
    path.touch()
    try:
        os.chown(path, 1, 1)
        return "gave a file to user 1"
    finally:
        path.unlink()


def system() -> str:
    """Write to /usr."""
    return _created(Path("/usr/local/src"))


def etc() -> str:
    """Write to /etc."""
    return _created(Path("/etc/whetherman"))


def home() -> str:
    """Read a home directory."""
    return (Path("/home") / MARK).read_text()


def temporary() -> str:
    """See what others leave in /var/tmp."""
    return (Path("/var/tmp") / MARK).read_text()


def device() -> str:
    """Open a device of the machine."""
    os.close(os.open(f"/dev/{MARK}", os.O_RDONLY))
    return "opened"


def tunable() -> str:
    """Write a kernel setting (the value that it has)."""
    path = Path("/proc/sys/vm/swappiness")
    path.write_text(path.read_text())
    return "wrote vm.swappiness"


def module() -> str:
    """Load a kernel module."""
    return _call(175, 0, 0, 0)


def kernel_log() -> str:
    """Read the kernel's log."""
    return _call(103, _SYSLOG_SIZE, 0, 0)


def cgroup() -> str:
    """Make a control group."""
    path = Path("/sys/fs/cgroup/unified") / MARK
    path.mkdir()
    path.rmdir()
    return "made one"


def clock() -> str:
    """Set the clock."""
    return _call(227, 9_999, 0)


def hostname() -> str:
    """Rename the machine."""
    return _call(170, 0, -1)


def processes() -> str:
    """See the processes of others."""
    return (Path("/proc/1") / "comm").read_text().strip()


def ipc() -> str:
    """Leave shared memory behind; whether it stays is seen from outside."""
    return _call(29, 0, 4096, _IPC_CREAT | 0o600)


def network() -> str:
    """Send something to another machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"x", ("127.0.0.1", 9))  # this machine stays allowed
        sender.sendto(b"x", ELSEWHERE)
    return "sent"


def secrets() -> str:
    """Read the file that holds the keys."""
    return f"read {len(Path('/etc/whetherman/secrets.env').read_text())} characters"


def key() -> str:
    """Have the keys all the same; must go on working."""
    return f"{len(os.environ['WHETHERMAN_API_KEY'])} characters"


def state() -> str:
    """The state and cache directories: ours, and nobody else's; must go on working."""
    modes = []
    for name in ("STATE_DIRECTORY", "CACHE_DIRECTORY"):
        folder = Path(os.environ[name])
        _created(folder)
        modes.append(f"{stat.S_IMODE(folder.stat().st_mode):o}")
    return " ".join(modes)


def attempt(probe: Callable[[], str]) -> str:
    """How it ended, in a process of its own: a filter may kill it."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reader)
        try:
            said = f"done: {probe()}"
        except OSError as exc:
            said = errno.errorcode.get(exc.errno or 0, str(exc))
            if exc.strerror and exc.strerror != os.strerror(exc.errno or 0):
                said += f" ({exc.strerror})"
        except BaseException as exc:
            said = f"{type(exc).__name__}: {exc}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    _, status = os.waitpid(pid, 0)
    return said or f"killed by {signal.Signals(os.WTERMSIG(status)).name}"


if __name__ == "__main__":
    for wanted in sys.argv[1:]:
        sys.stdout.write(f"{wanted}\t{' '.join(attempt(globals()[wanted]).split())}\n")
        sys.stdout.flush()
