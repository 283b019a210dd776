"""Single-turn items from public sets, for breadth: a query with the tool it was written for, and without it.

python -m convert.gate_public --data FOLDER [--few-tools]   (folders acebench, sealtools, self_instruct)

Writes convert/data/gate_public.jsonl.xz, and with --few-tools gate_public_few.jsonl.xz: every query beside the one or
two tools that it was written for, and beside one or two others, for agents that offer hardly more.

With its tool among others the decision is ACT; with only the others it is DECLINE (ANSWER accepted: some queries are
general knowledge). Instructions of self_instruct with tools that do not help are ANSWER. Used in training only, at a
small weight. ACEBench's special items and Seal-Tools' test part are not read.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from convert.gate_data import DATA

ACEBENCH: Final = ("normal_single_turn_single_function", "normal_similar_api", "normal_preference")
ACEBENCH_ATOMS: Final = ("bool", "enum", "list", "number", "object_deep", "object_short")
OTHERS_MAX: Final = 7
FEW_TOOLS_MAX: Final = 2
FEW_TOOLS: Final = (1, 1, 1, 2)
TYPES: Final = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "list": "array"}

Function = dict[str, Any]


def acebench(folder: Path) -> Iterator[tuple[str, list[Function], list[Function]]]:
    """Query, right functions, others of the same list."""
    for name in (*ACEBENCH, *(f"normal_atom_{atom}" for atom in ACEBENCH_ATOMS)):
        answers: dict[str, Any] = {}
        for line in (folder / "acebench" / f"data_{name}.json").read_text().splitlines():
            row = json.loads(line)
            query = row["question"].removeprefix("user:").strip()
            if "\nassistant:" in query or "\nsystem:" in query:
                continue
            functions = [function_of(f) for f in row["function"]]
            answers[row["id"]] = functions
            yield query, functions, []


def function_of(function: Function) -> Function:
    """An ACEBench function as OpenAI writes it (some carry ``arguments`` instead of ``parameters``)."""
    parameters = function.get("parameters") or function.get("arguments") or {"type": "object", "properties": {}}
    return {"name": function["name"], "description": function.get("description", ""), "parameters": parameters}


def sealtools(folder: Path) -> Iterator[tuple[str, list[Function], list[Function]]]:
    """Query, the functions it calls, none."""
    tools = {}
    for line in (folder / "sealtools" / "tool.jsonl").read_text().splitlines():
        row = json.loads(line)
        tools[row["api_name"]] = {
            "name": row["api_name"],
            "description": row["api_description"],
            "parameters": {
                "type": "object",
                "properties": {
                    name: {"type": TYPES.get(p.get("type", ""), "string"), "description": p.get("description", "")}
                    for name, p in row["parameters"].items()
                },
                "required": row.get("required", []),
            },
        }
    for line in (folder / "sealtools" / "dev.jsonl").read_text().splitlines():
        row = json.loads(line)
        names = {call["api"] for call in row["calling"]}
        if names <= tools.keys():
            yield row["query"], [tools[name] for name in sorted(names)], []


def instructions(folder: Path) -> Iterator[str]:
    """Self-instruct instructions that carry their input, or need none."""
    for name in ("seed_tasks", "user_oriented_instructions"):
        for line in (folder / "self_instruct" / f"{name}.jsonl").read_text().splitlines():
            row = json.loads(line)
            given = (row["instances"][0].get("input") or "").strip()
            yield f"{row['instruction']}\n\n{given}" if given else row["instruction"]


def item(number: int, source: str, query: str, functions: Sequence[Function], accept: Sequence[str]) -> dict[str, Any]:
    """One line of the file."""
    tools = [{"type": "function", "function": f} for f in functions]
    request = {"model": "agent", "messages": [{"role": "user", "content": query}], "tools": tools}
    return {
        "id": f"public-{source}-{number}-{accept[0].lower()}",
        "request": request,
        "gold": accept[0],
        "accept": list(accept),
        "category": "first.public",
        "set": f"public-{source}-{number}",
        "domain": "public",
    }


def _queries(folder: Path) -> tuple[list[tuple[str, str, list[Function], list[Function]]], dict[str, Function]]:
    """The queries with their source, and all of their tools by name."""
    queries = [("acebench", *row) for row in acebench(folder)] + [("sealtools", *row) for row in sealtools(folder)]
    return queries, {f["name"]: f for _, _, right, _ in queries for f in right}


def items(folder: Path, seed: int = 0) -> Iterator[dict[str, Any]]:
    """All items; the same for the same files."""
    rng = random.Random(seed)
    queries, pool = _queries(folder)
    names = sorted(pool)
    for number, (source, query, right, _) in enumerate(queries):
        own = {f["name"] for f in right}
        others = [pool[n] for n in rng.sample(names, OTHERS_MAX + len(own)) if n not in own]
        shown = right + others[: rng.randint(0, OTHERS_MAX)]
        rng.shuffle(shown)
        yield item(number, source, query, shown, ["ACT"])
        yield item(number, source, query, others[: rng.randint(1, OTHERS_MAX)], ["DECLINE", "ANSWER"])
    for number, query in enumerate(instructions(folder)):
        tempting = [pool[n] for n in rng.sample(names, rng.randint(1, OTHERS_MAX))]
        yield item(number, "instruct", query, tempting, ["ANSWER"])


def few_tools_items(folder: Path, seed: int = 1) -> Iterator[dict[str, Any]]:
    """Each query twice, beside its tool (or its two) and beside as many others; the same for the same files."""
    rng = random.Random(seed)
    queries, pool = _queries(folder)
    names = sorted(pool)
    for number, (source, query, right, _) in enumerate(queries):
        own = {f["name"]: f for f in right}
        if len(own) > FEW_TOOLS_MAX:
            continue
        size = max(len(own), rng.choice(FEW_TOOLS))
        others = [pool[n] for n in rng.sample(names, 2 * FEW_TOOLS_MAX) if n not in own]
        shown = [*own.values(), *others[: size - len(own)]]
        rng.shuffle(shown)
        for one in (
            item(number, source, query, shown, ["ACT"]),
            item(number, source, query, others[:size], ["DECLINE", "ANSWER"]),
        ):
            yield {**one, "id": f"{one['id']}-few"}


def main() -> None:
    """Read the sets, write the file."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--few-tools", action="store_true", help="write gate_public_few instead")
    options = parser.parse_args()
    rows = list(few_tools_items(options.data) if options.few_tools else items(options.data))
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path = DATA / ("gate_public_few.jsonl.xz" if options.few_tools else "gate_public.jsonl.xz")
    path.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    print(f"{len(rows)} items, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
