"""native/src/wordpiece.c: the library's ids for any Unicode text, and without the library."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whetherman_edge.kernels import GateKernels, load
from whetherman_edge.router.table import SPECIALS, RouterTable, library_tokenizer

pytestmark = pytest.mark.native

SURROGATES = range(0xD800, 0xE000)
# In these every character is a token of its own, so the ids spell what the normaliser made of a text.
SPELLED = [*range(0x21, 0xD800), *range(0xE000, 0x20000), *range(0x2F800, 0x2FA20), *range(0xE0000, 0xE0200)]
SENTENCES = [
    "今天北京的天气怎么样？请帮我查一下明天的航班。",
    "日本語のテキスト、カタカナと ひらがな。ﾊﾝｶｸ ﾃｷｽﾄ",
    "안녕하세요, 오늘 서울 날씨를 알려 주세요. 한글 각",
    "ما هو الطقس في القاهرة اليوم؟ كِتَابٌ",
    "आज दिल्ली में मौसम कैसा है? कृपया बताइए।",
    "วันนี้อากาศที่กรุงเทพเป็นอย่างไร",
    "Где находится ближайшая аптека? Ёлка, йод",
    "Quelle est la météo à Zürich ? L’été, ÇA coûte 5 €",
    "Αθήνα: ΠΟΙΟΣ είναι ο καιρός; ᾧ ΐ",
    "İstanbul'da hava nasıl? IĞDIR",
    "Việt Nam: thời tiết ở Hà Nội thế nào? ắ ộ",
    "👩‍👩‍👧‍👦 🇳🇴 ✌🏽 ☃️ e\u0301\u0323 a\u0308\u0301 \u200bzero\u200dwidth\ufeff",
    "tab\there\r\n\x0bvt \x1f \x7f \x00 \ufffd soft\u00adhyphen nb\u00a0sp\u3000ideographic",
    "[MASK][mask] [PAD]x [CLS [SEP]. ##ing 中[UNK]文",
    "𝅘𝅥𝅮 𝒜𝓑 ﬁ ½ № ℡ ℌ Å K",
    "a" * 99 + "é " + "b" * 100 + "é " + "ü" * 100 + " " + "ü" * 101,
    "…dots… - … end …",
]
SCRIPTS = [
    *((0x00, 0x20), (0x20, 0x7F), (0x80, 0x250), (0x250, 0x370), (0x370, 0x590), (0x590, 0x900), (0x900, 0xE00)),
    *((0xE00, 0x1100), (0x1100, 0x1200), (0x1200, 0x1E00), (0x1E00, 0x2000), (0x2000, 0x2C00), (0x2C00, 0x3400)),
    *((0x4E00, 0x4F00), (0xA000, 0xAC00), (0xAC00, 0xD7B0), (0xF900, 0xFB00), (0xFB00, 0x10000), (0x10000, 0x12000)),
    *((0x1D100, 0x1D250), (0x1E000, 0x1F000), (0x1F300, 0x1FB00), (0xE0000, 0xE0200)),
]


class Pair:
    """One vocabulary, cut by the kernel and by the library."""

    def __init__(self, kernels: GateKernels, tokens: list[str]) -> None:
        vocabulary = "\n".join(tokens).encode()
        self._cut = kernels.wordpiece_into
        self._offsets = np.zeros(len(tokens) + 1, np.int32)
        self._slots = np.zeros(1 << (2 * len(tokens)).bit_length(), np.int32)
        kernels.wordpiece_index_into(vocabulary, len(tokens), self._offsets, self._slots)
        self._vocabulary = vocabulary
        self._room = np.zeros(1 << 14, np.int32)
        self._library = library_tokenizer(vocabulary)

    def native(self, text: str) -> list[int] | None:
        count = self._cut(text.encode(), self._vocabulary, self._offsets, self._slots, 1, self._room)
        return None if count is None else self._room[:count].tolist()

    def library(self, text: str) -> list[int]:
        return self._library.encode(text, add_special_tokens=False).ids

    def check(self, text: str) -> None:
        assert self.native(text) == self.library(text), ascii(text)


@pytest.fixture(scope="module")
def gate() -> GateKernels:
    gate = load("best").gate
    assert gate is not None
    return gate


@pytest.fixture(scope="module")
def spelled(gate: GateKernels) -> Pair:
    letters = [chr(code) for code in SPELLED]
    return Pair(gate, [*SPECIALS, *letters, *["##" + letter for letter in letters]])


@pytest.fixture(scope="module")
def shipped() -> RouterTable:
    return RouterTable.open()


def codes() -> Iterator[int]:
    """Every code point of the planes that have characters, some of each other plane."""
    for code in range(0x110000):
        if code not in SURROGATES and (code >> 16 in (0, 1, 2, 14) or code % 61 == 0):
            yield code


def test_every_character_gets_the_library_s_ids(spelled: Pair) -> None:
    every = list(codes())
    for start in range(0, len(every), 256):
        part = every[start : start + 256]
        spelled.check(" ".join([f"a{chr(code)}b" for code in part]))
        spelled.check("".join(map(chr, part)))


def test_marks_are_put_in_order_as_the_library_does(spelled: Pair) -> None:
    marks = [*range(0x11440, 0x11448), *range(0x1D165, 0x1D170), *range(0x1E000, 0x1E010), 0x300, 0x5B4, 0x94D, 0x1DF5]
    for one in marks:
        for other in marks:
            spelled.check("a" + "".join(map(chr, (one, other, one, 0x1D165, other))) + "b")
            spelled.check("".join(map(chr, (other, 0x200B, one, 0x903, other, 0x4E2D, one))))


@pytest.mark.parametrize("text", SENTENCES)
def test_sentences_get_the_library_s_ids(spelled: Pair, shipped: RouterTable, text: str) -> None:
    for spelling in (text, text.upper(), text[::-1], text.replace(" ", "")):
        spelled.check(spelling)
        expected = shipped._library.encode(spelling, add_special_tokens=False).ids[:512]
        assert shipped.token_list(spelling) == expected


def test_mixtures_of_scripts_get_the_library_s_ids(spelled: Pair) -> None:
    draw = random.Random(20261130)
    odd = [
        "[MASK]",
        "[UNK",
        " ",
        "\n",
        "\u0301",
        "\u0323\u0301",
        "\u05b4",
        "\u0e49",
        "x" * 101,
        "\u1161\u11a8",
        "\u200d",
    ]
    for _ in range(5_000):
        letters = []
        for _ in range(draw.randrange(1, 50)):
            code = draw.randrange(*draw.choice(SCRIPTS))
            letters.append(draw.choice(odd) if draw.random() < 0.2 or code in SURROGATES else chr(code))
        spelled.check("".join(letters))


@settings(deadline=None, max_examples=500)
@given(st.text(max_size=60))
def test_any_text_gets_the_library_s_ids(spelled: Pair, shipped: RouterTable, text: str) -> None:
    spelled.check(text)
    assert shipped.token_list(text) == shipped._library.encode(text, add_special_tokens=False).ids[:512]


def test_few_ids_are_the_first_ones(shipped: RouterTable) -> None:
    for text in SENTENCES:
        for n in (0, 1, 5):
            assert (
                shipped.token_list(text, n) == shipped._library.encode(text[: 16 * n], add_special_tokens=False).ids[:n]
            )


def test_what_is_left_to_the_library(spelled: Pair, gate: GateKernels, shipped: RouterTable) -> None:
    endless = "a" + "\U0001d165" * 33
    assert spelled.native(endless) is None
    assert shipped.token_list(endless) == shipped._library.encode(endless, add_special_tokens=False).ids
    assert spelled.native("a" + "\U0001d165" * 32) == spelled.library("a" + "\U0001d165" * 32)
    few = Pair(gate, ["[PAD]", "[UNK]", "a"])
    assert few.native("a [MASK]") is None
    assert few.native("a [PAD] [PAD") == few.library("a [PAD] [PAD")


def test_half_a_surrogate_pair_is_a_question_mark(shipped: RouterTable) -> None:
    assert shipped.token_list("what \ud800 now") == shipped.token_list("what ? now")


def test_no_text_loads_the_library() -> None:
    script = (
        "import sys\n"
        "from whetherman_edge.router.table import RouterTable\n"
        "table = RouterTable.open()\n"
        f"for text in {SENTENCES!a}:\n"
        "    assert table.pooled(text).shape == (table.dim,)\n"
        "sys.exit('tokenizers' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
