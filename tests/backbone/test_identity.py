"""However a state is come by, it is the same state: stopped early or run to the end, cached, chunked, restored."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from whetherman_edge.backbone import llama
from whetherman_edge.backbone.capture import Capture
from whetherman_edge.backbone.llama import Context, Network

pytestmark = pytest.mark.model

TEXT = (
    "Tools:\nsearch_mail(query*, limit): Search the user's mail by free text.\nget_weather(city*): Weather of a city.\n"
    "System: Be brief.\nUser: Could you find the last invoice of the landlord, and is it raining in Oslo?\nNext:"
)
Whole = tuple[Network, float]
F32 = npt.NDArray[np.float32]


def cosine(a: F32, b: F32) -> float:
    """The smallest cosine over the rows of two arrays of one shape."""
    a, b = np.atleast_2d(a).astype(np.float64), np.atleast_2d(b).astype(np.float64)
    assert a.shape == b.shape
    return float(((a * b).sum(1) / np.sqrt((a * a).sum(1) * (b * b).sum(1))).min())


def final_norm(path: Path) -> F32:
    """Weights of the final norm, (n_embd,)."""
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == "output_norm.weight")
    return np.array(tensor.data, np.float32)


def ids_of(network: Network, text: str = TEXT) -> list[int]:
    return [network.bos, *network.tokenize(text)]


def context_on(network: Network, layer: int, chunk: int = 128, n_seq: int = 4) -> Context:
    return Context(network, layer=layer, n_cells=1024, n_seq=n_seq, chunk=chunk, n_threads=1)


class Everything(Capture):
    """Lets the graph run to its end and copies every block's output on the way."""

    def __init__(self, lib: Any, name: str, **sizes: Any) -> None:
        super().__init__(lib, name, **{**sizes, "native": False})
        self.found: dict[str, F32] = {}

    def _on_node(self, tensor: int, ask: bool, user: Any) -> bool:
        name = self._ggml.ggml_get_name(tensor).decode()
        wanted = name == "result_norm" or name.startswith("l_out-")
        if ask or not wanted:
            return wanted or not ask
        n_bytes = self._ggml.ggml_nbytes(tensor)
        buffer = np.empty((n_bytes // (4 * self.width), self.width), dtype=np.float32)
        ctypes.memmove(buffer.ctypes.data, self._ggml.ggml_get_data(tensor), n_bytes)
        self.found[name] = buffer
        self.state.seen_bytes = 0
        if name == self.name:
            ctypes.memmove(self.state.out, buffer.ctypes.data, n_bytes)
            self.state.seen_bytes = n_bytes
        return True


def test_stopped_early_is_the_full_run_on_every_layer_and_after_reuse(
    whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, floor = whole
    ids = ids_of(network)
    half = len(ids) // 2
    with monkeypatch.context() as patch:
        patch.setattr(llama, "Capture", Everything)
        full = context_on(network, network.n_layer)
        everything = full.capture
        assert isinstance(everything, Everything)
        full.decode(0, ids, 0, (len(ids) - 1,))
        whole_run = {name: rows[-1].copy() for name, rows in everything.found.items()}
        full.truncate(0, half)
        full.decode(0, ids[half:], half, (len(ids) - 1 - half,))
        second_half = {name: rows[-1].copy() for name, rows in everything.found.items()}
        full.close()
    assert len(whole_run) == network.n_layer + 1
    norm = final_norm(network.path)
    for layer in range(network.n_layer + 1):
        early = context_on(network, layer)
        at_once = early.decode(0, ids, 0, (len(ids) - 1,))
        # The keys and values that the first early stop left behind carry the second half. Like is compared with like:
        # the same tokens in batches of another shape round differently, in a full run as well.
        early.truncate(0, half)
        continued = early.decode(0, ids[half:], half, (len(ids) - 1 - half,))
        early.close()
        name = f"l_out-{layer}" if layer < network.n_layer else "result_norm"
        assert cosine(at_once[0], whole_run[name]) >= floor, name
        assert cosine(continued[0], second_half[name]) >= floor, name
        # The final norm's weights differ by a factor of hundreds between channels and would weigh the rounding of a
        # few of them; what is bounded is the direction of the residual stream, so they are taken out again.
        weight = norm if layer == network.n_layer else np.float32(1)
        assert cosine(continued[0] / weight, whole_run[name] / weight) >= floor, name


def test_cached_copied_and_chunked_are_whole_and_alone(whole: Whole) -> None:
    network, floor = whole
    ids = ids_of(network)
    ends = [20, 37, len(ids) - 1]
    fresh = context_on(network, 9)
    alone = fresh.decode(0, ids, 0, ends)
    fresh.close()
    chunked = context_on(network, 9, chunk=16)
    assert cosine(chunked.decode(0, ids, 0, ends), alone) >= floor
    chunked.close()
    shared = context_on(network, 9)
    head = shared.decode(0, ids[:38], 0, ends[:2])
    for seq in (1, 2):  # two sessions on one prefix, with something else of the first in between
        shared.copy(0, seq, 38)
        shared.decode(seq, ids[3:20], 38)
        shared.truncate(seq, 38)
        last = shared.decode(seq, ids[38:], 38, (ends[2] - 38,))
        assert cosine(last, alone[2:]) >= floor
    assert cosine(head, alone[:2]) >= floor
    assert (shared.length(0), shared.length(1)) == (38, len(ids))
    shared.close()


def test_the_last_block_gives_only_the_rows_that_are_wanted(gemma_q4: Path) -> None:
    """The shipped weights end at the block that is read; there llama.cpp keeps rows flagged as outputs alone."""
    network = Network(gemma_q4)
    ids = ids_of(network)
    wanted = [5, 20, 37, len(ids) - 1]
    whole_batch, chunked = context_on(network, network.n_layer - 1), context_on(network, network.n_layer - 1, chunk=16)
    assert whole_batch.rows_are_outputs
    expected = whole_batch.decode(0, ids, 0, wanted)
    assert cosine(chunked.decode(0, ids, 0, wanted), expected) >= 0.9995
    assert len(chunked.decode(1, ids[:40], 0)) == 0  # no rows wanted, in several micro-batches: nothing to read
    assert cosine(chunked.decode(1, ids[40:], 40, (len(ids) - 41,)), expected[3:]) >= 0.9995
    whole_batch.close()
    chunked.close()
    network.close()


def test_restored_is_fresh(whole: Whole) -> None:
    network, floor = whole
    ids = ids_of(network)
    first = context_on(network, 9)
    alone = first.decode(0, ids, 0, (len(ids) - 1,))
    first.truncate(0, 38)
    cells = first.save(0)
    first.close()
    second = context_on(network, 9)
    assert second.restore(3, cells)
    assert second.length(3) == 38
    assert cosine(second.decode(3, ids[38:], 38, (len(ids) - 1 - 38,)), alone) >= floor
    assert not second.restore(2, cells[: len(cells) // 2])
    assert not second.restore(2, b"\0" * 64)
    assert second.length(2) == 0
    second.close()


def test_an_abort_leaves_the_cells_as_they_were(whole: Whole) -> None:
    network, floor = whole
    ids = ids_of(network)
    context = context_on(network, 9, chunk=16)
    alone = context.decode(0, ids, 0, (len(ids) - 1,))
    context.truncate(0, 32)
    context.capture.stop(True)
    with pytest.raises(llama.Aborted) as aborted:
        context.decode(0, ids[32:], 32, (len(ids) - 33,))
    assert (aborted.value.n_done, len(aborted.value.states)) == (0, 0)
    assert context.length(0) == 32
    context.capture.stop(False)
    assert cosine(context.decode(0, ids[32:], 32, (len(ids) - 33,)), alone) >= floor
    context.close()


def test_the_compiled_callback_and_its_ctypes_twin_give_the_same_bits(
    whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, _ = whole
    ids = ids_of(network)
    rows = {}
    for native in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(
                llama, "Capture", lambda lib, name, native=native, **k: Capture(lib, name, native=native, **k)
            )
            context = context_on(network, 5, chunk=32)
        assert context.capture.native is native
        rows[native] = context.decode(0, ids, 0, (3, 40, len(ids) - 1))
        context.capture.stop(True)
        with pytest.raises(llama.Aborted):
            context.decode(0, ids[:4], len(ids), ())
        context.close()
    assert np.array_equal(rows[True], rows[False])


def test_without_the_compiled_module_the_twin_serves(whole: Whole, monkeypatch: pytest.MonkeyPatch) -> None:
    network, _ = whole
    monkeypatch.setattr("whetherman_edge.backbone.capture._native_addresses", lambda: None)
    context = context_on(network, 3)
    assert not context.capture.native
    assert np.isfinite(context.decode(0, ids_of(network), 0, (10,))).all()
    context.close()
    with pytest.raises(RuntimeError, match="compiled module"):
        Capture(network.lib, "l_out-3", rows_max=1, width=network.n_embd, native=True)


def test_control_tokens_in_a_text_stay_text(whole: Whole) -> None:
    network, _ = whole
    for token in ("<end_of_turn>", "<start_of_turn>", "<bos>", "<eos>", "<pad>"):
        control = network.control(token)
        assert control not in network.tokenize(f"User: {token} now")
        assert len(network.tokenize(token)) > 1
    assert network.bos not in network.tokenize("User: hello")


def test_rows_that_we_look_up_are_those_of_llama_cpp(gemma_q4: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Network(gemma_q4)
    monkeypatch.setattr(Network, "_open_rows", lambda _self: None)
    theirs = Network(gemma_q4)
    assert ours.rows is not None
    assert theirs.rows is None
    ids = [*ids_of(ours), *np.random.default_rng(0).integers(0, 262_144, 200).tolist(), 0, 262_143]
    states = []
    for network in (ours, theirs):
        context = context_on(network, 11, chunk=64)
        states.append(context.decode(0, ids, 0, (3, 100, len(ids) - 1)))
        context.close()
        network.close()
    assert np.array_equal(*states)


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_rows_that_lead_elsewhere_are_left_to_llama_cpp(gemma_q4: Path, factor: float) -> None:
    network = Network(gemma_q4)
    ids = ids_of(network)
    context = context_on(network, 3)
    expected = context.decode(0, ids, 0, (5,))
    context.close()
    assert network.rows is not None
    network.rows._factor *= np.float32(factor)
    context = context_on(network, 3)
    assert context.check_rows() is (factor == 1.0)
    assert np.array_equal(context.decode(0, ids, 0, (5,)), expected)
    context.close()
    network.close()


def test_the_embedding_table_does_not_stay_in_memory(gemma_q4: Path) -> None:
    """llama.cpp reads ahead all 178 MB of it, and the file was just written: its page cache is in pieces of 2 MB."""
    network = Network(gemma_q4)
    assert resident_kb(gemma_q4) < 1_000
    context = context_on(network, 11)
    vocabulary = np.random.default_rng(0).permutation(262_144)[:3_000].tolist()
    for start in range(0, len(vocabulary), 250):
        context.truncate(0, 0)
        assert np.isfinite(context.decode(0, vocabulary[start : start + 250], 0, (5,))).all()
    # The blocks are all that is not the table's: 38 MB, and 2 MB more at either end.
    assert 0 < resident_kb(gemma_q4) < 45_000
    context.close()
    network.close()


def test_a_table_in_another_format_is_llama_cpps_to_read(gemma_q4: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama, "Q8_0", 1)
    network = Network(gemma_q4)
    assert network.rows is None
    assert llama.tensor_of(network.lib, gemma_q4, "absent.weight") is None
    assert llama.tensor_of(network.lib, gemma_q4.with_name("absent.gguf"), llama.ROWS_TABLE) is None
    network.close()


def test_networks_that_come_and_go_leave_no_memory_behind(gemma_q4: Path) -> None:
    """glibc keeps what a thread freed for that thread, and each worker has its own."""
    after = []
    for _ in range(6):
        thread = threading.Thread(target=lambda: Network(gemma_q4).close())
        thread.start()
        thread.join()
        after.append(anonymous_kb())
    assert after[-1] - after[0] < 30_000


def anonymous_kb() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def resident_kb(path: Path) -> int:
    """Of the mappings of a file in this process."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line[0] in "0123456789abcdef" and "-" in line.split(maxsplit=1)[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total
