"""A mailbox that only pretends: what was sent stays in the state, where the checker reads it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from whetherman_edge.calibrate.probe import Tool
from whetherman_edge.calibrate.probes.world import Kit, ToolFault, schema


class Mail(Kit):
    """send_email, search_email, read_email, find_contact. Setting: "inbox": [{"id", "from", "subject", "body"}],
    "contacts": {name: address}.
    """

    name: ClassVar[str] = "mail"
    tools: ClassVar[tuple[Tool, ...]] = (
        Tool(
            "send_email",
            "Send an e-mail from the user's account. It goes out at once.",
            schema({"to": "str: address", "subject": "str: ", "body": "str: "}),
            "write",
        ),
        Tool(
            "search_email",
            "Search the user's inbox; returns id, sender and subject of messages that contain all the words.",
            schema({"query": "str: "}),
        ),
        Tool("read_email", "Return one message of the inbox.", schema({"id": "str: such as m3"})),
        Tool(
            "find_contact",
            "Look up a person's e-mail address in the user's address book.",
            schema({"name": "str: full name or a part of it"}),
        ),
    )

    def __init__(self, setting: Mapping[str, Any]) -> None:
        super().__init__(setting)
        self._inbox: list[dict[str, str]] = list(setting.get("inbox", ()))
        self._contacts: dict[str, str] = dict(setting.get("contacts", {}))
        self._sent: list[dict[str, str]] = []

    def send_email(self, to: str, subject: str, body: str) -> str:
        if "@" not in to:
            raise ToolFault(f"to: expected an address, got {to[:40]!r}")
        named = re.fullmatch(r"[^<>]*<([^<>\s]+@[^<>\s]+)>\s*", to)  # "Rosa Varga <rosa@x.example>"
        address = named[1] if named is not None else to.strip()
        self._sent.append({"to": address, "subject": subject, "body": body, "text": f"{subject}\n{body}"})
        return f"sent, message id out-{len(self._sent)}"

    def search_email(self, query: str) -> str:
        words = query.lower().replace('"', "").split()
        hits = [
            mail
            for mail in self._inbox
            if all(w in f"{mail['from']} {mail['subject']} {mail['body']}".lower() for w in words)
        ]
        return "\n".join(f"{mail['id']}: {mail['from']}: {mail['subject']}" for mail in hits[:5]) or "no messages match"

    def read_email(self, id: str) -> str:  # noqa: A002 - the argument's name in the tool
        for mail in self._inbox:
            if mail["id"] == id.strip():
                return f"From: {mail['from']}\nSubject: {mail['subject']}\n{mail['body']}"
        raise ToolFault(f"no message {id[:20]!r}")

    def find_contact(self, name: str) -> str:
        hits = [f"{who}: {address}" for who, address in self._contacts.items() if name.strip().lower() in who.lower()]
        if not hits:
            raise ToolFault(f"no contact {name[:40]!r}")
        return "\n".join(hits)

    def changes(self) -> list[dict[str, Any]]:
        return [dict(mail) for mail in self._sent]
