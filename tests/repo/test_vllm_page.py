"""docs/coming-from-vllm.md names options and commands of Quire that exist."""

import re

from quire.cli import RootGroup
from tests.configuration_page import ROOT, page

TEXT = (ROOT / "docs" / "coming-from-vllm.md").read_text(encoding="utf-8")
STARTING = TEXT.partition("## Starting")[2].partition("## The OpenAI API")[0]


def test_options_exist() -> None:
    """Every option in the second column is one that `docs/configuration.md` has."""
    known = set(re.findall(r"--[a-z-]+", page()))
    cells = [line.split(" | ")[1] for line in STARTING.splitlines() if line.startswith("| ") and " | " in line]
    named = {option for cell in cells for option in re.findall(r"--[a-z-]+", cell)}
    assert len(named) > 25
    assert named <= known


def test_commands_exist() -> None:
    """Every `quire COMMAND` is one."""
    named = set(re.findall(r"`?quire ([a-z][a-z-]+)", TEXT)) - {"import"}
    assert {"up", "why", "bench"} <= named
    assert named <= RootGroup.table.keys()
