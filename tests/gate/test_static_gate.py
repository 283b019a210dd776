"""gate.static_gate: calibrated probabilities from the packaged artifact, and every way the artifact can be wrong."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.gate.chats import WEATHER, calls, chat_of, result, says, system, tool, user
from whetherman_edge.dialects.chat import ChatView, Message
from whetherman_edge.errors import ArtifactError
from whetherman_edge.gate.features import SCALAR_NAMES
from whetherman_edge.gate.policy import PolicySettings, SessionState, decide
from whetherman_edge.gate.static_gate import DEFAULT_PATH, FUSED_NAMES, StaticGate
from whetherman_edge.gate.verdict import LABELS, PHASES, Verdict
from whetherman_edge.kernels import load
from whetherman_edge.router.scorer import Scorer
from whetherman_edge.router.table import RouterTable

SEARCH = tool("web_search", "Search the web.", required=("query",))
SHELL = tool("shell", "Run a shell command.", required=("command",))
TERMINAL = tool("terminal", "Run a command in the terminal.", required=("command",))
READ_FILE = tool("read_file", "Read a text file.", required=("path",))
TURN_ON = tool("turn_on", "Turn on a device by name.", required=("device",))


@pytest.fixture(scope="module")
def scorer() -> Scorer:
    kernels = load()
    return Scorer(RouterTable.open(None, kernels), kernels)


@pytest.fixture(scope="module")
def gate(scorer: Scorer) -> StaticGate:
    return StaticGate.open(scorer, scorer.kernels, None)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A private copy of the packaged artifact; returns the path of its weights."""
    path = tmp_path / DEFAULT_PATH.name
    shutil.copy(DEFAULT_PATH, path)
    shutil.copy(DEFAULT_PATH.with_suffix(".json"), path.with_suffix(".json"))
    return path


def edit_manifest(path: Path, **changes: Any) -> None:
    manifest = json.loads(path.with_suffix(".json").read_text())
    path.with_suffix(".json").write_text(json.dumps(manifest | changes))


def edit_weights(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the arrays and make the manifest's digest agree, so that only the contents are wrong."""
    arrays = load_file(path)
    change(arrays)
    save_file(arrays, path)
    edit_manifest(path, sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def test_a_verdict_is_a_distribution(gate: StaticGate) -> None:
    verdict = gate.judge(chat_of(user("what's the weather in Oslo?"), tools=[WEATHER, SEARCH]))
    assert sum(verdict.probabilities) == pytest.approx(1.0)
    assert all(0.0 < p < 1.0 for p in verdict.probabilities)
    assert verdict.engine == "static"
    assert verdict.tool == "get_weather"


def test_fused_inputs_carry_the_names_they_promise(gate: StaticGate) -> None:
    verdict = gate.judge(chat_of(user("what's the weather in Oslo?"), tools=[WEATHER, SEARCH]))
    fused = dict(zip(FUSED_NAMES, verdict.fused, strict=True))
    assert np.exp(fused["log_p_act"]) == pytest.approx(verdict.p_need)
    assert fused["n_tools"] == pytest.approx(np.log1p(2))
    assert fused["user_ends_question"] == 1.0
    assert set(FUSED_NAMES[len(LABELS) :]) <= set(SCALAR_NAMES)


def test_the_same_view_gets_the_same_verdict(gate: StaticGate) -> None:
    chat = chat_of(user("turn the heating up"), says("To what?"), user("21"), tools=[TURN_ON, WEATHER])
    first = gate.judge(chat)
    gate.judge(chat_of(user("something else"), tools=[SEARCH]))
    assert gate.judge(chat) == first


def test_reference_and_best_kernels_agree(gate: StaticGate) -> None:
    reference = load("reference")
    other = StaticGate.open(Scorer(RouterTable.open(None, reference), reference), reference, None)
    for chat in (
        chat_of(user("what's the weather in Oslo?"), tools=[WEATHER, SEARCH]),
        chat_of(
            user("list it"), calls("read_file", {"path": "a"}), result('{"error": "not found"}'), tools=[READ_FILE]
        ),
    ):
        assert other.judge(chat).probabilities == pytest.approx(gate.judge(chat).probabilities, abs=1e-6)


def test_odd_views_get_a_verdict(gate: StaticGate) -> None:
    for chat in (
        ChatView("x", "", (), (), b""),
        chat_of(system("only a system text")),
        chat_of(user("")),
        ChatView("x", "", (Message("user", "\ud83d\x00" * 50),), (), b""),
        chat_of(user("x" * 300_000)),
        chat_of(says("hello?")),
    ):
        assert sum(gate.judge(chat).probabilities) == pytest.approx(1.0)


def test_each_phase_has_thresholds_of_the_three_other_decisions(gate: StaticGate) -> None:
    assert len(gate.default_tau) == len(PHASES)
    for tau in gate.default_tau:
        assert all(isinstance(one, float) and 0.25 < one < 1.0 for one in (tau.answer, tau.ask, tau.decline))


def test_the_manifest_says_what_was_measured() -> None:
    figures = json.loads(DEFAULT_PATH.with_suffix(".json").read_text())["figures"]
    for name in ("held_out_domains", "held_out_first_steps", "held_out_later_steps", "gate_dev"):
        low, high = figures[name]["auroc_act_ci"]
        assert low < figures[name]["auroc_act"] < high
        assert figures[name]["n"] >= 60
    for name in ("held_out_first_steps", "held_out_later_steps"):
        wrong, n_act = figures[name]["false_skips"][:2]
        assert wrong <= 0.05 * n_act


def top(verdict: Verdict) -> str:
    return verdict.label


def test_d01_a_greeting_needs_no_search(gate: StaticGate) -> None:
    assert top(gate.judge(chat_of(user("hi"), tools=[SEARCH]))) == "ANSWER"


def test_d02_a_greeting_that_was_served_needs_no_second_call(gate: StaticGate) -> None:
    greet = tool("greet", "Greet the user.")
    turns = [user("Hello there"), calls("greet"), result("Hello! I can tell you the weather.")]
    assert top(gate.judge(chat_of(*turns, tools=[greet, WEATHER]))) == "ANSWER"


def test_d03_a_greeting_with_forty_one_tools(gate: StaticGate) -> None:
    tools = [tool(f"home_{i}", f"Control number {i} of the home.", required=("value",)) for i in range(41)]
    assert top(gate.judge(chat_of(system("House. " * 5000), user("hello"), tools=tools))) == "ANSWER"


def test_d05_prose_history_does_not_hide_an_action(gate: StaticGate) -> None:
    """Three words without a verb are a close call for the static stage; what counts: the tool is not withheld."""
    chat = chat_of(user("lamp on"), says("Turned on"), user("kitchen light on"), tools=[TURN_ON])
    settings = PolicySettings(default_tau=gate.default_tau)
    assert decide(gate.judge(chat), chat, None, SessionState(), settings).label == "ACT"


def test_d07_why_is_a_question(gate: StaticGate) -> None:
    turns = [says("I suggest deleting branch old-fix."), user("why do you suggest deleting old-fix?")]
    assert top(gate.judge(chat_of(*turns, tools=[SHELL]))) == "ANSWER"


def test_d08_a_shell_is_no_light_switch(gate: StaticGate) -> None:
    assert top(gate.judge(chat_of(user("turn off the living room lights"), tools=[TERMINAL, READ_FILE]))) == "DECLINE"


def test_r18_media_is_a_marker(gate: StaticGate) -> None:
    picture: Any = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "QUJD" * 100_000}}
    turn = {"role": "user", "content": [{"type": "text", "text": "what is this?"}, picture]}
    assert sum(gate.judge(chat_of(turn, tools=[SEARCH])).probabilities) == pytest.approx(1.0)


