"""A fixture repository in a temporary folder, and a Python runner. The folder is made at the first call."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from whetherman_edge.calibrate.probe import Tool
from whetherman_edge.calibrate.probes.world import Kit, ToolFault, schema

from . import sandbox


class Repository(Kit):
    """list_files, search_files, read_file, replace_in_file, run_tests, run_python. Setting: "files": {path: text}."""

    name: ClassVar[str] = "repository"
    tools: ClassVar[tuple[Tool, ...]] = (
        Tool("list_files", "List the files of the project with their sizes in bytes.", schema({})),
        Tool(
            "search_files",
            "Find a text in the project's files; returns path, line number and line of each hit.",
            schema({"text": "str: exact text"}),
        ),
        Tool("read_file", "Return the content of one file of the project.", schema({"path": "str: relative path"})),
        Tool(
            "replace_in_file",
            "Replace a text that occurs exactly once in a file of the project.",
            schema({"path": "str: ", "old": "str: ", "new": "str: "}),
            "write",
        ),
        Tool(
            "run_tests",
            "Run the project's tests; returns how many passed and failed, and the first failures.",
            schema({}, {"file": "str: only this test file"}),
        ),
        Tool(
            "run_python",
            "Run a short Python program in a sandbox (no network, no files) and return what it prints.",
            schema({"code": "str: "}),
        ),
    )

    def __init__(self, setting: Mapping[str, Any]) -> None:
        super().__init__(setting)
        self._files: dict[str, str] = dict(setting.get("files", {}))
        self._folder: Path | None = None

    @property
    def folder(self) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="whetherman-repository-"))
            for path, text in self._files.items():
                (self._folder / path).parent.mkdir(parents=True, exist_ok=True)
                (self._folder / path).write_text(text, "utf-8")
        return self._folder

    def list_files(self) -> str:
        return "\n".join(f"{path} ({len(self._file(path).read_bytes())})" for path in sorted(self._files)) or "no files"

    def search_files(self, text: str) -> str:
        hits = [
            f"{path}:{number}: {line.strip()[:80]}"
            for path in sorted(self._files)
            for number, line in enumerate(self._file(path).read_text("utf-8").splitlines(), 1)
            if text.lower() in line.lower()
        ]
        return "\n".join(hits[:8]) or "no matches"

    def read_file(self, path: str) -> str:
        return self._file(path).read_text("utf-8")

    def replace_in_file(self, path: str, old: str, new: str) -> str:
        text = self._file(path).read_text("utf-8")
        if text.count(old) != 1:
            raise ToolFault(f"old: expected exactly one occurrence, found {text.count(old)}")
        self._file(path).write_text(text.replace(old, new), "utf-8")
        return "replaced"

    def run_tests(self, file: str = "") -> str:
        if file.strip():  # "0 passed, 0 failed" of a file that is not there would read as a success
            return sandbox.run_tests(self.folder, self._file(file).name)
        return sandbox.run_tests(self.folder)

    def run_python(self, code: str) -> str:
        return sandbox.run_program(code)

    def _file(self, path: str) -> Path:
        """A file that the fixture brought; nothing else of the machine can be named."""
        name = path.strip().removeprefix("./").lstrip("/")
        if name not in self._files:
            raise ToolFault(f"no file {path[:60]!r}")
        return self.folder / name

    def changes(self) -> list[dict[str, Any]]:
        if self._folder is None:
            return []
        now = {path: (self._folder / path).read_text("utf-8") for path in self._files}
        return [{"path": path, "text": now[path]} for path in now if now[path] != self._files[path]]

    def close(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
