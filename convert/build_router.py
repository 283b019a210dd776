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
from whetherman_edge.router.prototype import to_int8
from whetherman_edge.router.table import DEFAULT_PATH, SPECIALS, RouterTable

SIZE_MAX = 10_000_000
# Trained on contrast queries, the lexical weights turn negative: rivals share words with a query, the right tool
# often does not. That costs literal queries more than it gives (BFCL simple among 21: 0.960 to 0.935), so half of
# the report's weights ship. The bias moves accuracy from small slates of unlike tools to MCP slates; 0.75 keeps
# most of both.
SHIPPED_LEXICAL = [[0.25, 0.25, 0.0], [0.25, 0.125, 0.0], [0.0, 0.0, 1.0]]
BIAS_SHARE = 0.75
# Strength rises from 0 to 1 between these cosines of a tool's description to the nearest of ours. Unrelated tools that
# share the name lie below 0.45, rewordings above 0.42; names as common as `search` or `cli` must match more closely.
DESCRIPTION_COSINE = [0.35, 0.5]
WEAK_DESCRIPTION_COSINE = [0.5, 0.65]
# The report's weights: 7, 3, 2 for "name. description", description, name; (.5, .5) and (.5, .25) for shared words.
ZERO_SHOT = {
    "mix": [7.0, 3.0, 2.0, 0.0],
    "lexical": [[0.5, 0.5, 0.0], [0.5, 0.25, 0.0], [0.0, 0.0, 1.0]],
    "name_share": 1.0,
    "has_parameters_bias": 0.0,
    "calibration": [1.7, 0.0, 1.0],
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


def trained_arrays(path: Path, tokens: list[str]) -> tuple[dict[str, np.ndarray], dict[str, object]]:
    """Sections and config of a run of train_router: table already at its export scale, so that nothing is refitted."""
    run = np.load(path)
    table = np.clip(np.rint(run["rows"] / float(run["scale"])), -127, 127).astype(np.int8)
    for special in SPECIALS:
        table[tokens.index(special)] = 0
    arrays = {
        "table": table,
        "idf": run["idf"].astype(np.float32),
        "bias": (BIAS_SHARE * run["bias"]).astype(np.float32),
    }
    config: dict[str, object] = {
        "mix": run["mix"].tolist(),
        "lexical": SHIPPED_LEXICAL,
        "name_share": float(run["name_share"]),
        "has_parameters_bias": float(run["has_parameters_bias"]),
        "calibration": [1.0, 0.0, 1.0],
    }
    return arrays, config


def identity_arrays(
    path: Path, described: dict[str, dict[str, list[str]]], semantic: Path
) -> tuple[dict[str, np.ndarray], dict[str, object]]:
    """Sections and config of the identity head; our descriptions are embedded with the finished table."""
    run = np.load(path)
    table = RouterTable.open(semantic)
    names = list(described)
    arrays = {
        "identity_ngrams": run["ngrams"].astype(np.float32),
        "identity_dense": run["dense"].astype(np.float32),
        "identity_bank": np.stack([to_int8(table.pooled(str(text))) for text in run["bank"]]),
        "identity_owner": run["owner"].astype(np.int32),
    }
    config: dict[str, object] = {
        "names": names,
        "bias": run["bias"].tolist(),
        "aliases": {a: k for k, n in enumerate(names) for a in described[n]["aliases"]},
        "weak_aliases": {a: k for k, n in enumerate(names) for a in described[n]["weak_aliases"]},
        "description_cosine": DESCRIPTION_COSINE,
        "weak_description_cosine": WEAK_DESCRIPTION_COSINE,
    }
    return arrays, config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="potion-base-8M folder")
    parser.add_argument("--trained", type=Path, help="output of train_router; without it the zero-shot scorer is built")
    parser.add_argument("--identity", type=Path, help="output of train_router_identity, trained on --semantic")
    parser.add_argument(
        "--semantic", type=Path, help="the artifact without identity head that --identity was trained on"
    )
    parser.add_argument("--calibration", type=float, nargs=3, metavar=("A", "B", "C"), help="see calibrate_router")
    parser.add_argument("--out", type=Path, default=DEFAULT_PATH)
    args = parser.parse_args()
    rows, tokens = read_model(args.model)
    if any("\n" in token for token in tokens) or max(Counter(tokens).values()) > 1:
        raise SystemExit("the vocabulary has a token with a newline, or one twice")
    stem, idf = stem_sections(rows, tokens)
    arrays: dict[str, np.ndarray] = {
        "table": quantise(rows, tokens, peak=float(np.percentile(np.abs(rows), 99.99))),
        "vocab": np.frombuffer("\n".join(tokens).encode(), dtype=np.uint8),
        "stem": stem,
        "idf": idf,
    }
    config: dict[str, object] = dict(ZERO_SHOT)
    if args.trained:
        sections, config = trained_arrays(args.trained, tokens)
        arrays |= sections
    if args.identity:
        described = json.loads((Path(__file__).parent / "data" / "router_priority.json").read_text())
        sections, config["identity"] = identity_arrays(args.identity, described, args.semantic)
        arrays |= sections
    if args.calibration:
        config["calibration"] = list(args.calibration)
    arrays["config"] = np.frombuffer(json.dumps(config).encode(), dtype=np.uint8)
    args.out.parent.mkdir(exist_ok=True)
    digest = write_artifact(args.out, arrays, {"model": "potion-base-8M"})
    size = args.out.stat().st_size
    if size > SIZE_MAX:
        raise SystemExit(f"{args.out}: {size} bytes, over the limit of {SIZE_MAX}")
    print(f"{args.out}: {size / 1e6:.2f} MB, sha256 {digest}")


if __name__ == "__main__":
    main()
