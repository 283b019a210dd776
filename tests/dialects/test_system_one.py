"""The System One dialect: what is accepted, what is refused and how, and the arithmetic of answers."""

from __future__ import annotations

import itertools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whetherman_edge.dialects import system_one as s1
from whetherman_edge.dialects import system_one_answer as answers
from whetherman_edge.dialects.text_forms import DEPTH_MAX, render
from whetherman_edge.errors import RequestError

NOUL: dict[str, Any] = {"type": "noul", "instructions": "Is it about money?"}
CHOICE: dict[str, Any] = {"type": "choice", "criteria": {"a": "first", "b": None}}
SCORE: dict[str, Any] = {"type": "score", "criteria": ["low", "high"]}


def body(questions: Any, state: Any = "hello", **extra: Any) -> bytes:
    return json.dumps({"model": "jev-latest", "state": state, "questions": questions, **extra}).encode()


def faults(raw: bytes) -> list[tuple[tuple[str | int, ...], str]]:
    with pytest.raises(s1.InvalidBody) as caught:
        s1.parse(raw)
    return [(fault.loc, fault.type) for fault in caught.value.faults]


# --- accepted ------------------------------------------------------------------------------------------------------


def test_all_three_types_in_one_request() -> None:
    request = s1.parse(body({"n": NOUL, "c": CHOICE, "s": SCORE}))
    assert [type(question) for question in request.questions.values()] == [s1.Noul, s1.Choice, s1.Score]
    assert request.model == "jev-latest"
    assert request.state.subject == "hello"


def test_model_may_be_missing_and_unknown_fields_are_ignored() -> None:
    request = s1.parse(json.dumps({"state": "x", "questions": {"q": NOUL}, "seed": 7, "x_trace": {"a": 1}}).encode())
    assert request.model == s1.DEFAULT_MODEL


@pytest.mark.parametrize("name", ["ticket-1", "q.2", "with space", "질문", "🎯", "0"])
def test_any_non_empty_question_name(name: str) -> None:
    assert list(s1.parse(body({name: NOUL})).questions) == [name]


@pytest.mark.parametrize("n", [2, 26, 64, 128, 255])
def test_option_counts(n: int) -> None:
    question = {"type": "choice", "criteria": {f"option {i}": f"number {i}" for i in range(n)}}
    parsed = s1.parse(body({"q": question})).questions["q"]
    assert isinstance(parsed, s1.Choice)
    assert len(parsed.options) == n


@pytest.mark.parametrize("n", [2, 3, 10])
def test_level_counts(n: int) -> None:
    parsed = s1.parse(body({"q": {"type": "score", "criteria": [f"level {i}" for i in range(n)]}})).questions["q"]
    assert isinstance(parsed, s1.Score)
    assert parsed.levels == tuple(f"level {i}" for i in range(n))


@pytest.mark.parametrize(
    "criteria",
    [{"true": "yes", "false": "no"}, {"true": "yes"}, {"false": "no"}, {"true": None, "false": None}, {}, None],
)
def test_noul_criteria_forms(criteria: Any) -> None:
    parsed = s1.parse(body({"q": {**NOUL, "criteria": criteria}})).questions["q"]
    assert isinstance(parsed, s1.Noul)
    assert (parsed.true, parsed.false) == ((criteria or {}).get("true") or "", (criteria or {}).get("false") or "")


def test_noul_without_instructions() -> None:
    parsed = s1.parse(body({"q": {"type": "noul", "criteria": {"true": "a threat"}}})).questions["q"]
    assert parsed == s1.Noul("", "a threat", "")


def test_structured_texts_are_flattened_to_their_words() -> None:
    question = {
        "type": "choice",
        "instructions": ["Route the ticket.", "Pick one team."],
        "criteria": {
            "Billing": {"owns": ["invoices", "refunds"]},
            "Technical": ["bugs", {"also": "outages"}],
            "Sales": {"description": "Pricing", "examples": ["How much is it?"]},
        },
    }
    parsed = s1.parse(body({"q": question})).questions["q"]
    assert isinstance(parsed, s1.Choice)
    assert parsed.instructions == "Route the ticket.\nPick one team."
    assert parsed.options == (
        s1.Option("Billing", "invoices\nrefunds"),
        s1.Option("Technical", "bugs\noutages"),
        s1.Option("Sales", "Pricing", ("How much is it?",)),
    )


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": {"city": {"type": "string"}, "unit": {"enum": ["c", "f"]}}},
        {"city": {"type": "string"}, "unit": "c or f"},
        ["city", "unit"],
    ],
)
def test_an_option_that_is_a_tool_keeps_its_parts(parameters: Any) -> None:
    value = {"description": "The forecast", "examples": ["rain in Oslo?", " "], "parameters": parameters}
    parsed = s1.parse(body({"q": {"type": "choice", "criteria": {"weather": value, "b": None}}})).questions["q"]
    assert isinstance(parsed, s1.Choice)
    assert parsed.options[0] == s1.Option("weather", "The forecast", ("rain in Oslo?",), ("city", "unit"))


