"""Text to pooled int8 rows: WordPiece ids and the static embedding table.

Token ids are those of the ``tokenizers`` library on the same vocabulary, for any text. The compiled kernel cuts it
(``native/src/wordpiece.c``); what it leaves to the library (33 combining marks in a row, a special token that the
vocabulary lacks) has not been seen outside tests, so the library, which brings its own copy of the vocabulary, is
loaded only then. Where nothing is compiled a cache stands in front of the library: BERT's pre-tokeniser splits at white
space (and around each punctuation mark), and WordPiece then works on one word at a time, so the ids of a plain text are
those of its pieces. Everything else (accents, CJK, control characters, a literal ``[MASK]``) goes through the library.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from whetherman_edge.kernels import Kernels, load
from whetherman_edge.router.artifact import Artifact, fault, open_artifact

if TYPE_CHECKING:
    from tokenizers import Tokenizer

I8Matrix = npt.NDArray[np.int8]
I32Vector = npt.NDArray[np.int32]
F32Vector = npt.NDArray[np.float32]


DEFAULT_PATH: Final = Path(__file__).resolve().parent.parent / "artifacts" / "router.safetensors"
PATH_VARIABLE: Final = "WHETHERMAN_ROUTER"
SPECIALS: Final = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
TOKENS_MAX: Final = 512  # a long message says what it is about in its first 300 words; keeps new text under 1 ms
CHARS_PER_TOKEN_MAX: Final = 16  # text is cut to this many characters a token first: bounds time on one endless word
CHUNKS_CACHED_MAX: Final = 16_384  # about 3 MB; cleared when full, which costs some 10 us a piece to refill
CHUNK_CHARS_CACHED_MAX: Final = 40  # longer ones are URLs, paths and encoded data, which do not come again

_NOT_PLAIN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\[(?:PAD|UNK|CLS|SEP|MASK)\]")


def chunks_of(text: str) -> list[str] | None:
    """Lower-case pieces of ``text`` between white space; None when only the library can say where tokens end."""
    if not text.isascii():
        return None
    if not (text.isprintable() and "[" not in text) and _NOT_PLAIN.search(text):  # the first test is the cheap one
        return None
    return text.lower().split()


def library_tokenizer(vocabulary: bytes) -> Tokenizer:
    """The `tokenizers` WordPiece for a newline-separated vocabulary, as potion's tokenizer.json configures it."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordPiece
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import BertPreTokenizer

    tokens = vocabulary.decode("utf-8").split("\n")
    tokenizer = Tokenizer(
        WordPiece({t: i for i, t in enumerate(tokens)}, unk_token="[UNK]", max_input_chars_per_word=100)
    )
    tokenizer.normalizer = BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=None, lowercase=True
    )
    tokenizer.pre_tokenizer = BertPreTokenizer()
    tokenizer.add_special_tokens(list(SPECIALS))
    return tokenizer


