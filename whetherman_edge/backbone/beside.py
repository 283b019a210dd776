"""``make serve``'s first run: the backbone is built beside the daemon, which serves with its static stage meanwhile.

    python -m whetherman_edge.backbone.beside PID

Low priority, a line of progress every half minute, and it ends when the daemon, process PID, does. The daemon takes the
backbone into use when it appears (``backbone.stage``). Whatever goes wrong is one line; nothing depends on it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress

from whetherman_edge.backbone import install, llama_build
from whetherman_edge.backbone.manifest import read_manifest
from whetherman_edge.backbone.progress import ConsoleProgress
from whetherman_edge.errors import WhethermanError

LINE_INTERVAL_S = 30.0
WATCH_S = 1.0


def main() -> int:
    """Exit code 0 when the backbone is installed in the end."""
    os.nice(19)
    threading.Thread(target=_end_with, args=(int(sys.argv[1]),), daemon=True).start()
    progress = ConsoleProgress(interval_s=LINE_INTERVAL_S)
    try:
        manifest = read_manifest()
        if llama_build.is_installed() and install.find_backbone(manifest) is not None:
            return 0
        progress.note(
            "== the backbone is being installed beside the sidecar, which serves with its static stage until then; "
            "GEMMA=0 make serve leaves it out"
        )
        llama_build.ensure(progress)
        install.ensure_backbone(manifest, progress)
    except WhethermanError as exc:
        progress.note(f"== the backbone is not installed: {exc}")
        return exc.exit_code
    progress.note("== the backbone is installed; the sidecar takes it into use within a few seconds")
    return 0


def _end_with(daemon: int) -> None:
    """Go when the daemon has gone: no compiler must outlive a Ctrl-C."""
    with suppress(ProcessLookupError):
        while True:
            os.kill(daemon, 0)
            time.sleep(WATCH_S)
    llama_build.end_all()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
