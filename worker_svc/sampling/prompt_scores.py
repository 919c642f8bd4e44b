"""Prompt logprobs: which rows request them, and their computation in pieces of bounded size."""

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from worker_svc.invariance import RowRule
from worker_svc.rows.batch import BoolArray, IntArray, PackedTokens, StepBatch
from worker_svc.rows.columns import RowColumns
from worker_svc.rows.options import NO_PROMPT_LOGPROBS
from worker_svc.sampling.logprobs import of_tokens, top_logprobs
from worker_svc.sampling.sampler import finite_rows
from worker_svc.sampling.step_results import StepResults, Tops

_MOST_LOGIT_BYTES = 2**26


def wanting_rows(table: RowColumns, batch: StepBatch) -> BoolArray:
    """[n]: True if the row requests them and this step computes a prompt token that another one follows."""
    asked = table.options.num_prompt_tops[batch.rows] != NO_PROMPT_LOGPROBS
    return asked & (batch.starts + 1 < table.num_prompt[batch.rows])


def any_wanting(table: RowColumns) -> bool:
    """True if some row requests them and has not computed its whole prompt."""
    asked = table.occupied & (table.options.num_prompt_tops != NO_PROMPT_LOGPROBS)
    return bool((asked & (table.num_computed + 1 < table.num_prompt)).any())


def piece_rule(rule: RowRule, vocab_size: int) -> RowRule:
    """`rule` with passes short enough that the logits of all their tokens fit the memory bound."""
    most = max(_MOST_LOGIT_BYTES // (4 * vocab_size), rule.minimum, rule.multiple)
    return replace(rule, maximum=min(rule.maximum, most // rule.multiple * rule.multiple))


@dataclass(slots=True)
class PromptScores:
    """Collects one step's passes of the rows that request prompt logprobs; `packed` holds those rows."""

    table: RowColumns
    packed: PackedTokens
    bad_rows: set[int] = field(default_factory=set)
    _sampled: list[torch.Tensor] = field(default_factory=list)
    _places: list[IntArray] = field(default_factory=list)
    _logprobs: list[torch.Tensor] = field(default_factory=list)
    _ids: list[torch.Tensor] = field(default_factory=list)
    _tops: list[torch.Tensor] = field(default_factory=list)
    _num_seen: int = 0

    @property
    def wanted(self) -> PackedTokens:
        """The packed row with all places that need logits: those to sample at, and those before a prompt token."""
        places = np.flatnonzero(self._is_prompt(np.arange(len(self.packed.token_ids))))
        return replace(self.packed, sampled_at=np.union1d(places, self.packed.sampled_at).astype(np.int32))

    def take(self, places: IntArray, logits: torch.Tensor) -> None:
        """Take float32 logits [m, vocab] at `places` [m] of the packed row, the next ones of `wanted`."""
        is_prompt = self._is_prompt(places)
        self._sampled.append(logits[torch.from_numpy(~is_prompt)])
        if is_prompt.any():
            self._score(places[is_prompt], logits[torch.from_numpy(is_prompt)])

    def sampled_logits(self) -> torch.Tensor:
        """float32 [places to sample at, vocab], in order."""
        return torch.cat(self._sampled)

    def report(self, results: StepResults) -> None:
        """Add the rows' logprobs to the results, except those of bad rows."""
        places = np.concatenate(self._places)
        logprobs, ids, tops = (torch.cat(part).cpu().numpy() for part in (self._logprobs, self._ids, self._tops))
        rows = self.packed.token_rows[places]
        for row in np.unique(rows).tolist():
            at = np.flatnonzero(rows == row)
            if row in self.bad_rows:
                continue
            counts = np.full(len(at), self.table.options.num_prompt_tops[row], np.int32)
            start = int(self.packed.positions[places[at[0]]]) + 1
            incarnation = int(self.table.incarnations[row])
            results.add_prompt(row, incarnation, start, logprobs[at], Tops(counts, ids[at].astype(np.int32), tops[at]))

    def _is_prompt(self, places: IntArray) -> BoolArray:
        return self.packed.positions[places] + 1 < self.table.num_prompt[self.packed.token_rows[places]]

    def _score(self, places: IntArray, logits: torch.Tensor) -> None:
        rows = self.packed.token_rows[places]
        targets = self.table.token_ids[rows, self.packed.positions[places] + 1].astype(np.int64)
        self.bad_rows.update(rows[~finite_rows(logits).cpu().numpy()].tolist())
        # The largest number that any row requests; the report truncates per row.
        asked = self.table.options.num_prompt_tops[self.packed.token_rows]
        found = top_logprobs(logits, int(asked.max()))
        self._places.append(places)
        self._logprobs.append(of_tokens(logits, torch.from_numpy(targets).to(logits.device)))
        self._ids.append(found.token_ids)
        self._tops.append(found.logprobs)
