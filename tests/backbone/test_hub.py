"""``model install NAME --from``: a Hugging Face folder, and a hub that breaks off, refuses, or sends something else."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.convert.tiny_gemma import write_base
from whetherman_edge.backbone import hub, store
from whetherman_edge.backbone.progress import Silent
from whetherman_edge.cli import main
from whetherman_edge.errors import ArtifactError, EnvironmentFault, UsageError


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("WHETHERMAN_MODELS", str(tmp_path / "models"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    write_base(tmp_path / "base")
    return tmp_path / "base"


class Quiet(BaseHTTPRequestHandler):
    def log_message(self, *_args):
        pass


@contextlib.contextmanager
def serving(handler):
    """A server of one kind of answer; ``asked``: what the handler noted down of its requests."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.asked = []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def served(folder, monkeypatch):
    """The folder as a hub; ``server.cut``: bytes after which a file breaks off; ``status``: what it refuses with;
    ``elsewhere``: where the weights lie, if not here."""

    class Handler(Quiet):
        def do_GET(self):
            server.asked.append((self.path, self.headers.get("Range"), self.headers.get("Authorization")))
            file = folder / self.path.rpartition("/")[2]
            if server.status:
                return self.send_error(server.status)
            if not file.is_file():
                return self.send_error(404)
            data = file.read_bytes()
            if server.elsewhere and file.suffix == ".safetensors":
                self.send_response(302)
                self.send_header("Location", f"{server.elsewhere}{self.path}")
                self.send_header("X-Linked-ETag", f'"{server.sha256 or hashlib.sha256(data).hexdigest()}"')
                self.send_header("Content-Length", "0")
                return self.end_headers()
            start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").removesuffix("-"))
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(data) - start))
            self.send_header("X-Linked-ETag", f'"{server.sha256 or hashlib.sha256(data).hexdigest()}"')
            self.end_headers()
            self.wfile.write(data[start:][: server.cut])
            return None

    with serving(Handler) as server:
        server.cut, server.status, server.sha256, server.elsewhere = None, 0, "", ""
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        yield server


def test_a_folder_becomes_an_imported_gguf(folder, capsys):
    assert main(["model", "install", "mine", "--from", str(folder)]) == 0
    path = store.require("mine").path
    assert capsys.readouterr().out.strip() == str(path)
    store.check_gguf(path)


def test_the_hub_s_files_are_fetched_once_with_the_token(served, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    got = hub.fetch_folder("owner/name", Silent())
    assert {file.name for file in got.iterdir()} >= {"config.json", "model.safetensors"}
    assert {authorization for _, _, authorization in served.asked} == {"Bearer secret"}
    n = len([path for path, _, _ in served.asked if path.endswith("model.safetensors")])
    hub.fetch_folder("owner/name", Silent())
    assert len([path for path, _, _ in served.asked if path.endswith("model.safetensors")]) == n == 1


@pytest.fixture
def store_of_files(folder):
    """Where the hub keeps large files: another host, which names no digest. ``asked``: authorizations it was sent."""

    class Handler(Quiet):
        def do_GET(self):
            server.asked.append(self.headers.get("Authorization"))
            data = (folder / self.path.rpartition("/")[2]).read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    with serving(Handler) as server:
        yield server


def test_where_large_files_lie_nobody_sees_the_token(served, store_of_files, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    served.elsewhere = f"http://127.0.0.1:{store_of_files.server_address[1]}"
    got = hub.fetch_folder("owner/name", Silent())
    assert (got / "model.safetensors").is_file()
    assert store_of_files.asked == [None]
    assert {authorization for _, _, authorization in served.asked} == {"Bearer secret"}


def test_large_files_are_checked_by_what_the_hub_says_of_them(served, store_of_files, monkeypatch):
    fetch = hub._fetch

    def wrong_for_weights(repository, file, *rest, **options):
        served.sha256 = "0" * 64 if file.endswith(".safetensors") else ""
        return fetch(repository, file, *rest, **options)

    monkeypatch.setattr(hub, "_fetch", wrong_for_weights)
    served.elsewhere = f"http://127.0.0.1:{store_of_files.server_address[1]}"
    with pytest.raises(ArtifactError, match=r"expected sha256 0+ for owner/name/model.safetensors"):
        hub.fetch_folder("owner/name", Silent())
    assert not (store.models_dir() / "hub" / "owner--name" / "model.safetensors").exists()


def test_a_download_that_breaks_off_goes_on_where_it_was(served, folder):
    served.cut = 40
    with pytest.raises(EnvironmentFault, match="run the command again"):
        hub.fetch_folder("owner/name", Silent())
    served.cut = None
    got = hub.fetch_folder("owner/name", Silent())
    assert (got / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    assert "bytes=40-" in [asked for _, asked, _ in served.asked]


def test_other_bytes_than_the_hub_names_are_refused(served):
    served.sha256 = "0" * 64
    with pytest.raises(ArtifactError, match="expected sha256"):
        hub.fetch_folder("owner/name", Silent())
    assert not (store.models_dir() / "hub" / "owner--name" / "config.json").exists()


@pytest.mark.parametrize(
    ("status", "says"), [(401, "HF_TOKEN"), (403, "HF_TOKEN"), (500, "answered 500"), (404, "404")]
)
def test_a_refusal_says_what_to_do(served, status, says):
    served.status = status
    with pytest.raises(EnvironmentFault, match=says):
        hub.fetch_folder("owner/name", Silent())


def test_a_hub_that_cannot_be_reached(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(EnvironmentFault, match="expected to reach"):
        hub.import_from("x", "hf", Silent())


@pytest.mark.parametrize("source", ["hf:", "hf:../etc/passwd", "hf:one", "hf:a/b/c"])
def test_a_repository_has_an_owner_and_a_name(source, monkeypatch):
    if source == "hf:":
        monkeypatch.setattr(hub, "fetch_folder", lambda repository, _progress: pytest.fail(repository))
        with pytest.raises(pytest.fail.Exception, match="google/functiongemma-270m-it"):
            hub.import_from("x", source, Silent())
        return
    with pytest.raises(UsageError, match="OWNER/NAME"):
        hub.import_from("x", source, Silent())


def test_a_folder_of_something_else(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"config\.json"):
        hub.import_from("x", str(tmp_path / "empty"), Silent())
