"""The audit finds what it is there to find, and keeps quiet about what is no fault."""

from __future__ import annotations

from convert import audit_data


def item(name, text, *, gold="ACT", accept=None, tools=("a",), role="user"):
    offered = [{"type": "function", "function": {"name": tool, "description": f"does {tool}"}} for tool in tools]
    request = {"messages": [{"role": role, "content": text}], "tools": offered}
    return {"id": name, "request": request, "gold": gold, "accept": accept or [gold], "domain": "d", "set": name}


def test_same_request_with_labels_that_exclude_each_other_is_a_contradiction():
    items = [item("1", "book it"), item("2", "book it", gold="ASK"), item("3", "book it", gold="ASK", tools=("b",))]
    assert audit_data.contradictions(items) == ["1 ['ACT'] against 2 ['ASK']"]


def test_labels_that_share_an_acceptable_decision_are_no_contradiction():
    assert audit_data.contradictions([item("1", "x", accept=["ACT", "ASK"]), item("2", "x", gold="ASK")]) == []


def test_duplicates_are_counted_once_more():
    assert audit_data.n_duplicates([item("1", "x"), item("2", "x"), item("3", "x", tools=("b",))]) == 1


def test_a_text_with_another_number_and_case_is_near():
    known = audit_data.texts_of([item("k", "Book a table for 4 people at the harbour on Friday evening please")])
    other = audit_data.texts_of([item("o", "book a table for 6 people at the harbour on friday evening, thanks")])
    [(left, right, share)] = audit_data.near_texts(known, other)
    assert (left, right) == ("k", "o")
    assert 0.6 <= share < 1


def test_a_text_about_the_same_thing_is_not_near():
    known = audit_data.texts_of([item("k", "Book a table for 4 people at the harbour on Friday evening please")])
    other = audit_data.texts_of([item("o", "could you reserve us a table at the harbour restaurant for Friday night")])
    assert audit_data.near_texts(known, other) == []


def test_short_texts_are_left_out():
    assert audit_data.texts_of([item("s", "thanks, that is all for now")]) == {}


def test_results_are_no_texts_of_a_user():
    assert audit_data.texts_of([item("r", "one two three four five six seven eight nine", role="tool")]) == {}


def test_what_a_shortcut_sees():
    one, other = item("1", "where is it?", tools=("a",)), item("2", "where is it?", tools=("b",))
    assert audit_data.words_only(one) == audit_data.words_only(other)
    assert audit_data.tools_only(one) != audit_data.tools_only(other)
    assert audit_data.shape_only(one) == audit_data.shape_only(item("3", "what is on?", tools=("c",)))
    assert audit_data.shape_only(one) != audit_data.shape_only(item("4", "what is on", tools=("c",)))
