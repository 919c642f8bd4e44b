"""transformers: `generate` on one padded batch in a child process, in this environment and with Quire's own version."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.compare.engines.base import Host
from benchmarks.compare.engines.processes import Child
from quire.local_stack.processes import child_environment


class TransformersProgram:
    """`generate` with torch's attention, bfloat16."""

    name = "transformers"
    starts_slowly = False
    workloads: Sequence[str] = ("W1", "W2", "W3", "W4", "P")
    """Not the open workload: a batch starts as a whole and cannot take requests later."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def missing(self) -> str:
        """Always available, since Quire depends on it."""
        return ""

    def settings(self) -> Mapping[str, Any]:
        """See Program."""
        return {"threads": self._host.threads}

    def prepare(self) -> Path:
        """The checkpoint itself."""
        return self._host.checkpoint

    def spawn(self) -> Child:
        """See Program."""
        command = [sys.executable, "-m", "benchmarks.compare.offline.with_transformers"]
        return Child(command, child_environment(os.environ), self._host.logs / "transformers.log", answers=True)
