"""``doctor``: each check finds its own fault, and its line says what to do."""

from __future__ import annotations

import asyncio
import http.server
import importlib.util
import json
import socket
import threading

import pytest

from tests.ledger.entries import entry
from tests.profiles.samples import profile_of
from whetherman_edge import cli, cli_doctor
from whetherman_edge import cli_doctor_checks as checks
from whetherman_edge.config import load_config
from whetherman_edge.gate.static_gate import packaged_sha256
from whetherman_edge.ledger import records
from whetherman_edge.ledger.records import Ledger
from whetherman_edge.profiles import store
from whetherman_edge.profiles.schema import Agent, EngineArtifact, serialize_profile
from whetherman_edge.service import units


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "state"))
    monkeypatch.setattr(records, "FLUSH_EVERY_S", 0.0)
    return tmp_path / "state"


@pytest.fixture
def server():
    """A model server of scripted GET answers: ``answers[path] = value``; ``dates`` overrides the Date header."""
    answers: dict[str, object] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            value = answers.get(self.path, {})
            body = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response_only(200 if self.path in answers else 404)
            self.send_header("Date", str(answers.get("date", self.date_time_string())))
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_args):
            pass

    one = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=one.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{one.server_address[1]}", answers
    one.shutdown()
    thread.join()
    one.server_close()


def record(*entries):
    ledger = Ledger()
    for one in entries:
        ledger.record(one)
    ledger.close()
    assert ledger.written == len(entries)


def loaded(tmp_path, text="", mode=0o600, **flags):
    file = tmp_path / "c.toml"
    file.write_text(text)
    file.chmod(mode)
    return load_config(flags, environ={}, path=file)


def test_a_variable_that_nobody_reads_is_named(monkeypatch):
    assert checks.environment()[0] == "ok"
    monkeypatch.setenv("WHETHERMAN_UPSTEAM", "x")
    assert checks.environment() == ("fail", "WHETHERMAN_UPSTEAM is no setting; did you mean WHETHERMAN_UPSTREAM?")


@pytest.mark.parametrize(
    ("text", "mode", "found"),
    [
        ("port = 1", 0o644, "ok"),
        ('api_key = "k"', 0o600, "ok"),
        ('api_key = "k"', 0o644, "chmod 600"),
        ("port = 1", 0o666, "chmod go-w"),
    ],
)
def test_a_key_must_not_lie_open(tmp_path, text, mode, found):
    (tmp_path / "state").mkdir()
    state, detail = checks.permissions(loaded(tmp_path, text, mode))
    assert found == state or (state == "fail" and found in detail)


def test_an_unsafe_ledger_is_named(tmp_path, state):
    state.mkdir()
    (state / records.NAME).symlink_to("/etc/passwd")
    assert checks.permissions(loaded(tmp_path))[0] == "fail"


def test_a_damaged_ledger_and_one_of_the_future_are_named(state):
    assert checks.ledger()[0] == "ok"
    record(entry())
    assert checks.ledger()[0] == "ok"
    record(entry(at_s=4e9))
    assert "clock" in checks.ledger()[1]
    (state / records.NAME).write_bytes(b"rubbish" * 1000)
    for ending in ("-wal", "-shm"):
        (state / (records.NAME + ending)).unlink(missing_ok=True)
    assert checks.ledger()[0] == "fail"


def test_a_ledger_is_found_under_any_name_and_before_its_table(tmp_path, monkeypatch):
    """The writer makes the file first; "?" and "%41" mean something else in SQLite's URIs."""
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "50%41?x"))
    path = records.default_path()
    path.parent.mkdir()
    path.touch(0o600)
    assert checks.ledger()[0] == "ok"
    record(entry(request_bytes=400_000))
    assert checks.ledger()[1].startswith("1 decisions")
    assert checks._largest_request_bytes() == 400_000


def test_an_embedded_server_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    finding = cli_doctor._guarded("upstream", lambda: cli_doctor._upstream("embedded", "auto"))
    assert (finding.state, "whetherman-edge[embedded]" in finding.detail) == ("fail", True)


