"""README.md and MODELS.md say what the code does: commands parse, files exist, hashes are the catalogue's."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from convert import model_card
from whetherman_edge import cli
from whetherman_edge.backbone.progress import human_bytes
from whetherman_edge.backbone.weights import CATALOGUE
from whetherman_edge.config import Config, load_config

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text("utf-8")
MODELS = (ROOT / "MODELS.md").read_text("utf-8")
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")
DOCUMENTS = ("README.md", "MODELS.md", "CHANGELOG.md")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands(program: str) -> list[str]:
    """Every line of the README's shell blocks that runs ``program``, without comments and leading variables."""
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    found = [re.sub(r"^(?:[A-Z_]+=\S+ )+", "", line) for line in lines]
    return [line for line in found if line.startswith(f"{program} ")]


@pytest.mark.parametrize("command", commands("whetherman-edge"))
def test_commands_of_the_readme_parse(command):
    args = shlex.split(command, comments=True)[1:]
    assert callable(cli._parser(args).parse_args(args).run)


def test_there_are_commands_to_check():
    assert len(commands("whetherman-edge")) >= 3


@pytest.mark.parametrize("verb", sorted(set(re.findall(r"`whetherman-edge ([a-z]+)", README + MODELS))))
def test_verbs_that_are_named_exist(verb):
    assert verb in {name for name, _, _ in cli.VERBS}


@pytest.mark.parametrize("command", sorted(set(re.findall(r"make [a-z]+(?: [A-Z]+=\S+)?", README))))
def test_make_targets_and_variables_exist(command):
    target, *variables = command.split()[1:]
    assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)
    for variable in variables:
        assert f"$({variable.partition('=')[0]})" in MAKEFILE


@pytest.mark.parametrize("text", blocks("toml"))
def test_configuration_of_the_readme_loads(text, tmp_path):
    file = tmp_path / "config.toml"
    file.write_text(text)
    assert load_config({}, environ={}, path=file).config != Config()


def test_variables_are_known():
    """Each WHETHERMAN_* is a configuration key or stands in the code that reads it."""
    code = "".join(path.read_text("utf-8") for path in (ROOT / "whetherman_edge").rglob("*.py"))
    keys = {f"WHETHERMAN_{key.upper()}" for key in Config.__struct_fields__}
    for name in set(re.findall(r"WHETHERMAN_[A-Z_]*[A-Z]", README + MODELS)) - keys:
        assert f'"{name}"' in code, name


def test_headers_are_those_of_the_code():
    code = "".join(path.read_text("utf-8") for path in (ROOT / "whetherman_edge" / "proxy").rglob("*.py"))
    for name in re.findall(r"x-(?:whetherman|session)-[a-z]+", README):
        assert name in code, name


def test_figures_of_the_artifacts_are_those_of_their_manifests():
    """`python -m convert.model_card` writes them."""
    names = {name for _, name, _ in model_card.BLOCK.findall(MODELS)}
    assert names == set(model_card.blocks())
    assert model_card.filled(MODELS) == MODELS


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / document).read_text("utf-8")):
        assert target.startswith("https://") or (ROOT / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS)
def test_no_path_of_a_machine(document):
    text = (ROOT / document).read_text("utf-8")
    assert re.findall(r"/(?:root|work|home|Users|tmp)/", text) == []


@pytest.mark.parametrize("entry", CATALOGUE.values(), ids=lambda entry: entry.name)
def test_models_page_is_the_catalogue(entry):
    rows = [line for line in MODELS.splitlines() if line.startswith(f"| `{entry.name}` ")]
    assert len(rows) == 2
    package, _, version = entry.packages[0].partition("==")
    assert all(name.endswith(f"=={version}") for name in entry.packages)
    for text in (entry.origin, human_bytes(entry.size_bytes), entry.licence, f"`{package}", version):
        assert text in rows[0]
    if len(entry.packages) > 1:
        assert f"`-part{len(entry.packages)}`" in rows[0]
    for text in (entry.file, entry.sha256):
        assert f"`{text}`" in rows[1]