def test_odd_shapes_under_the_same_keys_are_still_text() -> None:
    value = {"description": ["a", "b"], "examples": "c", "parameters": 4}
    parsed = s1.parse(body({"q": {"type": "choice", "criteria": {"x": value, "b": None}}})).questions["q"]
    assert isinstance(parsed, s1.Choice)
    assert parsed.options[0] == s1.Option("x", "a\nb\nc\n4")


def test_option_names_are_kept_byte_for_byte() -> None:
    names = ["환불 요청", "🙂 기타", " spaced ", "e\u0301", "\u00e9", "tab\there", ""]
    question = {"type": "choice", "criteria": dict.fromkeys(names)}
    parsed = s1.parse(body({"q": question})).questions["q"]
    assert isinstance(parsed, s1.Choice)
    assert [option.name for option in parsed.options] == names


def test_legend_keeps_structured_levels_as_they_came() -> None:
    levels: list[Any] = [{"label": "Calm"}, ["Angry", "very"], "Furious"]
    parsed = s1.parse(body({"q": {"type": "score", "criteria": levels}})).questions["q"]
    assert isinstance(parsed, s1.Score)
    assert parsed.levels == ("Calm", "Angry\nvery", "Furious")
    assert answers.score_answer(parsed, [1, 1, 1]).legend == dict(zip("012", levels, strict=True))


@pytest.mark.parametrize(
    ("state", "subject"),
    [
        ("plain", "plain"),
        ("", ""),
        (
            {"subject": "Late", "customer": {"plan": "pro", "open": 3, "vip": True}},
            "subject: Late\nplan: pro\nopen: 3\nvip: yes",
        ),
        (["one", "two", None], "one\ntwo"),
        ({"query": "weather in Oslo", "user": "kim"}, "weather in Oslo"),
        ({"query": "  "}, ""),
        (
            {
                "messages": [
                    {"role": "user", "content": "first"},
                    {"role": "assistant", "content": "ok"},
                    {"role": "user", "content": "second"},
                ]
            },
            "second",
        ),
        (
            [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a"}, {"type": "image_url"}, {"type": "text", "text": "b"}],
                }
            ],
            "a\nb",
        ),
        ({"messages": [{"role": "system", "content": "be kind"}]}, "role: system\ncontent: be kind"),
        ({"messages": "not a list"}, "messages: not a list"),
        ({}, ""),
        ([], ""),
    ],
)
def test_what_a_state_is_about(state: Any, subject: str) -> None:
    assert s1.parse(body({"q": NOUL}, state)).state.subject == subject


def test_a_long_state_is_read_in_part_and_says_so() -> None:
    request = s1.parse(body({"q": NOUL}, "word " * 10_000))
    assert request.state.truncated
    assert len(request.state.subject) == s1.STATE_CHARS_READ


def test_a_deep_state_is_accepted_and_its_depth_is_bounded() -> None:
    state: Any = "bottom"
    for _ in range(DEPTH_MAX + 5):
        state = {"k": state}
    request = s1.parse(body({"q": NOUL}, {"top": "seen", "deep": state}))
    assert request.state.subject == "top: seen"
    assert request.state.truncated


def test_gate_labels_are_recognised_in_any_order() -> None:
    question = {"type": "choice", "criteria": dict.fromkeys(["DECLINE", "ASK", "ANSWER", "ACT"])}
    parsed = s1.parse(body({"q": question, "c": CHOICE})).questions
    assert isinstance(parsed["q"], s1.Choice)
    assert parsed["q"].asks_the_gate
    assert isinstance(parsed["c"], s1.Choice)
    assert not parsed["c"].asks_the_gate


