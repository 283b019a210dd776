"""READY, STOPPING, the watchdog, and sockets passed on (field cases O05, O06)."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from tests.fakes.upstream import PATIENCE_S
from whetherman_edge.errors import ConfigError
from whetherman_edge.service.notify import Notifier, take_listeners, take_notifier


@pytest.fixture(params=["path", "abstract"])
def manager(request, tmp_path):
    """The manager's end of the channel, and the address that ``NOTIFY_SOCKET`` would have."""
    name = str(tmp_path / "notify") if request.param == "path" else f"@whetherman-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind("\0" + name[1:] if name.startswith("@") else name)
        end.settimeout(PATIENCE_S)
        yield end, name


def test_o05_messages_reach_the_manager(manager):
    end, name = manager
    environ = {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "3000000", "OTHER": "1"}
    notifier = take_notifier(environ)
    assert environ == {"OTHER": "1"}  # a child must not speak for us
    assert notifier.watchdog_s == 3.0
    assert notifier.send("READY=1", "STATUS=up")
    assert end.recv(4096) == b"READY=1\nSTATUS=up"


@pytest.mark.parametrize(("drain_s", "usec"), [(0.0, b"20000000"), (10.0, b"30000000"), (86_400.0, b"86420000000")])
def test_the_manager_waits_for_the_drain_and_what_ends_behind_it(manager, drain_s, usec):
    end, name = manager
    Notifier(name).draining(drain_s)
    assert end.recv(4096) == b"EXTEND_TIMEOUT_USEC=" + usec


@pytest.mark.parametrize("address", ["", "/", "vsock:2:1", "relative"])
def test_o05_no_socket_is_no_fault(address):
    assert take_notifier({"NOTIFY_SOCKET": address} if address else {}).send("READY=1") is False


def test_o05_a_manager_that_has_gone_is_no_fault(tmp_path):
    assert Notifier(str(tmp_path / "nobody")).send("READY=1") is False


def test_a_watchdog_meant_for_another_process_is_not_ours():
    environ = {"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"}
    assert take_notifier(environ, pid=2).watchdog_s == 0.0


async def test_the_heart_beats_inside_the_block(manager):
    end, name = manager
    async with Notifier(name, watchdog_s=0.02).beating():
        assert [await asyncio.to_thread(end.recv, 64) for _ in range(3)] == [b"WATCHDOG=1"] * 3


@pytest.fixture
def passed():
    """Two listening sockets on neighbouring descriptors, as a manager passes them."""
    first = 200
    made = []
    for offset in range(2):
        with socket.create_server(("127.0.0.1", 0)) as server:
            os.dup2(server.fileno(), first + offset, inheritable=True)
        made.append(first + offset)
    yield first
    for fd in made:
        try:
            os.close(fd)
        except OSError:
            pass


def test_o06_sockets_for_this_process_are_taken(passed):
    environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2", "LISTEN_FDNAMES": "a:b"}
    taken = take_listeners(environ, first=passed)
    assert [one.fileno() for one in taken] == [passed, passed + 1]
    assert not any(one.get_inheritable() or one.getblocking() for one in taken)
    assert environ == {}
    for one in taken:
        one.close()


@pytest.mark.parametrize("environ", [{}, {"LISTEN_PID": "1", "LISTEN_FDS": "2"}, {"LISTEN_FDS": "2"}])
def test_o06_sockets_for_another_process_are_left_alone(passed, environ):
    assert take_listeners(dict(environ), first=passed) == []
    os.fstat(passed)


@pytest.mark.parametrize("kind", ["closed", "file", "datagram", "connected"])
def test_o06_what_is_no_listener_is_named(tmp_path, kind):
    fd = 210
    if kind == "file":
        with open(tmp_path / "f", "w") as file:
            os.dup2(file.fileno(), fd)
    elif kind in ("datagram", "connected"):
        with socket.socket(type=socket.SOCK_DGRAM if kind == "datagram" else socket.SOCK_STREAM) as other:
            os.dup2(other.fileno(), fd)
    with pytest.raises(ConfigError, match="210"):
        take_listeners({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}, first=fd)
    if kind != "closed":
        os.close(fd)


def test_o06_a_senseless_number_is_refused():
    with pytest.raises(ConfigError, match="LISTEN_FDS"):
        take_listeners({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "100000"})
