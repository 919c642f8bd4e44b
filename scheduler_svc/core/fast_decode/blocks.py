"""What fast decode additionally requires of a progress, and block allocation for its rows."""

from typing import Any, Protocol

import numpy as np

from block_manager.cache_rules import FastPool
from scheduler_svc.core.fast_decode.rows import FastRows, Ints
from scheduler_svc.core.parts.interfaces import Progress
from scheduler_svc.core.request import Group, Sequence


class RowProgress(Progress, Protocol):
    """A progress that counts by arrays; each method does for rows what its namesake does for one sequence.

    `at`: an index for those rows (`FastRows.pick`).
    """

    def num_pending_rows(self, rows: FastRows) -> Ints:
        """`num_pending` of every row."""

    def on_scheduled_rows(self, rows: FastRows, at: Any) -> None:
        """Those rows are in a plan, with one token each."""

    def on_tokens_rows(self, rows: FastRows, at: Any) -> None:
        """Those rows got their token; called after it was appended."""

    def confirmed_rows(self, rows: FastRows, at: Any) -> Ints | None:
        """Number of tokens up to which each row can be registered now; None where the next step does so."""


class FastBlocks:
    """Allocates blocks for rows and registers the blocks that they fill."""

    def __init__(self, rows: FastRows, cache: FastPool) -> None:
        self._rows = rows
        self._cache = cache

    def may_join(self, sequence: Sequence) -> bool:
        """False while the result of a checkpoint is expected, or if the next step keeps one."""
        step = self._cache.checkpoint_tokens
        keeps = step > 0 and (sequence.num_computed_tokens + 1) % step == 0
        return not (keeps or self._cache.has_unnamed_checkpoint(sequence))

    def leave_for_checkpoints(self) -> None:
        """Turn the rows that keep a checkpoint in their next step into objects."""
        step = self._cache.checkpoint_tokens
        if step and self._rows.members:
            keeping = np.flatnonzero((self._rows.computed + 1) % step == 0)
            if len(keeping):
                self._rows.remove(keeping.tolist())

    def num_steps_alike(self) -> int:
        """Steps behind that in which each row computes its next token, in which none needs blocks or a checkpoint."""
        rows, step = self._rows, self._cache.checkpoint_tokens
        num_steps = int((rows.capacity - rows.computed).min()) - 1
        return min(num_steps, int((step - 1 - (rows.computed + 1) % step).min())) if step else num_steps

    def join(self, groups: list[Group]) -> None:
        """Turn groups into rows."""
        sequences = [group.sequences[0] for group in groups]
        next_full = [self._cache.register(s, 0) for s in sequences]
        self._rows.join(groups, [self._cache.open_end(s) for s in sequences], next_full)

    def append(self, needy: Ints) -> dict[int, list[int]]:
        """Append one block (of each cache group) to each of these rows, in order. Returns the blocks by row."""
        rows = needy.tolist()
        if not rows:
            return {}
        ends = self._rows.ends
        blocks = self._cache.append_blocks([ends[row] for row in rows])
        self._rows.capacity[needy] += self._rows.block_size
        self._rows.held[needy] += self._cache.ledger.num_groups
        return dict(zip(rows, blocks, strict=True))

    def register(self, full: Ints) -> None:
        """Register the blocks that these rows have just filled, in order."""
        if not len(full):
            return
        rows = self._rows
        ends_at = rows.next_full[full]
        if (ends_at - rows.block_size >= rows.first_in_ring(full)).all():
            ends = rows.ends
            self._cache.register_blocks([ends[row] for row in full.tolist()], rows.blocks_before(full, ends_at))
            rows.next_full[full] += rows.block_size
        else:
            self._register_one_by_one(full)

    def _register_one_by_one(self, full: Ints) -> None:
        """Register via the sequence objects: the ring was overwritten, so write the rows back and use `token_ids`."""
        rows = self._rows
        for row in full.tolist():
            rows.sync(rows.members[row])
            sequence = rows.members[row].sequences[0]
            rows.next_full[row] = self._cache.register(sequence, int(rows.next_full[row]))


def split(rows: Ints, end: int) -> tuple[Ints, Ints]:
    """The entries of ascending `rows` below `end`, and the others."""
    if not len(rows):
        return rows, rows
    num_below = int(rows.searchsorted(end))
    return rows[:num_below], rows[num_below:]