# --- refused -------------------------------------------------------------------------------------------------------

Q = ("body", "questions", "q")


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"", [(("body",), "json_invalid")]),
        (b'{"model": "jev-latest", "state": "x", "questions": {', [(("body",), "json_invalid")]),
        (b"\xff\xfe{}", [(("body",), "json_invalid")]),
        (b'{"state": NaN}', [(("body",), "json_invalid")]),
        (b'{"state": 1e999}', [(("body",), "json_invalid")]),
        (b"[" * 100_000, [(("body",), "json_invalid")]),
        (b'{"state":' * 5_000 + b"1" + b"}" * 5_000, [(("body",), "json_invalid")]),
        (b"[]", [(("body",), "model_type")]),
        (b"null", [(("body",), "model_type")]),
        (b"{}", [(("body", "state"), "missing"), (("body", "questions"), "missing")]),
        (b'{"state": null, "questions": {}}', [(("body", "state"), "text_type"), (("body", "questions"), "too_short")]),
        (b'{"state": 3, "questions": []}', [(("body", "state"), "text_type"), (("body", "questions"), "dict_type")]),
        (body({"q": NOUL}, model=None), [(("body", "model"), "string_type")]),
        (body({"q": NOUL}, assets={"a": {"type": "image"}}), [(("body", "assets"), "unsupported")]),
        (body({"": NOUL}), [(("body", "questions", ""), "string_too_short")]),
        (body({"q": None}), [(Q, "model_type")]),
        (body({"q": {"instructions": "x"}}), [(Q, "union_tag_not_found")]),
        (body({"q": {"type": "boolean"}}), [(Q, "union_tag_invalid")]),
        (body({"q": {"type": None}}), [(Q, "union_tag_invalid")]),
        (body({"q": {"type": ["noul"]}}), [(Q, "union_tag_invalid")]),
        (body({"q": {"type": "box", "instructions": "the cat"}}), [((*Q, "type"), "unsupported")]),
        (body({"q": {"type": "noul"}}), [((*Q, "noul"), "value_error")]),
        (
            body({"q": {"type": "noul", "instructions": 5}}),
            [((*Q, "noul", "instructions"), "text_type"), ((*Q, "noul"), "value_error")],
        ),
        (body({"q": {**NOUL, "criteria": ["yes"]}}), [((*Q, "noul", "criteria"), "dict_type")]),
        (body({"q": {**NOUL, "criteria": {"true": 1}}}), [((*Q, "noul", "criteria", "true"), "text_type")]),
        (body({"q": {"type": "choice"}}), [((*Q, "choice", "criteria"), "missing")]),
        (body({"q": {"type": "choice", "criteria": None}}), [((*Q, "choice", "criteria"), "dict_type")]),
        (body({"q": {"type": "choice", "criteria": {}}}), [((*Q, "choice", "criteria"), "too_short")]),
        (body({"q": {"type": "choice", "criteria": {"a": "x"}}}), [((*Q, "choice", "criteria"), "too_short")]),
        (body({"q": {"type": "choice", "criteria": ["a", "b"]}}), [((*Q, "choice", "criteria"), "dict_type")]),
        (
            body({"q": {"type": "choice", "criteria": {"a": 1, "b": True}}}),
            [((*Q, "choice", "criteria", "a"), "text_type"), ((*Q, "choice", "criteria", "b"), "text_type")],
        ),
        (
            body({"q": {"type": "choice", "criteria": {str(i): None for i in range(256)}}}),
            [((*Q, "choice", "criteria"), "too_long")],
        ),
        (body({"q": {"type": "score"}}), [((*Q, "score", "criteria"), "missing")]),
        (
            body({"q": {"type": "score", "criteria": {"0": "low", "1": "high"}}}),
            [((*Q, "score", "criteria"), "list_type")],
        ),
        (body({"q": {"type": "score", "criteria": ["only"]}}), [((*Q, "score", "criteria"), "too_short")]),
        (body({"q": {"type": "score", "criteria": ["l"] * 11}}), [((*Q, "score", "criteria"), "too_long")]),
        (body({"q": {"type": "score", "criteria": ["low", None]}}), [((*Q, "score", "criteria", 1), "text_type")]),
    ],
)
def test_what_is_refused_and_where(raw: bytes, expected: list[Any]) -> None:
    assert faults(raw) == expected


