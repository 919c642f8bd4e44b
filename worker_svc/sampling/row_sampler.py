"""From the logits of a batch's places to tokens: rules, draws, logprobs, candidates. Connects the sampler to the rows."""

import contextlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paged_kernels.registry import GreedyKernel
from worker_svc.device.queue import DeviceQueue, Fetched, HostQueue
from worker_svc.model.input_batch import Upload
from worker_svc.rows.batch import BoolArray
from worker_svc.rows.changes import StepChanges
from worker_svc.rows.options import IntArray, LongArray, Rule
from worker_svc.rows.table import RowTable
from worker_svc.sampling import logprobs as scores
from worker_svc.sampling.draw_plan import DrawPlan
from worker_svc.sampling.logit_rules import RuledPlaces, apply_rules
from worker_svc.sampling.sampler import GREEDY_BELOW, TORCH_DRAWS, SamplingRows, TokenDraws
from worker_svc.sampling.sampler import greedy as torch_greedy
from worker_svc.sampling.step_results import Tops
from worker_svc.sampling.token_masks import NO_WORK, Bits, MaskAsk, MaskWork, TokenMasks, num_words

Results = Mapping[str, NDArray[Any]]
_NONE = np.zeros(0, np.int64)
_NO_TOPS = Tops.none(0)
_READS_TOKENS = int(Rule.GRAMMAR | Rule.BAD_WORDS | Rule.PENALTY)


@dataclass(frozen=True, slots=True)
class Drawn:
    """Results on the host.

    Draws [D]: `token_ids`, `logprobs` (0 = not requested), `tops`. Places [P]: `finite`, `opens` (its rules
    allow a token). Beams [b]: `beams`, their entries among the sampling rows, with their `candidates`.
    `mask_work`: cost of the grammar masks.
    """

    token_ids: IntArray
    logprobs: NDArray[np.float32]
    tops: Tops
    finite: BoolArray
    opens: BoolArray
    beams: LongArray
    candidates: Tops
    mask_work: MaskWork = NO_WORK


@dataclass(frozen=True, slots=True)
class _Asked:
    """Requested extras. `num_tops` [D], `topped`: draws with some; `beams` [b]: entries, with `num_candidates` [b]."""

    num_tops: IntArray
    topped: LongArray
    beams: LongArray
    num_candidates: IntArray

    @classmethod
    def of(cls, table: RowTable, plan: DrawPlan) -> "_Asked":
        """The extras requested by the rows of `plan`."""
        num_tops = table.options.num_tops[plan.draw_rows]
        wanted = table.options.num_candidates[plan.rows]
        beams = np.flatnonzero(wanted)
        return cls(num_tops, np.flatnonzero(num_tops), beams, wanted[beams])


_ONLY_TOKENS = _Asked(np.zeros(0, np.int32), _NONE, _NONE, np.zeros(0, np.int32))


@dataclass(frozen=True, slots=True)
class Drawing:
    """Draws in flight: `token_ids` int64 [D] are on the device, results are being copied to the host."""

    plan: DrawPlan
    asked: _Asked
    token_ids: torch.Tensor
    fetched: Fetched
    mask_work: MaskWork = NO_WORK

    def drawn(self) -> Drawn:
        """Wait for the results. Only places with finite logits and an allowed token have tops and candidates."""
        found = self.fetched.arrays()
        opens = found.get("opens", np.ones_like(found["finite"]))
        valid = found["finite"] & opens
        asked, num_draws = self.asked, len(found["token_ids"])
        beams, candidates = self._candidates(found, valid) if len(asked.beams) else (_NONE, _NO_TOPS)
        return Drawn(
            token_ids=found["token_ids"].astype(np.int32),
            logprobs=found.get("logprobs", np.zeros(num_draws, np.float32)),
            tops=self._tops(found, valid[self.plan.draw_places]) if len(asked.topped) else Tops.none(num_draws),
            finite=found["finite"],
            opens=opens,
            beams=beams,
            candidates=candidates,
            mask_work=self.mask_work,
        )

    def _tops(self, found: Results, valid: BoolArray) -> Tops:
        counts, at = np.where(valid, self.asked.num_tops, 0).astype(np.int32), self.asked.topped
        shape = (len(counts), found["tops_ids"].shape[1])
        ids, logprobs = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        ids[at], logprobs[at] = found["tops_ids"], found["tops_logprobs"]
        return Tops(counts, ids, logprobs)

    def _candidates(self, found: Results, valid: BoolArray) -> tuple[LongArray, Tops]:
        asked = self.asked
        kept = np.flatnonzero(valid[self.plan.first_places[asked.beams]])
        counts = np.minimum(asked.num_candidates, found["candidates_left"]).astype(np.int32)
        ids = found["candidates_ids"].astype(np.int32)
        return asked.beams[kept], Tops(counts, ids, found["candidates_logprobs"]).taken(kept)


