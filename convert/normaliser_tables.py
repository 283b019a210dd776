"""``python -m convert.normaliser_tables``: what BERT's normaliser makes of each character, as native/src's C tables.

The router's tokens must be those of the ``tokenizers`` library, whose Unicode tables are of several ages: of 0.23 the
marks are those of Unicode 8, the combining classes of 9, the cases of 17. So the library itself is asked about each
code point; ``unicodedata`` (14 in Python 3.11) only names the combining classes, which the library is asked to confirm.
Hangul syllables are left out: arithmetic takes them apart. ``tests/router/test_normaliser.py`` holds the tables against
the library installed.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import tokenizers
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

PATH: Final = Path(__file__).resolve().parent.parent / "native" / "src" / "normaliser_tables.h"
# Kinds of characters, the low 3 bits of an action; the rest is its payload. enum wh_character says what each is for.
WORD, PUNCTUATION, NOTHING, STARTER_GONE, SPACE, MAPPED, MARK, SEQUENCE = range(8)
HANGUL: Final = range(0xAC00, 0xD7A4)
SURROGATES: Final = range(0xD800, 0xE000)
BLOCK_BITS, GROUP_BITS = 6, 5
LINE: Final = 118


class Library:
    """The two functions of the library that decide where a token can begin and end."""

    def __init__(self) -> None:
        self.normalise = BertNormalizer(
            clean_text=True, handle_chinese_chars=True, strip_accents=None, lowercase=True
        ).normalize_str
        self._split = BertPreTokenizer().pre_tokenize_str

    def is_punctuation(self, character: str) -> bool:
        """Whether the character is a word of its own."""
        return len(self._split(f"a{character}b")) == 3


def actions(library: Library) -> tuple[list[int], list[tuple[int, ...]]]:
    """The action of each code point, and the sequences that SEQUENCE points to."""
    found: list[int] = []
    sequences: list[tuple[int, ...]] = []
    for code in range(sys.maxunicode + 1):
        if code in SURROGATES:
            found.append(NOTHING)
        elif code in HANGUL:
            found.append(WORD)
        else:
            found.append(_action(library, code, sequences))
    classes = combining_classes(library, found)
    for code, combining in classes.items():
        assert found[code] == WORD, f"U+{code:04X}: a mark that is moved must be part of a word"
        found[code] = MARK | combining << 3
    probes = chr(max(classes, key=lambda code: classes[code])), chr(min(classes, key=lambda code: classes[code]))
    for code, action in enumerate(found):
        if action == NOTHING and code not in SURROGATES:
            high, low = probes
            if library.normalise(high + chr(code) + low) == high + low:
                found[code] = STARTER_GONE
    for code, action in enumerate(found):  # what comes out of the tables must come out of them unchanged
        for made in made_of(code, action, sequences):
            again = made_of(made, found[made], sequences)
            assert again == (made,), f"U+{code:04X} becomes U+{made:04X}, which becomes {again}"
    return found, sequences


def _action(library: Library, code: int, sequences: list[tuple[int, ...]]) -> int:
    made = library.normalise(chr(code))
    if made in ("", " "):
        return SPACE if made else NOTHING
    is_ideograph = made[0] == " "
    made = made.strip(" ")
    if len(made) > 1:
        assert not is_ideograph
        sequences.append(tuple(map(ord, made)))
        return SEQUENCE | (len(sequences) - 1) << 3
    if ord(made) == code and not is_ideograph:
        return PUNCTUATION if library.is_punctuation(made) else WORD
    return MAPPED | ((ord(made) - code) * 2 + is_ideograph) << 3


def combining_classes(library: Library, found: Sequence[int]) -> dict[int, int]:
    """Canonical combining classes of the characters that the library moves: those left in and not of class 0."""
    named = {code: unicodedata.combining(chr(code)) for code, action in enumerate(found) if action == WORD}
    candidates = {code: combining for code, combining in named.items() if combining}
    moved: set[int] = set()
    for one in candidates:
        for other in candidates:
            apart = library.normalise(chr(one) + chr(other))
            swapped = apart == chr(other) + chr(one) and one != other
            if swapped:
                assert candidates[one] > candidates[other], f"U+{one:04X} and U+{other:04X}: of other classes than ours"
                moved |= {one, other}
    return {code: candidates[code] for code in sorted(moved)}


def made_of(code: int, action: int, sequences: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The code points that an action puts in place of ``code``."""
    kind, payload = action & 7, action >> 3
    if kind == MAPPED:
        return (code + (payload >> 1),)
    if kind == SEQUENCE:
        return sequences[payload]
    return () if kind in (NOTHING, STARTER_GONE, SPACE) else (code,)


def stages(values: Sequence[int]) -> tuple[list[int], list[int], list[int], list[int]]:
    """``values`` as groups of blocks of places of distinct values: four tables."""
    distinct: dict[int, int] = {}
    blocks: dict[tuple[int, ...], int] = {}
    groups: dict[tuple[int, ...], int] = {}
    places = [distinct.setdefault(value, len(distinct)) for value in values]
    block_at = [blocks.setdefault(part, len(blocks)) for part in _parts(places, 1 << BLOCK_BITS)]
    group_at = [groups.setdefault(part, len(groups)) for part in _parts(block_at, 1 << GROUP_BITS)]
    return group_at, [i for part in groups for i in part], [i for part in blocks for i in part], list(distinct)


def _parts(values: Sequence[int], size: int) -> Iterator[tuple[int, ...]]:
    for start in range(0, len(values), size):
        yield tuple(values[start : start + size])


def header() -> str:
    """The whole file."""
    found, sequences = actions(Library())
    group_at, groups, blocks, distinct = stages(found)
    assert max(group_at) < 256
    assert max(groups) < 65536
    longest = max(map(len, sequences))
    padded = [code for sequence in sequences for code in (*sequence, *[0] * (longest - len(sequence)))]
    tables = [
        ("static const uint8_t character_group", group_at),
        ("static const uint16_t character_block", groups),
        ("static const uint16_t character_place", blocks),
        ("static const int32_t character_action", distinct),
        ("static const int32_t character_sequence", padded),
    ]
    lines = [
        "/* Made by `python -m convert.normaliser_tables` from tokenizers " + tokenizers.__version__ + ": do not edit.",
        " * See wordpiece.c for what the tables say. */",
        "#ifndef WH_NORMALISER_TABLES_H",
        "#define WH_NORMALISER_TABLES_H",
        "",
        "#include <stdint.h>",
        "",
        f"#define CHARACTER_BLOCK_BITS {BLOCK_BITS}",
        f"#define CHARACTER_GROUP_BITS {GROUP_BITS}",
        f"#define CHARACTER_SEQUENCE_MAX {longest}",
        "/* clang-format off */",
    ]
    for name, values in tables:
        lines += [f"{name}[{len(values)}] = {{", *_wrapped(values), "};"]
    return "\n".join([*lines, "/* clang-format on */", "#endif", ""])


def _wrapped(values: Sequence[int]) -> Iterator[str]:
    line = ""
    for value in values:
        piece = f"{value},"
        if len(line) + len(piece) > LINE:
            yield line
            line = ""
        line += piece
    yield line


def main() -> int:
    """Write the file; say how large its tables are."""
    PATH.write_text(header(), encoding="ascii")
    print(f"{PATH.name}: {PATH.stat().st_size} bytes, from tokenizers {tokenizers.__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
