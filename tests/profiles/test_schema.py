"""Profile files: what is accepted, and a message with the field and the fix for what is not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.profiles.samples import SHA256, profile_of
from whetherman_edge.errors import ProfileError
from whetherman_edge.profiles.schema import (
    FILE_BYTES_MAX,
    Layer,
    Tau,
    check_engine,
    check_features,
    parse_profile,
    serialize_profile,
    sigmoid,
    validate,
)


def document(**changes: Any) -> bytes:
    """The sample's file with some values changed; a dotted key goes into a nested object, ... removes one."""
    value = json.loads(serialize_profile(profile_of()))
    for path, change in changes.items():
        *parents, key = path.split("__")
        target = value
        for parent in parents:
            target = target[parent]
        if change is ...:
            del target[key]
        else:
            target[key] = change
    return json.dumps(value).encode()


def test_a_profile_survives_its_file() -> None:
    profile = profile_of()
    data = serialize_profile(profile)
    assert parse_profile(data, "p") == profile
    assert data.endswith(b"}\n")
    assert json.loads(data)["tau"] == {"ANSWER": 0.9, "ASK": None, "DECLINE": 0.95}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 1}, "schema: expected 2, got 1; made by Whetherman Edge 0.1.0, calibrate again"),
        ({"schema": 1, "unheard": 1}, "schema: expected 2, got 1"),
        ({"unheard": 1}, "unheard"),
        ({"tau": ...}, "tau"),
        ({"tau__answer": 0.5}, "answer"),
        ({"tau__ANSWER": 1.5}, "tau.ANSWER, first steps: expected a number in 0..1"),
        ({"layer__weights": [1.0]}, "layer.weights: expected 2 numbers"),
        ({"layer__weights": [1.0, None]}, "weights"),
        ({"layer__weights": [1.0, "x"]}, "weights"),
        ({"layer__scale": [1.0, 0.0]}, r"layer.scale\[1\]: expected a number above 0"),
        ({"layer__temperature": 0}, "layer.temperature"),
        ({"layer__features": ["a", "a"]}, "layer.features: expected each name once"),
        ({"layer__features": [], "layer__mean": [], "layer__scale": [], "layer__weights": []}, "layer.features"),
        ({"engine__sha256": "abc"}, r"engine\.sha256: expected 64"),
        ({"engine__name": "oracle"}, "oracle"),
        ({"risk__alpha": 0}, "risk.alpha"),
        ({"risk__n_false_skips": 70}, "n_false_skips <= n_withheld"),
        ({"risk__n_false_skips": 30}, "prove at most"),
        ({"risk__n_measured": 0, "risk__n_withheld": 0, "risk__n_false_skips": 0}, "write null"),
        ({"intervention__mode": "shout"}, "shout"),
        ({"created": "yesterday"}, "created: expected an ISO 8601 time"),
    ],
)
def test_every_fault_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ProfileError, match=message) as caught:
        parse_profile(document(**changes), "home")
    assert "profile 'home'" in str(caught.value)


@pytest.mark.parametrize("data", [b"", b'{"messages": [', b"[]", b"{", b"\xff", b"null", b"{}", b"[" * 9999])
def test_what_is_no_profile_is_refused(data: bytes) -> None:
    with pytest.raises(ProfileError):
        parse_profile(data, "p")


def test_a_file_that_cannot_be_one_is_not_parsed() -> None:
    with pytest.raises(ProfileError, match="at most"):
        parse_profile(b" " * (FILE_BYTES_MAX + 1), "p")


def test_numbers_that_are_none_are_refused_also_in_memory() -> None:
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ProfileError, match=r"layer.weights\[1\]: expected a finite number"):
            validate(profile_of(weights=(1.0, bad)), "p")
        with pytest.raises(ProfileError, match=r"payoff\.x"):
            validate(profile_of(payoff={"x": bad}), "p")
    with pytest.raises(ProfileError):
        parse_profile(document().replace(b"0.95", b"1e999"), "p")


def test_calibrated_needs_a_proof_and_a_threshold() -> None:
    assert profile_of().calibrated
    assert not profile_of(calibrated=False).calibrated
    assert not profile_of(tau=Tau()).calibrated


def test_a_profile_of_another_engine_is_refused() -> None:
    check_engine(profile_of(), "p", "static", SHA256)
    for name, sha256 in (("gemma", SHA256), ("static", "cd" * 32)):
        with pytest.raises(ProfileError, match="calibrate again"):
            check_engine(profile_of(), "p", name, sha256)
    check_features(profile_of(), "p", ("overlap", "best", "more"))
    with pytest.raises(ProfileError, match="no 'overlap'"):
        check_features(profile_of(), "p", ("best",))


def test_the_layer_is_a_logistic_regression_with_a_temperature() -> None:
    layer = Layer(("a", "b"), (1.0, 2.0), (0.5, 4.0), (3.0, -1.0), bias=0.25, temperature=2.0)
    logit = (3.0 * (2.0 - 1.0) / 0.5 - 1.0 * (6.0 - 2.0) / 4.0 + 0.25) / 2.0
    assert layer.p_need([2.0, 6.0]) == pytest.approx(sigmoid(logit))
    with pytest.raises(ValueError, match="argument"):
        layer.p_need([1.0])


@given(st.floats(-1e6, 1e6))
def test_sigmoid(x: float) -> None:
    assert 0.0 <= sigmoid(x) <= 1.0
    assert sigmoid(x) + sigmoid(-x) == pytest.approx(1.0)
