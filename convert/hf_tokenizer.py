"""The tokenizer of a Hugging Face folder as GGUF wants it: pieces, scores, types, special ids, chat template.

Gemma's tokenizer is SentencePiece's BPE, where a merge happens in the order of the merged piece's score.
``tokenizer.model`` holds the scores (a protocol buffer, three fields of which are read here); ``tokenizer.json`` holds
the list of merges instead, whose order gives the same ranking: a piece's score is minus the rank of its first merge.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from convert.shards import read_json
from whetherman_edge.errors import ArtifactError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Token types; SentencePiece and GGUF number them alike."""
SPECIAL_SCORE: Final = -1000.0
UNMERGED_SCORE: Final = -1e6
SPECIALS: Final = ("bos", "eos", "unk", "pad")


class Vocabulary(msgspec.Struct, frozen=True):
    """``ids``: name of a special token (one of SPECIALS) to its id. ``template``: the chat template, or ""."""

    pieces: list[str]
    scores: list[float]
    types: list[int]
    ids: dict[str, int]
    template: str = ""
    add_bos: bool = True
    add_eos: bool = False
    space_prefix: bool = False


def read_vocabulary(folder: Path, n_vocab: int) -> Vocabulary:
    """``n_vocab``: rows of the embedding table; missing pieces are filled up as unused ones, as llama.cpp does.

    Raises ArtifactError when there is no tokenizer, or one with more pieces than the table has rows.
    """
    config = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    if (folder / "tokenizer.model").is_file():
        pieces, scores, types, prefix = _from_model((folder / "tokenizer.model").read_bytes())
        # Hugging Face folders of Gemma carry a model file that says "prefix a space" and a JSON that says not to.
        prefix = False
        data = read_json(folder / "tokenizer.json") if (folder / "tokenizer.json").is_file() else {}
        _add_tokens(data, config, pieces, scores, types)
    elif (folder / "tokenizer.json").is_file():
        pieces, scores, types, prefix = _from_json(read_json(folder / "tokenizer.json"))
    else:
        raise ArtifactError(f"{folder}: expected tokenizer.model or tokenizer.json, there is neither")
    # llama.cpp looks for these in the text as it came, before spaces become ▁.
    pieces = [p.replace("▁", " ") if t == USER_DEFINED else p for p, t in zip(pieces, types, strict=True)]
    if len(pieces) > n_vocab:
        raise ArtifactError(f"{folder}: the tokenizer has {len(pieces)} pieces, the embedding table {n_vocab} rows")
    for spare in range(len(pieces), n_vocab):
        pieces.append(f"[PAD{spare}]")
        scores.append(SPECIAL_SCORE)
        types.append(UNUSED)
    return Vocabulary(
        pieces, scores, types, _special_ids(folder, config, pieces), _template(folder, config),
        add_bos=bool(config.get("add_bos_token", True)), add_eos=bool(config.get("add_eos_token", False)),
        space_prefix=prefix,
    )  # fmt: skip


def _special_ids(folder: Path, config: dict[str, Any], pieces: list[str]) -> dict[str, int]:
    """From tokenizer_config.json by text, else from config.json by id."""
    model = read_json(folder / "config.json")
    found: dict[str, int] = {}
    place = {piece: i for i, piece in enumerate(pieces)}
    for name in SPECIALS:
        token = config.get(f"{name}_token")
        text = token.get("content") if isinstance(token, dict) else token
        by_id = model.get(f"{name}_token_id")
        by_id = by_id[0] if isinstance(by_id, list) and by_id else by_id
        if isinstance(text, str):
            if text not in place:
                raise ArtifactError(f"tokenizer_config.json: {name}_token {text!r} is no piece of the tokenizer")
            found[name] = place[text]
        elif isinstance(by_id, int):
            found[name] = by_id
    if "unk" not in found and "<unk>" in place:
        found["unk"] = place["<unk>"]
    if "bos" not in found or "eos" not in found:
        raise ArtifactError(f"{folder}: expected bos and eos tokens in tokenizer_config.json or config.json")
    return found


