"""Which probe to run next when time is short. Pure.

What a profile stands or falls with are needed steps of the calibration split: the bound wants about 47 of them for each
kind of step. So they come first, one kind before the other when the budget cannot pay for both; the fit, which leans on
the shared gate, and the easy kinds, which show what a skip is worth, get a share all along. Generators whose tasks this
agent cannot solve are put off, since a step that is lost either way proves nothing. Nothing here looks at the gate's
scores: the proof would not survive that.

Time goes by prompt tokens, and most of them are the tools: on a laptop the prefill of 24 tools takes as long as ten
short probes. So long prompts wait while their stratum has shorter ones, and a few probes with the same tools are run
in a row, since a server's prefix cache then holds the tools.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import msgspec

from whetherman_edge.calibrate.labels import Arm, Outcome, label, next_arm
from whetherman_edge.calibrate.probe import Kind, Probe, Split
from whetherman_edge.gate.verdict import STEP_KINDS
from whetherman_edge.profiles.risk import ALPHA, DELTA, look_level, needed_for
from whetherman_edge.profiles.schema import Found

BARREN_AFTER: Final = 2
"""Probes of one generator that are lost, with none needed, before the rest of it is put off."""
IN_A_ROW: Final = 2
"""Probes with the same tools that are run one after the other; with more, a short budget sees too few generators."""
_CHARS_A_TOKEN: Final = 4
_SHORT_TOKENS: Final = 512
"""A prompt of up to so many tokens is short; each doubling is a length class of its own, run after the shorter ones."""
_SPARE: Final = 5
BARREN_FAMILY_AFTER: Final = 6
"""Lost probes of one family and kind of step, over several generators, before its untried ones are put off too."""
FRUITFUL_SHARE: Final = 0.2
"""Of a family's probes must not be lost; below it, the next generator of the family seldom is the one that bears."""
ENOUGH_WEIGHT: Final = 0.2
"""Of a kind of step that has its needed steps, while the other kind seeks its own."""
FOCUS_WEIGHT: Final = 4.0
"""When the budget pays for one kind of step alone: two probes of three are for its proof, instead of every fourth."""
_WEIGHTS: Final[Mapping[tuple[str, str], float]] = {
    ("calibrate", "need"): 5.0,
    ("fit", "need"): 1.5,
    ("fit", "free"): 1.5,
    ("calibrate", "free"): 1.0,
    ("fit", "depends"): 0.6,
    ("calibrate", "depends"): 0.6,
    ("fit", "manner"): 0.3,
    ("calibrate", "manner"): 0.3,
}


class Item(msgspec.Struct, frozen=True):
    """A probe of the pack, its split and its digest."""

    probe: Probe
    split: Split
    sha: str


class Stratum(msgspec.Struct, frozen=True):
    """Probes that are alike for the plan. ``want``: "need", "free", "depends" or "manner"."""

    split: Split
    kind: Kind
    want: str


