"""``model install NAME --from SOURCE``: a GGUF file, a Hugging Face folder on this machine, or one from the hub.

A folder goes through the checkout's ``convert`` package. The hub is asked only when the user
writes ``hf:``; its files are resumed where they broke off and, where the hub names a sha256, checked against it. Gated
models (google/functiongemma-270m-it is one) need ``HF_TOKEN``, which the hub alone gets to see: large files lie
elsewhere.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPMessage
from pathlib import Path
from typing import IO, Any, Final
from urllib.parse import urlsplit

from whetherman_edge.backbone import derive, store
from whetherman_edge.backbone.progress import Progress
from whetherman_edge.errors import ArtifactError, EnvironmentFault, UsageError

ENDPOINT: Final = "https://huggingface.co"
PREFIX: Final = "hf:"
DEFAULT_REPOSITORY: Final = "google/functiongemma-270m-it"
"""What a bare ``hf`` means."""
NEEDED: Final = ("config.json",)
OPTIONAL: Final = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json")
INDEX: Final = "model.safetensors.index.json"
TIMEOUT_S: Final = 30.0
DIGEST_HEADER: Final = "X-Linked-ETag"
"""On the hub's own answer, which for a large file is a redirect."""
CONVERTER: Final = "convert.hf_folder"
KIND: Final = "q8_0"
"""Quantisation of what is converted: no measured loss, half of the size."""
_REPOSITORY: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SHA256: Final = re.compile(r'"?([0-9a-f]{64})"?')


def import_from(name: str, source: str, progress: Progress) -> store.Installed:
    """Install ``source`` under ``name``. Raises UsageError, ArtifactError, EnvironmentFault."""
    if source == "hf" or source.startswith(PREFIX):
        repository = source.removeprefix("hf").removeprefix(":") or DEFAULT_REPOSITORY
        if not _REPOSITORY.fullmatch(repository):
            raise UsageError(f"--from: expected hf:OWNER/NAME, got {source[:80]!r}")
        return _from_folder(name, fetch_folder(repository, progress), progress)
    path = Path(source).expanduser()
    return _from_folder(name, path, progress) if path.is_dir() else store.import_file(name, path, progress)


def fetch_folder(repository: str, progress: Progress) -> Path:
    """The repository's files, under the models' directory; those that are there already are not fetched again."""
    folder = store.writable(store.models_dir() / "hub" / repository.replace("/", "--"))
    progress.note(f"{repository}: from {_endpoint()}, under its publisher's licence; kept in {folder}")
    with store.disk_errors(folder):
        for file in NEEDED:
            _fetch(repository, file, folder, progress, required=True)
        for file in OPTIONAL:
            _fetch(repository, file, folder, progress, required=False)
        for file in _shards(repository, folder, progress):
            _fetch(repository, file, folder, progress, required=True)
    return folder


def _shards(repository: str, folder: Path, progress: Progress) -> Iterator[str]:
    if not _fetch(repository, INDEX, folder, progress, required=False):
        yield "model.safetensors"
        return
    try:
        names = sorted(set(json.loads((folder / INDEX).read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ArtifactError(f"{repository}: expected an index of shards in {INDEX}, it is none") from exc
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ArtifactError(f"{repository}: {INDEX} names a file outside of the repository")
        yield name


def _fetch(repository: str, file: str, folder: Path, progress: Progress, *, required: bool) -> bool:
    """One file into the folder; False when the hub has no such file and it is not required."""
    target, partial = folder / file, folder / f"{file}.partial"
    if target.is_file():
        return True
    have = partial.stat().st_size if partial.is_file() else 0
    try:
        response, digest = _open(repository, file, have)
        with response:
            if have and response.status != 206:
                have = 0
            _write(response, partial, have, f"{repository}/{file}", progress)
            expected = _SHA256.fullmatch(digest)
    except urllib.error.HTTPError as exc:
        if exc.code == 404 and not required:
            return False
        raise EnvironmentFault(f"{repository}/{file}: {_refusal(exc.code)}") from exc
    except (urllib.error.URLError, TimeoutError, ConnectionError) as exc:
        raise EnvironmentFault(
            f"expected to reach {_endpoint()} for {repository}/{file}: {exc}; run the command again"
        ) from exc
    if expected is not None and store.sha256_of(partial) != expected[1]:
        partial.unlink()
        raise ArtifactError(
            f"expected sha256 {expected[1]} for {repository}/{file}, got another; run the command again"
        )
    os.replace(partial, target)
    return True


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows the hub to where a file lies, without the token. ``digest``: what the hub said of the file, or ""."""

    def __init__(self) -> None:
        self.digest = ""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        self.digest = self.digest or headers.get(DIGEST_HEADER, "")
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None and _origin(newurl) != _origin(req.full_url):
            request.remove_header("Authorization")
        return request


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc


def _open(repository: str, file: str, have: int) -> tuple[Any, str]:
    """The response for a file from byte ``have`` on, and the sha256 that the hub names, or ""."""
    headers = {"User-Agent": "whetherman-edge"}
    if token := os.environ.get("HF_TOKEN"):
        headers["Authorization"] = f"Bearer {token}"
    if have:
        headers["Range"] = f"bytes={have}-"
    url = f"{_endpoint()}/{repository}/resolve/main/{file}"
    redirects = _Redirects()
    opener = urllib.request.build_opener(redirects)
    response = opener.open(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_S)
    return response, redirects.digest or response.headers.get(DIGEST_HEADER, "")


def _write(response: Any, partial: Path, have: int, label: str, progress: Progress) -> None:
    length = int(response.headers.get("Content-Length") or 0)
    total = have + length
    progress.begin(label, total, have)
    try:
        with partial.open("ab" if have else "wb") as out:
            while block := response.read(store.BLOCK_BYTES):
                out.write(block)
                have += len(block)
                progress.at(have)
    finally:
        progress.end()
    if length and have < total:
        raise ConnectionError("the connection ended early")


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", ENDPOINT).rstrip("/")


def _refusal(status: int) -> str:
    if status in (401, 403):
        return "the hub wants an account that has accepted the model's terms; set HF_TOKEN"
    return f"the hub answered {status}"


def _from_folder(name: str, folder: Path, progress: Progress) -> store.Installed:
    """Convert a Hugging Face folder and import the result."""
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return store.import_file(name, files[0], progress)
    if not (folder / "config.json").is_file():
        raise UsageError(f"--from {folder}: expected one GGUF file or a Hugging Face folder with config.json")
    if importlib.util.find_spec("convert") is None:
        raise EnvironmentFault(
            f"--from {folder}: a Hugging Face folder is converted by the checkout's `convert` package; run this in the "
            "checkout, or convert it there and import the GGUF file"
        )
    store.writable(store.models_dir())
    converter = importlib.import_module(CONVERTER)
    with tempfile.TemporaryDirectory(dir=store.models_dir()) as scratch:
        plain, target = Path(scratch) / "plain.gguf", Path(scratch) / f"{name}.gguf"
        progress.note(f"{name}: converting {folder}")
        found = converter.HfFolder(folder)
        converter.write_gguf(found, plain, found.n_layers, KIND)
        derive.derive(plain, target, kind=KIND, n_layers=found.n_layers)
        return store.import_file(name, target, progress)
