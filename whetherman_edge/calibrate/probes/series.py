"""Lookups that come in series: lists over several pages, and two things to compare."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, Final, Literal

import msgspec

from whetherman_edge.calibrate.probe import Split

from .answers import Number, Phrase
from .generator import Book, Draft, Maker
from .task import Task
from .vocabulary import LAST, PLACES, PRODUCTS, PROJECTS, ROOMS, codes, figure, figures
from .world import Setting

SERIES: Final = Book()
Point = Literal["start", "middle", "end"]


class Pages(msgspec.Struct, frozen=True):
    """A list over pages: the question, its world, the calls for each page up to the answer, the answer, the rest.
    ``spelled``: other spellings of the answer.
    """

    user: str
    setting: Setting
    calls: list[tuple[str, dict[str, Any]]]
    answer: str
    others: tuple[str, ...]
    spelled: tuple[str, ...] = ()


def _tickets(rng: Random, near: bool, want: str) -> Pages:
    """Nine tickets of one owner, four a page. ``near``: the wanted one is on the first page."""
    owner = rng.choice(LAST)
    keys = [f"T-{number}" for number in figures(rng, 9, 1000, 9800)]
    parts = rng.sample(PRODUCTS, 9)
    at = rng.randrange(4) if near else rng.randrange(4, 8)
    tickets = [
        {"id": key, "title": f"broken {part}", "status": "open", "owner": owner}
        for key, part in zip(keys, parts, strict=True)
    ]
    if want == "status":
        tickets[at]["status"] = "waiting"
        user = f"One of {owner}'s support tickets has status waiting, the others are open. What is its number?"
    else:
        user = f"What is the number of {owner}'s support ticket about the {parts[at]}?"
    calls: list[tuple[str, dict[str, Any]]] = [("search_tickets", {"text": owner})]
    if not near:
        calls.append(("search_tickets", {"text": owner, "page": 2}))
    bare = [key.removeprefix("T-") for key in keys]  # a ticket's number is often told without its letter
    others = tuple(number for number in bare if number != bare[at])
    return Pages(user, {"tickets": {"tickets": tickets}}, calls, keys[at], others, (bare[at],))


def _ticket_about(rng: Random, near: bool) -> Pages:
    return _tickets(rng, near, "title")


def _ticket_waiting(rng: Random, near: bool) -> Pages:
    return _tickets(rng, near, "status")


def _minutes_of(rng: Random, near: bool) -> Pages:
    """Seven minutes of one project's meetings, three a page."""
    name = rng.choice(PROJECTS)
    keys = [f"doc-{number}" for number in figures(rng, 7, 1000, 9800)]
    places = rng.sample(PLACES, 7)
    at = rng.randrange(3) if near else rng.randrange(3, 6)
    documents = [
        {"id": key, "title": f"{name} minutes, {place}", "text": f"{name} met in {place}."}
        for key, place in zip(keys, places, strict=True)
    ]
    query = f"{name} minutes"
    calls: list[tuple[str, dict[str, Any]]] = [("search_documents", {"query": query})]
    if not near:
        calls.append(("search_documents", {"query": query, "page": 2}))
    user = f"Search for '{query}'. What is the id of the minutes of the meeting in {places[at]}?"
    return Pages(user, {"corpus": {"documents": documents}}, calls, keys[at], tuple(k for k in keys if k != keys[at]))


def _paged(source: Callable[[Random, bool], Pages], point: Point) -> Maker:
    def make(rng: Random, draft: Draft) -> Task:
        pages = source(rng, point == "end")
        made = {"start": 0, "middle": 1, "end": len(pages.calls)}[point]
        return draft.task(
            user=pages.user,
            tools=[pages.calls[0][0]],
            calls=pages.calls[made:],
            reply=f"It is {pages.answer}.",
            answer=Phrase((pages.answer, *pages.spelled), pages.others),
            expect="ANSWER" if point == "end" else "ACT",
            setting=pages.setting,
            recorded=pages.calls[:made],
            difficulty=2,
        )

    return make


class Pair(msgspec.Struct, frozen=True):
    """Two things of one kind and their figures."""

    user: str
    setting: Setting
    calls: list[tuple[str, dict[str, Any]]]
    values: tuple[int, int]


