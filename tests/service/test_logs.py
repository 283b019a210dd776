"""Lines reach stderr in order, at once or gathered, and say nothing of what libraries quote."""

from __future__ import annotations

import asyncio
import logging

import pytest

from whetherman_edge.service import logs


@pytest.fixture
def log(monkeypatch):
    """A logger with our handler; what else listens to it stays out."""
    found = logging.getLogger("tests.logs")
    monkeypatch.setattr(found, "propagate", False)
    handler = logs.LineHandler()
    handler.setFormatter(logs.LineFormatter())
    monkeypatch.setattr(found, "handlers", [handler])
    monkeypatch.setattr(found, "level", logging.INFO)
    return found


def events(capsys) -> list[str]:
    return [line.split("event=", 1)[1] for line in capsys.readouterr().err.splitlines()]


async def test_a_lone_line_goes_out_at_once_and_those_that_follow_are_gathered(log, capsys, monkeypatch):
    monkeypatch.setattr(logs, "FLUSH_EVERY_S", 3600.0)
    monkeypatch.setattr(log.handlers[0], "_written_at_s", -3601.0)
    log.info("event=%s", "one")
    assert events(capsys) == ["one"]
    log.info("event=two")
    log.info("event=three")
    assert events(capsys) == []
    log.handlers[0].flush()
    assert events(capsys) == ["two", "three"]


async def test_a_warning_takes_what_waits_with_it(log, capsys, monkeypatch):
    monkeypatch.setattr(logs, "FLUSH_EVERY_S", 3600.0)
    monkeypatch.setattr(log.handlers[0], "_written_at_s", -3601.0)
    for name in ("one", "two", "three"):
        log.info("event=%s", name)
    log.warning("event=four")
    assert events(capsys) == ["one", "two", "three", "four"]


async def test_what_waits_goes_out_by_itself(log, capsys, monkeypatch):
    monkeypatch.setattr(logs, "FLUSH_EVERY_S", 0.01)
    flushed = asyncio.Event()
    flush = log.handlers[0].flush

    def seen() -> None:
        flush()
        flushed.set()

    monkeypatch.setattr(log.handlers[0], "flush", seen)
    monkeypatch.setattr(log.handlers[0], "_written_at_s", float("inf"))
    log.info("event=one")
    async with asyncio.timeout(10):
        await flushed.wait()
    assert events(capsys) == ["one"]


def test_without_a_loop_every_line_goes_out(log, capsys):
    for name in ("one", "two"):
        log.info("event=%s\nmore", name)
    assert events(capsys) == ["one more", "two more"]
