"""What an installation without extras must say, command by command.

Checked offline by pytest, and on a real installation by `make test-install`.
"""

import importlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from quire.cli import RootGroup
from quire.cli.groups import CommandGroup
from tests.support.stack.up_process import FREE_PORTS

SCRIPT = Path(__file__).with_name("run_commands.py")
_STACK = "gateway,scheduler,worker"

NEEDS = {
    ("run",): _STACK,
    ("up", *FREE_PORTS): _STACK,
    ("up", "--simulated", *FREE_PORTS): "gateway,scheduler",
    ("up", "--model", "some/model", *FREE_PORTS): _STACK,
    ("serve", "gateway", "--port", "0"): "gateway",
    ("serve", "worker", "--port", "0"): "worker",
    ("tour", "batching"): _STACK,
    ("bench", "--up", "some/model"): "worker",
    ("bench", "--up", "."): _STACK,
    ("bench", "--plot", "load.png"): "bench",
    ("bench", "--door", "openai"): "bench",
    ("replay", "some.rec", "--policy", "fcfs", "--plot", "a.png"): "bench",
    ("lab", "--recording", "some.rec"): "gateway",
    ("plan",): "worker",
    ("convert", "a", "b"): "worker",
    ("certs", "certs"): "tls",
}
"""Commands that need more than the base, and the extras that they name."""

WORKS = (("--version",), ("policies",), ("tour", "--list"), ("keys", "new", "ada"))
"""Commands that need no service and no extra."""


def helps() -> list[tuple[str, ...]]:
    """`--help` of every command and of those below groups."""
    found: list[tuple[str, ...]] = [("--help",)]
    for name, (module, _) in RootGroup.table.items():
        found.append((name, "--help"))
        inside = vars(importlib.import_module(module))
        groups = [v for v in inside.values() if isinstance(v, type) and issubclass(v, CommandGroup) and v.table]
        found += [(name, inner, "--help") for group in groups if group is not RootGroup for inner in group.table]
    return found


def faults(python: Path, folder: Path, *, environ: dict[str, str] | None = None) -> list[str]:
    """What is not as it should be in the bare installation of `python`; commands run in `folder`."""
    doctor = ("doctor",)
    commands = [*helps(), *WORKS, *NEEDS, doctor]
    results = dict(zip(commands, _run(python, folder, commands, environ), strict=True))
    found = [f"{_line(c)}: {_said(results[c])}" for c in (*helps(), *WORKS) if results[c]["status"] != 0]
    found += [f"{_line(c)}: {_said(results[c])}" for c, extra in NEEDS.items() if not _says_what(results[c], extra)]
    told = results[doctor]
    if told["status"] != 1 or "not installed: torch" not in told["out"] or f"[{_STACK}]" not in told["out"]:
        found.append(f"quire doctor: {told}")
    return found


def _run(
    python: Path, folder: Path, commands: list[tuple[str, ...]], environ: dict[str, str] | None
) -> list[dict[str, Any]]:
    done = subprocess.run(
        [python, "-P", SCRIPT],
        input=json.dumps(commands),
        cwd=folder,
        env={**os.environ, "COLUMNS": "200", **(environ or {})},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def _says_what(result: dict[str, Any], extras: str) -> bool:
    """One line: what is missing, and a command that names the extras of a folder or file, not of a project on an index."""
    lines = result["err"].splitlines()
    return (
        result["status"] == 2
        and len(lines) == 1
        and lines[0].startswith("error: ")
        and "not installed: " in lines[0]
        and "pip install" in lines[0]
        and f"[{extras}]'" in lines[0]
        and "'quire[" not in lines[0]
    )


def _line(command: tuple[str, ...]) -> str:
    return f"quire {' '.join(command)}"


def _said(result: dict[str, Any]) -> str:
    return f"status {result['status']}: {(result['err'] or result['out']).strip()[-300:]}"
