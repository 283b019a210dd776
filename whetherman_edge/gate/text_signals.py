"""What one text says about itself: a dense vector, weighted word stems, literal values and plain counts.

A text is looked at once: the result is immutable and cached by the text, so a 20-turn history costs nothing on the
next request. Texts are cut before anything else looks at them (``clip``); the limits below bound the worst case.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from whetherman_edge.router.fields import FieldReader
from whetherman_edge.router.lexical import Stems, StemTable
from whetherman_edge.router.table import RouterTable

F32Vector = npt.NDArray[np.float32]
I32Vector = npt.NDArray[np.int32]

# A request stands at the front or at the end of what was pasted; a result's status stands at its front, its cursor at
# its end. 1,800 characters are about 450 tokens, 0.2 ms of work the first time a text is seen.
HEAD_CHARS_MAX: Final = 1200
TAIL_CHARS_MAX: Final = 600
TOKENS_MAX: Final = 384
NAMES_CACHED_MAX: Final = 1024  # every other tool has a query and a limit
TEXTS_CACHED_MAX: Final = 512  # about 8 KB each

_WORD = re.compile(r"[^\W_]+")
_QUOTED = re.compile(r"\"[^\"\n]{1,80}\"|`[^`\n]{1,80}`|«[^»\n]{1,80}»|“[^”\n]{1,80}”|「[^」\n]{1,80}」")
_EDGES: Final = ".,;:!?()[]{}<>\"'`“”«»„…、。，！？「」*"
_KEY = re.compile(r"\"(\w+)\"\s*:|\b([a-z]\w+)[:=]")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
QUESTION_MARKS: Final = ("?", "？", "؟")

# Words by which an API result tells its state. API results are English nearly everywhere; other languages are left to
# the hashed n-grams.
_CUES: Final = tuple(
    frozenset(words.split())
    for words in (
        """error errors failed failure fail exception traceback invalid refused fatal cannot denied forbidden
        unauthorized unavailable timeout missing rejected 400 401 403 404 409 422 429 500 502 503 504 econnreset
        etimedout""",
        """retry retryable temporarily temporary timeout timed busy reset lock locked again 429 502 503 504 econnreset
        etimedout unavailable overloaded throttled""",
        """denied forbidden unauthorized permission policy unsupported disabled suspended revoked expired readonly
        allowed permitted 401 403 scope blocked quota""",
        "next cursor page pages more truncated offset total continue remaining has_more pagetoken token partial",
        """pending running queued progress processing started accepted building waiting scheduled provisioning eta
        in_progress pct percent""",
        "ok success successful done created updated deleted sent saved complete completed finished true booked added",
        "none null empty no zero 0 nothing found unknown unmatched",
    )
)
N_CUES: Final = len(_CUES)
CUE_NAMES: Final = ("error", "retry", "denied", "page", "pending", "ok", "empty")


class Embedded:
    """A vector, and what was computed from it before: ``memo`` belongs to whoever looks at it, by key.

    vector: (dim,) float32 of length 1, or zeros where there is nothing to say. ``is_empty``: it is zeros.
    """

    __slots__ = ("is_empty", "memo", "vector")

    def __init__(self, vector: F32Vector, is_empty: bool) -> None:
        self.vector = vector
        self.is_empty = is_empty
        self.memo: dict[Any, Any] = {}

    def dot(self, other: Embedded) -> float:
        """Cosine of the two; 0.0 where one is empty."""
        if self.is_empty or other.is_empty:
            return 0.0
        return float(np.dot(self.vector, other.vector))


class TextSignals(Embedded):
    """Everything the gate keeps of one text; never changed after it is made, but for ``memo``.

    ``text``: the text after ``clip``; ``lower``: the same in lower case. ``stems``: stem class -> weight of its content
    words, ``weight`` their sum. ``pooled``: (dim,) int32, the sum of its table rows, which the router takes too.
    """

    __slots__ = ("lower", "n_tokens", "pooled", "stems", "text", "weight")

    def __init__(self, text: str, table: RouterTable, stem_table: StemTable) -> None:
        ids = table.token_list(text, TOKENS_MAX)
        pooled = table.kernels.pool_i8(table.rows, np.array(ids, dtype=np.int32))
        vector = pooled.astype(np.float32)
        square = float(np.dot(vector, vector))
        if square:
            vector *= np.float32(1.0 / math.sqrt(square))
        super().__init__(vector, not square)
        self.text = text
        self.lower = text.lower()
        self.pooled: I32Vector = pooled
        self.stems: Stems = stem_table.weights(ids)
        self.weight: float = sum(self.stems.values())
        self.n_tokens = len(ids)

    def covered_by(self, stems: Stems) -> float:
        """Share of this text's content, by weight, that stands in ``stems``; 0.0 for a text without content."""
        if not self.weight or not stems:
            return 0.0
        return sum([w for s, w in self.stems.items() if s in stems]) / self.weight


