"""Listening sockets: what is replaced, what is refused, who may connect."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import threading

import pytest

from whetherman_edge.errors import ConfigError, PortTaken
from whetherman_edge.service import sockets
from whetherman_edge.service.sockets import bind_tcp, bind_unix, unlink_unix


def test_port_zero_is_a_free_port():
    with bind_tcp("127.0.0.1", 0) as listener:
        assert listener.getsockname()[1] > 0


def test_a_taken_port_is_port_taken():
    with bind_tcp("127.0.0.1", 0) as listener, pytest.raises(PortTaken, match="--port"):
        bind_tcp("127.0.0.1", listener.getsockname()[1])


def test_a_host_that_is_not_ours_is_a_configuration_error():
    with pytest.raises(ConfigError):
        bind_tcp("203.0.113.7", 0)


def test_o09_unix_socket_is_private_from_its_first_moment(tmp_path):
    path = str(tmp_path / "w.sock")
    before = os.umask(0)
    try:
        with bind_unix(path):
            assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert os.umask(0) == 0
    finally:
        os.umask(before)


def test_a_stale_socket_is_replaced_and_a_live_one_is_not(tmp_path):
    path = str(tmp_path / "w.sock")
    bind_unix(path).close()
    assert os.path.exists(path)
    with bind_unix(path), pytest.raises(PortTaken):
        bind_unix(path)


@pytest.mark.parametrize("kind", ["file", "link", "folder", "dangling"])
def test_nothing_but_a_socket_is_ever_removed(tmp_path, kind):
    path = tmp_path / "w.sock"
    target = tmp_path / "target"
    if kind == "file":
        path.write_text("precious")
    elif kind == "folder":
        path.mkdir()
    else:
        if kind == "link":
            target.write_text("precious")
        path.symlink_to(target)
    with pytest.raises(ConfigError, match=r"w\.sock"):
        bind_unix(str(path))
    unlink_unix(str(path))
    assert os.path.lexists(path)


def test_a_path_too_long_for_the_kernel_is_named(tmp_path):
    with pytest.raises(ConfigError, match="107"):
        bind_unix(str(tmp_path / ("x" * 120)))


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot create"):
        bind_unix(str(tmp_path / "no" / "w.sock"))


def test_the_socket_accepts_connections(tmp_path):
    path = str(tmp_path / "w.sock")
    with bind_unix(path), socket.socket(socket.AF_UNIX) as client:
        client.connect(path)


def test_two_that_start_at_once_do_not_remove_each_others_socket(tmp_path):
    """All find the same stale file; one gets the address, the others are told that it is taken."""
    path = str(tmp_path / "w.sock")
    bind_unix(path).close()
    listeners, refused = [], []
    together = threading.Barrier(8)

    def start() -> None:
        together.wait()
        try:
            listeners.append(bind_unix(path))
        except PortTaken as exc:
            refused.append(exc)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(listeners), len(refused)) == (1, 7)
    with listeners[0], socket.socket(socket.AF_UNIX) as client:
        client.connect(path)


def test_a_folder_that_stays_locked_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sockets, "LOCK_WAIT_S", 0.0)
    handle = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        with pytest.raises(PortTaken, match="locked"):
            bind_unix(str(tmp_path / "w.sock"))
    finally:
        os.close(handle)
