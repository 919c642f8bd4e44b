"""Plans which tokens a batch draws, and where. `draft_verification` decides which of them count. Does not import torch.

A *place* is a position for which the model returns logits: a sampling row's last known token, and each of its
draft tokens. A *draw* is one token drawn at a place: usually one, several if a row has children, none for a
beam, which has candidates instead.
"""

from dataclasses import dataclass

import numpy as np

from worker_svc.rows.batch import IntArray, StepBatch
from worker_svc.rows.columns import RowColumns, runs_after

NO_DRAFT = -1
"""Draft id of a draw that no draft token follows."""


@dataclass(frozen=True, slots=True)
class DrawPlan:
    """Places [P] and draws [D] of the n sampling rows of a batch, in batch order, a row's own by position.

    `place_entries`, `draw_entries`: index among the n rows. `lengths`: tokens before the one drawn at a
    place, which is its position. `draw_places`: place of each draw. `sequence_indexes`: key of the random
    generator. `draft_ids`: the draft token that a draw must equal for the row's next draw to count, -1 if
    none follows.
    """

    rows: IntArray
    num_drafts: IntArray
    place_entries: IntArray
    lengths: IntArray
    draw_places: IntArray
    draw_entries: IntArray
    sequence_indexes: IntArray
    draft_ids: IntArray
    is_plain: bool = False
    """True if each row has one place and one draw."""

    @property
    def place_rows(self) -> IntArray:
        """[P]: row index of each place."""
        return self.rows[self.place_entries]

    @property
    def draw_rows(self) -> IntArray:
        """[D]: row index of each draw."""
        return self.rows[self.draw_entries]

    @property
    def first_places(self) -> IntArray:
        """[n]: each row's first place."""
        return (np.cumsum(self.num_drafts + 1) - self.num_drafts - 1).astype(np.int32)


def plan_draws(table: RowColumns, batch: StepBatch) -> DrawPlan:
    """Plan the draws of `batch`; its draft tokens follow the known tokens in the table."""
    rows, num_drafts, options = batch.sampled_rows, batch.sampled_drafts, table.options
    entries = np.arange(len(rows), dtype=np.int32)
    # This holds for almost every step, which gets a cheap plan.
    if ((options.num_children[rows] == 1) & (options.num_candidates[rows] == 0) & (num_drafts == 0)).all():
        return _plain(table, rows, num_drafts, entries)
    place_entries, lengths = runs_after(entries, table.num_known[rows], num_drafts + 1)
    is_beam = options.num_candidates[rows] > 0
    num_draws = np.where(is_beam, 0, options.num_children[rows])[place_entries]
    draw_places, children = runs_after(np.arange(len(lengths), dtype=np.int32), np.zeros_like(lengths), num_draws)
    draw_entries = place_entries[draw_places]
    return DrawPlan(
        rows=rows,
        num_drafts=num_drafts,
        place_entries=place_entries,
        lengths=lengths.astype(np.int32),
        draw_places=draw_places,
        draw_entries=draw_entries,
        sequence_indexes=table.sequence_indexes[rows[draw_entries]] + children.astype(np.int32),
        draft_ids=_draft_ids(table, rows, num_drafts, lengths, place_entries)[draw_places],
    )


def _plain(table: RowColumns, rows: IntArray, num_drafts: IntArray, entries: IntArray) -> DrawPlan:
    return DrawPlan(
        rows=rows,
        num_drafts=num_drafts,
        place_entries=entries,
        lengths=table.num_known[rows],
        draw_places=entries,
        draw_entries=entries,
        sequence_indexes=table.sequence_indexes[rows],
        draft_ids=np.full(len(rows), NO_DRAFT, np.int32),
        is_plain=True,
    )


def _draft_ids(
    table: RowColumns, rows: IntArray, num_drafts: IntArray, lengths: IntArray, place_entries: IntArray
) -> IntArray:
    """[P]: the draft token at the position of the place's next token."""
    if not num_drafts.any():
        return np.full(len(lengths), NO_DRAFT, np.int32)
    width = table.token_ids.shape[1]
    drafted = lengths < (table.num_known[rows] + num_drafts)[place_entries]
    ids = table.token_ids[rows[place_entries], np.minimum(lengths, width - 1)]
    return np.where(drafted, ids, NO_DRAFT)
