"""Which profile was measured on a served model, and what its user is told to do: never more than the proof carries."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.profiles.samples import profile_of
from whetherman_edge.profiles.schema import Agent, EngineArtifact, Likeness, Profile, likeness, quantisation_in
from whetherman_edge.profiles.store import Stored
from whetherman_edge.profiles.suggestions import advice, line, suggest

GEMMA = EngineArtifact("gemma", "cd" * 32)


def measured(quantisation: str = "Q4_K_M", **fields: object) -> Profile:
    return profile_of(agent=Agent("llamacpp", "qwen2.5-coder-1.5b", quantisation), **fields)


@pytest.mark.parametrize(
    ("model", "quantisation", "found"),
    [
        ("qwen2.5-coder:1.5b", "Q4_K_M", "same"),  # Ollama's name, and what /api/tags says of it
        ("qwen2.5-coder:1.5b", "", "untold"),
        ("qwen2.5-coder:1.5b", "Q8_0", "requantised"),
        ("qwen2.5-coder:1.5b-q8_0", "", "requantised"),
        ("qwen2.5-coder:1.5b-instruct-q4_K_M", "Q4_K_M", "untold"),
        ("qwen2.5-coder:1.5b-instruct-q5_K_M", "", "requantised"),
        ("hf.co/Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF:Q4_K_M", "", "untold"),
        ("Qwen2.5-Coder-1.5B-Q4_K_M.gguf", "", "same"),
        ("qwen2.5-coder:1.5b-base", "Q4_K_M", "no"),
        ("qwen2.5-coder:7b", "Q4_K_M", "no"),
        ("qwen2.5:1.5b", "Q4_K_M", "no"),
        ("", "Q4_K_M", "no"),
    ],
)
def test_a_model_is_the_measured_one_only_where_name_and_quantisation_say_so(
    model: str, quantisation: str, found: Likeness
) -> None:
    assert likeness(measured(), model, quantisation) == found


def test_a_profile_without_a_quantisation_is_never_sure() -> None:
    assert likeness(measured(""), "qwen2.5-coder:1.5b", "Q4_K_M") == "untold"
    assert quantisation_in("/m/Qwen2.5-Coder-1.5B-Q4_K_M.gguf") == "q4-k-m"


def stored(**profiles: Profile) -> list[Stored]:
    return [Stored(name.replace("_", "-"), Path("x"), "", profile) for name, profile in profiles.items()]


def test_the_nearest_profile_that_can_be_used_is_named_with_its_line() -> None:
    known = stored(
        q8=measured("Q8_0"), own=measured(engine=GEMMA), own_static=measured(), bare=measured(calibrated=False)
    )
    near = suggest(known, "qwen2.5-coder:1.5b", "Q4_K_M")
    assert near is not None
    assert (near.name, near.twin, near.likeness) == ("own", "own-static", "same")
    told = advice(near, "qwen2.5-coder:1.5b", "/c.toml")
    assert '"qwen2.5-coder:1.5b" = "own" under [agents] in /c.toml' in told
    static = suggest(known, "qwen2.5-coder:1.5b", "Q4_K_M", "static")
    assert static is not None
    assert (static.name, static.twin) == ("own-static", "")
    assert suggest(known, "another:1b") is None
    assert suggest(stored(bare=measured(calibrated=False)), "qwen2.5-coder:1.5b") is None
    broken = [Stored("own", Path("x"), "", measured(), "fitted on another gate")]
    assert suggest(broken, "qwen2.5-coder:1.5b") is None


def test_other_weights_are_told_to_calibrate_and_get_no_line() -> None:
    near = suggest(stored(own=measured()), "qwen2.5-coder:1.5b", "Q8_0")
    assert near is not None
    told = advice(near, "qwen2.5-coder:1.5b", "/c.toml")
    assert "calibrate" in told
    assert "[agents]" not in told
    untold = suggest(stored(own=measured()), "qwen2.5-coder:1.5b")
    assert untold is not None
    told = advice(untold, "qwen2.5-coder:1.5b", "/c.toml")
    assert "if the server runs qwen2.5-coder-1.5b Q4_K_M" in told
    assert "[agents]" in told


def test_the_line_is_toml_whatever_the_name() -> None:
    for model in ('a"b', "ü:1b", "a\\b", "m\n"):
        assert tomllib.loads(f"[agents]\n{line(model, 'own')}")["agents"] == {model: "own"}
