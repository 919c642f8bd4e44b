"""The `quire` command as people run it, and what it printed; in a process of its own or in the test's."""

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from quire.cli import main
from quire.operators.admin import AdminClient
from tests.support.stack.up_process import TIMEOUT_S

ROOT = Path(__file__).parents[3]


def quire(*arguments: str, check: bool = True, timeout_s: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    """`quire ARGUMENTS`, run to its end."""
    command = [sys.executable, "-m", "quire", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=check)


def quire_here(*arguments: str, check: bool = False) -> subprocess.CompletedProcess[str]:
    """The same in this process, which has imported everything: for commands that leave a process as it was."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(arguments)
        except SystemExit as end:
            status = int(end.code or 0)
    done = subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())
    if check:
        done.check_returncode()
    return done


def steps(admin: str, *options: str) -> list[dict[str, Any]]:
    """`quire steps --json`, parsed."""
    printed = quire_here("steps", "--json", "--admin", admin, *options, check=True).stdout
    return [json.loads(line) for line in printed.splitlines()]


def steps_since(admin: str, first: int) -> list[dict[str, Any]]:
    """Those after step `first`; see `last_step`."""
    return steps(admin, "--since", str(first + 1))


def last_step(admin: str) -> int:
    """Number of the last step that was planned; 0 = none."""
    with AdminClient(admin) as client:
        return client.blocks().step


def blocks(admin: str) -> dict[str, Any]:
    """`quire blocks --json`, parsed."""
    return json.loads(quire_here("blocks", "--json", "--admin", admin, check=True).stdout)
