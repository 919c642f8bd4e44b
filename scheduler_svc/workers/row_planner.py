"""Conversion of core plans to wire messages with what changed since the last step, and of wire results to core results.

A *row* is one running sequence at the worker, which keeps its state. This module assigns row indexes and
incarnations and sends only what the worker cannot know (worker.proto, `SchedulerOutputs`): nothing per row in
fast decode. It does no I/O, so that `quire.LLM` drives an in-process worker with the same class;
`workers.link` sends and receives.
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from block_manager.cache_rules import StateMoves
from protos.worker.v1 import worker_pb2
from scheduler_svc.core.plan import BatchSignature, ScheduledSequence, StepPlan, StepResult
from scheduler_svc.worker_values import RowSampling, SampledColumns, WorkerResult
from scheduler_svc.workers.result import RowResults, read_embeddings, read_prompts, read_rows
from scheduler_svc.workers.row_messages import AddedColumns, ChangedColumns, Row, state_blocks
from svc_common import wire_arrays
from svc_common.clock import NS_PER_S
from svc_common.errors import Internal

SamplingLookup = Callable[[str], RowSampling]


class RowPlanner:
    """Row table as one worker holds it, for one epoch. A new epoch needs a new planner: no rows, step ids from 1.

    `num_rows`: most sequences that can run at once (`max_num_seqs`). `encode` and `decode` are called in step
    order.
    """

    def __init__(self, num_rows: int, *, epoch: int = 1) -> None:
        self.epoch = epoch
        self.last_step_id = 0
        self._rows: dict[str, Row] = {}
        self._repeating: set[str] = set()
        self._free = list(range(num_rows))
        self._incarnations = [0] * num_rows
        self._known: dict[tuple[int, int], Row] = {}
        self._left: deque[tuple[int, tuple[int, int]]] = deque()
        self._open: dict[int, tuple[int, PlainRows | None]] = {}
        self._signature: BatchSignature | None = None
        self._plain: PlainRows | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows that the worker holds as of the last encoded step."""
        return len(self._rows)

    @property
    def names(self) -> list[str]:
        """Names of the sequences in the rows."""
        return list(self._rows)

    @property
    def num_open(self) -> int:
        """Number of encoded steps without a decoded result."""
        return len(self._open)

    def encode(self, plan: StepPlan, sampling: SamplingLookup) -> worker_pb2.SchedulerOutputs:
        """The message for `plan`; increments the step id. `sampling(request_id)` is called for sequences new to the worker.

        If its `batch_signature` follows that of the last plan, it has the same rows, each continuing by one token.
        """
        self.last_step_id += 1
        removed = [self._release(name) for name in plan.left if name in self._rows] if plan.left else []
        added, changed, batch_signature = AddedColumns(), ChangedColumns(), plan.batch_signature
        if batch_signature is None or not batch_signature.follows(self._signature):
            self._pause_others(self._schedule(plan, sampling, added, changed), changed)
            self._plain = (
                None if batch_signature is None else PlainRows.of([self._rows[e.name] for e in plan.scheduled])
            )
        elif plan.fast is not None and plan.fast.new_blocks:
            for entry in plan.fast.grown():
                changed.put(self._rows[entry.name], entry)
        self._signature = batch_signature
        self._open[self.last_step_id] = plan.step, self._plain
        message = worker_pb2.SchedulerOutputs(
            step_id=self.last_step_id,
            epoch=self.epoch,
            num_decode_steps=plan.num_decode_steps,
            scheduler_step=plan.step,
        )
        if added.rows:
            message.added.CopyFrom(added.message())
        if changed.rows:
            message.changed.CopyFrom(changed.message())
        if removed:
            message.removed_rows = wire_arrays.pack(removed)
        if plan.grant is not None:
            message.grant.num_steps = plan.grant.num_steps
            message.grant.stop_token_ids = wire_arrays.pack(plan.grant.stop_token_ids)
        _put_pairs(message, plan)
        if plan.states is not None:
            self._put_states(message, plan.states)
        return message

    def follow(self, plan: StepPlan) -> worker_pb2.SchedulerOutputs:
        """Expect the result of a granted step, which the worker runs without a message; returns the message that it stands for.

        The worker computes the rows of the last message, of which some may have ended.
        """
        self.last_step_id += 1
        signature = plan.batch_signature
        is_whole = signature is not None and signature.follows(self._signature)
        if is_whole:
            self._signature = signature
        self._open[self.last_step_id] = plan.step, self._plain if is_whole else None
        return worker_pb2.SchedulerOutputs(
            step_id=self.last_step_id, epoch=self.epoch, num_decode_steps=1, scheduler_step=plan.step
        )

    def _schedule(
        self, plan: StepPlan, sampling: SamplingLookup, added: AddedColumns, changed: ChangedColumns
    ) -> set[str]:
        """Fill both tables; returns the sequences that repeat without being mentioned from now on."""
        still = set()
        for entry in plan.scheduled:
            row = self._rows.get(entry.name)
            if row is None or entry.fresh:
                row = self._hold(entry, sampling(entry.request_id))
                added.put(entry, row)
            elif not row.repeats or entry.num_tokens != 1 or entry.new_block_ids:
                changed.put(row, entry)
            row.repeats = entry.samples and not row.sampling.num_candidates
            if row.repeats:
                still.add(entry.name)
        return still

    def _put_states(self, message: worker_pb2.SchedulerOutputs, states: StateMoves) -> None:
        for moves, field in ((states.to_read, message.states_to_read), (states.to_keep, message.states_to_keep)):
            if moves:
                field.CopyFrom(state_blocks(moves, [self._rows[each.name].index for each in moves]))

    def _pause_others(self, still: set[str], changed: ChangedColumns) -> None:
        """Pause rows that would repeat but are not in the plan; they compute nothing until mentioned again."""
        for name in sorted(self._repeating - still):
            row = self._rows.get(name)
            if row is not None and row.repeats:
                row.repeats = False
                changed.pause(row)
        self._repeating = still

    def _hold(self, entry: ScheduledSequence, sampling: RowSampling) -> Row:
        name = entry.name
        if name in self._rows:
            raise Internal(f"plan adds {name}, which the worker holds and was not told to forget")
        if not self._free:
            raise Internal(f"no row left for {name}: the plan runs more than {len(self._incarnations)} sequences")
        index = heapq.heappop(self._free)
        self._incarnations[index] += 1
        row = self._rows[name] = Row(
            name, index, self._incarnations[index], sampling, entry.num_children, len(entry.token_ids or ())
        )
        self._known[index, row.incarnation] = row
        return row

    def _release(self, name: str) -> int:
        row = self._rows.pop(name)
        # Results of steps in flight may still name it: a preempted sequence keeps its late token.
        self._left.append((self.last_step_id, (row.index, row.incarnation)))
        self._repeating.discard(name)
        heapq.heappush(self._free, row.index)
        return row.index

    def decode(self, message: worker_pb2.WorkerOutputs) -> WorkerResult | None:
        """The result in the core's terms; None if it is not expected (repeated after a resume, or of another epoch).

        Results of rows removed in an earlier step are dropped. Raises InvalidArgument if the columns are
        inconsistent.
        """
        if message.epoch != self.epoch or message.step_id not in self._open:
            return None
        result = self._read_plain(message) or self._read(message)
        del self._open[message.step_id]
        while self._left and self._left[0][0] <= message.step_id + 1:
            del self._known[self._left.popleft()[1]]
        return result

    def _read_plain(self, message: worker_pb2.WorkerOutputs) -> WorkerResult | None:
        """Fast path for results with exactly one token per row and nothing else; None for others."""
        step, rows = self._open[message.step_id]
        found = None if rows is None else rows.read(message)
        if found is None:
            return None
        plain, column = found
        timings = message.timings
        duration_ns = _duration_ns(timings)
        return WorkerResult(
            step_id=message.step_id,
            result=StepResult(
                step, column=column, duration_s=duration_ns / NS_PER_S, queued_s=timings.queued_ns / NS_PER_S
            ),
            extras={},
            num_computed_tokens=message.num_computed_tokens,
            duration_ns=duration_ns,
            timings=timings,
            plain=plain,
            continues=message.continues,
        )

    def _read(self, message: worker_pb2.WorkerOutputs) -> WorkerResult:
        answered: dict[str, Row] = {}

        def name_of(index: int, incarnation: int) -> str | None:
            row = self._known.get((index, incarnation))
            if row is None:
                return None
            answered[row.name] = row
            return row.name

        found = read_rows(message, name_of)
        prompts, embeddings = read_prompts(message, name_of), read_embeddings(message, name_of)
        return WorkerResult(
            step_id=message.step_id,
            result=_result(self._open[message.step_id][0], found, answered, embeddings, message.timings),
            extras=found.extras,
            num_computed_tokens=message.num_computed_tokens,
            duration_ns=_duration_ns(message.timings),
            timings=message.timings,
            prompts=prompts,
            embeddings=embeddings,
            error=message.error if message.HasField("error") else None,
            continues=message.continues,
        )


