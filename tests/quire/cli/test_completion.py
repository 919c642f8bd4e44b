"""Shell completion in a real bash: commands, commands of groups and options, without loading what serves a model."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")

COMPLETE = """
source <(quire --show-completion bash)
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_quire_completion quire
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def imports(tmp_path: Path) -> Path:
    """A folder with a program `quire` that runs this checkout and writes what was imported beside itself."""
    program = tmp_path / "quire"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -X importtime -m quire "$@" 2>"{tmp_path}/imports"\n')
    program.chmod(0o755)
    return tmp_path


def completed(folder: Path, *words: str) -> list[str]:
    """What bash offers for the last word."""
    environ = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    command = ["bash", "--norc", "-c", COMPLETE, "bash", "quire", *words]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240, check=True)
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["ser"], {"serve"}),
        (["serve", ""], {"gateway", "scheduler", "worker", "simulated-worker"}),
        (["serve", "worker", "--kv-cache-mem"], {"--kv-cache-memory"}),
        (["up", "--max-model-l"], {"--max-model-len"}),
    ],
)
def test_bash_completes(imports: Path, words: list[str], offered: set[str]) -> None:
    """Exactly what begins like that; a worker's options are known without torch."""
    assert set(completed(imports, *words)) == offered
    imported = {line.rpartition("|")[2].strip() for line in (imports / "imports").read_text().splitlines()}
    assert "quire.cli.groups" in imported
    assert not imported & {"torch", "transformers", "tokenizers", "starlette"}
