"""``whetherman-edge decide``: what the gate makes of one chat body, or of a file of them, without any model server."""

from __future__ import annotations

import argparse
import asyncio
import codecs
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from whetherman_edge.config import load_config
from whetherman_edge.errors import ConfigError, EnvironmentFault, RequestError

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]

    from whetherman_edge.composition import Gate
    from whetherman_edge.proxy.decide import Record


class _Line(msgspec.Struct):
    """One line of a JSON Lines file."""

    request: msgspec.Raw
    id: Any = None


_decode_line = msgspec.json.Decoder(_Line).decode
_decode_id = msgspec.json.Decoder(dict[str, Any]).decode
_encode = msgspec.json.encode


def register(verbs: Verbs) -> None:
    """Add ``decide``."""
    decide = verbs.add_parser(
        "decide",
        help="what the gate makes of one request, or of a file of them",
        description="Decide on one chat-completions body, or with --jsonl on lines of {'id', 'request': {…}}.",
    )
    decide.add_argument("file", nargs="?", default="-", metavar="FILE", help="the body; - or nothing: standard input")
    decide.add_argument("--jsonl", action="store_true", help="FILE has one {'id', 'request'} a line")
    decide.add_argument("--out", metavar="FILE", help="write here instead of to standard output")
    decide.add_argument("--engine", metavar="ENGINE", help="static, gemma or auto")
    decide.add_argument("--profile", metavar="NAME", help="decide under this profile")
    decide.add_argument("--mode", metavar="MODE", help="off, shadow or enforce: what 'applied' tells")
    decide.add_argument("--upstream-kind", metavar="KIND", help="the upstream's kind, for 'applied'")
    decide.add_argument("--config", metavar="FILE", help="TOML file (default: WHETHERMAN_CONFIG, else the user's)")
    decide.set_defaults(run=_run)


def _run(parsed: argparse.Namespace) -> int:
    from whetherman_edge import composition
    from whetherman_edge.ledger.counters import Counters
    from whetherman_edge.proxy.decide import described

    flags = {key: value for key in ("engine", "profile", "mode", "upstream_kind") if (value := getattr(parsed, key))}
    config = load_config(flags, path=parsed.config).config
    gate = composition.open_gate(config, Counters(), deadline=False)
    if gate.fault:
        raise EnvironmentFault(gate.fault)
    gate.check_profiles(config)
    with contextlib.closing(gate):
        gate.start()
        fault = gate.await_backbone()
        if fault and config.engine == "gemma":
            raise EnvironmentFault(f"the engine gemma was asked for: {fault}; --engine auto decides without it")
        gate.warm_up()
        with _input(parsed.file) as source, _output(parsed.out) as sink, asyncio.Runner() as runner:
            if parsed.jsonl:
                return _lines(gate, runner, source, sink)
            try:
                record = runner.run(_decide(gate, source.read().removeprefix(codecs.BOM_UTF8)))
            except RequestError as exc:
                raise RequestError(described(exc), exc.loc, exc.kind) from exc
            sink.write(_encode(record) + b"\n")
    return 0


def _lines(gate: Gate, runner: asyncio.Runner, source: IO[bytes], sink: IO[bytes]) -> int:
    """One record a line; a bad line gets an error record and makes the exit code 1, the others go on."""
    failed = 0
    for number, line in enumerate(source, 1):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            continue
        identity: Any = None
        try:
            try:
                asked = _decode_line(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
                identity = _id_of(line)
                raise _bad_line(exc) from exc
            identity = asked.id
            value: object = runner.run(_decide(gate, bytes(asked.request), identity))
        except RequestError as exc:
            failed += 1
            error = {"message": str(exc), "type": exc.kind, "loc": list(exc.loc), "line": number}
            value = {"id": identity, "error": error}
        sink.write(_encode(value) + b"\n")
    if failed:
        sys.stderr.write(f"whetherman-edge: {failed} of the lines could not be decided; see their error records\n")
    return 1 if failed else 0


async def _decide(gate: Gate, body: bytes, identity: Any = None) -> Record:
    from whetherman_edge.proxy.decide import decide

    return await decide(gate.gating, {}, body, identity)


def _bad_line(exc: Exception) -> RequestError:
    """What is wrong with a line that holds no request."""
    if not isinstance(exc, msgspec.ValidationError):
        message = f'expected JSON, an object such as {{"id": 1, "request": {{…}}}}: {exc}'
        return RequestError(message, ("line",), "json_invalid")
    if "request" in str(exc):
        message = 'expected the field "request" with a chat body, got none'
        return RequestError(message, ("line", "request"), "missing")
    message = f'expected an object such as {{"id": 1, "request": {{…}}}}: {exc}'
    return RequestError(message, ("line",), "type_error")


def _id_of(line: bytes) -> Any:
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _decode_id(line).get("id")
    return None


@contextlib.contextmanager
def _input(name: str) -> Iterator[IO[bytes]]:
    if name == "-":
        yield sys.stdin.buffer
        return
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(Path(name).open("rb"))
        except OSError as exc:
            raise ConfigError(f"{name}: expected a file to read: {exc.strerror}") from exc
        yield file


@contextlib.contextmanager
def _output(name: str | None) -> Iterator[IO[bytes]]:
    if not name:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(Path(name).open("wb"))
        except OSError as exc:
            raise ConfigError(f"{name}: expected a file to write: {exc.strerror}") from exc
        yield file
