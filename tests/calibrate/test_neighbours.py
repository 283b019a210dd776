"""The nearest agent measured before: how it is found, what follows it, and what does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.calibrate.test_calibrate import ITEMS, free, record, report_of, some
from tests.calibrate.test_plan import needs_calls, settle
from tests.profiles.samples import profile_of
from whetherman_edge.calibrate.conclude import Conclusion, conclude
from whetherman_edge.calibrate.labels import Outcome
from whetherman_edge.calibrate.neighbours import SHARED_MIN, found_of, nearest
from whetherman_edge.calibrate.plan import Item, Plan
from whetherman_edge.calibrate.probe import Probe
from whetherman_edge.calibrate.run_log import RunLog
from whetherman_edge.calibrate.runner import Budget
from whetherman_edge.profiles.schema import (
    Agent,
    Found,
    InterventionChoice,
    Profile,
    parse_profile,
    serialize_profile,
)

NOTE = InterventionChoice("note", "reason")


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """See ``test_calibrate``."""
    monkeypatch.setattr("whetherman_edge.calibrate.run_log.os.fsync", lambda _descriptor: None)


def outcomes_of(items: list[Item], alone: Callable[[Probe], bool], able: Callable[[Probe], bool]) -> dict[str, Outcome]:
    return {
        item.probe.id: Outcome((able(item.probe),), (alone(item.probe),) * 2 if able(item.probe) else (False,))
        for item in items
    }


def anything(_probe: Probe) -> bool:
    return True


def no_hops(probe: Probe) -> bool:
    return probe.family != "hop"


def agent(found: dict[str, Found], kind: str = "llamacpp", choice: InterventionChoice = NOTE) -> Profile:
    return profile_of(agent=Agent(kind, "m"), intervention=choice, found=found)


def test_labels_by_generator_travel_with_the_profile() -> None:
    items = some(ITEMS, each=2)
    found = found_of(items, outcomes_of(items, free, no_hops))
    assert found["chat-fit"] == Found(not_needed=2)
    assert found["lookup-stock"] == Found(needed=2)
    assert found["hop-found-mail"] == Found(lost=2)
    stored = parse_profile(serialize_profile(agent(found)), "m")
    assert stored.found == found
    assert parse_profile(serialize_profile(agent({})), "old").found == {}


def test_the_nearest_agent_is_the_one_whose_labels_agree() -> None:
    items = some(ITEMS, each=3)
    mine = outcomes_of(items, free, no_hops)
    like = agent(found_of(items, outcomes_of(items, free, no_hops)))
    other = agent(found_of(items, outcomes_of(items, lambda probe: not free(probe), anything)))
    near = nearest([("other", other), ("like", like)], items, mine, "llamacpp", "note")
    assert near is not None
    assert (near.name, near.n) == ("like", len(items))
    assert nearest([("other", other)], items, mine, "llamacpp", "note") is None, "it says less than nothing"
    far = msgspec.structs.replace(like, agent=Agent("openai", "m"))
    near = nearest([("far", far), ("like", like)], items, mine, "llamacpp", "note")
    assert near is not None
    assert near.name == "like", "of equals the one on such a server"


def test_with_few_labels_only_an_agent_of_this_kind_is_near() -> None:
    few = ITEMS[: SHARED_MIN - 1]
    mine = outcomes_of(few, free, anything)
    found = found_of(ITEMS, outcomes_of(ITEMS, free, anything))
    assert nearest([("like", agent(found))], few, mine, "llamacpp", "note") is not None
    assert nearest([("like", agent(found))], few, mine, "ollama", "note") is None
    assert nearest([("like", agent(found))], few, mine, "llamacpp", "strip") is None
    assert nearest([("old", agent({}))], few, mine, "llamacpp", "note") is None


def test_what_a_like_agent_lost_comes_last_and_nothing_is_left_out() -> None:
    found = found_of(ITEMS, outcomes_of(ITEMS, free, no_hops))
    order = settle(Plan(ITEMS, like=found), needs_calls)
    assert len(order) == len(ITEMS)
    for split in ("fit", "calibrate"):
        row = [i.probe.family for i in order if (i.split, i.probe.kind, i.probe.expect) == (split, "first", "ACT")]
        assert "hop" not in row[: row.index("hop")]
        assert set(row[row.index("hop") :]) == {"hop"}, split


async def test_a_neighbour_of_another_engine_and_one_that_disagrees_change_nothing(tmp_path: Path) -> None:
    items = some(ITEMS, each=3)
    wanted = Conclusion(
        name="fake",
        model="fake",
        kind="llamacpp",
        quantisation="",
        engine="static",
        alpha=0.05,
        delta=0.1,
        budget=Budget(),
        created="2026-01-01T00:00:00+00:00",
        version="0",
    )
    with RunLog.open(tmp_path / "runs.jsonl") as log:
        measured = record(log, items, free)
        alone = (await report_of(items, log, measured)).profile
        assert alone is not None
        assert alone.found == found_of(items, outcomes_of(items, free, anything))
        layer = msgspec.structs.replace(alone.layer, weights=tuple(-w for w in alone.layer.weights))
        like = msgspec.structs.replace(alone, layer=layer)
        foreign = msgspec.structs.replace(alone, engine=msgspec.structs.replace(alone.engine, sha256="0" * 64))
        for known in (like, foreign):
            report = await conclude(wanted, items, log, measured, [("known", known)])
            assert report.fitted is not None
            assert report.fitted["leans_on"] == ""
            assert report.profile == alone
        leaning = await conclude(wanted, items, log, measured, [("known", alone)])
        assert leaning.fitted is not None
        assert leaning.fitted["leans_on"] == "known", "its own layer fits best"
