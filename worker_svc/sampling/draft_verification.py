"""Verification of draft tokens: which of a batch's draws count. Does not import torch.

A draft token is accepted if the token drawn at its position equals it, so drafts never change the output.
Children and beams are settled here too, as rows without draft tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protos.worker.v1 import worker_pb2
from worker_svc.rows.batch import BoolArray, IntArray
from worker_svc.sampling.draw_plan import NO_DRAFT, DrawPlan

_CLOSED = worker_pb2.ROW_FLAG_GRAMMAR


@dataclass(frozen=True, slots=True)
class Settled:
    """Results of a batch's n sampling rows: `counts` [n] tokens each, `kept` [sum of counts] the draws they are.

    `flags` [n]: values of RowFlag; a row with one has failed and yields nothing.
    """

    counts: IntArray
    kept: NDArray[np.int64]
    flags: NDArray[np.uint8]

    def without(self, plan: DrawPlan, dropped: BoolArray) -> "Settled":
        """A copy in which the rows marked in `dropped` [n] yield nothing, not even flags."""
        kept = self.kept[~dropped[plan.draw_entries[self.kept]]]
        return Settled(np.where(dropped, 0, self.counts).astype(np.int32), kept, self.flags * ~dropped)

    def explained(self, plan: DrawPlan, flags: Mapping[int, int]) -> "Settled":
        """A copy with `flags` by row index in place of ROW_FLAG_GRAMMAR, where the reason for having no token is known."""
        told = [
            flags.get(row, flag) if flag & _CLOSED else flag
            for row, flag in zip(plan.rows.tolist(), self.flags.tolist(), strict=True)
        ]
        return Settled(self.counts, self.kept, np.array(told, np.uint8))


def settle(plan: DrawPlan, token_ids: IntArray, finite: BoolArray, opens: BoolArray) -> Settled:
    """Determine the draws that count.

    `token_ids` [D]; per place [P]: `finite` logits, and `opens`: a token is allowed.

    A row's draws count as if made one by one: up to and including the first that differs from its draft
    token, and before the first place that is not finite or has no allowed token. A row fails only if its
    first place is such; otherwise a later step computes that place again.
    """
    valid = finite & opens
    flags = np.zeros(len(plan.rows), np.uint8)
    if plan.is_plain and np.logical_and.reduce(valid):
        return Settled(np.ones(len(flags), np.int32), np.arange(len(flags)), flags)
    first = plan.first_places
    flags[~opens[first]] = worker_pb2.ROW_FLAG_GRAMMAR
    flags[~finite[first]] = worker_pb2.ROW_FLAG_NOT_FINITE
    counts_here = valid[plan.draw_places]
    if plan.num_drafts.any():
        counts_here = counts_here & ~_after_the_end(plan, token_ids, valid)
    kept = np.flatnonzero(counts_here)
    counts = np.bincount(plan.draw_entries[kept], minlength=len(plan.rows)).astype(np.int32)
    return Settled(counts, kept, flags)


def _after_the_end(plan: DrawPlan, token_ids: IntArray, valid: BoolArray) -> BoolArray:
    """[D]: True if an earlier draw of the row differed from its draft token or was made at an unfit place."""
    missed = (plan.draft_ids != NO_DRAFT) & ((token_ids != plan.draft_ids) | ~valid[plan.draw_places])
    before = np.cumsum(missed) - missed
    own_first = np.searchsorted(plan.draw_entries, plan.draw_entries, side="left")
    return before > before[own_first]