class RouterTable:
    """The mapped table and its tokenizer. One per process; not thread-safe to first use of a word (a dict insert)."""

    def __init__(self, artifact: Artifact, kernels: Kernels) -> None:
        self.artifact = artifact
        self.kernels = kernels
        self.rows: I8Matrix = artifact.array("table", "I8", 2)
        self.vocab_size, self.dim = self.rows.shape
        vocabulary = artifact.array("vocab", "U8", 1)
        n_lines = np.count_nonzero(vocabulary == ord("\n")) + 1
        if n_lines != self.vocab_size:
            raise fault(artifact.path, f"vocabulary and table differ in length ({self.vocab_size} rows)")
        self._chunks: dict[str, tuple[int, ...]] = {}
        self._loaded: Tokenizer | None = None
        self._pieces = kernels.gate.wordpiece_into if kernels.gate is not None else None
        if kernels.gate is None:
            self._library  # noqa: B018  # a bad vocabulary shows itself now
        else:
            self._offsets = np.zeros(self.vocab_size + 1, dtype=np.int32)
            self._slots = np.zeros(1 << (2 * self.vocab_size).bit_length(), dtype=np.int32)
            self._room = np.zeros(TOKENS_MAX, dtype=np.int32)
            lines = artifact.text("vocab").split(b"\n")
            if b"[UNK]" not in lines:
                raise fault(artifact.path, "vocabulary cannot be read")
            kernels.gate.wordpiece_index_into(vocabulary, self.vocab_size, self._offsets, self._slots)
            self._vocabulary = (vocabulary.data, self._offsets, self._slots, lines.index(b"[UNK]"))

    @property
    def _library(self) -> Tokenizer:
        if self._loaded is None:
            try:
                self._loaded = library_tokenizer(self.artifact.text("vocab"))
            except Exception as exc:  # the library raises bare Exception for a bad vocabulary
                raise fault(self.artifact.path, "vocabulary cannot be read") from exc
        return self._loaded

    def wordpiece_tables(self) -> tuple[memoryview, I32Vector, I32Vector, int]:
        """What ``GateKernels.wordpiece_into`` takes behind the text: vocabulary, offsets, slots, id of [UNK].

        Only with compiled kernels.
        """
        return self._vocabulary

    @classmethod
    def open(cls, path: Path | str | None = None, kernels: Kernels | None = None) -> RouterTable:
        """Open ``path``, else $WHETHERMAN_ROUTER, else the packaged file. Raises ArtifactError."""
        chosen = path or os.environ.get(PATH_VARIABLE) or DEFAULT_PATH
        return cls(open_artifact(chosen), kernels or load())

    @property
    def sha256(self) -> str:
        """Hex sha256 of the artifact file."""
        return self.artifact.sha256

    def token_list(self, text: str, tokens_max: int = TOKENS_MAX) -> list[int]:
        """WordPiece ids of ``text`` without special tokens, at most ``tokens_max``."""
        if len(text) > tokens_max * CHARS_PER_TOKEN_MAX:
            text = text[: tokens_max * CHARS_PER_TOKEN_MAX]
        if self._pieces is not None:
            if tokens_max > len(self._room):
                self._room = np.zeros(tokens_max, dtype=np.int32)
            count = self._pieces(text.encode(errors="replace"), *self._vocabulary, self._room)
            if count is not None:
                ids: list[int] = self._room.data[: min(count, tokens_max)].tolist()
                return ids
        chunks = chunks_of(text)
        if chunks is None:
            return self._library_ids(text)[:tokens_max]
        ids = []
        known = self._chunks
        for chunk in chunks:
            found = known.get(chunk)
            ids += self._learn(chunk) if found is None else found
        return ids if len(ids) <= tokens_max else ids[:tokens_max]

    def token_ids(self, text: str, tokens_max: int = TOKENS_MAX) -> I32Vector:
        """As ``token_list``, an int32 array (n,)."""
        return np.array(self.token_list(text, tokens_max), dtype=np.int32)

    def pooled(self, text: str) -> I32Vector:
        """Sum of the rows of ``text``'s tokens: (dim,) int32, zero for an empty text."""
        return self.kernels.pool_i8(self.rows, self.token_ids(text))

    def vector(self, text: str) -> F32Vector:
        """``pooled`` at unit length: (dim,) float32, zero for an empty text."""
        pooled = self.pooled(text).astype(np.float64)
        norm = float(np.sqrt(pooled @ pooled))
        return (pooled / norm if norm else pooled).astype(np.float32)

    def _learn(self, chunk: str) -> tuple[int, ...]:
        """Ids of a piece not met before.

        One call a piece: the library's batch calls hand work to a thread pool, which costs more than it saves here.
        """
        ids = tuple(self._library_ids(chunk))
        if len(chunk) <= CHUNK_CHARS_CACHED_MAX:
            if len(self._chunks) >= CHUNKS_CACHED_MAX:
                self._chunks.clear()
            self._chunks[chunk] = ids
        return ids

    def _library_ids(self, text: str) -> list[int]:
        if not text.isascii():
            text = text.encode(errors="replace").decode()  # the library refuses half a surrogate pair
        return self._library.encode(text, add_special_tokens=False).ids
