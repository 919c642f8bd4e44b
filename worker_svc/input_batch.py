"""From the persistent batch to the tensors of one forward pass: padded to allowed row counts, cut where a count is too large.

Padding tokens come after the real ones: token 0 at position 0, written nowhere, attended to by nobody.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paged_kernels.backend import PADDING_SLOT, AttentionBatch
from worker_svc.invariance import RowRule
from worker_svc.row_batch import PackedTokens
from worker_svc.rows import RowTable, StepBatch
from worker_svc.sampler import SamplingRows


@dataclass(frozen=True, slots=True)
class ModelInput:
    """One forward pass. `token_ids`, `positions`: int64 [1, T]; `logit_rows`: int64, packed places whose logits are wanted,
    padded; the first `num_logits` of them are real."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionBatch
    logit_rows: torch.Tensor
    num_logits: int


def model_inputs(packed: PackedTokens, block_tables: NDArray[np.int32], rule: RowRule) -> Iterator[ModelInput]:
    """The forward passes of a step, in order; logits come in the order of `packed.sampled_at`."""
    tables = torch.from_numpy(block_tables)
    for begin, end in rule.pieces(len(packed.token_ids)):
        wanted = packed.sampled_at[(packed.sampled_at >= begin) & (packed.sampled_at < end)] - begin
        size = rule.padded(end - begin)
        positions = _padded(packed.positions[begin:end], size, 0)
        attention = AttentionBatch(
            sequences=torch.from_numpy(_padded(packed.token_rows[begin:end], size, 0)),
            positions=torch.from_numpy(positions),
            slots=torch.from_numpy(_padded(packed.slots[begin:end], size, PADDING_SLOT)),
            block_tables=tables,
            offsets=np.clip(packed.row_offsets, begin, end) - begin,
        )
        yield ModelInput(
            token_ids=torch.from_numpy(_padded(packed.token_ids[begin:end], size, 0).astype(np.int64))[None],
            positions=torch.from_numpy(positions.astype(np.int64))[None],
            attention=attention,
            logit_rows=torch.from_numpy(_logit_rows(wanted, rule)),
            num_logits=len(wanted),
        )


def _padded(column: NDArray[Any], size: int, fill: int) -> NDArray[Any]:
    if len(column) == size:
        return np.ascontiguousarray(column)
    out = np.full(size, fill, column.dtype)
    out[: len(column)] = column
    return out


def _logit_rows(wanted: NDArray[np.int32], rule: RowRule) -> NDArray[np.int64]:
    size = rule.padded(len(wanted)) if len(wanted) else 0
    return _padded(wanted.astype(np.int64), size, 0)


def sampling_rows(table: RowTable, batch: StepBatch) -> SamplingRows:
    """Sampling parameters of the rows that yield a token, in batch order."""
    rows = batch.sampled_rows
    return SamplingRows(
        temperatures=torch.from_numpy(table.temperatures[rows]),
        top_ks=torch.from_numpy(table.top_ks[rows].astype(np.int64)),
        top_ps=torch.from_numpy(table.top_ps[rows]),
        seeds=torch.from_numpy(table.seeds[rows].view(np.int64)),
        sequence_indexes=torch.from_numpy(table.sequence_indexes[rows].astype(np.int64)),
        positions=torch.from_numpy(table.num_known[rows].astype(np.int64)),
        logprobs=torch.from_numpy(table.logprobs[rows]),
    )
