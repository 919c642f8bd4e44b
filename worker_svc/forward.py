"""A batch's forward passes: what is run together; logits, hidden states and prompt scores brought back into the batch's order."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from protos.worker.v1 import worker_pb2
from svc_common import clock
from worker_svc.device.queue import DeviceQueue
from worker_svc.device.tokens import LastTokens
from worker_svc.invariance import RowRule
from worker_svc.model.input_batch import ModelInput, model_inputs
from worker_svc.model.packed_model import PackedModel
from worker_svc.model.pooling import Pools
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
    """`logits`: float32 [places, vocab], [0, 0] when there is none. None: no row wants that."""

    logits: torch.Tensor
    hidden: Hidden | None = None
    prompts: PromptScores | None = None

    @property
    def bad_rows(self) -> set[int]:
        """Rows whose logits are not finite at some prompt token."""
        return self.prompts.bad_rows if self.prompts is not None else set()

    def vectors(self, pools: Pools) -> list[tuple[int, NDArray[np.float32]]]:
        """Takes the hidden states into `pools`; (row, vector) of those that are ready."""
        found = self.hidden
        return [] if found is None else pools.step(found.states, found.rows, found.offsets, found.reaches_end)


@dataclass(frozen=True, slots=True)
class Forward:
    """Runs `model` on rows of `table`.

    Rows that want log probabilities of their prompt run first, in passes of their own: their logits are many and are taken in
    pieces. So such a row must not read blocks that another one writes in the same step; all others may (R136).
    """

    model: PackedModel
    table: RowTable
    rule: RowRule
    pools: Pools
    queue: DeviceQueue
    last_tokens: LastTokens

    def compute(self, batch: StepBatch, timings: Timings) -> Computed:
        """All passes of the batch."""
        wanting = prompt_scores.wanting_rows(self.table, batch)
        if not wanting.any():
            return self._together(batch, timings)
        prompts, apart = self._apart(batch.part(wanting), timings)
        rest = self._together(batch.part(~wanting), timings)
        owners = np.repeat(wanting[batch.samples], batch.sampled_drafts + 1)
        return Computed(_merged(owners, apart, rest.logits), rest.hidden, prompts)

    def _together(self, batch: StepBatch, timings: Timings) -> Computed:
        with lap(timings, "prepare_ns"):
            packed = self.table.pack(batch)
            inputs = self._inputs(packed, self.rule)
        with lap(timings, "model_ns"):
            if not self.pools.wants(batch.rows):
                return Computed(self.model.logits(inputs))
            if batch.samples.any():
                logits, states = self.model.logits_and_hidden(inputs)
            else:
                logits, states = torch.empty(0, 0), self.model.hidden(inputs)
            return Computed(logits, Hidden(states, batch.rows, packed.row_offsets, batch.reaches_end))

    def _inputs(self, packed: PackedTokens, rule: RowRule) -> list[ModelInput]:
        """On the device, with the tokens that only the device knows."""
        inputs = list(model_inputs(packed, self.table.block_tables, rule, self.queue.upload))
        for step in inputs:
            if step.unread is not None:
                self.last_tokens.fill(step.token_ids[0], *step.unread)
        return inputs

    def _apart(self, batch: StepBatch, timings: Timings) -> tuple[PromptScores, torch.Tensor]:
        """The scores, and the logits of the places to draw at."""
        rule = prompt_scores.piece_rule(self.rule, self.table.limits.vocab_size)
        with lap(timings, "prepare_ns"):
            scores = PromptScores(self.table, self.table.pack(batch))
            packed = scores.wanted
            inputs = self._inputs(packed, rule)
        begin = 0
        with lap(timings, "model_ns"):
            for step in inputs:
                end = begin + step.num_logits
                scores.take(packed.sampled_at[begin:end], self.model.logits([step]))
                begin = end
        return scores, scores.sampled_logits()


def _merged(is_apart: BoolArray, apart: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """Logits of places, `is_apart` [P], in the batch's order."""
    if is_apart.all():
        return apart
    if not is_apart.any():
        return rest
    logits = torch.empty(len(is_apart), rest.shape[1], device=rest.device)
    logits[torch.from_numpy(is_apart).to(rest.device)] = apart
    logits[torch.from_numpy(~is_apart).to(rest.device)] = rest
    return logits


@contextlib.contextmanager
def lap(timings: Timings, name: str) -> Iterator[None]:
    """Adds the time spent inside to a field of `timings`."""
    begin = clock.monotonic_ns()
    yield
    setattr(timings, name, getattr(timings, name) + clock.monotonic_ns() - begin)
