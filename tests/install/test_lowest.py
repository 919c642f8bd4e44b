"""The lowest versions that are declared can be installed together, and Quire runs with them."""

import subprocess
import sys
from pathlib import Path

import pytest

from deploy.requirements import requirements
from tests.install.lowest import lowest_pins
from tests.install.test_dependencies import PROJECT
from tests.support.commands import run
from tests.support.tree import ROOT

SERVED = ("gateway", "scheduler", "worker", "bench", "tls")
FOR_TESTS = ("pytest", "pytest-timeout", "hypothesis", "openai", "jsonschema", "psutil", "peft")
SAMPLE = (
    "tests/quire/cli/test_cli.py",
    "tests/quire_tools/test_cli_plan.py",
    "tests/quire_tools/test_cli_convert.py",
    "tests/quire/test_cli_hub.py",
    "tests/quire/offline/test_llm.py",
    "tests/quire/cli/test_up.py",
    "tests/gateway/openai/test_openai_door.py",
    "tests/gateway/text/test_chat_template.py",
    "tests/gateway/checks/test_grammars.py",
    "tests/gateway/text/test_detokenizer.py",
    "tests/e2e/test_same_tokens.py",
)


def test_pins_are_the_lower_bounds() -> None:
    """Every requirement of the services has one, so that this file tries what is declared."""
    wanted = list(dict.fromkeys(requirements(PROJECT, list(SERVED))))
    pins = list(lowest_pins(wanted))
    assert len(pins) == len(wanted)
    assert "typer==0.26" in pins and "transformers==5.14" in pins


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_quire_runs_with_the_lowest_versions(tmp_path: Path) -> None:
    """An environment of exactly those; a sample of the quick tests passes in it, the whole path among them."""
    wanted = list(dict.fromkeys(requirements(PROJECT, list(SERVED))))
    constraints = tmp_path / "lowest.txt"
    constraints.write_text("\n".join(lowest_pins(wanted)) + "\n")
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    pip = (tmp_path / "venv" / "bin" / "python", "-m", "pip", "install", "--quiet", "--constraint", constraints)
    run(*pip, "--no-deps", "--retries", "1", "-r", ROOT / "quire" / "torch-cpu.txt")
    run(*pip, *wanted, *FOR_TESTS)
    run(*pip, "--no-deps", "--editable", ROOT)
    command = [
        tmp_path / "venv" / "bin" / "python",
        "-m",
        "pytest",
        "-m",
        "not long and not soak",
        "-p",
        "no:cacheprovider",
        *SAMPLE,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3000, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
