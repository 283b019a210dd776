"""What the backbone learns from, as packs: the dialogues, what their assistants did, and slates of tools with
queries.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from convert.gate_data import TRAIN_FILES, Item, prefixes, read_dialogues, swapped_tools
from convert.gate_few_tools import few_tools
from convert.gate_trie import Example, Pack, Reader, pack, pack_together, target_of
from convert.router_corpus import Pool, ToolText, load_pools

HELD_OUT: Final = frozenset({"steps", "general"})
"""Authors whose dialogues the adapter never sees: the fusion and the operating point are fitted on them."""
WEIGHTS: Final = {"dialogue": 1.0, "prefix": 0.4, "prefix_first": 0.4, "swapped": 0.25, "public": 0.3, "few_tools": 0.5}
UNIFORM: Final = (0.25, 0.25, 0.25, 0.25)
ACT_OR_NOT: Final = {True: (0.9, 0.04, 0.04, 0.02), False: (0.04, 0.2, 0.06, 0.7)}


def dialogues(names: Sequence[str] = TRAIN_FILES) -> list[Item]:
    """All training dialogues of the files ``names`` but those of the held-out authors."""
    return [item for name in names for item in read_dialogues(name) if item["domain"] not in HELD_OUT]


def called_next(item: Item) -> list[str] | None:
    """Names the dialogue's assistant called at the decision point of a ``prefixes`` item, None where it is not
    known.
    """
    return item.get("called")


def with_calls(items: Sequence[Item]) -> Iterator[Item]:
    """``prefixes`` of the dialogues, each with the names of the calls that the assistant made there."""
    longest = {item["id"]: item["request"]["messages"] for item in items}
    for item in prefixes(items):
        source, _, at = item["id"].rpartition("@")
        message = longest[source][int(at)]
        calls = [call["function"]["name"] for call in message.get("tool_calls") or []]
        yield {**item, "called": calls or None}


def example_of(reader: Reader, item: Item) -> Example:
    """One item as an example: soft target over its acceptable labels; the pointer target where it is known."""
    names = [tool["function"]["name"] for tool in item["request"].get("tools") or [] if "function" in tool]
    tools: Sequence[str] | None = called_next(item)
    tool_weight = 1.0
    if tools is None and item["accept"] == ["ACT"]:
        tools, tool_weight = names, 0.3  # one of them, not known which
    elif tools is None and item["accept"] == ["DECLINE"] and item["category"] == "first":
        tools, tool_weight = [], 0.3
    return reader.read(
        item["id"],
        json.dumps(item["request"]).encode(),
        target_of(item["gold"], item["accept"]),
        WEIGHTS[item["kind"]],
        tools,
        tool_weight,
    )


def dialogue_packs(
    reader: Reader, items: Sequence[Item], seed: int, n_public: int = 250, n_swapped: int = 800
) -> list[Pack]:
    """Packs of training dialogues with their prefixes, some swapped ones and some public single turns."""
    rng = random.Random(seed)
    derived = list(with_calls(items))
    swapped = list(swapped_tools(items, seed))
    rng.shuffle(swapped)
    public = read_dialogues("gate_public")
    rng.shuffle(public)
    chosen: Iterable[Item] = [*items, *derived, *swapped[:n_swapped], *public[:n_public]]
    return pack([example_of(reader, item) for item in chosen])


def cut_packs(reader: Reader, items: Sequence[Item], n: int, seed: int) -> list[Pack]:
    """``n`` of the first turns beside few tools that ``gate_few_tools`` makes of ``items`` and of public queries."""
    chosen = few_tools(items)
    random.Random(seed).shuffle(chosen)
    return pack([example_of(reader, item) for item in chosen[:n]])


def _tool(tool: ToolText, description: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {name: {"type": "string"} for name in tool.parameters}}
    return {"type": "function", "function": {"name": tool.name, "description": description, "parameters": parameters}}


SLATE_SIZES: Final = (3, 5, 7, 10, 14, 20)
SHARES: Final = {
    "authored": 5,
    "authored2": 5,
    "authored_mcp": 8,
    "gate": 4,
    "metatool": 3,
    "intent": 3,
    "toolselect": 2,
    "mcp": 3,
}
"""How often a pool of a source is drawn; of the others, once."""
WORDINGS: Final = (0, 0, 0, 1, 2)
"""Which of a tool's descriptions is shown: mostly the full one, at times the reworded or the short one."""
MATCH_WEIGHT: Final = 0.3
FEW_TOOLS: Final = (1, 1, 1, 2)
"""Slates of one or two tools: many requests that their tools serve, many of near rivals that they do not."""


