"""Follows a worker's start-up from outside: its load's progress, and the reason when it can never serve.

The scheduler keeps trying, as it must for a worker that is restarted; a person who has just typed a command wants to know at once.
"""

import threading
from collections.abc import Callable

import grpc

from protos.worker.v1 import worker_pb2, worker_pb2_grpc
from scheduler_svc.policy.choice import PolicyChoice, WorkerSize
from svc_common import rpc
from svc_common.errors import ConfigError, FailedPrecondition, Internal, InvalidArgument, QuireError

_JOIN_S = 2.0


class WorkerWatch:
    """Owns `channel` to the worker and a thread that joins the worker's LoadModel and ProfileCache, both of which are idempotent.

    `choice` must be what the scheduler is told, so that both ask for the one profile. `on_progress(stage, fraction)` is called on
    that thread. `error`: why this model or memory will never do, or does not go with the policy; None so far.
    """

    def __init__(self, channel: grpc.Channel, choice: PolicyChoice, on_progress: Callable[[str, float], None]) -> None:
        self.error: QuireError | None = None
        self._choice = choice
        self._on_progress = on_progress
        self._channel = channel
        self._thread = threading.Thread(target=self._follow, name="worker-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops following."""
        self._channel.close()
        self._thread.join(_JOIN_S)

    def _follow(self) -> None:
        stub = worker_pb2_grpc.WorkerServiceStub(self._channel)
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
        size = WorkerSize(found.block_size, found.num_gpu_blocks, found.num_cpu_blocks, max_model_len)
        self._choice.core_limits(size)

    def _refused(self, error: QuireError) -> None:
        """Keeps what trying again will not change; a lost connection is seen by whoever watches the process."""
        if isinstance(error, FailedPrecondition | InvalidArgument) and error.reason != "WORKER_STATE":
            self.error = ConfigError(error.message, reason=error.reason, metadata=error.metadata)
        elif isinstance(error, Internal):
            self.error = Internal(
                f"the worker cannot start: {error.message}; its log has the rest", reason=error.reason
            )
