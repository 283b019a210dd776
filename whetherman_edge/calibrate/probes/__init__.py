"""The probe pack: parametric tasks with exact checkers, drawn from a seed.

``draw(seed)`` gives the same pack, byte for byte, on every machine and Python. Splits go by generator: no way of making
a task is in two of them, and each holds every family.
"""

from __future__ import annotations

from whetherman_edge.calibrate.probe import Probe, Split

from .generator import Generator
from .lookups import access_code, access_code_hop, access_code_sufficient
from .plain import arithmetic_sum, capital, said_before, thanks

GENERATORS: tuple[Generator, ...] = (
    Generator("arithmetic-sum", "arithmetic", "first", "calibrate", 9, arithmetic_sum),
    Generator("chat-thanks", "chat", "first", "calibrate", 6, thanks),
    Generator("context-order", "context", "first", "calibrate", 6, said_before),
    Generator("knowledge-capital", "knowledge", "first", "calibrate", 8, capital),
    Generator("lookup-access", "lookup", "first", "calibrate", 10, access_code),
    Generator("sufficient-access", "sufficient", "later", "calibrate", 10, access_code_sufficient),
    Generator("hop-access", "hop", "later", "calibrate", 10, access_code_hop),
)


def draw(seed: int, *, split: Split | None = None) -> list[Probe]:
    """The whole pack of one seed, or one split of it."""
    return [task for generator in GENERATORS if split in (None, generator.split) for task in generator.draw(seed)]


def split_of(generator: str) -> Split:
    """The split that a generator belongs to. Raises KeyError for a name that is none."""
    return {made.name: made.split for made in GENERATORS}[generator]
