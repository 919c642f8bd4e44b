"""From the logits of a batch's places to tokens: rules, draws, log probabilities, candidates. Joins the sampler to the rows."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from worker_svc import logprobs as scores
from worker_svc.draws import DrawPlan
from worker_svc.logit_rules import RuledPlaces, apply_rules
from worker_svc.row_batch import BoolArray
from worker_svc.row_changes import StepChanges
from worker_svc.row_options import IntArray, LongArray, Rule
from worker_svc.rows import RowTable
from worker_svc.sampler import SamplingRows, chosen_logprobs, draw, finite_rows
from worker_svc.step_results import Tops
from worker_svc.token_masks import Bits, MaskAsk, TokenMasks, num_words


@dataclass(frozen=True, slots=True)
class Drawn:
    """Draws [D]: `token_ids`, `logprobs` (0 = not asked), `tops`. Places [P]: `finite`, `opens` (its rules left a token).

    Beams [b]: `beams`, their entries among the sampling rows, with their `candidates`.
    """

    token_ids: IntArray
    logprobs: NDArray[np.float32]
    tops: Tops
    finite: BoolArray
    opens: BoolArray
    beams: LongArray
    candidates: Tops


NOTHING = Drawn(
    token_ids=np.zeros(0, np.int32),
    logprobs=np.zeros(0, np.float32),
    tops=Tops.none(0),
    finite=np.zeros(0, np.bool_),
    opens=np.zeros(0, np.bool_),
    beams=np.zeros(0, np.int64),
    candidates=Tops.none(0),
)
"""Of a batch without places."""


class RowSampler:
    """Draws for the rows of `table`; keeps `masks` up with them: `follow` each step's changes, `accept` what was committed."""

    def __init__(self, table: RowTable, masks: TokenMasks) -> None:
        self._table, self._masks = table, masks
        self._masked: set[int] = set()

    # --- grammars ----------------------------------------------------------------------------------------------------

    def follow(self, changes: StepChanges) -> None:
        """A step's changes were written: rows left, joined, or were told tokens."""
        for row in self._masked.intersection(changes.removed.tolist()):
            self._masks.remove(row)
            self._masked.remove(row)
        if changes.added is not None:
            rows = changes.added.rows
            for row in rows[changes.added.options.rules & Rule.GRAMMAR > 0].tolist():
                self._join(row)
        if changes.changed is not None and len(changes.changed.new_token_ids):
            rows, counts = changes.changed.rows, changes.changed.num_new_tokens
            self.accept(rows, self._table.num_known[rows] - counts)

    def _join(self, row: int) -> None:
        table, extras = self._table, self._table.options.extras[row]
        assert extras is not None, "a row with a grammar has lists"
        self._masks.add(
            row, extras.grammar, table.token_ids[row, table.num_prompt[row] : table.num_known[row]].tolist()
        )
        self._masked.add(row)

    def accept(self, rows: IntArray, begins: IntArray) -> None:
        """`rows` have taken in their tokens from place `begins[i]` on."""
        if not self._masked:
            return
        for row, begin, end in zip(rows.tolist(), begins.tolist(), self._table.num_known[rows].tolist(), strict=True):
            if row in self._masked and end > begin:
                self._masks.accept(row, self._table.token_ids[row, begin:end].tolist())

    def clear(self) -> None:
        """All rows are gone."""
        self._masks.clear()
        self._masked.clear()

    # --- drawing -----------------------------------------------------------------------------------------------------

    def draw(self, plan: DrawPlan, logits: torch.Tensor) -> Drawn:
        """`logits`: float32 [P, vocab]."""
        shaped = self._shaped(plan, logits)
        finite = finite_rows(logits)
        opens = torch.ones_like(finite) if shaped is logits else shaped.amax(-1) > float("-inf")
        fit = finite & opens
        at = torch.from_numpy(plan.draw_places.astype(np.int64)).to(logits.device)
        params = _parameters(self._table, plan, logits.device)
        raw = logits if plan.is_plain else logits[at]
        tokens = draw(shaped if plan.is_plain else shaped[at], params, fit[at])
        beams, candidates = self._candidates(plan, shaped, fit)
        return Drawn(
            token_ids=_numpy(tokens.to(torch.int32)),
            logprobs=_numpy(chosen_logprobs(raw, tokens, params.logprobs & fit[at])),
            tops=_tops(raw, np.where(_numpy(fit[at]), self._table.options.num_tops[plan.draw_rows], 0)),
            finite=_numpy(finite),
            opens=_numpy(opens),
            beams=beams,
            candidates=candidates,
        )

    def _shaped(self, plan: DrawPlan, logits: torch.Tensor) -> torch.Tensor:
        """The logits under the rows' rules; the very same where no row has one."""
        rows = plan.place_rows
        rules = self._table.options.rules[rows]
        at = np.flatnonzero(rules)
        if not len(at):
            return logits
        masks = self._grammar_masks(plan, np.flatnonzero(self._table.options.rules[plan.rows] & Rule.GRAMMAR))
        return apply_rules(logits, RuledPlaces(self._table, at, rows[at], plan.lengths[at], masks))

    def _grammar_masks(self, plan: DrawPlan, entries: LongArray) -> Bits:
        """Of all places of some of the sampling rows."""
        rows, num_drafts = plan.rows[entries], plan.num_drafts[entries]
        known = self._table.num_known[rows]
        at = np.cumsum(num_drafts + 1) - num_drafts - 1
        masks = np.zeros((int((num_drafts + 1).sum()), num_words(self._table.limits.vocab_size)), np.int32)
        asks = [
            MaskAsk(row, self._table.token_ids[row, begin : begin + count].tolist(), first)
            for row, begin, count, first in zip(
                rows.tolist(), known.tolist(), num_drafts.tolist(), at.tolist(), strict=True
            )
        ]
        if asks:
            self._masks.fill(asks, masks)
        return masks

    def _candidates(self, plan: DrawPlan, shaped: torch.Tensor, fit: torch.Tensor) -> tuple[LongArray, Tops]:
        wanted = self._table.options.num_candidates[plan.rows]
        if not wanted.any():
            return np.zeros(0, np.int64), Tops.none(0)
        first = plan.first_places
        beams = np.flatnonzero((wanted > 0) & _numpy(fit)[first])
        here = shaped[torch.from_numpy(first[beams].astype(np.int64)).to(shaped.device)]
        left = _numpy((here > float("-inf")).sum(-1))
        return beams, _tops(here, np.minimum(wanted[beams], left))