def _wind(rng: Random) -> Pair:
    towns, values = rng.sample(PLACES, 2), sorted(figures(rng, 2, 11, 120))
    rows = {town: f"wind {value} km/h" for town, value in zip(towns, values, strict=True)}
    return Pair(
        f"How much stronger (in km/h) is the wind in {towns[1]} than in {towns[0]} right now?",
        {"feeds": {"get_weather": rows}},
        [("get_weather", {"town": town}) for town in towns],
        (values[0], values[1]),
    )


def _pieces(rng: Random) -> Pair:
    articles, values = codes(rng, 2), sorted(figures(rng, 2))
    rows = {article: f"{article}: {value} pieces" for article, value in zip(articles, values, strict=True)}
    return Pair(
        f"How many more pieces of article {articles[1]} than of {articles[0]} are in stock?",
        {"feeds": {"stock_level": rows}},
        [("stock_level", {"article": article}) for article in articles],
        (values[0], values[1]),
    )


def _meters(rng: Random) -> Pair:
    rooms, values = rng.sample(ROOMS, 2), sorted(figures(rng, 2))
    names = [f"{room} power meter" for room in rooms]
    return Pair(
        f"By how much does the {names[1]} read higher than the {names[0]}?",
        {"home": {"devices": {name: str(value) for name, value in zip(names, values, strict=True)}}},
        [("get_device", {"device": name}) for name in names],
        (values[0], values[1]),
    )


def _loads(rng: Random) -> Pair:
    names, values = rng.sample(PROJECTS, 2), sorted(figures(rng, 2))
    documents = [
        {
            "id": f"doc-{figure(rng, 1000, 9800)}",
            "title": f"{name} safety",
            "text": f"The load is {value} kg.",
        }
        for name, value in zip(names, values, strict=True)
    ]
    return Pair(
        f"Documents {documents[0]['id']} and {documents[1]['id']} each name a load in kg. What is the difference?",
        {"corpus": {"documents": documents}},
        [("read_document", {"id": document["id"]}) for document in documents],
        (values[0], values[1]),
    )


def _compared(source: Callable[[Random], Pair], point: Point) -> Maker:
    def make(rng: Random, draft: Draft) -> Task:
        pair = source(rng)
        low, high = pair.values
        made = {"start": 0, "middle": 1, "end": 2}[point]
        return draft.task(
            user=pair.user,
            tools=[pair.calls[0][0]],
            calls=pair.calls[made:],
            reply=f"{high} - {low} = {high - low}",
            answer=Number(high - low),
            expect="ANSWER" if point == "end" else "ACT",
            setting=pair.setting,
            recorded=pair.calls[:made],
            difficulty=2,
        )

    return make


def _enter() -> None:
    lists: dict[Split, tuple[Callable[[Random, bool], Pages], int]] = {
        "fit": (_minutes_of, 5),
        "calibrate": (_ticket_about, 10),
        "test": (_ticket_waiting, 4),
    }
    for split, (pages, n) in lists.items():
        name = pages.__name__.strip("_").replace("_", "-")
        SERIES.add(f"pagination-{name}", "pagination", "first", split, n)(_paged(pages, "start"))
        SERIES.add(f"pagination-later-{name}", "pagination", "later", split, n)(_paged(pages, "middle"))
        SERIES.add(f"pagination-end-{name}", "pagination", "later", split, n // 2 + 1)(_paged(pages, "end"))
    pairs: tuple[tuple[Split, Callable[[Random], Pair], int], ...] = (
        ("fit", _meters, 4),
        ("calibrate", _pieces, 8),
        ("calibrate", _loads, 6),
        ("test", _wind, 4),
    )
    for split, pair, n in pairs:
        name = pair.__name__.strip("_")
        SERIES.add(f"comparison-{name}", "comparison", "first", split, n)(_compared(pair, "start"))
        SERIES.add(f"comparison-later-{name}", "comparison", "later", split, n)(_compared(pair, "middle"))
        SERIES.add(f"comparison-end-{name}", "comparison", "later", split, n // 2 + 1)(_compared(pair, "end"))


_enter()