def test_every_fault_is_reported_and_the_error_body_has_the_documented_shape() -> None:
    raw = body({"a": {"type": "choice", "criteria": {}}, "b": {"type": "maybe"}})
    with pytest.raises(RequestError) as caught:
        s1.parse(raw)
    status, error = answers.error_status_and_body(caught.value)
    detail = json.loads(error)["detail"]
    assert status == 422
    assert [entry["loc"] for entry in detail] == [
        ["body", "questions", "a", "choice", "criteria"],
        ["body", "questions", "b"],
    ]
    assert all(isinstance(entry["msg"], str) and entry["type"] for entry in detail)


def test_too_many_questions() -> None:
    assert faults(body({str(i): NOUL for i in range(s1.QUESTIONS_MAX + 1)})) == [(("body", "questions"), "too_long")]


def test_the_list_of_faults_is_bounded() -> None:
    assert len(faults(body({str(i): {} for i in range(1000)}))) == s1.FAULTS_SHOWN_MAX


@pytest.mark.parametrize(
    ("raw", "status", "error_type"),
    [
        (b" " * (s1.BODY_BYTES_MAX + 1), 413, "request_too_large"),
        (body({"q": NOUL}, "x" * s1.BUDGET_BYTES), 400, "max_tokens_exceeded"),
        (body({"q": {"type": "noul", "instructions": "x" * s1.BUDGET_BYTES}}), 400, "max_tokens_exceeded"),
    ],
)
def test_what_is_too_large(raw: bytes, status: int, error_type: str) -> None:
    with pytest.raises(s1.Refusal) as caught:
        s1.parse(raw)
    got, error = answers.error_status_and_body(caught.value)
    detail = json.loads(error)["detail"]
    assert (got, detail["error_type"]) == (status, error_type)
    assert isinstance(detail["message"], str)


@pytest.mark.parametrize(
    "model", ["jev-latest", "jev-1.13.0", "typesafe/jev-preview", "whetherman-edge-0", "Whetherman-Edge"]
)
def test_model_names_that_are_answered(model: str) -> None:
    assert s1.parse(body({"q": NOUL}, model=model)).model == model


@pytest.mark.parametrize("model", ["", "jev", "gpt-5", "jevcompat-no-such-model", "jev-latest\n", "a/b/jev-latest"])
def test_an_unknown_model_is_not_found(model: str) -> None:
    with pytest.raises(s1.Refusal) as caught:
        s1.parse(body({"q": NOUL}, model=model))
    assert (caught.value.status, caught.value.kind) == (404, "not_found")


def test_messages_never_quote_the_state() -> None:
    with pytest.raises(s1.InvalidBody) as caught:
        s1.parse(json.dumps({"state": "SECRET", "questions": {"q": {"type": "choice", "criteria": {"a": 1}}}}).encode())
    assert "SECRET" not in answers.error_status_and_body(caught.value)[1].decode()


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
LIKELY = st.fixed_dictionaries(
    {},
    optional={
        "model": st.text() | JSON_VALUES,
        "state": st.text() | JSON_VALUES,
        "assets": JSON_VALUES,
        "questions": st.dictionaries(
            st.text(max_size=4),
            st.fixed_dictionaries(
                {},
                optional={
                    "type": st.sampled_from(["noul", "choice", "score", "box", "x"]),
                    "instructions": JSON_VALUES,
                    "criteria": JSON_VALUES
                    | st.lists(st.text(), max_size=12)
                    | st.dictionaries(st.text(), JSON_VALUES, max_size=5),
                },
            )
            | JSON_VALUES,
            max_size=3,
        )
        | JSON_VALUES,
    },
)


@given(LIKELY | JSON_VALUES)
def test_fuzz_any_json_is_accepted_or_refused_with_a_documented_error(document: Any) -> None:
    try:
        request = s1.parse(json.dumps(document).encode())
    except RequestError as error:
        status, shown = answers.error_status_and_body(error)
        assert 400 <= status < 500
        assert "detail" in json.loads(shown)
    else:
        assert request.questions
        assert len(request.state.subject) <= s1.STATE_CHARS_READ


@given(st.binary(max_size=200))
def test_fuzz_any_bytes(raw: bytes) -> None:
    with pytest.raises(RequestError):
        s1.parse(raw)


