"""Names, things and codes that tasks are made of. None is a fact of the world; codes and figures are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, timedelta
from random import Random
from typing import Final

FIRST: Final = (
    "Amara Bodil Carlos Daria Emeka Farida Goran Hanae Ilse Joaquin Katya Liam Mirela Nadir Oona Priya Quentin Rosa "
    "Stellan Tomoko Ulrich Vesna Wanjiru Xenia Yusuf Zuzana"
).split()
LAST: Final = (
    "Abara Brandt Castellano Dvorak Eriksen Fontaine Grabowski Hollis Ivanova Jensen Kowalczyk Lindqvist Moreau Nakata "
    "Okafor Petrov Quist Rasmussen Sandoval Takeda Ueland Varga Whitlock Yamada Zeller"
).split()
PLACES: Final = (
    "Alderbrook Birchwick Corran Dunmere Eastholm Farrowgate Glenvale Harrowby Inverlee Juniper Kestrel Langmoor "
    "Marlow Northwell Oakhaven Pinecrest Quarrytown Redford Stonebridge Thornbury Upminster Vernhill Westray Yarrow"
).split()
PRODUCTS: Final = (
    "anvil bracket caster dowel endcap flange gasket hinge impeller jig keyplate latch manifold nozzle o-ring pulley "
    "rotor spindle toggle valve washer yoke clamp bearing coupling"
).split()
PROJECTS: Final = (
    "Amber Basalt Cobalt Dune Ember Fjord Granite Harbor Indigo Jasper Krill Lagoon Meridian Nimbus Onyx Prairie "
    "Quartz Ridge Sable Tundra Umbra Velvet Willow Zephyr"
).split()
ROOMS: Final = "kitchen bedroom hallway office cellar nursery attic garage library workshop".split()
_LETTERS: Final = "ABCDEFGHJKLMNPQRSTUVWXYZ"
START: Final = date(2026, 3, 2)


def person(rng: Random) -> str:
    """First and last name."""
    return f"{rng.choice(FIRST)} {rng.choice(LAST)}"


def people(rng: Random, n: int) -> list[str]:
    """``n`` people who share neither first nor last name (n <= 25)."""
    return [f"{first} {last}" for first, last in zip(rng.sample(FIRST, n), rng.sample(LAST, n), strict=True)]


def address(who: str, rng: Random) -> str:
    """An e-mail address that cannot be guessed from the name."""
    return f"{who.split()[0].lower()}{rng.randrange(100, 999)}@{rng.choice(PLACES).lower()}.example"


def code(rng: Random, letters: int = 2, digits: int = 4) -> str:
    """Such as KM-4821: nothing that could be guessed."""
    return "".join(rng.choice(_LETTERS) for _ in range(letters)) + f"-{rng.randrange(10 ** (digits - 1), 10**digits)}"


def codes(rng: Random, n: int, letters: int = 2, digits: int = 4) -> list[str]:
    """``n`` different codes."""
    out: list[str] = []
    while len(out) < n:
        if (drawn := code(rng, letters, digits)) not in out:
            out.append(drawn)
    return out


def figure(rng: Random, low: int = 120, high: int = 980) -> int:
    """A figure that is not round."""
    while (value := rng.randrange(low, high)) % 10 in (0, 5):
        pass
    return value


def figures(rng: Random, n: int, low: int = 120, high: int = 980) -> list[int]:
    """``n`` different figures, not round."""
    out: list[int] = []
    while len(out) < n:
        if (value := figure(rng, low, high)) not in out:
            out.append(value)
    return out


def day(rng: Random, span: int = 300) -> str:
    """An ISO day of 2026."""
    return (START + timedelta(days=rng.randrange(span))).isoformat()


def listed(items: Sequence[str]) -> str:
    """Such as "a, b and c"."""
    return ", ".join(items[:-1]) + " and " + items[-1] if len(items) > 1 else items[0]
