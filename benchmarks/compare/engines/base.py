"""What an engine is to the benchmark, and what one run of it gives."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from benchmarks.compare.workloads import Workload
from quire.bench.measure import Record, finish


class Form(StrEnum):
    """How it is asked: over a wire, or in its own process."""

    SERVER = "server"
    OFFLINE = "offline"


@dataclass(frozen=True, slots=True)
class Host:
    """What all engines are given. `kv_gib`: memory for keys and values; `peers`: folder of the peers' environments."""

    checkpoint: Path
    threads: int
    max_num_seqs: int
    max_model_len: int
    kv_gib: int
    peers: Path
    logs: Path


@dataclass(slots=True)
class Run:
    """One workload on one engine, in the order of requests. `tokens` of a request are empty where the engine tells none."""

    records: list[Record]
    tokens: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Memory:
    """Of all processes of an engine, in MB. `peak`: most that each ever held, added up; `now`: shared pages counted once."""

    peak_mb: float
    now_mb: float


class Engine(Protocol):
    """One engine in one form. Started once or often; one run at a time."""

    name: str
    form: Form
    starts_slowly: bool
    """Whether it is kept between rounds instead of started again."""

    def missing(self) -> str:
        """Why it cannot run here; empty where it can."""

    def can(self, workload: str) -> bool:
        """Whether it can run this workload."""

    def settings(self) -> Mapping[str, Any]:
        """With what it is started, for the result file."""

    def versions(self) -> Mapping[str, str]:
        """Of its packages; known once it was started."""

    def start(self) -> float:
        """Starts it and asks for one token; seconds until it came. RuntimeError says why it did not."""

    def run(self, workload: Workload) -> Run:
        """Warms up, then the workload."""

    def pause(self) -> None:
        """It is another one's turn: takes no processor time from now on."""

    def resume(self) -> None:
        """Its turn again."""

    def memory(self) -> Memory:
        """So far."""

    def cpu_s(self) -> float:
        """Processor time of all its processes so far."""

    def stop(self) -> None:
        """Ends its processes; nothing happens where there are none."""


def complete(record: Record, max_tokens: int) -> None:
    """Marks an answer that has other than the tokens asked for as failed."""
    finish(record, max_tokens=max_tokens)
    if not record.error and record.output_tokens != max_tokens:
        record.error = f"{record.output_tokens} tokens, {max_tokens} asked"
