"""Quire: the full stack of `quire up` behind gRPC and behind OpenAI's API, and `LLM` in process."""

import asyncio
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.compare.engines.base import Host
from benchmarks.compare.engines.processes import Child
from benchmarks.compare.wires import GrpcWire, OpenAIWire, Wire
from quire.local_stack.processes import child_environment
from quire_tools.bench.provenance import provenance

_READY = re.compile(r"ready grpc=(?P<grpc>\S+) http=http://(?P<http>\S+)")
_ANY_PORTS = ("--grpc-port", "0", "--http-port", "0", "--admin-port", "0", "--admin-http-port", "0")


class QuireServer:
    """`quire up`. `door`: "grpc" or "http"; `options`: further ones of `quire up`, such as --no-invariant."""

    starts_slowly = False

    def __init__(self, host: Host, name: str, door: str, options: Sequence[str]) -> None:
        self.name = name
        self._host, self._door, self._options = host, door, options
        self._address: Mapping[str, str] = {}

    def missing(self) -> str:
        """Always available."""
        return ""

    def settings(self) -> Mapping[str, Any]:
        """See Server."""
        return {"command": ["quire", *self._arguments("MODEL")], "door": self._door}

    def versions(self) -> Mapping[str, str]:
        """See Server."""
        return dict(provenance()["versions"])

    def prepare(self) -> None:
        """No-op."""

    def _arguments(self, model: str) -> list[str]:
        return ["up", "--model", model, "--kv-cache-memory", f"{self._host.kv_gib}GiB", *self._options]

    def spawn(self) -> Child:
        """See Server."""
        command = [sys.executable, "-m", "quire", *self._arguments(str(self._host.checkpoint)), *_ANY_PORTS]
        return Child(command, child_environment(os.environ), self._host.logs / f"{self.name}.log", answers=True)

    async def ready(self, child: Child) -> None:
        """See Server."""
        while line := await asyncio.to_thread(child.stdout.readline):
            if found := _READY.match(line):
                self._address = found.groupdict()
                return
        child.process.wait(10)
        child.check()

    def wire(self) -> Wire:
        """See Server."""
        if self._door == "grpc":
            return GrpcWire(self._address["grpc"])
        host, _, port = self._address["http"].rpartition(":")
        return OpenAIWire(host, int(port), self._host.checkpoint.name, {})


class QuireProgram:
    """`LLM` in a child process. `options`: further settings of it."""

    starts_slowly = False
    workloads: Sequence[str] = ()

    def __init__(self, host: Host, name: str, options: Mapping[str, Any]) -> None:
        self.name = name
        self._host, self._options = host, options

    def missing(self) -> str:
        """Always available."""
        return ""

    def settings(self) -> Mapping[str, Any]:
        """See Program."""
        return {"kv_cache_memory": f"{self._host.kv_gib}GiB", **self._options}

    def prepare(self) -> Path:
        """The checkpoint itself."""
        return self._host.checkpoint

    def spawn(self) -> Child:
        """See Program."""
        command = [sys.executable, "-m", "benchmarks.compare.offline.with_quire"]
        return Child(command, child_environment(os.environ), self._host.logs / f"{self.name}.log", answers=True)
