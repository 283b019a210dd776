"""Sources, precedence, origins, and the messages for what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from whetherman_edge import config
from whetherman_edge.config import Config, load_config
from whetherman_edge.errors import ConfigError


@pytest.fixture
def write(tmp_path):
    def run(text: str):
        path = tmp_path / "w.toml"
        path.write_text(text)
        return path

    return run


def test_every_key_is_documented_and_there_are_few():
    assert list(config.DOCS) == list(Config.__struct_fields__)
    assert len(config.DOCS) <= 30


def test_o07_settings_only_in_the_file_with_an_empty_environment(write):
    path = write('port = 9000\nmode = "enforce"\n[agents]\n"qwen*" = "q"\n')
    loaded = load_config({}, environ={}, path=path)
    assert (loaded.config.port, loaded.config.mode) == (9000, "enforce")
    assert loaded.config.profile_for_model("qwen3:4b") == "q"


def test_o07_flag_beats_env_beats_file_beats_default(write):
    path = write("port = 1\nprofile = 'file'\nmode = 'off'\n")
    environ = {"WHETHERMAN_PORT": "2", "WHETHERMAN_PROFILE": "env", "WHETHERMAN_CONFIG": str(path)}
    loaded = load_config({"port": "3"}, environ=environ)
    shown = loaded.shown()
    assert (loaded.config.port, shown["port"]["origin"]) == (3, "flag --port")
    assert (loaded.config.profile, shown["profile"]["origin"]) == ("env", "env WHETHERMAN_PROFILE")
    assert (loaded.config.mode, shown["mode"]["origin"]) == ("off", f"file {path}")
    assert (loaded.config.host, shown["host"]["origin"]) == ("127.0.0.1", "default")


def test_an_empty_variable_counts_as_not_set():
    assert load_config({}, environ={"WHETHERMAN_UPSTREAM": ""}).shown()["upstream"]["origin"] == "default"


def test_secrets_are_masked():
    loaded = load_config({}, environ={"WHETHERMAN_API_KEY": "sesame", "WHETHERMAN_UPSTREAM_API_KEY": "open"})
    assert "sesame" not in str(loaded.shown())
    assert "open" not in str([entry["value"] for entry in loaded.shown().values()])


def test_lists_and_tables_from_the_environment():
    environ = {"WHETHERMAN_ALWAYS_KEEP": "memory_*, ask", "WHETHERMAN_AGENTS": "gpt-*=cloud,m=local"}
    loaded = load_config({}, environ=environ).config
    assert loaded.always_keep == ("memory_*", "ask")
    assert loaded.agents == {"gpt-*": "cloud", "m": "local"}


def test_the_exact_model_wins_over_the_longest_glob():
    agents = Config(agents={"q*": "short", "qwen*": "long", "qwen3": "exact"})
    assert [agents.profile_for_model(m) for m in ("qwen3", "qwen2", "q", "x")] == ["exact", "long", "short", ""]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("prot = 1\n", ["unknown key 'prot'", "did you mean 'port'"]),
        ("zzzz = 1\n", ["unknown key 'zzzz'", "known keys", "upstream_kind"]),
        ('port = "x"\n', ["key 'port'", "an integer in 0..65,535", "'x' (a string)"]),
        ("port = 70000\n", ["key 'port'", "70000"]),
        ("loop_guard = 1\n", ["key 'loop_guard'", "true or false", "1 (an integer)"]),
        ('mode = "on"\n', ["key 'mode'", "off, shadow, enforce"]),
        ("always_keep = 'x'\n", ["key 'always_keep'", "a list of strings"]),
        ("agents = 3\n", ["key 'agents'", "a table"]),
        ("api_key = 3\n", ["key 'api_key'", "a string"]),
        ("gate_deadline_ms = 5000\n", ["gate_deadline_ms", "1..3,000"]),
        ("port = \n", ["syntax error", "line 1"]),
        ('upstream = "localhost:11434"\n', ["upstream", "http://HOST:PORT"]),
        ('listen = "/run/x"\n', ["listen", "unix:PATH"]),
    ],
)
def test_a_wrong_file_is_named_with_key_expected_and_got(write, text, parts):
    with pytest.raises(ConfigError) as caught:
        load_config({}, environ={}, path=write(text))
    for part in parts:
        assert part in str(caught.value)


def test_a_wrong_secret_is_not_shown(write):
    with pytest.raises(ConfigError) as caught:
        load_config({}, environ={}, path=write("api_key = ['sesame']\n"))
    assert "sesame" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "environ", "parts"),
    [
        ({"port": "x"}, {}, ["flag --port", "an integer", "'x'"]),
        ({}, {"WHETHERMAN_MODE": "loud"}, ["WHETHERMAN_MODE", "off, shadow, enforce"]),
        ({"upstream_kind": "olama"}, {}, ["flag --upstream-kind", "ollama"]),
        ({}, {"WHETHERMAN_LOOP_GUARD": "maybe"}, ["WHETHERMAN_LOOP_GUARD", "true or false"]),
        ({}, {"WHETHERMAN_AGENTS": "nope"}, ["WHETHERMAN_AGENTS", "GLOB=PROFILE"]),
        ({}, {"WHETHERMAN_TOOLS": '{"x": {"usd": ' + "1" * 5_000 + "}}"}, ["WHETHERMAN_TOOLS", "a JSON object"]),
        ({}, {"WHETHERMAN_CONFIG": "/nowhere/x.toml"}, ["/nowhere/x.toml", "none there"]),
    ],
)
def test_a_wrong_flag_or_variable_is_named(flags, environ, parts):
    with pytest.raises(ConfigError) as caught:
        load_config(flags, environ=environ)
    for part in parts:
        assert part in str(caught.value)


def test_a_path_that_cannot_be_looked_at_is_a_wrong_setting(monkeypatch):
    with pytest.raises(ConfigError, match="cannot be looked for"):
        load_config({}, environ={}, path="x" * 5_000)

    def denied(_path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_file", denied)
    with pytest.raises(ConfigError, match="Permission denied"):
        load_config({}, environ={})
