"""Dialogues for the gate: read, extend, and turn into feature matrices.

The dialogues are our own (``convert/data/README.md`` says how they are labelled). Two kinds of items are derived from
them for training only: the prefixes of a dialogue, labelled by what its assistant did next, and first turns whose tools
were swapped for those of another domain. Nothing here reads a benchmark.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import whetherman_edge.gate.features as features_module
import whetherman_edge.gate.text_signals as text_module
import whetherman_edge.gate.tool_signals as tool_module
from whetherman_edge.dialects.openai_chat import view
from whetherman_edge.dialects.tool_cache import ToolCache
from whetherman_edge.gate.features import Extractor
from whetherman_edge.gate.heads import FIELD_SMOOTHING
from whetherman_edge.gate.verdict import LABELS
from whetherman_edge.kernels import load
from whetherman_edge.router.scorer import Scorer
from whetherman_edge.router.table import RouterTable

DATA: Final = Path(__file__).resolve().parent / "data"
CACHE: Final = Path(__file__).resolve().parent.parent / "build" / "gate-cache"
TRAIN_FILES: Final = ("gate_train", *(f"gate_train{n}" for n in (*range(2, 12), *range(13, 23))))
DEV_FILES: Final = ("gate_dev", *(f"gate_dev{n}" for n in range(2, 23)))
"""All dialogues to train on, and all that are never trained on."""
N_BUCKETS: Final = 1 << 16
QUESTION_MARKS: Final = ("?", "？", "؟")

Item = dict[str, Any]


class Matrix:
    """Items as arrays.

    scalars: (n, N_SCALARS) float32. dense: (n, blocks, dim) float16. buckets: (m,) uint32, the n-gram buckets of all
    items; those of item i are ``buckets[offsets[i]:offsets[i + 1]]``, ``scale`` their float32 values. phase: (n,) int8.
    meta: the items without their request.
    """

    def __init__(
        self,
        scalars: npt.NDArray[np.float32],
        dense: npt.NDArray[np.float16],
        buckets: npt.NDArray[np.uint32],
        scale: npt.NDArray[np.float32],
        offsets: npt.NDArray[np.int64],
        phase: npt.NDArray[np.int8],
        meta: list[Item],
    ) -> None:
        self.scalars, self.dense, self.phase, self.meta = scalars, dense, phase, meta
        self.buckets, self.scale, self.offsets = buckets, scale, offsets
        self.gold = np.array([LABELS.index(m["gold"]) for m in meta])
        self.accept = np.array([[label in m["accept"] for label in LABELS] for m in meta])
        self.domain = np.array([m["domain"] for m in meta])
        self.kind = np.array([m["kind"] for m in meta])

    def __len__(self) -> int:
        return len(self.meta)


def read_dialogues(name: str) -> list[Item]:
    """One file of ``convert/data``: items with ``id, request, gold, accept, category, domain, kind, set``.

    ``domain`` is the author: the later authors wrote about many small fields (``x-ferry``), which count as one.
    """
    with lzma.open(DATA / f"{name}.jsonl.xz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return [
        {
            "id": row["id"],
            "request": row["request"],
            "gold": row["gold"],
            "accept": row["accept"],
            "category": row["category"],
            "domain": row.get("domain", "dev").split("-")[0],
            "set": row.get("set", row["id"]),
            "kind": "public" if row.get("domain") == "public" else "dialogue",
        }
        for row in rows
    ]


def prefixes(dialogues: Iterable[Item]) -> Iterator[Item]:
    """What the assistant did earlier in a dialogue is a label too: a call is ACT, a text ANSWER, a question ASK."""
    seen: set[tuple[str, str]] = set()
    for item in dialogues:
        messages = item["request"]["messages"]
        for at, message in enumerate(messages):
            if message["role"] != "assistant" or at == 0:
                continue
            key = (item["set"], json.dumps([messages[:at], item["request"]["tools"]]))
            if key in seen:
                continue
            seen.add(key)
            text = (message.get("content") or "").strip()
            gold = "ACT" if message.get("tool_calls") else "ASK" if text.endswith(QUESTION_MARKS) else "ANSWER"
            if gold == "ACT" and messages[at - 1]["role"] == "user":
                kind = "prefix_first"
            else:
                kind = "prefix"
            yield {
                **item,
                "id": f"{item['id']}@{at}",
                "request": {**item["request"], "messages": messages[:at]},
                "gold": gold,
                "accept": [gold],
                "kind": kind,
            }


def swapped_tools(dialogues: Sequence[Item], seed: int = 0) -> Iterator[Item]:
    """First turns with the tools of another domain: what needed one of its own tools can no longer be done."""
    rng = np.random.default_rng(seed)
    for item in dialogues:
        if item["category"] != "first" or (item["gold"] == "ACT" and len(item["accept"]) > 1):
            continue
        others = [dialogues[int(i)] for i in rng.integers(0, len(dialogues), 8)]
        other = next((d for d in others if d["domain"] != item["domain"]), None)
        if other is None:
            continue
        gold = "ANSWER" if item["gold"] == "ANSWER" else "DECLINE"
        yield {
            **item,
            "id": f"{item['id']}~",
            "request": {**item["request"], "tools": other["request"]["tools"]},
            "gold": gold,
            "accept": [gold],
            "kind": "swapped",
            "donor": other["domain"],
        }


SMALL_TALK: Final = (
    *("hi", "Hi!", "hello", "Hello there", "hey", "hey there", "hey!", "yo", "hiya", "howdy", "hi there", "heya"),
    *("good morning", "Good evening!", "morning", "good afternoon", "evening all", "greetings", "hello?", "hi hi"),
    *("how are you?", "How's it going", "how are you doing today?", "what's up", "you ok?", "how do you feel today"),
    *("who are you?", "What are you?", "are you a bot", "what's your name?", "who made you?", "Are you there?"),
    *("thanks", "Thank you!", "thx", "cheers", "great, thanks", "perfect", "cool", "nice one", "ok", "got it", "lol"),
    *("bye", "Goodbye!", "see you", "good night", "that's all", "nice to meet you", "have a nice day", "haha"),
    *("hola", "¡Buenos días!", "bonjour", "Salut !", "hallo", "Guten Morgen", "moin", "ciao", "olá", "cześć", "hej"),
    *("привет", "こんにちは", "你好", "안녕하세요", "merhaba", "danke", "merci", "gracias", "grazie", "谢谢"),
)


def small_talk(dialogues: Sequence[Item], n: int = 800, seed: int = 0) -> Iterator[Item]:
    """Greetings and the like beside the tools of a dialogue, with its system text or without: nothing to call for."""
    rng = np.random.default_rng(seed)
    for number in range(n):
        item = dialogues[int(rng.integers(0, len(dialogues)))]
        opening = [m for m in item["request"]["messages"][:1] if m["role"] == "system" and number % 2]
        said = {"role": "user", "content": SMALL_TALK[number % len(SMALL_TALK)]}
        yield {
            **item,
            "id": f"small-talk-{number}",
            "set": f"small-talk-{number}",
            "request": {**item["request"], "messages": [*opening, said]},
            "gold": "ANSWER",
            "accept": ["ANSWER"],
            "category": "first",
            "kind": "small_talk",
        }


def open_scorer(router: Path | None = None) -> Scorer:
    """A scorer on the packaged router or on ``router``."""
    kernels = load()
    return Scorer(RouterTable.open(router, kernels), kernels)


def source_digest() -> str:
    """Digest of the code that defines the features: a cache made by other code is not read."""
    digest = hashlib.sha256()
    for module in (features_module, text_module, tool_module):
        digest.update(Path(str(module.__file__)).read_bytes())
    return digest.hexdigest()


def matrix_of(items: Sequence[Item], scorer: Scorer, name: str) -> Matrix:
    """Features of ``items``, from the cache where code, router and items are the same."""
    digest = hashlib.sha256(f"{source_digest()}{scorer.table.sha256}{N_BUCKETS}".encode())
    digest.update(json.dumps([[i["id"], i["request"]] for i in items], sort_keys=True).encode())
    path = CACHE / f"{name}-{digest.hexdigest()[:16]}.npz"
    meta = [{k: v for k, v in item.items() if k != "request"} for item in items]
    for entry, item in zip(meta, items, strict=True):
        entry["last_role"] = item["request"]["messages"][-1]["role"]
        entry["n_tools"] = len(item["request"].get("tools") or [])
    if path.exists():
        with np.load(path) as z:
            return Matrix(meta=meta, **{key: z[key] for key in z.files if key != "allow_pickle"})
    scalars, dense, buckets, scale, phase = [], [], [], [], []
    extractor, cache, kernels = Extractor(scorer), ToolCache(), scorer.kernels
    for item in items:
        features = extractor.extract(view(json.dumps(item["request"]).encode(), cache))
        scalars.append(features.scalars)
        phase.append(features.phase)
        dense.append(features.dense.astype(np.float16))
        fields = [kernels.hash_ngrams(f.text, f.seed, N_BUCKETS, f.modes) for f in features.fields]
        buckets.append(np.concatenate(fields) if fields else np.zeros(0, np.uint32))
        for field, found in zip(features.fields, fields, strict=True):
            scale.append(np.full(len(found), field.weight / np.sqrt(len(found) + FIELD_SMOOTHING), np.float32))
    arrays: Mapping[str, npt.NDArray[Any]] = {
        "scalars": np.stack(scalars),
        "dense": np.stack(dense),
        "buckets": np.concatenate(buckets),
        "scale": np.concatenate(scale),
        "phase": np.array(phase, np.int8),
        "offsets": np.cumsum([0] + [len(b) for b in buckets]),
    }
    CACHE.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)
    return Matrix(meta=meta, **arrays)
