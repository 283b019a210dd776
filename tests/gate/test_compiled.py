"""gate.compiled, records and outline: the compiled path gives the verdicts of features and heads."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from convert.gate_data import read_dialogues
from tests.gate.chats import WEATHER, calls, chat_of, result, says, system, tool, user
from whetherman_edge.dialects.chat import ChatView, Message
from whetherman_edge.dialects.openai_chat import view
from whetherman_edge.dialects.tool_cache import ToolCache
from whetherman_edge.gate.compiled import HOPS_KEPT_MAX, TEXTS_A_GENERATION, CompiledGate
from whetherman_edge.gate.features import SCALAR_NAMES, user_scalars
from whetherman_edge.gate.outline import DIALOGUES_KEPT_MAX, Outliner
from whetherman_edge.gate.records import VECTOR_AT, pack_text
from whetherman_edge.gate.static_gate import StaticGate
from whetherman_edge.gate.text_signals import clip, literal_values
from whetherman_edge.kernels import load
from whetherman_edge.router.scorer import Scorer
from whetherman_edge.router.table import RouterTable

# Sums of float products in another order; the bound of native/include/wh_gate.h.
TOLERANCE = 1e-6

pytestmark = pytest.mark.native


def gate_of(isa: str) -> StaticGate:
    kernels = load(isa)
    return StaticGate.open(Scorer(RouterTable.open(None, kernels), kernels), kernels, None)


@pytest.fixture(scope="module")
def gate() -> StaticGate:
    return gate_of("best")


@pytest.fixture(scope="module")
def serial() -> StaticGate:
    return gate_of("serial")


def compiled(gate: StaticGate) -> CompiledGate:
    assert gate._compiled is not None
    return gate._compiled


def check(gate: StaticGate, chat: ChatView) -> None:
    """Both paths agree in every scalar, in the verdict and in the tool."""
    got = gate.judge(chat)
    scalars = compiled(gate).scalars
    expected = gate.judge_by_reference(chat)
    reference = gate.extractor.extract(chat).scalars.tolist()
    for name, one, other in zip(SCALAR_NAMES, scalars, reference, strict=True):
        assert one == pytest.approx(other, abs=5e-6, rel=5e-6), name
    assert got.fused[:4] == pytest.approx(expected.fused[:4], abs=TOLERANCE)
    assert got.probabilities == pytest.approx(expected.probabilities, abs=TOLERANCE)
    assert (got.tool, got.phase, got.engine, got.fallback) == (expected.tool, expected.phase, "static", False)
    assert got.tool_probability == pytest.approx(expected.tool_probability, abs=TOLERANCE)


@pytest.mark.parametrize("name", ["gate_dev", "gate_dev3"])
def test_all_prefixes_of_our_dialogues_get_the_reference_verdict(gate: StaticGate, name: str) -> None:
    cache = ToolCache()
    n = 0
    for item in read_dialogues(name):
        messages = item["request"]["messages"]
        for end in {i + 1 for i, message in enumerate(messages) if message["role"] != "assistant"}:
            check(gate, view(json.dumps(item["request"] | {"messages": messages[:end]}).encode(), cache))
            n += 1
    assert n > 100


SEARCH = tool("web_search", "Search the web.", required=("query",))
DELETE = tool("deleteOrder", "Delete an order.", required=("order_id", "customerId"), note="string")
LONG = "The report said that nothing had changed. " * 80


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [user("")],
        [user("   \n ")],
        [system("Be brief."), user("hi")],
        [user("Größe in cm für café-Tür №5, “zitiert” bitte？")],
        [user("你好，天气怎么样？"), says("哪个城市？"), user("奥斯陆")],
        [user('\x01control [MASK] and [UNK] `quoted` "also" b@c.d /path/x1')],
        [user(LONG + "Delete order 17-B, please"), says(LONG)],
        [user("x" * 3000)],
        [user("delete order A17"), calls("deleteOrder", {"order_id": "A17"}), result('{"error": "not found"}')],
        [user("delete A17"), calls("web_search", {"q": "A17"}), result('{"order_id": 3, "customerId": "C-9"}')],
        [
            *(user("delete A17"), calls("web_search"), result("[]"), calls("web_search"), result("[]")),
            *(says("None. Which one?"), user("the old one"), calls("deleteOrder"), result("denied")),
        ],
        [says("Hello?"), result("orphan"), result("ünïcode orphan")],
        [user("call get_weather"), calls("unknown_tool"), result("ok"), system("late"), user("and now?")],
        [user([{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": "x"}}])],  # type: ignore[arg-type]
    ],
)
def test_odd_dialogues_get_the_reference_verdict(gate: StaticGate, messages: list[dict[str, Any]]) -> None:
    for tools in ([WEATHER], [SEARCH, DELETE, WEATHER], [SEARCH] * 2):
        check(gate, chat_of(*messages, tools=tools))


def test_no_tools_at_all(gate: StaticGate) -> None:
    messages = (Message("user", "what is a lease? a lone \ud800 surrogate"),)
    check(gate, ChatView(dialect="openai_chat", model="", messages=messages, tools=(), toolset_key=b""))


PIECES = st.sampled_from(
    [
        "Oslo",
        "delete",
        "order 17",
        "A-12",
        '"two words"',
        "`x_y`",
        "?",
        "…",
        " … ",
        "\n",
        "\t",
        "[MASK]",
        "ß",
        "！",
        "a/b",
    ]
)
TEXTS = st.lists(PIECES | st.text(max_size=6), max_size=30).map(" ".join)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool", "system"]), TEXTS), max_size=6))
def test_any_dialogue_gets_the_reference_verdict(gate: StaticGate, turns: list[tuple[str, str]]) -> None:
    messages = [{"role": role, "content": text} for role, text in turns]
    check(gate, view(json.dumps({"messages": messages, "tools": [SEARCH, DELETE]}).encode(), ToolCache()))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TEXTS)
def test_the_compiled_text_record_is_the_packed_one(gate: StaticGate, text: str) -> None:
    reader = compiled(gate)._reader
    clipped = clip(text)
    signals = reader.texts.uncached(clipped)
    packed = pack_text(signals, user_scalars(signals, literal_values(clipped)), reader._n_columns)
    made = reader._read(clipped).record
    assert len(made) == len(packed)
    assert made[:56] == packed[:56]  # every count and flag
    dim = len(signals.vector)
    assert np.frombuffer(made, np.float32, dim, VECTOR_AT) == pytest.approx(
        np.frombuffer(packed, np.float32, dim, VECTOR_AT), abs=1e-6
    )


def test_serial_and_best_agree_bit_for_bit(gate: StaticGate, serial: StaticGate) -> None:
    cache = ToolCache()
    for item in read_dialogues("gate_dev")[:60]:
        chat = view(json.dumps(item["request"]).encode(), cache)
        assert gate.judge(chat).fused == serial.judge(chat).fused


def test_word_pieces_are_the_library_s(gate: StaticGate) -> None:
    table = gate.extractor._scorer.table
    for item in read_dialogues("gate_dev3"):
        for message in item["request"]["messages"]:
            text = message.get("content") or ""
            if isinstance(text, str):
                cut = text[:8192]
                assert table.token_list(text) == table._library.encode(cut, add_special_tokens=False).ids[:512]


def test_a_verdict_does_not_depend_on_what_was_judged_before(gate: StaticGate) -> None:
    """Records, n-gram shares and products are filled in by whoever needs them first."""
    chats = [chat_of(user(f"cancel order {n}"), says("Sure?"), user("yes"), tools=[DELETE, SEARCH]) for n in range(3)]
    late = [chat_of(user("yes"), calls("web_search"), result("cancel order 1"), tools=[DELETE, SEARCH])]
    first = [gate.judge(chat) for chat in chats + late]
    for n in range(3 * TEXTS_A_GENERATION):
        gate.judge(chat_of(user(f"filler {n}"), tools=[SEARCH]))
    assert [gate.judge(chat) for chat in reversed(chats + late)] == first[::-1]


def test_texts_are_kept_within_two_generations(gate: StaticGate) -> None:
    for n in range(4 * TEXTS_A_GENERATION):
        gate.judge(chat_of(user(f"text {n}"), tools=[SEARCH]))
    reader = compiled(gate)._reader
    assert len(reader._young) + len(reader._old) <= 2 * TEXTS_A_GENERATION


def test_what_is_kept_of_ever_new_tool_lists_is_bounded(gate: StaticGate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whetherman_edge.router.tool_lru.LIST_TOOLS_MAX", 50)
    turns = (user("delete A17"), calls("web_search", {"q": "A17"}), result('{"order_id": 3, "customerId": "C-9"}'))
    for n in range(30):
        new = tool(f"tool_{n}", "Does it.", required=("order_id",))
        gate.judge(chat_of(*turns, tools=[new, *[SEARCH, DELETE, WEATHER] * 3]))
    inside = compiled(gate)
    assert inside._tools.n_tools <= 50
    kept = inside._reader.kept('{"order_id": 3, "customerId": "C-9"}')
    assert kept.hops is not None
    assert len(kept.hops) <= HOPS_KEPT_MAX


def dialogue(n: int, start: str = "") -> tuple[Message, ...]:
    roles = ("user", "assistant", "tool", "user", "assistant")
    return tuple([Message(roles[i % 5], f"{start}{i}") for i in range(n)])


def same(one: Any, other: Any) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in one.__slots__)


def test_a_growing_dialogue_is_continued() -> None:
    outliner, whole = Outliner(), dialogue(40)
    for end in range(41):
        assert same(outliner.outline(whole[:end]), Outliner().outline(whole[:end]))
    assert len(outliner._kept) == 1


def test_a_dialogue_that_goes_another_way_is_not_mistaken() -> None:
    outliner, whole = Outliner(), dialogue(10)
    outliner.outline(whole)
    other = (*whole[:4], Message("user", "elsewhere"), *whole[5:])  # same objects behind, another one before them
    assert same(outliner.outline(other), Outliner().outline(other))
    assert same(outliner.outline(whole[:3]), Outliner().outline(whole[:3]))


def test_few_dialogues_are_kept() -> None:
    outliner = Outliner()
    for n in range(3 * DIALOGUES_KEPT_MAX):
        outliner.outline(dialogue(6, f"{n}-"))
    assert len(outliner._kept) == DIALOGUES_KEPT_MAX
