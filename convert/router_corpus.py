"""Query-tool data for the router, from every source, as pools: tools that belong together and the queries over them.

A pool is a server, a domain or a tool list. Pools, not rows, are split: a pool named in ``is_held_out`` never trains.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import random
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VALIDATION_GATE_DOMAINS = frozenset({"commerce", "home", "saas"})
VALIDATION_AUTHORED_SHARE = 4  # every 4th domain of the authored tools, by hash
INTENT_NOISE = frozenset(
    "oos general_quirky general_dontcare general_repeat general_confirm general_explain general_negate general_affirm "
    "general_commandstop general_praise yes no maybe repeat cancel".split()
)


@dataclass
class ToolText:
    """One tool; ``descriptions``: the full text first, then reworded and short ones where they exist."""

    name: str
    descriptions: list[str]
    parameters: list[str] = field(default_factory=list)


@dataclass
class Query:
    """``accept``: indices into the pool's tools. ``candidates``: the offered ones, None = any superset."""

    text: str
    accept: list[int]
    candidates: list[int] | None = None
    opens: bool = True


@dataclass
class Pool:
    source: str
    group: str
    tools: list[ToolText]
    queries: list[Query]

    @property
    def is_held_out(self) -> bool:
        """True when the pool validates."""
        if self.source == "gate":
            return self.group.split(":")[0] in VALIDATION_GATE_DOMAINS
        share = {"authored": 4, "authored2": 4, "authored_mcp": 4, "metatool": 0, "intent": 0}.get(self.source, 8)
        return share > 0 and hashlib.sha256(f"{self.source}/{self.group}".encode()).digest()[0] % share == 0


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """JSON objects of a .jsonl or .jsonl.gz file."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        for line in file:
            if line.strip():
                yield json.loads(line)


def properties(schema: object) -> list[str]:
    """Top-level argument names of a JSON schema."""
    if isinstance(schema, dict) and isinstance(schema.get("properties"), dict):
        return list(schema["properties"])
    return []


def authored(tools_path: Path, queries_path: Path, source: str) -> list[Pool]:
    """Authored tools by domain; the wrong tools of a one-tool domain come from other pools."""
    opener = gzip.open if tools_path.suffix == ".gz" else open
    with opener(tools_path, "rt", encoding="utf-8") as file:
        tools = json.load(file)
    by_domain: dict[str, Pool] = {}
    place: dict[tuple[str, str], int] = {}
    home: dict[str, str] = {}
    for tool in tools:
        pool = by_domain.setdefault(tool["domain"], Pool(source, tool["domain"], [], []))
        texts = [tool["description"], tool["description_reworded"], tool["description_short"]]
        home[tool["name"]] = tool["domain"]
        place[tool["domain"], tool["name"]] = len(pool.tools)
        pool.tools.append(ToolText(tool["name"], texts, list(tool["parameters"])))
    for row in lines(queries_path):
        domain = row.get("domain") or home[row["tool"]]  # names are unique within a domain; without one, altogether
        accept = [place[domain, name] for name in row["accept"] if (domain, name) in place]
        by_domain[domain].queries.append(Query(row["query"], accept))
    return list(by_domain.values())


def turns(messages: list[dict[str, Any]]) -> Iterator[tuple[str, list[str], bool]]:
    """(user text, names called before the next user text, whether it opens the dialogue), where anything was called."""
    asked = [i for i, m in enumerate(messages) if m.get("role") == "user"]
    for position, start in enumerate(asked):
        end = asked[position + 1] if position + 1 < len(asked) else len(messages)
        text = messages[start].get("content")
        called = [c["function"]["name"] for m in messages[start:end] for c in m.get("tool_calls") or []]
        if called and isinstance(text, str):
            yield text, called, position == 0


def gate_calls(path: Path) -> list[Pool]:
    """User text -> tools called for it, from the histories of the dialogues; one pool a tool list.

    A text that opens its dialogue can be understood alone; ``Query.opens`` says so, and validation asks for it.
    """
    pools: dict[str, Pool] = {}
    seen: dict[tuple[str, str], Query] = {}  # items of one set share prefixes; the longest knows all calls
    for row in lines(path):
        if row["domain"] == "lang":
            continue
        offered = [t["function"] for t in row["request"].get("tools") or [] if "function" in t]
        key = hashlib.sha256(json.dumps(offered, sort_keys=True).encode()).hexdigest()
        names = [t["name"] for t in offered]
        messages = row["request"]["messages"]
        for text, called, opens in turns(messages):
            if not set(called) <= set(names) or len(text) > 600:
                continue
            if key not in pools:
                tools = [
                    ToolText(t["name"], [t.get("description") or ""], properties(t.get("parameters"))) for t in offered
                ]
                pools[key] = Pool("gate", f"{row['domain']}:{row.get('set')}", tools, [])
            accept = [names.index(name) for name in dict.fromkeys(called)]
            if (key, text) in seen:
                query = seen[key, text]
                query.accept = list(dict.fromkeys(query.accept + accept))
            else:
                query = seen[key, text] = Query(text, accept, list(range(len(names))), opens)
                pools[key].queries.append(query)
    return list(pools.values())


def metatool(folder: Path, per_tool: int, rng: random.Random) -> list[Pool]:
    tools = json.loads((folder / "tools.json").read_text())
    names = list(tools)
    queries = defaultdict(list)
    for row in lines(folder / "queries.jsonl"):
        if row["tool"] in tools and len(row["query"]) < 300:
            queries[row["tool"]].append(row["query"])
    pool = Pool("metatool", "all", [ToolText(n, [tools[n]]) for n in names], [])
    for i, name in enumerate(names):
        texts = sorted(queries[name])
        rng.shuffle(texts)
        pool.queries += [Query(t, [i]) for t in texts[:per_tool]]
    return [pool]


def sealtools(folder: Path) -> list[Pool]:
    """Tools by field, the single-call queries; rivals are the tools of the same first-level field."""
    by_field: dict[str, Pool] = {}
    place = {}
    for row in lines(folder / "tool.jsonl"):
        top = row["field"].split("/")[0]
        pool = by_field.setdefault(top, Pool("sealtools", top, [], []))
        place[row["api_name"]] = (pool, len(pool.tools))
        pool.tools.append(ToolText(row["api_name"], [row["api_description"]], list(row["parameters"])))
    for row in lines(folder / "dev.jsonl"):
        if len(row["calling"]) == 1 and row["calling"][0]["api"] in place:
            pool, index = place[row["calling"][0]["api"]]
            pool.queries.append(Query(row["query"], [index]))
    return list(by_field.values())


def toolselect(folder: Path) -> list[Pool]:
    csv.field_size_limit(10**8)
    pool = Pool("toolselect", "all", [], [])
    index: dict[tuple[str, str], int] = {}
    for row in csv.DictReader((folder / "train.csv").open()):
        parts = re.match(
            r'User: (.*?)\n###\nTool Choices: (.*?)\n###\nThought:.*CALLTOOL\["(.*?)"\]', row["text"], re.DOTALL
        )
        if not parts:
            continue
        offered = []
        for line in parts[2].split("\n"):
            name, _, description = line.partition(" = ")
            entry = (name.strip(), description.strip())
            if entry not in index:
                index[entry] = len(pool.tools)
                pool.tools.append(ToolText(entry[0], [entry[1]]))
            offered.append(index[entry])
        accept = [i for i in offered if pool.tools[i].name == parts[3]]
        if accept:
            pool.queries.append(Query(parts[1], accept, offered))
    return [pool]


def stabletoolbench(folder: Path) -> list[Pool]:
    pools = []
    for path in sorted(folder.glob("G*.json")):
        for row in json.loads(path.read_text()):
            offered = [
                ToolText(
                    f"{a['tool_name']} {a['api_name']}",
                    [a["api_description"] or ""],
                    [p["name"] for p in a["required_parameters"] + a["optional_parameters"]],
                )
                for a in row["api_list"]
            ]
            wanted = {tuple(pair) for pair in row["relevant APIs"]}
            accept = [i for i, a in enumerate(row["api_list"]) if (a["tool_name"], a["api_name"]) in wanted]
            if accept and len(accept) < len(offered):
                group = row["api_list"][0]["category_name"]
                everything = list(range(len(offered)))
                pools.append(Pool("stabletoolbench", group, offered, [Query(row["query"], accept, everything)]))
    return pools


def mcp(folder: Path) -> list[Pool]:
    """Real MCP servers; the annotators' steps are the queries, where steps and tools pair up one to one."""
    pools, place = [], {}
    for server in json.loads((folder / "tools.json").read_text()):
        for listed in server["tools"].values():
            pool = Pool("mcp", server["name"], [], [])
            for tool in listed["tools"]:
                place.setdefault(tool["name"], (pool, len(pool.tools)))
                pool.tools.append(ToolText(tool["name"], [tool["description"] or ""], properties(tool["inputSchema"])))
            pools.append(pool)
    for row in json.loads((folder / "all_annotations.json").read_text()):
        notes = row["Annotator Metadata"]
        steps = [re.sub(r"^\d+\.\s*", "", s).strip() for s in str(notes["Steps"]).split("\n") if s.strip()]
        names = [re.sub(r"^\d+\.\s*", "", s).strip() for s in str(notes["Tools"]).split("\n") if s.strip()]
        if len(steps) == len(names):
            for step, name in zip(steps, names, strict=True):
                if name in place:
                    pool, index = place[name]
                    pool.queries.append(Query(step, [index]))
    return pools


