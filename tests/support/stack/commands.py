"""The `quire` command as people run it, and what it printed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.stack.up_process import TIMEOUT_S

ROOT = Path(__file__).parents[3]


def quire(*arguments: str, check: bool = True, timeout_s: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    """`quire ARGUMENTS`, run to its end."""
    command = [sys.executable, "-m", "quire", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=check)


def steps(admin: str, *options: str) -> list[dict[str, Any]]:
    """`quire steps --json`, parsed."""
    return [json.loads(line) for line in quire("steps", "--json", "--admin", admin, *options).stdout.splitlines()]


def blocks(admin: str) -> dict[str, Any]:
    """`quire blocks --json`, parsed."""
    return json.loads(quire("blocks", "--json", "--admin", admin).stdout)