def _result(
    step: int,
    found: RowResults,
    answered: dict[str, Row],
    embeddings: dict[str, bytes],
    timings: worker_pb2.StepTimings,
) -> StepResult:
    """Convert to the core's terms: several tokens of a branching row are its children's, and an embedding counts as one token."""
    branching = [row for name in found.tokens if (row := answered[name]).num_children > 1]
    for row in branching:
        row.num_children = 1  # once
    return StepResult(
        step,
        children={row.name: found.tokens.pop(row.name) for row in branching},
        tokens=found.tokens | {name: [0] for name in embeddings},
        failed=found.failed,
        candidates=found.candidates,
        logprobs={name: e.logprobs for name, e in found.extras.items() if answered[name].sampling.ranked},
        mask_s=found.mask_s,
        duration_s=_duration_ns(timings) / NS_PER_S,
        queued_s=timings.queued_ns / NS_PER_S,
    )


def _put_pairs(message: worker_pb2.SchedulerOutputs, plan: StepPlan) -> None:
    if plan.swap_out:
        message.blocks_to_swap_out = wire_arrays.pack_pairs(plan.swap_out)
    if plan.swap_in:
        message.blocks_to_swap_in = wire_arrays.pack_pairs(plan.swap_in)
    if plan.copy:
        message.blocks_to_copy = wire_arrays.pack_pairs(plan.copy)
    for image, pairs in plan.placed.items():
        message.placed.add(image=image, blocks=wire_arrays.pack_pairs(pairs))


