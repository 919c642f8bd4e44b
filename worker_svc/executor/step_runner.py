"""Runs a step on the real model: block moves, forward passes and sampling, over all its decode steps.

A step is launched; its results are taken in after they reach the host (`_land`), in launch order. On a device
with its own queue, the next step is launched meanwhile: rows continue from tokens that only the device has.
Work that needs these tokens on the host waits for them: draft tokens, prompt scores and pooling before the
step starts, token rules before it samples.
"""

from collections import deque

import numpy as np
import torch

from paged_kernels.ranks import PeerLost
from paged_kernels.registry import GreedyKernel
from protos.worker.v1 import worker_pb2
from svc_common import clock
from svc_common.errors import InvalidArgument
from worker_svc.device.kept_inputs import BlockTables, LastTokens
from worker_svc.device.queue import DeviceQueue, HostQueue
from worker_svc.engine import DeviceLost, Pending
from worker_svc.executor.forward import Computed, Forward
from worker_svc.executor.model_drafts import ModelDrafts
from worker_svc.executor.plain_decode import PlainDecode
from worker_svc.executor.recorded_decode import RecordedDecode
from worker_svc.executor.stage_draws import StageDraws
from worker_svc.executor.step_flights import PendingStep, StepInFlight
from worker_svc.executor.step_landing import Landed, landed, promised_tokens, report
from worker_svc.invariance import RowRule
from worker_svc.model import pooling
from worker_svc.model.cache.joint_cache import Cache
from worker_svc.model.drafts.draft_model import BoundDrafts
from worker_svc.model.fused.recorded_steps import RecordedSteps
from worker_svc.model.row_model import RowModel
from worker_svc.rows.options import Guard, IntArray, OptionColumns
from worker_svc.rows.table import Promise, RowTable, StepBatch
from worker_svc.sampling import prompt_scores
from worker_svc.sampling.draft_proposer import DraftAsk, NgramProposer, Proposer
from worker_svc.sampling.draw_plan import DrawPlan, plan_draws
from worker_svc.sampling.row_sampler import Drawing, RowSampler, StepMasks
from worker_svc.sampling.sampler import TORCH_DRAWS, TokenDraws
from worker_svc.sampling.sampler import greedy as torch_greedy
from worker_svc.sampling.token_masks import NoMasks, TokenMasks

Timings = worker_pb2.StepTimings
_NO_ROWS = np.zeros(0, np.int32)
_ANY_NUMBER = 2**30


