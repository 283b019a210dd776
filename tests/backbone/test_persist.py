"""Saved tools blocks: what comes back is what was written, and every other file is ignored."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import msgspec
import numpy as np
import pytest

from whetherman_edge.backbone.persist import STALE_S, Key, Root, load, save

KEY = Key("a" * 64, 11, "compact", "0.3.36")
WIDTH = 8


def root(n: int = 5, cells: bytes = b"cells") -> Root:
    return Root(np.arange(n, dtype=np.int32), np.full((2, WIDTH), 0.5, dtype=np.float32), cells)


def same(a: Root, b: Root) -> bool:
    return np.array_equal(a.tokens, b.tokens) and np.array_equal(a.states, b.states) and a.cells == b.cells


def test_round_trip_private_and_atomic(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "prefixes.bin"
    assert save(path, KEY, [root(3, b"x"), root(9, b"")]) == 2
    first, second = load(path, KEY, WIDTH)
    assert same(first, root(3, b"x"))
    assert same(second, root(9, b""))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]
    assert save(path, KEY, []) == 0
    assert load(path, KEY, WIDTH) == []


def test_what_a_killed_process_left_half_written_goes(tmp_path: Path) -> None:
    old, young = tmp_path / ".p.x1y", tmp_path / ".p.x2y"  # the young one may be another process, writing
    for left in (old, young):
        left.write_bytes(b"half")
    long_ago = old.stat().st_mtime - 2 * STALE_S
    os.utime(old, (long_ago, long_ago))
    save(tmp_path / "p", KEY, [root()])
    assert sorted(file.name for file in tmp_path.iterdir()) == [young.name, "p"]


def test_the_size_is_bounded_and_later_roots_are_not_even_asked_for(tmp_path: Path) -> None:
    asked = []

    def roots():
        for n in range(100):
            asked.append(n)
            yield root(4, bytes(1000))

    kept = save(tmp_path / "p", KEY, roots(), bytes_max=3500)
    assert kept == 3
    assert len(asked) == 4
    assert len(load(tmp_path / "p", KEY, WIDTH)) == 3


@pytest.mark.parametrize(
    "changed", [{"model_sha256": "b" * 64}, {"layer": 12}, {"style": "functiongemma"}, {"llama": "0.3.37"}]
)
def test_another_key_is_foreign(tmp_path: Path, changed: dict[str, object], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    save(tmp_path / "p", KEY, [root()])
    assert load(tmp_path / "p", msgspec.structs.replace(KEY, **changed), WIDTH) == []
    assert "other_weights_layer_style_or_llama_cpp" in caplog.text


def test_every_cut_and_every_flipped_byte_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "p"
    save(path, KEY, [root()])
    whole = path.read_bytes()
    for n in range(len(whole)):
        path.write_bytes(whole[:n])
        assert load(path, KEY, WIDTH) == []
        path.write_bytes(whole[:n] + bytes([whole[n] ^ 0x20]) + whole[n + 1 :])
        assert load(path, KEY, WIDTH) == []
    assert caplog.text.count("event=saved_prefixes_ignored") == 2 * len(whole)
    path.write_bytes(whole)
    assert len(load(path, KEY, WIDTH)) == 1
    assert load(path, KEY, WIDTH + 1) == []


def test_a_file_that_others_can_reach_or_that_is_no_file_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    save(tmp_path / "p", KEY, [root()])
    (tmp_path / "p").chmod(0o644)
    assert load(tmp_path / "p", KEY, WIDTH) == []
    assert "others_may" in caplog.text
    assert load(tmp_path, KEY, WIDTH) == []
    assert load(tmp_path / "absent", KEY, WIDTH) == []
