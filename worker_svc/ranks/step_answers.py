"""What each rank of a group does with a step, and answers: checksums, by which rank 0 finds that ranks are equal."""

import struct
from dataclasses import dataclass
from typing import Protocol

from paged_kernels.ranks import PeerLost
from protos.worker.v1 import worker_pb2
from worker_svc.engine import DeviceLost, Engine, Pending
from worker_svc.ranks.member import GroupRanks, result_digest

STEP_ANSWER = struct.Struct("<QQI")
"""Digest of the state, digest of the result, and of the error if there is one. The result itself follows from the first rank
of a last stage."""


class RankEngine(Engine, Protocol):
    """An engine of one rank."""

    def state_digest(self, outputs: worker_pb2.SchedulerOutputs) -> int:
        """Checksum of the rows after `launch(outputs)`."""
        ...


def finishes_at_launch(engine: RankEngine, ranks: GroupRanks) -> bool:
    """True if a rank finishes a step when it has launched it: in one stage on the host, where nothing runs ahead."""
    return ranks.num_stages == 1 and engine.device == "cpu"


def step_answer(engine: RankEngine, outputs: worker_pb2.SchedulerOutputs, result: worker_pb2.WorkerOutputs) -> bytes:
    """A rank's answer to a step that ran."""
    return STEP_ANSWER.pack(engine.state_digest(outputs), result_digest(result), 0)


def error_answer(error: BaseException) -> bytes:
    """A rank's answer to a step that failed. Only the kind of error must be equal: messages may name memory sizes."""
    return STEP_ANSWER.pack(0, 0, sum(type(error).__name__.encode()) + 1)


@dataclass(frozen=True, slots=True)
class RefusedStep:
    """A `Pending` of a step that failed at its launch, before ranks exchanged anything: they are equal still."""

    error: Exception
    is_ready: bool = True

    def wait(self) -> None:
        """See Pending."""

    def finish(self) -> worker_pb2.WorkerOutputs:
        """See Pending."""
        raise self.error


def launched(engine: RankEngine, ranks: GroupRanks, outputs: worker_pb2.SchedulerOutputs) -> Pending:
    """Launch a step on a rank's engine. Raises PeerLost for an error that may leave ranks unequal."""
    num_transfers = ranks.num_transfers
    try:
        return engine.launch(outputs)
    except (PeerLost, DeviceLost):
        raise
    except Exception as error:
        if ranks.num_transfers != num_transfers:
            raise PeerLost(f"rank {ranks.rank} failed within a step: {error}") from error
        return RefusedStep(error)


def forget_adapter(engine: Engine, adapter_id: int) -> None:
    """Undo a load that failed on another rank."""
    engine.unload_adapter(adapter_id)


def described(answer: bytes) -> str:
    """An answer's digests, for messages."""
    state, result, error = STEP_ANSWER.unpack(answer)
    return "an error" if error else f"rows {state:08x}, tokens {result:08x}"
