"""Checks of a step against the existing rows. Read-only; raises InvalidArgument naming the field."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from svc_common.errors import InvalidArgument
from worker_svc.rows.batch import IntArray, StepBatch
from worker_svc.rows.changes import Additions, Changes, StepChanges
from worker_svc.rows.columns import RowColumns
from worker_svc.rows.states import NO_STATES, check_states


def check_changes(table: RowColumns, step: StepChanges) -> None:
    """Check removed, added and changed rows against the table."""
    if len(step.removed):
        _check_known(table, step.removed, "removed_rows")
    if step.added is not None:
        _check_added(table, step.added, step.removed)
    if step.changed is not None:
        _check_changed(table, step.changed, step)


def _check_known(table: RowColumns, rows: IntArray, field: str) -> None:
    within = rows < len(table.occupied)
    bad = ~within
    bad[within] = ~table.occupied[rows[within]]
    if bad.any():
        raise InvalidArgument.field(field, f"row {int(rows[bad][0])} is not in use")


def _check_added(table: RowColumns, added: Additions, removed: IntArray) -> None:
    known_rows = added.rows < len(table.occupied)
    rows = added.rows[known_rows]
    taken = rows[table.occupied[rows] & ~np.isin(rows, removed)]
    if len(taken):
        row = int(taken[0])
        raise InvalidArgument.field("added.rows", f"row {row} is in use by {table.names[row]!r}")
    stale = added.incarnations[known_rows] <= table.incarnations[rows]
    if stale.any():
        row, incarnation = int(rows[stale][0]), int(added.incarnations[known_rows][stale][0])
        raise InvalidArgument.field(
            "added.incarnations",
            f"row {row} had incarnation {int(table.incarnations[row])}; {incarnation} must be above it",
        )


def _check_changed(table: RowColumns, changed: Changes, step: StepChanges) -> None:
    rows = changed.rows
    _check_known(table, rows, "changed.rows")
    leaving = rows[np.isin(rows, step.removed)]
    if len(leaving):
        raise InvalidArgument.field("changed.rows", f"row {int(leaving[0])} is removed in the same step")
    wrong = np.flatnonzero(changed.incarnations != table.incarnations[rows])
    if len(wrong):
        i = int(wrong[0])
        raise InvalidArgument.field(
            "changed.incarnations",
            f"row {int(rows[i])} is in incarnation {int(table.incarnations[rows[i]])}, not {int(changed.incarnations[i])}",
        )
    _check_told(table, changed)
    _check_counts(table, changed)
    many = np.flatnonzero(table.num_blocks[rows] + changed.num_new_blocks > table.limits.num_gpu_blocks)
    if len(many):
        raise InvalidArgument.field("changed.num_new_blocks", f"row {int(rows[many[0]])} gets more blocks than exist")


def _check_told(table: RowColumns, changed: Changes) -> None:
    rows, told = changed.rows, changed.num_new_tokens > 0
    free = np.flatnonzero(told & (table.options.num_candidates[rows] == 0))
    if len(free):
        raise InvalidArgument.field(
            "changed.num_new_tokens", f"row {int(rows[free[0]])} is not a beam: it samples its own tokens"
        )
    most = table.limits.max_model_len
    late = np.flatnonzero(told & (table.num_known[rows] + changed.num_new_tokens.astype(np.int64) > most))
    if len(late):
        raise InvalidArgument.field(
            "changed.num_new_tokens", f"row {int(rows[late[0]])} exceeds the model's limit of {most} tokens"
        )


def _check_counts(table: RowColumns, changed: Changes) -> None:
    """Check that rows compute only known tokens, and draft tokens only at the end of these."""
    rows, alive = changed.rows, ~table.failed[changed.rows]
    left = table.num_known[rows] + changed.num_new_tokens - table.num_computed[rows]
    known = changed.num_tokens - changed.num_drafts
    excess = np.flatnonzero((known > left) & alive)
    if len(excess):
        i = int(excess[0])
        raise InvalidArgument.field(
            "changed.num_tokens",
            f"row {int(rows[i])}: {int(known[i])} tokens to compute without its drafts, but only {int(left[i])} left",
        )
    drafting = changed.num_drafts > 0
    early = np.flatnonzero(drafting & (known < left) & alive)
    if len(early):
        row = int(rows[early[0]])
        raise InvalidArgument.field("changed.num_draft_tokens", f"row {row} does not reach the end of its known tokens")
    options = table.options
    plain = (options.num_candidates[rows] == 0) & (options.num_children[rows] == 1) & (options.tasks[rows] == 0)
    special = np.flatnonzero(drafting & ~plain)
    if len(special):
        row = int(rows[special[0]])
        raise InvalidArgument.field("changed.num_draft_tokens", f"row {row} does not yield one token at a time")


def check_room(table: RowColumns, batch: StepBatch, step: StepChanges) -> None:
    """Check that every row has positions and blocks for all it computes, further decode steps included."""
    if not len(batch.rows):
        return
    ends = batch.starts + batch.counts + (batch.num_decode_steps - 1) * batch.samples
    late = np.flatnonzero(ends > table.limits.max_model_len)
    if len(late):
        row, most = int(batch.rows[late[0]]), table.limits.max_model_len
        field = f"{_mention(row, step)}.num_tokens"
        raise InvalidArgument.field(
            field, f"row {row} would exceed the model's limit of {most} tokens; remove or pause it"
        )
    # In 64 bits, because they are multiplied by the block size.
    blocks = (
        table.num_blocks[batch.rows].astype(np.int64) if step.is_unchanged else _blocks_after(table, batch.rows, step)
    )
    short = np.flatnonzero(blocks * table.limits.block_size < ends)
    if len(short):
        row, held, end = (int(column[short[0]]) for column in (batch.rows, blocks, ends))
        field = "added.num_blocks" if _mention(row, step) == "added" else "changed.num_new_blocks"
        raise InvalidArgument.field(
            field, f"row {row} has {held} blocks of {table.limits.block_size}, too few for its first {end} tokens"
        )


def with_checked_states(table: RowColumns, batch: StepBatch, step: StepChanges) -> StepBatch:
    """The batch with the places of states that are in force; see `check_states`."""
    if step.states is NO_STATES:
        return batch
    failed = np.flatnonzero(table.failed)
    if step.added is not None:
        failed = np.setdiff1d(failed, step.added.rows)
    _check_kept_apart(table, step)
    found = check_states(step.states, batch.rows, batch.starts, batch.counts - batch.num_drafts, failed)
    return replace(batch, changes=replace(step, states=found))


def _check_kept_apart(table: RowColumns, step: StepChanges) -> None:
    """Check that no checkpoint is written to the states of a row."""
    rows = np.setdiff1d(table.occupied_rows(), step.removed)
    own = {block: row for row in rows.tolist() for block in table.state_blocks[row].tolist()}
    if step.added is not None:
        count = table.limits.num_state_blocks
        pairs = zip(step.added.rows.tolist(), step.added.block_ids, strict=True)
        own |= {block: row for row, ids in pairs for block in ids[:count].tolist()}
    taken = [block for block in step.states.keep.block_ids.reshape(-1).tolist() if block in own]
    if taken:
        what = f"block {taken[0]} is one of row {own[taken[0]]}'s own"
        raise InvalidArgument.field("states_to_keep.block_ids", what)


def _blocks_after(table: RowColumns, rows: IntArray, step: StepChanges) -> NDArray[np.int64]:
    blocks = np.zeros(max(len(table.occupied), step.num_rows), np.int64)
    blocks[: len(table.occupied)] = table.num_blocks
    if step.added is not None:
        blocks[step.added.rows] = step.added.num_blocks
    if step.changed is not None:
        blocks[step.changed.rows] += step.changed.num_new_blocks
    return blocks[rows]


def _mention(row: int, step: StepChanges) -> str:
    """The message field that sets the row's counts.

    For a row that repeats it is `changed`, where the correction belongs.
    """
    return "added" if step.added is not None and row in step.added.rows else "changed"
