"""What the documents say exists: links, commands, modules, names."""

import importlib
import importlib.util
import itertools
import json
import re
from pathlib import Path

import pytest

import quire
from tests.support.cli_lines import parse_quire, shell_lines
from tests.support.tree import ROOT, files, name_of

DOCUMENTS = sorted(path for path in files() if path.suffix == ".md")
OWN = [path for path in DOCUMENTS if name_of(path) != "tests/golden/README.md"]
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
PYTHON = re.compile(r"^```python\n(.*?)^```", re.M | re.S)


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    text = re.sub(r"[`*]", "", heading.strip().lower())
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", text))


def anchors(markdown: str) -> set[str]:
    """Anchors of a Markdown text."""
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", markdown, re.M)}


def make_targets() -> set[str]:
    """Targets that the Makefile offers."""
    return set(re.findall(r"^\.PHONY: ([a-z-]+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))


def commands(path: Path) -> list[list[str]]:
    """Shell commands of a document, without environment settings in front and without .venv/bin/; each of a pipe or list."""
    found = []
    for line in shell_lines(path.read_text(encoding="utf-8")):
        for is_operator, part in itertools.groupby(line, lambda word: word in {"|", ">", "&", "&&"}):
            words = list(itertools.dropwhile(lambda word: re.fullmatch(r"[A-Z_]+=\S*", word), part))
            if words and not is_operator:
                found.append([words[0].removeprefix(".venv/bin/"), *words[1:]])
    return found


@pytest.mark.parametrize("path", OWN, ids=name_of)
def test_links_resolve(path: Path) -> None:
    """Every relative link leads to a file, and to a heading where it names one."""
    for link in LINK.findall(path.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), f"{name_of(path)} links to {link}"
        if anchor:
            assert anchor in anchors(file.read_text(encoding="utf-8")), f"{name_of(path)} links to {link}"


def test_files_named_in_the_architecture_exist() -> None:
    """Each Python file that the ten steps name is one of ours."""
    named = set(re.findall(r"`([\w/]+\.py)`", (ROOT / "docs/architecture.md").read_text(encoding="utf-8")))
    ours = [name_of(path) for path in files()]
    unknown = [name for name in named if not any(f"/{own}".endswith(f"/{name}") for own in ours)]
    assert len(named) > 30
    assert not unknown, unknown


def test_documents_are_there_and_linked() -> None:
    """The documents that readers expect exist, and every decision is in the list."""
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/architecture.md"):
        assert (ROOT / name).stat().st_size > 1000, name
    listed = set(LINK.findall((ROOT / "docs/decisions/README.md").read_text(encoding="utf-8")))
    records = {path.name for path in (ROOT / "docs/decisions").glob("[0-9]*.md")}
    assert records == listed != set()
    licence = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in licence
    assert "END OF TERMS AND CONDITIONS" in licence


@pytest.mark.parametrize("path", OWN, ids=name_of)
def test_commands_exist(path: Path) -> None:
    """Every `make`, `quire` and `python -m` line in a shell block is one that works."""
    for first, *rest in commands(path):
        if first == "make":
            assert set(rest) <= make_targets(), f"make {rest}"
        elif first == "quire":
            parse_quire(rest)
        elif first == "python" and rest[0] == "-m":
            assert importlib.util.find_spec(rest[1]), rest


def test_the_table_of_commands_is_whole() -> None:
    """README's table names each target of the Makefile and each command of `quire`, and no other."""
    table = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Commands")[2].partition("\n## ")[0]
    assert set(re.findall(r"`make ([a-z-]+)`", table)) == make_targets() - {"help", "setup"}
    cells = [cell for row in table.splitlines() if row.startswith("| `quire") for cell in row.split("|")[1:2]]
    named = {name.removeprefix("quire ") for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    from quire.cli import RootGroup
    from quire.cli.serving.serve import ServeGroup

    assert named == {*RootGroup.table, *(f"serve {name}" for name in ServeGroup.table)} - {"serve"}


@pytest.mark.parametrize("path", [p for p in OWN if PYTHON.search(p.read_text(encoding="utf-8"))], ids=name_of)
def test_python_examples_import_what_exists(path: Path) -> None:
    """Python blocks compile, and every name they import from our packages is there."""
    for block in PYTHON.findall(path.read_text(encoding="utf-8")):
        compile(block, str(path), "exec")
        for module, names in re.findall(r"^from (quire[\w.]*) import ([\w, ]+)$", block, re.M):
            for name in names.split(","):
                assert hasattr(importlib.import_module(module), name.strip())


def test_all_is_the_public_api() -> None:
    """`quire.__all__` names exactly what the package offers, and each of them can be had."""
    assert sorted(quire.__all__) == sorted(dir(quire))
    assert len(set(quire.__all__)) == len(quire.__all__)
    for name in quire.__all__:
        assert getattr(quire, name) is not None
    assert {"LLM", "SamplingParams", "Client"} <= set(quire.__all__)


def test_versions_agree() -> None:
    """pyproject.toml, the package, the changelog and the images say the same version."""
    import tomllib

    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert quire.__version__ == version
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    images = re.findall(r"image: quire-\w+:(\S+)", (ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    assert images == [version] * 3


def test_results_say_where_they_come_from() -> None:
    """Every committed figure names machine, versions and commit."""
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        result = json.loads(path.read_text(encoding="utf-8"))
        assert {"machine", "versions", "commit", "when", "benchmark"} <= result.keys(), name_of(path)
