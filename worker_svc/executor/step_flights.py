"""Steps in flight: the state of a decode step between its start on the device and its results. Contains no rules."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from protos.worker.v1 import worker_pb2
from svc_common import clock
from worker_svc.device.queue import Fetched
from worker_svc.rows.batch import BoolArray, Promise, StepBatch
from worker_svc.rows.options import IntArray
from worker_svc.sampling.draw_plan import DrawPlan
from worker_svc.sampling.row_sampler import Drawn
from worker_svc.sampling.step_results import StepResults

Vectors = Sequence[tuple[int, NDArray[np.float32]]]


class KnownDraws(Protocol):
    """What a decode step draws: `row_sampler.Drawing`, or what another process has drawn."""

    def drawn(self) -> Drawn:
        """Wait for the results."""
        ...


@dataclass(slots=True)
class StepInFlight:
    """One decode step in flight.

    `incarnations`: incarnations of the batch's rows. `wants_logprobs`: per row of the batch. `drawing`: None if
    nothing is drawn. `fetched`: results that are copied to the host, or only the event of completion.
    `vectors`: embeddings of pooled rows; `bad_vectors`: rows with an embedding that is not finite. `bad_rows`: rows with non-finite
    logits at a prompt token.
    `promise`: tokens already reserved in the row table; None if rows take in their tokens when the step
    lands. `dropped`: rows with void results, since they failed in an earlier step.
    """

    batch: StepBatch
    incarnations: IntArray
    wants_logprobs: BoolArray
    plan: DrawPlan
    drawing: KnownDraws | None
    fetched: Fetched
    vectors: Vectors
    bad_rows: IntArray
    bad_vectors: IntArray
    dropped: BoolArray
    promise: Promise | None = None
    here_ns: int = 0

    def wait(self) -> None:
        """Block until the results are on the host. Callable from any thread."""
        self.fetched.wait()
        self.here_ns = self.here_ns or clock.monotonic_ns()

    def incarnations_of(self, rows: IntArray) -> IntArray:
        """Incarnations of some of the batch's rows."""
        return self.incarnations[np.searchsorted(self.batch.rows, rows)]

    def drop(self, rows: IntArray, incarnations: IntArray) -> None:
        """Void the results of `rows`, which failed as incarnations `incarnations` in an earlier step."""
        failed = dict(zip(rows.tolist(), incarnations.tolist(), strict=True))
        mine = zip(self.batch.rows.tolist(), self.incarnations.tolist(), strict=True)
        self.dropped |= np.array([failed.get(row) == incarnation for row, incarnation in mine], np.bool_)

    def kept(self, rows: IntArray) -> BoolArray:
        """True for those of `rows`, which are of the batch, that have valid results."""
        return ~self.dropped[np.searchsorted(self.batch.rows, rows)]


@dataclass(slots=True)
class PendingStep:
    """`engine.Pending` of a message: its decode steps, and the results of those that have landed.

    `land` lands all decode steps up to the end of this message. `begun_ns`: when the message started.
    """

    land: "Callable[[PendingStep], None]"
    begun_ns: int
    timings: worker_pb2.StepTimings = field(default_factory=worker_pb2.StepTimings)
    results: StepResults = field(default_factory=StepResults)
    flights: list[StepInFlight] = field(default_factory=list)
    num_landed: int = 0
    error: Exception | None = None
    """The error that made the step fail after its launch."""

    @property
    def is_ready(self) -> bool:
        """See Pending. True if every decode step has landed."""
        return self.num_landed == len(self.flights)

    def wait(self) -> None:
        """See Pending."""
        for flight in self.flights:
            flight.wait()

    def drop(self) -> None:
        """Discard the results that have not landed."""
        for flight in self.flights[self.num_landed :]:
            flight.dropped = np.ones_like(flight.dropped)
        self.num_landed = len(self.flights)

    def finish(self) -> worker_pb2.WorkerOutputs:
        """See Pending."""
        self.land(self)
        if self.error is not None:
            raise self.error
        num_computed, logprobs = 0, False
        for flight in self.flights:
            kept = ~flight.dropped
            num_computed += int(flight.batch.counts[kept].sum())
            logprobs |= bool((flight.wants_logprobs & kept)[flight.batch.samples].any())
        return self.results.outputs(num_computed, self.timings, logprobs=logprobs)