NOTHING = Drawn(
    token_ids=np.zeros(0, np.int32),
    logprobs=np.zeros(0, np.float32),
    tops=_NO_TOPS,
    finite=np.zeros(0, np.bool_),
    opens=np.zeros(0, np.bool_),
    beams=np.zeros(0, np.int64),
    candidates=_NO_TOPS,
)
"""Result of a batch without places."""


@dataclass(frozen=True, slots=True)
class StepMasks:
    """Grammar masks of all places of a plan. `bits` are valid and `work` is known once it has completed."""

    bits: Bits
    work: Future[MaskWork] | None = None

    def wait(self) -> MaskWork:
        """Block until the masks are computed."""
        return NO_WORK if self.work is None else self.work.result()


class RowSampler:
    """Draws tokens for the rows of `table` and keeps the grammar states of `masks` up to date.

    Call `follow` with each step's changes and `accept` with committed tokens. `queue`: of the logits' device;
    None = the host. `draws`: token sampling on that device. `greedy`: argmax, for rows that need nothing
    more.
    """

    def __init__(
        self,
        table: RowTable,
        masks: TokenMasks,
        queue: DeviceQueue | None = None,
        draws: TokenDraws = TORCH_DRAWS,
        greedy: GreedyKernel = torch_greedy,
    ) -> None:
        self._table, self._masks, self._draws, self._greedy = table, masks, draws, greedy
        self._queue = queue or HostQueue()
        self._upload = self._queue.upload
        self._masked: set[int] = set()
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="step-masks")

    # --- grammars ----------------------------------------------------------------------------------------------------

    def follow(self, changes: StepChanges) -> None:
        """Update grammar states after a step's changes: rows removed, added, or given tokens by the scheduler."""
        for row in self._masked.intersection(changes.removed.tolist()):
            self._masks.remove(row)
            self._masked.remove(row)
        if changes.added is not None:
            rows = changes.added.rows
            for row in rows[changes.added.options.rules & Rule.GRAMMAR > 0].tolist():
                self._join(row)
        if changes.changed is not None and len(changes.changed.new_token_ids):
            rows, counts = changes.changed.rows, changes.changed.num_new_tokens
            known = self._table.num_known[rows]
            self.accept(rows, known - counts, known)

    def _join(self, row: int) -> None:
        table, extras = self._table, self._table.options.extras[row]
        assert extras is not None, "a row with a grammar has lists"
        self._masks.add(
            row, extras.grammar, table.token_ids[row, table.num_prompt[row] : table.num_known[row]].tolist()
        )
        self._masked.add(row)

    def reads_tokens(self, rows: IntArray) -> bool:
        """True if one of `rows` has a rule that depends on its own tokens which the host does not know yet."""
        rows = rows[self._table.num_unread[rows] > 0]
        return len(rows) > 0 and bool((self._table.options.rules[rows] & _READS_TOKENS).any())

    def accept(self, rows: IntArray, begins: IntArray, ends: IntArray) -> None:
        """Advance the grammars of `rows` by their tokens from position `begins[i]` to `ends[i]`."""
        if not self._masked:
            return
        for row, begin, end in zip(rows.tolist(), begins.tolist(), ends.tolist(), strict=True):
            if row in self._masked and end > begin:
                self._masks.accept(row, self._table.token_ids[row, begin:end].tolist())

    def clear(self) -> None:
        """Remove all rows."""
        self._masks.clear()
        self._masked.clear()

    def masks_beside(self, plan: DrawPlan | None) -> AbstractContextManager[StepMasks | None]:
        """Compute the masks of `plan` on another thread inside the context; done when it exits. None = computed later."""
        if plan is None or not self._masked:
            return contextlib.nullcontext()
        return self._computed_beside(plan)

    @contextlib.contextmanager
    def _computed_beside(self, plan: DrawPlan) -> Iterator[StepMasks]:
        masks = self._begin_masks(plan)
        try:
            yield masks
        finally:
            masks.wait()

    def _begin_masks(self, plan: DrawPlan) -> StepMasks:
        """Start the masks of all places of rows with a grammar. Their tokens must be known."""
        entries = np.flatnonzero(self._table.options.rules[plan.rows] & Rule.GRAMMAR)
        rows, num_drafts = plan.rows[entries], plan.num_drafts[entries]
        known = self._table.num_known[rows]
        at = np.cumsum(num_drafts + 1) - num_drafts - 1
        bits = np.zeros((int((num_drafts + 1).sum()), num_words(self._table.limits.vocab_size)), np.int32)
        asks = [
            MaskAsk(row, self._table.token_ids[row, begin : begin + count].tolist(), first)
            for row, begin, count, first in zip(
                rows.tolist(), known.tolist(), num_drafts.tolist(), at.tolist(), strict=True
            )
        ]
        return StepMasks(bits, self._beside.submit(self._masks.fill, asks, bits) if asks else None)

    # --- drawing -----------------------------------------------------------------------------------------------------

    def draw(self, plan: DrawPlan, logits: torch.Tensor) -> Drawn:
        """`launch`, then wait for the results."""
        return self.launch(plan, logits).drawn()

    def launch(self, plan: DrawPlan, logits: torch.Tensor, masks: StepMasks | None = None) -> Drawing:
        """Draw from float32 `logits` [P, vocab] without waiting for the tokens. `masks`: None = computed now."""
        if plan.is_plain and self._is_greedy_only(plan.rows):
            return self._greedy_only(plan, logits)
        masks = masks or self._begin_masks(plan)
        mask_work = masks.wait()
        shaped = self._shaped(plan, logits, masks.bits)
        _, finite = self._greedy(logits)
        results = {"finite": finite}
        valid, raw = finite, logits
        if shaped is not logits:
            results["opens"] = shaped.amax(-1) > float("-inf")
            valid = finite & results["opens"]
        if not plan.is_plain:
            [at] = self._upload(plan.draw_places.astype(np.int64))
            raw, valid = logits[at], valid[at]
        params = parameters_of(self._table, plan, self._upload)
        tokens = self._draws.draw(shaped if plan.is_plain else shaped[at], params, valid)
        asked = _Asked.of(self._table, plan)
        results["token_ids"] = tokens
        if self._table.logprobs[plan.draw_rows].any():
            results["logprobs"] = self._draws.chosen_logprobs(raw, tokens, params.logprobs & valid)
        if asked.num_tops.any():
            results |= self._top_logprobs("tops", raw, asked.topped, int(asked.num_tops.max()))
        if len(asked.beams):
            first = plan.first_places[asked.beams].astype(np.int64)
            results |= self._top_logprobs("candidates", shaped, first, int(asked.num_candidates.max()))
        return Drawing(plan, asked, tokens, self._queue.fetch(results), mask_work)

    def _is_greedy_only(self, rows: IntArray) -> bool:
        return not (self._table.temperatures[rows] >= GREEDY_BELOW).any() and self._wants_nothing_more(rows)

    def _wants_nothing_more(self, rows: IntArray) -> bool:
        options = self._table.options
        return not (self._table.logprobs[rows].any() or options.rules[rows].any() or options.num_tops[rows].any())

    def needs_tokens_alone(self, plan: DrawPlan) -> bool:
        """True if each row draws one token, without rules, and nothing else is asked for."""
        return plan.is_plain and self._wants_nothing_more(plan.rows)

    def chosen(self, plan: DrawPlan, tokens: torch.Tensor, finite: torch.Tensor) -> Drawing:
        """The draws of rows that need tokens alone, which the device has drawn; its memory must not change."""
        return Drawing(plan, _ONLY_TOKENS, tokens, self._queue.fetch({"token_ids": tokens, "finite": finite}))

    def _greedy_only(self, plan: DrawPlan, logits: torch.Tensor) -> Drawing:
        """Fast path for greedy rows without extras: few small operations, which matter in a small batch."""
        return self.chosen(plan, *self._greedy(logits))

    def _top_logprobs(self, name: str, logits: torch.Tensor, at: LongArray, most: int) -> dict[str, torch.Tensor]:
        """Top tokens of some rows of float32 [n, vocab]: `most` tokens each, and the number of tokens above -inf."""
        here = logits[self._upload(at)[0]]
        found = scores.top_logprobs(here, most)
        left = (here > float("-inf")).sum(-1)
        return {f"{name}_ids": found.token_ids, f"{name}_logprobs": found.logprobs, f"{name}_left": left}

    def _shaped(self, plan: DrawPlan, logits: torch.Tensor, masks: Bits) -> torch.Tensor:
        """The logits under the rows' rules; the same tensor if no row has one."""
        rows = plan.place_rows
        rules = self._table.options.rules[rows]
        at = np.flatnonzero(rules)
        if not len(at):
            return logits
        return apply_rules(logits, RuledPlaces(self._table, at, rows[at], plan.lengths[at], masks))


def parameters_of(table: RowTable, plan: DrawPlan, upload: Upload) -> SamplingRows:
    """Sampling parameters of each draw."""
    rows = plan.draw_rows
    min_ps = table.options.min_ps[rows]
    columns: tuple[NDArray[Any], ...] = (
        table.temperatures[rows],
        table.top_ks[rows].astype(np.int64),
        table.top_ps[rows],
        table.seeds[rows].view(np.int64),
        plan.sequence_indexes.astype(np.int64),
        plan.lengths[plan.draw_places].astype(np.int64),
        table.logprobs[rows],
    )
    *parameters, of_min_p = upload(*columns, min_ps)
    return SamplingRows(*parameters, min_ps=of_min_p if min_ps.any() else None)
