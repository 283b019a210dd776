"""``whetherman-edge model …`` as a user types it."""

from __future__ import annotations

import pytest

from whetherman_edge.cli import main

GGUF = b"GGUF\x03\x00\x00\x00and the rest"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("WHETHERMAN_MODELS", str(tmp_path / "models"))
    return tmp_path


def test_list_names_what_is_known_and_where(capsys, folder):
    assert main(["model", "list"]) == 0
    out = capsys.readouterr().out
    assert "smollm2-135m" in out
    assert "Gemma Terms of Use" in out
    assert "installed" not in out
    assert f"directory: {folder / 'models'}" in out


def test_import_path_verify_list(capsys, folder):
    (folder / "file.gguf").write_bytes(GGUF)
    assert main(["model", "install", "mine", "--from", str(folder / "file.gguf")]) == 0
    path = capsys.readouterr().out.strip()
    assert main(["model", "path", "mine"]) == 0
    assert capsys.readouterr().out.strip() == path
    assert main(["model", "verify"]) == 0
    assert "mine: ok, sha256 " in capsys.readouterr().out
    assert main(["model", "list"]) == 0
    assert "imported" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["path", "qwen-0.5b"], 3, "model install qwen-0.5b"),
        (["path", "nobody"], 2, "known: smollm2-135m"),
        (["verify", "qwen-0.5b"], 3, "model install qwen-0.5b"),
        (["install", "nobody"], 2, "--from FILE"),
        (["install", "mine", "--from", "nowhere.gguf"], 2, "nowhere.gguf"),
        (["install", "../x", "--from", __file__], 3, "expected a GGUF file"),
        (["install", "mine", "--from", __file__], 3, "expected a GGUF file"),
    ],
)
def test_errors_have_a_message_and_an_exit_code(capsys, arguments, code, message):
    assert main(["model", *arguments]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.startswith("whetherman-edge: ")
    assert captured.err.count("\n") == 1


def test_verify_with_nothing_installed(capsys):
    assert main(["model", "verify"]) == 0
    assert "nothing is installed" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["model"], ["model", "frobnicate"], ["model", "install"]])
def test_usage(arguments):
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
