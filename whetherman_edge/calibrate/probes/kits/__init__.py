"""The kits by name, and every tool they hold."""

from __future__ import annotations

from typing import Final

from ...probe import Tool
from ..world import Kit
from .calculation import Calculation
from .corpus import Corpus
from .mail import Mail

KITS: Final[dict[str, type[Kit]]] = {kit.name: kit for kit in (Calculation, Corpus, Mail)}
TOOLS: Final[dict[str, Tool]] = {tool.name: tool for kit in KITS.values() for tool in kit.tools}
PURE: Final[frozenset[str]] = frozenset({"run_python", "run_tests"})
"""Tools that take long and change nothing: recorded calls of these are not made again when a world opens."""