class Plan:
    """Chooses the next probe. ``items``: the probes of the fit and calibrate splits. ``runs``, ``runs_max``: of one arm
    on one probe, as ``labels.next_arm`` takes them. ``like``: labels by generator of an agent like this one: what that
    one needed comes first, and last what it lost. ``looks``: at each kind of step so far, since each leaves less error
    to the next. ``proven``: kinds whose proof stands and needs no more.
    """

    def __init__(
        self,
        items: Sequence[Item],
        *,
        runs: int = 3,
        runs_max: int = 5,
        alpha: float = ALPHA,
        delta: float = DELTA,
        like: Mapping[str, Found] | None = None,
        looks: Mapping[Kind, int] | None = None,
        proven: Collection[Kind] = (),
    ) -> None:
        self._runs, self._runs_max = runs, runs_max
        self._like = like or {}
        self.items = {item.probe.id: item for item in items}
        self._strata: dict[Stratum, list[Item]] = {}
        for item in items:
            self._strata.setdefault(stratum(item), []).append(item)
        self._tools = {item.probe.id: _tools(item.probe) for item in items}
        for members in self._strata.values():
            members[:] = self._spread(members)
        before = looks or {}
        self.targets: dict[Kind, int] = {
            kind: 0 if kind in proven else needed_for(alpha, look_level(delta, before.get(kind, 0))) + _SPARE
            for kind in STEP_KINDS
        }
        self.focus: Kind | None = None
        self._last: Item | None = None
        self._in_a_row = 0

    def next(self, outcomes: Mapping[str, Outcome], busy: Mapping[str, object], *, thorough: bool) -> Item | None:
        """The probe to go on with, or None when all are decided. busy: ids that a worker is at."""
        item = self._next(outcomes, busy, thorough=thorough)
        if item is not None and item is not self._last:
            like = self._last is not None and self._alike(self._last, item)
            self._in_a_row = self._in_a_row + 1 if like else 1
            self._last = item
        return item

    def _next(self, outcomes: Mapping[str, Outcome], busy: Mapping[str, object], *, thorough: bool) -> Item | None:
        barren = self._barren(outcomes)
        needed = self.n_needed(outcomes)
        for put_off in (False, True):
            best: tuple[float, Item] | None = None
            for which, members in self._strata.items():
                weight = self._weight(which, needed)
                if weight <= 0.0 and not put_off:
                    continue
                started, candidate = 0, None
                for item in members:
                    found = outcomes.get(item.probe.id, Outcome())
                    begun = bool(found.with_tools or found.without) or item.probe.id in busy
                    started += begun
                    if item.probe.id in busy or (item.probe.generator in barren and not put_off):
                        continue
                    if self.next_arm(item, found, thorough=thorough) is None:
                        continue
                    if begun:
                        return item  # finish what is begun: its prompt is still in the server's cache
                    candidate = candidate or item
                if candidate is not None:
                    rank = (started + 0.5) / max(weight, 0.01)
                    if self._last is not None and self._in_a_row < IN_A_ROW and self._alike(self._last, candidate):
                        rank = -1.0
                    if best is None or rank < best[0]:
                        best = (rank, candidate)
            if best is not None:
                return best[1]
        return None

    def next_arm(self, item: Item, found: Outcome, *, thorough: bool) -> Arm | None:
        """The arm to run next on a probe, or None when it is decided."""
        return next_arm(found, item.probe.expect, thorough=thorough, runs=self._runs, runs_max=self._runs_max)

    def n_needed(self, outcomes: Mapping[str, Outcome]) -> dict[Kind, int]:
        """Independent needed steps found so far in the calibration split, by kind."""
        groups: dict[Kind, set[str]] = {"first": set(), "later": set()}
        for name, found in outcomes.items():
            item = self.items.get(name)
            if item is not None and item.split == "calibrate" and label(found).proof:
                groups[item.probe.kind].add(item.probe.group)
        return {kind: len(members) for kind, members in groups.items()}

    def n_open(self, outcomes: Mapping[str, Outcome], *, thorough: bool) -> int:
        """Probes that are not decided."""
        nothing = Outcome()
        return sum(
            self.next_arm(item, outcomes.get(name, nothing), thorough=thorough) is not None
            for name, item in self.items.items()
        )

    def _alike(self, one: Item, other: Item) -> bool:
        """They lie in one stratum, and their prompts begin with the same tools."""
        return stratum(one) == stratum(other) and self._tools[one.probe.id] == self._tools[other.probe.id]

    def _length_class(self, probe: Probe) -> int:
        """0 for a short prompt, one more for each doubling."""
        n_chars = len(self._tools[probe.id]) + len(msgspec.json.encode(probe.messages))
        return (n_chars // (_CHARS_A_TOKEN * _SHORT_TOKENS)).bit_length()

    def _spread(self, members: Sequence[Item]) -> list[Item]:
        """Short prompts first, and among them the generators in turn, each with a few easy probes on the same tools."""
        length = {item.probe.id: self._length_class(item.probe) for item in members}
        ordered = sorted(
            members, key=lambda item: (length[item.probe.id], item.probe.difficulty, item.probe.hops, item.probe.id)
        )
        rows: dict[tuple[int, str, bytes], list[Item]] = {}
        for item in ordered:
            key = (length[item.probe.id], item.probe.generator, self._tools[item.probe.id])
            rows.setdefault(key, []).append(item)
        turns: dict[tuple[int, str], int] = {}
        ranked: list[tuple[tuple[bool, int, int, float, int, str], list[Item]]] = []
        for (class_, generator, _), row in rows.items():
            for start in range(0, len(row), IN_A_ROW):
                turn = turns[class_, generator] = turns.get((class_, generator), -1) + 1
                few = row[start : start + IN_A_ROW]
                head, (lost, needed) = few[0].probe, self._expected(few[0].probe)
                ranked.append(((lost, class_, turn, -needed, head.difficulty, head.id), few))
        return [item for _, few in sorted(ranked, key=lambda entry: entry[0]) for item in few]

    def _expected(self, probe: Probe) -> tuple[bool, float]:
        """(a like agent lost all of these, the share of them that it needed its calls for)."""
        found = self._like.get(probe.generator, Found())
        n = found.needed + found.not_needed + found.lost
        return found.lost == n >= BARREN_AFTER, found.needed / n if n else 0.0

    def _weight(self, which: Stratum, needed: Mapping[Kind, int]) -> float:
        weight = _WEIGHTS[which.split, which.want]
        has_enough = {kind: needed[kind] >= self.targets[kind] for kind in STEP_KINDS}
        if has_enough[which.kind] and not all(has_enough.values()):
            return ENOUGH_WEIGHT * weight
        if which.split != "calibrate" or which.want != "need":
            return weight
        if has_enough[which.kind]:
            return 0.5
        if self.focus is None or needed[self.focus] >= self.targets[self.focus]:
            return weight
        return FOCUS_WEIGHT * weight if which.kind == self.focus else 0.0

    def _barren(self, outcomes: Mapping[str, Outcome]) -> set[str]:
        lost: Counter[str] = Counter()
        fruitful: Counter[str] = Counter()
        families: dict[tuple[str, Kind], set[str]] = {}
        for name, item in self.items.items():
            probe = item.probe
            families.setdefault((probe.family, probe.kind), set()).add(probe.generator)
            state = label(outcomes.get(name, Outcome())).state
            if state != "open":
                (lost if state == "lost" else fruitful)[probe.generator] += 1
        barren = {name for name, n in lost.items() if n >= BARREN_AFTER and not fruitful[name]}
        for generators in families.values():
            n_lost, n_fruitful = (sum(counts[name] for name in generators) for counts in (lost, fruitful))
            if n_lost >= BARREN_FAMILY_AFTER and n_fruitful < FRUITFUL_SHARE * (n_lost + n_fruitful):
                barren |= {name for name in generators if not fruitful[name]}
        return barren


def stratum(item: Item) -> Stratum:
    """Where a probe belongs."""
    want = {"ACT": "need", "ANSWER": "free", "": "depends"}.get(item.probe.expect, "manner")
    return Stratum(item.split, item.probe.kind, want)


def _tools(probe: Probe) -> bytes:
    """What a chat template renders ahead of the dialogue, as bytes that are equal where the prompt's front is."""
    systems = [message for message in probe.messages if message["role"] == "system"]
    return msgspec.json.encode((systems, [tool.openai() for tool in probe.tools]))