def test_an_ipv6_port_is_asked_who_has_it(tmp_path, monkeypatch):
    asked = []

    async def get(url, _path):
        asked.append(url)
        return {"upstream_kind": "openai", "version": "9"}, None

    monkeypatch.setattr(checks, "_get", get)
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        number = taken.getsockname()[1]
        assert checks.port(loaded(tmp_path, host="::1", port=str(number)))[0] == "ok"
    assert asked == [f"http://[::1]:{number}"]


def test_a_port_is_free_ours_or_taken(tmp_path, server):
    url, answers = server
    number = url.rpartition(":")[2]
    assert checks.port(loaded(tmp_path, port=number))[0] == "fail"
    answers["/health"] = {"upstream_kind": "openai", "version": "9"}
    assert checks.port(loaded(tmp_path, port=number)) == ("ok", f"127.0.0.1:{number} is served by whetherman-edge 9")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = probe.getsockname()[1]
    assert checks.port(loaded(tmp_path, port=str(free)))[0] == "ok"


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("ollama", "/api/tags", {"models": [{"name": "coder:1b", "details": {"quantization_level": "Q4_K_M"}}, 7]}),
        ("lmstudio", "/api/v0/models", {"data": [{"id": "coder-1b", "quantization": "Q4_K_M"}, {"id": 3}]}),
        ("llamacpp", "/v1/models", {"data": [{"id": "coder-1b"}]}),
        ("openai", "/v1/models", {"data": [{"id": "coder-1b-q4_k_m"}]}),
    ],
)
def test_a_served_model_that_was_measured_gets_its_line(tmp_path, server, monkeypatch, kind, path, value):
    url, answers = server
    answers[path] = value
    answers["/props"] = {"model_path": "/models/Coder-1B-Q4_K_M.gguf"}
    agent = Agent("llamacpp", "coder-1b", "Q4_K_M")
    own = profile_of(agent=agent, engine=EngineArtifact("static", packaged_sha256()))
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "own.json").write_bytes(serialize_profile(own))
    monkeypatch.setattr(store, "default_dirs", lambda: (tmp_path / "profiles",))
    state, detail = checks.profiles(loaded(tmp_path), [(url, kind)])
    assert state == "note"
    assert '= "own" under [agents] in ' in detail
    assert "was measured" in detail
    model = detail.partition(" ")[0]
    given = loaded(tmp_path, f'[agents]\n"{model}" = "own"\n')
    assert checks.profiles(given, [(url, kind)])[0] == "ok"
    assert checks.profiles(loaded(tmp_path, 'profile = "own"'), [(url, kind)])[0] == "ok"


def test_other_weights_than_those_measured_are_named_though_a_line_gives_them_the_profile(
    tmp_path, server, monkeypatch
):
    url, answers = server
    answers["/api/tags"] = {"models": [{"name": "coder:1b", "details": {"quantization_level": "Q8_0"}}]}
    own = profile_of(agent=Agent("llamacpp", "coder-1b", "Q4_K_M"), engine=EngineArtifact("static", packaged_sha256()))
    (tmp_path / "own.json").write_bytes(serialize_profile(own))
    monkeypatch.setattr(store, "default_dirs", lambda: (tmp_path,))
    state, detail = checks.profiles(loaded(tmp_path, '[agents]\n"coder:1b" = "own"\n'), [(url, "ollama")])
    assert state == "note"
    assert "proves nothing here" in detail


def test_a_server_that_answers_nonsense_has_no_models(tmp_path, server, monkeypatch):
    url, answers = server
    monkeypatch.setattr(store, "default_dirs", lambda: (tmp_path,))
    for kind, path in (("ollama", "/api/tags"), ("lmstudio", "/api/v0/models"), ("llamacpp", "/v1/models")):
        for value in ([], {"models": 3, "data": "x"}, None):
            answers[path] = answers["/props"] = value
            assert checks.profiles(loaded(tmp_path), [(url, kind)])[0] == "ok"


def test_an_upstream_that_is_down_is_a_fault_with_its_fix(server):
    url, answers = server
    answers["/v1/models"] = {"object": "list", "data": [{"id": "m", "owned_by": "vllm"}]}
    assert checks.upstream(url, "auto")[0] == "ok"
    assert "vllm" in checks.upstream(url, "auto")[1]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        dead = f"http://127.0.0.1:{probe.getsockname()[1]}"
    state, detail = checks.upstream(dead, "auto")
    assert (state, "--upstream" in detail) == ("fail", True)


