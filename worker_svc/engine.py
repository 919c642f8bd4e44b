"""The interface between the worker's shell and its engine: a model on a device, or the simulator.

The shell (`service.py`) owns streams, epochs and results; an engine owns tensors and row state (`rows/`) and
does not know gRPC.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from protos.common.v1 import common_pb2
from protos.worker.v1 import worker_pb2
from svc_common.errors import Unavailable
from worker_svc.block_images import BlockImages

Progress = Callable[[str, float], None]
"""Called with a human-readable stage ("weights") and the fraction 0..1 of the whole load."""


class DeviceLost(Unavailable):
    """The device is lost: the worker reports FAILED and exits, to be restarted. No other error ends the process."""


class Pending(Protocol):
    """A launched step, which the device may still be computing."""

    @property
    def is_ready(self) -> bool:
        """True if `finish` would not wait. Called on the engine's thread."""
        ...

    def wait(self) -> None:
        """Block until the results are on the host.

        Callable from any thread; other threads run meanwhile. Raises DeviceLost.
        """
        ...

    def finish(self) -> worker_pb2.WorkerOutputs:
        """Take the results into the rows and return them.

        Called once, on the engine's thread; waits if `wait` did not.

        Raises the step's error, as `Engine.launch` does. After an `Engine.reset` the step's result is empty.
        """
        ...


@dataclass(frozen=True, slots=True)
class Finished:
    """A step that was complete when launched."""

    outputs: worker_pb2.WorkerOutputs
    is_ready: bool = True

    def wait(self) -> None:
        """See Pending."""

    def finish(self) -> worker_pb2.WorkerOutputs:
        """See Pending."""
        return self.outputs


class Engine(Protocol):
    """Runs steps.

    Called from one thread only, in this order: load, profile, allocate, then launch, execute and reset.

    Every method may raise `QuireError`; other exceptions are bugs and reach the peer as INTERNAL with an id.
    """

    device: str
    """"cpu", "cuda" or "simulated"; final after `load`."""
    backend: str
    """Backend of the kernels: "reference", "cpu", "cuda" or "simulated"; final after `load`."""

    @property
    def images(self) -> BlockImages:
        """Blocks from other workers, which steps place. Used from the engine's thread, after `allocate`."""
        ...

    @property
    def cache_layout(self) -> str:
        """Layout of a block's bytes, for people and for comparison: workers with equal ones can exchange blocks."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes of a block over the layers of a cache group."""
        ...

    def read_blocks(self, blocks: Sequence[int]) -> memoryview:
        """The contents of device blocks after all launched steps, block after block. Raises InvalidArgument."""
        ...

    def load(self, progress: Progress) -> common_pb2.ModelLimits:
        """Load the model. Raises ConfigError saying what is wrong with it and what to do."""
        ...

    def profile(self, max_num_batched_tokens: int, max_num_seqs: int) -> worker_pb2.ProfileCacheResponse:
        """Run a profile step and count the blocks that fit. Raises ConfigError if not even one sequence fits.

        It is the largest step where its memory decides the count, and may be smaller elsewhere.
        """
        ...

    def allocate(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        """Allocate both pools. Called once: the shell turns repeated requests into no-ops."""
        ...

    def bundle(self) -> bytes:
        """A serialised `worker_pb2.ModelBundle`, identical on every call (its SHA-256 is `limits.bundle_digest`)."""
        ...

    def load_adapter(self, adapter_id: int, path: str) -> tuple[int, int]:
        """Load the PEFT adapter in folder `path`. Returns its bytes and rank. Valid after `load`; idempotent.

        Raises InvalidArgument if the folder or the adapter is refused, FailedPrecondition if the id stands
        for another adapter, ResourceExhausted if there is no room. On an error nothing has changed.
        """
        ...

    def unload_adapter(self, adapter_id: int) -> None:
        """Unload an adapter; no-op if not loaded. Raises FailedPrecondition, naming the rows, if rows use it."""
        ...

    def launch(self, outputs: worker_pb2.SchedulerOutputs) -> Pending:
        """Start one step.

        Further steps may be launched before it is finished; steps are finished in launch order.

        An error voids the whole step: InvalidArgument before anything changed, others after (its rows then
        compute nothing until they are mentioned or removed). The shell fills `step_id`, `epoch` and
        `timings.queued_ns`.
        """
        ...

    def execute(self, outputs: worker_pb2.SchedulerOutputs) -> worker_pb2.WorkerOutputs:
        """Launch and finish one step."""
        ...

    def reset(self) -> None:
        """Remove all rows, for a new owner. Blocks stay allocated; their contents are void."""
        ...
