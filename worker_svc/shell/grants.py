"""Granted steps at the worker: decode steps that it repeats after a plan without waiting for the next one.

The scheduler decides what it grants (`scheduler_svc/core/policies/mixed/decode_grants`). Here is what ends a grant early: a
revocation, the loss of the owner's stream, or a result that changes the batch.
"""

from dataclasses import dataclass

from protos.worker.v1 import worker_pb2
from svc_common import wire_arrays
from svc_common.errors import InvalidArgument


@dataclass(slots=True)
class _Granted:
    """`num_left` and `last_begun` are changed by the engine thread only, `is_revoked` by the event loop only."""

    num_left: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    is_revoked: bool = False
    last_begun: int = 0


class DecodeGrants:
    """The grant of the last plan of an epoch."""

    def __init__(self) -> None:
        self._granted = _Granted()

    @property
    def last_begun(self) -> int:
        """The last step that was begun by the last plan's grant; 0 = none."""
        return self._granted.last_begun

    def receive(self, message: worker_pb2.SchedulerOutputs) -> None:
        """Take the grant of a plan, which replaces the one before. Raises InvalidArgument for one that cannot be run."""
        self._granted, grant = _Granted(), message.grant
        if not message.HasField("grant"):
            return
        if not grant.num_steps or message.num_decode_steps > 1:
            raise InvalidArgument.field("grant.num_steps", "must be at least 1, for a plan of one decode step")
        stops = wire_arrays.unpack(grant.stop_token_ids, "grant.stop_token_ids", minimum=0)
        self._granted = _Granted(grant.num_steps, frozenset(stops.tolist()))

    def revoke(self) -> None:
        """Begin no further granted step."""
        self._granted.is_revoked = True

    def next_step(
        self, outputs: worker_pb2.SchedulerOutputs, result: worker_pb2.WorkerOutputs
    ) -> worker_pb2.SchedulerOutputs | None:
        """The message of the next granted step, which counts as begun; None if `result` is of the last one.

        Called on the engine thread, once for each step.
        """
        granted = self._granted
        if not granted.num_left or granted.is_revoked or not _goes_on(result, granted.stop_token_ids):
            return None
        granted.num_left -= 1
        granted.last_begun = outputs.step_id + 1
        return worker_pb2.SchedulerOutputs(
            step_id=granted.last_begun,
            epoch=outputs.epoch,
            num_decode_steps=1,
            scheduler_step=outputs.scheduler_step + 1,
        )


def _goes_on(result: worker_pb2.WorkerOutputs, stop_token_ids: frozenset[int]) -> bool:
    """True if every row of the result continues as before."""
    if not result.token_ids or result.mask_rows or result.flags.strip(b"\0") or result.HasField("error"):
        return False
    return not stop_token_ids or stop_token_ids.isdisjoint(wire_arrays.unpack(result.token_ids, "token_ids").tolist())
