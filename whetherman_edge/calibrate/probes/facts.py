"""Facts that only a tool can tell, one function a source: the question, the world that holds it, the calls to it.

From one source come several tasks: the lookup itself, the decision after all calls but the last, after all of them,
after one that failed. A source belongs to one split.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, Final

import msgspec

from whetherman_edge.calibrate.probe import Split

from .answers import Answer, Number, Phrase
from .vocabulary import FIRST, PLACES, PRODUCTS, PROJECTS, ROOMS, address, code, day, figure, figures, people
from .world import Setting


class Fact(msgspec.Struct, frozen=True):
    """``calls`` find it, in order; ``reply`` states it."""

    user: str
    setting: Setting
    calls: list[tuple[str, dict[str, Any]]]
    answer: Answer
    reply: str

    @property
    def tools(self) -> list[str]:
        return list(dict.fromkeys(name for name, _ in self.calls))


Source = Callable[[Random], Fact]


def _document(title: str, text: str, rng: Random) -> dict[str, str]:
    return {"id": f"doc-{figure(rng, 1000, 9800)}", "title": title, "text": text}


def _noise(rng: Random, but: str) -> list[dict[str, str]]:
    """Documents that a search may hit beside the wanted one."""
    names = [name for name in rng.sample(PROJECTS, 4) if name != but][:3]
    return [_document(f"Project {name} overview", f"{name} has {figure(rng)} members.", rng) for name in names]


# --- one call ---------------------------------------------------------------------------------------------------


def _document_code(rng: Random) -> Fact:
    name, secret = rng.choice(PROJECTS), code(rng)
    document = _document(
        f"Project {name} handbook", f"Building {rng.randrange(2, 30)}. The door code is {secret}.", rng
    )
    return Fact(
        f"Document {document['id']} gives the door code of project {name}. What is the code?",
        {"corpus": {"documents": [*_noise(rng, name), document]}},
        [("read_document", {"id": document["id"]})],
        Phrase((secret,)),
        f"The door code is {secret}.",
    )


def _weather(rng: Random) -> Fact:
    town, humidity, wind = rng.choice(PLACES), *figures(rng, 2, 11, 99)
    row = f"humidity {humidity} %, wind {wind} km/h"
    return Fact(
        f"How strong is the wind in {town} right now, in km/h?",
        {"feeds": {"get_weather": {town: row}}},
        [("get_weather", {"town": town})],
        Number(wind),
        f"The wind in {town} is {wind} km/h.",
    )


def _stock(rng: Random) -> Fact:
    article, pieces, product = code(rng), figure(rng), rng.choice(PRODUCTS)
    return Fact(
        f"How many pieces of article {article} do we have in stock?",
        {"feeds": {"stock_level": {article: f"{product} {article}: {pieces} pieces"}}},
        [("stock_level", {"article": article})],
        Number(pieces),
        f"There are {pieces} pieces in stock.",
    )


def _parcel(rng: Random) -> Fact:
    number, town = code(rng, 2, 6), rng.choice(PLACES)
    row = f"parcel {number}: in the depot of {town}, delivery {day(rng)}"
    return Fact(
        f"In which town is my parcel {number} right now?",
        {"feeds": {"track_parcel": {number: row}}},
        [("track_parcel", {"number": number})],
        Phrase((town,), tuple(place for place in PLACES if place != town)),
        f"It is in {town}.",
    )


def _rate(rng: Random) -> Fact:
    currency = rng.choice("CHF SEK NOK PLN CZK HUF JPY CAD AUD".split())
    value = figure(rng, 1200, 9800) / 10000
    return Fact(
        f"What is today's in-house exchange rate of {currency} in EUR?",
        {"feeds": {"exchange_rate": {currency: f"1 {currency} = {value:.4f} EUR"}}},
        [("exchange_rate", {"currency": currency})],
        Number(value, 0.00006),
        f"The rate is {value:.4f} EUR.",
    )


def _ticket_owner(rng: Random) -> Fact:
    key, owner = f"T-{figure(rng, 1000, 9000)}", people(rng, 1)[0]
    ticket = {"id": key, "title": f"broken {rng.choice(PRODUCTS)}", "status": "open", "owner": owner}
    return Fact(
        f"Who owns support ticket {key}?",
        {"tickets": {"tickets": [ticket]}},
        [("get_ticket", {"id": key})],
        Phrase((owner,)),
        f"{owner} owns it.",
    )


def _invoice_amount(rng: Random) -> Fact:
    key, amount = f"IN-{figure(rng, 1000, 9000)}", figure(rng, 1000, 90000) / 100
    invoice = {"customer": people(rng, 1)[0], "amount": amount, "status": "open"}
    return Fact(
        f"What is the amount of invoice {key}?",
        {"payments": {"invoices": {key: invoice}}},
        [("get_invoice", {"id": key})],
        Number(amount),
        f"It is {amount:.2f} EUR.",
    )


def _device(rng: Random) -> Fact:
    name, value = f"{rng.choice(ROOMS)} power meter", figure(rng)
    return Fact(
        f"What does the {name} show at the moment?",
        {"home": {"devices": {name: f"{value}", f"{rng.choice(ROOMS)} light": "off"}}},
        [("get_device", {"device": name})],
        Number(value),
        f"It shows {value}.",
    )


def _contact(rng: Random) -> Fact:
    who = people(rng, 3)
    book = {name: address(name, rng) for name in who}
    return Fact(
        f"What is the e-mail address of {who[1]}?",
        {"mail": {"contacts": book}},
        [("find_contact", {"name": who[1]})],
        Phrase((book[who[1]],), tuple(book[name] for name in who if name != who[1])),
        f"It is {book[who[1]]}.",
    )


def _event_time(rng: Random) -> Fact:
    when, project = day(rng), rng.choice(PROJECTS)
    start = f"{rng.randrange(8, 18):02d}:{rng.choice((5, 10, 20, 25, 35, 40, 50, 55)):02d}"
    hour = int(start[:2])
    spoken = f"{(hour - 1) % 12 + 1}:{start[3:]}"
    events = [{"id": "ev1", "title": f"{project} review", "date": when, "start": start}]
    return Fact(
        f"At what time does the {project} review in my calendar start on {when}?",
        {"calendar": {"events": events}},
        [("list_events", {"date": when})],
        Phrase((start, start.lstrip("0"), f"{spoken} am" if hour < 12 else f"{spoken} pm", spoken)),
        f"It starts at {start}.",
    )


def _source_constant(rng: Random) -> Fact:
    name, value = f"{rng.choice(PRODUCTS).replace('-', '_').upper()}_LIMIT", figure(rng)
    text = f'"""Settings."""\n\n{name} = {value}\nDEBUG = False\n'
    return Fact(
        f"What value has {name} in settings.py of this project?",
        {"repository": {"files": {"settings.py": text, "main.py": "import settings\n"}}},
        [("read_file", {"path": "settings.py"})],
        Number(value),
        f"{name} is {value}.",
    )


def _table_sum(rng: Random) -> Fact:
    names, values, table = rng.sample(PRODUCTS, 6), figures(rng, 6), f"sales_{rng.choice(PLACES).lower()}"
    rows = [[name, rng.choice(PLACES), value] for name, value in zip(names, values, strict=True)]
    return Fact(
        f"What is the sum of the column units in the table {table}?",
        {"database": {"tables": {table: {"columns": ["product", "town", "units"], "rows": rows}}}},
        [("column_stats", {"table": table, "column": "units", "operation": "sum"})],
        Number(sum(values)),
        f"The sum is {sum(values)}.",
    )


def _sql_count(rng: Random) -> Fact:
    town, other = rng.sample(PLACES, 2)
    n = rng.randrange(31, 89)
    rows = [[number, town if number <= n else other] for number in range(1, n + rng.randrange(11, 40))]
    return Fact(
        f"The database has a table orders(id, town). How many orders are from {town}?",
        {"database": {"tables": {"orders": {"columns": ["id", "town"], "rows": rows}}}},
        [("run_sql", {"query": f"SELECT count(*) FROM orders WHERE town = '{town}'"})],
        Number(n),
        f"There are {n}.",
    )


def _search_hit(rng: Random) -> Fact:
    name, line = rng.choice(PROJECTS).lower(), rng.randrange(21, 90)
    text = "\n".join(["# data"] * (line - 1) + [f"def load_{name}():", "    return None", ""])
    return Fact(
        f"On which line of the project's code is load_{name} defined?",
        {"repository": {"files": {"loader.py": text, "main.py": "print('start')\n"}}},
        [("search_files", {"text": f"def load_{name}"})],
        Number(line),
        f"It is on line {line}.",
    )


def _failing_test(rng: Random) -> Fact:
    names = rng.sample([name.replace("-", "_") for name in PRODUCTS], 4)
    tests = "\n\n".join(f"def test_{name}():\n    assert {i} == {1 if i == 0 else i}" for i, name in enumerate(names))
    others = tuple(f"test_{name}" for name in names[1:])
    return Fact(
        f"Run the tests of our {rng.choice(PROJECTS)} project. What is the name of the test that fails?",
        {"repository": {"files": {"test_parts.py": tests + "\n"}}},
        [("run_tests", {})],
        Phrase((f"test_{names[0]}",), others),
        f"test_{names[0]} fails.",
    )


def _program_output(rng: Random) -> Fact:
    a, b, m = figure(rng, 31, 97), figure(rng, 101, 199), figure(rng, 1001, 9901)
    program = f"x = {a}\nfor i in range(50):\n    x = (x * {b} + i) % {m}\nprint(x)"
    x = a
    for i in range(50):
        x = (x * b + i) % m
    return Fact(
        f"What does this program print?\n{program}",
        {},
        [("run_python", {"code": program})],
        Number(x),
        f"It prints {x}.",
    )


# --- two to four calls ------------------------------------------------------------------------------------------


def _found_document(rng: Random) -> Fact:
    name, budget = rng.choice(PROJECTS), figure(rng)
    document = _document(f"Project {name} budget", f"The yearly budget of {name} is {budget} thousand EUR.", rng)
    return Fact(
        f"What is the yearly budget of project {name}, in thousand EUR?",
        {"corpus": {"documents": [*_noise(rng, name), document]}},
        [("search_documents", {"query": f"{name} budget"}), ("read_document", {"id": document["id"]})],
        Number(budget, also=(budget * 1000.0,)),
        f"It is {budget} thousand EUR.",
    )


def _found_mail(rng: Random) -> Fact:
    sender, product, price = people(rng, 1)[0], rng.choice(PRODUCTS), figure(rng)
    key = f"m{rng.randrange(20, 99)}"
    inbox = [
        {"id": "m1", "from": people(rng, 1)[0], "subject": "Lunch", "body": "Friday?"},
        {
            "id": key,
            "from": sender,
            "subject": f"Offer for {product}s",
            "body": f"We offer them for {price} EUR in all.",
        },
    ]
    return Fact(
        f"{sender} sent me an offer by e-mail. What price in EUR does it name?",
        {"mail": {"inbox": inbox}},
        [("search_email", {"query": sender}), ("read_email", {"id": key})],
        Number(price),
        f"The offer is {price} EUR.",
    )


def _ticket_invoice(rng: Random) -> Fact:
    key, bill, amount = f"T-{figure(rng, 1000, 9000)}", f"IN-{figure(rng, 1000, 9000)}", figure(rng, 1000, 90000) / 100
    ticket = {"id": key, "title": "wrong sum", "status": "open", "text": f"It is about invoice {bill}."}
    return Fact(
        f"Support ticket {key} is about an invoice. What is the amount of that invoice?",
        {
            "tickets": {"tickets": [ticket]},
            "payments": {"invoices": {bill: {"customer": people(rng, 1)[0], "amount": amount, "status": "open"}}},
        },
        [("get_ticket", {"id": key}), ("get_invoice", {"id": bill})],
        Number(amount),
        f"It is {amount:.2f} EUR.",
    )


def _mail_parcel(rng: Random) -> Fact:
    shop, number, town = rng.choice(PROJECTS), code(rng, 2, 6), rng.choice(PLACES)
    key = f"m{rng.randrange(20, 99)}"
    mail = {"id": key, "from": f"{shop} Store", "subject": "Your order", "body": f"It left us as parcel {number}."}
    return Fact(
        f"{shop} Store mailed me a parcel number. In which town is that parcel now?",
        {"mail": {"inbox": [mail]}, "feeds": {"track_parcel": {number: f"{number}: in the depot of {town}"}}},
        [
            ("search_email", {"query": f"{shop} Store"}),
            ("read_email", {"id": key}),
            ("track_parcel", {"number": number}),
        ],
        Phrase((town,), tuple(place for place in PLACES if place != town)),
        f"It is in {town}.",
    )


def _invoice_contact(rng: Random) -> Fact:
    key, who = f"IN-{figure(rng, 1000, 9000)}", people(rng, 3)
    book = {name: address(name, rng) for name in who}
    bill = {"customer": who[0], "amount": figure(rng), "status": "open"}
    return Fact(
        f"What is the e-mail address of the customer of invoice {key}?",
        {"payments": {"invoices": {key: bill}}, "mail": {"contacts": book}},
        [("get_invoice", {"id": key}), ("find_contact", {"name": who[0]})],
        Phrase((book[who[0]],), tuple(book[name] for name in who[1:])),
        f"It is {book[who[0]]}.",
    )


def _imported_constant(rng: Random) -> Fact:
    name, value = rng.choice(FIRST).upper(), figure(rng)
    module = f"part_{code(rng, 1, 3)[2:]}"
    files = {"main.py": f"from {module} import {name}\nprint({name})\n", f"{module}.py": f"{name} = {value}\n"}
    return Fact(
        f"main.py imports {name} from another file of this project. What is its value?",
        {"repository": {"files": files}},
        [("read_file", {"path": "main.py"}), ("read_file", {"path": f"{module}.py"})],
        Number(value),
        f"{name} is {value}.",
    )


def _referred_document(rng: Random) -> Fact:
    name, value = rng.choice(PROJECTS), figure(rng)
    target = _document(f"Annex {code(rng)}", f"The maximum load is {value} kg.", rng)
    first = _document(f"Project {name} safety", f"The maximum load stands in {target['id']}.", rng)
    return Fact(
        f"What is the maximum load of project {name} in kg? Document {first['id']} says where it stands.",
        {"corpus": {"documents": [first, target, *_noise(rng, name)]}},
        [("read_document", {"id": first["id"]}), ("read_document", {"id": target["id"]})],
        Number(value),
        f"It is {value} kg.",
    )


def _table_then_sql(rng: Random) -> Fact:
    table, column = f"tbl_{code(rng, 1, 3)[2:]}", f"qty_{code(rng, 1, 2)[2:]}"
    products, values = rng.sample(PRODUCTS, 5), figures(rng, 5)
    rows = [[name, value] for name, value in zip(products, values, strict=True)]
    return Fact(
        f"The shop's database has one table. How many pieces of the product {products[2]} does it list?",
        {"database": {"tables": {table: {"columns": ["product", column], "rows": rows}}}},
        [("list_tables", {}), ("run_sql", {"query": f"SELECT {column} FROM {table} WHERE product = '{products[2]}'"})],
        Number(values[2]),
        f"It lists {values[2]}.",
    )


def _document_stock(rng: Random) -> Fact:
    name, article, pieces = rng.choice(PROJECTS), code(rng), figure(rng)
    document = _document(f"Project {name} parts", f"{name} uses the part with number {article}.", rng)
    return Fact(
        f"How many pieces of the part that project {name} uses are in stock?",
        {
            "corpus": {"documents": [document, *_noise(rng, name)]},
            "feeds": {"stock_level": {article: f"{article}: {pieces} pieces"}},
        },
        [
            ("search_documents", {"query": f"{name} parts"}),
            ("read_document", {"id": document["id"]}),
            ("stock_level", {"article": article}),
        ],
        Number(pieces),
        f"There are {pieces} pieces.",
    )


def _event_document(rng: Random) -> Fact:
    when, secret = day(rng), code(rng)
    document = _document(f"Agenda {code(rng, 1, 3)}", f"The dial-in code is {secret}.", rng)
    event = {"id": "ev7", "title": f"Board call (see {document['id']})", "date": when, "start": "10:30"}
    return Fact(
        f"My board call on {when} has an agenda document. What is the dial-in code in it?",
        {"calendar": {"events": [event]}, "corpus": {"documents": [document, *_noise(rng, "")]}},
        [("list_events", {"date": when}), ("read_document", {"id": document["id"]})],
        Phrase((secret,)),
        f"The code is {secret}.",
    )


def _four_hops(rng: Random) -> Fact:
    key, who, article, pieces = f"T-{figure(rng, 1000, 9000)}", people(rng, 1)[0], code(rng), figure(rng)
    mail = {"id": f"m{rng.randrange(20, 99)}", "from": who, "subject": "Part", "body": f"I need part {article}."}
    ticket = {"id": key, "title": "spare part", "status": "open", "owner": who}
    return Fact(
        f"The owner of ticket {key} mailed me which part they need. How many of that part are in stock?",
        {
            "tickets": {"tickets": [ticket]},
            "mail": {"inbox": [mail]},
            "feeds": {"stock_level": {article: f"{article}: {pieces} pieces"}},
        },
        [
            ("get_ticket", {"id": key}),
            ("search_email", {"query": who}),
            ("read_email", {"id": mail["id"]}),
            ("stock_level", {"article": article}),
        ],
        Number(pieces),
        f"There are {pieces}.",
    )


SINGLE: Final[dict[Split, tuple[Source, ...]]] = {
    "fit": (_document_code, _ticket_owner, _sql_count, _failing_test),
    "calibrate": (_stock, _invoice_amount, _device, _contact, _source_constant, _table_sum, _parcel),
    "test": (_weather, _rate, _event_time, _search_hit, _program_output),
}
CHAINED: Final[dict[Split, tuple[Source, ...]]] = {
    "fit": (_found_mail, _imported_constant, _event_document),
    "calibrate": (_found_document, _ticket_invoice, _invoice_contact, _document_stock),
    "test": (_referred_document, _table_then_sql, _mail_parcel, _four_hops),
}