def slate_examples(
    reader: Reader,
    pools: Sequence[Pool],
    n_slates: int,
    seed: int,
    *,
    sizes: Sequence[int] = SLATE_SIZES,
    weight: float = 0.1,
    n_inside: int = 14,
    n_outside: int = 8,
) -> Iterator[Example]:
    """Queries over slates of tools: the right tool among rivals of its pool and strangers, or none of them.

    The gate's part of these has a tenth of a dialogue's weight: they are bare requests, not agents' traffic.
    """
    rng = random.Random(seed)
    strangers = [tool for pool in pools for tool in pool.tools]
    by_source, sources = _by_source(pools)
    for number in range(n_slates):
        pool = rng.choice(by_source[rng.choice(sources)])
        size = rng.choice(sizes)
        own = list(range(len(pool.tools)))
        rng.shuffle(own)
        own = own[:size]
        if pool.queries[0].candidates is not None:
            own = list(pool.queries[0].candidates)[:30]
        tools = {pool.tools[i].name: pool.tools[i] for i in own}
        if pool.queries[0].candidates is None:
            while len(tools) < size:
                other = rng.choice(strangers)
                tools.setdefault(other.name, other)
        variant = rng.choice(WORDINGS)
        offered = [_worded(tool, variant) for tool in tools.values()]
        inside = [q for q in pool.queries if any(pool.tools[i].name in tools for i in q.accept)]
        outside = [q for q in pool.queries if not any(pool.tools[i].name in tools for i in q.accept)]
        rng.shuffle(inside)
        rng.shuffle(outside)
        for query in [*inside[:n_inside], *outside[: n_outside if len(inside) > 4 or size < 3 else 0]]:
            right = [pool.tools[i].name for i in query.accept if pool.tools[i].name in tools]
            body = {"messages": [{"role": "user", "content": query.text}], "tools": offered}
            target = ACT_OR_NOT[bool(right)]
            yield reader.read(
                f"slate-{number}", json.dumps(body).encode(), target, weight, right, 1.0 if right else 0.5
            )


def _by_source(pools: Sequence[Pool]) -> tuple[dict[str, list[Pool]], list[str]]:
    """The training pools of each source, and the sources as often as they are to be drawn."""
    found: dict[str, list[Pool]] = {}
    for pool in pools:
        if pool.queries and not pool.is_held_out:
            found.setdefault(pool.source, []).append(pool)
    return found, [source for source in found for _ in range(SHARES.get(source, 1))]


def _worded(tool: ToolText, variant: int) -> dict[str, Any]:
    """The tool with one of its descriptions; the last where it has fewer."""
    texts = tool.descriptions
    return _tool(tool, texts[min(variant, len(texts) - 1)] if texts else "")


def match_packs(
    reader: Reader, pools: Sequence[Pool], n_packs: int, seed: int, *, n_queries: int = 8, n_tools: int = 8
) -> list[Pack]:
    """Requests beside each of some tools alone: the right one and its rivals of the same pool, filled up with others.

    What `route --engine gemma` reads. The class target of the tools that do not fit weighs as much in all as that of
    the one that does.
    """
    rng = random.Random(seed)
    strangers = [tool for pool in pools for tool in pool.tools]
    by_source, sources = _by_source(pools)
    packs: list[Pack] = []
    while len(packs) < n_packs:
        pool = rng.choice(by_source[rng.choice(sources)])
        packs.append(match_pack(reader, pool, strangers, rng, n_queries=n_queries, n_tools=n_tools))
    return packs


def match_pack(
    reader: Reader, pool: Pool, strangers: Sequence[ToolText], rng: random.Random, *, n_queries: int, n_tools: int
) -> Pack:
    """One of ``match_packs``, of one pool."""
    queries = rng.sample(pool.queries, min(n_queries, len(pool.queries)))
    candidates = queries[0].candidates
    if candidates is not None:  # the others' tools are not known to be wrong
        queries = queries[:1]
    wanted = [i for query in queries for i in query.accept][:n_tools]
    rivals = [i for i in (range(len(pool.tools)) if candidates is None else candidates) if i not in wanted]
    rng.shuffle(rivals)
    own = [*dict.fromkeys(wanted), *rivals]
    tools = {pool.tools[i].name: pool.tools[i] for i in own[:n_tools]}
    while len(tools) < n_tools and len(tools) < len(strangers) // 2:
        other = rng.choice(strangers)
        tools.setdefault(other.name, other)
    variant = rng.choice(WORDINGS)
    examples = []
    for number, query in enumerate(queries):
        right = {pool.tools[i].name for i in query.accept} & tools.keys()
        if not right:
            continue
        for name, tool in tools.items():
            body = {"messages": [{"role": "user", "content": query.text}], "tools": [_worded(tool, variant)]}
            fits = name in right
            weight = MATCH_WEIGHT if fits else MATCH_WEIGHT / (len(tools) - 1)
            example = reader.read(f"match-{number}", json.dumps(body).encode(), ACT_OR_NOT[fits], weight)
            examples.append(msgspec.structs.replace(example, query=number, fits=fits))
    return pack_together(examples)


def slate_packs(reader: Reader, pools: Sequence[Pool], n_slates: int, seed: int) -> list[Pack]:
    """As ``slate_examples``, packed."""
    return pack(list(slate_examples(reader, pools, n_slates, seed)))


def few_tools_packs(reader: Reader, pools: Sequence[Pool], n_slates: int, seed: int) -> list[Pack]:
    """Slates of one or two tools, packed; they weigh more in the gate's loss, for here it has little else to go by."""
    examples = slate_examples(reader, pools, n_slates, seed, sizes=FEW_TOOLS, weight=0.3, n_outside=14)
    return pack(list(examples))


def open_pools(shared: Path, data: Path) -> list[Pool]:
    """The router's query pools, without BFCL."""
    return load_pools(shared, data, None)


def reader_of(network: Any, *, tools_max: int, dialogue_max: int) -> Reader:
    """A reader that tokenises with the network's own vocabulary, each distinct piece once."""
    known: dict[Any, tuple[int, ...]] = {}

    def tokens_of(piece: Any) -> tuple[int, ...]:
        ids = known.get(piece)
        if ids is None:
            ids = (network.control(piece.text),) if piece.control else tuple(network.tokenize(piece.text))
            known[piece] = ids
        return ids

    tokenise: Callable[[Any], Sequence[int]] = tokens_of
    return Reader(tokenise, network.bos, tools_max=tools_max, dialogue_max=dialogue_max)
