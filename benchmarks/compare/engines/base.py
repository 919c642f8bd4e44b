"""Interface of an engine to the benchmark, and the result of one run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from benchmarks.compare.workloads import Workload
from quire_tools.bench.measure import Record, finish


class Form(StrEnum):
    """How an engine is used: over a wire, or in its own process."""

    SERVER = "server"
    OFFLINE = "offline"


@dataclass(frozen=True, slots=True)
class Host:
    """Settings common to all engines. `kv_gib`: memory for keys and values; `peers`: folder of the peers' environments."""

    checkpoint: Path
    threads: int
    max_num_seqs: int
    max_model_len: int
    kv_gib: int
    peers: Path
    logs: Path


@dataclass(slots=True)
class Run:
    """One workload on one engine, in request order. `tokens` of a request are empty if the engine does not return them."""

    records: list[Record]
    tokens: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of all processes of an engine, in MB. `peak`: sum of their maxima; `now`: shared pages counted once."""

    peak_mb: float
    now_mb: float


class Engine(Protocol):
    """One engine in one form. May be started repeatedly; one run at a time."""

    name: str
    form: Form
    starts_slowly: bool
    """True if it is kept between rounds instead of restarted."""

    def missing(self) -> str:
        """Why it cannot run here; empty if it can."""

    def can(self, workload: str) -> bool:
        """True if it can run this workload."""

    def settings(self) -> Mapping[str, Any]:
        """Its start settings, for the result file."""

    def versions(self) -> Mapping[str, str]:
        """Versions of its packages; known once it was started."""

    def start(self) -> float:
        """Start it and request one token; seconds until it arrived. Raises RuntimeError with the reason of a failure."""

    def run(self, workload: Workload) -> Run:
        """Warm up, then run the workload."""

    def pause(self) -> None:
        """Stop using processor time, for another engine's turn."""

    def resume(self) -> None:
        """Continue after `pause`."""

    def memory(self) -> Memory:
        """Memory used so far."""

    def cpu_s(self) -> float:
        """Processor time of all its processes so far."""

    def stop(self) -> None:
        """End its processes; no-op if there are none."""


def complete(record: Record, max_tokens: int) -> None:
    """Mark an answer as failed unless it has exactly the requested number of tokens."""
    finish(record, max_tokens=max_tokens)
    if not record.error and record.output_tokens != max_tokens:
        record.error = f"{record.output_tokens} tokens, {max_tokens} requested"
