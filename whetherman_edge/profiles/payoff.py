"""Is a skip worth it? Expected value of withholding one call, in seconds of the user's time. Pure.

Safe is not enough: a skip that saves 40 ms and breaks the server's cache for 3 s is a loss. Money is turned into
seconds at the user's own rate, so that latency, tokens and prices add up.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Final

import msgspec

SECONDS_A_DOLLAR: Final = 180.0
"""20 dollars an hour; a profile's ``payoff`` may say otherwise."""
LIKELY: Final = 0.5
"""From this probability on the ToolRouter's best tool is the one that a call would be of."""

FEW: Final = 5
"""Right skips below which the means say little."""

_Cost = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]


class ToolCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one call of a tool costs beside the model's time (``[tools."name"]`` of the configuration)."""

    usd: _Cost = 0.0
    latency_ms: _Cost = 0.0
    side_effect: bool = False


FREE: Final = ToolCost()
Costs = Sequence[tuple[str, ToolCost]]
"""Name globs and costs; of several that match the first counts."""


class Payoff(msgspec.Struct, frozen=True):
    """Measured means of one agent, per step.

    ``call_s``: model time of all that a right skip saves: the call and those that would have followed it, with their
    prefill. ``call_tokens``: their output tokens. ``failure_s``: what a failed task costs, usually a whole second
    attempt. ``shift_tokens``: output tokens that a steered reply is longer (negative: shorter). ``token_s``: seconds
    an output token. ``cache_s``: prompt evaluated again because the intervention changed it. ``usd_a_token``: price
    of an output token. ``n``: right skips that the means are of; 0: not told.
    """

    call_s: float
    failure_s: float
    call_tokens: float = 0.0
    shift_tokens: float = 0.0
    token_s: float = 0.0
    cache_s: float = 0.0
    usd_a_token: float = 0.0
    seconds_a_dollar: float = SECONDS_A_DOLLAR
    n: float = 0


def payoff_of(values: Mapping[str, float]) -> Payoff | None:
    """The payoff inputs of a profile; None where ``call_s`` and ``failure_s``, without which nothing can be said, are
    not among them. Other keys are left alone.
    """
    if "call_s" not in values or "failure_s" not in values:
        return None
    return Payoff(**{name: values[name] for name in Payoff.__struct_fields__ if name in values})


def in_order(tools: Mapping[str, ToolCost]) -> tuple[tuple[str, ToolCost], ...]:
    """The configured costs, exact names before globs and longer globs before shorter ones."""
    return tuple(sorted(tools.items(), key=lambda item: (any(c in item[0] for c in "*?["), -len(item[0]), item[0])))


def cost_of(offered: Sequence[str], tool: str, probability: float, costs: Costs) -> ToolCost:
    """What the call would cost that a skip saves.

    tool, probability: the ToolRouter's best. Where it is unsure the mean of the offered tools is taken, to which one
    with a side effect adds nothing: it is never skipped for its cost.
    """
    if tool and probability >= LIKELY:
        return _configured(tool, costs)
    found = [FREE if cost.side_effect else cost for cost in (_configured(name, costs) for name in offered)]
    if not found:
        return FREE
    usd, latency_ms = (math.fsum(getattr(cost, key) for cost in found) / len(found) for key in ("usd", "latency_ms"))
    return ToolCost(usd=usd, latency_ms=latency_ms)


def _configured(name: str, costs: Costs) -> ToolCost:
    return next((cost for glob, cost in costs if fnmatch.fnmatchcase(name, glob)), FREE)


def saved_s(payoff: Payoff, tool: ToolCost = FREE) -> float:
    """Seconds a right skip saves, net of what steering costs."""
    call = payoff.call_s + tool.latency_ms / 1e3
    money = (tool.usd + (payoff.call_tokens - payoff.shift_tokens) * payoff.usd_a_token) * payoff.seconds_a_dollar
    return call + money - payoff.shift_tokens * payoff.token_s - payoff.cache_s


def value_s(payoff: Payoff, p_need: float, tool: ToolCost = FREE) -> float:
    """Expected seconds won by a skip at this p(need); negative when it is a loss."""
    return saved_s(payoff, tool) - p_need * payoff.failure_s


def break_even(payoff: Payoff, tool: ToolCost = FREE) -> float:
    """Least 1 - p(need) at which a skip is worth it, in [0, 1]; above 1 when it never is.

    A call with a side effect is never skipped for its cost: its absence is the failure.
    """
    saved = saved_s(payoff, tool)
    if saved <= 0.0 or tool.side_effect:
        return 1.01
    if payoff.failure_s <= 0.0:
        return 0.0
    return max(0.0, 1.0 - saved / payoff.failure_s)


def explain(payoff: Payoff, tau: float | None) -> list[str]:
    """The same in words, for ``profile show``."""
    saved, least = saved_s(payoff), break_even(payoff)
    longer = "longer" if payoff.shift_tokens > 0 else "shorter"
    lines = [
        f"a needless call costs {payoff.call_s:.1f} s and {payoff.call_tokens:.0f} output tokens",
        f"steering makes a reply {abs(payoff.shift_tokens):.0f} tokens {longer}",
        f"and has {payoff.cache_s:.1f} s of prompt evaluated again",
        f"so a right skip saves {saved:.1f} s; a wrong one costs {payoff.failure_s:.1f} s",
    ]
    if least > 1.0:
        lines.append("steering costs more than a call: nothing is skipped")
    else:
        lines.append(f"worth it when a call is needed with probability below {1 - least:.2f}")
    if payoff.n:
        rough = ": few, so these are rough figures" if payoff.n < FEW else ""
        lines.append(f"measured on {payoff.n:.0f} right skip{'s' if payoff.n != 1 else ''}{rough}")
    if tau is not None and least <= 1.0:
        binding = "the proven threshold" if tau >= least else "the payoff"
        lines.append(f"skipped when that probability is below {1 - max(tau, least):.2f} ({binding} decides)")
    return lines
