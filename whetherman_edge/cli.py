"""The command line: ``whetherman-edge`` (alias ``wmedge``).

Each verb lives in one module with ``register(verbs)``, which adds its parser and sets ``run``, a function of the parsed
arguments that returns the exit code. Only the module of the verb in use is imported, so that ``--help`` and ``config
show`` do not wait for numpy. Exit codes: 0 ok, 1 failed check or run, 2 usage, 3 environment.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import importlib.util
import json
import os
import stat
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from whetherman_edge import __version__
from whetherman_edge.errors import EnvironmentFault, UsageError, WhethermanError

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]

# Verb, the module that registers it, and its line in the overview.
VERBS: tuple[tuple[str, str, str], ...] = (
    ("serve", "whetherman_edge.cli", "run the sidecar"),
    ("decide", "whetherman_edge.cli_decide", "what the gate makes of one request, or of a file of them"),
    ("route", "whetherman_edge.router.cli", "which tool fits a query"),
    ("calibrate", "whetherman_edge.calibrate.cli", "measure one agent and write its profile"),
    ("profile", "whetherman_edge.profiles.cli", "profiles: list, show, import, export"),
    ("model", "whetherman_edge.backbone.cli", "weights on this machine: list, install, verify, path"),
    ("bench", "whetherman_edge.bench.cli", "measure: latency, router, proxy, …"),
    ("doctor", "whetherman_edge.cli_doctor", "check this installation and say what is wrong"),
    ("replay", "whetherman_edge.cli_replay", "recorded decisions as one HTML file"),
    ("service", "whetherman_edge.cli_service", "run as a service: install, uninstall, status"),
    ("config", "whetherman_edge.cli", "show every setting and where it comes from"),
)

# Flags of ``serve`` that are configuration keys; config.py checks their values, so that a flag, an environment
# variable and the file give the same message.
_SERVE_FLAGS: tuple[tuple[str, str, str], ...] = (
    ("host", "ADDRESS", "address to listen on (default 127.0.0.1); anything but loopback needs an API key"),
    ("port", "PORT", "TCP port (default 8088; 0: a free one)"),
    ("listen", "unix:PATH", "listen on a Unix socket instead of TCP; with --port on both"),
    ("upstream", "URL", "model server: http(s)://HOST:PORT with or without /v1, unix:PATH, or embedded"),
    ("upstream-kind", "KIND", "auto, openai, ollama, llamacpp, vllm, lmstudio or anthropic"),
    ("profile", "NAME", "profile for requests that name none"),
    ("mode", "MODE", "off, shadow or enforce"),
    ("engine", "ENGINE", "static, gemma or auto"),
    ("force", "DECISION", "ACT, ANSWER, ASK or DECLINE: fix the verdict; for tests of the wiring"),
    ("log-level", "LEVEL", "debug, info, warning or error"),
)


_DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, run, and turn our own errors into one line on stderr and their exit code."""
    # Before any import of numpy: one gate decision is too small to share among threads, and their pools cost memory.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        parsed = _parser(args).parse_args(args)
        _check_output(parsed)
        code = int(parsed.run(parsed))
        sys.stdout.flush()  # here, where it can be said: the interpreter's own end makes it exit code 120
        return code
    except WhethermanError as exc:
        sys.stderr.write(f"whetherman-edge: {exc}\n")
        return exc.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output (head, a pager) has gone; nothing more can be said to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as exc:
        if exc.errno not in _DISK_ERRNOS:
            raise
        where = exc.filename if exc.filename is not None else "the output"
        sys.stderr.write(f"whetherman-edge: cannot use {where}: {exc.strerror}; make room, or name another file\n")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left in the buffer has no place either
        return EnvironmentFault.exit_code


def register(verbs: Verbs, only: str = "") -> None:
    """Add ``serve`` and ``config``."""
    if only in ("", "serve"):
        serve = verbs.add_parser("serve", help="run the sidecar", description="Run the sidecar until SIGTERM.")
        serve.add_argument("--config", metavar="FILE", help="TOML file (default: WHETHERMAN_CONFIG, else the user's)")
        for name, metavar, text in _SERVE_FLAGS:
            serve.add_argument(f"--{name}", metavar=metavar, help=text)
        serve.set_defaults(run=_run_serve)
    if only in ("", "config"):
        config = verbs.add_parser("config", help="show every setting and where it comes from")
        actions = config.add_subparsers(dest="action", required=True, metavar="show")
        show = actions.add_parser("show", help="print key, value and origin; secrets are masked")
        show.add_argument("--json", action="store_true", help="as one JSON object")
        show.add_argument("--config", metavar="FILE", help="TOML file (default: WHETHERMAN_CONFIG, else the user's)")
        for name, metavar, text in _SERVE_FLAGS:
            show.add_argument(f"--{name}", metavar=metavar, help=text)
        show.set_defaults(run=_run_config_show)


def config_flags(parsed: argparse.Namespace) -> dict[str, str]:
    """The configuration keys among the parsed arguments, for ``config.load_config``."""
    keys = (name.replace("-", "_") for name, _, _ in _SERVE_FLAGS)
    return {key: value for key in keys if (value := getattr(parsed, key, None)) is not None}


def _parser(args: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="whetherman-edge",
        description="A local sidecar that forecasts, before every model call that offers tools, whether one is needed.",
    )
    parser.add_argument("--version", action="version", version=f"whetherman-edge {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    wanted = next((arg for arg in args if not arg.startswith("-")), "")
    for verb, module, text in VERBS:
        if verb == wanted:
            if module == __name__:
                register(verbs, verb)
            else:
                importlib.import_module(module).register(verbs)
        elif _exists(module):
            verbs.add_parser(verb, help=text)
    return parser


def _check_output(parsed: argparse.Namespace) -> None:
    """Raise UsageError when ``--out`` is one of the files to read: opening it would empty that."""
    out = getattr(parsed, "out", None)
    written = _stat(out) if out else None
    if written is None or not stat.S_ISREG(written.st_mode):
        return
    for key in ("file", "jsonl", "tools"):
        source = getattr(parsed, key, None)
        if isinstance(source, (str, os.PathLike)):
            read = _stat(0 if source == "-" else source)
            if read is not None and os.path.samestat(read, written):
                raise UsageError(f"--out {out}: expected another file than the one that is read; name a new one")


def _stat(path: str | os.PathLike[str] | int) -> os.stat_result | None:
    try:
        return os.stat(path)
    except (OSError, ValueError):
        return None


def _exists(module: str) -> bool:
    return module == __name__ or importlib.util.find_spec(module) is not None


def _run_serve(parsed: argparse.Namespace) -> int:
    from whetherman_edge import daemon
    from whetherman_edge.config import load_config

    daemon.run(lambda: load_config(config_flags(parsed), path=parsed.config))
    return 0


def _run_config_show(parsed: argparse.Namespace) -> int:
    from whetherman_edge.config import load_config

    shown = load_config(config_flags(parsed), path=parsed.config).shown()
    if parsed.json:
        print(json.dumps(shown, indent=2))
        return 0
    width = max(map(len, shown))
    for key, entry in shown.items():
        print(f"{key:<{width}}  {json.dumps(entry['value']):<28}  {entry['origin']}")
    return 0
