"""The backbone's own weights: made on this machine from the base GGUF and the packaged adapter, under a name of theirs.

``gemma`` to the user. The derived file is named by ``Manifest.weights_key``, so a new adapter makes a new file and a
new head does not. It appears under that name only when it is whole; beside it stands its sha256. An artifact without an
adapter, on the base's own quantisation, runs on the base file itself.
"""

from __future__ import annotations

import importlib.util
import threading
import time
from pathlib import Path
from typing import Final

import msgspec

from whetherman_edge.backbone import store
from whetherman_edge.backbone.manifest import Manifest
from whetherman_edge.backbone.progress import Progress
from whetherman_edge.backbone.weights import CATALOGUE
from whetherman_edge.errors import ArtifactError, EnvironmentFault

NAME: Final = "gemma"
"""What the user calls it: ``model install gemma``."""
FOLDER: Final = "derived"
"""Under the models' directory, away from what was fetched or imported."""
UNUSED_S: Final = 14 * 86_400
"""Weights of another artifact are kept this long after a daemon last wrote beside them: a second installation of the
package may still run on them.
"""
INSTALL: Final = f"`whetherman-edge model install {NAME}` installs it (about 250 MB, Gemma Terms of Use)"
BASE_QUANTISATION: Final = "q4_k_m"


def uses_base(manifest: Manifest) -> bool:
    """Whether the base file itself is what runs."""
    return manifest.adapter is None and manifest.quantisation == BASE_QUANTISATION


def find_backbone(manifest: Manifest) -> store.Installed | None:
    """The weights that belong to the manifest, or None. Checks sizes, not hashes."""
    if uses_base(manifest):
        found = store.find(manifest.base.name)
        return found if found is not None and found.sha256 == manifest.base.sha256 else None
    path = _derived(manifest)
    record = _record(path)
    if record is None or not path.is_file() or path.stat().st_size != record.size_bytes:
        return None
    return store.Installed(NAME, path, record.size_bytes, record.sha256, _licence(manifest), tools=False)


def require_backbone(manifest: Manifest) -> Path:
    """The weights' path, for a worker that is to run on them.

    Raises EnvironmentFault without llama.cpp, ArtifactError without the weights, each with what installs it.
    """
    if importlib.util.find_spec("llama_cpp") is None:
        raise EnvironmentFault(f"the backbone needs llama-cpp-python, which is not installed; {INSTALL}")
    found = find_backbone(manifest)
    if found is None:
        raise ArtifactError(f"the backbone's weights are not installed; {INSTALL}")
    return found.path


def ensure_backbone(
    manifest: Manifest, progress: Progress, *, force: bool = False, cancel: threading.Event | None = None
) -> store.Installed:
    """The backbone's weights, made first when they are not there: base fetched, adapter merged, quantised.

    Blocking. Raises EnvironmentFault (pip, disk, the ``gguf`` package), ArtifactError (a base or an adapter that does
    not fit, changed files), fetch.Cancelled.
    """
    manifest.check_adapter()
    if not force and (found := find_backbone(manifest)) is not None:
        return found
    cancel = cancel or threading.Event()
    base = store.ensure(manifest.base.name, progress, cancel=cancel)
    manifest.check_base(base.sha256)
    if uses_base(manifest):
        return base
    target = _derived(manifest)
    folder = store.writable(target.parent)
    with store.install_lock(folder / f"{target.name}.lock", progress, cancel), store.disk_errors(folder):
        if not force and (found := find_backbone(manifest)) is not None:
            return found
        _sweep(target)
        store.need_space(folder, base.size_bytes)
        progress.note(f"{NAME}: {_what(manifest)}; licence {_licence(manifest)}, kept in {folder}")
        sha256 = _make(manifest, base.path, target, progress)
        record = store.ImportRecord(sha256=sha256, size_bytes=target.stat().st_size)
        store.write_atomic(_record_path(target), msgspec.json.encode(record))
        for name in _forget_unused(target):
            progress.note(f"{NAME}: removed {name} of an earlier version, not used for {UNUSED_S // 86_400} days")
    progress.note(f"{NAME}: installed")
    made = find_backbone(manifest)
    assert made is not None, "what was just made is there"
    return made


