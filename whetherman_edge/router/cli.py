"""``whetherman-edge route``: one query, or a file of them, to typed choices."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from whetherman_edge.errors import EnvironmentFault, RequestError, UsageError
from whetherman_edge.router.decision import Choice
from whetherman_edge.router.scorer import Scorer, check_query
from whetherman_edge.router.table import RouterTable
from whetherman_edge.router.tool_files import Options, options_of, parse_json

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]

Choose = Callable[[str, Options], Choice]

_DESCRIPTION = """\
Choose the tool that fits a query, from descriptions alone. --tools is a JSON file: a tools array (OpenAI, Anthropic or
MCP), or an object of name to description, null, or {"description", "examples", "parameters"}. With --jsonl, each line
is {"id", "query", "options"}; a line without options uses --tools. --engine auto puts choices that the router is unsure
of to the backbone as well, where that is installed; gemma puts all of them. Exit codes: 0 ok, 1 a line failed, 2 usage,
3 the router's file is missing or broken."""


def register(verbs: Verbs) -> None:
    """Add ``route``."""
    parser = verbs.add_parser("route", help="which tool fits a query", description=_DESCRIPTION)
    add_arguments(parser)
    parser.set_defaults(run=run)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``route``."""
    parser.add_argument("query", nargs="?", metavar="QUERY", help="what the user says")
    parser.add_argument("--tools", type=Path, metavar="FILE", help="the tools to choose from (JSON)")
    parser.add_argument("--jsonl", metavar="IN", help="a file of queries, one JSON object a line; - reads stdin")
    parser.add_argument("--out", type=Path, metavar="OUT", help="write here instead of stdout")
    parser.add_argument("--engine", choices=("static", "gemma", "auto"), default="auto", help="default: auto")


def run(args: argparse.Namespace) -> int:
    """Run ``route``; returns 0, or 1 when a line failed. Raises UsageError or ArtifactError."""
    if (args.query is None) == (args.jsonl is None):
        raise UsageError("route: expected a QUERY, or --jsonl with a file of them, and not both")
    if args.query is not None and args.tools is None:
        raise UsageError("route: expected --tools FILE with the tools to choose from")
    tools = _read_tools(args.tools) if args.tools is not None else None
    with _chooser(args.engine) as choose:
        return _run(args, choose, tools)


def _run(args: argparse.Namespace, choose: Choose, tools: Options | None) -> int:
    if args.query is not None:
        assert tools is not None
        answer = _answer(choose, {"id": None, "query": args.query}, tools)
        with _output(args.out) as out:
            out.write(json.dumps(answer, ensure_ascii=False) + "\n")
        return 0
    failed = 0
    with _input(args.jsonl) as lines, _output(args.out) as out:
        for number, outcome in _answers(choose, lines, tools):
            if isinstance(outcome, RequestError):
                failed += 1
                field = ".".join(map(str, outcome.loc[1:]))
                what = f"{field}: {outcome}" if field else str(outcome)
                sys.stderr.write(f"route: {args.jsonl} line {number}: {what} ({outcome.kind})\n")
            else:
                out.write(json.dumps(outcome, ensure_ascii=False) + "\n")
    if failed:
        sys.stderr.write(f"route: {failed} of the lines failed; the others were answered\n")
    return 1 if failed else 0


@contextlib.contextmanager
def _chooser(engine: str) -> Iterator[Choose]:
    """What chooses: the ToolRouter, and with it the backbone where it is asked for and there.

    Raises ArtifactError for a broken router.
    """
    table = RouterTable.open()
    scorer = Scorer(table)
    if engine == "static":
        yield scorer.route
        return
    from whetherman_edge.engine import open_chooser

    try:
        second = open_chooser(engine, table.sha256)
    except EnvironmentFault as exc:
        if engine == "gemma":
            sys.stderr.write(f"route: the static router answers alone: {exc}\n")
        yield scorer.route
        return

    def choose(query: str, options: Options) -> Choice:
        return runner.run(second.second_opinion(query, options, scorer.route(query, options), math.inf))

    with asyncio.Runner() as runner:
        try:
            yield choose
        finally:
            second.close()


def _answers(
    choose: Choose, lines: IO[bytes], tools: Options | None
) -> Iterator[tuple[int, dict[str, Any] | RequestError]]:
    """(line number, answer or what was wrong with it), line by line."""
    for number, raw in enumerate(lines, 1):
        if not raw.strip():
            continue
        try:
            yield number, _answer(choose, parse_json(raw, ("body",)), tools)
        except RequestError as exc:
            yield number, exc


def _answer(choose: Choose, request: object, tools: Options | None) -> dict[str, Any]:
    """The answer to one request object. Raises RequestError."""
    if not isinstance(request, dict):
        raise RequestError(
            'expected an object such as {"id": 1, "query": "…", "options": {…}}', ("body",), "object_type"
        )
    check_query(request.get("query"))
    options = request.get("options")
    if options is None:
        if tools is None:
            raise RequestError("expected options on the line, or --tools for all lines", ("body", "options"), "missing")
        options = tools
    else:
        options = options_of(options)
    start = time.perf_counter()
    choice = choose(request["query"], options)
    ms = (time.perf_counter() - start) * 1000.0
    return {
        "id": request.get("id"),
        "choice": choice.choice,
        "probabilities": choice.probabilities,
        "confidence": choice.confidence,
        "ms": round(ms, 4),
    }


def _read_tools(path: Path) -> Options:
    try:
        raw = path.read_bytes()
    except OSError as exc:
        raise UsageError(f"route: --tools {path} cannot be read ({exc.strerror or exc})") from exc
    try:
        return options_of(parse_json(raw, ("tools",)), ("tools",))
    except RequestError as exc:
        raise UsageError(f"route: --tools {path}: {exc}") from exc


@contextlib.contextmanager
def _input(name: str) -> Iterator[IO[bytes]]:
    if name == "-":
        yield sys.stdin.buffer
        return
    try:
        file = Path(name).open("rb")  # noqa: SIM115 - closed below; opening alone is guarded
    except OSError as exc:
        raise UsageError(f"route: --jsonl {name} cannot be read ({exc.strerror or exc})") from exc
    with file:
        yield file


@contextlib.contextmanager
def _output(path: Path | None) -> Iterator[IO[str]]:
    if path is None:
        yield sys.stdout
        return
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as exc:
        raise UsageError(f"route: --out {path} cannot be written ({exc.strerror or exc})") from exc
    with file:
        yield file