def _parameters(table: RowTable, plan: DrawPlan, device: torch.device) -> SamplingRows:
    """Of each draw."""
    rows = plan.draw_rows
    min_ps = table.options.min_ps[rows]
    columns = (
        table.temperatures[rows],
        table.top_ks[rows].astype(np.int64),
        table.top_ps[rows],
        table.seeds[rows].view(np.int64),
        plan.sequence_indexes.astype(np.int64),
        plan.lengths[plan.draw_places].astype(np.int64),
        table.logprobs[rows],
    )
    tensors = (torch.from_numpy(column).to(device) for column in columns)
    return SamplingRows(*tensors, min_ps=torch.from_numpy(min_ps).to(device) if min_ps.any() else None)


def _tops(logits: torch.Tensor, counts: NDArray[np.integer]) -> Tops:
    """The `counts[i]` likeliest of each row of float32 [n, vocab]; rows with 0 are not looked at."""
    if not counts.any():
        return Tops.none(len(counts))
    most, at = int(counts.max()), np.flatnonzero(counts)
    found = scores.likeliest(logits[torch.from_numpy(at).to(logits.device)], most)
    ids, logprobs = np.zeros((len(counts), most), np.int32), np.zeros((len(counts), most), np.float32)
    ids[at], logprobs[at] = _numpy(found.token_ids), _numpy(found.logprobs)
    return Tops(counts.astype(np.int32), ids, logprobs)


def _numpy(tensor: torch.Tensor) -> NDArray:
    return tensor.cpu().numpy()
