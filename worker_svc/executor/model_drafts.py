"""Draft tokens from a model: a draft model, or the MTP head of the model that is served. A `Proposer`.

Its keys and values are in pools with the model's block ids. After each step it computes the same tokens as the model, so that they
are complete wherever the model's are: after prefix hits, swaps, copies and moves of blocks. Proposals begin one token later:

    step k        model: t[s .. e]       then drafts: t[s .. e]
    step k + 1    drafts: t[e + 1] -> d1, d1 -> d2, ..    model: t[e + 1], d1, d2, ..    then drafts: the same again

A draft token is drawn as the model draws that token: with the row's temperature, filters and random number. So a draft model with
the model's own distribution is right at any temperature.

An MTP head computes token t[i + 1] with the model's hidden state of t[i], at position i. Where a step begins, it reads the
state of the token before from the blocks; later draft tokens get the head's own states.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from worker_svc.device.kept_inputs import BlockTables, LastTokens
from worker_svc.device.queue import DeviceQueue
from worker_svc.invariance import FREE
from worker_svc.model.drafts.draft_model import BoundDrafts
from worker_svc.model.input_batch import ModelInput, model_inputs
from worker_svc.rows.batch import IntArray, PackedTokens, StepBatch
from worker_svc.rows.changes import NO_CHANGES
from worker_svc.rows.table import RowTable
from worker_svc.sampling.draft_proposer import DraftAsk
from worker_svc.sampling.draw_plan import plan_draws
from worker_svc.sampling.row_sampler import parameters_of
from worker_svc.sampling.sampler import GREEDY_BELOW, TokenDraws, argmax, finite_rows

_NOWHERE = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class ModelDrafts:
    """Proposes for the rows of `table` by `drafts`."""

    drafts: BoundDrafts
    table: RowTable
    queue: DeviceQueue
    block_tables: BlockTables
    last_tokens: LastTokens
    draws: TokenDraws
    follows: bool = True

    def propose(self, asks: Sequence[DraftAsk]) -> list[IntArray]:
        """See Proposer. None for rows of which an MTP head has no state yet."""
        rows = np.array([ask.row for ask in asks], np.int32)
        counts = np.array([ask.num_tokens for ask in asks])
        if self.drafts.kept is not None:
            left = self.table.num_known[rows] - self.table.num_computed[rows]
            counts[(left > 1) | (self.table.num_computed[rows] == 0)] = 0
        # A row leaves the passes when it has its tokens: beyond them it may have no block.
        order = np.argsort(-counts, kind="stable")
        drawn = self._drawn(rows[order], counts[order])
        found = [_NOWHERE] * len(asks)
        for place, i in enumerate(order.tolist()):
            found[i] = np.array([step[place] for step in drawn[: counts[i]]], np.int32)
        return found

    def _drawn(self, rows: IntArray, counts: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Draft tokens of each pass, for as many of the first rows as want so many; `counts` descend."""
        known, drawn = self.table.num_known[rows], []
        self.table.need_tokens(int((known + counts).max()))
        states: torch.Tensor | None = None
        with self.queue.inputs():
            for i in range(int(counts[0])):
                count = np.count_nonzero(counts > i)
                starts = self.table.num_computed[rows[:count]] if i == 0 else known[:count] + i - 1
                batch = _sampling(rows[:count], starts, known[:count] + i - starts)
                [step] = self._inputs(self._packed(batch))
                if i:
                    step = replace(step, token_ids=drawn[-1][None, :count])
                logits, states = self._computed(step, None if states is None else states[:count])
                drawn.append(self._draw(batch, known[:count] + i, logits))
        found = self.queue.fetch({str(i): token_ids for i, token_ids in enumerate(drawn)}).arrays()
        return [found[str(i)] for i in range(len(drawn))]

    def follow(self, batch: StepBatch) -> None:
        """See Proposer."""
        packed = self._packed(batch if self.drafts.kept is not None else _without_proposed(batch))
        if len(packed.token_ids):
            [step] = self._inputs(replace(packed, sampled_at=_NOWHERE))
            self._give_states(step, None)
            self.drafts.made.model.hidden([step])

    # --- a pass ------------------------------------------------------------------------------------------------------

    def _packed(self, batch: StepBatch) -> PackedTokens:
        """The tokens of `batch`, for an MTP head each at the position of the token before it."""
        packed = replace(self.table.pack(batch), adapter_ids=None)
        return packed if self.drafts.kept is None else _moved_back(packed, self.table)

    def _inputs(self, packed: PackedTokens) -> list[ModelInput]:
        """Of the first cache group alone, which has blocks for all tokens."""
        packed, tables = replace(packed, slots=packed.slots[:1]), self.block_tables.now()[:1]
        inputs = model_inputs(packed, tables, FREE, self.queue.upload)
        for step in inputs:
            if step.unread is not None:
                self.last_tokens.fill(step.token_ids[0], *step.unread)
        return inputs

    def _give_states(self, step: ModelInput, states: torch.Tensor | None) -> None:
        if self.drafts.kept is not None and self.drafts.made.states_input is not None:
            self.drafts.made.states_input.states = (
                self.drafts.kept.take(step.attention[0].slots) if states is None else states
            )

    def _computed(self, step: ModelInput, states: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits [rows, vocab], and for an MTP head its own states. `states`: that it is given; None = the kept ones."""
        if self.drafts.kept is None:
            return self.drafts.made.model.logits([step]), None
        self._give_states(step, states)
        return self.drafts.made.model.logits_and_hidden([step])

    def _draw(self, batch: StepBatch, positions: IntArray, logits: torch.Tensor) -> torch.Tensor:
        """A token for each row, int64: the one that the model would draw from these logits at `positions`, without rules."""
        if not (self.table.temperatures[batch.rows] >= GREEDY_BELOW).any():
            return argmax(logits)
        plan = replace(plan_draws(self.table, batch), lengths=positions)
        return self.draws.draw(logits, parameters_of(self.table, plan, self.queue.upload), finite_rows(logits))


def _sampling(rows: IntArray, starts: IntArray, counts: IntArray) -> StepBatch:
    """A batch in which all rows compute known tokens to their end."""
    ones = np.ones(len(rows), np.bool_)
    return StepBatch(rows, starts, counts, ones, ones, np.zeros_like(rows), 1, NO_CHANGES)


def _without_proposed(batch: StepBatch) -> StepBatch:
    """Of a row with draft tokens only the last one: to propose it, all before it were computed."""
    ends, has_drafts = batch.starts + batch.counts, batch.num_drafts > 0
    return replace(
        batch,
        starts=np.where(has_drafts, ends - 1, batch.starts),
        counts=np.where(has_drafts, 1, batch.counts),
        num_drafts=np.zeros_like(batch.num_drafts),
    )


def _moved_back(packed: PackedTokens, table: RowTable) -> PackedTokens:
    """Each token at the position, and in the slot, of the token before it; without first tokens of sequences."""
    kept, size = packed.positions > 0, table.limits.block_size
    ends = np.cumsum(kept)
    rows, positions = packed.token_rows[kept], packed.positions[kept] - 1
    blocks = table.block_tables[:, rows, positions // size].astype(np.int64)
    return replace(
        packed,
        token_ids=packed.token_ids[kept],
        positions=positions,
        token_rows=rows,
        slots=blocks * size + positions % size,
        row_offsets=np.concatenate([[0], ends])[packed.row_offsets].astype(np.int32),
        sampled_at=(ends[packed.sampled_at] - 1).astype(np.int32),
        unread=None if packed.unread is None else ends[packed.unread[kept[packed.unread]]] - 1,
    )
