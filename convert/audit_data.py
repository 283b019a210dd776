"""Audit of the gate's dialogues: duplicates, leaks between training, dev and test sets, and shortcuts.

    python -m convert.audit_data [--bfcl DIR] [--json FILE]

A shortcut is a model that does well without seeing what the decision depends on: only the last text (words), only the
tools on offer, or only shape (length, punctuation, the role spoken last). Each is fitted on all authors but one in turn
and judged on that one; the shipped static stage, judged the same way, stands beside them in MODELS.md. Exit code 1 for
a leak or a contradiction.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from convert.gate_data import DEV_FILES, TRAIN_FILES, Item, read_dialogues
from convert.gate_metrics import auroc, macro_f1
from whetherman_edge.bench import bfcl
from whetherman_edge.gate.verdict import LABELS

N_SHINGLE: Final = 5
NEAR: Final = 0.6
"""Share of five-word runs two texts have in common from which they count as the same text in other words."""
LONG_ENOUGH: Final = 8
"""Words from which equal texts are not chance: everyone writes "thanks, that's all"."""
N_HASHED: Final = 1 << 16
WORD: Final = re.compile(r"\w+")


def last_text(item: Item) -> str:
    """What was said last: the user's text or a tool's result."""
    content = item["request"]["messages"][-1].get("content") or ""
    return content if isinstance(content, str) else json.dumps(content)


def words(text: str) -> list[str]:
    """Lower-case words, numbers all alike."""
    return ["0" if word.isdigit() else word for word in WORD.findall(text.lower())]


def whole(item: Item) -> str:
    """Digest of all that a gate may see of an item."""
    request = item["request"]
    seen = [request["messages"], request.get("tools")]
    return hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest()


def contradictions(items: Sequence[Item]) -> list[str]:
    """Pairs with the same request and labels that exclude each other, and requests that occur twice in a set."""
    seen: dict[str, Item] = {}
    found = []
    for item in items:
        other = seen.setdefault(whole(item), item)
        if other is not item and not set(other["accept"]) & set(item["accept"]):
            found.append(f"{other['id']} {other['accept']} against {item['id']} {item['accept']}")
    return found


def n_duplicates(items: Sequence[Item]) -> int:
    """How many items are there once more."""
    return len(items) - len({whole(item) for item in items})


def shingles(text: str) -> set[int]:
    """Hashes of all runs of N_SHINGLE words."""
    found = words(text)
    return {hash(tuple(found[i : i + N_SHINGLE])) for i in range(len(found) - N_SHINGLE + 1)}


def texts_of(items: Iterable[Item]) -> dict[str, str]:
    """Every user text of LONG_ENOUGH words, with the item it was first seen in."""
    found: dict[str, str] = {}
    for item in items:
        for message in item["request"]["messages"]:
            content = message.get("content")
            if message["role"] == "user" and isinstance(content, str) and len(words(content)) >= LONG_ENOUGH:
                found.setdefault(content, item["id"])
    return found


def near_texts(known: Mapping[str, str], other: Mapping[str, str]) -> list[tuple[str, str, float]]:
    """(id, id, overlap) of texts in ``other`` that share at least NEAR of their word runs with one in ``known``."""
    index: dict[int, list[int]] = defaultdict(list)
    known_ids = list(known.values())
    for number, text in enumerate(known):
        for shingle in shingles(text):
            index[shingle].append(number)
    found = []
    for text, name in other.items():
        own = shingles(text)
        counts: dict[int, int] = defaultdict(int)
        for shingle in own:
            for number in index.get(shingle, ()):
                counts[number] += 1
        if counts:
            best = max(counts, key=lambda number: counts[number])
            share = counts[best] / len(own)
            if share >= NEAR:
                found.append((known_ids[best], name, round(share, 2)))
    return found


def _column(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest()) % N_HASHED


def _columns(text: str) -> set[int]:
    found = words(text)
    return {_column(run) for run in (*found, *(" ".join(pair) for pair in itertools.pairwise(found)))}


def words_only(item: Item) -> set[int]:
    """Columns of the last text alone."""
    return _columns(last_text(item))


def tools_only(item: Item) -> set[int]:
    """Columns of the tools alone."""
    functions = [tool["function"] for tool in item["request"].get("tools") or [] if "function" in tool]
    return set().union(*(_columns(f"{f['name']} {f.get('description', '')}") for f in functions))


def shape_only(item: Item) -> set[int]:
    """Columns of length, punctuation, case, role and counts, each in steps."""
    text, request = last_text(item), item["request"]
    steps = (
        ("length", int(np.log2(len(text) + 1) * 2)),
        ("words", min(40, len(words(text)))),
        ("ends", text[-1:] if not text[-1:].isalnum() else "letter"),
        ("question", "?" in text),
        ("lower", text[:1].islower()),
        ("digits", any(c.isdigit() for c in text)),
        ("role", request["messages"][-1]["role"]),
        ("turns", min(12, len(request["messages"]))),
        ("tools", min(20, len(request.get("tools") or []))),
        ("system", request["messages"][0]["role"] == "system"),
    )
    return {_column(f"{name} {value}") for name, value in steps}


SHORTCUTS: Final = {"words of the last text": words_only, "tools": tools_only, "shape": shape_only}


def shortcut(items: Sequence[Item], columns: Sequence[set[int]], n_folds: int = 5) -> Mapping[str, float]:
    """AUROC of ACT against the rest and macro-F1 of a linear model on ``columns``, whole authors held out."""
    from scipy.sparse import csr_matrix
    from sklearn.linear_model import SGDClassifier

    indices = np.concatenate([np.fromiter(c, np.int64, len(c)) for c in columns])
    starts = np.concatenate([[0], np.cumsum([len(c) for c in columns])])
    x = csr_matrix((np.ones(len(indices), np.float32), indices, starts), shape=(len(items), N_HASHED))
    gold = np.array([LABELS.index(item["gold"]) for item in items])
    authors = sorted({item["domain"] for item in items})
    fold = np.array([authors.index(item["domain"]) % n_folds for item in items])
    p: npt.NDArray[np.float64] = np.zeros((len(items), len(LABELS)))
    for k in range(n_folds):
        model = SGDClassifier(loss="log_loss", alpha=1e-5, max_iter=12, tol=None, random_state=0, average=True)
        p[fold == k] = model.fit(x[fold != k], gold[fold != k]).predict_proba(x[fold == k])
    return {"auroc_act": round(auroc(p[:, 0], gold == 0), 3), "macro_f1": round(macro_f1(p.argmax(1), gold), 3)}


def audit(bfcl_folder: Path | None) -> tuple[dict[str, Any], list[str]]:
    """The report, and what is wrong."""
    train = [item for name in TRAIN_FILES for item in read_dialogues(name)]
    dev = [item for name in DEV_FILES for item in read_dialogues(name)]
    wrong = [f"contradiction: {pair}" for pair in contradictions([*train, *dev])]
    shared = {whole(item) for item in train} & {whole(item) for item in dev}
    wrong += [f"{len(shared)} requests are in both training and dev"] if shared else []
    known = texts_of(train)
    pairs = near_texts(known, texts_of(dev))
    report: dict[str, Any] = {
        "n_train": len(train),
        "n_dev": len(dev),
        "duplicates_train": n_duplicates(train),
        "duplicates_dev": n_duplicates(dev),
        "dev_texts_near_training_texts": {"n": len(pairs), "of": len(texts_of(dev)), "examples": pairs[:20]},
        "labels": {label: sum(item["gold"] == label for item in train) for label in LABELS},
    }
    if bfcl_folder is not None:
        for name in bfcl.SETS:
            test = [{**item, "id": str(item["id"])} for item in bfcl.items(bfcl_folder, name)]
            near = near_texts(known, texts_of(test))
            report[f"bfcl_{name}_near_training_texts"] = {"n": len(near), "of": len(test), "examples": near[:20]}
            wrong += [f"{ours} is a text of the test set: {theirs}, {share}" for ours, theirs, share in near]
    majority = max(report["labels"].values()) / len(train)
    report["majority_share"] = round(majority, 3)
    report["shortcuts"] = {name: shortcut(train, [of(item) for item in train]) for name, of in SHORTCUTS.items()}
    return report, wrong


def main() -> int:
    """Print the report; exit code 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--bfcl", type=Path, help="folder with BFCL_v4_*.json: looked at for leaks, never trained on")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report, wrong = audit(options.bfcl)
    text = json.dumps({**report, "wrong": wrong}, indent=1, ensure_ascii=False)
    print(text)
    if options.json:
        options.json.write_text(text + "\n", "utf-8")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
