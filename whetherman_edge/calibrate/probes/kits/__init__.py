"""The kits by name, and every tool they hold."""

from __future__ import annotations

from typing import Final

from whetherman_edge.calibrate.probe import Tool
from whetherman_edge.calibrate.probes.world import Kit

from .calculation import Calculation
from .corpus import Corpus
from .database import Database
from .mail import Mail
from .office import Calendar, Tickets
from .repository import Repository
from .services import Feeds, Home, Payments

_ALL: Final = (Calculation, Calendar, Corpus, Database, Feeds, Home, Mail, Payments, Repository, Tickets)
KITS: Final[dict[str, type[Kit]]] = {kit.name: kit for kit in _ALL}
TOOLS: Final[dict[str, Tool]] = {tool.name: tool for kit in KITS.values() for tool in kit.tools}
