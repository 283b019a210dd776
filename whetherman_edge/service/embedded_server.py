"""The child process of ``--upstream embedded``: one llama.cpp server, and nothing of ours in its way.

A process of its own, because llama.cpp may abort on a bad file or an old CPU, holds the GIL while it loads, and must
not take the daemon with it. Protocol with ``service.embedded``: stdout carries one JSON line, ``{"url": …}``, once it
listens; stdin carries nothing and closes when the parent goes, which ends this process; stderr is llama.cpp's own log.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""prctl(2): the kernel signals us when the thread that started us dies, also while llama.cpp holds the GIL."""
PROMPT_CACHE_MIB = 256
"""llama.cpp would keep up to 8 GiB of old prompts in RAM; a laptop has better uses for it."""
LOG_ERRORS_ONLY = 1
"""llama.cpp's verbosity: from 2 on it logs requests."""


def main(arguments: list[str] | None = None) -> int:
    """Loads the weights, serves until stdin closes. Returns 1 if the server does not start."""
    args = _parser().parse_args(arguments)
    _die_with_parent(args.parent)
    # Keep the protocol's stdout to ourselves: whatever native code prints goes to the log.
    protocol = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = args.weights
    params.model_alias = {args.alias}
    params.hostnames = ["127.0.0.1"]
    params.port = args.port
    params.n_ctx = args.ctx_tokens
    params.n_parallel = 1
    cores = usable_cores()
    params.cpuparams_batch.n_threads = cores
    # Each token waits for its slowest thread. With one thread a core, any other busy program (the agent, a browser)
    # stalls all of them: 0.5 tokens/s instead of 10 to 18 with a core left free, on two cores with a load of 8.
    params.cpuparams.n_threads = max(1, cores - 1)
    params.cache_ram_mib = PROMPT_CACHE_MIB
    params.use_jinja = True
    params.cors_origins = ""  # no web page may read from it; only the daemon talks to this port
    params.cors_origins_explicit = True
    params.ui = False
    params.endpoint_slots = False  # it would show prompts
    params.verbosity = LOG_ERRORS_ONLY
    try:
        server = xllamacpp.Server(params)
    except RuntimeError as exc:
        sys.stderr.write(f"{exc}\n")
        return 1
    protocol.write(json.dumps({"url": server.listening_address}) + "\n")
    protocol.flush()
    sys.stdin.buffer.read()
    # Not a return: taking the server down in order would wait for a generation that nobody reads any more.
    os._exit(0)


def usable_cores() -> int:
    """CPUs this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux: containers and taskset count
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m whetherman_edge.service.embedded_server", description=__doc__)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--alias", required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ctx-tokens", type=int, default=8192)
    parser.add_argument("--parent", type=int, required=True, help="process id of the daemon")
    return parser


def _die_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the kernel knew of our wish
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
