"""The loader accepts a whole file and answers everything else with ArtifactError."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from whetherman_edge.errors import ArtifactError
from whetherman_edge.router.artifact import FORMAT, open_artifact
from whetherman_edge.router.table import DEFAULT_PATH as SHIPPED
from whetherman_edge.router.table import RouterTable

anywhere = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150, deadline=None)


def test_shipped_file_is_within_its_budget_and_opens():
    artifact = open_artifact(SHIPPED)
    assert SHIPPED.stat().st_size <= 10_000_000
    assert artifact.array("table", "I8", 2).shape == (29528, 256)
    assert len(artifact.sha256) == 64


def test_arrays_are_read_only(tiny):
    rows = open_artifact(tiny).array("table", "I8", 2)
    with pytest.raises(ValueError, match="read-only"):
        rows[0, 0] = 1


def test_arrays_outlive_the_artifact(tiny):
    rows = open_artifact(tiny).array("table", "I8", 2)
    assert int(np.abs(rows.astype(int)).sum()) > 0


@anywhere
@given(cut=st.integers(min_value=0))
def test_every_truncation_is_refused(tiny, tmp_path, cut):
    content = tiny.read_bytes()
    short = tmp_path / "short"
    short.write_bytes(content[: cut % len(content)])
    with pytest.raises(ArtifactError):
        open_artifact(short)


@anywhere
@given(position=st.integers(min_value=0), flip=st.integers(1, 255))
def test_every_flipped_byte_is_refused_or_harmless(tiny, tmp_path, kernels, position, flip):
    content = bytearray(tiny.read_bytes())
    position %= len(content)
    content[position] ^= flip
    bad = tmp_path / "bad"
    bad.write_bytes(content)
    try:
        RouterTable.open(bad, kernels)
    except ArtifactError:
        return
    # Only a byte of the header that changes no section may pass: padding, or metadata beyond format, version, sha256.
    assert position < 8 + int.from_bytes(content[:8], "little")


@anywhere
@given(noise=st.binary(max_size=400))
def test_noise_is_refused(tmp_path, noise):
    path = tmp_path / "noise"
    path.write_bytes(noise)
    with pytest.raises(ArtifactError):
        open_artifact(path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@anywhere
@given(
    entry=st.fixed_dictionaries({}, optional={"dtype": json_values, "shape": json_values, "data_offsets": json_values})
    | json_values,
    rows=st.sampled_from(["table", "stem", "x"]),
)
def test_any_header_is_refused_or_read(tmp_path, entry, rows):
    data = bytes(range(64))
    header = {
        "__metadata__": {"format": FORMAT, "version": "1", "sha256": hashlib.sha256(data).hexdigest()},
        rows: entry,
    }
    raw = json.dumps(header).encode()
    path = tmp_path / "header"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    with pytest.raises(ArtifactError):
        open_artifact(path).array(rows, "I8", 2)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"dtype": "I8", "shape": [8, 8], "data_offsets": [0, 64]}, None),
        ({"dtype": "I8", "shape": [8, 9], "data_offsets": [0, 72]}, "outside the file"),
        ({"dtype": "I8", "shape": [8, 8], "data_offsets": [0, 63]}, "does not match its shape"),
        ({"dtype": "I8", "shape": [-8, -8], "data_offsets": [0, 64]}, "malformed"),
        ({"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}, "as I8 of rank 2"),
        ({"dtype": "I8", "shape": [64], "data_offsets": [0, 64]}, "as I8 of rank 2"),
        ({"dtype": "F16", "shape": [32], "data_offsets": [0, 64]}, "unknown dtype"),
        ({"dtype": "F32", "shape": [2, 2], "data_offsets": [1, 17]}, "not aligned"),
        ({"dtype": "I8", "shape": [True, 64], "data_offsets": [0, 64]}, "malformed"),
    ],
)
def test_bounds_of_a_section(tmp_path, entry, expected):
    data = bytes(64)
    header = {
        "__metadata__": {"format": FORMAT, "version": "1", "sha256": hashlib.sha256(data).hexdigest()},
        "table": entry,
    }
    raw = json.dumps(header).encode()
    raw += b" " * (-(len(raw) + 8) % 64)
    path = tmp_path / "bounds"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    if expected is None:
        assert open_artifact(path).array("table", "I8", 2).shape == (8, 8)
        return
    with pytest.raises(ArtifactError, match=expected):
        open_artifact(path).array("table", "I8", 2)


def test_missing_file_names_path_and_fix(tmp_path):
    with pytest.raises(ArtifactError, match=r"absent.*WHETHERMAN_ROUTER"):
        open_artifact(tmp_path / "absent")


def test_foreign_safetensors_is_refused(tmp_path):
    from safetensors.numpy import save_file

    save_file({"table": np.zeros((4, 4), dtype=np.int8)}, tmp_path / "foreign")
    with pytest.raises(ArtifactError, match="another kind"):
        open_artifact(tmp_path / "foreign")


def test_layout_is_readable_as_plain_safetensors(tiny):
    from safetensors.numpy import load_file

    assert np.array_equal(load_file(tiny)["table"], open_artifact(tiny).array("table", "I8", 2))


def test_a_newer_version_says_so(tiny, tmp_path):
    content = tiny.read_bytes().replace(b'"version":"1"', b'"version":"2"')
    newer = tmp_path / "newer"
    newer.write_bytes(content)
    with pytest.raises(ArtifactError, match="expected version 1, found '2'"):
        open_artifact(newer)
