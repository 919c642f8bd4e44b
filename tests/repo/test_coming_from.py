"""Pages for users of other servers name options, commands and routes of Quire that exist."""

import re

import pytest

from gateway_svc import openapi
from quire.cli import RootGroup
from tests.configuration_page import ROOT, page

PAGES = {"vllm": 25, "others": 20}
"""Pages, and how many options they name at least."""


def text_of(name: str) -> str:
    return (ROOT / "docs" / f"coming-from-{name}.md").read_text(encoding="utf-8")


def second_cells(text: str) -> list[str]:
    """The column about Quire of all tables."""
    return [line.split(" | ")[1] for line in text.splitlines() if line.startswith("| ") and " | " in line]


@pytest.mark.parametrize("name", PAGES)
def test_options_exist(name: str) -> None:
    """Every option in the second column is one that `docs/configuration.md` has."""
    text = text_of(name)
    if name == "vllm":
        text = text.partition("## Starting")[2].partition("## The OpenAI API")[0]
    known = set(re.findall(r"--[a-z-]+", page()))
    named = {option for cell in second_cells(text) for option in re.findall(r"--[a-z-]+", cell)}
    assert len(named) > PAGES[name]
    assert named <= known


@pytest.mark.parametrize("name", PAGES)
def test_commands_exist(name: str) -> None:
    """Every `quire COMMAND` is one."""
    named = set(re.findall(r"`quire ([a-z][a-z-]+)", text_of(name))) - {"import"}
    assert {"up"} <= named
    assert named <= RootGroup.table.keys()


def test_routes_exist() -> None:
    """Every route in the second column, and those that are the same."""
    known = set(openapi.document()["paths"]) | {"/health", "/metrics"}
    rows = [line.strip("| ").split(" | ") for line in text_of("others").splitlines() if line.startswith("| `")]
    cells = [row[0] if row[1].startswith("the same") else row[1] for row in rows if len(row) > 1]
    named = {route for cell in cells for route in re.findall(r"(?:`|GET |POST )(/[a-z0-9/_]+)`", cell)}
    assert {"/v1/completions", "/tokenize", "/health"} <= named
    assert named <= known, named - known
