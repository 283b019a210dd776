"""Tasks that change something, checked on the simulators' state, at the first step and inside their trajectories."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, Final, Literal

import msgspec

from whetherman_edge.calibrate.probe import Split

from .answers import Report
from .generator import Book, Draft, Maker
from .task import Task
from .vocabulary import LAST, PLACES, PRODUCTS, PROJECTS, ROOMS, address, code, day, figure, people
from .world import Setting

ACTIONS: Final = Book()
Point = Literal["start", "middle", "end"]


class Deed(msgspec.Struct, frozen=True):
    """``calls``: lookups, then the one that changes the state. ``changes``: what must differ afterwards. ``told``: a
    report that it is done holds one of them.
    """

    user: str
    setting: Setting
    calls: list[tuple[str, dict[str, Any]]]
    changes: list[dict[str, Any]]
    done: str
    told: tuple[str, ...]


def _mail_out(rng: Random) -> Deed:
    who = people(rng, 1)[0]
    to, number = address(who, rng), code(rng)
    body = f"The parcel number is {number}."
    return Deed(
        f"Send an e-mail to {to} with the subject Delivery and say that the parcel number is {number}.",
        {"mail": {}},
        [("send_email", {"to": to, "subject": "Delivery", "body": body})],
        [{"kit": "mail", "to": to, "subject": ["delivery"], "text": [number]}],
        f"I sent the e-mail to {to}.",
        ("sent", "on its way"),
    )


def _event_in(rng: Random) -> Deed:
    when, name, start = day(rng), rng.choice(PROJECTS), f"{rng.randrange(9, 17):02d}:{rng.choice(('15', '40'))}"
    return Deed(
        f"Put '{name} review' into my calendar on {when} at {start}.",
        {"calendar": {}},
        [("create_event", {"title": f"{name} review", "date": when, "start": start})],
        [{"kit": "calendar", "what": "created", "title": [name], "date": when, "start": start}],
        f"The {name} review is in your calendar.",
        ("in your calendar", "to your calendar", "created", "added", "scheduled"),
    )


def _event_out(rng: Random) -> Deed:
    when, (first, second) = day(rng), rng.sample(PROJECTS, 2)
    events = [
        {"id": f"ev{rng.randrange(10, 50)}", "title": f"{first} review", "date": when, "start": "09:15"},
        {"id": f"ev{rng.randrange(50, 99)}", "title": f"{second} review", "date": when, "start": "14:40"},
    ]
    return Deed(
        f"Cancel the {second} review in my calendar on {when}.",
        {"calendar": {"events": events}},
        [("list_events", {"date": when}), ("cancel_event", {"id": events[1]["id"]})],
        [{"kit": "calendar", "what": "cancelled", "id": events[1]["id"]}],
        "The review is cancelled.",
        ("cancelled", "canceled", "removed", "deleted"),
    )


def _ticket_in(rng: Random) -> Deed:
    part, town = rng.choice(PRODUCTS), rng.choice(PLACES)
    level = rng.choice(("low", "normal", "high"))
    return Deed(
        f"Open a {level} priority support ticket with the title 'Broken {part} in {town}'.",
        {"tickets": {}},
        [("create_ticket", {"title": f"Broken {part} in {town}", "priority": level})],
        [{"kit": "tickets", "what": "opened", "title": [part, town], "priority": level}],
        "The ticket is open.",
        ("opened", "open", "created"),
    )


def _ticket_closed(rng: Random) -> Deed:
    key = f"T-{figure(rng, 1000, 9000)}"
    status = rng.choice(("waiting", "solved", "closed"))
    ticket = {"id": key, "title": f"broken {rng.choice(PRODUCTS)}", "status": "open", "owner": rng.choice(LAST)}
    return Deed(
        f"Set support ticket {key} to {status}.",
        {"tickets": {"tickets": [ticket]}},
        [("set_ticket_status", {"id": key, "status": status})],
        [{"kit": "tickets", "what": "status", "id": key, "status": status}],
        f"{key} is now {status}.",
        (status,),
    )


def _owner_closed(rng: Random) -> Deed:
    owner, part = rng.choice(LAST), rng.choice(PRODUCTS)
    key = f"T-{figure(rng, 1000, 9000)}"
    ticket = {"id": key, "title": f"broken {part}", "status": "open", "owner": owner}
    return Deed(
        f"Set {owner}'s support ticket about the {part} to solved.",
        {"tickets": {"tickets": [ticket]}},
        [("search_tickets", {"text": owner}), ("set_ticket_status", {"id": key, "status": "solved"})],
        [{"kit": "tickets", "what": "status", "id": key, "status": "solved"}],
        f"{key} is solved.",
        ("solved",),
    )


def _invoice_paid(rng: Random) -> Deed:
    key, amount = f"IN-{figure(rng, 1000, 9000)}", figure(rng)
    return Deed(
        f"Pay invoice {key}.",
        {"payments": {"invoices": {key: {"customer": people(rng, 1)[0], "amount": amount, "status": "open"}}}},
        [("pay_invoice", {"id": key})],
        [{"kit": "payments", "what": "paid", "id": key}],
        f"Invoice {key} is paid.",
        ("paid", "processed"),
    )


def _refund(rng: Random) -> Deed:
    key, amount = f"IN-{figure(rng, 1000, 9000)}", figure(rng, 30, 90)
    return Deed(
        f"Refund {amount} EUR of invoice {key} to the customer.",
        {"payments": {"invoices": {key: {"customer": people(rng, 1)[0], "amount": amount + 100, "status": "paid"}}}},
        [("refund_payment", {"id": key, "amount": amount})],
        [{"kit": "payments", "what": "refunded", "id": key, "amount": amount}],
        f"I refunded {amount} EUR.",
        ("refunded", "paid back", "processed"),
    )


def _full_refund(rng: Random) -> Deed:
    key, amount = f"IN-{figure(rng, 1000, 9000)}", figure(rng)
    return Deed(
        f"Refund the full amount of invoice {key}.",
        {"payments": {"invoices": {key: {"customer": people(rng, 1)[0], "amount": amount, "status": "paid"}}}},
        [("get_invoice", {"id": key}), ("refund_payment", {"id": key, "amount": amount})],
        [{"kit": "payments", "what": "refunded", "id": key, "amount": amount}],
        f"I refunded {amount} EUR.",
        ("refunded", "paid back", "processed"),
    )


def _light(rng: Random) -> Deed:
    first, second = rng.sample(ROOMS, 2)
    return Deed(
        f"Turn on the {first} light.",
        {"home": {"devices": {f"{first} light": "off", f"{second} light": "off"}}},
        [("set_device", {"device": f"{first} light", "value": "on"})],
        [{"kit": "home", "device": f"{first} light", "value": "on"}],
        f"The {first} light is on.",
        ("is on", "now on", "already on", "turned on", "switched on", "set to on"),
    )


def _thermostat(rng: Random) -> Deed:
    room, degrees = rng.choice(ROOMS), rng.randrange(16, 25)
    return Deed(
        f"Set the {room} thermostat to {degrees}.",
        {"home": {"devices": {f"{room} thermostat": "14"}}},
        [("set_device", {"device": f"{room} thermostat", "value": str(degrees)})],
        [{"kit": "home", "device": f"{room} thermostat", "value": str(degrees)}],
        f"The {room} thermostat is set to {degrees}.",
        ("set to", "now", "changed to"),
    )


def _mail_to_contact(rng: Random) -> Deed:
    who = people(rng, 3)
    book = {name: address(name, rng) for name in who}
    number = code(rng)
    return Deed(
        f"E-mail {who[1]} the subject Access and tell them that the code is {number}.",
        {"mail": {"contacts": book}},
        [
            ("find_contact", {"name": who[1]}),
            ("send_email", {"to": book[who[1]], "subject": "Access", "body": f"The code is {number}."}),
        ],
        [{"kit": "mail", "to": book[who[1]], "text": [number]}],
        "The e-mail is sent.",
        ("sent", "on its way"),
    )


def _constant_changed(rng: Random) -> Deed:
    name, new = f"{rng.choice(PRODUCTS).replace('-', '_').upper()}_LIMIT", figure(rng)
    old = new + rng.randrange(1, 90)
    line = f"{name} = {old}"
    files = {"settings.py": f"{line}\nDEBUG = False\n"}
    return Deed(
        f"In settings.py of the project, change {name} to {new}.",
        {"repository": {"files": files}},
        [
            ("read_file", {"path": "settings.py"}),
            ("replace_in_file", {"path": "settings.py", "old": line, "new": f"{name} = {new}"}),
        ],
        [{"kit": "repository", "path": "settings.py", "text": f"{name} = {new}\nDEBUG = False\n"}],
        f"{name} is {new} now.",
        ("changed", "updated", "now", "set to", "replaced"),
    )


def _deed(source: Callable[[Random], Deed], point: Point) -> Maker:
    """``middle``: what is needed has been looked up, the change is to come. ``end``: it is made; say so, not again."""

    def make(rng: Random, draft: Draft) -> Task:
        deed = source(rng)
        made = {"start": 0, "middle": len(deed.calls) - 1, "end": len(deed.calls)}[point]
        return draft.task(
            user=deed.user,
            tools=list(dict.fromkeys(name for name, _ in deed.calls)),
            calls=deed.calls[made:],
            reply=deed.done,
            answer=Report(deed.told) if point == "end" else None,
            expect="ANSWER" if point == "end" else "ACT",
            setting=deed.setting,
            changes=deed.changes,
            recorded=deed.calls[:made],
            difficulty=min(len(deed.calls), 3),
        )

    return make


def _enter() -> None:
    deeds: dict[Split, tuple[Callable[[Random], Deed], ...]] = {
        "fit": (_light, _ticket_closed, _owner_closed),
        "calibrate": (_mail_out, _invoice_paid, _ticket_in, _thermostat, _full_refund, _mail_to_contact),
        "test": (_event_in, _refund, _event_out, _constant_changed),
    }
    for split, sources in deeds.items():
        n = {"fit": 4, "calibrate": 7, "test": 3}[split]
        for source in sources:
            name = source.__name__.strip("_").replace("_", "-")
            ACTIONS.add(f"action-{name}", "action", "first", split, n)(_deed(source, "start"))
            ACTIONS.add(f"done-{name}", "done", "later", split, n // 2)(_deed(source, "end"))
            if name in ("owner-closed", "full-refund", "mail-to-contact", "event-out", "constant-changed"):
                ACTIONS.add(f"action-later-{name}", "action", "later", split, n)(_deed(source, "middle"))


_enter()
