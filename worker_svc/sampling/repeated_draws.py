"""Draws of rows that repeat their decode step: parameters are gathered once, only positions change from step to step."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from worker_svc.rows.batch import BoolArray
from worker_svc.rows.options import IntArray, LongArray
from worker_svc.rows.table import RowTable
from worker_svc.sampling.sampler import GREEDY_BELOW, SamplingRows, TokenDraws

FloatArray = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RepeatedDraws:
    """Draws for those of a step's n rows that need more than their highest logit. `at` [k]: their indices."""

    at: LongArray
    parameters: SamplingRows
    draws: TokenDraws
    gives_logprobs: bool

    @classmethod
    def of(cls, table: RowTable, rows: IntArray, draws: TokenDraws) -> "RepeatedDraws | None":
        """For `rows` without rules and top logprobs; None if the highest logits are all they need."""
        more = (table.temperatures[rows] >= GREEDY_BELOW) | table.logprobs[rows]
        if not more.any():
            return None
        chosen, min_ps = rows[more], table.options.min_ps[rows[more]]
        columns = (
            table.temperatures[chosen],
            table.top_ks[chosen].astype(np.int64),
            table.top_ps[chosen],
            table.seeds[chosen].view(np.int64),
            table.sequence_indexes[chosen].astype(np.int64),
            table.num_known[chosen].astype(np.int64),
            table.logprobs[chosen],
        )
        parameters = SamplingRows(
            *map(torch.from_numpy, columns), min_ps=torch.from_numpy(min_ps) if min_ps.any() else None
        )
        return cls(np.flatnonzero(more), parameters, draws, bool(table.logprobs[chosen].any()))

    @torch.inference_mode()
    def draw(self, logits: torch.Tensor, finite: BoolArray, positions: IntArray, token_ids: IntArray) -> FloatArray:
        """Put the rows' tokens, drawn at `positions` [n] from `logits` [n, vocab], into `token_ids` [n].

        Returns the logprobs [n] of the tokens, 0 where not requested. Rows not `finite` [n] get some token.
        """
        mine, valid = logits[self.at], torch.from_numpy(finite[self.at])
        rows = replace(self.parameters, positions=torch.from_numpy(positions[self.at].astype(np.int64)))
        tokens = self.draws.draw(mine, rows, valid)
        token_ids[self.at] = tokens.numpy()
        logprobs = np.zeros(len(token_ids), np.float32)
        if self.gives_logprobs:
            logprobs[self.at] = self.draws.chosen_logprobs(mine, tokens, rows.logprobs & valid).numpy()
        return logprobs
