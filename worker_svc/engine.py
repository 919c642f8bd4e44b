"""The seam between the worker's shell and whatever computes: a model on a device, or the simulator.

The shell (`service.py`) owns streams, epochs and results; an engine owns tensors and row state (`rows.py`) and knows no gRPC.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from protos.common.v1 import common_pb2
from protos.worker.v1 import worker_pb2
from svc_common import columns
from svc_common.errors import Unavailable

Progress = Callable[[str, float], None]
"""Called with a stage for people ("weights") and the fraction 0..1 of the whole load."""


class DeviceLost(Unavailable):
    """The device is gone for good: the worker reports FAILED and must be restarted. Any other error spares the process."""


class Engine(Protocol):
    """Blocking, called from one thread only; in this order: load, profile, allocate, then execute and reset at will.

    Every method may raise `QuireError`; other exceptions are bugs and reach the caller as INTERNAL with an id.
    """

    device: str
    """"cpu", "cuda" or "simulated"; final after `load`."""
    backend: str
    """Backend of the kernels: "reference", "cpu", "cuda" or "simulated"; final after `load`."""

    def load(self, progress: Progress) -> common_pb2.ModelLimits:
        """Loads the model. ConfigError says what is wrong with it and what to do."""
        ...

    def profile(self, max_num_batched_tokens: int, max_num_seqs: int) -> worker_pb2.ProfileCacheResponse:
        """Runs the largest step once and counts the blocks that fit (R8, R9). ConfigError when not even one sequence does."""
        ...

    def allocate(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        """Allocates both pools, once (the shell makes a repetition a no-op)."""
        ...

    def bundle(self) -> bytes:
        """A serialised `worker_pb2.ModelBundle`; the same bytes every time (its SHA-256 is `limits.bundle_digest`)."""
        ...

    def execute(self, outputs: worker_pb2.SchedulerOutputs) -> worker_pb2.WorkerOutputs:
        """Runs one step.

        A raised error voids the whole step: InvalidArgument before anything changed, others after (its rows then compute
        nothing until they are mentioned or removed). The shell fills `step_id`, `epoch` and `timings.queued_ns`.
        """
        ...

    def reset(self) -> None:
        """Forgets all rows, as for a new owner; blocks stay allocated, their content is void."""
        ...


@dataclass(slots=True)
class StepTokens:
    """Collects what the rows of a step produced over all its decode steps, and makes the result of it."""

    _rows: list[NDArray[np.int32]] = field(default_factory=list)
    _incarnations: list[NDArray[np.int32]] = field(default_factory=list)
    _token_ids: list[NDArray[np.int32]] = field(default_factory=list)
    _finite: list[NDArray[np.bool_]] = field(default_factory=list)
    _logprobs: list[NDArray[np.float32]] = field(default_factory=list)

    def add(
        self,
        rows: NDArray[np.int32],
        incarnations: NDArray[np.int32],
        token_ids: NDArray[np.int32],
        finite: NDArray[np.bool_] | None = None,
        logprobs: NDArray[np.float32] | None = None,
    ) -> None:
        """One decode step: all arrays [n], rows distinct. Rows that are not `finite` get the flag and no token."""
        self._rows.append(rows)
        self._incarnations.append(incarnations)
        self._token_ids.append(token_ids)
        self._finite.append(np.ones(len(rows), np.bool_) if finite is None else finite)
        self._logprobs.append(np.zeros(len(rows), np.float32) if logprobs is None else logprobs)

    def outputs(
        self, num_computed_tokens: int, timings: worker_pb2.StepTimings, *, logprobs: bool
    ) -> worker_pb2.WorkerOutputs:
        """The step's result, rows ascending; `logprobs`: some row asked for them."""
        result = worker_pb2.WorkerOutputs(num_computed_tokens=num_computed_tokens, timings=timings)
        if self._rows:
            self._fill(result, logprobs=logprobs)
        return result

    def _fill(self, result: worker_pb2.WorkerOutputs, *, logprobs: bool) -> None:
        finite = np.concatenate(self._finite)
        rows, first, place = np.unique(np.concatenate(self._rows), return_index=True, return_inverse=True)
        # Stable: a row's tokens stay in the order of the decode steps.
        order = np.argsort(place, kind="stable")
        order = order[finite[order]]
        flags = np.zeros(len(rows), np.uint8)
        flags[place[~finite]] = worker_pb2.ROW_FLAG_NOT_FINITE
        result.rows = columns.pack(rows)
        result.incarnations = columns.pack(np.concatenate(self._incarnations)[first])
        result.num_tokens = columns.pack(np.bincount(place[finite], minlength=len(rows)))
        result.token_ids = columns.pack(np.concatenate(self._token_ids)[order])
        result.flags = columns.pack(flags, columns.U8)
        if logprobs:
            result.logprobs = columns.pack(np.concatenate(self._logprobs)[order], columns.F32)
