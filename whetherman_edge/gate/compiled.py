"""The static gate on the compiled kernels: the same verdict as ``features`` and ``heads`` give, in a tenth of the time.

What a text or a tool list says is packed into a record once (``records``) and kept by the text or list; a request is
then one call that reads the records of its texts. ``features`` stays the specification, what the heads are trained on,
and what runs where nothing is compiled; ``tests/gate/test_compiled.py`` holds the two together.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np

from whetherman_edge.dialects.chat import ChatView, Message, Tool, ToolCall
from whetherman_edge.gate import records
from whetherman_edge.gate.features import (
    HEAD_CHARS,
    HISTORY_RESULTS_MAX,
    N_SCALARS,
    NAMES_CACHED_MAX,
    NGRAM_FIELDS,
    TAIL_CHARS,
    hashable,
    user_scalars,
)
from whetherman_edge.gate.heads import FIELD_SMOOTHING, DenseHead, NgramHead
from whetherman_edge.gate.outline import Outliner
from whetherman_edge.gate.records import EMPTY, SLOT_BYTES, SLOTS, VECTOR_AT
from whetherman_edge.gate.text_signals import (
    HEAD_CHARS_MAX,
    TAIL_CHARS_MAX,
    ResultSignals,
    TextReader,
    clip,
    literal_values,
    look_at_result,
    name_words,
)
from whetherman_edge.gate.tool_signals import ToolReader
from whetherman_edge.gate.verdict import Verdict
from whetherman_edge.kernels import GateKernels
from whetherman_edge.router.scorer import Scorer
from whetherman_edge.router.table import RouterTable
from whetherman_edge.router.tool_lru import ListLru

# Two generations of texts: what was used since the last change of generations stays. About 5 KB a text.
TEXTS_A_GENERATION: Final = 192
CALLS_READ_MAX: Final = 8  # of this turn, whose arguments are compared with the user's words
FAILED_READ_MAX: Final = 8
MASKS_KEPT_MAX: Final = 8  # of one tool list: as many dialogues as are kept
HOPS_KEPT_MAX: Final = 8  # of one result: it is rarely seen with more than one tool list
FAILED_CHARS: Final = 200
_WHOLE: Final = HEAD_CHARS_MAX + TAIL_CHARS_MAX
_NUMBERS: Final = struct.Struct("<16i")
_ROLES: Final = {"user": 0, "tool": 1}
_LIMITS: Final = {
    "assistant": slice(-TAIL_CHARS, None),
    "result": slice(HEAD_CHARS),
    "previous_user": slice(-TAIL_CHARS, None),
    "system": slice(HEAD_CHARS),
}


class Kept:
    """A text's record, and what was made of it on demand.

    ``filled``: bit s: n-gram slot s of the record is. ``failed``: its head speaks of a failure, None: not looked at.
    ``hops``: by tool list, for each tool how many of its required arguments, and identifiers among them, it names.
    """

    __slots__ = ("failed", "filled", "hops", "known", "record", "state", "state_bytes", "text")

    def __init__(self, text: str, record: bytearray) -> None:
        self.text = text
        self.record = record
        self.filled = 0
        self.failed: bool | None = None
        self.state: ResultSignals | None = None
        self.state_bytes = EMPTY
        self.hops: dict[bytes, bytes] | None = None
        self.known: bytes | None = None


class KeptTools:
    """A tool list's record and the slate's arrays, as ``gate_forward`` takes them."""

    __slots__ = ("_masks", "has_known", "identifiers", "index", "key", "names", "norms", "record", "required", "rows")

    def __init__(self, record: bytes, key: bytes) -> None:
        self.record = record
        self.key = key
        self.names: tuple[str, ...] = ()
        self.index: dict[str, int] = {}
        self.required: tuple[tuple[frozenset[str], ...], ...] = ()
        self.identifiers: tuple[tuple[frozenset[str], ...], ...] = ()
        self.rows: memoryview = memoryview(EMPTY)
        self.norms: memoryview = memoryview(EMPTY)
        self.has_known = False
        self._masks: dict[frozenset[str], bytes] = {}

    def mask(self, names: frozenset[str]) -> bytes:
        """``_mask`` of names called in earlier turns: a dialogue asks for the same ones on each step."""
        found = self._masks.get(names)
        if found is None:
            if len(self._masks) >= MASKS_KEPT_MAX:
                self._masks.clear()
            found = self._masks[names] = _mask(names, self)
        return found


_NO_TOOLS: Final = KeptTools(EMPTY, EMPTY)


class CompiledGate:
    """Verdicts by the compiled kernels. Holds caches of texts and tools; not shared between threads."""

    def __init__(
        self, scorer: Scorer, kernels: GateKernels, ngrams: NgramHead, dense: DenseHead, weights: bytes
    ) -> None:
        """``weights``: ``pack_weights`` of the same heads."""
        self._scorer = scorer
        self._forward = kernels.gate_forward
        self._ngram_fields = kernels.ngram_fields_into
        self._ngram_weights = ngrams.weights.data
        self._weights = weights
        self._projection = dense.projection
        self._reader = TextRecords(scorer.table, kernels, dense.projection.shape[2])
        self._texts = self._reader.texts
        self._tool_reader = ToolReader(self._texts)
        self._tools: ListLru[KeptTools] = ListLru()
        self._outliner = Outliner()
        self._pooled_at = VECTOR_AT + 4 * scorer.table.dim
        self._scratch = bytearray(1 << 14)
        self._scalars = bytearray(4 * N_SCALARS)
        self._name_share = lru_cache(maxsize=NAMES_CACHED_MAX)(self._share_of_name)

    @property
    def scalars(self) -> list[float]:
        """``features.SCALAR_NAMES`` of the last verdict."""
        return list(memoryview(self._scalars).cast("f"))

    def judge(self, chat: ChatView) -> Verdict:
        """As ``StaticGate.judge``."""
        outline = self._outliner.outline(chat.messages)
        kept, results = self._reader.kept, outline.results
        user, assistant = kept(outline.user), kept(outline.assistant)
        previous, system = kept(outline.previous), kept(_joined(outline.systems))
        result, state, hops, last_call = self._reader.empty, EMPTY, EMPTY, EMPTY
        tools = self._toolset(chat.tools, chat.toolset_key) if chat.tools else _NO_TOOLS
        n_last = outline.n_last_results
        last = results[-n_last:] if n_last else (results or outline.earlier_results)[-1:]
        if last:
            result = kept(last[0].text if len(last) == 1 else _joined([message.text for message in last]))
            state = result.state_bytes or self._look_at(result)
            if results and tools.names:
                hops = self._hops(result, tools)
        phase = 2 if n_last else 1 if outline.n_earlier_calls or outline.assistant else 0
        self._fill(user, phase, assistant, previous, system, result if results else None)
        called, is_called, n_names, n_distinct = self._reader.empty, EMPTY, 0, 0
        calls = outline.calls
        if calls:
            called = kept(" ".join([f"{call.name} {call.arguments}" for call in calls[-CALLS_READ_MAX:]]))
            n_names, n_distinct = _distinct(calls)
            is_called = _mask([call.name for call in calls], tools)
            if n_last:
                last_call = self._name_share("last_call", calls[-1].name)
        is_earlier = tools.mask(outline.earlier_names) if outline.earlier_names else EMPTY
        known = self._known(user) if tools.has_known else EMPTY
        now = [kept(message.text).record for message in results[-HISTORY_RESULTS_MAX:]]
        before = [kept(message.text).record for message in outline.earlier_results[-HISTORY_RESULTS_MAX:]]
        messages = chat.messages
        numbers = _NUMBERS.pack(
            len(messages),
            outline.n_user_turns,
            _ROLES.get(outline.last_role or "user", 2),
            len(calls),
            len(results),
            n_names,
            n_distinct,
            outline.n_earlier_calls,
            bool(outline.earlier_results),
            n_last,
            outline.before_user == "assistant",
            _has_media(messages),
            sum([self._failed(message) for message in results[-FAILED_READ_MAX:]]) if results else 0,
            phase,
            len(now),
            len(before),
        )
        probabilities, fused, tool, tool_probability = self._forward(
            *(self._weights, self._scratch, self._scalars, numbers, user.record, previous.record, assistant.record),
            *(system.record, result.record, called.record, state, hops, is_called, is_earlier, known, last_call),
            *(tools.record, tools.rows, tools.norms, *now, *before),
        )
        names = tools.names
        return Verdict(
            probabilities, "static", fused, names[tool] if names else "", tool_probability if names else 0.0, phase
        )

    def _fill(self, user: Kept, phase: int, assistant: Kept, previous: Kept, system: Kept, result: Kept | None) -> None:
        """See to it that each text has its n-gram share for the part it plays."""
        if not user.filled >> phase & 1:
            self._fill_user(user, phase)
        if not assistant.filled & 8:
            self._fill_slot(assistant, "assistant")
        if not previous.filled & 32:
            self._fill_slot(previous, "previous_user")
        if not system.filled & 64:
            self._fill_slot(system, "system")
        if result is not None and not result.filled & 16:
            self._fill_slot(result, "result")

    def _fill_slot(self, kept: Kept, name: str) -> None:
        slot = SLOTS[name]
        kept.filled |= 1 << slot
        if kept.text:
            self._share(kept.record, slot, [(name, 0, hashable(kept.text[_LIMITS[name]]))])

    def _fill_user(self, kept: Kept, phase: int) -> None:
        kept.filled |= 1 << phase
        text = kept.text
        if "?" in text:
            text = text.replace("?", " qmark ")  # punctuation is no word to the hash
        whole = hashable(text)
        words = whole.split()
        if not words:
            return
        first, last = b" ".join(words[:2]), b" ".join(words[-2:])
        fields = [("user", 0, whole), ("first_words", 0, first), ("last_words", 0, last), ("user_now", phase, whole)]
        self._share(kept.record, phase, fields)

    def _share(self, record: bytearray, slot: int, fields: Sequence[tuple[str, int, bytes]]) -> None:
        """Write the n-gram head's share of fields (name, what is added to its seed, text) into a slot of a record."""
        arguments: list[object] = []
        for name, phase, text in fields:
            seed, modes, weight = NGRAM_FIELDS[name]
            arguments += (text, seed + phase, modes, weight)
        at = records.NGRAMS_AT + slot * SLOT_BYTES
        self._ngram_fields(self._ngram_weights, record, at, FIELD_SMOOTHING, *arguments)

    def _share_of_name(self, name: str, tool: str) -> bytes:
        """The share of a tool's name in the field ``name``: four float64."""
        return bytes(self._shares_of_names(name, [tool]))

    def _shares_of_names(self, name: str, tools: Sequence[str]) -> bytearray:
        """The shares of tools' names in the field ``name``: (n, 4) float64."""
        shares = bytearray(SLOT_BYTES * len(tools))
        seed, modes, weight = NGRAM_FIELDS[name]
        for place, tool in enumerate(tools):
            words = hashable(name_words(tool))
            at = SLOT_BYTES * place
            self._ngram_fields(self._ngram_weights, shares, at, FIELD_SMOOTHING, words, seed, modes, weight)
        return shares

    def _look_at(self, kept: Kept) -> bytes:
        state = kept.state = look_at_result(kept.text)
        kept.state_bytes = struct.pack("<12f", *state.shape, *state.cues)
        return kept.state_bytes

    def _hops(self, result: Kept, tools: KeptTools) -> bytes:
        """(n, 2) uint8: how many required arguments, and identifiers, of each tool the result has a field for."""
        keys = result.state.keys if result.state is not None else frozenset()
        if not keys:
            return EMPTY
        if result.hops is None:
            result.hops = {}
        found = result.hops.get(tools.key)
        if found is None:
            if len(result.hops) >= HOPS_KEPT_MAX:
                result.hops.clear()
            lists = [arguments for pair in zip(tools.required, tools.identifiers, strict=True) for arguments in pair]
            counts = [min(255, sum([bool(words) and words <= keys for words in arguments])) for arguments in lists]
            found = result.hops[tools.key] = bytes(counts)
        return found

    def _failed(self, message: Message) -> bool:
        kept = self._reader.kept(message.text)
        if kept.failed is None:
            head = message.text[:FAILED_CHARS].lower()
            kept.failed = "error" in head or "fail" in head or "denied" in head or "not found" in head
        return kept.failed

    def _known(self, user: Kept) -> bytes:
        """Scores of the tools that everybody has, (n,) float64."""
        if user.known is None:
            pooled = np.frombuffer(user.record, dtype=np.int32, count=self._scorer.table.dim, offset=self._pooled_at)
            user.known = self._scorer.known_scores(user.text, pooled).tobytes()
        return user.known

    def knows(self, key: bytes) -> bool:
        """Whether the tool list of that key is kept."""
        return self._tools.get(key) is not None

    def prepare(self, tools: Sequence[Tool]) -> None:
        """Read some tools of a list ahead of ``judge``."""
        self._tool_reader.prepare(tools)

    def _toolset(self, tools: Sequence[Tool], key: bytes) -> KeptTools:
        found = self._tools.get(key)
        if found is not None:
            return found
        slate = self._scorer.slate(tools, key)
        signals = self._tool_reader.combined(tools, slate, key)
        shares = self._shares_of_names("next_tool", [tool.name for tool in signals.tools])
        record = records.pack_tools(signals, slate, shares, self._projection[2], self._projection[6])
        found = KeptTools(record, key)
        found.names = tuple([tool.name for tool in signals.tools])
        found.index = signals.index
        found.required = tuple([tool.required for tool in signals.tools])
        found.identifiers = tuple([tool.identifiers for tool in signals.tools])
        found.rows, found.norms = slate.rows.data, slate.norms.data
        found.has_known = len(slate.known_at) > 0
        room = 8 * (12 * slate.n_tools + len(slate.example_tool)) + 4 * 4096
        if len(self._scratch) < room:
            self._scratch = bytearray(room)
        return self._tools.put(key, found, len(tools))


