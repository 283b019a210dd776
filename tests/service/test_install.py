"""``service install|uninstall|status``: what is written, what never is, and what the unit files say."""

from __future__ import annotations

import plistlib
import socket
import subprocess
from pathlib import Path

import pytest

from whetherman_edge import cli
from whetherman_edge.config import Config, Loaded, load_config
from whetherman_edge.errors import ConfigError, EnvironmentFault, UsageError
from whetherman_edge.service import install, notify, units
from whetherman_edge.service.sockets import bind_tcp

ROOT = Path(__file__).resolve().parents[2]


class Manager:
    """Stands in for systemctl and launchctl: keeps the commands, gives scripted answers."""

    def __init__(self) -> None:
        self.commands: list[str] = []
        self.answers: dict[str, tuple[int, str]] = {}

    def __call__(self, command):
        line = " ".join(command)
        self.commands.append(line)
        code, text = next((answer for part, answer in self.answers.items() if part in line), (0, ""))
        return subprocess.CompletedProcess(command, code, text if not code else "", text if code else "")


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / ".config"))
    return tmp_path


def planned(home: Path, scope="user", platform="linux", **keys) -> install.Plan:
    keys = {"python": "/opt/whetherman/bin/nopython", **keys}
    return install.plan(scope, platform=platform, home=home, root=home / "root", **keys)


def tree(folder: Path) -> dict[str, str]:
    return {str(one.relative_to(folder)): one.read_text() for one in folder.rglob("*") if one.is_file()}


@pytest.mark.parametrize(("scope", "platform"), [("user", "linux"), ("system", "linux"), ("user", "darwin")])
def test_install_writes_what_it_names_and_is_idempotent(home, scope, platform):
    wanted, manager = planned(home, scope, platform), Manager()
    install.install(wanted, manager)
    first = tree(home)
    assert set(first) == {str(file.path.relative_to(home)) for file in wanted.files}
    done = install.install(planned(home, scope, platform), manager)
    assert tree(home) == first
    assert {line.split()[0] for line in done} == {"same", "kept", "ran"}
    install.uninstall(wanted, manager)
    assert set(tree(home)) == {str(file.path.relative_to(home)) for file in wanted.files if file.keep}
    assert install.uninstall(wanted, manager)[0].startswith("kept")


def test_a_configuration_is_never_written_over(home):
    wanted = planned(home)
    config = next(file.path for file in wanted.files if file.keep)
    config.parent.mkdir(parents=True)
    config.write_text("port = 9999  # mine\n")
    install.install(wanted, Manager())
    install.uninstall(wanted, Manager())
    assert config.read_text() == "port = 9999  # mine\n"


def test_the_new_configuration_is_private_and_parses_to_the_defaults(home):
    wanted = planned(home)
    install.install(wanted, Manager())
    config = next(file.path for file in wanted.files if file.keep)
    assert config.stat().st_mode & 0o777 == 0o600
    assert load_config({}, environ={}, path=config).origins == {}
    uncommented = "\n".join(
        line[1:] for line in config.read_text().splitlines() if line.startswith("#") and not line.startswith("# ")
    )
    config.write_text(uncommented.replace('mode = ""', 'mode = "shadow"').replace('force = ""', 'force = "ACT"'))
    assert load_config({}, environ={}, path=config).config.port == 8088


def test_an_edited_unit_is_set_aside_on_upgrade(home):
    wanted = planned(home)
    install.install(wanted, Manager())
    unit = wanted.units[0].path
    edited = unit.read_text().replace("RestartSec=5s", "RestartSec=9s")
    for _ in range(2):
        unit.write_text(edited)
        done = install.install(wanted, Manager())
        assert unit.read_text() == wanted.units[0].text
    assert any("saved2" in line for line in done)
    assert [one.read_text() for one in unit.parent.glob("*.saved*")] == [edited, edited]


def test_an_older_unit_is_brought_up_to_date_without_a_copy(home):
    config = home / "c.toml"
    config.write_text("port = 9000\n")
    install.install(planned(home, config=config), Manager())
    config.write_text("port = 9001\n")
    done = install.install(planned(home), Manager())
    assert any(line.startswith("updated") for line in done)
    assert not list(home.rglob("*.saved*"))


