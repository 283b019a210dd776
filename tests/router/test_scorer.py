"""Scores, choices and the requests that are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whetherman_edge.dialects.chat import Parameter, Tool
from whetherman_edge.errors import ArtifactError, RequestError
from whetherman_edge.kernels import load
from whetherman_edge.router.artifact import open_artifact, write_artifact
from whetherman_edge.router.card import cards_of, from_tool, make_card, spaced
from whetherman_edge.router.prototype import to_int8
from whetherman_edge.router.scorer import Scorer
from whetherman_edge.router.table import RouterTable

TOOLS = {
    "get_weather": "Weather forecast for a city.",
    "playTrack": "Play a song.",
    "send-email": {"description": "Send an email to someone.", "parameters": {"properties": {"to": {}, "body": {}}}},
    "noop": None,
}


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("will it rain in Oslo on friday", "get_weather"),
        ("put on some jazz music", "playTrack"),
        ("mail Anna", "send-email"),
    ],
)
def test_the_obvious_tool_is_chosen(scorer, query, expected):
    choice = scorer.route(query, TOOLS)
    assert choice.choice == expected
    assert list(choice.probabilities) == list(TOOLS)
    assert math.isclose(sum(choice.probabilities.values()), 1.0, abs_tol=1e-9)
    assert choice.confidence == max(choice.probabilities.values()) == choice.probabilities[expected]


def test_names_come_back_byte_identical(scorer):
    options = {
        "Wetter – ☂": "weather forecast",
        " spaced  name ": "music",
        "ﬁle": None,
        "a\u0301": None,
        "\u00e1": None,
    }
    assert list(scorer.route("rain?", options).probabilities) == list(options)


def test_examples_help(scorer):
    plain = {"zeta": "Internal procedure twelve.", "eta": "Internal procedure thirteen."}
    taught = {"zeta": {"description": plain["zeta"], "examples": ["order new printer paper"]}, "eta": plain["eta"]}
    query = "we need printer paper again"
    assert scorer.route(query, taught).probabilities["zeta"] > scorer.route(query, plain).probabilities["zeta"] + 0.2


def test_known_options_skip_the_checks_but_not_the_answer(scorer):
    first = scorer.route("rain in Oslo", TOOLS)
    assert scorer.route("rain in Oslo", json.loads(json.dumps(TOOLS))) == first
    with pytest.raises(RequestError):
        scorer.route("rain in Oslo", {**TOOLS, 7: "a number as its name"})


def test_chat_tools_and_options_score_alike(scorer):
    tool = Tool("get_weather", "Weather forecast for a city.", (Parameter("city"),), b"k" * 16)
    card = make_card("get_weather", "Weather forecast for a city.", ["city"])
    assert from_tool(tool).parameters == ("city",)
    one, two = (scorer.score("rain", scorer.slate([x, make_card("b", "music")])).logit for x in (tool, card))
    assert one.tolist() == two.tolist()


def test_scores_do_not_depend_on_what_was_asked_before(table, kernels):
    fresh, used = Scorer(table, kernels), Scorer(table, kernels)
    for i in range(80):
        used.route(f"query {i}", {f"tool_{i}": "something", "other thing": None, "get_weather": f"forecast {i}"})
    assert fresh.route("rain in Oslo", TOOLS) == used.route("rain in Oslo", TOOLS)


@pytest.mark.parametrize("isa", ["serial", "best"])
def test_native_and_reference_scores_are_bit_equal(table, kernels, isa):
    try:
        native = load(isa)
    except Exception:
        pytest.skip(f"{isa} kernels are not built here")
    ours = Scorer(RouterTable(table.artifact, native), native)
    reference = Scorer(table, kernels)
    for query in ("rain in Oslo", "überweise 20 € an Jana", "", "x" * 4000, "stop the container, then prune"):
        a = ours.score(query, ours.slate(cards_of({**TOOLS, "wiki": None, "shell": "Run a command."})))
        b = reference.score(query, reference.slate(cards_of({**TOOLS, "wiki": None, "shell": "Run a command."})))
        for field in ("logit", "cos_tool", "cos_desc", "cos_name", "lexical", "probability"):
            assert getattr(a, field).tolist() == getattr(b, field).tolist(), (query, field)


@settings(deadline=None, max_examples=200)
@given(
    query=st.text(max_size=80), names=st.lists(st.text(min_size=1, max_size=12), min_size=2, max_size=8, unique=True)
)
def test_any_text_gives_finite_probabilities(table, kernels, query, names):
    scorer = Scorer(table, kernels)
    scores = scorer.score(query, scorer.slate([make_card(n, n[::-1]) for n in names]))
    assert np.isfinite(scores.logit).all()
    assert math.isclose(float(scores.probability.sum()), 1.0, abs_tol=1e-9)


def test_an_empty_slate_scores_nothing(scorer):
    assert scorer.score("rain", scorer.slate([])).probability.tolist() == []


def test_unknown_words_leave_even_odds(scorer):
    probabilities = scorer.route("\U0001f9ff", {"aa": None, "bb": None}).probabilities
    assert max(probabilities.values()) < 0.9


@pytest.mark.parametrize(
    ("options", "kind", "loc"),
    [
        ({}, "too_short", ("body", "options")),
        ({"only": None}, "too_short", ("body", "options")),
        ({f"t{i}": None for i in range(256)}, "too_long", ("body", "options")),
        (["a", "b"], "mapping_type", ("body", "options")),
        (None, "mapping_type", ("body", "options")),
        ({"a": 3, "b": None}, "option_type", ("body", "options", "a")),
        ({"a": ["x"], "b": None}, "option_type", ("body", "options", "a")),
        ({1: "x", "b": None}, "string_type", ("body", "options")),
        ({"": "x", "b": None}, "string_too_short", ("body", "options", "")),
        ({"  ": "x", "b": None}, "string_too_short", ("body", "options", "  ")),
        ({"a": {"description": 3}, "b": None}, "string_type", ("body", "options", "a", "description")),
        ({"a": {"descripton": "x"}, "b": None}, "extra_forbidden", ("body", "options", "a")),
        ({"a": {"examples": "x"}, "b": None}, "list_type", ("body", "options", "a", "examples")),
        ({"a": {"examples": ["x", 3]}, "b": None}, "string_type", ("body", "options", "a", "examples", 1)),
        ({"a": {"examples": ["x"] * 65}, "b": None}, "too_long", ("body", "options", "a", "examples")),
        ({"a": {"parameters": 3}, "b": None}, "parameters_type", ("body", "options", "a", "parameters")),
        ({"a": {"parameters": [3]}, "b": None}, "string_type", ("body", "options", "a", "parameters", 0)),
    ],
)
def test_requests_out_of_contract_say_where_and_what(scorer, options, kind, loc):
    with pytest.raises(RequestError) as caught:
        scorer.route("rain", options)
    assert (caught.value.kind, caught.value.loc) == (kind, loc)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("query", "kind"),
    [("", "string_too_short"), (" \n", "string_too_short"), (None, "string_type"), (3, "string_type")],
)
def test_queries_out_of_contract(scorer, query, kind):
    with pytest.raises(RequestError) as caught:
        scorer.route(query, TOOLS)
    assert caught.value.kind == kind


@pytest.mark.parametrize("n", [2, 255])
def test_the_limits_are_allowed(scorer, n):
    assert len(scorer.route("rain", {f"tool {i}": f"does thing {i}" for i in range(n)}).probabilities) == n


def test_shifted_descriptions_destroy_the_choice(scorer):
    right = {
        "one": "Weather forecast for a city.", "two": "Play music and songs.", "three": "Send an email.",
        "four": "Book a flight.", "five": "Translate a text.",
    }  # fmt: skip
    wrong = dict(zip(right, [*list(right.values())[1:], right["one"]], strict=True))
    queries = {
        "one": "is it going to rain",
        "two": "put on a song",
        "three": "mail this to Tom",
        "four": "plane to Rome",
    }
    assert sum(scorer.route(q, right).choice == t for t, q in queries.items()) == 4
    assert sum(scorer.route(q, wrong).choice == t for t, q in queries.items()) == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("getWeatherByCity", "get weather by city"),
        ("get_weather-by.city", "get weather by city"),
        ("HTTPServer2", "http server 2"),
        ("S3Upload", "s 3 upload"),
    ],
)
def test_names_become_words(name, words):
    assert spaced(name) == words


def test_int8_directions():
    assert to_int8(np.array([[2.0, -4.0, 1.0], [0.0, 0.0, 0.0]])).tolist() == [[64, -127, 32], [0, 0, 0]]


def test_cards_that_differ_have_keys_that_differ():
    cards = [
        *(make_card("a", "b"), make_card("ab", ""), make_card("a", "", ["b"]), make_card("a", "", [], ["b"])),
        *(make_card("a", "", ["b", "c"]), make_card("a", "", ["b"], ["c"]), make_card("a", "", [], ["b", "c"])),
        *(make_card("a", "", ["\0", "b"]), make_card("a", "", [], ["b", "\0"])),
    ]
    assert len({card.key for card in cards}) == len(cards)


def test_caches_are_bounded(scorer, monkeypatch):
    monkeypatch.setattr("whetherman_edge.router.tool_lru.LISTS_MAX", 3)
    monkeypatch.setattr("whetherman_edge.router.tool_lru.TOOLS_MAX", 5)
    monkeypatch.setattr("whetherman_edge.router.scorer.LISTS_MAX", 3)
    for i in range(20):
        scorer.route("rain", {f"a{i}": "x", f"b{i}": {"description": "y"}})
    assert len(scorer._slates) <= 3
    assert len(scorer._tools) <= 5
    assert len(scorer._routes) <= 3


@pytest.mark.parametrize("config", [b"{", b"[]", b"{}", b'{"mix": [1, 2]}', b'{"mix": "x"}', b"\xff"])
def test_a_broken_config_is_an_artifact_error(tiny, tmp_path, kernels, config):
    artifact = open_artifact(tiny)
    arrays = {n: artifact.array(n, s.dtype, len(s.shape)) for n, s in artifact._sections.items()}
    arrays["config"] = np.frombuffer(config, dtype=np.uint8)
    write_artifact(Path(tmp_path / "bad"), arrays, {})
    with pytest.raises(ArtifactError):
        Scorer(RouterTable.open(tmp_path / "bad", kernels), kernels)
