"""One step on the real model: block moves, forward passes, sampling, over as many decode steps as the message asks."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from protos.worker.v1 import worker_pb2
from svc_common.errors import InvalidArgument
from worker_svc import pooling
from worker_svc.cache_engine import CacheEngine
from worker_svc.draws import DrawPlan, Settled, plan_draws, settle
from worker_svc.forward import Computed, Forward, lap
from worker_svc.invariance import RowRule
from worker_svc.packed_model import PackedModel
from worker_svc.proposer import DraftAsk, NgramProposer, Proposer
from worker_svc.row_options import Guard, IntArray, OptionColumns
from worker_svc.rows import RowTable, StepBatch
from worker_svc.sampling import NOTHING, Drawn, RowSampler
from worker_svc.step_results import Candidates, StepResults, Yield
from worker_svc.token_masks import NoMasks, TokenMasks

Timings = worker_pb2.StepTimings


@dataclass(frozen=True, slots=True)
class _Done:
    """What one decode step came to. `failed`: rows that fail beside those of `settled`."""

    plan: DrawPlan
    drawn: Drawn
    settled: Settled
    vectors: Sequence[tuple[int, NDArray[np.float32]]]
    failed: IntArray


class StepRunner:
    """Joins model, cache and rows; owns none of them, but what is kept beside rows: grammars' states, sums of pooled rows, guesses.

    `model` is bound to `cache`.
    """

    def __init__(
        self,
        model: PackedModel,
        cache: CacheEngine,
        rows: RowTable,
        rule: RowRule,
        *,
        masks: TokenMasks | None = None,
        proposer: Proposer | None = None,
    ) -> None:
        self._cache, self._rows = cache, rows
        self._sampler = RowSampler(rows, masks or NoMasks())
        self._proposer = proposer or NgramProposer()
        self._pools = pooling.Pools(model.hidden_size, cache.device_pool.device)
        self._forward = Forward(model, rows, rule, self._pools)
        rows.guard(_task_guard(model.hidden_size))

    def reset(self) -> None:
        """Forgets all rows."""
        self._rows.reset()
        self._sampler.clear()
        self._pools.clear()

    @torch.inference_mode()
    def run(self, outputs: worker_pb2.SchedulerOutputs) -> worker_pb2.WorkerOutputs:
        """See Engine.execute."""
        batch = self._rows.apply(outputs)
        timings, results, num_computed = Timings(), StepResults(), 0
        logprobs = bool(self._rows.logprobs[batch.sampled_rows].any())
        with self._voided_on_error(batch):
            self._follow(batch)
            self._move_blocks(batch, timings)
            drafts = self._drafts(batch)
        batch = self._rows.drafted(batch, drafts) if drafts else batch
        for i in range(batch.num_decode_steps):
            batch = self._rows.next_decode(batch) if i else batch
            num_computed += batch.num_tokens
            self._decode(batch, timings, results)
        return results.outputs(num_computed, timings, logprobs=logprobs)

    # --- before the model --------------------------------------------------------------------------------------------

    def _follow(self, batch: StepBatch) -> None:
        """What is kept beside rows follows their coming and going."""
        changes = batch.changes
        self._sampler.follow(changes)
        if len(changes.removed):
            self._pools.forget(changes.removed)
            self._proposer.forget(changes.removed)
        if changes.added is not None:
            tasks = changes.added.options.tasks
            for i in np.flatnonzero(tasks).tolist():
                self._pools.open(int(changes.added.rows[i]), int(tasks[i]))

    def _move_blocks(self, batch: StepBatch, timings: Timings) -> None:
        with lap(timings, "cache_ns"):
            moves = batch.changes
            self._cache.move(
                swap_in=moves.swap_in.tolist(), swap_out=moves.swap_out.tolist(), copies=moves.copies.tolist()
            )

    def _drafts(self, batch: StepBatch) -> list[IntArray]:
        """Guesses for the rows that are to have some, in batch order."""
        rows = batch.rows[batch.num_drafts > 0]
        if not len(rows):
            return []
        counts = batch.num_drafts[batch.num_drafts > 0]
        known = [self._rows.token_ids[row, : self._rows.num_known[row]] for row in rows.tolist()]
        asks = [DraftAsk(*ask) for ask in zip(rows.tolist(), known, counts.tolist(), strict=True)]
        return self._proposer.propose(asks)

    # --- a decode step -----------------------------------------------------------------------------------------------

    def _decode(self, batch: StepBatch, timings: Timings, results: StepResults) -> None:
        """Computes one batch and takes its tokens into the rows."""
        with self._voided_on_error(batch):
            computed = self._forward.compute(batch, timings)
            with lap(timings, "sample_ns"):
                done = self._done(batch, computed)
        if computed.prompts is not None:
            computed.prompts.report(results)
        self._report(done, results)
        kept = done.settled.kept
        self._rows.commit(batch, done.drawn.token_ids[kept], done.settled.flags == 0, done.settled.counts)
        self._rows.fail(done.failed)
        self._sampler.accept(done.plan.rows, done.plan.lengths[done.plan.first_places])

    def _done(self, batch: StepBatch, computed: Computed) -> _Done:
        plan = plan_draws(self._rows, batch)
        drawn = self._sampler.draw(plan, computed.logits) if len(plan.rows) else NOTHING
        bad = np.array(sorted(computed.bad_rows), np.int32)
        fit = drawn.finite & ~np.isin(plan.place_rows, bad)
        vectors = computed.vectors(self._pools)
        failed = [row for row, vector in vectors if not np.isfinite(vector).all()] + np.setdiff1d(
            bad, plan.rows
        ).tolist()
        return _Done(
            plan=plan,
            drawn=drawn,
            settled=settle(plan, drawn.token_ids, fit, drawn.opens),
            vectors=[(row, vector) for row, vector in vectors if row not in failed],
            failed=np.array(sorted(failed), np.int32),
        )

    def _report(self, done: _Done, results: StepResults) -> None:
        lives, plan, drawn, settled = self._rows.incarnations, done.plan, done.drawn, done.settled
        yields = (settled.counts > 0) | (settled.flags > 0)
        rows = plan.rows[yields]
        results.add(
            Yield(
                rows=np.concatenate([rows, done.failed]),
                incarnations=lives[np.concatenate([rows, done.failed])],
                counts=np.concatenate([settled.counts[yields], np.zeros_like(done.failed)]),
                flags=np.concatenate([settled.flags[yields], _not_finite(len(done.failed))]),
                token_ids=drawn.token_ids[settled.kept],
                logprobs=drawn.logprobs[settled.kept],
                tops=drawn.tops.taken(settled.kept),
            )
        )
        beams = settled.flags[drawn.beams] == 0
        rows = plan.rows[drawn.beams[beams]]
        results.add_candidates(Candidates(rows, lives[rows], drawn.candidates.taken(np.flatnonzero(beams))))
        for row, vector in done.vectors:
            results.add_embedding(row, int(lives[row]), vector)

    @contextlib.contextmanager
    def _voided_on_error(self, batch: StepBatch) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._rows.void(batch)
            self._pools.forget(batch.rows)
            raise


def _not_finite(n: int) -> NDArray[np.uint8]:
    return np.full(n, worker_pb2.ROW_FLAG_NOT_FINITE, np.uint8)


def _task_guard(hidden_size: int) -> Guard:
    """Refuses tasks that this model cannot do."""

    def check(rows: IntArray, num_computed: IntArray, options: OptionColumns) -> None:
        asked = np.flatnonzero(options.tasks)
        if len(asked) and not hidden_size:
            raise InvalidArgument.field("added.options.task", f"row {int(rows[asked[0]])}: not supported by this model")
        pooling.check_added(rows, options.tasks, num_computed)

    return check