@pytest.mark.parametrize("kind", ["foreign", "link", "folder"])
def test_what_is_not_ours_stays(home, kind):
    wanted = planned(home)
    unit = wanted.units[0].path
    unit.parent.mkdir(parents=True)
    precious = home / "precious"
    precious.write_text("[Service]\nExecStart=/bin/true\n")
    if kind == "foreign":
        unit.write_text(precious.read_text())
    elif kind == "link":
        unit.symlink_to(precious)
    else:
        unit.mkdir()
    before = tree(home)
    with pytest.raises(ConfigError, match=unit.name):
        install.install(wanted, Manager())
    assert tree(home) == before
    if kind == "foreign":
        with pytest.raises(ConfigError):
            install.uninstall(wanted, Manager())
        assert unit.exists()


def test_a_manager_that_refuses_is_said(home):
    manager = Manager()
    manager.answers["daemon-reload"] = (1, "Failed to connect to bus")
    with pytest.raises(EnvironmentFault, match="Failed to connect to bus"):
        install.install(planned(home), manager)


def test_a_start_that_takes_long_is_no_refusal(home):
    """Weights that are fetched first take minutes, and the manager goes on with the start when nobody waits for it."""
    manager = Manager()
    manager.answers["restart"] = (install.NO_ANSWER, "systemctl: no answer in 60 s")
    done = install.install(planned(home), manager)
    assert "service status" in done[-1]


def test_on_demand_starts_the_socket_only(home):
    manager = Manager()
    install.install(planned(home, on_demand=True), manager)
    assert manager.commands[1:] == [
        "systemctl --user disable --now whetherman-edge.service",
        "systemctl --user enable whetherman-edge.socket",
        "systemctl --user restart whetherman-edge.socket",
    ]
    install.install(planned(home), manager)
    assert manager.commands[5:] == [
        "systemctl --user disable --now whetherman-edge.socket",
        "systemctl --user enable whetherman-edge.service",
        "systemctl --user restart whetherman-edge.service",
    ]


@pytest.mark.parametrize(("scope", "platform"), [("user", "linux"), ("system", "linux"), ("user", "darwin")])
def test_installing_again_keeps_the_configuration_that_was_named(home, scope, platform):
    mine = home / "mine.toml"
    mine.write_text("port = 9000\n")
    install.install(planned(home, scope, platform, config=mine), Manager())
    before = tree(home)
    done = install.install(planned(home, scope, platform), Manager())
    assert tree(home) == before
    assert f"kept     {mine}" in done
    assert install.status(planned(home, scope, platform), Manager())[1]["unit_is"] == "current"


def socket_text(home: Path, settings: str, **keys) -> str:
    config = home / "c.toml"
    config.write_text(settings)
    return next(file.text for file in planned(home, config=config, **keys).units if file.path.suffix == ".socket")


@pytest.mark.parametrize(
    ("settings", "streams"),
    [
        ("", ["127.0.0.1:8088"]),
        ("port = 9000", ["127.0.0.1:9000"]),
        ("host = 'localhost'", ["127.0.0.1:8088"]),
        ("host = '::1'", ["[::1]:8088"]),
        ("host = '[::1]'", ["[::1]:8088"]),
        ("host = '0.0.0.0'", ["0.0.0.0:8088"]),
        ("host = '::'\nport = 9000", ["[::]:9000"]),
        ("host = '192.0.2.7'", ["192.0.2.7:8088"]),
        ("listen = 'unix:/run/w/edge.sock'", ["/run/w/edge.sock"]),
        ("listen = 'unix:/run/w/edge.sock'\nport = 9000", ["127.0.0.1:9000", "/run/w/edge.sock"]),
        ("listen = 'unix:/run/w/edge.sock'\nhost = '127.0.0.1'", ["127.0.0.1:8088", "/run/w/edge.sock"]),
    ],
)
@pytest.mark.parametrize("on_demand", [True, False])
def test_the_socket_listens_where_the_configuration_says(home, settings, streams, on_demand):
    text = socket_text(home, settings, on_demand=on_demand)
    assert [line.removeprefix("ListenStream=") for line in text.splitlines() if "ListenStream=" in line] == streams
    # As bind_unix makes and leaves its own; and a machine has its addresses later than its sockets.
    assert ("SocketMode=0600\nRemoveOnStop=yes\n" in text) == ("listen" in settings)
    assert ("FreeBind=yes\n" in text) == ("192." in settings)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]", "0.0.0.0", "::"])
