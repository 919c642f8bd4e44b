"""Run the child process that opens a pickled file, accepting only well-formed messages from it."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from svc_common.errors import FailedPrecondition

_CHILD = Path(__file__).with_name("child.py")
_KEPT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "SYSTEMROOT")


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """What the child reported of a tensor before writing it. `dtype`: torch's name; `sha256`: of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str


@dataclass(slots=True)
class Opened:
    """What the child reported of one file. `network_cut`: it had no network at all, not only a hook that refuses it."""

    tensors: dict[str, TensorFacts] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    network_cut: bool = False
    is_done: bool = False
    error: str = ""


def convert_file(source: Path, destination: Path, on_bytes: Callable[[int], None]) -> Opened:
    """Write the tensors of a pickled file as safetensors; calls `on_bytes(n)` as they are read.
    FailedPrecondition if refused."""
    opened = Opened()
    with tempfile.TemporaryFile() as errors:
        command = [sys.executable, "-I", "-B", str(_CHILD), str(source.absolute()), str(destination.absolute())]
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=_environment(),
            cwd=destination.parent,
            text=True,
            errors="replace",
        )
        try:
            for line in child.stdout or ():
                _take(opened, line, on_bytes)
        finally:
            child.kill()  # no-op if it has ended
            status = child.wait()
            if child.stdout is not None:
                child.stdout.close()
        if opened.is_done and status == 0:
            return opened
        errors.seek(0)
        raise _refusal(source, opened, status, errors.read().decode(errors="replace"))


def _environment() -> dict[str, str]:
    """Only the environment that an interpreter needs: no token, proxy or module path."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    return {**kept, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def _take(opened: Opened, line: str, on_bytes: Callable[[int], None]) -> None:
    for kind, value, said in _said(line):
        match kind:
            case "tensor":
                facts = TensorFacts(str(said["dtype"]), tuple(said["shape"]), str(said["sha256"]))
                opened.tensors[str(value)] = facts
                on_bytes(int(said["num_bytes"]))
            case "note":
                opened.notes.append(str(value))
            case "walls":
                opened.network_cut = bool(value["network"])
            case "error":
                opened.error = str(value)
            case "done":
                opened.is_done = True


def _said(line: str) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """The line's first entry, and the whole object; nothing if it is not a message of the child."""
    try:
        said = json.loads(line)
    except ValueError:
        return
    if isinstance(said, dict) and said:
        kind, value = next(iter(said.items()))
        yield kind, value, said


def _refusal(source: Path, opened: Opened, status: int, errors: str) -> FailedPrecondition:
    last = errors.strip().splitlines()[-1:] or ["it said nothing"]
    ended = (
        f"the process that read it was ended by signal {-status} (a limit of memory or time)" if status < 0 else last[0]
    )
    return FailedPrecondition(
        f"{source} is refused: {opened.error or ended}",
        reason="CONVERSION_REFUSED",
        metadata={"file": str(source)},
    )
