"""What is remembered of dialogues and agents, and how much."""

from __future__ import annotations

from whetherman_edge.dialects.chat import ChatView, Message
from whetherman_edge.gate.backoff import DialogueEvidence
from whetherman_edge.gate.policy import SessionState, unscored
from whetherman_edge.proxy.learned import MODELS_MAX, Learned
from whetherman_edge.proxy.sessions import AGENTS_MAX, SESSIONS_MAX, Sessions


def chat(*texts: str, model: str = "m", system: str = "") -> ChatView:
    turns = [Message(role="system", text=system)] if system else []
    turns += [Message(role="assistant" if n % 2 else "user", text=text) for n, text in enumerate(texts)]
    return ChatView(dialect="openai_chat", model=model, messages=tuple(turns), tools=(), toolset_key=b"")


ASKED = SessionState(asked_in_turn=1, asked_at_length=1)


def test_a_dialogue_is_known_again_while_it_grows():
    sessions = Sessions()
    sessions.keep(chat("find it"), "", ASKED)
    assert sessions.session(chat("find it", "which?", "that"), "", "a") == ASKED
    for other in (chat("find this"), chat("find it", model="n"), chat("find it", system="s")):
        assert sessions.session(other, "", "a") == SessionState()


def test_the_clients_session_id_wins_over_the_texts():
    sessions = Sessions()
    sessions.keep(chat("a"), "id-1", ASKED)
    assert sessions.session(chat("b"), "id-1", "a") == ASKED
    assert sessions.session(chat("a"), "id-2", "a") == SessionState()


def test_states_worth_nothing_take_no_place():
    sessions = Sessions()
    for number in range(10):
        sessions.keep(chat(str(number)), "", SessionState().after(unscored("need"), chat("x"), applied=False))
    assert len(sessions) == 0
    sessions.keep(chat("a"), "", ASKED)
    sessions.keep(chat("a"), "", SessionState())
    assert len(sessions) == 0


def test_dialogues_agents_and_models_are_bounded():
    sessions, learned = Sessions(), Learned("llamacpp")
    for number in range(SESSIONS_MAX + 10):
        sessions.keep(chat(str(number)), "", ASKED)
    assert len(sessions) == SESSIONS_MAX
    assert sessions.session(chat("0"), "", "a") == SessionState()
    for number in range(AGENTS_MAX + 10):
        sessions.record(f"agent {number}", "scored", "kept")
    for number in range(MODELS_MAX + 10):
        learned.refused(f"model {number}", "prefill")
    assert not learned.refuses("model 0", "prefill")
    assert learned.refuses(f"model {MODELS_MAX}", "prefill")


def test_a_leaking_agent_is_backed_off_and_others_are_not():
    sessions = Sessions()
    for _ in range(3):
        sessions.record("profile:a", "scored", "leaked")
    assert sessions.session(chat("x"), "", "profile:a").backed_off == ("scored",)
    assert not sessions.session(chat("x"), "", "profile:b").backed_off


def test_a_cause_that_stopped_in_the_dialogue_or_for_the_agent_leaves_alone():
    sessions = Sessions()
    evidence = DialogueEvidence()
    for _ in range(3):
        evidence = evidence.after("loop_guard", "leaked")
    sessions.keep(chat("x"), "", SessionState(evidence=evidence))
    assert sessions.session(chat("x"), "", "a").backed_off == ("loop_guard",)
    for _ in range(3):
        sessions.record("a", "scored", "leaked")
    assert sessions.session(chat("x"), "", "a").backed_off == ("scored", "loop_guard")
    assert sessions.session(chat("y"), "", "a").backed_off == ("scored",)
    assert sessions.session(chat("x"), "", "b").backed_off == ("loop_guard",)


def test_each_stop_is_news_for_the_file():
    sessions, news = Sessions(), []
    sessions.on_stop = lambda: news.append(1)
    for cause in ("scored", "loop_guard"):
        for _ in range(4):
            sessions.record("a", cause, "leaked")
    assert len(news) == 2


def test_r13_a_refusal_narrows_the_capability_of_that_model_only():
    learned = Learned("llamacpp")
    learned.refused("qwen", "prefill")
    learned.refused("qwen", "none")
    assert learned.capability("qwen").prefill == "no"
    assert not learned.capability("qwen").honours_none
    assert learned.capability("other").prefill != "no"
    assert learned.capability("other").honours_none


def test_r13_a_refusal_in_one_dialect_says_nothing_of_another():
    learned = Learned("llamacpp")
    learned.refused("qwen", "none", "openai_chat")
    assert learned.refuses("qwen", "none", "openai_chat")
    assert not learned.refuses("qwen", "none", "anthropic")
    fresh = Learned("llamacpp").capability("qwen", "anthropic")
    assert learned.capability("qwen", "anthropic") == fresh
