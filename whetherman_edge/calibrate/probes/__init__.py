"""The probe pack: parametric tasks with exact checkers, drawn from a seed.

``draw(seed)`` gives the same pack, byte for byte, on every machine and Python. Splits go by generator: no way of making
a task is in two of them, and each holds every family.
"""

from __future__ import annotations

from whetherman_edge.calibrate.probe import Probe, Split

from .actions import ACTIONS
from .generator import Generator
from .lookups import LOOKUPS
from .manners import MANNERS
from .plain import PLAIN
from .series import SERIES

GENERATORS: tuple[Generator, ...] = (*PLAIN, *LOOKUPS, *SERIES, *ACTIONS, *MANNERS)


def draw(seed: int, *, split: Split | None = None) -> list[Probe]:
    """The whole pack of one seed, or one split of it."""
    return [task for generator in GENERATORS if split in (None, generator.split) for task in generator.draw(seed)]


def split_of(generator: str) -> Split:
    """The split that a generator belongs to. Raises KeyError for a name that is none."""
    return {made.name: made.split for made in GENERATORS}[generator]