@given(JSON_VALUES, st.integers(0, 40))
def test_fuzz_rendering_keeps_to_its_bound(value: Any, chars_max: int) -> None:
    assert len(render(value, chars_max).text) <= chars_max


def test_huge_numbers_do_not_stop_the_rendering() -> None:
    assert render([10**5000, 1.5, False], 100).text == "number\n1.5\nno"


# --- answers -------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 1), min_size=2, max_size=255).filter(lambda ps: sum(ps) > 1e-6))
def test_shown_probabilities_sum_to_one_and_keep_their_order(probabilities: list[float]) -> None:
    shares = answers.millionths(probabilities)
    assert sum(shares) == answers.UNIT
    assert min(shares) >= 0
    ranked = sorted(range(len(shares)), key=lambda i: probabilities[i])
    assert all(shares[a] <= shares[b] or probabilities[a] == probabilities[b] for a, b in itertools.pairwise(ranked))


@given(st.lists(st.floats(0, 1), min_size=2, max_size=40).filter(lambda ps: sum(ps) > 1e-6))
def test_choice_is_the_most_probable_option(probabilities: list[float]) -> None:
    names = [str(i) for i in range(len(probabilities))]
    answer = answers.choice_answer(names, probabilities)
    assert answer.probabilities[answer.choice] == max(answer.probabilities.values())
    assert probabilities[int(answer.choice)] == max(probabilities)
    assert 0 <= answer.confidence <= 1


@pytest.mark.parametrize(
    ("probabilities", "confidence"),
    [([0.98, 0.02], 0.96), ([0.5, 0.5], 0.0), ([1.0, 0.0, 0.0], 1.0), ([0.0125, 0.9781, 0.0094], 0.96715)],
)
def test_choice_confidence_is_the_reference_formula(probabilities: list[float], confidence: float) -> None:
    assert answers.choice_confidence(probabilities) == pytest.approx(confidence)


@pytest.mark.parametrize(
    ("probabilities", "confidence"),
    [([1.0, 0.0, 0.0], 1.0), ([0.0, 1.0, 0.0], 1.0), ([0.5, 0.0, 0.5], 0.0), ([0.1, 0.8, 0.1], 0.7), ([1.0], 1.0)],
)
def test_score_confidence_is_the_reference_formula(probabilities: list[float], confidence: float) -> None:
    assert answers.score_confidence(probabilities) == pytest.approx(confidence)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=10).filter(lambda ps: sum(ps) > 1e-6))
def test_score_is_the_expectation_of_what_is_shown(probabilities: list[float]) -> None:
    levels = tuple(f"level {i}" for i in range(len(probabilities)))
    answer = answers.score_answer(s1.Score("", levels, levels), probabilities)
    assert answer.score == pytest.approx(sum(int(k) * p for k, p in answer.probabilities.items()), abs=1e-6)
    assert 0 <= answer.confidence <= 1


def test_a_response_on_the_wire() -> None:
    request = s1.parse(body({"n": NOUL, "c": CHOICE, "s": SCORE}))
    judged = {"n": (0.25,), "c": (0.75, 0.25), "s": (0.5, 0.5)}
    wire = answers.serialize(
        answers.Response(
            "whetherman-edge-0",
            {qid: answers.answer(q, answers.Judgement(judged[qid], "static")) for qid, q in request.questions.items()},
            answers.usage_of(request),
        )
    )
    assert json.loads(wire) == {
        "model": "whetherman-edge-0",
        "answers": {
            "n": {"type": "noul", "noul": 0.25, "x_engine": "static"},
            "c": {
                "type": "choice",
                "choice": "a",
                "probabilities": {"a": 0.75, "b": 0.25},
                "confidence": 0.5,
                "x_engine": "static",
            },
            "s": {
                "type": "score",
                "score": 0.5,
                "legend": {"0": "low", "1": "high"},
                "probabilities": {"0": 0.5, "1": 0.5},
                "confidence": 0.0,
                "x_engine": "static",
            },
        },
        "usage": {"input_tokens": -(-request.n_bytes // 4), "output_tokens": 0},
    }


def test_values_are_frozen() -> None:
    request = s1.parse(body({"n": NOUL}))
    with pytest.raises(AttributeError):
        request.model = "other"  # type: ignore[misc]
    assert isinstance(request, msgspec.Struct)
