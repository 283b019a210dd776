"""Payments, home devices and read-only feeds, all of them simulated; the checkers read their state."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from whetherman_edge.calibrate.probe import Tool
from whetherman_edge.calibrate.probes.world import Kit, ToolFault, schema


class Payments(Kit):
    """get_invoice, pay_invoice, refund_payment. Setting: "invoices": {id: {"customer", "amount", "status"}}."""

    name: ClassVar[str] = "payments"
    tools: ClassVar[tuple[Tool, ...]] = (
        Tool("get_invoice", "Return customer, amount and status of one invoice.", schema({"id": "str: as IN-5512"})),
        Tool("pay_invoice", "Pay an open invoice in full from the company account.", schema({"id": "str: "}), "write"),
        Tool(
            "refund_payment",
            "Pay money of a paid invoice back to the customer.",
            schema({"id": "str: invoice", "amount": "num: in EUR"}),
            "write",
        ),
    )

    def __init__(self, setting: Mapping[str, Any]) -> None:
        super().__init__(setting)
        self._invoices: dict[str, dict[str, Any]] = {key: dict(v) for key, v in setting.get("invoices", {}).items()}
        self._refund_max = float(setting.get("refund_max", 1e9))
        self._moves: list[dict[str, Any]] = []

    def _invoice(self, key: str) -> dict[str, Any]:
        if key not in self._invoices:
            raise ToolFault(f"no invoice {key[:20]!r}")
        return self._invoices[key]

    def get_invoice(self, id: str) -> str:  # noqa: A002 - the argument's name in the tool
        found = self._invoice(id.strip().upper())
        return "\n".join(f"{key}: {value}" for key, value in found.items())

    def pay_invoice(self, id: str) -> str:  # noqa: A002 - the argument's name in the tool
        key = id.strip().upper()
        found = self._invoice(key)
        if found["status"] != "open":
            raise ToolFault(f"{key} is {found['status']}")
        found["status"] = "paid"
        self._moves.append({"what": "paid", "id": key, "amount": found["amount"]})
        return f"paid {found['amount']} EUR"

    def refund_payment(self, id: str, amount: float) -> str:  # noqa: A002 - the argument's name in the tool
        key = id.strip().upper()
        found = self._invoice(key)
        if found["status"] != "paid":
            raise ToolFault(f"{key} is {found['status']}, not paid")
        if not 0 < amount <= found["amount"]:
            raise ToolFault(f"amount: at most {found['amount']}")
        if amount > self._refund_max:
            raise ToolFault(f"refunds above {self._refund_max:g} EUR are not permitted for this account")
        self._moves.append({"what": "refunded", "id": key, "amount": amount})
        return f"refunded {amount:g} EUR"

    def changes(self) -> list[dict[str, Any]]:
        return [dict(move) for move in self._moves]


class Home(Kit):
    """list_devices, get_device, set_device. Setting: "devices": {name: value}."""

    name: ClassVar[str] = "home"
    tools: ClassVar[tuple[Tool, ...]] = (
        Tool("list_devices", "List the names of the devices in the user's home.", schema({})),
        Tool("get_device", "Read the present value of one device of the home.", schema({"device": "str: name"})),
        Tool(
            "set_device",
            "Set a device of the home: a light or plug to on or off, a thermostat or blind to a number.",
            schema({"device": "str: name", "value": "str: "}),
            "write",
        ),
    )

    def __init__(self, setting: Mapping[str, Any]) -> None:
        super().__init__(setting)
        self._opened: dict[str, str] = dict(setting.get("devices", {}))
        self._devices = dict(self._opened)

    def _named(self, device: str) -> str:
        wanted = device.strip().lower().replace("_", " ")
        if wanted not in self._devices:
            raise ToolFault(f"no device {device[:40]!r}; list_devices has the names")
        return wanted

    def list_devices(self) -> str:
        return ", ".join(self._devices) or "no devices"

    def get_device(self, device: str) -> str:
        name = self._named(device)
        return f"{name}: {self._devices[name]}"

    def set_device(self, device: str, value: str) -> str:
        name = self._named(device)
        text = re.sub(r"(?<=\d)\s*(?:%|°\s*c?|c|degrees?(?: (?:celsius|c))?)$", "", value.strip().lower()).removesuffix(
            ".0"
        )
        self._devices[name] = text
        return f"{name} is now {text}"

    def changes(self) -> list[dict[str, Any]]:
        return [{"device": name, "value": v} for name, v in self._devices.items() if v != self._opened[name]]


class Feeds(Kit):
    """get_weather, stock_level, track_parcel, exchange_rate. Setting: {tool name: {key: text}}."""

    name: ClassVar[str] = "feeds"
    tools: ClassVar[tuple[Tool, ...]] = (
        Tool("get_weather", "Read the weather station of a town: the values of this hour.", schema({"town": "str: "})),
        Tool("stock_level", "Say how many pieces of an article are in stock now.", schema({"article": "str: number"})),
        Tool("track_parcel", "Say where a parcel is and when it arrives.", schema({"number": "str: parcel number"})),
        Tool("exchange_rate", "Today's in-house rate of a currency in EUR.", schema({"currency": "str: code"})),
    )

    def _row(self, tool: str, key: str) -> str:
        rows: Mapping[str, str] = self.setting.get(tool, {})
        for name, text in rows.items():
            if name.lower() == key.strip().lower():
                return text
        raise ToolFault(f"nothing known about {key[:40]!r}")

    def get_weather(self, town: str) -> str:
        return self._row("get_weather", town)

    def stock_level(self, article: str) -> str:
        return self._row("stock_level", article)

    def track_parcel(self, number: str) -> str:
        return self._row("track_parcel", number)

    def exchange_rate(self, currency: str) -> str:
        return self._row("exchange_rate", currency)
