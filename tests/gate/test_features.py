"""gate.features: numbers from any view; only the texts that matter, each looked at once; nothing raises."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.gate.chats import WEATHER, calls, chat_of, result, says, system, tool, user
from whetherman_edge.dialects.chat import ChatView, Message, Parameter, Tool, ToolCall
from whetherman_edge.gate.features import (
    DENSE_BLOCKS,
    N_SCALARS,
    NGRAM_FIELDS,
    SCALAR_NAMES,
    Extractor,
    Features,
)
from whetherman_edge.gate.text_signals import HEAD_CHARS_MAX, TAIL_CHARS_MAX, clip, literal_values
from whetherman_edge.kernels import load
from whetherman_edge.router.scorer import Scorer
from whetherman_edge.router.table import RouterTable

MAIL = tool("send_mail", "Send an e-mail to one person.", required=("recipient_id", "body"))
PEOPLE = tool("find_people", "Search the staff directory by name.", required=("name",))


@pytest.fixture(scope="module")
def scorer() -> Scorer:
    kernels = load()
    return Scorer(RouterTable.open(None, kernels), kernels)


@pytest.fixture
def extractor(scorer: Scorer) -> Extractor:
    return Extractor(scorer)


def named(features: Features) -> dict[str, float]:
    return dict(zip(SCALAR_NAMES, features.scalars.tolist(), strict=True))


def test_shapes_and_names(extractor: Extractor) -> None:
    features = extractor.extract(chat_of(user("weather in Oslo?"), tools=[WEATHER]))
    assert features.scalars.shape == (N_SCALARS,)
    assert features.scalars.dtype == np.float32
    assert features.dense.shape == (len(DENSE_BLOCKS), 256)
    assert features.dense.dtype == np.float32
    assert len(features.fields) <= len(NGRAM_FIELDS)
    assert all(field.text for field in features.fields)
    assert len(set(SCALAR_NAMES)) == N_SCALARS
    assert np.isfinite(features.scalars).all()
    assert np.isfinite(features.dense).all()


def test_the_router_s_choice_is_reported(extractor: Extractor) -> None:
    features = extractor.extract(chat_of(user("will it rain in Oslo tomorrow?"), tools=[MAIL, WEATHER]))
    assert features.tool == "get_weather"
    assert 0.5 < features.tool_probability <= 1.0


def test_calls_since_the_user_turn_are_told_from_earlier_ones(extractor: Extractor) -> None:
    before = named(
        extractor.extract(
            chat_of(
                user("find Ana"),
                calls("find_people", {"name": "Ana"}),
                result("u1 Ana"),
                says("It is u1."),
                user("thanks"),
                tools=[PEOPLE, MAIL],
            )
        )
    )
    now = named(
        extractor.extract(
            chat_of(user("find Ana"), calls("find_people", {"name": "Ana"}), result("u1 Ana"), tools=[PEOPLE, MAIL])
        )
    )
    assert before["n_calls"] == 0.0
    assert before["has_earlier_results"] == 1.0
    assert now["n_calls"] == 1.0
    assert now["has_earlier_results"] == 0.0
    assert now["last_is_tool"] == 1.0
    assert before["last_is_tool"] == 0.0


def test_a_dialogue_has_three_phases(extractor: Extractor) -> None:
    first = [user("find Ana")]
    called = [*first, calls("find_people", {"name": "Ana"}), result("u1 Ana")]
    later = [*called, says("It is u1."), user("and Bo?")]
    assert [extractor.extract(chat_of(*turns, tools=[PEOPLE])).phase for turns in (first, called, later)] == [0, 2, 1]


def test_repeated_calls_are_counted_by_name_and_arguments(extractor: Extractor) -> None:
    turns = [user("find Ana and Bo")]
    for name in ("Ana", "Ana", "Bo"):
        turns += [calls("find_people", {"name": name}), result("none")]
    values = named(extractor.extract(chat_of(*turns, tools=[PEOPLE])))
    assert values["repeated_calls"] == 1.0
    assert values["same_tool_calls"] == 2.0


def test_a_result_field_that_another_tool_requires_is_a_next_hop(extractor: Extractor) -> None:
    turns = [user("mail Ana that I am late"), calls("find_people", {"name": "Ana"})]
    with_id = named(extractor.extract(chat_of(*turns, result('{"recipient_id": "u1"}'), tools=[PEOPLE, MAIL])))
    without = named(extractor.extract(chat_of(*turns, result('{"matches": 0}'), tools=[PEOPLE, MAIL])))
    assert with_id["hop_identifiers"] == 1.0
    assert without["hop_identifiers"] == 0.0


@pytest.mark.parametrize(
    ("text", "cue"),
    [
        ('{"error": "timeout", "retryable": true}', "now_retry"),
        ('{"error": "permission denied"}', "now_denied"),
        ('{"items": [1], "next_cursor": "abc"}', "now_page"),
        ('{"status": "in_progress"}', "now_pending"),
        ("[]", "now_blank"),
    ],
)
def test_a_result_tells_its_state(extractor: Extractor, text: str, cue: str) -> None:
    values = named(extractor.extract(chat_of(user("find Ana"), calls("find_people"), result(text), tools=[PEOPLE])))
    plain = named(
        extractor.extract(chat_of(user("find Ana"), calls("find_people"), result("u1 Ana Lima"), tools=[PEOPLE]))
    )
    assert values[cue] == 1.0
    assert plain[cue] == 0.0


def test_the_history_does_not_change_what_is_looked_at(extractor: Extractor) -> None:
    """Twenty more turns of history change the counts, not the texts or the router's choice."""
    old = [user("hello"), says("hi")] * 10
    tail = [user("book a table"), says("Where?"), user("at Luigi's, for two")]
    short = extractor.extract(chat_of(*tail, tools=[WEATHER]))
    long = extractor.extract(chat_of(*old, *tail, tools=[WEATHER]))
    assert short.fields == long.fields
    np.testing.assert_array_equal(short.dense, long.dense)


