"""Node for tests: the packages that `make` installed into .venv/node, and scripts run with them.

Where Node or its packages are missing a test is skipped; where NEED_NODE or CI says that they have to be there, it fails.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

_PACKAGES = Path(sys.prefix) / "node"
_YES = {"true", "1"}


def node_packages(name: str) -> Path:
    """node_modules of "tools" (tests/clients/package.json) or "example" (examples/node/package.json)."""
    folder = _PACKAGES / name
    if shutil.which("node") and (folder / ".installed").is_file():
        return folder / "node_modules"
    reason = f"Node or {folder} is not there; install Node 20 or newer with npm, then `make test` fetches the packages"
    if _YES & {os.environ.get("NEED_NODE", ""), os.environ.get("CI", "")}:
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def run_node(
    folder: Path, script: str, *arguments: str, environ: Mapping[str, str] | None = None, timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    """Runs `folder/script` to its end, whatever that is; the packages it imports are beside it or above."""
    command = ["node", script, *arguments]
    env = {**os.environ, **(environ or {})}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
