"""Verbs, exit codes and one-line messages; the daemon itself is in tests/e2e."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

from whetherman_edge import cli

# A start takes a second of a processor; a machine that does other things as well has given it one in thirty.
RUN_S = 600


def run(*args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", **environ}
    return subprocess.run(
        [sys.executable, "-m", "whetherman_edge", *args],
        capture_output=True,
        text=True,
        env=env,
        timeout=RUN_S,
        check=False,
    )


def test_help_lists_the_verbs_without_importing_them(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    for verb in ("serve", "config", "decide", "doctor"):
        assert verb in out


def test_help_imports_neither_numpy_nor_aiohttp():
    code = (
        "import sys; from whetherman_edge import cli\n"
        "try: cli.main(['--help'])\nexcept SystemExit: pass\n"
        "sys.exit(any(name in sys.modules for name in ('numpy', 'aiohttp', 'tokenizers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("args", [[], ["no-such-verb"], ["serve", "--no-such-flag"], ["config"]])
def test_usage_errors_exit_2(args):
    with pytest.raises(SystemExit) as caught:
        cli.main(args)
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["--port", "x"], "flag --port"),
        (["--upstream", "ftp://x"], "upstream"),
        (["--mode", "loud"], "off, shadow, enforce"),
        (["--config", "/nowhere.toml"], "/nowhere.toml"),
        (["--host", "0.0.0.0", "--upstream", "http://127.0.0.1:1"], "api_key"),
    ],
)
def test_serve_with_a_wrong_setting_exits_2_with_one_line(args, part):
    done = run("serve", *args)
    assert done.returncode == 2
    assert part in done.stderr
    assert done.stderr.count("\n") == 1


def test_o08_a_taken_port_exits_3_with_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run("serve", "--port", str(port), "--upstream", "http://127.0.0.1:1")
    assert done.returncode == 3
    assert str(port) in done.stderr
    assert "--port" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_output_without_room_exits_3_with_one_line(unbuffered):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "whetherman_edge", "config", "show"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            check=False,
        )
    assert (done.returncode, done.stderr.count("\n")) == (3, 1)
    assert "No space left" in done.stderr


def test_a_taken_socket_exits_3_and_is_left_alone(tmp_path):
    path = tmp_path / "w.sock"
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(str(path))
        taken.listen()
        done = run("serve", "--listen", f"unix:{path}", "--upstream", "http://127.0.0.1:1")
        assert path.exists()
    assert done.returncode == 3
    assert str(path) in done.stderr


def test_config_show_prints_value_and_origin(capsys, monkeypatch):
    monkeypatch.setenv("WHETHERMAN_PORT", "9000")
    monkeypatch.setenv("WHETHERMAN_API_KEY", "sesame")
    assert cli.main(["config", "show", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["port"] == {"value": 9000, "origin": "env WHETHERMAN_PORT"}
    assert shown["api_key"]["value"] == "********"
    assert cli.main(["config", "show"]) == 0
    out = capsys.readouterr().out
    assert "env WHETHERMAN_PORT" in out
    assert "sesame" not in out


def test_doctor_reports_each_check_and_exits_0(capsys):
    assert cli.main(["doctor", "--json"]) == 0, capsys.readouterr().out
    report = json.loads(capsys.readouterr().out)
    names = [check["name"] for check in report["checks"]]
    assert {"version", "config", "kernels", "artifacts", "router", "gate", "port", "upstream"} <= set(names)
    assert report["ok"]
    assert all(check["state"] in ("ok", "note") and check["detail"] for check in report["checks"])


def test_doctor_names_a_broken_setting_and_exits_1(capsys, tmp_path):
    path = tmp_path / "w.toml"
    path.write_text("prot = 1\n")
    assert cli.main(["doctor", "--config", str(path)]) == 1
    out = capsys.readouterr().out
    assert "fail  config" in out
    assert "did you mean 'port'?" in out


def test_doctor_names_a_broken_router(capsys, tmp_path, monkeypatch):
    path = tmp_path / "router.safetensors"
    path.write_bytes(b"not a router")
    monkeypatch.setenv("WHETHERMAN_ROUTER", str(path))
    assert cli.main(["doctor"]) == 1
    assert str(path) in capsys.readouterr().out
