"""Greetings for training: beside real tools, labelled ANSWER, the same every time."""

from __future__ import annotations

from convert.gate_data import SMALL_TALK, read_dialogues, small_talk


def test_greetings_stand_alone_beside_the_tools_of_a_dialogue():
    dialogues = read_dialogues("gate_dev2")
    made = list(small_talk(dialogues, n=100))
    assert made == list(small_talk(dialogues, n=100))
    assert {item["request"]["messages"][-1]["content"] for item in made} == set(SMALL_TALK)
    offered = [item["request"]["tools"] for item in dialogues]
    for item in made:
        assert item["request"]["tools"] in offered
        assert [m["role"] for m in item["request"]["messages"]] in (["user"], ["system", "user"])
        assert (item["gold"], item["accept"], item["kind"]) == ("ANSWER", ["ANSWER"], "small_talk")
    assert {len(item["request"]["messages"]) for item in made} == {1, 2}
    assert len({item["id"] for item in made}) == 100
