"""Follows a worker's startup: loading progress, and the error if it can never serve.

The scheduler keeps retrying, as it must for a worker that may be restarted; the user of `quire up` needs the error at once.
"""

import threading
from collections.abc import Callable

import grpc

from protos.worker.v1 import worker_pb2, worker_pb2_grpc
from scheduler_svc.policy.choice import PolicyChoice, WorkerSize
from svc_common.errors import ConfigError, FailedPrecondition, Internal, InvalidArgument, QuireError
from svc_common.net import rpc

_JOIN_S = 2.0


class WorkerWatch:
    """Owns `channel` to the worker, and a thread that calls its LoadModel and ProfileCache, which are idempotent.

    `choice` must equal the scheduler's, so that both request the same profile. `on_progress(stage,
    fraction)` is called on that thread. `error`: why model, memory or policy can never work together; None
    so far.
    """

    def __init__(self, channel: grpc.Channel, choice: PolicyChoice, on_progress: Callable[[str, float], None]) -> None:
        self.error: QuireError | None = None
        self._choice = choice
        self._on_progress = on_progress
        self._channel = channel
        self._thread = threading.Thread(target=self._follow, name="worker-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop following and close the channel."""
        self._channel.close()
        self._thread.join(_JOIN_S)

    def _follow(self) -> None:
        stub = worker_pb2_grpc.WorkerServiceStub(self._channel)  # type: ignore[no-untyped-call]
        try:
            max_model_len = 0
            for part in stub.LoadModel(worker_pb2.LoadModelRequest(), wait_for_ready=True):
                self._on_progress(part.stage, part.fraction)
                max_model_len = part.loaded.max_model_len
            if max_model_len:
                self._on_progress("measuring memory", 1.0)
                self._measure(stub, max_model_len)
        except ConfigError as error:
            self.error = error
        except grpc.RpcError as error:
            self._refused(rpc.from_rpc_error(error))
        except ValueError:
            return  # the channel was closed meanwhile

    def _measure(self, stub: worker_pb2_grpc.WorkerServiceStub, of_model: int) -> None:
        max_model_len = self._choice.max_model_len(of_model)
        tokens, seqs = self._choice.largest_step(max_model_len)
        found = stub.ProfileCache(worker_pb2.ProfileCacheRequest(max_num_batched_tokens=tokens, max_num_seqs=seqs))
        length = min(max_model_len, found.max_model_len or max_model_len)
        size = WorkerSize(found.block_size, found.num_gpu_blocks, found.num_cpu_blocks, length)
        self._choice.core_limits(size)

    def _refused(self, error: QuireError) -> None:
        """Keep errors that a retry will not change; a lost connection shows up as the death of the process."""
        if isinstance(error, FailedPrecondition | InvalidArgument) and error.reason != "WORKER_STATE":
            self.error = ConfigError(error.message, reason=error.reason, metadata=error.metadata)
        elif isinstance(error, Internal):
            self.error = Internal(
                f"the worker cannot start: {error.message}; its log has the rest", reason=error.reason
            )
