"""A value that takes time, begun by whoever waits for it.

A coroutine that nobody comes to await (its client left in the moment between) is a warning in the log when it goes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Later(Generic[T]):
    """Awaitable once. ``make``: begins it."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[[], Awaitable[T]]) -> None:
        self._make = make

    def __await__(self) -> Generator[Any, None, T]:
        return self._make().__await__()
