"""The router's validation slates, from pools that never train: one definition for training runs and for the report.

Every group is seeded by its queries' texts, so that a slate stays the same when other data comes or goes.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from convert.router_corpus import Pool, ToolText, lines
from whetherman_edge.router.card import ToolCard, make_card

VARIANTS = ("full", "reworded", "4-word", "none")
UNSEEN_SLATE = 21  # as many unseen tools as the report of zero-shot figures offers at once
MCP_SIZES = (6, 90)
BIG_SLATE = 210


@dataclass(frozen=True)
class Case:
    """One query over one slate; ``accept``: indices of right tools. ``cluster``: what is resampled in intervals."""

    query: str
    tools: tuple[ToolCard, ...]
    accept: frozenset[int]
    cluster: str


def card(tool: ToolText, variant: str = "full", parameters: bool = False) -> ToolCard:
    """A tool with one wording of its description."""
    index = VARIANTS.index(variant)
    texts = tool.descriptions
    description = texts[index] if index < len(texts) and variant != "none" else ""
    return make_card(tool.name, description, tool.parameters if parameters else ())


def _rng(*parts: str) -> random.Random:
    return random.Random(hashlib.sha256("\x00".join(parts).encode()).digest())


Place = tuple[Pool, int]


def unseen(pools: Sequence[Pool], variant: str, rivals: bool) -> list[Case]:
    """Unseen tools offered UNSEEN_SLATE at once: one a domain, or with all rivals of the right one."""
    cases = []
    for pool in pools:
        for query in pool.queries:
            rng = _rng("unseen", query.text, str(rivals))
            others = [p for p in pools if p is not pool]
            rng.shuffle(others)
            if rivals:
                chosen: list[Place] = [(pool, i) for i in range(len(pool.tools))]
                rest: list[Place] = [(p, i) for p in others for i in range(len(p.tools))]
                rng.shuffle(rest)
                accept = frozenset(query.accept)
            else:
                chosen = [(pool, query.accept[0])]
                rest = [(p, rng.randrange(len(p.tools))) for p in others]
                accept = frozenset({0})
            chosen += rest[: max(0, UNSEEN_SLATE - len(chosen))]
            tools = tuple(card(p.tools[i], variant) for p, i in chosen)
            cases.append(Case(query.text, tools, accept, f"{pool.group}/{query.accept[0]}"))
    return cases


def random_slates(pools: Sequence[Pool], size: int, variant: str = "full") -> list[Case]:
    """The right tool among ``size - 1`` random others, rivals included by chance."""
    places: list[Place] = [(p, i) for p in pools for i in range(len(p.tools))]
    cases = []
    for pool in pools:
        for query in pool.queries:
            rng = _rng("random", query.text, str(size))
            others = [(p, i) for p, i in places if not (p is pool and i in query.accept)]
            chosen = [(pool, query.accept[0]), *rng.sample(others, size - 1)]
            tools = tuple(card(p.tools[i], variant) for p, i in chosen)
            cases.append(Case(query.text, tools, frozenset({0}), f"{pool.group}/{query.accept[0]}"))
    return cases


def mcp_slates(pools: Sequence[Pool], source: str = "gate") -> list[Case]:
    """A dialogue's (or server's) own tool list, filled up with whole other lists to 6 to 90 tools; full schemas'
    argument names.
    """
    low, high = MCP_SIZES
    cases = []
    for pool in pools:
        if pool.source != source or len(pool.tools) < 2:
            continue
        for query in pool.queries:
            if not query.opens:
                continue
            rng = _rng("mcp", query.text)
            size = round(math.exp(rng.uniform(math.log(low), math.log(high))))
            chosen = list(pool.tools)
            taken = {t.name for t in chosen}
            others = [p for p in pools if p is not pool]
            rng.shuffle(others)
            for other in others:
                if len(chosen) >= size:
                    break
                if taken.isdisjoint(t.name for t in other.tools):
                    chosen += other.tools
                    taken |= {t.name for t in other.tools}
            tools = tuple(card(t, "full", parameters=True) for t in chosen[: max(size, len(pool.tools))])
            cases.append(Case(query.text, tools, frozenset(query.accept), pool.group.rsplit(":", 1)[0]))
    return cases


def big_slates(pools: Sequence[Pool], extra: Sequence[ToolText]) -> list[Case]:
    """All unseen tools at once, filled up with real MCP tools to BIG_SLATE."""
    cases = []
    for pool in pools:
        for query in pool.queries:
            rng = _rng("big", query.text)
            own = [card(t, "full", parameters=True) for t in pool.tools]
            rest = [card(t, "full", parameters=True) for p in pools if p is not pool for t in p.tools]
            rng.shuffle(rest)
            more = rng.sample(list(extra), min(len(extra), BIG_SLATE))
            tools = (own + rest[:60] + [card(t, "full", parameters=True) for t in more])[:BIG_SLATE]
            cases.append(Case(query.text, tuple(tools), frozenset(query.accept), f"{pool.group}/{query.accept[0]}"))
    return cases


def shifted(cases: Sequence[Case]) -> list[Case]:
    """Each description moved one tool on: a router that reads descriptions must now fail."""
    moved = []
    for case in cases:
        texts = [t.description for t in case.tools]
        tools = tuple(make_card(f"tool_{i}", text) for i, text in enumerate(texts[-1:] + texts[:-1]))
        moved.append(Case(case.query, tools, case.accept, case.cluster))
    return moved


def priority(
    rows: Sequence[Mapping[str, object]], described: Mapping[str, Mapping[str, list[str]]], wording: int
) -> list[Case]:
    """The seven tools, each with the description of index ``wording`` (-1: none)."""
    names = list(described)
    tools = tuple(make_card(n, described[n]["descriptions"][wording] if wording >= 0 else "") for n in names)
    return [
        Case(str(r["query"]), tools, frozenset(names.index(n) for n in r["accept"]), str(r["tool"]))  # type: ignore[attr-defined]
        for r in rows
    ]


def is_held_out(text: str, share: int = 5) -> bool:
    """A fixed fifth of the priority queries validates."""
    return hashlib.sha256(text.encode()).digest()[0] % share == 0


def validation_groups(
    pools: Sequence[Pool],
    shared: Path,
    priority_rows: Sequence[Mapping[str, object]],
    described: Mapping[str, Mapping[str, list[str]]],
) -> dict[str, list[Case]]:
    """Every group of the report, by name."""
    held = [p for p in pools if p.is_held_out]
    written = [p for p in held if p.source in ("authored", "authored2")]
    groups: dict[str, list[Case]] = {}
    held_rows = [r for r in priority_rows if is_held_out(str(r["query"]))]
    dev_rows = list(lines(shared / "authored" / "priority_dev.jsonl"))
    for name, wording in (("full", 0), ("reworded", 3), ("short", 6), ("names", -1)):
        groups[f"priority {name}"] = priority(held_rows, described, wording)
    groups["priority dev"] = priority(dev_rows, described, 0)
    for variant in VARIANTS:
        groups[f"unseen {variant}"] = unseen(written, variant, rivals=False)
    for variant in VARIANTS:
        groups[f"rivals {variant}"] = unseen(written, variant, rivals=True)
    groups["random 5"] = random_slates(written, 5)
    groups["mcp"] = mcp_slates([p for p in held if p.source == "gate"])
    groups["big 210"] = big_slates(written, [t for p in pools if p.source == "mcp" for t in p.tools])
    groups["shifted 21"] = shifted(groups["unseen full"])
    groups |= dev_groups(shared, pools)
    return groups


def dev_groups(shared: Path, pools: Sequence[Pool]) -> dict[str, list[Case]]:
    """The three unseen dev tools among 18 tools of other domains. Only looked at, never chosen by."""
    tools = json.loads((shared / "authored" / "unseen_tools.json").read_text())
    rows = list(lines(shared / "authored" / "unseen_dev.jsonl"))
    near = {"calendar", "travel", "sql_database", "video_conferencing", "reminders"}
    others = [p.tools[0] for p in pools if p.source == "authored" and p.group not in near]
    names = [t["name"] for t in tools]
    groups = {}
    for variant, key in (
        ("full", "description"),
        ("reworded", "description_reworded"),
        ("4-word", "description_short"),
    ):
        cases = []
        for row in rows:
            rng = _rng("dev", row["query"])
            slate = [make_card(t["name"], t[key]) for t in tools] + [card(t, variant) for t in rng.sample(others, 18)]
            cases.append(
                Case(row["query"], tuple(slate), frozenset(names.index(n) for n in row["accept"]), row["tool"])
            )
        groups[f"dev {variant}"] = cases
    return groups