def _template(folder: Path, config: dict[str, Any]) -> str:
    """chat_template.jinja, else the configuration's (the default one of several)."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text("utf-8")
    template = config.get("chat_template", "")
    if isinstance(template, list):
        return next((str(t["template"]) for t in template if t.get("name") == "default"), "")
    return str(template or "")


def _add_tokens(
    data: dict[str, Any], config: dict[str, Any], pieces: list[str], scores: list[float], types: list[int]
) -> None:
    """Tokens named later than tokenizer.model was made: FunctionGemma's control tokens were unused pieces there."""
    added = {int(token["id"]): token for token in data.get("added_tokens") or []}
    added |= {int(i): token for i, token in (config.get("added_tokens_decoder") or {}).items()}
    for i in sorted(added):
        while len(pieces) <= i:
            pieces.append(f"[PAD{len(pieces)}]")
            scores.append(SPECIAL_SCORE)
            types.append(UNUSED)
        pieces[i], scores[i] = str(added[i]["content"]), SPECIAL_SCORE
        types[i] = CONTROL if added[i].get("special") else USER_DEFINED


def _from_json(data: dict[str, Any]) -> tuple[list[str], list[float], list[int], bool]:
    model = data.get("model") or {}
    if model.get("type") != "BPE" or not model.get("byte_fallback"):
        raise ArtifactError("tokenizer.json: expected a BPE model with byte_fallback, as Gemma's is")
    vocab: dict[str, int] = dict(model.get("vocab") or {})
    added = {str(t["content"]): t for t in data.get("added_tokens") or []}
    for text, token in added.items():
        vocab[text] = int(token["id"])
    n = max(vocab.values(), default=-1) + 1
    pieces, scores, types = [""] * n, [UNMERGED_SCORE] * n, [UNUSED] * n
    for text, i in vocab.items():
        pieces[i], types[i] = text, _type_of(text, added.get(text), model.get("unk_token"))
        if types[i] != NORMAL:
            scores[i] = 0.0 if types[i] == BYTE else SPECIAL_SCORE
    rank = 0
    for merge in model.get("merges") or []:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        merged = vocab.get(left + right)
        if merged is None:
            raise ArtifactError(f"tokenizer.json: the merge of {left!r} and {right!r} gives no piece")
        if scores[merged] == UNMERGED_SCORE:  # its first merge ranks it, user-defined pieces keep their own score
            scores[merged] = float(-rank)
            rank += 1
    prefix = any(step.get("type") == "Prepend" for step in (data.get("normalizer") or {}).get("normalizers", []))
    return pieces, scores, types, prefix


def _type_of(text: str, added: dict[str, Any] | None, unknown: str | None) -> int:
    if text == unknown:
        return CONTROL if added is not None and added.get("special") else UNKNOWN
    if added is not None:
        return CONTROL if added.get("special") else USER_DEFINED
    return BYTE if len(text) == 6 and text.startswith("<0x") and text.endswith(">") else NORMAL


def _from_model(data: bytes) -> tuple[list[str], list[float], list[int], bool]:
    """``ModelProto``: 1 = pieces (1 text, 2 score, 3 type), 3 = normalizer (3 add_dummy_prefix)."""
    pieces: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    prefix = True
    try:
        for number, value in _fields(data):
            if number == 1:
                own = dict(_fields(value))
                pieces.append(bytes(own[1]).decode("utf-8"))
                scores.append(struct.unpack("<f", own[2])[0] if 2 in own else 0.0)
                types.append(own.get(3, NORMAL))
            elif number == 3:
                prefix = bool(dict(_fields(value)).get(3, 1))
    except (IndexError, KeyError, struct.error, UnicodeDecodeError, TypeError) as exc:
        raise ArtifactError("tokenizer.model: expected a SentencePiece model, it is broken or cut short") from exc
    if not pieces:
        raise ArtifactError("tokenizer.model: expected a SentencePiece model, it has no pieces")
    return pieces, scores, types, prefix


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Field numbers and values of one message: int for a varint, bytes else."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = _varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise IndexError(kind)
        if at + size > len(data):
            raise IndexError(at)
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7


def model_bytes(vocabulary: Vocabulary) -> bytes:
    """A ``tokenizer.model`` with these pieces; what GGUF does not carry (training options) is left out."""

    def varint(value: int) -> bytes:
        out = bytearray()
        while value > 127:
            out.append(value & 127 | 128)
            value >>= 7
        return bytes([*out, value])

    out = bytearray()
    for text, score, kind in zip(vocabulary.pieces, vocabulary.scores, vocabulary.types, strict=True):
        raw = text.encode("utf-8")
        own = b"\x0a" + varint(len(raw)) + raw + b"\x15" + struct.pack("<f", score) + b"\x18" + varint(kind)
        out += b"\x0a" + varint(len(own)) + own
    normalizer = b"\x18" + varint(int(vocabulary.space_prefix))
    trainer = b"\x18\x02"  # model_type = BPE
    return bytes(out + b"\x12" + varint(len(trainer)) + trainer + b"\x1a" + varint(len(normalizer)) + normalizer)
