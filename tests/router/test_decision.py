"""A choice put in a new order by how well some of its options fit."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whetherman_edge.router.decision import Choice, reordered

CHOICE = Choice("a", {"a": 0.5, "b": 0.3, "c": 0.2}, 0.5)


def test_what_fits_best_is_chosen_and_the_others_keep_their_probability() -> None:
    found = reordered(CHOICE, {"a": 0.0, "b": 2.0}, 1.0)
    odds = (0.3 * math.exp(2.0)) / 0.5
    assert found.choice == "b"
    assert found.probabilities["b"] / found.probabilities["a"] == pytest.approx(odds)
    assert found.probabilities["c"] == 0.2
    assert found.confidence == found.probabilities["b"]
    assert list(found.probabilities) == ["a", "b", "c"]


def test_an_option_that_was_not_read_may_become_the_best() -> None:
    choice = Choice("a", {"a": 0.4, "b": 0.25, "c": 0.35}, 0.4)
    found = reordered(choice, {"a": 0.0, "b": 0.5}, 1.0)
    assert (found.choice, found.confidence) == ("c", 0.35)


@pytest.mark.parametrize("matches", [{}, {"b": 5.0}])
def test_one_match_alone_says_nothing(matches: dict[str, float]) -> None:
    assert reordered(CHOICE, matches, 1.0) is CHOICE


@given(st.dictionaries(st.sampled_from("abc"), st.floats(-700, 700), min_size=2), st.floats(0, 3))
def test_it_stays_a_distribution(matches: dict[str, float], weight: float) -> None:
    found = reordered(CHOICE, matches, weight)
    assert sum(found.probabilities.values()) == pytest.approx(1.0)
    assert all(0.0 <= p <= 1.0 + 1e-12 for p in found.probabilities.values())
    assert found.probabilities[found.choice] == max(found.probabilities.values())


def test_a_probability_of_zero_is_no_error() -> None:
    found = reordered(Choice("a", {"a": 1.0, "b": 0.0}, 1.0), {"a": 0.0, "b": 40.0}, 1.0)
    assert found.choice == "b"
