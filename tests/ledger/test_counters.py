"""The Prometheus text: every digit of a count is there."""

from __future__ import annotations

import pytest

from whetherman_edge.ledger.counters import Counters


@pytest.mark.parametrize("value", [1, 999_999, 1_234_567, 88_100_865, 2**53 - 1])
def test_a_count_keeps_its_digits(value):
    counters = Counters()
    counters.add("prompt_tokens_withheld_total", (), value)
    counters.set_gauge("resident_bytes_max", float(value), "peak")
    lines = counters.render().decode().splitlines()
    assert f"whetherman_prompt_tokens_withheld_total {value}" in lines
    assert f"whetherman_resident_bytes_max {value}" in lines


def test_a_fraction_is_kept():
    counters = Counters()
    counters.set_gauge("share", 0.25, "a share")
    assert "whetherman_share 0.25" in counters.render().decode().splitlines()
