"""Noul and score on word embeddings: what they can tell, and that they stay near chance where they cannot."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from whetherman_edge.dialects import system_one as s1
from whetherman_edge.router.scorer import Scorer
from whetherman_edge.router.table import DEFAULT_PATH, RouterTable
from whetherman_edge.router.typed_questions import TypedJudge, is_negated, topic_of

TICKET = "I was charged twice for my March invoice. Please send the money back."


@pytest.fixture(scope="module")
def shipped() -> RouterTable:
    return RouterTable.open(DEFAULT_PATH)


@pytest.fixture(scope="module")
def judge(shipped: RouterTable) -> TypedJudge:
    return TypedJudge(Scorer(shipped))


def ask(judge: TypedJudge, state: object, question: dict[str, object]) -> tuple[float, ...]:
    request = s1.parse(json.dumps({"state": state, "questions": {"q": question}}).encode())
    return judge.judge(request.state, request.questions["q"]).probabilities


def choice(*names: str) -> dict[str, object]:
    return {"type": "choice", "criteria": dict.fromkeys(names)}


def test_a_choice_is_the_routers_answer(judge: TypedJudge) -> None:
    options = {
        "get_weather": "Forecast for a city",
        "send_mail": {"description": "Send an e-mail", "parameters": ["to"]},
    }
    query = "will it rain in Oslo tomorrow"
    routed = judge._scorer.route(query, options)
    got = ask(judge, query, {"type": "choice", "instructions": "Which tool?", "criteria": options})
    assert routed.choice == "get_weather"
    assert got == tuple(routed.probabilities.values())


def test_options_can_be_embedded_in_portions(judge: TypedJudge) -> None:
    names = [f"option {i}" for i in range(20)]
    parsed = s1.parse(json.dumps({"state": "x", "questions": {"q": choice(*names)}}).encode())
    question = parsed.questions["q"]
    assert len(list(judge.portions(question))) == 3
    judge.judge(parsed.state, question)
    assert list(judge.portions(question)) == []
    assert list(judge.portions(s1.Noul("x"))) == []


def test_instructions_do_not_move_a_choice_but_stand_in_for_an_empty_state(judge: TypedJudge) -> None:
    options = choice("weather", "invoices")
    plain = ask(judge, TICKET, options)
    assert ask(judge, TICKET, {**options, "instructions": "weather weather weather"}) == plain
    assert ask(judge, {}, {**options, "instructions": TICKET}) == plain
    assert ask(judge, "", options) == (0.5, 0.5)


def test_a_messages_state_is_routed_by_its_last_user_turn(judge: TypedJudge) -> None:
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "weather weather weather"},
        {"role": "user", "content": TICKET},
    ]
    options = choice("weather", "invoices")
    assert ask(judge, {"messages": messages}, options) == ask(judge, TICKET, options)


@pytest.mark.parametrize(
    ("question", "yes"),
    [
        ({"instructions": "Is this about an invoice?"}, True),
        ({"instructions": "Is this about the weather?"}, False),
        ({"instructions": "Topic", "criteria": {"true": "charges, invoices, refunds", "false": "gardening"}}, True),
        ({"criteria": {"true": "gardening", "false": "charges, invoices, refunds"}}, False),
        ({"instructions": "Is it about a charge?", "criteria": {"true": "a wrong charge"}}, True),
        ({"criteria": {"false": "charges, invoices, refunds"}}, False),
    ],
)
def test_a_noul_tells_the_topic(judge: TypedJudge, question: dict[str, object], yes: bool) -> None:
    (p,) = ask(judge, TICKET, {"type": "noul", **question})
    assert (p > 0.5) is yes


def test_swapping_the_outcomes_turns_a_noul_round(judge: TypedJudge) -> None:
    (p,) = ask(judge, TICKET, {"type": "noul", "criteria": {"true": "refunds", "false": "gardening"}})
    (q,) = ask(judge, TICKET, {"type": "noul", "criteria": {"true": "gardening", "false": "refunds"}})
    assert p + q == pytest.approx(1.0)


def test_a_noul_says_half_where_it_cannot_know(judge: TypedJudge) -> None:
    assert ask(judge, TICKET, {"type": "noul", "instructions": "Is this not about an invoice?"}) == (0.5,)
    assert ask(judge, "", {"type": "noul", "instructions": "Is this about an invoice?"}) == (0.5,)
    assert ask(judge, "\u2603", {"type": "noul", "instructions": "Is this about an invoice?"}) == (0.5,)


def test_a_score_leans_the_right_way_and_is_a_distribution(judge: TypedJudge) -> None:
    question = {"type": "score", "criteria": ["Terrible", "Bad", "Neutral", "Good", "Wonderful"]}
    good = np.array(ask(judge, "A wonderful stay, the staff were lovely and the food excellent.", question))
    bad = np.array(ask(judge, "Awful. Dirty rooms, rude staff, the worst hotel ever.", question))
    ranks = np.arange(5)
    assert good.sum() == pytest.approx(1.0)
    assert (good > 0).all()
    assert ranks @ good > ranks @ bad + 0.5


def test_a_score_without_words_is_even(judge: TypedJudge) -> None:
    assert ask(judge, "", {"type": "score", "criteria": ["low", "high"]}) == (0.5, 0.5)
    assert ask(judge, TICKET, {"type": "score", "criteria": ["", "", "", ""]}) == (0.25,) * 4


def test_answers_do_not_depend_on_what_was_asked_before(shipped: RouterTable) -> None:
    rows = [json.loads(line) for line in OURS.read_text().splitlines()][:6]
    asked = [
        (row["state"], {"type": "noul", "instructions": q["instructions"]}) for row in rows for q in row["nouls"]
    ] + [(row["state"], {"type": "score", "criteria": q["levels"]}) for row in rows for q in row["scores"]]
    forwards = TypedJudge(Scorer(shipped))
    backwards = TypedJudge(Scorer(shipped))
    first = [ask(forwards, state, question) for state, question in asked]
    second = [ask(backwards, state, question) for state, question in reversed(asked)]
    assert first == second[::-1]


OURS = Path(__file__).resolve().parents[2] / "convert" / "data" / "system_one_typed.jsonl"


def test_noul_figures_on_held_out_states_hold(judge: TypedJudge) -> None:
    """Loose bounds on the figures that docs/systemone.md states, so that a new table cannot quietly spoil them."""
    squared, hits = [], []
    for row in (json.loads(line) for line in OURS.read_text().splitlines()):
        if row["split"] != "test":
            continue
        for q in row["nouls"]:
            p = judge.noul(row["state"], s1.Noul(q["instructions"], q.get("true", ""), q.get("false", "")))
            squared.append((p - q["gold"]) ** 2)
            hits.append((p > 0.5) == q["gold"])
    assert np.mean(hits) >= 0.8
    assert np.mean(squared) <= 0.15


@pytest.mark.parametrize(
    ("question", "topic"),
    [
        ("Is the customer asking about a refund?", "refund"),
        ("Does the message mention heart-rate monitors?", "mention heart-rate monitors"),
        ("Is it?", "Is it?"),
    ],
)
def test_topic_words(question: str, topic: str) -> None:
    assert topic_of(question) == topic


@pytest.mark.parametrize(
    ("text", "negated"), [("Isn't it late?", True), ("Is it not late?", True), ("Is it late?", False)]
)
def test_negation(text: str, negated: bool) -> None:
    assert is_negated(text) is negated
