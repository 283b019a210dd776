"""The backbone's manifest: which base, adapter, layer, head and static stage belong together; checked before use.

``artifacts/backbone.json`` (or the file that ``WHETHERMAN_BACKBONE`` names) and the files it names beside it. Whatever
does not fit is refused as a whole: half of an artifact would give numbers that look right.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from whetherman_edge.errors import ArtifactError

DEFAULT_PATH: Final = Path(__file__).resolve().parent.parent / "artifacts" / "backbone.json"
FORMAT: Final = "whetherman-backbone"
VERSION: Final = 3
"""3: thresholds for each phase.
2: tool lines hold the opening sentences of a description, not the first alone; heads fit one of the two."""
CLASSES: Final = ("ACT", "ANSWER", "ASK", "DECLINE")
FILE_BYTES_MAX: Final = 1 << 20  # the shipped manifest is a few kilobytes, dev figures and all
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")

Quantisation = Literal["f16", "q8_0", "q4_0", "q4_k_m"]


class BaseWeights(msgspec.Struct, frozen=True):
    """The GGUF file everything starts from; ``name`` as in ``backbone.weights.CATALOGUE``."""

    name: str
    sha256: str


class Adapter(msgspec.Struct, frozen=True):
    """A LoRA adapter that is merged into the base; ``file`` stands beside the manifest."""

    file: str
    sha256: str
    r: int
    alpha: float
    rslora: bool = False


class HeadsFile(msgspec.Struct, frozen=True):
    """Heads and fusion; ``file`` stands beside the manifest."""

    file: str
    sha256: str


class DefaultTau(msgspec.Struct, frozen=True, rename="upper"):
    """Least 1 - p(need) at which a decision is made without a profile; None: never."""

    answer: float | None = None
    ask: float | None = None
    decline: float | None = None


class AskBand(msgspec.Struct, frozen=True):
    """The backbone is asked when the static 1 - p(need) lies in [low, high]."""

    low: float
    high: float


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest as it is written, fields in its order; ``path`` is where it was read.

    ``layer``: 0-based block whose output is read. ``n_layers``: blocks kept in the derived file. ``tools_max`` and
    ``dialogue_max``: token budgets of the prompt. ``default_tau``: one for each phase of a dialogue.
    ``dev``: figures, for people.
    """

    format: str
    version: int
    base: BaseWeights
    adapter: Adapter | None = None
    prompt_style: Literal["compact", "functiongemma"]
    layer: int
    pooling: Literal["last"]
    quantisation: Quantisation
    n_layers: int
    heads: HeadsFile
    gate_static_sha256: str
    router_sha256: str
    classes: tuple[str, ...]
    tools_max: int
    dialogue_max: int
    default_tau: tuple[DefaultTau, ...]
    ask_band: AskBand
    dev: dict[str, Any] = {}
    path: Path = DEFAULT_PATH

    @property
    def weights_key(self) -> str:
        """16 hex digits that name the derived weights: a new head alone does not need new ones."""
        adapter = self.adapter
        parts = (
            self.base.sha256,
            f"{adapter.sha256} {adapter.r} {adapter.alpha:g} {adapter.rslora}" if adapter is not None else "",
            self.quantisation,
            str(self.n_layers),
        )
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    @property
    def sha256(self) -> str:
        """Identity of the stage for profiles: 64 hex digits over all that its probabilities depend on."""
        parts = (
            self.weights_key,
            self.heads.sha256,
            self.gate_static_sha256,
            self.router_sha256,
            self.prompt_style,
            f"{self.layer} {self.tools_max} {self.dialogue_max}",
        )
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    @property
    def adapter_path(self) -> Path | None:
        """The adapter's file, None without one."""
        return self.path.with_name(self.adapter.file) if self.adapter is not None else None

    def read_heads(self) -> bytes:
        """Bytes of the heads' file. Raises ArtifactError when it is missing or is another than was measured."""
        return self._read(self.heads.file, self.heads.sha256)

    def check_adapter(self) -> None:
        """Raise ArtifactError when the adapter's file is missing or is another than was measured."""
        if self.adapter is not None:
            self._read(self.adapter.file, self.adapter.sha256)

    def check_stages(self, gate_static_sha256: str, router_sha256: str) -> None:
        """Raise ArtifactError unless the fusion was fitted on the static gate and router that are loaded."""
        for name, expected, loaded in (
            ("static gate", self.gate_static_sha256, gate_static_sha256),
            ("router", self.router_sha256, router_sha256),
        ):
            if expected != loaded:
                raise fault(self.path, f"it was fitted on {name} {expected[:12]}…, but {loaded[:12]}… is loaded")

    def check_base(self, sha256: str) -> None:
        """Raise ArtifactError unless the base file is the one the adapter and the head were trained on."""
        if sha256 != self.base.sha256:
            raise fault(self.path, f"it was trained on base {self.base.sha256[:12]}…, but {sha256[:12]}… is installed")

    def _read(self, file: str, sha256: str) -> bytes:
        path = self.path.with_name(file)
        try:
            raw = path.read_bytes()
        except OSError as exc:
            raise fault(path, f"cannot be read ({exc.strerror or exc})") from exc
        found = hashlib.sha256(raw).hexdigest()
        if found != sha256:
            raise fault(path, f"expected sha256 {sha256[:12]}…, found {found[:12]}…")
        return raw