def test_the_socket_has_the_address_that_serve_binds(host):
    (stream,) = install._streams(Loaded(Config(host=host, port=9000), {}))
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with bind_tcp(host, 0) as listener:
        assert listener.family == family
        assert stream == f"[{listener.getsockname()[0]}]:9000" if ":" in host else f"{listener.getsockname()[0]}:9000"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("port = 0", "port: expected a number"),
        ("host = 'my-machine'", "host: expected an IP address"),
        ("host = ''", "host: expected an IP address"),
        ("host = 'fe80::1%eth0'", "host: expected an IP address"),
        ("listen = 'unix:edge.sock'", "listen: expected an absolute path"),
        (f"listen = 'unix:/{'x' * 107}'", "at most 107 bytes"),
        ("listen = 'unix:/run/a b'", "without spaces"),
        ("listen = 'unix:/run/%h'", "without spaces"),
        ("port = 'x'", "port"),
    ],
)
def test_a_socket_that_cannot_listen_where_the_configuration_says_is_refused(home, settings, said):
    with pytest.raises(ConfigError, match=said):
        socket_text(home, settings, on_demand=True)
    # Without --on-demand it is not started; the file says that it is not what was asked for.
    assert "# Not where the configuration says" in socket_text(home, settings)
    assert "# Not where" not in socket_text(home, "")


def test_on_demand_is_refused_where_nothing_would_start_it(home):
    with pytest.raises(UsageError, match="systemd"):
        planned(home, platform="darwin", on_demand=True)


def test_status_says_when_the_socket_and_the_configuration_differ(home):
    config, manager = home / "c.toml", Manager()
    manager.answers = {
        "is-active": (0, "active\n"),
        "show": (0, "ActiveState=inactive\nSubState=dead\nExecMainStatus=0\n"),
    }
    config.write_text("port = 9000\n")
    install.install(planned(home, config=config, on_demand=True), manager)
    runs, shown = install.status(planned(home), manager)
    assert (runs, "hint" in shown) == (True, False)
    for changed in ("port = 9001\n", "port = 0\n", "listen = 'unix:/run/edge.sock'\n"):
        config.write_text(changed)
        assert "service install --on-demand" in install.status(planned(home), manager)[1]["hint"]


def test_a_unit_that_is_no_utf8_any_more_counts_as_edited(home):
    install.install(planned(home), Manager())
    unit = home / ".config/systemd/user/whetherman-edge.service"
    unit.write_bytes(unit.read_bytes() + b"# caf\xe9\n")
    assert any("yours is now" in line for line in install.install(planned(home), Manager()))
    unit.write_bytes(unit.read_bytes() + b"# caf\xe9\n")
    assert any("it was edited" in line for line in install.uninstall(planned(home), Manager()))


@pytest.mark.parametrize("path", ["/a b/c", "/a%n/c", "/a\nExecStart=/bin/sh/c", '/a"/c', "/a$HOME/c"])
def test_a_path_cannot_add_lines_to_a_unit(home, path):
    with pytest.raises(ConfigError, match="without"):
        planned(home, config=Path(path))


def test_other_systems_are_told(home):
    with pytest.raises(UsageError, match="serve"):
        planned(home, platform="win32")
    with pytest.raises(UsageError, match="--user"):
        planned(home, "system", "darwin")


@pytest.mark.parametrize("python", ["/home/me/venv/bin/python", "/root/.pyenv/bin/python3"])
def test_o03_a_program_that_the_unit_would_hide_is_refused(home, python):
    with pytest.raises(EnvironmentFault, match="ProtectHome"):
        planned(home, "system", python=python)
    assert planned(home, "user", python=python).units


def test_status_of_a_running_and_of_a_failed_service(home):
    wanted, manager = planned(home), Manager()
    assert install.status(wanted, manager)[1]["installed"] == "no"
    install.install(wanted, manager)
    manager.answers["show"] = (0, "ActiveState=active\nSubState=running\nExecMainStatus=0\nNRestarts=0\n")
    assert install.status(wanted, manager)[0] is True
    manager.answers["show"] = (0, "ActiveState=failed\nResult=exit-code\nExecMainStatus=3\nNRestarts=5\n")
    runs, shown = install.status(wanted, manager)
    assert (runs, shown["NRestarts"], shown["unit_is"]) == (False, "5", "current")
    assert "port is taken" in shown["hint"]


