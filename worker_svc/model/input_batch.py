"""Tensors of a step's forward passes: packed tokens, padded to allowed row counts and split if too many.

Padding follows the real tokens: token 0 at position 0, not written to the cache and not attended to.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paged_kernels.backend import PADDING_SLOT, AttentionBatch
from worker_svc.device.queue import host_tensors
from worker_svc.invariance import RowRule
from worker_svc.model.states.batches import PassStates
from worker_svc.rows.batch import PackedTokens
from worker_svc.rows.states import RowStates

_NOTHING = np.zeros(0, np.int64)
_FILLS = {"token_ids": 0, "positions": 0, "token_rows": 0, "slots": PADDING_SLOT}  # the last axis is that of tokens
"""Columns of the tokens that are padded, and with what."""

Upload = Callable[..., list[torch.Tensor]]
"""Converts arrays to tensors on the device that needs them: `DeviceQueue.upload`."""


@dataclass(frozen=True, slots=True)
class ModelInput:
    """One forward pass. `attention`: of each cache group.

    `token_ids`, `positions`: int64 [1, T]. `logit_rows`: int64, packed positions where logits are wanted,
    padded; the first `num_logits` are real. `adapter_ids`: int32 [T], 0 = none; None if no token has an
    adapter.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: tuple[AttentionBatch, ...]
    logit_rows: torch.Tensor
    num_logits: int
    adapter_ids: NDArray[np.int32] | None = None
    unread: tuple[torch.Tensor, torch.Tensor] | None = None
    """Positions of tokens that the host does not know, and the rows that drew them, both int64 [k].

    None if there are none.
    """
    states: PassStates | None = None
    """Of the pass's sequences; None if the model has no states."""

    def to(self, device: torch.device) -> "ModelInput":
        """The same input with its tensors on `device`."""
        if self.token_ids.device == device:
            return self
        return replace(
            self,
            token_ids=self.token_ids.to(device, non_blocking=True),
            positions=self.positions.to(device, non_blocking=True),
            attention=tuple(batch.to(device) for batch in self.attention),
            logit_rows=self.logit_rows.to(device, non_blocking=True),
        )

    @property
    def num_tokens(self) -> int:
        """Packed tokens without padding."""
        return int(self.attention[0].offsets[-1])


def model_inputs(
    packed: PackedTokens, tables: torch.Tensor, rule: RowRule, upload: Upload = host_tensors
) -> list[ModelInput]:
    """The forward passes of a step, in order; logits come in the order of `packed.sampled_at`.

    `tables`: int32 [cache groups, S, most blocks], the rows' block tables. `upload` makes the other tensors.
    """
    passes = []
    for begin, end in rule.pieces(len(packed.token_ids)):
        columns = [getattr(packed, name)[..., begin:end] for name in _FILLS]
        if (size := rule.padded(end - begin)) > end - begin:
            columns = [_padded(column, size, fill) for column, fill in zip(columns, _FILLS.values(), strict=True)]
        token_ids, positions, token_rows, slots = columns
        offsets = np.clip(packed.row_offsets, begin, end) - begin
        lengths = positions[np.maximum(offsets[1:], 1) - 1] + 1
        wanted = packed.sampled_at[(packed.sampled_at >= begin) & (packed.sampled_at < end)] - begin
        wide = (token_ids.astype(np.int64), positions.astype(np.int64), _logit_rows(wanted, rule))
        sequences, in_sequence, of_groups, ids, places, logit_rows, unread, unread_rows = upload(
            token_rows, positions, np.ascontiguousarray(slots), *wide, *_unread(packed, begin, end)
        )
        passes.append(
            ModelInput(
                token_ids=ids[None],
                positions=places[None],
                attention=tuple(
                    AttentionBatch(sequences, in_sequence, *of_group, offsets, lengths)
                    for of_group in zip(of_groups, tables, strict=True)
                ),
                logit_rows=logit_rows,
                num_logits=len(wanted),
                adapter_ids=None if packed.adapter_ids is None else _padded(packed.adapter_ids[begin:end], size, 0),
                unread=None if packed.unread is None else (unread, unread_rows),
                states=None if packed.states is None else _pass_states(packed.states, offsets, positions),
            )
        )
    return passes


def _pass_states(rows: RowStates, offsets: NDArray[np.int32], positions: NDArray[np.int32]) -> PassStates:
    """`offsets`: of the rows in this pass, of which some may have no tokens here."""
    return PassStates(rows, positions[np.minimum(offsets[:-1], len(positions) - 1)], offsets)


def without_lengths(step: ModelInput) -> ModelInput:
    """The same pass, as one of which only the device knows how many keys its sequences have."""
    return replace(step, attention=tuple(replace(batch, lengths=None, plans={}) for batch in step.attention))


def _unread(packed: PackedTokens, begin: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """See ModelInput; empty if the host knows all tokens."""
    if packed.unread is None:
        return _NOTHING, _NOTHING
    places = packed.unread[(packed.unread >= begin) & (packed.unread < end)]
    return places - begin, packed.token_rows[places].astype(np.int64)


def _padded(column: NDArray[Any], size: int, fill: int) -> NDArray[Any]:
    out = np.full((*column.shape[:-1], size), fill, column.dtype)
    out[..., : column.shape[-1]] = column
    return out


def _logit_rows(wanted: NDArray[np.int32], rule: RowRule) -> NDArray[np.int64]:
    rows = wanted.astype(np.int64)
    size = rule.padded(len(rows)) if len(rows) else 0
    return _padded(rows, size, 0) if size > len(rows) else rows
