"""An engine in a process of its own, without a wire: the benchmark's side of benchmarks.compare.offline."""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from benchmarks.compare.engines.base import Form, Run, complete
from benchmarks.compare.engines.processes import Child, OneChild
from benchmarks.compare.workloads import Lengths, Workload, drawn, fixed, warm_up
from quire_tools.bench.measure import Record
from quire_tools.bench.workloads import PlannedRequest


class Program(Protocol):
    """A child program, its environment and its settings."""

    name: str
    starts_slowly: bool
    workloads: Sequence[str]
    """Workloads it can run; empty = all."""

    def missing(self) -> str:
        """See Engine.missing."""

    def settings(self) -> Mapping[str, Any]:
        """Settings that the child loads the model with."""

    def prepare(self) -> Path:
        """The folder that the child loads; made now if it does not exist."""

    def spawn(self) -> Child:
        """Start the child."""


class OfflineEngine(OneChild):
    """Owner of the child program."""

    form = Form.OFFLINE

    def __init__(self, program: Program, vocab_size: int) -> None:
        self.name, self.starts_slowly = program.name, program.starts_slowly
        self.missing, self.settings = program.missing, program.settings
        self._program = program
        self._vocab_size = vocab_size
        self._versions: dict[str, str] = {}
        self._num_runs = 0
        super().__init__()

    def can(self, workload: str) -> bool:
        """See Engine.can."""
        return not self._program.workloads or workload in self._program.workloads

    def versions(self) -> Mapping[str, str]:
        """See Engine.versions."""
        return self._versions

    def start(self) -> float:
        """See Engine.start."""
        folder = self._program.prepare()
        began = time.perf_counter()
        with ExitStack() as failed:
            self._child = failed.enter_context(self._program.spawn())
            failed.callback(self._forget)
            loaded = self._ask({"what": "load", "model": str(folder), "settings": dict(self.settings())})
            self._versions = loaded["versions"]
            self._send(drawn("start", Lengths(1, fixed(16), fixed(1)), seed=0, round_=0, vocab_size=self._vocab_size))
            failed.pop_all()
        return time.perf_counter() - began

    def _forget(self) -> None:
        self._child = None

    def _ask(self, command: Mapping[str, Any]) -> dict[str, Any]:
        assert self._child is not None, "it is started before it is asked"
        try:
            self._child.stdin.write(json.dumps(command) + "\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            self._child.process.wait(10)
        answer = self._child.stdout.readline()
        if not answer:
            self._child.process.wait(10)
            self._child.check()
        return dict(json.loads(answer))

    def _send(self, workload: Workload) -> dict[str, Any]:
        asked = [(request.at_s, request.token_ids, request.max_tokens) for request in workload.requests]
        return self._ask({"what": "run", "requests": asked})

    def run(self, workload: Workload) -> Run:
        """See Engine.run."""
        self._num_runs += 1
        self._send(warm_up(self._vocab_size, self._num_runs))
        return self.alone(workload)

    def alone(self, workload: Workload) -> Run:
        """Run the workload without a warm-up."""
        ran = self._send(workload)
        records = [_record(*pair) for pair in zip(workload.requests, ran["events"], strict=True)]
        return Run(records, ran["tokens"])


def _record(planned: PlannedRequest, events: Sequence[Sequence[float]]) -> Record:
    """Convert a child's events to a record. The request counts as sent when it was due."""
    record = Record(planned.index, planned.at_s, sent_s=planned.at_s)
    record.token_times_s = [at_s for at_s, _ in events]
    record.output_tokens = int(sum(count for _, count in events))
    record.ended_s = events[-1][0] if events else planned.at_s
    complete(record, planned.max_tokens)
    return record
