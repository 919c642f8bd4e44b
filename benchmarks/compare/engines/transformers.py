"""transformers: `generate` on one padded batch in a child process, in this environment, whose version Quire runs on."""

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
    """A batch begins as a whole: it has nothing for requests that come one after the other."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def missing(self) -> str:
        """Quire needs it, so it is there."""
        return ""

    def settings(self) -> Mapping[str, Any]:
        """See Program."""
        return {"threads": self._host.threads}

    def prepare(self) -> Path:
        """The checkpoint as it is."""
        return self._host.checkpoint

    def spawn(self) -> Child:
        """See Program."""
        command = [sys.executable, "-m", "benchmarks.compare.offline.with_transformers"]
        return Child(command, child_environment(os.environ), self._host.logs / "transformers.log", answers=True)