def _duration_ns(timings: worker_pb2.StepTimings) -> int:
    return timings.cache_ns + timings.prepare_ns + timings.model_ns + timings.sample_ns


@dataclass(frozen=True, slots=True)
class PlainRows:
    """Expected columns of a plan's result, rows ascending. `places`: position in them of each sequence, in the plan's order."""

    names: tuple[str, ...]
    rows: bytes
    incarnations: bytes
    counts: bytes
    flags: bytes
    places: NDArray[np.int64]

    @classmethod
    def of(cls, rows: list[Row]) -> "PlainRows | None":
        """Expected columns for rows in a plan's order; None if a row yields anything but one token."""
        if any(row.num_children > 1 or not row.sampling.gives_tokens_alone for row in rows):
            return None
        listed = sorted(rows, key=lambda row: row.index)
        return cls(
            names=tuple([row.name for row in listed]),
            rows=wire_arrays.pack([row.index for row in listed]),
            incarnations=wire_arrays.pack([row.incarnation for row in listed]),
            counts=wire_arrays.pack([1] * len(listed)),
            flags=bytes(len(listed)),
            places=np.searchsorted([row.index for row in listed], [row.index for row in rows]),
        )

    def read(self, message: worker_pb2.WorkerOutputs) -> tuple[SampledColumns, NDArray[np.int64]] | None:
        """Tokens as listed, and as int64 in the plan's order; None if the message has anything but one token per row."""
        if message.rows != self.rows or message.num_tokens != self.counts or message.flags != self.flags:
            return None
        if message.incarnations != self.incarnations or message.HasField("error"):
            return None
        if message.logprobs or message.HasField("tops") or message.prompt_logprobs or message.embeddings:
            return None
        if message.mask_rows or message.HasField("candidates"):
            return None
        listed = wire_arrays.unpack(message.token_ids, "token_ids", length=len(self.names), minimum=0)
        return SampledColumns(self.names, self.counts, message.token_ids), listed.astype(np.int64)[self.places]
