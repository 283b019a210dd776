"""The backbone's own weights: made once, under the manifest's key, whole or not at all. Deriving is a stand-in here."""

from __future__ import annotations

import hashlib
import os
import sys
import time

import pytest

from tests.fakes.backbone import write_artifact
from whetherman_edge.backbone import derive, install, llama_build, store
from whetherman_edge.backbone.cli import KNOWN
from whetherman_edge.backbone.manifest import read_manifest
from whetherman_edge.backbone.progress import Silent
from whetherman_edge.cli import main
from whetherman_edge.errors import ArtifactError, EnvironmentFault

GGUF = b"GGUF\x03\x00\x00\x00base"


@pytest.fixture
def manifest(tmp_path, monkeypatch):
    """An artifact on an imported base named ``tiny``; what is derived is the base with a mark."""
    monkeypatch.setenv("WHETHERMAN_MODELS", str(tmp_path / "models"))
    (tmp_path / "tiny.gguf").write_bytes(GGUF)
    store.import_file("tiny", tmp_path / "tiny.gguf", Silent())
    path = write_artifact(tmp_path, base={"name": "tiny", "sha256": hashlib.sha256(GGUF).hexdigest()})
    monkeypatch.setenv("WHETHERMAN_BACKBONE", str(path))
    return read_manifest()


@pytest.fixture
def derived(monkeypatch):
    """Calls of ``derive.derive``."""
    calls = []

    def fake(base, target, *, kind, n_layers, adapter=None, scale=None, progress=None):
        calls.append((base.name, kind, n_layers, adapter))
        progress(1, 1)
        target.write_bytes(base.read_bytes() + kind.encode())
        return store.sha256_of(target)

    monkeypatch.setattr(derive, "derive", fake)
    return calls


def test_made_once_named_by_the_key_and_found_again(manifest, derived):
    assert install.find_backbone(manifest) is None
    made = install.ensure_backbone(manifest, Silent())
    assert made.path.name == f"backbone-{manifest.weights_key}.gguf"
    assert made.path.read_bytes() == GGUF + b"q8_0"
    assert install.ensure_backbone(manifest, Silent()) == made
    assert derived == [("tiny.gguf", "q8_0", 5, None)]
    install.ensure_backbone(manifest, Silent(), force=True)
    assert len(derived) == 2
    assert [found.name for found in store.imported()] == ["tiny"]  # what is derived is no model of its own


@pytest.mark.parametrize(("days", "kept"), [(13, True), (15, False)])
def test_weights_of_an_earlier_version_go_when_they_have_long_been_unused(manifest, derived, days, kept):
    folder = store.models_dir() / "derived"
    folder.mkdir(parents=True)
    names = [f"backbone-0123456789abcdef{end}" for end in (".gguf", ".gguf.json", ".gguf.lock", ".prefixes")]
    for name in names:
        (folder / name).write_bytes(b"old")
        os.utime(folder / name, (0, 0))
    os.utime(folder / names[-1], (time.time() - days * 86_400,) * 2)  # a daemon wrote them when it stopped
    made = install.ensure_backbone(manifest, Silent())
    assert [(folder / name).exists() for name in names] == [kept] * 4
    assert install.find_backbone(manifest) == made


def test_verify_finds_a_changed_file(manifest, derived):
    made = install.ensure_backbone(manifest, Silent())
    assert install.verify_backbone(manifest) == made
    changed = bytearray(made.path.read_bytes())
    changed[-1] ^= 1
    made.path.write_bytes(bytes(changed))
    with pytest.raises(ArtifactError, match="has changed"):
        install.verify_backbone(manifest)
    made.path.write_bytes(b"short")
    assert install.find_backbone(manifest) is None


def test_a_break_leaves_nothing_under_the_final_name(manifest, monkeypatch):
    def broken(*_args, **_keys):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(derive, "derive", broken)
    with pytest.raises(EnvironmentFault, match="No space left"):
        install.ensure_backbone(manifest, Silent())
    assert install.find_backbone(manifest) is None


def test_what_a_killed_run_left_half_made_goes(manifest, derived):
    folder = store.models_dir() / install.FOLDER
    folder.mkdir(parents=True)
    name = f"backbone-{manifest.weights_key}.gguf"
    for left in (f".{name}.x1_y.partial", f".{name}.f16.abc.partial", f"{name}.f16", ".another.gguf.abc.partial"):
        (folder / left).write_bytes(b"half")
    install.ensure_backbone(manifest, Silent())
    assert sorted(file.name for file in folder.iterdir()) == [
        ".another.gguf.abc.partial",
        name,
        f"{name}.json",
        f"{name}.lock",
    ]