_decode = msgspec.json.Decoder(Manifest).decode


def packaged_path() -> Path:
    """The manifest in use: ``WHETHERMAN_BACKBONE`` where it is set, else the packaged one."""
    named = os.environ.get("WHETHERMAN_BACKBONE")
    return Path(named).expanduser() if named else DEFAULT_PATH


def read_manifest(path: Path | None = None) -> Manifest:
    """The manifest at ``path`` (default ``packaged_path()``), checked in itself.

    The files it names are checked when they are read. Raises ArtifactError.
    """
    path = packaged_path() if path is None else path
    try:
        with path.open("rb") as file:
            raw = file.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError as exc:
        raise fault(path, "is missing") from exc
    except OSError as exc:
        raise fault(path, f"cannot be read ({exc.strerror or exc})") from exc
    if len(raw) > FILE_BYTES_MAX:
        raise fault(path, f"expected at most {FILE_BYTES_MAX} bytes")
    try:
        manifest = msgspec.structs.replace(_decode(raw), path=path)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:  # ValidationError is a DecodeError
        raise fault(path, f"is not a manifest of this version ({exc})") from exc
    problem = _problem(manifest)
    if problem:
        raise fault(path, problem)
    return manifest


def fault(path: Path, what: str) -> ArtifactError:
    """An ArtifactError that names the file, the finding and the fix."""
    return ArtifactError(
        f"backbone artifact {path.name}: {what}. Reinstall the package; the static stage serves meanwhile"
    )


def _problem(manifest: Manifest) -> str:
    """What the types let through and means nothing; "" when all is well."""
    if manifest.format != FORMAT or manifest.version != VERSION:
        return f"expected {FORMAT} version {VERSION}, found {manifest.format[:40]!r} version {manifest.version}"
    if manifest.classes != CLASSES:
        return f"expected the classes {', '.join(CLASSES)} in this order"
    hashes = [manifest.base.sha256, manifest.heads.sha256, manifest.gate_static_sha256, manifest.router_sha256]
    files = [manifest.heads.file]
    if manifest.adapter is not None:
        hashes.append(manifest.adapter.sha256)
        files.append(manifest.adapter.file)
        if manifest.adapter.r < 1 or not manifest.adapter.alpha > 0.0:
            return "expected an adapter of rank and alpha above 0"
    if not all(_SHA256.fullmatch(one) for one in hashes):
        return "expected every sha256 as 64 lower-case hex digits"
    if not all(_FILE_NAME.fullmatch(one) for one in files):
        return "expected plain file names that stand beside the manifest"
    if not 0 <= manifest.layer < manifest.n_layers:
        return f"expected a layer below n_layers ({manifest.n_layers}), found {manifest.layer}"
    if min(manifest.tools_max, manifest.dialogue_max) < 1:
        return "expected tools_max and dialogue_max above 0"
    band = manifest.ask_band
    if not 0.0 <= band.low <= band.high <= 1.0:
        return f"expected 0 <= ask_band.low <= ask_band.high <= 1, found {band.low} and {band.high}"
    numbers = [one for tau in manifest.default_tau for one in (tau.answer, tau.ask, tau.decline) if one is not None]
    if not all(0.0 <= one <= 1.0 for one in numbers):
        return "expected each default_tau in 0..1, or null"
    return ""