def prefixes_path(manifest: Manifest) -> Path:
    """Where keys and values of tools blocks are kept over a restart (``persist``); beside the derived weights."""
    return _derived(manifest).with_suffix(".prefixes")


def verify_backbone(manifest: Manifest) -> store.Installed:
    """Hash the weights again. Raises ArtifactError when they are absent or have changed."""
    found = find_backbone(manifest)
    if found is None:
        raise ArtifactError(f"the backbone's weights are not installed; {INSTALL}")
    actual = store.sha256_of(found.path)
    if actual != found.sha256:
        raise ArtifactError(
            f"expected sha256 {found.sha256} for {found.path}, found {actual}: the file has changed; "
            f"whetherman-edge model install {NAME} --force"
        )
    return found


def _make(manifest: Manifest, base: Path, target: Path, progress: Progress) -> str:
    """Derive ``target``; returns its sha256."""
    from whetherman_edge.backbone import derive

    adapter, scale = manifest.adapter, None
    if adapter is not None:
        scale = derive.Scale(r=adapter.r, alpha=adapter.alpha, rslora=adapter.rslora)
    begun = False

    def at(done: int, total: int) -> None:
        nonlocal begun
        if not begun:
            progress.begin(NAME, total, 0, unit="tensors")
            begun = True
        progress.at(done)

    direct = manifest.quantisation in derive.KINDS
    made = target if direct else _plain(target)
    try:
        sha256 = derive.derive(
            base,
            made,
            kind=manifest.quantisation if direct else "f16",
            n_layers=manifest.n_layers,
            adapter=manifest.adapter_path,
            scale=scale,
            progress=at,
        )
        if direct:
            return sha256
        from whetherman_edge.backbone.quantise import quantise

        quantise(made, target, manifest.quantisation, None)
        return store.sha256_of(target)
    finally:
        progress.end()
        if not direct:
            made.unlink(missing_ok=True)


def _sweep(target: Path) -> None:
    """Remove what a run that was killed has left half-made, up to a quarter of a gigabyte each time. Under the lock."""
    for left in (*target.parent.glob(f".{target.name}.*.partial"), _plain(target)):
        left.unlink(missing_ok=True)


def _forget_unused(target: Path) -> list[str]:
    """Remove derived weights under other keys, with what lies beside them; their names."""
    gone = []
    for weights in target.parent.glob("backbone-*.gguf"):
        family = [weights, *target.parent.glob(f"{weights.name}.*"), weights.with_suffix(".prefixes")]
        last_used_s = max((path.stat().st_mtime for path in family if path.exists()), default=0.0)
        if weights != target and time.time() - last_used_s > UNUSED_S:
            for path in family:
                path.unlink(missing_ok=True)
            gone.append(weights.name)
    return gone


def _plain(target: Path) -> Path:
    """The step between base and target, for quantisations that only llama.cpp makes."""
    return target.with_name(f"{target.name}.f16")


def _what(manifest: Manifest) -> str:
    """One line on what is being made."""
    adapter = "with the packaged adapter" if manifest.adapter is not None else "without an adapter"
    return f"the first {manifest.n_layers} blocks of {manifest.base.name} {adapter}, {manifest.quantisation}"


def _licence(manifest: Manifest) -> str:
    entry = CATALOGUE.get(manifest.base.name)
    return entry.licence if entry is not None else "as stated by its publisher"


def _derived(manifest: Manifest) -> Path:
    return store.models_dir() / FOLDER / f"backbone-{manifest.weights_key}.gguf"


def _record_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _record(path: Path) -> store.ImportRecord | None:
    try:
        return msgspec.json.decode(_record_path(path).read_bytes(), type=store.ImportRecord)
    except (OSError, msgspec.DecodeError):
        return None
