"""Blocks of states in a step: those that rows begin with, and checkpoints. Parsed and checked; `StateBlocks` of worker.proto."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protos.worker.v1 import worker_pb2
from svc_common import wire_arrays
from svc_common.errors import InvalidArgument

IntArray = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class RowStateBlocks:
    """Places of the states of `rows` [k] after `num_tokens` [k] tokens: `block_ids` [k, blocks of a sequence's states]."""

    rows: IntArray
    num_tokens: IntArray
    block_ids: IntArray

    @classmethod
    def none(cls, num_blocks: int = 0) -> "RowStateBlocks":
        """No places."""
        empty = np.zeros(0, np.int32)
        return cls(empty, empty, np.zeros((0, num_blocks), np.int32))

    def part(self, chosen: NDArray[np.bool_]) -> "RowStateBlocks":
        """Those chosen; `chosen` [k]."""
        return RowStateBlocks(self.rows[chosen], self.num_tokens[chosen], self.block_ids[chosen])


@dataclass(frozen=True, slots=True)
class StateChanges:
    """`states_to_read` and `states_to_keep` of a step. `dropped`: checkpoints that no row of it keeps, because it failed before."""

    read: RowStateBlocks
    keep: RowStateBlocks
    dropped: RowStateBlocks

    @property
    def num_blocks(self) -> int:
        """One past the largest block id that is written."""
        return int(self.keep.block_ids.max(initial=-1)) + 1


NO_STATES = StateChanges(RowStateBlocks.none(), RowStateBlocks.none(), RowStateBlocks.none())


@dataclass(frozen=True, slots=True)
class StateEnds:
    """Tokens after which rows with draft tokens may end, the last ones of their step left out: `rows` [k], `num_tokens` [k]."""

    rows: IntArray
    num_tokens: NDArray[np.int64]


NO_ENDS = StateEnds(np.zeros(0, np.int32), np.zeros(0, np.int64))


@dataclass(frozen=True, slots=True)
class RowStates:
    """States of the n rows of a batch.

    `own` [n, blocks]: where they are after the step. `before` [n, blocks]: where they are before it, for rows that do not begin
    at token 0. `starts` [n]: tokens that they have taken in before. `keep`: checkpoints. `ends`: where draft tokens may be wrong.
    The `rows` of both are places in the batch.
    """

    rows: IntArray
    own: IntArray
    before: IntArray
    starts: IntArray
    keep: RowStateBlocks
    ends: StateEnds

    @classmethod
    def of(cls, rows: IntArray, starts: IntArray, own: IntArray, changes: StateChanges, ends: StateEnds) -> "RowStates":
        """Those of ascending `rows`; changes of other rows are left out."""
        if changes is NO_STATES:
            return cls(rows, own, own, starts, RowStateBlocks.none(own.shape[1]), ends)
        read, keep = (part.part(np.isin(part.rows, rows)) for part in (changes.read, changes.keep))
        before = own.copy()
        before[np.searchsorted(rows, read.rows)] = read.block_ids
        places = np.searchsorted(rows, keep.rows).astype(np.int32)
        return cls(rows, own, before, starts, RowStateBlocks(places, keep.num_tokens, keep.block_ids), ends)


def read_states(outputs: worker_pb2.SchedulerOutputs, num_blocks: int, num_gpu_blocks: int) -> StateChanges:
    """Parse the step's places of states, `num_blocks` for each row. Raises InvalidArgument naming the field."""
    fields = [name for name in ("states_to_read", "states_to_keep") if outputs.HasField(name)]
    if not fields:
        return NO_STATES
    if not num_blocks:
        raise InvalidArgument.field(fields[0], "this model has no states; leave it out")
    read, keep = (
        _blocks(getattr(outputs, name), name, num_blocks, num_gpu_blocks)
        for name in ("states_to_read", "states_to_keep")
    )
    _once(read.rows, "states_to_read.rows", "row")
    _once(keep.block_ids.reshape(-1), "states_to_keep.block_ids", "block")
    return StateChanges(read, keep, RowStateBlocks.none(num_blocks))


def _blocks(message: worker_pb2.StateBlocks, field: str, num_blocks: int, num_gpu_blocks: int) -> RowStateBlocks:
    rows = wire_arrays.unpack(message.rows, f"{field}.rows", minimum=0)
    num_tokens = wire_arrays.unpack(message.num_tokens, f"{field}.num_tokens", length=len(rows), minimum=1)
    length = len(rows) * num_blocks
    ids = wire_arrays.unpack(message.block_ids, f"{field}.block_ids", length=length, minimum=0)
    if len(ids) and (most := int(ids.max())) >= num_gpu_blocks:
        raise InvalidArgument.field(f"{field}.block_ids", f"has block {most}; must be below {num_gpu_blocks}")
    return RowStateBlocks(rows, num_tokens, ids.reshape(-1, num_blocks))


def _once(values: IntArray, field: str, what: str) -> None:
    found, counts = np.unique(values, return_counts=True)
    if (counts > 1).any():
        raise InvalidArgument.field(field, f"has {what} {int(found[counts > 1][0])} twice")


def check_states(
    changes: StateChanges, rows: IntArray, starts: IntArray, counts: IntArray, failed: IntArray
) -> StateChanges:
    """Check places of states against the step's batch, of ascending `rows` [n]; returns them with those of `failed` rows dropped.

    `counts` [n]: tokens without draft tokens, which may be rejected. A row that failed in an earlier step computes nothing, so it
    neither reads nor keeps states. Raises InvalidArgument.
    """
    if changes is NO_STATES:
        return changes
    read, at = _in_batch(changes.read, "states_to_read", rows, failed)
    _blame(read, read.num_tokens != starts[at], "states_to_read", "the row begins the step at another token")
    keep, at = _in_batch(changes.keep, "states_to_keep", rows, failed)
    outside = (keep.num_tokens <= starts[at]) | (keep.num_tokens > starts[at] + counts[at])
    _blame(keep, outside, "states_to_keep", "the step does not compute the last of these tokens")
    return StateChanges(read, keep, changes.keep.part(np.isin(changes.keep.rows, failed)))


def _in_batch(
    part: RowStateBlocks, field: str, rows: IntArray, failed: IntArray
) -> tuple[RowStateBlocks, NDArray[np.int64]]:
    """The places of rows that have not failed, and where these rows are in the batch."""
    part = part.part(~np.isin(part.rows, failed))
    idle = part.rows[~np.isin(part.rows, rows)]
    if len(idle):
        raise InvalidArgument.field(f"{field}.rows", f"row {int(idle[0])} computes nothing in this step")
    return part, np.searchsorted(rows, part.rows)


def _blame(part: RowStateBlocks, bad: NDArray[np.bool_], field: str, what: str) -> None:
    if bad.any():
        row, count = int(part.rows[bad][0]), int(part.num_tokens[bad][0])
        raise InvalidArgument.field(f"{field}.num_tokens", f"row {row}, {count} tokens: {what}")
