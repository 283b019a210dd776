"""Calendar and tickets that only pretend; the checkers read their state."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from whetherman_edge.calibrate.probe import Tool
from whetherman_edge.calibrate.probes.world import Kit, ToolFault, choice, schema

from .calculation import a_day

_PAGE: Final = 4


class Calendar(Kit):
    """list_events, create_event, cancel_event. Setting: "events": [{"id", "title", "date", "start"}]."""

    name: ClassVar[str] = "calendar"
    tools: ClassVar[tuple[Tool, ...]] = (
        Tool("list_events", "List the events of one day in the user's calendar.", schema({"date": "str: YYYY-MM-DD"})),
        Tool(
            "create_event",
            "Put an event into the user's calendar.",
            schema({"title": "str: ", "date": "str: YYYY-MM-DD", "start": "str: HH:MM"}),
            "write",
        ),
        Tool("cancel_event", "Cancel one event of the user's calendar.", schema({"id": "str: such as ev12"}), "write"),
    )

    def __init__(self, setting: Mapping[str, Any]) -> None:
        super().__init__(setting)
        self._opened = {event["id"]: event for event in setting.get("events", ())}
        self._events: dict[str, dict[str, str]] = copy.deepcopy(self._opened)
        self._n_made = len(self._opened)

    def list_events(self, date: str) -> str:
        day = a_day(date).isoformat()
        hits = sorted((e["start"], e["id"], e["title"]) for e in self._events.values() if e["date"] == day)
        return "\n".join(f"{key}: {start} {title}" for start, key, title in hits) or "no events"

    def create_event(self, title: str, date: str, start: str) -> str:
        hour, _, minute = start.strip().partition(":")
        if not (hour.isdigit() and minute.isdigit() and int(hour) < 24 and int(minute) < 60):
            raise ToolFault(f"start: expected HH:MM, got {start[:20]!r}")
        self._n_made += 1
        key = f"new{self._n_made}"
        at = f"{int(hour):02d}:{int(minute):02d}"
        self._events[key] = {"id": key, "title": title, "date": a_day(date).isoformat(), "start": at}
        return f"created, id {key}"

    def cancel_event(self, id: str) -> str:  # noqa: A002 - the argument's name in the tool
        if self._events.pop(id.strip(), None) is None:
            raise ToolFault(f"no event {id[:20]!r}")
        return "cancelled"

    def changes(self) -> list[dict[str, Any]]:
        made = [{"what": "created", **e} for key, e in self._events.items() if key not in self._opened]
        return made + [{"what": "cancelled", **e} for key, e in self._opened.items() if key not in self._events]


class Tickets(Kit):
    """search_tickets, get_ticket, create_ticket, set_ticket_status. Setting: "tickets": [{"id", "title", "status",
    "owner", "priority", "text"}].
    """

    name: ClassVar[str] = "tickets"
    tools: ClassVar[tuple[Tool, ...]] = (
        Tool(
            "search_tickets",
            "List support tickets whose title or owner holds a text; four a page.",
            schema({"text": "str: "}, {"page": "int: from 1"}),
        ),
        Tool("get_ticket", "Return everything about one support ticket.", schema({"id": "str: such as T-4821"})),
        Tool(
            "create_ticket",
            "Open a new support ticket.",
            schema({"title": "str: ", "priority": choice(("low", "normal", "high"))}),
            "write",
        ),
        Tool(
            "set_ticket_status",
            "Change the status of a support ticket.",
            schema({"id": "str: ", "status": choice(("open", "waiting", "solved", "closed"))}),
            "write",
        ),
    )

    def __init__(self, setting: Mapping[str, Any]) -> None:
        super().__init__(setting)
        self._opened = {ticket["id"]: ticket for ticket in setting.get("tickets", ())}
        self._tickets: dict[str, dict[str, str]] = copy.deepcopy(self._opened)

    def search_tickets(self, text: str, page: int = 1) -> str:
        hits = [
            t for t in self._tickets.values() if text.strip().lower() in f"{t['title']} {t.get('owner', '')}".lower()
        ]
        first = (max(page, 1) - 1) * _PAGE
        if not hits[first:]:
            return "no tickets match" if not hits else f"no more; there are {len(hits)}"
        shown = [f"{t['id']}: {t['title']} [{t['status']}]" for t in hits[first : first + _PAGE]]
        more = len(hits) - first - len(shown)
        return "\n".join(shown + ([f"({more} more on page {max(page, 1) + 1})"] if more > 0 else []))

    def get_ticket(self, id: str) -> str:  # noqa: A002 - the argument's name in the tool
        ticket = self._tickets.get(id.strip().upper())
        if ticket is None:
            raise ToolFault(f"no ticket {id[:20]!r}")
        return "\n".join(f"{key}: {value}" for key, value in ticket.items())

    def create_ticket(self, title: str, priority: str) -> str:
        key = f"T-{len(self._tickets) + 101}"
        self._tickets[key] = {"id": key, "title": title, "status": "open", "priority": priority}
        return f"opened {key}"

    def set_ticket_status(self, id: str, status: str) -> str:  # noqa: A002 - the argument's name in the tool
        ticket = self._tickets.get(id.strip().upper())
        if ticket is None:
            raise ToolFault(f"no ticket {id[:20]!r}")
        ticket["status"] = status
        return f"{ticket['id']} is now {status}"

    def changes(self) -> list[dict[str, Any]]:
        out: list[dict[str, Any]] = []
        for key, ticket in self._tickets.items():
            if key not in self._opened:
                out.append({"what": "opened", **ticket})
            elif ticket["status"] != self._opened[key]["status"]:
                out.append({"what": "status", "id": key, "status": ticket["status"]})
        return out
