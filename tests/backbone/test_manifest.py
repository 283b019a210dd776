"""The manifest: read as it is written, refused as a whole when anything does not fit."""

from __future__ import annotations

import hashlib
import json

import pytest

from tests.fakes.backbone import SHA256, replaced, write_artifact
from whetherman_edge.backbone import manifest as manifests
from whetherman_edge.backbone.manifest import read_manifest
from whetherman_edge.errors import ArtifactError


def test_what_is_written_is_read(tmp_path):
    found = read_manifest(write_artifact(tmp_path))
    assert (found.base.name, found.layer, found.n_layers, found.quantisation) == ("gemma-3-270m", 3, 5, "q8_0")
    assert [(tau.answer, tau.ask) for tau in found.default_tau] == [(0.5, None)] * 3
    assert found.ask_band.high == 1.0
    assert found.adapter_path is None
    assert hashlib.sha256(found.read_heads()).hexdigest() == found.heads.sha256


ADAPTER = {"file": "a.safetensors", "sha256": SHA256, "r": 16, "alpha": 32.0, "rslora": True}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"format": "other"}, "expected whetherman-backbone version 3"),
        ({"version": 99}, "version 99"),
        ({"classes": ["ANSWER", "ACT", "ASK", "DECLINE"]}, "the classes"),
        ({"layer": 5}, "below n_layers"),
        ({"layer": -1}, "below n_layers"),
        ({"ask_band": {"low": 0.9, "high": 0.2}}, "ask_band"),
        ({"ask_band": {"low": 0.0, "high": 1.5}}, "ask_band"),
        ({"default_tau": [{"ANSWER": 1.5}, {}, {}]}, "default_tau"),
        ({"default_tau": [{"ANSWER": {"first": 0.5}}, {}, {}]}, "not a manifest of this version"),
        ({"default_tau": {"ANSWER": 0.5}}, "not a manifest of this version"),
        ({"base": {"name": "x", "sha256": "short"}}, "64 lower-case"),
        ({"heads": {"file": "../up.safetensors", "sha256": SHA256}}, "plain file names"),
        ({"adapter": {**ADAPTER, "r": 0}}, "rank"),
        ({"adapter": {**ADAPTER, "file": "/etc/passwd"}}, "plain file names"),
        ({"prompt_style": "free"}, "not a manifest of this version"),
        ({"pooling": "mean"}, "not a manifest of this version"),
        ({"quantisation": "q2_k"}, "not a manifest of this version"),
        ({"tools_max": 0}, "above 0"),
    ],
)
def test_what_means_nothing_is_refused(tmp_path, changed, says):
    with pytest.raises(ArtifactError, match=says) as refused:
        read_manifest(write_artifact(tmp_path, **changed))
    assert "backbone.json" in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"{}", b"[" * 100_000])
def test_what_is_no_json_object_is_refused(tmp_path, content):
    path = tmp_path / "backbone.json"
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match="not a manifest"):
        read_manifest(path)


def test_missing_and_oversized_files(tmp_path):
    with pytest.raises(ArtifactError, match="is missing"):
        read_manifest(tmp_path / "backbone.json")
    (tmp_path / "backbone.json").write_bytes(b" " * (manifests.FILE_BYTES_MAX + 1))
    with pytest.raises(ArtifactError, match="expected at most"):
        read_manifest(tmp_path / "backbone.json")


def test_heads_that_were_changed_are_refused(tmp_path):
    found = read_manifest(write_artifact(tmp_path))
    (tmp_path / "backbone.safetensors").write_bytes(b"other")
    with pytest.raises(ArtifactError, match="expected sha256"):
        found.read_heads()
    (tmp_path / "backbone.safetensors").unlink()
    with pytest.raises(ArtifactError, match="cannot be read"):
        found.read_heads()


def test_an_adapter_that_was_changed_is_refused(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"adapter")
    digest = hashlib.sha256(b"adapter").hexdigest()
    found = read_manifest(write_artifact(tmp_path, adapter={**ADAPTER, "sha256": digest}))
    found.check_adapter()
    assert found.adapter_path == tmp_path / "a.safetensors"
    (tmp_path / "a.safetensors").write_bytes(b"adapted")
    with pytest.raises(ArtifactError, match="expected sha256"):
        found.check_adapter()


def test_other_stages_than_those_it_was_fitted_on_are_refused(tmp_path):
    found = read_manifest(write_artifact(tmp_path, gate="a" * 64, router="b" * 64))
    found.check_stages("a" * 64, "b" * 64)
    with pytest.raises(ArtifactError, match="fitted on static gate"):
        found.check_stages("d" * 64, "b" * 64)
    with pytest.raises(ArtifactError, match="fitted on router"):
        found.check_stages("a" * 64, "d" * 64)
    with pytest.raises(ArtifactError, match="trained on base"):
        found.check_base("d" * 64)


def test_a_new_head_needs_no_new_weights_but_is_another_artifact(tmp_path):
    found = read_manifest(write_artifact(tmp_path))
    other = replaced(found, heads=replaced(found.heads, sha256="e" * 64))
    assert other.weights_key == found.weights_key
    assert other.sha256 != found.sha256
    for field, value in [("quantisation", "q4_0"), ("n_layers", 9), ("adapter", manifests.Adapter(**ADAPTER))]:
        assert replaced(found, **{field: value}).weights_key != found.weights_key
    assert replaced(found, dev={"n": 1}).sha256 == found.sha256


def test_the_variable_names_another_artifact(tmp_path, monkeypatch):
    monkeypatch.setenv("WHETHERMAN_BACKBONE", str(write_artifact(tmp_path, layer=1)))
    assert read_manifest().layer == 1


def test_the_packaged_artifact_is_whole():
    found = read_manifest(manifests.DEFAULT_PATH)
    found.read_heads()
    found.check_adapter()
    assert json.loads(manifests.DEFAULT_PATH.read_text())["dev"] == found.dev
