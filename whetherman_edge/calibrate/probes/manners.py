"""ASK: a detail is missing that no tool can tell. DECLINE: no offered tool can do it, and neither can the model."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, Final

from whetherman_edge.calibrate.probe import Split

from .answers import Question, Refusal
from .generator import Book, Draft
from .task import Task
from .vocabulary import FIRST, LAST, PLACES, PRODUCTS, PROJECTS, code, figure
from .world import Setting

MANNERS: Final = Book()

_ASKS: Final[dict[Split, tuple[tuple[str, str, tuple[str, ...]], ...]]] = {
    "fit": (
        (
            "Send an e-mail for me.",
            "send_email",
            ("who", "whom", "recipient", "address", "subject", "content", "message"),
        ),
        ("Set the thermostat.", "set_device", ("which", "temperature", "value", "degrees", "room")),
        ("Change the status of my support ticket.", "set_ticket_status", ("which", "ticket", "status", "number", "id")),
    ),
    "calibrate": (
        ("Pay the invoice, please.", "pay_invoice", ("which", "invoice", "number", "id")),
        ("Put a meeting with {who} into my calendar.", "create_event", ("when", "date", "day", "time")),
        ("Refund {who}, please.", "refund_payment", ("which", "amount", "much", "invoice", "number", "id")),
        ("Where is my parcel?", "track_parcel", ("which", "parcel", "number", "tracking")),
        ("How many pieces of that article are in stock?", "stock_level", ("which", "article", "number", "id")),
    ),
    "test": (
        (
            "Open a support ticket for {who}.",
            "create_ticket",
            ("title", "problem", "issue", "about", "priority"),
        ),
        ("What is the amount of my invoice?", "get_invoice", ("which", "invoice", "number", "id")),
        ("Convert 250 for me.", "convert_units", ("which", "unit", "units")),
        ("How is the weather?", "get_weather", ("where", "which", "town", "city", "location")),
    ),
}
_DECLINES: Final[dict[Split, tuple[tuple[str, str], ...]]] = {
    "fit": (
        ("Call {who} on the phone and tell them I am late.", "find_contact"),
        ("Print document {code} on the office printer.", "get_weather"),
        ("Order a pizza to {place} for me.", "list_events"),
    ),
    "calibrate": (
        ("Book me a flight to {place} for tomorrow.", "get_weather"),
        ("Post '{name} is live' on our company's social media account.", "search_documents"),
        ("Transfer {n} EUR from my savings account to {who}.", "get_invoice"),
        ("Reserve a table for two tonight in {place}.", "list_events"),
        ("Turn on the light in the office.", "calculator"),
    ),
    "test": (
        ("Buy 20 shares of {name} for me.", "exchange_rate"),
        ("Take a photo with my camera and show it to me.", "list_files"),
        ("What is the balance of my bank account right now?", "convert_units"),
        ("Send a text message to {who}: I am late.", "search_email"),
    ),
}
_WORDS_FOR: Final[dict[str, tuple[str, ...]]] = {
    "Turn on the light in the office.": ("set_device", "list_devices", "get_device"),
}


def _filled(text: str, rng: Random) -> str:
    return text.format(
        who=rng.choice(FIRST), place=rng.choice(PLACES), name=rng.choice(PROJECTS), code=code(rng), n=figure(rng)
    )


def _ask(split: Split) -> Callable[[Random, Draft], Task]:
    def make(rng: Random, draft: Draft) -> Task:
        number = draft.index % len(_ASKS[split])
        text, tool, about = _ASKS[split][number]
        openings = ("", "Hi! ", f"{rng.choice(FIRST)} here. ", "Quick one: ", f"From {rng.choice(PLACES)}: ")
        return draft.task(
            user=rng.choice(openings) + _filled(text, rng),
            tools=(tool,),
            reply=f"Could you tell me {about[0]}: {', '.join(about)}?",
            answer=Question(about),
            expect="ASK",
            difficulty=2,
            scenario=f"text{number}",
        )

    return make


def _decline(split: Split) -> Callable[[Random, Draft], Task]:
    def make(rng: Random, draft: Draft) -> Task:
        number = draft.index % len(_DECLINES[split])
        text, tool = _DECLINES[split][number]
        return draft.task(
            user=_filled(text, rng),
            tools=(tool,),
            reply="I'm sorry, I cannot do that: none of my tools can.",
            answer=Refusal(),
            expect="DECLINE",
            difficulty=2,
            scenario=f"text{number}",
            without=_WORDS_FOR.get(text, ()),
        )

    return make


_WHICH_ONE: Final = (
    *("which", "who", "whom", "whose", "full name", "last name", "surname", "family name"),
    *("you mean", "the one", "right one", "correct one", "specific"),
)


def _two_hits(kind: str) -> Callable[[Random, Draft], Task]:
    """A search found two that fit: only the user knows which."""

    def make(rng: Random, draft: Draft) -> Task:
        part = rng.choice(PRODUCTS)
        first, last = rng.choice(FIRST), rng.sample(LAST, 2)
        keys = [f"T-{figure(rng, 1000, 4900)}", f"T-{figure(rng, 5000, 9000)}"]
        names = [f"{first} {name}" for name in last]
        if kind == "contact":
            setting: Setting = {
                "mail": {"contacts": {name: f"{name.split()[1].lower()}@post.example" for name in names}}
            }
            user = f"E-mail {first} that the {part} is here. Ask me if anything is unclear."
            call, tools = ("find_contact", {"name": first}), ("find_contact", "send_email")
        elif kind == "ticket":
            rows = [
                {"id": k, "title": f"broken {part}", "status": "open", "owner": n}
                for k, n in zip(keys, names, strict=True)
            ]
            setting = {"tickets": {"tickets": rows}}
            user = f"Close the ticket about the {part}. Ask me if anything is unclear."
            call, tools = ("search_tickets", {"text": part}), ("search_tickets", "set_ticket_status")
        else:
            events = [
                {"id": k, "title": f"Call {n}", "date": "2026-05-04", "start": "10:10"}
                for k, n in zip(keys, names, strict=True)
            ]
            setting = {"calendar": {"events": events}}
            user = f"Cancel my call with {first} on 2026-05-04. Ask me if anything is unclear."
            call, tools = ("list_events", {"date": "2026-05-04"}), ("list_events", "cancel_event")
        return draft.task(
            user=user,
            tools=tools,
            reply=f"Which one do you mean: {names[0]} or {names[1]}?",
            answer=Question(
                (*_WHICH_ONE, *(() if kind == "contact" else ("number", "id"))), (tuple(last), tuple(keys))
            ),
            expect="ASK",
            setting=setting,
            recorded=[call],
            difficulty=3,
        )

    return make


def _refused(kind: str) -> Callable[[Random, Draft], Task]:
    """The only tool for it has said no for good."""

    def make(rng: Random, draft: Draft) -> Task:
        key, amount = f"IN-{figure(rng, 1000, 9000)}", figure(rng, 600, 980)
        bill = {"customer": f"{rng.choice(FIRST)} {rng.choice(LAST)}", "amount": amount, "status": "paid"}
        setting: Setting = {"payments": {"invoices": {key: bill}, "refund_max": 200}}
        call: tuple[str, dict[str, Any]] = ("refund_payment", {"id": key, "amount": amount})
        user, tools = f"Refund all {amount} EUR of invoice {key} at once.", ["refund_payment"]
        if kind == "invoice":
            call, user, tools = ("pay_invoice", {"id": f"{key}0"}), f"Pay invoice {key}0.", ["pay_invoice"]
        elif kind == "contact":
            who = rng.choice(FIRST)
            setting = {"mail": {"contacts": {}}}
            call, user, tools = ("find_contact", {"name": who}), f"What is {who}'s e-mail address?", ["find_contact"]
        return draft.task(
            user=user,
            tools=tools,
            reply="I cannot do that: the tool refused it.",
            answer=Refusal(),
            expect="DECLINE",
            setting=setting,
            recorded=[call],
            difficulty=3,
            without=("search_email", "search_documents"),
        )

    return make


def _enter() -> None:
    later: dict[Split, tuple[str, str]] = {
        "fit": ("ticket", "invoice"),
        "calibrate": ("contact", "refund"),
        "test": ("event", "contact"),
    }
    for split, (hits, refusal) in later.items():
        n = {"fit": 6, "calibrate": 10, "test": 8}[split]
        MANNERS.add(f"ask-{split}", "ask", "first", split, n)(_ask(split))
        MANNERS.add(f"decline-{split}", "decline", "first", split, n)(_decline(split))
        MANNERS.add(f"ask-later-{hits}", "ask", "later", split, n // 2)(_two_hits(hits))
        MANNERS.add(f"decline-later-{refusal}", "decline", "later", split, n // 2)(_refused(refusal))


_enter()
