"""Build the router artifact from a potion checkpoint.

python -m convert.build_router --model /path/to/potion-base-8M [--out whetherman_edge/artifacts/router.safetensors]
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from convert.router_stems import FUNCTION_WORDS, stem_word
from whetherman_edge.router.artifact import write_artifact
from whetherman_edge.router.table import DEFAULT_PATH, SPECIALS

SIZE_MAX = 10_000_000
# The report's weights: 7, 3, 2 for "name. description", description, name; (.5, .5) and (.5, .25) for shared words.
ZERO_SHOT = {
    "mix": [7.0, 3.0, 2.0, 0.0],
    "lexical": [[0.5, 0.5, 0.0], [0.5, 0.25, 0.0], [0.0, 0.0, 1.0]],
    "name_share": 1.0,
    "has_parameters_bias": 0.0,
    "calibration": [1.7, 0.0],
}


def read_model(folder: Path) -> tuple[np.ndarray, list[str]]:
    """Rows (vocab, dim) float32 and the vocabulary in id order."""
    rows = load_file(folder / "model.safetensors")["embeddings"]
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    return rows, [t for t, _ in sorted(vocab.items(), key=lambda item: item[1])]


def quantise(rows: np.ndarray, tokens: list[str], peak: float) -> np.ndarray:
    """int8 rows under one global scale; special tokens become zero so that they drop out of every sum."""
    table = np.clip(np.rint(rows * (127.0 / peak)), -127, 127).astype(np.int8)
    for special in SPECIALS:
        table[tokens.index(special)] = 0
    return table


def stem_sections(rows: np.ndarray, tokens: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Stem class of each id (the smallest id with that stem) and the weight of each class.

    potion's rows are Zipf-weighted, so a row's length already says how rare its token is.
    """
    first: dict[str, int] = {}
    stem = np.zeros(len(tokens), dtype=np.int32)
    idf = np.zeros(len(tokens), dtype=np.float32)
    length = np.linalg.norm(rows, axis=1) / 100.0
    for i, token in enumerate(tokens):
        key = stem_word(token)
        stem[i] = first.setdefault(key, i)
        content = re.fullmatch(r"(##)?[^\W_]+", token) is not None and token not in FUNCTION_WORDS
        if content and len(token) > 1:
            idf[stem[i]] = max(idf[stem[i]], np.float32(length[i]))
    for word in FUNCTION_WORDS:
        if word in first.values() or word in tokens:
            idf[stem[tokens.index(word)]] = 0.0
    return stem, idf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=DEFAULT_PATH)
    args = parser.parse_args()
    rows, tokens = read_model(args.model)
    assert not any("\n" in t for t in tokens) and max(Counter(tokens).values()) == 1
    stem, idf = stem_sections(rows, tokens)
    arrays = {
        "table": quantise(rows, tokens, peak=float(np.percentile(np.abs(rows), 99.99))),
        "vocab": np.frombuffer("\n".join(tokens).encode(), dtype=np.uint8),
        "stem": stem,
        "idf": idf,
        "config": np.frombuffer(json.dumps(ZERO_SHOT).encode(), dtype=np.uint8),
    }
    args.out.parent.mkdir(exist_ok=True)
    digest = write_artifact(args.out, arrays, {"model": "potion-base-8M, zero-shot"})
    size = args.out.stat().st_size
    assert size <= SIZE_MAX, size
    print(f"{args.out}: {size / 1e6:.2f} MB, sha256 {digest}")


if __name__ == "__main__":
    main()
