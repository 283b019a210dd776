"""What the field showed of each agent, on disk between two runs of the daemon: small, versioned, no text of a prompt.

``agents.json`` in the state folder. Written whole and atomically; a file that is broken or of another version is left
out of account, since all it costs is that the evidence starts anew.
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

import msgspec
import platformdirs

from whetherman_edge.gate.verdict import CAUSES, Cause

log = logging.getLogger(__name__)

NAME = "agents.json"
VERSION = 1
FILE_BYTES_MAX = 1 << 20
# Evidence this old says little about a model server of today, and a stop should not outlive its cause.
AGE_DAYS_MAX = 30.0
AGENTS_MAX = 256


class CauseRecord(msgspec.Struct, frozen=True):
    """The evidence about one cause (``gate.backoff``).

    ``tests``: (n, e) of each sequential test by name. ``stopped``: the test that ended withholding by it, or "".
    """

    tests: dict[str, tuple[int, float]] = {}
    n_applied: int = 0
    stopped: str = ""


class FieldRecord(msgspec.Struct, frozen=True):
    """One agent's evidence.

    ``basis``: digest of the profile that it is about, "" without one. ``at_s``: Unix time of the last change.
    ``tests``, ``n_applied``, ``stopped``: of scored decisions, as in CauseRecord; ``loop_guard``: of the loop guard.
    Before these were told apart the first three were of both: such a record counts for scored decisions.
    ``advice``: why the agent should be calibrated again, or "".
    """

    basis: str
    at_s: float
    tests: dict[str, tuple[int, float]] = {}
    n_applied: int = 0
    stopped: str = ""
    advice: str = ""
    loop_guard: CauseRecord = CauseRecord()

    def by_cause(self) -> dict[Cause, CauseRecord]:
        """The evidence by what withheld."""
        return {"scored": CauseRecord(self.tests, self.n_applied, self.stopped), "loop_guard": self.loop_guard}


class FieldState(msgspec.Struct, frozen=True):
    """The file: records by agent ("profile:NAME" or "model:NAME")."""

    version: int = VERSION
    agents: dict[str, FieldRecord] = {}


def default_path() -> Path:
    """In the folder that systemd gives the service (``StateDirectory=``), else in the user's state folder."""
    folder = os.environ.get("STATE_DIRECTORY", "").split(":")[0]
    return (Path(folder) if folder else Path(platformdirs.user_state_dir("whetherman"))) / NAME


def read(path: Path, now_s: float) -> dict[str, FieldRecord]:
    """The records that are not too old; none where the file is missing or cannot be used."""
    try:
        with path.open("rb") as file:
            state = msgspec.json.decode(file.read(FILE_BYTES_MAX), type=FieldState)
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        log.warning("event=field_state_unusable path=%s error=%s hint=evidence_starts_anew", path, type(exc).__name__)
        return {}
    if state.version != VERSION:
        log.warning("event=field_state_unusable path=%s version=%d expected=%d", path, state.version, VERSION)
        return {}
    oldest_s = now_s - AGE_DAYS_MAX * 86_400.0
    return {agent: record for agent, record in state.agents.items() if record.at_s >= oldest_s}


def write(path: Path, agents: dict[str, FieldRecord], now_s: float) -> None:
    """Replace the file; readable by its owner alone. Blocks for the disk. Raises OSError.

    Another daemon of this user may write it too: of each agent the better record stays, of all the latest AGENTS_MAX.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    kept = read(path, now_s)
    kept |= {agent: _better(record, kept.get(agent, record)) for agent, record in agents.items()}
    latest = sorted(kept.items(), key=lambda item: item[1].at_s)[-AGENTS_MAX:]
    data = msgspec.json.encode(FieldState(agents=dict(latest)))
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".agents-")  # mode 0600
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _better(ours: FieldRecord, theirs: FieldRecord) -> FieldRecord:
    """Of two records of one agent the later one, with each cause's better evidence where both are of one profile."""
    later = max(ours, theirs, key=lambda record: record.at_s)
    if ours.basis != theirs.basis:
        return later
    known = [record.by_cause() for record in (ours, theirs)]
    scored, looped = (_stronger(*(record[cause] for record in known)) for cause in CAUSES)
    return msgspec.structs.replace(
        later, tests=scored.tests, n_applied=scored.n_applied, stopped=scored.stopped, loop_guard=looped
    )


def _stronger(ours: CauseRecord, theirs: CauseRecord) -> CauseRecord:
    """A stop, then more evidence; ours of equals."""
    return max(ours, theirs, key=lambda record: (bool(record.stopped), record.n_applied + _n_tested(record)))


def _n_tested(record: CauseRecord) -> int:
    return sum(n for n, _ in record.tests.values())