class TextRecords:
    """Records of texts, kept by the clipped text in two generations."""

    def __init__(self, table: RouterTable, kernels: GateKernels, n_columns: int) -> None:
        self.texts = TextReader(table)
        self._record_into = kernels.text_record_into
        self._n_columns = n_columns
        stems = self.texts.stem_table
        self._tables = (*table.wordpiece_tables(), table.rows.data, stems.stem, stems.idf, table.dim)
        self._room = bytearray(records.text_room(table.dim, n_columns))
        self._young: dict[str, Kept] = {}
        self._old: dict[str, Kept] = {}
        self.empty = self._read("")
        self.empty.filled = -1

    def kept(self, text: str) -> Kept:
        """The record of any text; it is clipped first."""
        if not text:
            return self.empty
        if len(text) > _WHOLE:
            text = clip(text)
        found = self._young.get(text)
        if found is None:
            text = clip(text)
            found = self._old.get(text) or self._young.get(text) or self._read(text)
            if len(self._young) >= TEXTS_A_GENERATION:
                self._old, self._young = self._young, {}
            self._young[text] = found
        return found

    def _read(self, text: str) -> Kept:
        n_bytes = self._record_into(text.encode(), *self._tables, self._n_columns, self._room)
        if n_bytes is not None:
            return Kept(text, self._room[:n_bytes])
        signals = self.texts.uncached(text)
        return Kept(text, records.pack_text(signals, user_scalars(signals, literal_values(text)), self._n_columns))


def _joined(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else "\n".join([clip(text) for text in texts])


def _mask(names: Sequence[str] | frozenset[str], tools: KeptTools) -> bytes:
    """(n,) uint8: 1 for each offered tool among ``names``; empty when none is."""
    index = tools.index
    places = [index[name] for name in names if name in index]
    if not places:
        return EMPTY
    mask = bytearray(len(tools.names))
    for place in places:
        mask[place] = 1
    return bytes(mask)


def _distinct(calls: Sequence[ToolCall]) -> tuple[int, int]:
    """Numbers of distinct names and of distinct calls."""
    if len(calls) == 1:
        return 1, 1
    return len({call.name for call in calls}), len({(call.name, call.arguments) for call in calls})


def _has_media(messages: Sequence[Message]) -> bool:
    return any(message.n_media for message in messages[-3:])