def test_o08_status_of_an_agent_whose_port_was_taken(home):
    wanted, manager = planned(home, platform="darwin"), Manager()
    manager.answers["print"] = (0, "\tstate = not running\n\truns = 1\n\tlast exit code = 3: EX_ERROR\n")
    runs, shown = install.status(wanted, manager)
    assert (runs, shown["runs"]) == (False, "1")
    assert "port is taken" in shown["hint"]


def test_o08_the_agent_has_absolute_paths_and_no_restart_loop(home):
    text = next(file.text for file in planned(home, platform="darwin").units)
    value = plistlib.loads(text.encode())
    arguments = value["ProgramArguments"]
    paths = [arguments[0], arguments[arguments.index("--config") + 1], value["StandardErrorPath"]]
    assert all(path.startswith("/") and "~" not in path and "$" not in path for path in paths)
    # An error exit such as 3 (port taken) ends it; only a crash starts it again, and not more often than this.
    assert value["KeepAlive"] == {"Crashed": True}
    assert value["ThrottleInterval"] >= 10
    assert units.is_untouched(text)
    assert not units.is_untouched(text.replace("<true/>", "<false/>", 1))


@pytest.mark.parametrize(
    ("settings", "wait_s"),
    [(None, 30), ("", 30), ("drain_timeout_s = 120.5", 141), ("drain_timeout_s = 0", 20), ("drain_timeout_s = -1", 30)],
)
def test_launchd_waits_for_the_drain_that_is_configured(home, settings, wait_s):
    config = home / "c.toml"
    if settings is not None:
        config.write_text(settings)
    text = next(file.text for file in planned(home, platform="darwin", config=config).units)
    assert plistlib.loads(text.encode())["ExitTimeOut"] == wait_s


@pytest.mark.parametrize("scope", ["system", "user"])
def test_the_unit_waits_for_the_drain_that_is_the_default(scope):
    text = packaged()[f"{scope}/whetherman-edge.service"]
    assert f"\nTimeoutStopSec={Config().drain_timeout_s + notify.CLOSING_S:.0f}s\n" in text
    assert units.Place(python="", config="").drain_s == Config().drain_timeout_s


def packaged() -> dict[str, str]:
    python = "/opt/whetherman/bin/python"
    system = units.Place(python=python, config=units.SYSTEM_CONFIG)
    user = units.Place(python=python, config="%E/whetherman/config.toml")
    mac = units.Place(
        python=python,
        config="/Users/USER/Library/Application Support/whetherman/config.toml",
        log="/Users/USER/Library/Logs/whetherman-edge.log",
    )
    return {
        "system/whetherman-edge.service": units.system_service(system),
        "system/whetherman-edge.socket": units.socket_unit(system),
        "user/whetherman-edge.service": units.user_service(user),
        "user/whetherman-edge.socket": units.socket_unit(user),
        f"launchd/{units.LABEL}.plist": units.launch_agent(mac),
    }


@pytest.mark.parametrize("name", packaged())
def test_the_files_for_packagers_are_those_of_the_command(name):
    assert (ROOT / "systemd" / name).read_text() == packaged()[name]


@pytest.mark.parametrize("scope", ["system", "user"])
def test_o04_the_hardening_is_there(scope):
    text = packaged()[f"{scope}/whetherman-edge.service"]
    wanted = ["Type=notify", "WatchdogSec=", "NoNewPrivileges=yes", "MemoryDenyWriteExecute=yes", "SystemCallFilter="]
    wanted += ["RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6", "RestartPreventExitStatus=2"]
    wanted += ["ExecReload=/bin/kill -HUP $MAINPID"]
    if scope == "system":
        wanted += ["ProtectSystem=strict", "ProtectHome=yes", "StateDirectory=whetherman", "CacheDirectory=whetherman"]
        wanted += ["IPAddressDeny=any", "IPAddressAllow=localhost", "DynamicUser=yes"]
    assert [line for line in wanted if line not in text] == []


def test_print_writes_nothing(home, capsys):
    assert cli.main(["service", "install", "--print"]) == 0
    out = capsys.readouterr().out
    assert "whetherman-edge.service" in out
    assert "Type=notify" in out or "<plist" in out
    assert tree(home) == {}