class ResultSignals(msgspec.Struct, frozen=True, gc=False):
    """What a tool result says about its own state.

    ``cues``: N_CUES floats, 1.0 where a word of that cue stands in the text. ``keys``: words of its field names.
    ``shape``: (is object, is array, log items, log characters, is blank).
    """

    cues: tuple[float, ...]
    keys: frozenset[str]
    shape: tuple[float, float, float, float, float]


class TextReader:
    """Signals of texts, cached. Not shared between threads."""

    def __init__(self, table: RouterTable) -> None:
        self._table = table
        self.stem_table = StemTable(table.artifact, table.vocab_size)
        self._fields = FieldReader(table, self.stem_table)
        self._texts: OrderedDict[str, TextSignals] = OrderedDict()
        self._results: OrderedDict[str, ResultSignals] = OrderedDict()
        self.empty = TextSignals("", table, self.stem_table)

    def signals(self, text: str) -> TextSignals:
        """Signals of any text; it is clipped first."""
        if not text:
            return self.empty
        clipped = clip(text)
        found = self._texts.get(clipped)
        if found is not None:
            self._texts.move_to_end(clipped)
            return found
        found = self._texts[clipped] = TextSignals(clipped, self._table, self.stem_table)
        if len(self._texts) > TEXTS_CACHED_MAX:
            self._texts.popitem(last=False)
        return found

    def uncached(self, text: str) -> TextSignals:
        """Signals of a text that is clipped already, for a caller that keeps what it makes of them."""
        return TextSignals(text, self._table, self.stem_table)

    def result(self, text: str) -> ResultSignals:
        """Signals of a tool result; it is clipped first."""
        clipped = clip(text)
        found = self._results.get(clipped)
        if found is not None:
            self._results.move_to_end(clipped)
            return found
        found = self._results[clipped] = look_at_result(clipped)
        if len(self._results) > TEXTS_CACHED_MAX:
            self._results.popitem(last=False)
        return found

    def stems(self, texts: Sequence[str]) -> list[Stems]:
        """Weighted stems of short texts, not cached here."""
        return [stems for _, stems in self._fields.fields(texts, TOKENS_MAX)]


def clip(text: str) -> str:
    """At most HEAD_CHARS_MAX + TAIL_CHARS_MAX characters of ``text``, its front and its end.

    Lone surrogates (legal in JSON escapes, illegal in UTF-8) become "?", so that every later step may encode.
    """
    if len(text) > HEAD_CHARS_MAX + TAIL_CHARS_MAX:
        text = text[:HEAD_CHARS_MAX] + " … " + text[-TAIL_CHARS_MAX:]
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


@lru_cache(maxsize=NAMES_CACHED_MAX)
def name_words(name: str) -> str:
    """A tool or argument name as words: ``camelCase``, ``snake_case`` and ``dotted.names`` are split."""
    return " ".join(_WORD.findall(name if name.islower() else _CAMEL.sub(" ", name)))


def literal_values(text: str) -> frozenset[str]:
    """Lower-case literal values of a text: numbers, ids, paths, addresses, quoted spans, capitalised words.

    A capitalised first word is not one: it starts the sentence.
    """
    found: list[str] = []
    for at, token in enumerate(text.split()):
        if token.islower() and token.isalpha():
            continue
        bare = token.strip(_EDGES)
        if not bare:
            continue
        if bare.isalpha():
            if at and bare[0].isupper():
                found.append(bare.lower())
        elif "/" in bare or "@" in bare or "_" in bare or any(map(str.isdigit, bare)) or (at and bare[0].isupper()):
            found.append(bare.lower())
    if '"' in text or "`" in text or not text.isascii():
        found += [match.group()[1:-1].lower() for match in _QUOTED.finditer(text)]
    return frozenset(found)


def n_numbers(values: frozenset[str]) -> int:
    """How many literal values hold a digit."""
    return sum([not value.isalpha() and any(map(str.isdigit, value)) for value in values])


def look_at_result(text: str) -> ResultSignals:
    """Signals of a tool result, not cached; ``text`` is clipped already."""
    stripped = text.strip()
    lower = _CAMEL.sub(" ", stripped).lower()
    words = frozenset(_WORD.findall(lower)) | frozenset(re.findall(r"\w+", lower))
    keys = " ".join([a or b for a, b in _KEY.findall(stripped)])
    items = stripped.count("},") + 1 if stripped[:1] in ("{", "[") else stripped.count("\n") + 1
    blank = stripped in ("", "[]", "{}", "null", '""', "None")
    return ResultSignals(
        cues=tuple(1.0 if words & cue else 0.0 for cue in _CUES),
        keys=frozenset(name_words(keys).lower().split()),
        shape=(
            float(stripped[:1] == "{"),
            float(stripped[:1] == "["),
            math.log1p(0 if blank else items),
            math.log1p(len(stripped)),
            float(blank or "[]" in stripped[:200]),
        ),
    )