def test_another_base_than_it_was_trained_on_is_refused(manifest, derived, tmp_path):
    (tmp_path / "other.gguf").write_bytes(GGUF + b"!")
    store.import_file("tiny", tmp_path / "other.gguf", Silent())
    with pytest.raises(ArtifactError, match="trained on base"):
        install.ensure_backbone(manifest, Silent())
    assert derived == []


def test_without_an_adapter_on_its_own_quantisation_the_base_itself_runs(manifest, derived, tmp_path):
    base = {"name": "tiny", "sha256": hashlib.sha256(GGUF).hexdigest()}
    same = read_manifest(write_artifact(tmp_path, base=base, quantisation="q4_k_m"))
    assert install.ensure_backbone(same, Silent()).path.name == "tiny.gguf"
    assert install.find_backbone(same).path.name == "tiny.gguf"
    assert derived == []


def test_requiring_says_what_installs_it(manifest, derived, monkeypatch):
    with pytest.raises(ArtifactError, match="model install gemma"):
        install.require_backbone(manifest)
    install.ensure_backbone(manifest, Silent())
    assert install.require_backbone(manifest).is_file()
    monkeypatch.setattr(install.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(EnvironmentFault, match="llama-cpp-python"):
        install.require_backbone(manifest)


def test_the_command_line_knows_it(manifest, derived, capsys):
    assert KNOWN.startswith("gemma, ")
    assert main(["model", "path", "gemma"]) == 3
    assert main(["model", "install", "gemma", "--weights-only"]) == 0
    path = capsys.readouterr().out.strip()
    assert main(["model", "path", "gemma"]) == 0
    assert main(["model", "verify", "gemma"]) == 0
    assert main(["model", "list"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(path)
    assert "gemma: ok" in out
    assert "Gemma Terms of Use" in out


# --- llama.cpp ---


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("  [12/87] Building CXX object ggml/src/ggml.cpp.o", (12, 87)),
        ("[  7%] Building C object", (7, 100)),
        ("Collecting llama-cpp-python", None),
        ("", None),
    ],
)
def test_steps_of_a_build_are_read(line, step):
    assert llama_build.step_of(line) == step


class Heard(Silent):
    def __init__(self):
        self.steps, self.notes = [], []

    def begin(self, label, total_bytes, done_bytes, unit="bytes"):
        self.steps.append((label, total_bytes, unit))

    def at(self, done_bytes):
        self.steps.append(done_bytes)

    def note(self, text):
        self.notes.append(text)


def build(monkeypatch, script: str, *, compiler: bool = True, found_after: bool = True) -> Heard:
    heard, ran = Heard(), []
    monkeypatch.setattr(llama_build, "is_installed", lambda: bool(ran) and found_after)
    monkeypatch.setattr(llama_build, "has_compiler", lambda: compiler)
    find = llama_build.importlib.util.find_spec
    hidden = lambda name, *rest: None if name == "llama_cpp" else find(name, *rest)  # noqa: E731
    monkeypatch.setattr(llama_build.importlib.util, "find_spec", hidden)

    def command():
        ran.append(True)
        return [sys.executable, "-c", script]

    monkeypatch.setattr(llama_build, "command", command)
    llama_build.ensure(heard)
    return heard


def test_a_build_shows_how_far_it_is(monkeypatch):
    heard = build(monkeypatch, "print('x'); [print(f'[{n}/40] Building') for n in range(1, 41)]")
    assert heard.steps[0] == ("llama.cpp", 40, "steps")
    assert heard.steps[1:] == list(range(1, 41))
    assert any("6 to 8 minutes" in note for note in heard.notes)


def test_a_build_that_fails_says_its_last_words(monkeypatch):
    with pytest.raises(EnvironmentFault, match=r"exit 1.*no cmake.*static stage serves"):
        build(monkeypatch, "import sys; print('error: no cmake'); sys.exit(1)")


def test_without_a_compiler_nothing_is_tried(monkeypatch):
    with pytest.raises(EnvironmentFault, match=r"apt-get install g\+\+"):
        build(monkeypatch, "raise SystemExit('must not run')", compiler=False)


def test_a_build_that_installs_nothing_is_an_error(monkeypatch):
    with pytest.raises(EnvironmentFault, match="cannot be found"):
        build(monkeypatch, "pass", found_after=False)


def test_the_compiler_may_be_named(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert not llama_build.has_compiler()
    monkeypatch.setenv("CXX", f"{os.path.realpath(sys.executable)} -O2")
    assert llama_build.has_compiler()
