"""States in steps: blocks in rows, and the checks of what is read and kept."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from protos.worker.v1 import worker_pb2
from svc_common import wire_arrays
from svc_common.errors import InvalidArgument
from tests.support.worker.builders import Change, Row, step
from worker_svc.rows.changes import is_repetition
from worker_svc.rows.table import ChangeLimits, RowTable

LIMITS = ChangeLimits(
    vocab_size=100,
    max_model_len=64,
    block_size=4,
    num_gpu_blocks=32,
    num_cpu_blocks=8,
    num_groups=2,
    num_state_blocks=3,
)
Place = tuple[int, int, Sequence[int]]


def with_states(
    message: worker_pb2.SchedulerOutputs, read: Sequence[Place] = (), keep: Sequence[Place] = ()
) -> worker_pb2.SchedulerOutputs:
    for field, places in (("states_to_read", read), ("states_to_keep", keep)):
        if places:
            rows, counts, blocks = zip(*places, strict=True)
            part = getattr(message, field)
            part.rows, part.num_tokens = wire_arrays.pack(rows), wire_arrays.pack(counts)
            part.block_ids = wire_arrays.pack([block for of_row in blocks for block in of_row])
    return message


def run(rows: RowTable, message: worker_pb2.SchedulerOutputs) -> None:
    batch = rows.apply(message)
    rows.commit(batch, np.full(len(batch.sampled_rows), 7, np.int32))


@pytest.fixture
def rows() -> RowTable:
    """Row 1 decodes, with states in blocks 1 to 3 and six computed tokens."""
    table = RowTable(LIMITS)
    run(table, step(add=[Row(1, [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7], 6)]))
    return table


def test_states_are_first_in_a_block_table(rows) -> None:
    """worker.proto: blocks of states, then one for each cache group and place; rows grow by the latter."""
    run(rows, step(change=[Change(1, 1, [])]))
    run(rows, step(change=[Change(1, 1, [8, 9])]))
    assert rows.row(1).block_ids == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert rows.state_blocks[1].tolist() == [1, 2, 3]
    assert rows.block_tables[:, 1, :3].tolist() == [[4, 6, 8], [5, 7, 9]]
    run(rows, step(add=[Row(70, [1], [10, 11, 12, 13, 14], 1)]))  # more rows than there were
    assert rows.state_blocks[[1, 70]].tolist() == [[1, 2, 3], [10, 11, 12]]


def test_too_few_blocks_are_refused() -> None:
    """Those of states do not count for tokens."""
    table = RowTable(LIMITS)
    for blocks, told in (([1, 2], "fewer than the 3 blocks of the row's states"), ([1, 2, 3, 4], "not a multiple")):
        with pytest.raises(InvalidArgument, match=told):
            table.apply(step(add=[Row(1, [1], blocks, 1)]))
    with pytest.raises(InvalidArgument, match="row 1 has 0 blocks of 4"):
        table.apply(step(add=[Row(1, [1], [1, 2, 3], 1)]))


def test_what_a_batch_reads_and_keeps(rows) -> None:
    """Rows begin with their own states, or with those to read; checkpoints name places in the batch."""
    message = step(add=[Row(0, [1] * 9, [10, 11, 12, 13, 14, 15, 16, 17, 18], 5, num_computed=4)])
    batch = rows.apply(with_states(message, [(0, 4, [20, 21, 22])], [(1, 7, [23, 24, 25]), (0, 8, [26, 27, 28])]))
    states = rows.pack(batch).states
    assert states.own.tolist() == [[10, 11, 12], [1, 2, 3]]
    assert states.before.tolist() == [[20, 21, 22], [1, 2, 3]]
    assert (states.starts.tolist(), states.keep.rows.tolist(), states.keep.num_tokens.tolist()) == (
        [4, 6],
        [1, 0],
        [7, 8],
    )
    alone = rows.pack(batch.part(batch.rows == 1)).states
    assert (alone.keep.rows.tolist(), alone.keep.block_ids.tolist()) == ([0], [[23, 24, 25]])
    assert batch.changes.num_blocks == 29
    rows.void(batch)


def test_a_step_that_keeps_states_is_no_repetition(rows) -> None:
    """It mentions no row, and is not the step before again; its further decode steps keep nothing."""
    message = with_states(step(), keep=[(1, 7, [23, 24, 25])])
    assert is_repetition(step()) and not is_repetition(message)
    message.num_decode_steps = 2
    batch = rows.apply(message)
    assert rows.pack(batch).states.keep.num_tokens.tolist() == [7]
    rows.commit(batch, np.full(1, 7, np.int32))
    further = rows.next_decode(batch)
    assert rows.pack(further).states.keep.num_tokens.tolist() == []
    rows.void(further)


@pytest.mark.parametrize(
    ("read", "keep", "told"),
    [
        (
            [(1, 5, [20, 21, 22])],
            [],
            r"states_to_read.num_tokens: row 1, 5 tokens: the row begins the step at another token",
        ),
        ([(1, 6, [20, 21, 32])], [], r"states_to_read.block_ids: has block 32; must be below 32"),
        ([(1, 6, [20, 21])], [], r"states_to_read.block_ids"),
        ([(1, 6, [20, 21, 22]), (1, 6, [23, 24, 25])], [], r"states_to_read.rows: has row 1 twice"),
        ([(2, 6, [20, 21, 22])], [], r"states_to_read.rows: row 2 computes nothing in this step"),
        ([], [(1, 6, [20, 21, 22])], r"states_to_keep.num_tokens: row 1, 6 tokens: the step does not compute the last"),
        ([], [(1, 8, [20, 21, 22])], r"states_to_keep.num_tokens: row 1, 8 tokens: the step does not compute the last"),
        ([], [(1, 7, [20, 21, 20])], r"states_to_keep.block_ids: has block 20 twice"),
        ([], [(1, 7, [20, 21, 2])], r"states_to_keep.block_ids: block 2 is one of row 1's own"),
        ([], [(1, 0, [20, 21, 22])], r"states_to_keep.num_tokens"),
    ],
)
def test_wrong_places_are_refused(read, keep, told, rows) -> None:
    """Each with the field and the row, and nothing has changed."""
    with pytest.raises(InvalidArgument, match=told):
        rows.apply(with_states(step(), read, keep))
    run(rows, step())
    assert rows.row(1).num_computed_tokens == 7


def test_models_without_states_refuse_them() -> None:
    """A scheduler that believes the model has states is wrong about it."""
    table = RowTable(dataclasses.replace(LIMITS, num_state_blocks=0))
    run(table, step(add=[Row(1, [1, 2], [4, 5], 2)]))
    with pytest.raises(InvalidArgument, match="states_to_keep: this model has no states"):
        table.apply(with_states(step(), keep=[(1, 3, [])]))
    assert table.pack(table.apply(step())).states is None


def test_rows_that_failed_keep_nothing(rows) -> None:
    """A step in flight may still mention them: no error. Another row in their place reads and keeps."""
    rows.fail(np.array([1], np.int32))
    batch = rows.apply(with_states(step(), keep=[(1, 7, [23, 24, 25])]))
    assert len(batch.rows) == 0 and len(batch.changes.states.keep.rows) == 0
    assert batch.changes.states.dropped.block_ids.tolist() == [[23, 24, 25]] and not batch.changes.is_empty
    rows.void(batch)
    message = step(remove=[1], add=[Row(1, [1] * 6, [1, 2, 3, 4, 5, 6, 7], 2, num_computed=4, incarnation=2)])
    batch = rows.apply(with_states(message, [(1, 4, [20, 21, 22])]))
    assert rows.pack(batch).states.before.tolist() == [[20, 21, 22]]
