"""The breaker's states, with a clock of our own (field case O01)."""

from __future__ import annotations

import pytest

from whetherman_edge.proxy.breaker import Breaker


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_o01_opens_after_failures_in_a_row_only(clock):
    breaker = Breaker(3, clock)
    for _ in range(5):
        assert breaker.admits()
        breaker.failed()
        assert breaker.admits()
        breaker.succeeded()
    for _ in range(3):
        assert breaker.admits()
        breaker.failed()
    assert not breaker.admits()


def test_o01_one_probe_at_a_time_after_the_cooldown_and_one_success_closes(clock):
    breaker = Breaker(1, clock, cooldown_s=5.0)
    assert breaker.admits()
    breaker.failed()
    clock.now_s += 4.9
    assert not breaker.admits()
    clock.now_s += 0.2
    assert breaker.admits()
    assert not breaker.admits()
    breaker.failed()
    assert not breaker.admits()
    clock.now_s += 5.1
    assert breaker.admits()
    breaker.succeeded()
    assert breaker.admits()
    assert breaker.admits()


def test_a_probe_whose_client_left_does_not_block_the_next(clock):
    breaker = Breaker(1, clock, cooldown_s=5.0)
    breaker.admits()
    breaker.failed()
    clock.now_s += 6
    assert breaker.admits()
    breaker.gave_up()
    assert breaker.admits()
