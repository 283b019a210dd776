"""The known tools are recognised by name and description, and nobody else is."""

from __future__ import annotations

import numpy as np
import pytest

from whetherman_edge.errors import ArtifactError
from whetherman_edge.router.artifact import open_artifact, write_artifact
from whetherman_edge.router.card import make_card
from whetherman_edge.router.scorer import Scorer
from whetherman_edge.router.table import RouterTable

KNOWN = ("wiki", "websearch", "weather", "news", "files", "shell", "other")


def strength(scorer, name, description):
    """(known tool, strength) as the slate has it, or (None, 0)."""
    slate = scorer.slate([make_card(name, description)])
    if not len(slate.known_at):
        return None, 0.0
    return KNOWN[int(slate.known_index[0])], float(slate.known_strength[0])


@pytest.mark.parametrize("name", KNOWN)
def test_a_bare_known_name_is_known(scorer, name):
    assert strength(scorer, name, "") == (name, 1.0)


@pytest.mark.parametrize(
    ("name", "description", "known"),
    [
        ("bash", "Executes a bash command and returns its output.", "shell"),
        ("getWeather", "Current weather and forecast for a location.", "weather"),
        ("web_search", "Search the web and return titles, urls and snippets.", "websearch"),
        ("Wikipedia", "Summary of a Wikipedia article.", "wiki"),
        ("news-headlines", "Latest headlines from the press.", "news"),
        ("file_system", "Read, write and list local files.", "files"),
        ("general_chat", "Chit-chat, creative text, small sums, translations.", "other"),
    ],
)
def test_aliases_in_every_style_are_known(scorer, name, description, known):
    found, how_sure = strength(scorer, name, description)
    assert found == known
    assert how_sure > 0.8


@pytest.mark.parametrize(
    ("name", "description"),
    [
        ("files", "Nail files and manicure products of the shop."),
        ("files", "Case files of patients: diagnosis and medication."),
        ("shell", "Find petrol stations of the Shell brand nearby."),
        ("news", "Newsletter subscribers: add or remove an address."),
        ("wiki", "Create and edit pages of the company's internal Confluence wiki."),
        ("other", "Open other account types, such as savings."),
        ("reply", "Reply to a message in the support inbox."),
        ("search", "Search biomedical literature, clinical trials and genetic variants."),
        ("command", "The chain of command of the regiment."),
        ("get_tide_times", "High and low water for a harbour."),
    ],
)
def test_a_name_with_another_meaning_is_not_hijacked(scorer, name, description):
    assert strength(scorer, name, description)[1] < 0.25


def test_a_weak_alias_needs_its_description(scorer):
    assert strength(scorer, "search", "") == (None, 0.0)
    assert strength(scorer, "search", "Search the web.")[0] == "websearch"


def test_the_head_is_what_tells_known_tools_apart(scorer):
    bare = dict.fromkeys(KNOWN)
    queries = {
        "do i need an umbrella in bergen tomorrow": "weather",
        "kill whatever listens on port 3000": "shell",
        "write me a limerick about my cat": "other",
        "which pdf has my tenancy agreement in it": "files",
        "who painted the night watch": "wiki",
        "cheapest place to buy a used thinkpad": "websearch",
        "what happened in parliament this morning": "news",
    }
    assert sum(scorer.route(q, bare).choice == tool for q, tool in queries.items()) >= 6


def test_unknown_tools_never_see_the_head(table, kernels):
    scorer = Scorer(table, kernels)
    slate = scorer.slate(
        [make_card("calendar_events", "See and change appointments."), make_card("run_sql", "Query tables.")]
    )
    before = scorer.score("am i free on thursday", slate).logit
    scorer._head = None
    assert scorer.score("am i free on thursday", slate).logit.tolist() == before.tolist()


@pytest.mark.parametrize(
    ("section", "value"),
    [
        ("identity_ngrams", np.zeros((1000, 7), dtype=np.float32)),
        ("identity_ngrams", np.full((1024, 7), np.nan, dtype=np.float32)),
        ("identity_dense", np.zeros((6, 256), dtype=np.float32)),
        ("identity_owner", np.zeros(3, dtype=np.int32)),
        ("stem", np.full(29528, 29528, dtype=np.int32)),
        ("idf", np.full(29528, np.inf, dtype=np.float32)),
        ("bias", np.zeros(255, dtype=np.float32)),
    ],
)
def test_sections_that_do_not_fit_are_refused(table, kernels, tmp_path, section, value):
    artifact = table.artifact
    arrays = {n: artifact.array(n, s.dtype, len(s.shape)) for n, s in artifact._sections.items()}
    arrays[section] = value
    write_artifact(tmp_path / "bad", arrays, {})
    with pytest.raises(ArtifactError):
        Scorer(RouterTable(open_artifact(tmp_path / "bad"), kernels), kernels)
