"""A small valid profile to vary."""

from __future__ import annotations

from typing import Any

from whetherman_edge.profiles.schema import SCHEMA_VERSION, Agent, EngineArtifact, Layer, Profile, Risk, Tau

SHA256 = "ab" * 32


def profile_of(
    *,
    features: tuple[str, ...] = ("best", "overlap"),
    mean: tuple[float, ...] | None = None,
    scale: tuple[float, ...] | None = None,
    weights: tuple[float, ...] | None = None,
    calibrated: bool = True,
    **fields: Any,
) -> Profile:
    n = len(features)
    values: dict[str, Any] = {
        "schema": SCHEMA_VERSION,
        "agent": Agent(kind="llamacpp", model="qwen2.5-0.5b-instruct", quantisation="Q4_K_M"),
        "engine": EngineArtifact(name="static", sha256=SHA256),
        "layer": Layer(features, mean or (0.0,) * n, scale or (1.0,) * n, weights or (1.0,) * n, bias=0.0),
        "tau": Tau(answer=0.9, ask=None, decline=0.95),
        "risk": Risk(0.05, 0.1, 200, 60, 1, n_needed=120) if calibrated else None,
        "payoff": {"call_s": 12.5},
        "created": "2025-06-01T12:00:00+00:00",
        "version": "0.1.0",
    }
    return Profile(**(values | fields))
