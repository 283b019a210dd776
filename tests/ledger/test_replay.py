"""The replay file: whole in itself, and no name in it can break out."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import stat

import pytest

from tests.ledger.entries import entry
from whetherman_edge import cli, cli_replay
from whetherman_edge.ledger import queries, records, replay
from whetherman_edge.ledger.records import Ledger

EVIL = "</script><script>alert(1)</script><!--"


@pytest.fixture
def ledger(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "FLUSH_EVERY_S", 0.0)
    one = Ledger(tmp_path / "l.sqlite3")
    for i in range(1_200):
        one.record(entry(agent=EVIL if i == 7 else "m", messages=i, session=i))
    one.close()
    return one.path


def test_the_file_is_whole_and_names_stay_inside(ledger, tmp_path):
    out = tmp_path / "r.html"
    assert cli.main(["replay", "--ledger", str(ledger), "--out", str(out)]) == 0
    html = out.read_text()
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    assert not re.search(r"""(?:src|href)\s*=|https?://(?!www\.w3\.org/2000/svg)""", html)
    assert html.count("<script") == 2
    data = json.loads(re.search(r'<script id="recorded"[^>]*>(.*?)</script>', html, re.DOTALL).group(1))
    assert [row["messages"] for row in data["rows_list"]] == list(range(1_199, -1, -1))
    assert {row["agent"] for row in data["rows_list"]} == {"m", EVIL}


def test_the_policy_allows_the_two_inline_parts_and_nothing_else(ledger, tmp_path):
    out = tmp_path / "r.html"
    cli.main(["replay", "--ledger", str(ledger), "--out", str(out)])
    html = out.read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html).group(1)
    for pattern in (r"<style>(.*?)</style>", r"<script>(.*?)</script>"):
        text = re.search(pattern, html, re.DOTALL).group(1)
        assert base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() in policy
    assert "unsafe" not in policy


def test_what_follows_counts_across_the_portions_that_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "FLUSH_EVERY_S", 0.0)
    monkeypatch.setattr(queries, "ROWS_MAX", 1)
    one = Ledger(tmp_path / "l.sqlite3")
    one.record(entry(session=1, applied=True, mode="enforce"))
    one.record(entry(session=1, decision="ACT", calls=1))
    one.close()
    html = replay.render(one.path).decode()
    data = json.loads(re.search(r'<script id="recorded"[^>]*>(.*?)</script>', html, re.DOTALL).group(1))
    assert [bool(row["suspect"]) for row in data["rows_list"]] == [False, True]


def test_the_ledger_is_never_written_over(ledger, tmp_path, capsys, monkeypatch):
    before = ledger.read_bytes()
    link = tmp_path / "link.html"
    link.symlink_to(ledger)
    monkeypatch.setattr(cli_replay, "default_path", lambda: ledger)
    for args in (["--ledger", str(ledger), "--out", str(ledger)], ["--out", str(link)]):
        assert cli.main(["replay", *args]) == 2
        assert "the ledger itself" in capsys.readouterr().err
    assert ledger.read_bytes() == before


def test_no_ledger_is_said(tmp_path, capsys):
    assert cli.main(["replay", "--ledger", str(tmp_path / "none"), "--out", "-"]) == 3
    assert "found none" in capsys.readouterr().err