class StepRunner:
    """Runs steps with a model, a cache and a row table, none of which it owns.

    It owns the state kept beside rows: grammar states, pooling sums, the draft proposer and the steps in
    flight. `model` must be bound to `cache`; `queue` is that of the cache's device.
    """

    def __init__(
        self,
        model: RowModel,
        cache: Cache,
        rows: RowTable,
        rule: RowRule,
        *,
        queue: DeviceQueue,
        masks: TokenMasks | None = None,
        proposer: Proposer | None = None,
        draws: TokenDraws = TORCH_DRAWS,
        greedy: GreedyKernel = torch_greedy,
        recorded: RecordedSteps | None = None,
        stages: StageDraws | None = None,
        drafts: BoundDrafts | None = None,
        most_drafts: int = _ANY_NUMBER,
    ) -> None:
        """`stages`: of a pipeline; None = the whole model is here. `drafts`: what proposes in place of `proposer`.

        `most_drafts`: draft tokens in a step, of all rows.
        """
        device = cache.device_pool.device
        self._model, self._cache, self._rows = model, cache, rows
        self._queue = queue
        self._sampler = RowSampler(rows, masks or NoMasks(), self._queue, draws, greedy)
        self._most_drafts = most_drafts
        self._pools = pooling.PoolingSums(model.hidden_size, device)
        kept = None if recorded is None else recorded.kept
        self._last_tokens = LastTokens(device, None if kept is None else kept.token_ids)
        tables = BlockTables(rows, queue, device, None if kept is None else kept.block_tables)
        self._proposer = proposer or NgramProposer()
        if drafts is not None:
            self._proposer = ModelDrafts(drafts, rows, queue, tables, self._last_tokens, draws)
        self._recorded = None if recorded is None else RecordedDecode(recorded, rows, queue, tables, self._last_tokens)
        self._forward = Forward(model, rows, rule, self._pools, self._queue, tables, self._last_tokens, self._recorded)
        self._flying: deque[tuple[PendingStep, StepInFlight]] = deque()
        self._here_ns = 0
        self._stages = stages
        is_plain = isinstance(queue, HostQueue) and stages is None and not self._proposer.follows
        self._plain = PlainDecode(model, rows, draws) if is_plain else None
        rows.guard(_task_guard(model.hidden_size))

    def reset(self) -> None:
        """Drop all rows and all steps in flight."""
        for step, _ in self._flying:
            step.drop()
        self._flying.clear()
        self._cache.images.clear()
        self._rows.reset()
        self._sampler.clear()
        self._pools.clear()
        if self._plain is not None:
            self._plain.clear()
        if self._recorded is not None:
            self._recorded.clear()

    def launch(self, outputs: worker_pb2.SchedulerOutputs) -> Pending:
        """See Engine.launch."""
        repeated = None if self._plain is None else self._plain.launch(outputs)
        return self._launch(outputs) if repeated is None else repeated

    @property
    def _draws_here(self) -> bool:
        return self._stages is None or self._stages.is_last

    @torch.inference_mode()
    def _launch(self, outputs: worker_pb2.SchedulerOutputs) -> Pending:
        step = PendingStep(self._land_up_to, clock.monotonic_ns())
        if self._flying and self._needs_all_known(outputs):
            self._land_all()
        self._cache.images.check(outputs.placed)
        batch = self._rows.apply(outputs)
        try:
            if not batch.changes.is_empty:
                self._follow(batch)
                self._move_blocks(batch, step.timings)
            drafts = self._drafts(batch, step.timings) if batch.num_drafts.any() else []
        except BaseException:
            self._void(batch)
            raise
        batch = self._rows.drafted(batch, drafts) if drafts else batch
        for i in range(batch.num_decode_steps):
            if step.error is None:
                batch = self._rows.next_decode(batch) if i else batch
                self._depart(batch, step)
        return step

    # --- before the model --------------------------------------------------------------------------------------------

    def _needs_all_known(self, outputs: worker_pb2.SchedulerOutputs) -> bool:
        """True if the step cannot start until the tokens of all earlier steps are known."""
        joining, rows = outputs.added.options, self._rows
        return (
            bool(outputs.changed.num_draft_tokens)
            or any(row.task or row.sampling.HasField("num_prompt_logprobs") for row in joining)
            or bool((rows.occupied & (rows.options.tasks > 0)).any())
            or prompt_scores.any_wanting(rows)
        )

    def _follow(self, batch: StepBatch) -> None:
        """Add and remove per-row state (sampler, pools) as rows are added and removed."""
        changes = batch.changes
        self._sampler.follow(changes)
        if self._recorded is not None:
            self._recorded.follow(changes)
        if len(changes.removed):
            self._pools.forget(changes.removed)
        if changes.added is not None:
            tasks = changes.added.options.tasks
            for i in np.flatnonzero(tasks).tolist():
                self._pools.open(int(changes.added.rows[i]), int(tasks[i]))

    def _move_blocks(self, batch: StepBatch, timings: Timings) -> None:
        moves, begin_ns = batch.changes, clock.monotonic_ns()
        self._cache.expect(moves.num_blocks)
        self._cache.place(moves.placed)
        self._cache.move(swap_in=moves.swap_in.tolist(), swap_out=moves.swap_out.tolist(), copies=moves.copies.tolist())
        self._model.drop_states(moves.states.dropped.block_ids)
        timings.cache_ns += clock.monotonic_ns() - begin_ns

    def _drafts(self, batch: StepBatch, timings: Timings) -> list[IntArray]:
        """Draft tokens for the rows that are to have some, in batch order, proposed from known tokens only."""
        begin_ns = clock.monotonic_ns()
        rows = batch.rows[batch.num_drafts > 0]
        counts = batch.num_drafts[batch.num_drafts > 0]
        counts = np.clip(self._most_drafts - (np.cumsum(counts) - counts), 0, counts)
        known = [self._rows.token_ids[row, : self._rows.num_known[row]] for row in rows.tolist()]
        asks = [DraftAsk(*ask) for ask in zip(rows.tolist(), known, counts.tolist(), strict=True)]
        drafts = self._proposer.propose(asks)
        timings.model_ns += clock.monotonic_ns() - begin_ns
        return drafts

    # --- launching a decode step -------------------------------------------------------------------------------------

    def _depart(self, batch: StepBatch, step: PendingStep) -> None:
        """Start one decode step. Rows advance at once if their number of new tokens is certain."""
        if self._stages is not None:
            self._land_tokens_of(batch)
        try:
            with self._queue.inputs():
                plan = None if self._sampler.reads_tokens(batch.sampled_rows) else plan_draws(self._rows, batch)
                with self._sampler.masks_beside(plan) as masks:
                    computed = self._forward.compute(batch, step.timings)
                    self._follow_drafts(batch, step.timings)
                begin_ns = clock.monotonic_ns()
                flight = self._flight(batch, computed, plan, masks)
                step.timings.sample_ns += clock.monotonic_ns() - begin_ns
        except BaseException:
            self._void(batch)
            raise
        for scores in computed.prompts if self._draws_here else ():
            scores.report(step.results)
        step.flights.append(flight)
        self._flying.append((step, flight))
        counts_known = not batch.num_drafts.any() and computed.hidden is None and not computed.prompts
        if flight.fetched.is_ready or not counts_known:
            self._land_all()
        else:
            flight.promise = self._rows.promise(batch)

    def _follow_drafts(self, batch: StepBatch, timings: Timings) -> None:
        if self._proposer.follows:
            begin_ns = clock.monotonic_ns()
            self._proposer.follow(batch)
            timings.model_ns += clock.monotonic_ns() - begin_ns

    def _flight(
        self, batch: StepBatch, computed: Computed, plan: DrawPlan | None, masks: StepMasks | None
    ) -> StepInFlight:
        """Sample and return the step in flight. `plan`: None where token rules need the tokens of earlier steps."""
        if plan is None:
            self._land_all()
            plan = plan_draws(self._rows, batch)
        if computed.is_recorded and self._sampler.needs_tokens_alone(plan):
            assert self._recorded is not None
            drawing: Drawing | None = self._sampler.chosen(plan, *self._recorded.chosen(len(plan.rows)))
        else:
            draws = len(plan.rows) and self._draws_here
            drawing = self._sampler.launch(plan, computed.logits, masks) if draws else None
            if drawing is not None and not drawing.fetched.is_ready:
                self._remember(drawing)
        fetched = drawing.fetched if drawing is not None else self._queue.fetch({})
        vectors = computed.vectors(self._pools) if computed.hidden is not None and self._draws_here else ()
        flight = StepInFlight(
            batch=batch,
            incarnations=self._rows.incarnations[batch.rows],
            wants_logprobs=self._rows.logprobs[batch.rows],
            plan=plan,
            drawing=drawing,
            fetched=fetched,
            vectors=vectors,
            bad_rows=np.array(sorted(computed.bad_rows), np.int32) if computed.prompts else _NO_ROWS,
            bad_vectors=np.array([row for row, vector in vectors if not np.isfinite(vector).all()], np.int32),
            dropped=self._rows.failed[batch.rows],
        )
        if self._stages is not None:
            self._stages.depart(flight)
        return flight

    def _remember(self, drawing: Drawing) -> None:
        """Keep on the device the token each row continues with: the first one drawn."""
        entries = drawing.plan.draw_entries
        first = np.flatnonzero(np.diff(entries, prepend=-1))
        rows = drawing.plan.rows[entries[first]].astype(np.int64)
        at, of_rows = self._queue.upload(first, rows)
        tokens = drawing.token_ids if len(first) == len(entries) else drawing.token_ids[at]
        self._last_tokens.put(of_rows, tokens, int(rows.max(initial=-1)) + 1)

    # --- landing a decode step ---------------------------------------------------------------------------------------

    def _land_up_to(self, step: PendingStep) -> None:
        """Land all decode steps up to the end of `step`."""
        while not step.is_ready:
            self._land(*self._flying.popleft())
        for flight in step.flights:
            if not flight.fetched.is_ready:
                self._time(step)
                return

    def _time(self, step: PendingStep) -> None:
        """Add the unmeasured device time of the step to its model time. It starts when the previous step finished."""
        here_ns, timings = max(flight.here_ns for flight in step.flights), step.timings
        measured_ns = timings.cache_ns + timings.prepare_ns + timings.model_ns + timings.sample_ns
        timings.model_ns += max(0, here_ns - max(step.begun_ns, self._here_ns) - measured_ns)
        self._here_ns = max(self._here_ns, here_ns)

    def _land_tokens_of(self, batch: StepBatch) -> None:
        """Land steps until the tokens that `batch` computes are known: stages are told them, and the first one embeds them."""
        while self._flying and self._rows.num_unread[batch.rows].any():
            self._land(*self._flying.popleft())

    def _land_all(self) -> None:
        while self._flying:
            self._land(*self._flying.popleft())

    def _land(self, step: PendingStep, flight: StepInFlight) -> None:
        """Take the results of the oldest decode step into the rows. An error is recorded on its own step."""
        step.num_landed += 1
        try:
            if not flight.fetched.is_ready:
                flight.wait()
            if self._stages is not None:
                self._stages.land(flight)
            came = landed(flight)
        except (DeviceLost, PeerLost):
            raise
        except Exception as error:
            step.error = error
            self._abandon(flight)
            return
        report(flight, came, step.results)
        if flight.promise is None:
            self._take(flight, came)
        else:
            self._keep(flight, flight.promise, came)

    def _take(self, flight: StepInFlight, came: Landed) -> None:
        """Commit the drawn tokens to the rows and advance their sampler state."""
        plan, settled = flight.plan, came.settled
        self._rows.commit(flight.batch, came.token_ids, settled.flags == 0, settled.counts)
        self._settle_states(flight.batch)
        if len(came.failed):
            self._rows.fail(came.failed)
        self._sampler.accept(plan.rows, plan.lengths[plan.first_places], self._rows.num_known[plan.rows])

    def _settle_states(self, batch: StepBatch) -> None:
        """Give up what states took in of draft tokens that were rejected, before anything else reads these states."""
        if batch.num_drafts.any():
            rows = batch.rows[batch.num_drafts > 0]
            self._model.settle_states(rows, self._rows.num_computed[rows], self._rows.state_blocks[rows])

    def _keep(self, flight: StepInFlight, promise: Promise, came: Landed) -> None:
        """Commit the drawn tokens of rows that advanced at launch."""
        token_ids, drew = promised_tokens(flight, came)
        taken = drew & self._rows.is_alive(promise.rows, promise.incarnations)
        self._rows.keep(promise, token_ids, drew)
        self._sampler.accept(promise.rows[taken], promise.places[taken], promise.places[taken] + 1)
        self._break(flight, flight.plan.rows[came.settled.flags > 0])

    def _break(self, flight: StepInFlight, rows: IntArray) -> None:
        """Fail `rows` of a flight, and void their results in later flights."""
        incarnations = flight.incarnations_of(rows)
        self._rows.fail(rows[self._rows.is_alive(rows, incarnations)])
        for _, later in self._flying:
            later.drop(rows, incarnations)

    def _abandon(self, flight: StepInFlight) -> None:
        """Fail the rows of a flight after its results could not be read."""
        if flight.promise is None:
            self._void(flight.batch)
        else:
            promise = flight.promise
            self._rows.keep(promise, np.zeros_like(promise.rows), np.zeros(len(promise.rows), np.bool_))
            self._break(flight, flight.batch.rows)

    def _void(self, batch: StepBatch) -> None:
        """Abandon a batch that failed to compute. Its checkpoints may hold others, which no later step must take for them."""
        self._model.drop_states(batch.changes.states.keep.block_ids)
        self._rows.void(batch)
        self._settle_states(batch)
        self._pools.forget(batch.rows)


def _task_guard(hidden_size: int) -> Guard:
    """A guard that refuses tasks this model does not support."""

    def check(rows: IntArray, num_computed: IntArray, options: OptionColumns) -> None:
        asked = np.flatnonzero(options.tasks)
        if len(asked) and not hidden_size:
            raise InvalidArgument.field("added.options.task", f"row {int(rows[asked[0]])}: not supported by this model")
        pooling.check_added(rows, options.tasks, num_computed)

    return check
