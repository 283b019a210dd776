"""Readings outlive a pass that was stopped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from convert.kept_readings import SAVE_EVERY, key_of, read_all
from whetherman_edge.backbone.prompt import Piece, Prompt

N = SAVE_EVERY + 7


def keys() -> list[bytes]:
    prompts = [Prompt((), ((Piece(f"User: {n}"),),), (Piece("Next:"),), ()) for n in range(N)]
    return [key_of(prompt, "weights") for prompt in prompts]


def test_a_stopped_pass_goes_on_where_it_stopped(tmp_path: Path) -> None:
    asked: list[int] = []

    def read(i: int) -> list[float]:
        if len(asked) == SAVE_EVERY + 3:
            raise KeyboardInterrupt
        asked.append(i)
        return [i, 0.1 * i]

    order = list(reversed(range(N)))
    with pytest.raises(KeyboardInterrupt):
        read_all(keys(), order, read, tmp_path / "kept.npz")
    before, asked[:] = list(asked), []
    found = read_all(keys(), order, read, tmp_path / "kept.npz")
    assert before + asked == order
    assert found == pytest.approx(np.array([[i, 0.1 * i] for i in range(N)]))
    assert [path.name for path in tmp_path.iterdir()] == ["kept.npz"]


def test_other_weights_or_another_prompt_are_read_anew() -> None:
    prompt = Prompt((), (), (Piece("Next:"),), ())
    assert key_of(prompt, "weights") != key_of(prompt, "others")
    assert len(set(keys())) == N


def test_a_key_that_ends_in_zeros_is_found_again(tmp_path: Path) -> None:
    key = b"k" * 30 + b"\0\0"
    read_all([key], [0], lambda _: [1.0], tmp_path / "kept.npz")

    def never(_: int) -> list[float]:
        raise AssertionError("read anew")

    assert read_all([key], [0], never, tmp_path / "kept.npz").tolist() == [[1.0]]
