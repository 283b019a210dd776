"""Tasks that need no tool, asked beside tempting ones: chat, stable knowledge, trivial arithmetic, what was just said."""

from __future__ import annotations

from random import Random

from .answers import Number, Phrase, Talk
from .generator import Draft
from .task import Task
from .vocabulary import PLACES, PRODUCTS, code, figure, figures, person

_CALC = ("calculator",)


def arithmetic_sum(rng: Random, draft: Draft) -> Task:
    a, b = figures(rng, 2, *((12, 90), (120, 980), (1200, 9800))[draft.index % 3])
    return draft.task(
        rng,
        user=f"What is {a} + {b}?",
        tools=_CALC,
        reply=f"{a} + {b} = {a + b}",
        answer=Number(a + b),
        expect="",
        difficulty=1 + draft.index % 3,
    )


def thanks(rng: Random, draft: Draft) -> Task:
    who = person(rng).split()[0]
    user = rng.choice(
        (
            f"Thanks a lot, {who} here. That is all for today.",
            "Good morning! How are you?",
            f"Hi, I'm {who}. Nice to meet you.",
            "Great work, thank you!",
            "Haha, that made my day.",
            f"Hello from {rng.choice(PLACES)}!",
        )
    )
    return draft.task(
        rng,
        user=user,
        tools=("send_email", "search_documents"),
        reply="You are welcome!",
        answer=Talk(),
        expect="ANSWER",
    )


def said_before(rng: Random, draft: Draft) -> Task:
    order, product = code(rng), rng.choice(PRODUCTS)
    user = [
        {"role": "user", "content": f"My order {order} for {figure(rng)} {product}s came late again."},
        {"role": "assistant", "content": "I am sorry to hear that. How can I help?"},
        {"role": "user", "content": "Which order number did I give you just now?"},
    ]
    return draft.task(
        rng,
        user=user,
        tools=("search_email", "search_documents"),
        reply=f"You gave me {order}.",
        answer=Phrase((order,)),
        expect="ANSWER",
    )


CAPITALS = (
    ("France", "Paris"), ("Japan", "Tokyo"), ("Italy", "Rome"), ("Spain", "Madrid"), ("Egypt", "Cairo"),
    ("Canada", "Ottawa"), ("Norway", "Oslo"), ("Greece", "Athens"), ("Peru", "Lima"), ("Kenya", "Nairobi"),
    ("Poland", "Warsaw"), ("Portugal", "Lisbon"), ("Cuba", "Havana"), ("Ireland", "Dublin"), ("Austria", "Vienna"),
)  # fmt: skip


def capital(rng: Random, draft: Draft) -> Task:
    country, city = CAPITALS[(draft.index + draft.seed) % len(CAPITALS)]
    return draft.task(
        rng,
        user=f"What is the capital of {country}?",
        tools=("search_documents",),
        reply=f"{city}.",
        answer=Phrase((city,)),
        expect="",
    )
