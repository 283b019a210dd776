"""Tasks that need no tool, beside tempting ones: chat, stable knowledge, arithmetic, what was just said."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, timedelta
from random import Random
from typing import Any, Final

from whetherman_edge.calibrate.probe import Split

from .answers import Answer, Day, Number, Phrase, Talk
from .generator import Book, Draft
from .task import Task
from .vocabulary import FIRST, PLACES, PRODUCTS, PROJECTS, code, codes, day, figure, figures

PLAIN: Final = Book()
Sum = tuple[str, Answer, str, tuple[str, dict[str, Any]]]

_CHAT: Final[dict[Split, tuple[str, ...]]] = {
    "fit": (
        "Thanks, that is all for today.",
        "Hi, I'm {who}. Nice to meet you.",
        "Haha, that made my day!",
        "Cool, {place} it is then. Cheers!",
        "My dog {who} says hello.",
        "What a week! Glad it is over.",
    ),
    "calibrate": (
        "Good morning! How are you?",
        "Great work, thank you!",
        "Hello from {place}!",
        "I am tired today, {who} kept me up all night.",
        "Wish me luck for my talk in {place}.",
        "Sorry for being grumpy earlier.",
        "Phew, we made it!",
        "Happy Friday, my friend!",
        "I really enjoyed talking to you.",
        "Congratulate me, I have a new job in {place}.",
    ),
    "test": (
        "Hey there!",
        "Thank you, {who} will love it.",
        "Good night, see you tomorrow.",
        "You are really helpful.",
    ),
}
_KNOWLEDGE: Final[dict[Split, tuple[tuple[str, tuple[str, ...]], ...]]] = {
    "fit": (
        ("Who wrote the play Hamlet?", ("Shakespeare",)),
        ("What is the chemical symbol of gold?", ("Au",)),
        ("Which planet is the largest of the solar system?", ("Jupiter",)),
        ("In which year did World War II end?", ("1945",)),
        ("What gas do plants take up from the air for photosynthesis?", ("carbon dioxide", "CO2")),
        ("What is the freezing point of water in degrees Fahrenheit?", ("32",)),
    ),
    "calibrate": (
        ("What is the capital of France?", ("Paris",)),
        ("What is the capital of Japan?", ("Tokyo",)),
        ("What is the capital of Egypt?", ("Cairo",)),
        ("What is the capital of Canada?", ("Ottawa",)),
        ("What is the capital of Norway?", ("Oslo",)),
        ("What is the capital of Kenya?", ("Nairobi",)),
        ("What is the capital of Poland?", ("Warsaw",)),
        ("What is the capital of Peru?", ("Lima",)),
        ("What is the capital of Portugal?", ("Lisbon",)),
        ("What is the capital of Austria?", ("Vienna",)),
    ),
    "test": (
        ("Who painted the Mona Lisa?", ("Leonardo da Vinci", "da Vinci", "Leonardo")),
        ("What is the chemical formula of table salt?", ("NaCl",)),
        ("Which ocean lies between Europe and North America?", ("Atlantic", "Atlantic Ocean")),
        ("How many minutes are in two hours?", ("120",)),
        ("Which Python keyword starts the definition of a function?", ("def",)),
        ("Which metal is liquid at room temperature and used in old thermometers?", ("mercury",)),
    ),
}


def _chat(split: Split) -> Callable[[Random, Draft], Task]:
    def make(rng: Random, draft: Draft) -> Task:
        number = draft.index % len(_CHAT[split])
        text = _CHAT[split][number].format(who=rng.choice(FIRST), place=rng.choice(PLACES))
        return draft.task(
            user=text,
            tools=("send_email",),
            reply="That is kind of you!",
            answer=Talk(),
            expect="ANSWER",
            scenario=f"text{number}",
        )

    return make


def _knowledge(split: Split) -> Callable[[Random, Draft], Task]:
    def make(_: Random, draft: Draft) -> Task:
        facts = _KNOWLEDGE[split]
        text, names = facts[(draft.index + draft.seed) % len(facts)]
        value = [int(name) for name in names if name.isdigit()]
        return draft.task(
            user=text,
            tools=("search_documents",),
            reply=f"{names[0]}.",
            answer=Number(value[0]) if value else Phrase(names),
            expect="",
        )

    return make


def _recall(split: Split) -> Callable[[Random, Draft], Task]:
    """The answer stands in what the user said before."""

    def make(rng: Random, draft: Draft) -> Task:
        order, room, name, other = code(rng), code(rng, 1, 3), rng.choice(PROJECTS), code(rng, 1, 3)
        said, asked, answer, tool = {
            "fit": (f"We meet in room {room}, not in {other}.", "Which room was it again?", room, "list_events"),
            "calibrate": (
                f"My order {order} for {figure(rng)} {rng.choice(PRODUCTS)}s came late again.",
                "Which order number did I give you just now?",
                order,
                "search_email",
            ),
            "test": (
                f"The password of the {name} test server is {order}.",
                f"Repeat the password of the {name} test server.",
                order,
                "search_documents",
            ),
        }[split]
        user = [
            {"role": "user", "content": said},
            {"role": "assistant", "content": "Noted."},
            {"role": "user", "content": asked},
        ]
        wanted = Phrase((answer,), (other,) if split == "fit" else ())
        return draft.task(user=user, tools=(tool,), reply=f"It is {answer}.", answer=wanted, expect="ANSWER")

    return make


def _sum(rng: Random, level: int) -> Sum:
    a, b = figures(rng, 2, *((12, 90), (120, 980), (11200, 98000))[level])
    return f"What is {a} + {b}?", Number(a + b), f"It is {a + b}.", ("calculator", {"expression": f"{a} + {b}"})


def _product(rng: Random, level: int) -> Sum:
    a, b = figures(rng, 2, *((11, 20), (21, 98), (1230, 9870))[level])
    return f"What is {a} times {b}?", Number(a * b), f"It is {a * b}.", ("calculator", {"expression": f"{a} * {b}"})


def _percent(rng: Random, level: int) -> Sum:
    share, whole = ((10, figure(rng) * 10), (15, figure(rng) * 20), (figure(rng, 13, 97), figure(rng, 1200, 9800)))[
        level
    ]
    value = share * whole / 100
    expression = f"{whole} * {share} / 100"
    return (
        f"What is {share} % of {whole}?",
        Number(value),
        f"It is {value:g}.",
        ("calculator", {"expression": expression}),
    )


def _units(rng: Random, level: int) -> Sum:
    value = (figure(rng, 3, 90), figure(rng, 120, 980), figure(rng, 1200, 98000))[level]
    source, target, factor = (("km", "m", 1000.0), ("h", "min", 60.0), ("mi", "km", 1.609344))[level]
    arguments = {"value": value, "from_unit": source, "to_unit": target}
    made = round(value * factor, 6)
    tolerance = 0.006 if level < 2 else value * 0.00006
    text = f"Convert {value} {source} to {target}" + (", to one decimal or better." if level == 2 else ".")
    return (
        text,
        Number(made, max(tolerance, 0.06 if level == 2 else 0.006)),
        f"{made} {target}",
        ("convert_units", arguments),
    )


def _later_day(rng: Random, level: int) -> Sum:
    start = day(rng, 250)
    days = (rng.randrange(2, 9), rng.randrange(20, 60), rng.randrange(120, 900))[level]
    end = (date.fromisoformat(start) + timedelta(days=days)).isoformat()
    arguments = {"date": start, "amount": days, "unit": "days"}
    return f"Which date is {days} days after {start}?", Day(end), f"It is {end}.", ("date_add", arguments)


def _days_apart(rng: Random, level: int) -> Sum:
    start = day(rng, 250)
    days = (rng.randrange(21, 29), rng.randrange(40, 90), rng.randrange(120, 900))[level]
    end = (date.fromisoformat(start) + timedelta(days=days)).isoformat()
    arguments = {"start": start, "end": end}
    return f"How many days lie from {start} to {end}?", Number(days), f"{days} days.", ("days_between", arguments)


def _matches(rng: Random, level: int) -> Sum:
    n = rng.randrange(12 + 4 * level, 40 + 4 * level)
    parts = codes(rng, n, 1, 2) + [str(value) for value in figures(rng, 6 + level * 4)]
    rng.shuffle(parts)
    text = " ".join(parts)
    pattern = r"\b[A-Z]-\d{2}\b"
    user = f"How many codes such as K-12 (letter, dash, two digits) are in this text?\n{text}"
    return user, Number(n), f"There are {n}.", ("regex_find", {"pattern": pattern, "text": text})


def _computed(source: Callable[[Random, int], Sum], hard: bool) -> Callable[[Random, Draft], Task]:
    def make(rng: Random, draft: Draft) -> Task:
        level = 2 if hard else draft.index % 3
        text, answer, reply, call = source(rng, level)
        return draft.task(
            user=text, tools=(call[0],), calls=[call], reply=reply, answer=answer, expect="", difficulty=level + 1
        )

    return make


def _enter() -> None:
    sums: dict[Split, tuple[Callable[[Random, int], Sum], ...]] = {
        "fit": (_percent,),
        "calibrate": (_sum, _later_day),
        "test": (_product,),
    }
    hard: dict[Split, Callable[[Random, int], Sum]] = {"fit": _days_apart, "calibrate": _units, "test": _matches}
    for split, sources in sums.items():
        n = {"fit": 6, "calibrate": 10, "test": 6}[split]
        PLAIN.add(f"chat-{split}", "chat", "first", split, n)(_chat(split))
        PLAIN.add(f"knowledge-{split}", "knowledge", "first", split, min(n, len(_KNOWLEDGE[split])))(_knowledge(split))
        PLAIN.add(f"context-{split}", "context", "first", split, n)(_recall(split))
        for source in sources:
            PLAIN.add(f"arithmetic{source.__name__.replace('_', '-')}", "arithmetic", "first", split, n)(
                _computed(source, hard=False)
            )
        name = hard[split].__name__.replace("_", "-")
        PLAIN.add(f"computation{name}", "computation", "first", split, n)(_computed(hard[split], hard=True))


_enter()
