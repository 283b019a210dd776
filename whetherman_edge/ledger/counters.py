"""Counters and histograms, and their Prometheus text form (version 0.0.4). Written by hand: it is 60 lines.

Label values come from closed sets (decisions, reasons, statuses), never from request text, so the number of series is
bounded; SERIES_MAX catches a mistake.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping

# Far above what the closed label sets can produce, far below what would hurt.
SERIES_MAX = 1_000

HELP: dict[str, str] = {
    "requests_total": "requests by kind (chat, relay, own), decision, whether it was applied, and reason",
    "responses_total": "responses by class of status (2xx, 4xx, …)",
    "upstream_failures_total": "upstream faults by kind (connect, reset)",
    "client_closed_total": "clients that went away before the response was complete",
    "drain_cut_total": "requests cut off at the end of the drain",
    "outcomes_total": "what the model did (called: yes, no), by decision and whether it was applied",
    "leaked_call_total": "withheld requests whose reply was a tool call all the same, re-sent unmodified, by cause "
    "(scored, loop_guard; client: its own tool_choice)",
    "backed_off_total": "requests left alone because the evidence is against what would have withheld, by that cause "
    "(scored, loop_guard)",
    "resent_total": "requests sent again, by cause (leaked_call, refused, reset; tools_unsupported: without tools)",
    "roles_mapped_total": "requests whose developer role went out as system",
    "repeat_call_total": "requests whose history repeats a call with the same result",
    "systemone_requests_total": "requests to /v1/systemone by class of status",
    "gate_failures_total": "gate failures by reason",
    "verdicts_total": "verdicts by the stage that gave them (static, gemma)",
    "backbone_requests_total": "requests put to the backbone by outcome (answered, late, failed, busy, …)",
    "backbone_jobs_total": "prompts the backbone worker took from its queue",
    "backbone_prefix_hits_total": "prompts of which a part was in the cache",
    "backbone_results_reused_total": "prompts answered from the results kept, some of them late ones of before",
    "backbone_tokens_total": "prompt tokens of the backbone by source (reused, decoded)",
    "backbone_aborted_total": "abandoned prompts stopped for one that somebody waited for",
    "ledger_written_total": "decisions written to the ledger",
    "ledger_dropped_total": "decisions that could not be recorded, by cause (queue, storage)",
    "prompt_tokens_withheld_total": "estimated prompt tokens of tools that were not sent",
}

# Powers of about 2.5, from below the static gate's target (0.1 ms) to the deadline's hard cap (3 s).
GATE_MS_BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 100.0, 250.0, 1000.0, 3000.0)

Labels = tuple[tuple[str, str], ...]


class Counters:
    """All of the daemon's metrics. One owner, the daemon; increments are dictionary additions."""

    def __init__(self) -> None:
        self._values: dict[str, dict[Labels, float]] = {}
        self._gauges: dict[str, tuple[str, float]] = {}
        self._gate_buckets = [0] * (len(GATE_MS_BOUNDS) + 1)
        self._gate_ms_sum = 0.0

    def add(self, name: str, labels: Labels = (), amount: float = 1.0) -> None:
        """Count. ``labels``: pairs in a fixed order; the tuple itself is the key."""
        series = self._values.setdefault(name, {})
        if labels in series:
            series[labels] += amount
        elif len(series) < SERIES_MAX:
            series[labels] = amount

    def set_total(self, name: str, value: float, labels: Labels = ()) -> None:
        """Set a count that is kept elsewhere."""
        self._values.setdefault(name, {})[labels] = value

    def set_gauge(self, name: str, value: float, meaning: str) -> None:
        """Set a value that can go down."""
        self._gauges[name] = (meaning, value)

    def gate_ms(self, ms: float) -> None:
        """Record how long the gate took for one request."""
        self._gate_buckets[bisect.bisect_left(GATE_MS_BOUNDS, ms)] += 1
        self._gate_ms_sum += ms

    def value(self, name: str, **labels: str) -> float:
        """Sum of all series of ``name`` that carry these labels."""
        wanted = set(labels.items())
        return sum(value for key, value in self._values.get(name, {}).items() if wanted <= set(key))

    def snapshot(self) -> Mapping[str, Mapping[Labels, float]]:
        """A copy, for a page or a report; never to decide by."""
        return {name: dict(series) for name, series in self._values.items()}

    def render(self) -> bytes:
        """Prometheus text exposition."""
        lines: list[str] = []
        for name, meaning in HELP.items():
            full = f"whetherman_{name}"
            lines += [f"# HELP {full} {meaning}", f"# TYPE {full} counter"]
            series = self._values.get(name, {})
            lines += [f"{full}{_labels(key)} {_number(value)}" for key, value in sorted(series.items())]
            if not series:
                lines.append(f"{full} 0")
        for name, (meaning, value) in self._gauges.items():
            full = f"whetherman_{name}"
            lines += [f"# HELP {full} {meaning}", f"# TYPE {full} gauge", f"{full} {_number(value)}"]
        lines += ["# HELP whetherman_gate_ms time of the gate per request, in milliseconds"]
        lines += ["# TYPE whetherman_gate_ms histogram"]
        total = 0
        for bound, count in zip((*map(str, GATE_MS_BOUNDS), "+Inf"), self._gate_buckets, strict=True):
            total += count
            lines.append(f'whetherman_gate_ms_bucket{{le="{bound}"}} {total}')
        lines += [f"whetherman_gate_ms_sum {self._gate_ms_sum:.3f}", f"whetherman_gate_ms_count {total}", ""]
        return "\n".join(lines).encode("utf-8")


def _number(value: float) -> str:
    """All digits: with six, as ``g`` has, a counter above a million stands still between two scrapes."""
    return str(int(value)) if value == int(value) else repr(value)


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
