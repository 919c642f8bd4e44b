"""Forward passes of a batch.

Splits the rows into passes and returns logits, hidden states and prompt scores in batch order.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from protos.worker.v1 import worker_pb2
from svc_common import clock
from worker_svc.device.kept_inputs import BlockTables, LastTokens
from worker_svc.device.queue import DeviceQueue
from worker_svc.executor.recorded_decode import RecordedDecode
from worker_svc.invariance import FREE, RowRule
from worker_svc.model.input_batch import ModelInput, model_inputs
from worker_svc.model.pooling import PoolingSums
from worker_svc.model.row_model import RowModel
from worker_svc.rows.batch import BoolArray, IntArray, PackedTokens, StepBatch
from worker_svc.rows.table import RowTable
from worker_svc.sampling import prompt_scores
from worker_svc.sampling.prompt_scores import PromptScores

Timings = worker_pb2.StepTimings


@dataclass(frozen=True, slots=True)
class Hidden:
    """Last hidden states, float32 [T, H], of the tokens of `rows`; those of `rows[i]` are `offsets[i] : offsets[i + 1]`."""

    states: torch.Tensor
    rows: IntArray
    offsets: IntArray
    reaches_end: BoolArray


@dataclass(frozen=True, slots=True)
class Computed:
    """Result of a batch's passes.

    `logits`: float32 [places, vocab], or [0, 0] if no row samples; meaningless before the last stage. `hidden`: None if no
    row is pooled. `is_recorded`: by `recorded`, which has chosen tokens too; the logits are valid until the next step.
    """

    logits: torch.Tensor
    hidden: Hidden | None = None
    prompts: tuple[PromptScores, ...] = ()
    is_recorded: bool = False

    @property
    def bad_rows(self) -> set[int]:
        """Rows with non-finite logits at any prompt token."""
        return {row for scores in self.prompts for row in scores.bad_rows} if self.prompts else set()

    def vectors(self, pools: PoolingSums) -> list[tuple[int, NDArray[np.float32]]]:
        """Add the hidden states to `pools` and return (row, vector) of each row with a complete embedding."""
        found = self.hidden
        return [] if found is None else pools.step(found.states, found.rows, found.offsets, found.reaches_end)


@dataclass(frozen=True, slots=True)
class Forward:
    """Runs `model` on rows of `table`.

    Rows that request prompt logprobs run first, in separate passes: their many logits are processed in
    pieces. Such a row must therefore not read blocks that another row writes in the same step; all other
    rows may.
    """

    model: RowModel
    table: RowTable
    rule: RowRule
    pools: PoolingSums
    queue: DeviceQueue
    block_tables: BlockTables
    last_tokens: LastTokens
    recorded: RecordedDecode | None = None

    def compute(self, batch: StepBatch, timings: Timings) -> Computed:
        """Run all passes of the batch.

        In a fused model, rows with an adapter are computed by the original modules. They run in passes of
        their own so that the bits of the other rows do not depend on them. The two kinds never share
        blocks, since an adapter changes keys and values.
        """
        if self.recorded is not None and self.recorded.takes(batch):
            begin_ns = clock.monotonic_ns()
            logits = self.recorded.run(batch)
            timings.model_ns += clock.monotonic_ns() - begin_ns
            if logits is not None:
                return Computed(logits, is_recorded=True)
        adapted = self.table.options.adapter_ids[batch.rows] > 0
        if not adapted.any() or not self.model.is_fused or adapted.all():
            return self._one_way(batch, timings)
        with_adapters, without = (self._one_way(batch.part(rows), timings) for rows in (adapted, ~adapted))
        logits = _merged(_owners(batch, adapted), with_adapters.logits, without.logits)
        return Computed(logits, _both(with_adapters.hidden, without.hidden), with_adapters.prompts + without.prompts)

    def _one_way(self, batch: StepBatch, timings: Timings) -> Computed:
        if batch.changes.is_unchanged:  # no row computes its prompt
            return self._together(batch, timings)
        wanting = prompt_scores.wanting_rows(self.table, batch)
        if not wanting.any():
            return self._together(batch, timings)
        prompts, apart = self._apart(batch.part(wanting), timings)
        rest = self._together(batch.part(~wanting), timings)
        if not self.model.has_logits:
            return Computed(rest.logits, rest.hidden, (prompts,))
        return Computed(_merged(_owners(batch, wanting), apart, rest.logits), rest.hidden, (prompts,))

    def _together(self, batch: StepBatch, timings: Timings) -> Computed:
        begin_ns = clock.monotonic_ns()
        packed = self.table.pack(batch)
        inputs = self._inputs(packed, self._rule_of(packed))
        prepared_ns = clock.monotonic_ns()
        pools = not batch.changes.is_unchanged and self.pools.wants(batch.rows)
        computed = self._pooled(batch, packed, inputs) if pools else Computed(self.model.logits(inputs))
        timings.prepare_ns += prepared_ns - begin_ns
        timings.model_ns += clock.monotonic_ns() - prepared_ns
        return computed

    def _pooled(self, batch: StepBatch, packed: PackedTokens, inputs: list[ModelInput]) -> Computed:
        if batch.samples.any():
            logits, states = self.model.logits_and_hidden(inputs)
        else:
            logits, states = torch.empty(0, 0), self.model.hidden(inputs)
        return Computed(logits, Hidden(states, batch.rows, packed.row_offsets, batch.reaches_end))

    def _rule_of(self, packed: PackedTokens) -> RowRule:
        """The row rule for these tokens. A fused decoder needs none: its rows keep their bits, or nothing here is invariant."""
        return FREE if self.model.is_fused and packed.adapter_ids is None else self.rule

    def _inputs(self, packed: PackedTokens, rule: RowRule) -> list[ModelInput]:
        """Copy the inputs to the device and fill in token ids that only the device has."""
        inputs = model_inputs(packed, self.block_tables.now(), rule, self.queue.upload)
        for step in inputs:
            if step.unread is not None:
                self.last_tokens.fill(step.token_ids[0], *step.unread)
        return inputs

    def _apart(self, batch: StepBatch, timings: Timings) -> tuple[PromptScores, torch.Tensor]:
        """Run rows that request prompt logprobs. Returns the scores and the logits of the positions to sample at."""
        begin_ns = clock.monotonic_ns()
        scores = PromptScores(self.table, self.table.pack(batch))
        packed = scores.wanted
        rule = prompt_scores.piece_rule(self._rule_of(packed), self.table.limits.vocab_size)
        inputs = self._inputs(packed, rule)
        prepared_ns = clock.monotonic_ns()
        begin = 0
        for step in inputs:
            end, logits = begin + step.num_logits, self.model.logits([step])
            if self.model.has_logits:
                scores.take(packed.sampled_at[begin:end], logits)
            begin = end
        timings.prepare_ns += prepared_ns - begin_ns
        timings.model_ns += clock.monotonic_ns() - prepared_ns
        return scores, scores.sampled_logits() if self.model.has_logits else torch.empty(0, 0)


def _owners(batch: StepBatch, chosen: BoolArray) -> BoolArray:
    """Mark the logit rows that belong to chosen rows; `chosen` [n]."""
    return np.repeat(chosen[batch.samples], batch.sampled_drafts + 1)


def _both(first: Hidden | None, second: Hidden | None) -> Hidden | None:
    if first is None or second is None:
        return first or second
    return Hidden(
        torch.cat([first.states, second.states]),
        np.concatenate([first.rows, second.rows]),
        np.concatenate([first.offsets, first.offsets[-1] + second.offsets[1:]]),
        np.concatenate([first.reaches_end, second.reaches_end]),
    )


def _merged(is_apart: BoolArray, apart: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """Merge logits of two passes into batch order; `is_apart` [P] marks those of the first."""
    if is_apart.all():
        return apart
    if not is_apart.any():
        return rest
    logits = torch.empty(len(is_apart), rest.shape[1], device=rest.device)
    logits[torch.from_numpy(is_apart).to(rest.device)] = apart
    logits[torch.from_numpy(~is_apart).to(rest.device)] = rest
    return logits