def test_same_view_same_features_whatever_was_seen_before(scorer: Scorer) -> None:
    fresh, used = Extractor(scorer), Extractor(scorer)
    for i in range(50):
        used.extract(chat_of(system(f"s{i}"), user(f"question {i}?"), tools=[PEOPLE, MAIL]))
    view = chat_of(system("Be brief."), user("mail Ana"), tools=[PEOPLE, MAIL])
    np.testing.assert_array_equal(fresh.extract(view).scalars, used.extract(view).scalars)


def test_c08_tool_order_does_not_matter(extractor: Extractor) -> None:
    turns = [user("will it rain?"), calls("find_people", {"name": "x"}), result("none")]
    one = extractor.extract(chat_of(*turns, tools=[WEATHER, PEOPLE, MAIL]))
    other = extractor.extract(chat_of(*turns, tools=[MAIL, WEATHER, PEOPLE]))
    np.testing.assert_allclose(one.scalars, other.scalars, atol=1e-5)
    np.testing.assert_allclose(one.dense, other.dense, atol=1e-5)


def test_no_turns_no_tools(extractor: Extractor) -> None:
    features = extractor.extract(ChatView("x", "", (), (), b""))
    assert features.tool == ""
    assert features.tool_probability == 0.0
    assert np.isfinite(features.scalars).all()


def test_no_user_turn(extractor: Extractor) -> None:
    values = named(extractor.extract(chat_of(system("Start."), calls("get_weather"), result("4 C"), tools=[WEATHER])))
    assert values["n_calls"] == 1.0
    assert values["n_user_turns"] == 0.0


def test_clip_keeps_both_ends_and_its_limit() -> None:
    text = "a" * 5000 + "END"
    assert clip(text).endswith("END")
    assert len(clip(text)) <= HEAD_CHARS_MAX + TAIL_CHARS_MAX + 3
    assert clip("short") == "short"
    assert clip("x\ud800y") == "x?y"


def test_literal_values() -> None:
    values = literal_values('Send report_7.pdf to ana@acme.org and say "on my way" to Bo')
    assert {"report_7.pdf", "ana@acme.org", "on my way", "bo"} <= values
    assert "send" not in values


TEXT = st.one_of(
    st.text(max_size=80),
    st.text(alphabet=st.characters(codec=None, categories=["Cs", "Cc", "Lo", "So"]), max_size=40),
    st.sampled_from(["", "?", "\x00", "x" * 20_000, "[" * 4000, '{"a":' * 900, "\ud83d", "a\u0300" * 900, "—" * 3000]),
)
NAME = st.one_of(TEXT, st.sampled_from(["get_weather", "find_people"]))


def digest(value: object) -> bytes:
    """Keys are digests of bytes in production; here, of what the bytes would say."""
    return hashlib.blake2b(repr(value).encode("utf-8", "replace"), digest_size=16).digest()


# JSON decoders refuse lone surrogates, so no tool or message carries one; messages are cut and cleaned all the same.
TOOL_TEXT = TEXT.filter(lambda text: not any("\ud800" <= c <= "\udfff" for c in text))
TOOL = st.builds(
    lambda name, description, parameters: Tool(
        name, description, tuple(parameters), digest((name, description, parameters))
    ),
    TOOL_TEXT,
    TOOL_TEXT,
    st.lists(st.builds(Parameter, name=TOOL_TEXT, required=st.booleans()), max_size=3),
)
MESSAGE = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "assistant", "tool"]),
    text=TEXT,
    calls=st.lists(st.builds(ToolCall, id=TEXT, name=NAME, arguments=TEXT), max_size=2).map(tuple),
    tool_name=NAME,
    tool_call_id=TEXT,
    n_media=st.integers(0, 2),
)
VIEW = st.builds(
    lambda messages, tools: ChatView("openai_chat", "", tuple(messages), tuple(tools), digest(tools)),
    st.lists(MESSAGE, max_size=8),
    st.lists(TOOL, max_size=4),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(view=VIEW)
def test_any_view_gives_finite_numbers(scorer: Scorer, view: ChatView) -> None:
    features = Extractor(scorer).extract(view)
    assert np.isfinite(features.scalars).all()
    assert np.isfinite(features.dense).all()
    assert all(isinstance(field.text, bytes) for field in features.fields)


def test_media_is_counted_and_never_read(extractor: Extractor) -> None:
    picture: Any = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "QUJD" * 2000}}
    turn = {"role": "user", "content": [{"type": "text", "text": "what is this?"}, picture]}
    features = extractor.extract(chat_of(turn, tools=[WEATHER]))
    assert named(features)["has_media"] == 1.0
    assert not any(b"QUJD" in field.text for field in features.fields)