@pytest.mark.parametrize(
    ("kind", "path", "value", "n_ctx"),
    [
        ("llamacpp", "/props", {"default_generation_settings": {"n_ctx": 2048}}, 2048),
        ("ollama", "/api/ps", {"models": [{"context_length": 8192}, {"context_length": 2048}]}, 2048),
        ("ollama", "/api/ps", {"models": []}, checks.OLLAMA_CONTEXT),
        ("ollama", "/api/ps", {"models": None}, checks.OLLAMA_CONTEXT),
        ("llamacpp", "/props", [], 0),
        ("openai", "/props", {}, 0),
    ],
)
def test_tools_larger_than_the_context_are_named(server, monkeypatch, kind, path, value, n_ctx):
    monkeypatch.delenv("OLLAMA_CONTEXT_LENGTH", raising=False)
    url, answers = server
    answers[path] = value
    assert asyncio.run(checks._context_tokens(url, kind))[0] == n_ctx
    assert checks.context(url, kind)[0] == "ok"
    record(entry(request_bytes=100_000))
    state, detail = checks.context(url, kind)
    assert state == ("fail" if n_ctx else "ok")
    if n_ctx:
        assert "cut off" in detail


@pytest.mark.parametrize(
    ("python", "config", "drop_in", "directive"),
    [
        ("/opt/w/bin/python", "/etc/whetherman/config.toml", "", ""),
        ("/home/me/venv/bin/python", "/etc/whetherman/config.toml", "", "ProtectHome"),
        ("/opt/w/bin/python", "/root/c.toml", "", "ProtectHome"),
        ("/opt/w/bin/python", "/tmp/c.toml", "", "PrivateTmp"),
        ("/opt/w/bin/python", "/srv/c.toml", "[Service]\nInaccessiblePaths=/srv\n", "InaccessiblePaths"),
        ("/home/me/venv/bin/python", "/etc/c.toml", "[Service]\nBindReadOnlyPaths=/home/me/venv\n", ""),
        ("/home/me/venv/bin/python", "/etc/c.toml", "[Service]\nProtectHome=no\n", ""),
        (
            "/opt/w/bin/python",
            "/etc/c.toml",
            "[Service]\nEnvironment=WHETHERMAN_MODELS=/home/me/models\n",
            "ProtectHome",
        ),
    ],
)
def test_o03_a_directive_that_hides_a_file_is_named(tmp_path, python, config, drop_in, directive):
    (tmp_path / "whetherman-edge.service").write_text(units.system_service(units.Place(python=python, config=config)))
    if drop_in:
        (tmp_path / "whetherman-edge.service.d").mkdir()
        (tmp_path / "whetherman-edge.service.d" / "override.conf").write_text(drop_in)
    state, detail = checks.unit([str(tmp_path)])
    assert state == ("fail" if directive else "ok"), detail
    assert directive in detail


def test_a_clock_that_is_off_is_named(monkeypatch, server):
    url, answers = server
    assert checks.clock(url)[0] == "ok"
    answers["date"] = "Mon, 01 Jan 2001 00:00:00 GMT"
    assert checks.clock(url)[0] == "note"
    answers["/"] = b"Ollama is running"
    assert checks.clock(url)[0] == "note"
    monkeypatch.setattr(checks.time, "time", lambda: 1_000.0)
    assert "timedatectl" in checks.clock()[1]


def test_a_fault_is_exit_code_1_and_in_the_json(capsys, monkeypatch):
    monkeypatch.setattr(cli_doctor, "_CHECKS", (("environment", checks.environment), ("unit", checks.unit)))
    monkeypatch.setattr(cli_doctor, "_around", lambda _loaded: ())
    monkeypatch.setenv("WHETHERMAN_PROT", "1")
    assert cli.main(["doctor", "--json"]) == 1
    value = json.loads(capsys.readouterr().out)
    assert value["ok"] is False
    assert [one["name"] for one in value["checks"] if one["state"] == "fail"] == ["environment"]
