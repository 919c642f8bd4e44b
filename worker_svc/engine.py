"""The seam between the worker's shell and whatever computes: a model on a device, or the simulator.

The shell (`service.py`) owns streams, epochs and results; an engine owns tensors and row state (`rows/`) and knows no gRPC.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from protos.common.v1 import common_pb2
from protos.worker.v1 import worker_pb2
from svc_common.errors import Unavailable

Progress = Callable[[str, float], None]
"""Called with a stage for people ("weights") and the fraction 0..1 of the whole load."""


class DeviceLost(Unavailable):
    """The device is gone for good: the worker reports FAILED and ends, to be started again. Any other error spares the process."""


class Pending(Protocol):
    """A step that is launched: the device may be computing it still."""

    @property
    def is_ready(self) -> bool:
        """`finish` has nothing to wait for. Asked on the engine's thread."""
        ...

    def wait(self) -> None:
        """Blocks until the device has brought the results to the host; other threads run meanwhile. From any thread. DeviceLost."""
        ...

    def finish(self) -> worker_pb2.WorkerOutputs:
        """On the engine's thread, once: takes the results into the rows and tells them. Waits if `wait` did not.

        Raises what the step failed by, as `Engine.launch` does. A step that `Engine.reset` came after has an empty result.
        """
        ...


@dataclass(frozen=True, slots=True)
class Finished:
    """A step that was over when it was launched."""

    outputs: worker_pb2.WorkerOutputs
    is_ready: bool = True

    def wait(self) -> None:
        """See Pending."""

    def finish(self) -> worker_pb2.WorkerOutputs:
        """See Pending."""
        return self.outputs


class Engine(Protocol):
    """Called from one thread only; in this order: load, profile, allocate, then launch, execute and reset at will.

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

    def load_adapter(self, adapter_id: int, path: str) -> tuple[int, int]:
        """Loads the PEFT adapter in folder `path` for rows to name: its bytes and rank. After `load`; idempotent.

        InvalidArgument: the folder, or the adapter for this model, is refused. FailedPrecondition: the id means another adapter.
        ResourceExhausted: no room. On an error nothing has changed.
        """
        ...

    def unload_adapter(self, adapter_id: int) -> None:
        """Forgets an adapter; a no-op when it is not loaded. FailedPrecondition, naming them, when rows use it."""
        ...

    def launch(self, outputs: worker_pb2.SchedulerOutputs) -> Pending:
        """Starts one step; the next may be launched before this one is finished. Steps are finished in the order of their launches.

        A raised error voids the whole step: InvalidArgument before anything changed, others after (its rows then compute
        nothing until they are mentioned or removed). The shell fills `step_id`, `epoch` and `timings.queued_ns`.
        """
        ...

    def execute(self, outputs: worker_pb2.SchedulerOutputs) -> worker_pb2.WorkerOutputs:
        """Launches one step and finishes it."""
        ...

    def reset(self) -> None:
        """Forgets all rows, as for a new owner; blocks stay allocated, their content is void."""
        ...
