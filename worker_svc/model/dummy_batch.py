"""Steps of dummy sequences, for runs of a model before it serves."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from worker_svc.rows.batch import PackedTokens
from worker_svc.rows.states import NO_ENDS, RowStateBlocks, RowStates

LONGEST = 64
"""Positions that dummy sequences may reach, even if `max_model_len` is smaller."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one dummy sequence.

    `row`: of the block tables; `start`: first position; `samples`: True if logits of the last token are
    wanted.
    """

    row: int
    start: int
    token_ids: Sequence[int]
    samples: bool = False


def of_groups(tables: NDArray[np.int32], num_groups: int) -> NDArray[np.int32]:
    """Block tables of all cache groups, [num_groups, S, most], from one's [S, most]: without a block in two of them."""
    return tables * np.int32(num_groups) + np.arange(num_groups, dtype=np.int32)[:, None, None]


def pack(
    chunks: Sequence[Chunk], tables: NDArray[np.int32], block_size: int, states: NDArray[np.int32] | None = None
) -> PackedTokens:
    """Pack the chunks into one row. `tables`: [cache groups, S, most blocks]. `states`: [S, blocks] of a model that has states."""
    counts = [len(chunk.token_ids) for chunk in chunks]
    offsets = np.cumsum([0, *counts], dtype=np.int32)
    positions = np.concatenate([np.arange(c.start, c.start + len(c.token_ids), dtype=np.int32) for c in chunks])
    rows = np.repeat(np.array([c.row for c in chunks], np.int32), counts)
    slots = tables[:, rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
    tokens = np.concatenate([np.array(c.token_ids, np.int32) for c in chunks])
    sampled = np.array([end - 1 for c, end in zip(chunks, offsets[1:], strict=True) if c.samples], np.int32)
    return PackedTokens(tokens, positions, rows, slots, offsets, sampled, states=_states(chunks, states))


def _states(chunks: Sequence[Chunk], blocks: NDArray[np.int32] | None) -> RowStates | None:
    if blocks is None:
        return None
    rows, starts = (np.array(column, np.int32) for column in zip(*((c.row, c.start) for c in chunks), strict=True))
    return RowStates(rows, blocks[rows], blocks[rows], starts, RowStateBlocks.none(blocks.shape[1]), NO_ENDS)
