"""R06: a call written as text is told from an answer, as early as the text allows, however it is cut."""

from __future__ import annotations

import json
import signal
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whetherman_edge.gate.leak import (
    HOLD_CHARS_MAX,
    HOLD_REASONING_CHARS_MAX,
    LeakDetector,
    classify,
    holds_call,
)

NAMES = frozenset({"get_weather", "search", "terminal"})
CALL = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'

LEAKS = {
    "invoke": '<invoke name="get_weather"><parameter name="city">Oslo</parameter></invoke>',
    "function calls": '<function_calls>\n<invoke name="get_weather">',
    "minimax": '<minimax:tool_call>\n<invoke name="get_weather">',
    "seed": "<seed:tool_call><function=get_weather>",
    "deepseek 3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather",
    "deepseek 3.2": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">',
    "cohere": '<|START_ACTION|>[{"tool_name": "get_weather", "parameters": {}}]<|END_ACTION|>',
    "command r": 'Action: ```json\n[{"tool_name": "get_weather", "parameters": {}}]\n```',
    "react with a thought": "Thought: I need the weather.\nAction: get_weather\nAction Input: Oslo",
    "hermes": f"<tool_call>\n{CALL}\n</tool_call>",
    "hermes after a line break": f"\n\n<tool_call>\n{CALL}\n</tool_call>",
    "function tag": "<function=get_weather>{}</function>",
    "mistral": f"[TOOL_CALLS][{CALL}]",
    "llama": "<|python_tag|>get_weather.call(city='Oslo')",
    "deepseek": "<｜tool▁calls▁begin｜>",
    "harmony": "<|channel|>commentary to=functions.search <|message|>{}",
    "function gemma": "<start_function_call>call:get_weather{city:<escape>Oslo<escape>}<end_function_call>",
    "gemma text": "call:get_weather{city: Oslo}",
    "fenced json": f"```json\n{CALL}\n```",
    "fence without a language": f"```\n{CALL}\n```",
    "tool_code": "```tool_code\nprint(get_weather(city='Oslo'))\n```",
    "python fence": "```python\nget_weather(city='Oslo')\n```",
    "bare json": CALL,
    "bare json, compact": '{"name":"get_weather","arguments":{}}',
    "parameters": '{"name": "get_weather", "parameters": {"city": "Oslo"}}',
    "doubled braces": '{{"name": "get_weather", "arguments": {{"city": "Oslo"}}}}',
    "arguments first": '{"arguments": {"city": "Oslo", "name": "x"}, "name": "get_weather"}',
    "typed": '{"type": "function", "function": {"name": "get_weather", "parameters": {"city": "Oslo"}}}',
    "array": f"[{CALL}]",
    "tool_calls": json.dumps({"tool_calls": [{"id": "1", "function": {"name": "search", "arguments": "{}"}}]}),
    "namespaced": '{"name": "functions.search", "arguments": {}}',
    "python dict": "{'name': 'get_weather', 'arguments': {'city': 'Oslo'}}",
    "pythonic": "[get_weather(city='Oslo')]",
    "bare call": "get_weather(city='Oslo')",
    "printed call": "print(get_weather('Oslo'))",
    "react": 'Action: search\nAction Input: {"q": "x"}',
    "react json": '{"action": "search", "action_input": "x"}',
    "xml tag": "<get_weather><city>Oslo</city></get_weather>",
    "behind empty thinking": f"<think>\n\n</think>\n\n{CALL}",
}
ANSWERS = {
    "thought and answer": "Thought: easy.\nFinal Answer: 4",
    "thought and another action": "Thought: easy.\nAction: think\nAction Input: x",
    "thought": "Thought: what a day",
    "action line in prose": "Plan:\nAction: get_weather is called by agents first.",
    "invoke in a shell": "<invoke> is a tag.",
    "prose": "It is sunny in Oslo.",
    "prose with a tool's name": "search is a tool; I cannot use it here.",
    "a tool's name alone": "get_weather is what you need",
    "code": "```python\ndef f(x):\n    return x\n```",
    "shell": "```bash\nls -l\n```",
    "json answer": '```json\n{"city": "Oslo", "temperature": 7}\n```',
    "bare json answer": '{"answer": 42}',
    "json about a person": '{"name": "Ann", "age": 7}',
    "json about another function": '{"name": "print", "arguments": ["x"]}',
    "json with a tool's name only": '{"name": "search", "engine": "x"}',
    "numbers": "[1, 2, 3]",
    "strings": '["a", "search"]',
    "empty object": "{}",
    "final answer": '{"action": "final_answer", "action_input": "42"}',
    "markdown": "# Title\n\n- one\n- two",
    "quote": "> hm",
    "html": "<div>hi</div>",
    "thinking": "<think>hm</think>The answer is 4.",
    "backtick": "`x` is a variable",
    "boxed": "\\boxed{4}",
    "reference": "[1] is the source",
    "link": "[Tool docs](https://x.org)",
    "action prose": "Action: think about it",
    "number": "42",
    "emoji": "🙂 hello",
    "latex brace": "{x: 1}",
}


@pytest.mark.parametrize("text", LEAKS.values(), ids=LEAKS)
def test_R06_calls_are_leaks_however_they_are_written(text: str) -> None:
    detector = LeakDetector(NAMES)
    states = [detector.text(char) for char in text]
    assert detector.close() == "LEAK"
    assert "CLEAR" not in states
    assert holds_call(text, NAMES)