def test_missing_files(scorer: Scorer, copied: Path) -> None:
    copied.unlink()
    with pytest.raises(ArtifactError, match="cannot be read"):
        StaticGate.open(scorer, scorer.kernels, copied)
    copied.with_suffix(".json").unlink()
    with pytest.raises(ArtifactError, match="cannot be read"):
        StaticGate.open(scorer, scorer.kernels, copied)


def test_truncated_weights(scorer: Scorer, copied: Path) -> None:
    copied.write_bytes(copied.read_bytes()[:-100])
    with pytest.raises(ArtifactError, match="sha256"):
        StaticGate.open(scorer, scorer.kernels, copied)


def test_another_router(scorer: Scorer, copied: Path) -> None:
    edit_manifest(copied, router_sha256="0" * 64)
    with pytest.raises(ArtifactError, match=r"trained on router 0{12}.*convert\.train_gate"):
        StaticGate.open(scorer, scorer.kernels, copied)


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "other"},
        {"version": 99},
        {"classes": ["ACT"]},
        {"scalars": []},
        {"ngram_fields": {}},
        {"default_tau": [{"ANSWER": 7.0}, {}, {}]},
        {"default_tau": [{"ANSWER": 0.9}]},
        {"default_tau": None},
        {"default_tau": [{"ANSWER": "high"}, {}, {}]},
    ],
)
def test_a_manifest_of_another_kind(scorer: Scorer, copied: Path, changes: dict[str, Any]) -> None:
    edit_manifest(copied, **changes)
    with pytest.raises(ArtifactError):
        StaticGate.open(scorer, scorer.kernels, copied)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": 1}', "[" * 100_000])
def test_a_manifest_that_is_none(scorer: Scorer, copied: Path, text: str) -> None:
    copied.with_suffix(".json").write_text(text)
    with pytest.raises(ArtifactError):
        StaticGate.open(scorer, scorer.kernels, copied)


def _drop(arrays: dict[str, Any]) -> None:
    del arrays["blend_bias"]


def _narrow(arrays: dict[str, Any]) -> None:
    arrays["dense_out_weight"] = arrays["dense_out_weight"][:-1].copy()


def _retype(arrays: dict[str, Any]) -> None:
    arrays["ngram_weights"] = arrays["ngram_weights"].astype(np.float16)


def _poison(arrays: dict[str, Any]) -> None:
    arrays["scalar_mean"][0] = np.nan


def _odd_buckets(arrays: dict[str, Any]) -> None:
    arrays["ngram_weights"] = arrays["ngram_weights"][:-1].copy()


@pytest.mark.parametrize("change", [_drop, _narrow, _retype, _poison, _odd_buckets])
def test_contents_that_do_not_fit(scorer: Scorer, copied: Path, change: Callable[[dict[str, Any]], None]) -> None:
    edit_weights(copied, change)
    with pytest.raises(ArtifactError, match="do not fit"):
        StaticGate.open(scorer, scorer.kernels, copied)


def test_weights_that_are_no_safetensors(scorer: Scorer, copied: Path) -> None:
    copied.write_bytes(b"\x00" * 64)
    edit_manifest(copied, sha256=hashlib.sha256(copied.read_bytes()).hexdigest())
    with pytest.raises(ArtifactError, match="do not fit"):
        StaticGate.open(scorer, scorer.kernels, copied)
