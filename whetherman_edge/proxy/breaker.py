"""Circuit breaker in front of the gate (field case O01): a gate that keeps failing stops costing requests their time.

Closed: all requests are judged. Open: none is, for ``cooldown_s``; then one request at a time probes, and one success
closes it again. Pure but for the clock handed in.
"""

from __future__ import annotations

from collections.abc import Callable

# Long enough that a stuck gate taxes one request in hundreds, short enough that a person sees it come back.
COOLDOWN_S = 5.0
# One slow moment of the machine fails a few requests in a row; a gate that fails five times will fail the sixth.
FAILURES_MAX = 5


class Breaker:
    """``failures_max`` failures in a row open it."""

    def __init__(self, failures_max: int, clock: Callable[[], float], cooldown_s: float = COOLDOWN_S) -> None:
        self._failures_max = failures_max
        self._clock = clock
        self._cooldown_s = cooldown_s
        self._failures = 0
        self._opened_at_s = 0.0
        self._probing = False
        self._probed_at_s = 0.0

    @property
    def is_open(self) -> bool:
        """Whether requests pass unjudged at present."""
        return self._failures >= self._failures_max

    def admits(self) -> bool:
        """Whether this request may be judged; after True, ``succeeded``, ``failed`` or ``gave_up`` must follow."""
        if not self.is_open:
            return True
        now_s = self._clock()
        # A probe that never reports (its task was cancelled before it ran) must not keep the breaker open for ever.
        probing = self._probing and now_s - self._probed_at_s < self._cooldown_s
        if probing or now_s - self._opened_at_s < self._cooldown_s:
            return False
        self._probing, self._probed_at_s = True, now_s
        return True

    def succeeded(self) -> None:
        """The gate gave a verdict."""
        self._failures = 0
        self._probing = False

    def failed(self) -> None:
        """The gate raised, or gave no verdict in time."""
        self._failures += 1
        self._probing = False
        if self.is_open:
            self._opened_at_s = self._clock()

    def gave_up(self) -> None:
        """The client went away while the gate ran, or asked for too much: says nothing about the gate."""
        self._probing = False