def intents(shared: Path, per_intent: int, rng: random.Random) -> list[Pool]:
    """Intent data sets as tool lists by name only."""
    rows: dict[str, dict[str, list[str]]] = {
        name: defaultdict(list) for name in ("clinc150", "hwu64", "snips", "banking77")
    }
    for name in ("clinc150", "hwu64", "snips"):
        for row in lines(shared / name / "train.jsonl"):
            rows[name][row["intent"]].append(row["query"])
    for row in csv.DictReader((shared / "banking77" / "train.csv").open()):
        rows["banking77"][row["category"]].append(row["text"])
    pools = []
    for source, by_intent in rows.items():
        pool = Pool("intent", source, [], [])
        for intent, texts in sorted(by_intent.items()):
            if intent in INTENT_NOISE:
                continue
            pool.tools.append(ToolText(intent, []))
            texts = sorted(set(texts))
            rng.shuffle(texts)
            pool.queries += [Query(t, [len(pool.tools) - 1]) for t in texts[:per_intent]]
        pools.append(pool)
    return pools


def bfcl(folder: Path) -> list[Pool]:
    pools = []
    answers = {r["id"]: r["ground_truth"] for r in lines(folder / "possible_answer" / "BFCL_v4_multiple.json")}
    for row in lines(folder / "BFCL_v4_multiple.json"):
        wanted = {name for call in answers[row["id"]] for name in call}
        offered = [ToolText(f["name"], [f["description"]], properties(f["parameters"])) for f in row["function"]]
        accept = [i for i, t in enumerate(offered) if t.name in wanted]
        if accept:
            query = Query(row["question"][0][-1]["content"], accept, list(range(len(offered))))
            pools.append(Pool("bfcl", row["id"], offered, [query]))
    return pools


def load_pools(shared: Path, data: Path, bfcl_folder: Path | None, seed: int = 0) -> list[Pool]:
    """Every pool. ``data``: our own files (convert/data or a folder of drafts)."""
    rng = random.Random(seed)
    pools = authored(
        shared / "authored" / "tools_train.json", shared / "authored" / "tools_train_queries.jsonl", "authored"
    )
    pools += authored(data / "router_tools.json.gz", data / "router_tools_queries.jsonl.gz", "authored2")
    pools += authored(data / "router_mcp_tools.json.gz", data / "router_mcp_queries.jsonl.gz", "authored_mcp")
    pools += gate_calls(shared / "authored" / "gate_train.jsonl")
    pools += metatool(shared / "metatool", 40, rng)
    pools += sealtools(shared / "sealtools")
    pools += toolselect(shared / "toolselect")
    pools += stabletoolbench(shared / "stabletoolbench")
    pools += mcp(shared / "livemcpbench")
    pools += intents(shared, 60, rng)
    if bfcl_folder is not None:
        pools += bfcl(bfcl_folder)
    return pools
