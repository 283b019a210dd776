"""Rows of a table in a file: the numbers of ggml's Q8_0, whatever the page cache holds, and none that is not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from whetherman_edge.backbone import llama
from whetherman_edge.backbone import rows as module
from whetherman_edge.backbone.rows import BLOCK, Rows

WIDTH, N_ROWS, FIRST = 64, 50, 12_345
FACTOR = np.sqrt(np.float32(WIDTH))


@pytest.fixture
def blocks() -> npt.NDArray[np.void]:
    chance = np.random.default_rng(0)
    found = np.zeros((N_ROWS, WIDTH // 32), BLOCK)
    found["scale"] = chance.normal(size=found.shape)
    found["values"] = chance.integers(-127, 128, (*found.shape, 32))
    return found


@pytest.fixture
def path(blocks: npt.NDArray[np.void], tmp_path: Path) -> Path:
    found = tmp_path / "f.gguf"
    found.write_bytes(bytes(FIRST) + blocks.tobytes() + b"what comes after")
    return found


def looked_up(rows: Rows, tokens: list[int]) -> npt.NDArray[np.float32]:
    out = np.full((len(tokens), WIDTH), np.nan, np.float32)
    rows.look_up(tokens, out)
    return out


@pytest.mark.parametrize("cached", [True, False])
def test_rows_are_scale_times_value(
    blocks: npt.NDArray[np.void], path: Path, cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not cached:
        monkeypatch.setattr(module, "_reader_of_cached", lambda: None)
    rows = Rows(path, FIRST, blocks.nbytes, WIDTH, FACTOR)
    tokens = [0, N_ROWS - 1, 7, 7, 8]
    expected = [
        [np.float32(block["scale"]) * np.float32(one) * FACTOR for block in blocks[token] for one in block["values"]]
        for token in tokens
    ]
    assert np.array_equal(looked_up(rows, tokens), np.array(expected, np.float32))
    rows.close()
    rows.close()


@pytest.mark.parametrize("read", [-1, 17])
def test_a_row_that_the_page_cache_lacks_is_waited_for(
    blocks: npt.NDArray[np.void], path: Path, read: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = Rows(path, FIRST, blocks.nbytes, WIDTH, FACTOR)
    expected = looked_up(rows, [3, 4])
    monkeypatch.setattr(rows, "_read_cached", lambda *_: read)
    assert np.array_equal(looked_up(rows, [3, 4]), expected)
    rows.close()


@pytest.mark.parametrize("token", [-1, N_ROWS])
def test_a_token_without_a_row_is_refused(blocks: npt.NDArray[np.void], path: Path, token: int) -> None:
    rows = Rows(path, FIRST, blocks.nbytes, WIDTH, FACTOR)
    with pytest.raises(ValueError, match=f"from 0 to {N_ROWS - 1}"):
        looked_up(rows, [1, token])
    rows.close()


def test_a_file_that_ends_before_its_table_is_told(blocks: npt.NDArray[np.void], path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])
    rows = Rows(path, FIRST, blocks.nbytes, WIDTH, FACTOR)
    with pytest.raises(OSError, match="has ended"):
        looked_up(rows, [N_ROWS - 1])
    rows.close()
    with pytest.raises(OSError, match="Bad file"):
        looked_up(rows, [0])


def test_without_the_kernel_s_flag_rows_are_read_the_plain_way(
    blocks: npt.NDArray[np.void], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python may lack the constant where the C library has the call."""
    monkeypatch.delattr(module.os, "RWF_NOWAIT", raising=False)
    rows = Rows(path, FIRST, blocks.nbytes, WIDTH, FACTOR)
    assert np.isfinite(looked_up(rows, [0, N_ROWS - 1])).all()
    rows.close()


@pytest.mark.parametrize("fault", ["a row too many", "the file is gone"])
def test_a_table_that_does_not_fit_is_left_to_llama_cpp_and_no_file_stays_open(
    blocks: npt.NDArray[np.void], path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    class Library:
        @staticmethod
        def llama_model_meta_val_str(_handle: object, _key: bytes, buffer: Any, _size: int) -> None:
            buffer.value = b"gemma3"

        @staticmethod
        def llama_vocab_n_tokens(_vocab: object) -> int:
            return N_ROWS + (fault == "a row too many")

    monkeypatch.setattr(llama, "tensor_of", lambda *_: (FIRST, blocks.nbytes, llama.Q8_0))
    network = llama.Network.__new__(llama.Network)
    network.lib, network.handle, network.vocab, network.n_embd = Library(), None, None, WIDTH
    network.path = path if fault == "a row too many" else path.with_name("gone.gguf")
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert network._open_rows() is None
    assert len(list(Path("/proc/self/fd").iterdir())) == before
