"""Steps on their way: what must be remembered of a decode step between its start on the device and its results. No rules here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from protos.worker.v1 import worker_pb2
from svc_common import clock
from worker_svc.device.queue import Fetched
from worker_svc.executor.step_results import StepResults
from worker_svc.rows.batch import BoolArray, Promise, StepBatch
from worker_svc.rows.options import IntArray
from worker_svc.sampling.draws import DrawPlan
from worker_svc.sampling.row_sampler import Drawing

Vectors = Sequence[tuple[int, NDArray[np.float32]]]


@dataclass(slots=True)
class Flight:
    """One decode step. `lives`: incarnations of the batch's rows; `wants_logprobs`: of each of its rows.

    `drawing`: None = nothing is drawn; `fetched`: what comes to the host of it, or just that it is computed; `vectors`: of rows
    whose task is one; `bad_rows`: not finite at some prompt token. `promise`: what the rows were told already; None = they take
    in their tokens when it lands. `dropped`: rows of the batch whose results are void, as they failed in a step before.
    """

    batch: StepBatch
    lives: IntArray
    wants_logprobs: BoolArray
    plan: DrawPlan
    drawing: Drawing | None
    fetched: Fetched
    vectors: Vectors
    bad_rows: IntArray
    dropped: BoolArray
    promise: Promise | None = None
    has_landed: bool = False
    here_ns: int = 0

    def wait(self) -> None:
        """Blocks until its results are here. From any thread."""
        self.fetched.wait()
        self.here_ns = self.here_ns or clock.monotonic_ns()

    def lives_of(self, rows: IntArray) -> IntArray:
        """Incarnations of some of the batch's rows."""
        return self.lives[np.searchsorted(self.batch.rows, rows)]

    def drop(self, rows: IntArray, lives: IntArray) -> None:
        """`rows` failed in `lives`, before this step."""
        failed = dict(zip(rows.tolist(), lives.tolist(), strict=True))
        mine = zip(self.batch.rows.tolist(), self.lives.tolist(), strict=True)
        self.dropped |= np.array([failed.get(row) == life for row, life in mine], np.bool_)

    def kept(self, rows: IntArray) -> BoolArray:
        """Which of some of the batch's rows are not dropped."""
        return ~self.dropped[np.searchsorted(self.batch.rows, rows)]


@dataclass(slots=True)
class StepUnderWay:
    """One message's decode steps and what came of those that landed. `begun_ns`: when it started."""

    begun_ns: int
    timings: worker_pb2.StepTimings = field(default_factory=worker_pb2.StepTimings)
    results: StepResults = field(default_factory=StepResults)
    flights: list[Flight] = field(default_factory=list)
    error: Exception | None = None
    """Why it failed after it was launched."""

    @property
    def is_ready(self) -> bool:
        """Nothing is left to wait for."""
        return all(flight.has_landed for flight in self.flights)

    def wait(self) -> None:
        """Blocks until all results are here. From any thread."""
        for flight in self.flights:
            flight.wait()

    def drop(self) -> None:
        """Nobody is to hear of what has not landed."""
        for flight in self.flights:
            if not flight.has_landed:
                flight.has_landed, flight.dropped = True, np.ones_like(flight.dropped)

    def outputs(self) -> worker_pb2.WorkerOutputs:
        """The message of its results, when all have landed; raises what it failed by."""
        if self.error is not None:
            raise self.error
        num_computed = sum(int(flight.batch.counts[~flight.dropped].sum()) for flight in self.flights)
        logprobs = any((flight.wants_logprobs & ~flight.dropped)[flight.batch.samples].any() for flight in self.flights)
        return self.results.outputs(num_computed, self.timings, logprobs=bool(logprobs))


@dataclass(frozen=True, slots=True)
class PendingStep:
    """`engine.Pending` of a step; `land` takes in its results and those of steps before it."""

    step: StepUnderWay
    land: Callable[[StepUnderWay], None]

    @property
    def is_ready(self) -> bool:
        """See Pending."""
        return self.step.is_ready

    def wait(self) -> None:
        """See Pending."""
        self.step.wait()

    def finish(self) -> worker_pb2.WorkerOutputs:
        """See Pending."""
        self.land(self.step)
        return self.step.outputs()