@pytest.mark.parametrize("text", ANSWERS.values(), ids=ANSWERS)
def test_answers_are_clear(text: str) -> None:
    detector = LeakDetector(NAMES)
    states = [detector.text(char) for char in text]
    assert detector.close() == "CLEAR"
    assert "LEAK" not in states
    assert not holds_call(text, NAMES)


@pytest.mark.parametrize(
    ("text", "settled_by"),
    [
        ("It is sunny", "I"),
        ("The weather", "Th"),  # "Thought:" could follow a Th
        ("search is", "search "),
        ("```python\ndef f", "```python\ndef"),
        ('```json\n{"city"', '```json\n{"c'),
        ('{"answer"', '{"an'),
        ('{"name": "Ann"', '{"name": "A'),
        ("<div>", "<d"),
        ("# Title", "#"),
        ("<tool_call>", "<tool_call"),
        ('{"name": "search", "arguments": {', '{"name": "search", "arguments":'),
    ],
)
def test_the_first_characters_settle_it(text: str, settled_by: str) -> None:
    states = [classify(text[:n], NAMES) for n in range(len(text) + 1)]
    first = next(n for n, state in enumerate(states) if state != "HOLD")
    assert first <= len(settled_by) + 1
    assert "HOLD" not in states[first:]


@given(st.sampled_from([*LEAKS.values(), *ANSWERS.values()]), st.lists(st.integers(0, 120)))
def test_how_a_text_is_cut_makes_no_difference(text: str, cuts: list[int]) -> None:
    whole, pieces = LeakDetector(NAMES), LeakDetector(NAMES)
    whole.text(text)
    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    for start, end in pairwise(borders):
        pieces.text(text[start:end])
    assert pieces.close() == whole.close()


_FRAGMENTS = st.sampled_from(
    "{ } [ ] : , \" ' ` ``` \n < > | ( ) name arguments search get_weather function type tool_call json 1 x . \\ "
    '<think> </think> functions. Action print "name" "arguments" "search" "query" {"name": "search", '.split(" ")
)


@given(st.lists(_FRAGMENTS, max_size=30).map("".join))
def test_what_is_settled_stays_settled(text: str) -> None:
    settled = ""
    for n in range(len(text) + 1):
        state = classify(text[:n], NAMES)
        if settled:
            assert state == settled
        elif state != "HOLD":
            settled = state
    holds_call(text, NAMES)


@given(st.text(max_size=300))
def test_fuzz_any_text_is_settled_at_its_end(text: str) -> None:
    detector = LeakDetector(NAMES)
    detector.text(text)
    assert detector.close() in ("CLEAR", "LEAK")


def test_the_hold_is_bounded() -> None:
    for start in ('{"arguments": {"text": "', '{"type": "', " " * 30, "```json\n{", "<think>"):
        detector = LeakDetector(NAMES)
        detector.text(start + "x" * (HOLD_CHARS_MAX + HOLD_REASONING_CHARS_MAX))
        assert detector.state == "CLEAR"
    for repeated in (
        "print(",
        "<think></think>",
        "```",
        "[",
        "{",
        "Action:",
        "Thought:",
        "Thought:\nAction:",
        "\nAction: x",
    ):
        detector = LeakDetector(NAMES)
        detector.text(repeated * 20_000)
        assert detector.close() == "CLEAR"
    silent = LeakDetector(NAMES)
    assert silent.reasoning(HOLD_REASONING_CHARS_MAX) == "HOLD"
    assert silent.reasoning(1) == "CLEAR"


def test_structured_calls() -> None:
    assert LeakDetector(NAMES).call() == "LEAK"
    late = LeakDetector(NAMES)
    late.text("I will look that up.")
    assert late.call() == "CLEAR"
    assert late.leaked_late


def test_a_call_behind_prose_is_counted_when_the_stream_ends() -> None:
    for call in (f"<tool_call>{CALL}", f"```json\n{CALL}\n```", CALL):
        detector = LeakDetector(NAMES)
        assert detector.text("Let me check.\n") == "CLEAR"
        detector.text(call)
        assert detector.close() == "CLEAR"
        assert detector.leaked_late
        assert holds_call("Let me check.\n" + call, NAMES)  # a whole reply is judged in time


def test_a_whole_reply_is_read_past_the_hold() -> None:
    late = '{"arguments": {"text": "' + "x" * (2 * HOLD_CHARS_MAX) + '"}, "name": "get_weather"}'
    assert holds_call(late, NAMES)
    assert not holds_call(late.replace("get_weather", "another"), NAMES)
    assert holds_call("Let me look.\nAction: get_weather\nAction Input: Oslo", NAMES)
    assert not holds_call("Let me look.\nAction: another\nAction Input: Oslo", NAMES)


def test_an_answer_that_quotes_markup_is_no_call() -> None:
    assert not holds_call("Hermes models write `<tool_call>` around JSON.", NAMES)


def test_a_model_that_writes_nothing_but_braces_holds_nobody_up() -> None:
    def give_up(*_: object) -> None:
        raise AssertionError("a search takes the square of the text")

    previous = signal.signal(signal.SIGPROF, give_up)
    signal.setitimer(signal.ITIMER_PROF, 20.0)  # a guard, in seconds of work; the square would take ten minutes
    try:
        assert not holds_call("So: " + "{" * 200_000, NAMES)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, previous)
    assert holds_call("So: {{" + CALL[1:] + "}", NAMES)
