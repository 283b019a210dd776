"""llama.cpp's quantiser through our own call: fewer blocks, the same states, nothing half-written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from whetherman_edge.backbone.llama import Context, Network
from whetherman_edge.backbone.quantise import quantise
from whetherman_edge.errors import ArtifactError

pytestmark = pytest.mark.model


def last_state(path: Path, layer: int) -> tuple[int, np.ndarray]:
    network = Network(path)
    context = Context(network, layer=layer, n_cells=256, n_seq=1, chunk=64, n_threads=1)
    ids = [network.bos, *network.tokenize("User: is it raining in Oslo? And where is the mail of the landlord?\nNext:")]
    state = context.decode(0, ids, 0, (len(ids) - 1,))[0]
    n_layer = network.n_layer
    context.close()
    network.close()
    return n_layer, state


def test_as_many_blocks_as_are_read_give_the_state_of_the_whole(gemma_base: Path, tmp_path: Path) -> None:
    whole, six = tmp_path / "whole.gguf", tmp_path / "six.gguf"
    quantise(gemma_base, whole, "q8_0", n_threads=1)
    _, expected = last_state(whole, 5)
    seen: list[tuple[int, int]] = []
    # From q8_0 to q8_0 weights are copied, so that only the missing blocks could make a difference.
    quantise(whole, six, "q8_0", 6, n_threads=1, progress=lambda n, of: seen.append((n, of)))
    n_layer, state = last_state(six, 5)
    assert n_layer == 6
    assert seen[-1] == (whole.stat().st_size, whole.stat().st_size)
    cosine = float(state @ expected / np.sqrt((state @ state) * (expected @ expected)))
    assert cosine > 0.99999
    assert {path.name for path in tmp_path.iterdir()} == {"six.gguf", "whole.gguf"}
    assert six.stat().st_size < whole.stat().st_size
    whole.unlink()


@pytest.mark.parametrize(("kind", "layers", "match"), [("q3_x", 6, "q4_0"), ("q4_0", 0, "1 to 18"), ("q4_0", 19, "18")])
def test_what_cannot_be_made_is_refused(gemma_base: Path, tmp_path: Path, kind: str, layers: int, match: str) -> None:
    with pytest.raises(ArtifactError, match=match):
        quantise(gemma_base, tmp_path / "x.gguf", kind, layers)
    assert list(tmp_path.iterdir()) == []


def test_a_broken_source_is_refused_and_leaves_an_older_target_alone(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(100))
    (tmp_path / "x.gguf").write_bytes(b"older")
    with pytest.raises(ArtifactError, match="broken"):
        quantise(tmp_path / "broken.gguf", tmp_path / "x.gguf", "q4_0")
    assert (tmp_path / "x.gguf").read_bytes() == b"older"
    assert {path.name for path in tmp_path.iterdir()} == {"broken.gguf", "x.gguf"}
