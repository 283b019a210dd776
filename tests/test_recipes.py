"""docs/recipes.md says what the code does: commands parse, configuration loads, paths and reasons are the real ones."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from whetherman_edge import cli
from whetherman_edge.config import load_config
from whetherman_edge.dialects.registry import PATHS

ROOT = Path(__file__).resolve().parents[1]
RECIPES = (ROOT / "docs" / "recipes.md").read_text("utf-8")


def test_commands_parse():
    commands = re.findall(r"^whetherman-edge .*$", RECIPES, re.MULTILINE)
    assert commands
    for command in commands:
        args = shlex.split(command)[1:]
        assert callable(cli._parser(args).parse_args(args).run)


def test_the_settings_of_the_service_load(tmp_path):
    (block,) = [text for text in re.findall(r"```toml\n(.*?)```", RECIPES, re.DOTALL) if "upstream_kind" in text]
    file = tmp_path / "config.toml"
    file.write_text(block)
    config = load_config({}, environ={}, path=file).config
    assert (config.port, config.upstream, config.upstream_kind) == (11434, "http://127.0.0.1:11435", "ollama")


def test_gated_paths_are_those_of_the_code():
    assert set(re.findall(r"\| `POST (\S+)` \|", RECIPES)) == {
        path for path in PATHS if path.startswith(("/v1", "/api"))
    }


def test_reasons_are_those_of_the_code():
    code = "".join(path.read_text("utf-8") for path in (ROOT / "whetherman_edge").rglob("*.py"))
    for reason in set(re.findall(r"`(bypass:\w+)`", RECIPES)):
        assert f'"{reason}"' in code
