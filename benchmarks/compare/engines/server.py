"""An engine behind a wire: its process, the client's event loop, the measurements of a run.

`Server` (quire, vllm, llamacpp) defines how each server is started and asked.
"""

import asyncio
import gc
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

from benchmarks.compare.engines.base import Form, Run, complete
from benchmarks.compare.engines.processes import Child, OneChild
from benchmarks.compare.wires import Wire
from benchmarks.compare.workloads import Lengths, Workload, drawn, fixed, warm_up
from quire_tools.bench.measure import Record
from quire_tools.bench.targets import error_name
from quire_tools.bench.workloads import PlannedRequest

_START_S = 600.0


class Server(Protocol):
    """How one server is started and asked."""

    name: str
    starts_slowly: bool

    def missing(self) -> str:
        """See Engine.missing."""

    def settings(self) -> Mapping[str, Any]:
        """See Engine.settings."""

    def versions(self) -> Mapping[str, str]:
        """See Engine.versions."""

    def prepare(self) -> None:
        """Make what is needed once and is not part of the start, such as another format of the checkpoint."""

    def spawn(self) -> Child:
        """Start its process."""

    async def ready(self, child: Child) -> None:
        """Wait until it serves. Raises RuntimeError if it ends before."""

    def wire(self) -> Wire:
        """A client of the process started last."""


class ServerEngine(OneChild):
    """Owner of a server's process. `vocab_size`: upper bound of ids in warm-up prompts."""

    form = Form.SERVER

    def __init__(self, server: Server, vocab_size: int) -> None:
        self.name, self.starts_slowly = server.name, server.starts_slowly
        self.missing, self.settings, self.versions = server.missing, server.settings, server.versions
        self._server = server
        self._vocab_size = vocab_size
        self._num_runs = 0
        super().__init__()

    def can(self, workload: str) -> bool:
        """True for all workloads."""
        return True

    def start(self) -> float:
        """See Engine.start."""
        self._server.prepare()
        began = time.perf_counter()
        with ExitStack() as failed:
            child = failed.enter_context(self._server.spawn())
            asyncio.run(self._first_token(child))
            failed.pop_all()
        self._child = child
        return time.perf_counter() - began

    async def _first_token(self, child: Child) -> None:
        await asyncio.wait_for(self._server.ready(child), _START_S)
        one = drawn("start", Lengths(1, fixed(16), fixed(1)), seed=0, round_=0, vocab_size=self._vocab_size)
        wire = self._server.wire()
        try:
            [answered] = (await _ask_all(wire, one.requests)).records
        finally:
            await wire.close()
        if answered.error:
            raise RuntimeError(f"its first request failed: {answered.error}")

    def run(self, workload: Workload) -> Run:
        """See Engine.run."""
        self._num_runs += 1
        return asyncio.run(self._run(workload))

    async def _run(self, workload: Workload) -> Run:
        wire = self._server.wire()
        try:
            await _ask_all(wire, warm_up(self._vocab_size, self._num_runs).requests)
            gc.collect()
            gc.disable()
            return await _ask_all(wire, workload.requests)
        finally:
            gc.enable()
            await wire.close()


async def _ask_all(wire: Wire, requests: Sequence[PlannedRequest]) -> Run:
    """Send each request at its time, regardless of the others."""
    began = time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - began

    async def one(planned: PlannedRequest) -> tuple[Record, list[int]]:
        record, tokens = Record(planned.index, planned.at_s), list[int]()
        if planned.at_s:
            await asyncio.sleep(max(0.0, planned.at_s - clock()))
        record.sent_s = clock()
        try:
            tokens = await wire.ask(planned, record, clock)
        except Exception as error:  # a failed request is a figure, not the end of the run
            record.error = error_name(error)
        record.ended_s = clock()
        complete(record, planned.max_tokens)
        return record, tokens

    answered = await asyncio.gather(*map(one, requests))
    return Run([record for record, _ in answered], [tokens for _, tokens in answered])
