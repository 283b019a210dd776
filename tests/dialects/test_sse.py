"""Server-sent events are read whatever their framing; how the bytes are cut makes no difference."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whetherman_edge.dialects.sse import EVENT_BYTES_MAX, EventReader


def read(*pieces: bytes) -> list[bytes]:
    reader = EventReader()
    found = [data for piece in pieces for data in reader.feed(piece)]
    return found + reader.close()


CASES = [
    (b"data: one\n\ndata: two\n\n", [b"one", b"two"]),
    (b"data: one\r\n\r\ndata: two\r\n\r\n", [b"one", b"two"]),
    (b"data: one\r\rdata: two\r\r", [b"one", b"two"]),
    (b"data:one\n\n", [b"one"]),
    (b"data:  one\n\n", [b" one"]),
    (b": OPENROUTER PROCESSING\n\ndata: one\n\n", [b"one"]),  # S02
    (b"event: message\nid: 7\ndata: one\nretry: 5\n\n", [b"one"]),
    (b"data: {\ndata: }\n\n", [b"{\n}"]),
    (b"data: one\n\n\n\ndata: two", [b"one", b"two"]),
    (b"data:\n\n", [b""]),
    (b"\n\n\n", []),
    (b"data: \xe2\x82\xac\n\n", ["€".encode()]),
]


@pytest.mark.parametrize(("stream", "events"), CASES)
def test_events(stream: bytes, events: list[bytes]) -> None:
    assert read(stream) == events
    assert read(*(stream[i : i + 1] for i in range(len(stream)))) == events


@given(st.sampled_from(CASES), st.lists(st.integers(0, 60)))
def test_how_the_bytes_are_cut_makes_no_difference(case: tuple[bytes, list[bytes]], cuts: list[int]) -> None:
    stream, events = case
    borders = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    assert read(*(stream[a:b] for a, b in pairwise(borders))) == events


@given(st.lists(st.binary(max_size=30)))
def test_fuzz_any_bytes_are_read(pieces: list[bytes]) -> None:
    read(*pieces)


def test_a_huge_event_is_passed_over() -> None:
    assert read(b"data: " + b"x" * EVENT_BYTES_MAX + b"x\n\ndata: one\n\n")[-1] == b"one"
    reader = EventReader()
    for _ in range(40):
        reader.feed(b"x" * 100_000)
    assert reader.feed(b"\n\ndata: one\n\n") == [b"one"]


@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b"\r"])
def test_the_rest_of_a_huge_line_is_no_line_of_its_own(ending: bytes) -> None:
    """Its event is passed over whole, the lines before and behind it too; a huge comment says nothing."""
    reader = EventReader()
    assert reader.feed(b"data: before" + ending + b"data: ") == []
    for _ in range(11):
        assert reader.feed(b"x" * 100_000) == []
    assert reader.feed(b"data: not a line" + ending + b"data: behind" + ending) == []
    assert reader.feed(ending + b"data: one" + ending + ending) == [b"one"]
    assert reader.feed(b"data: two" + ending + b": ") == []
    for _ in range(11):
        assert reader.feed(b"x" * 100_000) == []
    assert reader.feed(b"data: not a line either" + ending + ending) == [b"two"]
    reader.feed(b"data: " + b"x" * (EVENT_BYTES_MAX + 1))
    assert reader.close() == []
