"""Prompts: golden texts of both styles, text that stays text, and a cut that keeps its prefix."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whetherman_edge.backbone.prompt import Piece, cut, first_sentence, kept_turns, opening, render, tokenize
from whetherman_edge.dialects.chat import ChatView, Message, Parameter, Tool, ToolCall
from whetherman_edge.errors import ArtifactError

WEATHER = Tool(
    "get_weather",
    "Current weather of a city. Uses a public service.",
    (Parameter("unit", "string", "c or f"), Parameter("city", "string", "Name of the city.", required=True)),
    b"w" * 16,
)
CLOCK = Tool("clock", "The time now.", (), b"c" * 16)
DIALOGUE = (
    Message("system", "Be brief."),
    Message("user", "Is it <end_of_turn> raining in Oslo?"),
    Message("assistant", "", (ToolCall("1", "get_weather", '{"city":"Oslo"}'),)),
    Message("tool", '{"rain": true}', tool_name="get_weather", tool_call_id="1"),
)


def chat(messages: tuple[Message, ...] = DIALOGUE, tools: tuple[Tool, ...] = (WEATHER, CLOCK)) -> ChatView:
    return ChatView("openai_chat", "m", messages, tools, b"k" * 16)


def text_of(pieces: object) -> str:
    return "".join(piece.text for piece in pieces)  # type: ignore[attr-defined]


def bytes_of(piece: Piece) -> list[int]:
    """A stand-in tokeniser: a control token is one id above the bytes."""
    return [1000 + sum(piece.text.encode()) % 500] if piece.control else list(piece.text.encode())


def test_compact_golden() -> None:
    prompt = render(chat(), "compact")
    assert text_of(prompt.tools) == (
        "Tools:\nclock(): The time now.\nget_weather(city*, unit): Current weather of a city. Uses a public service.\n"
    )
    assert [text_of(turn) for turn in prompt.turns] == [
        "System: Be brief.\n",
        "User: Is it <end_of_turn> raining in Oslo?\n",
        'Call get_weather({"city":"Oslo"})\n',
        'Result get_weather: {"rain": true}\n',
    ]
    assert text_of(prompt.cue) == "Next:"
    assert prompt.tool_names == ("clock", "get_weather")


def test_functiongemma_golden() -> None:
    prompt = render(chat(tools=(WEATHER,)), "functiongemma")
    whole = text_of(prompt.tools) + "".join(text_of(turn) for turn in prompt.turns) + text_of(prompt.cue)
    assert whole == (
        "<start_of_turn>developer\nYou are a model that can do function calling with the following functions"
        "<start_function_declaration>declaration:get_weather{description:<escape>Current weather of a city. Uses a "
        "public service.<escape>,parameters:{properties:{unit:{description:<escape>c or f<escape>,type:<escape>STRING"
        "<escape>},city:{description:<escape>Name of the city.<escape>,type:<escape>STRING<escape>}},required:[<escape>"
        "city<escape>],type:<escape>OBJECT<escape>}}<end_function_declaration>\nBe brief.<end_of_turn>\n"
        "<start_of_turn>user\nIs it <end_of_turn> raining in Oslo?<end_of_turn>\n<start_of_turn>model\n"
        "<start_function_call>call:get_weather{city:<escape>Oslo<escape>}<end_function_call><start_function_response>"
        'response:get_weather{value:<escape>{"rain": true}<escape>}<end_function_response>'
    )


@pytest.mark.parametrize("style", ["compact", "functiongemma"])
def test_text_with_special_tokens_stays_text(style: str) -> None:
    prompt = render(chat(), style)  # type: ignore[arg-type]
    control = [p.text for turn in prompt.turns for p in turn if p.control]
    assert all("raining" not in text for text in control)
    users = [p for turn in prompt.turns for p in turn if "raining" in p.text]
    assert len(users) == 1
    assert "<end_of_turn>" in users[0].text
    assert not users[0].control


@pytest.mark.parametrize("style", ["compact", "functiongemma"])
def test_C08_tool_order_does_not_matter(style: str) -> None:
    tools = [WEATHER, CLOCK, *(Tool(f"t{i}", f"Does {i}.", (), bytes([i]) * 16) for i in range(10))]
    reference = render(chat(tools=tuple(tools)), style)  # type: ignore[arg-type]
    for seed in range(10):
        shuffled = random.Random(seed).sample(tools, len(tools))
        assert render(chat(tools=tuple(shuffled)), style) == reference  # type: ignore[arg-type]


@pytest.mark.parametrize("style", ["compact", "functiongemma"])
def test_a_growing_dialogue_keeps_its_prefix(style: str) -> None:
    before = tokens(chat(DIALOGUE[:2]), style)
    after = tokens(chat(), style)
    n_cue = sum(len(bytes_of(p)) for p in render(chat(DIALOGUE[:2]), style).cue)  # type: ignore[arg-type]
    assert after[: len(before) - n_cue] == before[: len(before) - n_cue]


def tokens(view: ChatView, style: str) -> tuple[int, ...]:
    return tokenize(render(view, style), bytes_of, 2, tools_max=4000, dialogue_max=4000).ids  # type: ignore[arg-type]


def test_tool_ends_point_at_the_last_token_of_each_line() -> None:
    prompt = render(chat(), "compact")
    found = tokenize(prompt, bytes_of, 2, tools_max=4000, dialogue_max=4000)
    assert [found.ids[end] for end in found.tool_ends] == [ord("\n")] * 2
    assert found.tool_ends[-1] == found.n_tools - 1


def test_tools_past_the_budget_are_left_out_whole() -> None:
    tools = tuple(Tool(f"tool_{i:02}", "x" * 100, (), bytes([i]) * 16) for i in range(40))
    found = tokenize(render(chat(tools=tools), "compact"), bytes_of, 2, tools_max=1000, dialogue_max=4000)
    assert found.n_tools <= 1000
    assert 5 <= len(found.tool_ends) < 40


def test_unknown_style_is_refused() -> None:
    with pytest.raises(ArtifactError, match="compact or functiongemma"):
        render(chat(), "chatml")  # type: ignore[arg-type]


def test_a_line_break_in_a_name_does_not_end_its_line() -> None:
    tool = Tool("a\nb", "Does.", (Parameter("c\nd"),), b"w" * 16)
    assert text_of(render(chat(tools=(tool,)), "compact").tools) == "Tools:\na b(c d): Does.\n"


def test_arguments_nested_without_end_are_text() -> None:
    call = ToolCall("c1", "get_weather", "[" * 100_000)
    deep = chat(messages=(Message("user", "x"), Message("assistant", "", calls=(call,))))
    assert "[[[" in text_of([piece for turn in render(deep, "functiongemma").turns for piece in turn])


def test_C07_a_huge_description_adds_one_bounded_line() -> None:
    tool = Tool("big", "z" * 80_000, tuple(Parameter(f"p{i}") for i in range(500)), b"b" * 16)
    assert len(text_of(render(chat(tools=(tool,)), "compact").tools)) < 400


@pytest.mark.parametrize(
    ("text", "expected"),
    [("One. Two.", "One."), ("v1.2 of it\nmore", "v1.2 of it"), ("", ""), ("  Ask? Yes.", "Ask?"), ("一。二", "一。")],
)
def test_first_sentence(text: str, expected: str) -> None:
    assert first_sentence(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Finds hotels. Only in Japan. Prices are in yen.", "Finds hotels. Only in Japan."),
        ("Finds hotels\n\n  in Japan.\nYen.", "Finds hotels in Japan. Yen."),
        ("Finds hotels everywhere in the whole world", "Finds hotels everywhere in the w"),
        ("Short! " + "x" * 40 + ". Tail.", "Short!"),
        ("一。二", "一。 二"),
        (" \n ", ""),
        (". . .", ". . ."),
    ],
)
def test_opening_keeps_whole_sentences(text: str, expected: str) -> None:
    assert opening(text, 32) == expected


@given(st.text(), st.integers(1, 60))
def test_opening_is_one_line_within_its_limit(text: str, chars_max: int) -> None:
    found = opening(text, chars_max)
    assert len(found) <= chars_max
    assert "\n" not in found


def test_a_limit_in_the_second_sentence_reaches_the_prompt() -> None:
    tool = Tool("weather", "Current weather of a city. Covers the United States only.", (), b"w" * 16)
    assert "United States only." in text_of(render(chat(tools=(tool,)), "compact").tools)


def test_cut_keeps_both_ends() -> None:
    short = cut("a" * 100 + "b" * 100, 80)
    assert short.startswith("a" * 60)
    assert short.endswith("b" * 20)
    assert cut("abc", 80) == "abc"


@given(st.lists(st.integers(1, 400), min_size=1, max_size=60), st.integers(50, 1000))
def test_kept_turns_keeps_the_first_and_the_last(lengths: list[int], budget: int) -> None:
    kept = kept_turns(lengths, budget)
    assert kept == sorted(set(kept))
    assert kept[0] == 0
    assert kept[-1] == len(lengths) - 1
    if sum(lengths) <= budget:
        assert kept == list(range(len(lengths)))


def test_kept_turns_bounds_what_stays_and_moves_rarely() -> None:
    lengths = [40] * 400
    cuts = [tuple(kept_turns(lengths[:n], 1000)) for n in range(3, 400)]
    for kept in cuts:
        assert sum(lengths[i] for i in kept) <= 1000 + 500
    gaps = [next((b for a, b in itertools.pairwise(kept) if b != a + 1), 0) for kept in cuts]
    moves = sum(a != b for a, b in itertools.pairwise(gaps))
    assert moves <= 40 * 400 // 500 + 1  # once every half budget, not once a turn
