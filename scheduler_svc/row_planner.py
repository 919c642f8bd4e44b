"""Planning knows what a worker already knows: core plans to wire deltas, wire results to core results.

A *row* is one running sequence at the worker; its state stays there. This module gives sequences their row indexes and
incarnations and says only what the worker cannot know (worker.proto, `SchedulerOutputs`): in steady decode nothing. No I/O, no
asyncio: `quire.LLM` drives a worker in process with the same class. Sending and receiving is `worker_link`.
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from protos.common.v1 import common_pb2
from protos.worker.v1 import worker_pb2
from scheduler_svc.core.plan import ScheduledSequence, StepPlan, StepResult
from svc_common import columns
from svc_common.clock import NS_PER_S
from svc_common.errors import Internal, InvalidArgument

NOT_FINITE = "the model's output was not finite (NaN or infinity)"


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How one sequence is sampled; what the worker needs beside tokens and blocks. `trace`: context of its request."""

    temperature: float
    top_p: float
    top_k: int
    seed: int
    logprobs: bool = False
    trace: common_pb2.TraceContext | None = None


SamplingLookup = Callable[[str], RowSampling]


@dataclass(frozen=True, slots=True)
class WorkerResult:
    """A step's result by sequence name. `logprobs`: natural logarithms beside `result.tokens`, for rows that asked.

    `error`: the whole step failed and `result` is empty. `num_computed_tokens` and `duration_ns` as counted by the worker.
    """

    step_id: int
    result: StepResult
    logprobs: dict[str, list[float]]
    num_computed_tokens: int
    duration_ns: int
    error: common_pb2.ErrorStatus | None = None


@dataclass(slots=True)
class _Row:
    """What the worker holds of one sequence. `repeats`: unmentioned, it computes its next token by itself."""

    index: int
    incarnation: int
    repeats: bool = False


@dataclass(slots=True)
class _AddedColumns:
    rows: list[int] = field(default_factory=list)
    incarnations: list[int] = field(default_factory=list)
    num_known_tokens: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_prompt_tokens: list[int] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    num_blocks: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    samplings: list[RowSampling] = field(default_factory=list)
    sequence_indexes: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def put(self, entry: ScheduledSequence, row: _Row, sampling: RowSampling) -> None:
        if entry.token_ids is None:
            raise Internal(f"plan carries no tokens for {entry.name}, which the worker does not hold")
        self.rows.append(row.index)
        self.incarnations.append(row.incarnation)
        self.num_known_tokens.append(len(entry.token_ids))
        self.token_ids.extend(entry.token_ids)
        self.num_prompt_tokens.append(entry.num_prompt_tokens)
        self.num_computed_tokens.append(entry.computed_before)
        self.num_tokens.append(entry.num_tokens)
        self.num_blocks.append(len(entry.new_block_ids))
        self.block_ids.extend(entry.new_block_ids)
        self.samplings.append(sampling)
        self.sequence_indexes.append(entry.index)
        self.names.append(entry.name)

    def message(self) -> worker_pb2.AddedRows:
        pack, samplings = columns.pack, self.samplings
        traces = [s.trace or common_pb2.TraceContext() for s in samplings]
        return worker_pb2.AddedRows(
            rows=pack(self.rows),
            incarnations=pack(self.incarnations),
            num_known_tokens=pack(self.num_known_tokens),
            token_ids=pack(self.token_ids),
            num_prompt_tokens=pack(self.num_prompt_tokens),
            num_computed_tokens=pack(self.num_computed_tokens),
            num_tokens=pack(self.num_tokens),
            num_blocks=pack(self.num_blocks),
            block_ids=pack(self.block_ids),
            temperatures=pack([s.temperature for s in samplings], columns.F32),
            top_ps=pack([s.top_p for s in samplings], columns.F32),
            top_ks=pack([s.top_k for s in samplings]),
            seeds=pack([s.seed for s in samplings], columns.U64),
            sequence_indexes=pack(self.sequence_indexes),
            logprobs=pack([int(s.logprobs) for s in samplings], columns.U8),
            names=self.names,
            traces=traces if any(t.traceparent for t in traces) else [],
        )


@dataclass(slots=True)
class _ChangedColumns:
    rows: list[int] = field(default_factory=list)
    incarnations: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    num_new_blocks: list[int] = field(default_factory=list)
    new_block_ids: list[int] = field(default_factory=list)

    def put(self, row: _Row, num_tokens: int, new_block_ids: list[int]) -> None:
        self.rows.append(row.index)
        self.incarnations.append(row.incarnation)
        self.num_tokens.append(num_tokens)
        self.num_new_blocks.append(len(new_block_ids))
        self.new_block_ids.extend(new_block_ids)

    def message(self) -> worker_pb2.ChangedRows:
        return worker_pb2.ChangedRows(
            rows=columns.pack(self.rows),
            incarnations=columns.pack(self.incarnations),
            num_tokens=columns.pack(self.num_tokens),
            num_new_blocks=columns.pack(self.num_new_blocks),
            new_block_ids=columns.pack(self.new_block_ids),
        )


class RowPlanner:
    """Owner of the row table as one worker holds it, for one epoch. A new epoch starts with a new planner: no rows, step 1.

    `num_rows`: the most sequences that can run at once (`max_num_seqs`). `encode` and `decode` are called in step order.
    """

    def __init__(self, num_rows: int, *, epoch: int = 1) -> None:
        self.epoch = epoch
        self.last_step_id = 0
        self._rows: dict[str, _Row] = {}
        self._repeating: set[str] = set()
        self._free = list(range(num_rows))
        self._lives = [0] * num_rows
        self._names: dict[tuple[int, int], str] = {}
        self._left: deque[tuple[int, tuple[int, int]]] = deque()
        self._open: dict[int, int] = {}

    @property
    def num_rows(self) -> int:
        """Rows the worker holds, as of the last encoded step."""
        return len(self._rows)

    @property
    def num_open(self) -> int:
        """Steps encoded whose results were not decoded yet."""
        return len(self._open)

    def encode(self, plan: StepPlan, sampling: SamplingLookup) -> worker_pb2.SchedulerOutputs:
        """The message for `plan`; `sampling(request_id)` is asked for sequences that join. Counts a step."""
        self.last_step_id += 1
        self._open[self.last_step_id] = plan.step
        removed = [self._release(name) for name in plan.left if name in self._rows]
        added, changed = _AddedColumns(), _ChangedColumns()
        still = self._schedule(plan, sampling, added, changed)
        self._pause_others(still, changed)
        message = worker_pb2.SchedulerOutputs(
            step_id=self.last_step_id, epoch=self.epoch, num_decode_steps=1, scheduler_step=plan.step
        )
        if added.rows:
            message.added.CopyFrom(added.message())
        if changed.rows:
            message.changed.CopyFrom(changed.message())
        if removed:
            message.removed_rows = columns.pack(removed)
        _put_pairs(message, plan)
        return message

    def _schedule(
        self, plan: StepPlan, sampling: SamplingLookup, added: _AddedColumns, changed: _ChangedColumns
    ) -> set[str]:
        """Fills both tables; returns the sequences that repeat from here on."""
        still = set()
        for entry in plan.scheduled:
            row = self._rows.get(entry.name)
            if row is None or entry.fresh:
                row = self._hold(entry.name)
                added.put(entry, row, sampling(entry.request_id))
            elif not row.repeats or entry.num_tokens != 1 or entry.new_block_ids:
                changed.put(row, entry.num_tokens, entry.new_block_ids)
            row.repeats = entry.samples
            if entry.samples:
                still.add(entry.name)
        return still

    def _pause_others(self, still: set[str], changed: _ChangedColumns) -> None:
        """Rows that would repeat but are not in the plan compute nothing until mentioned again."""
        for name in sorted(self._repeating - still):
            row = self._rows.get(name)
            if row is not None and row.repeats:
                row.repeats = False
                changed.put(row, 0, [])
        self._repeating = still

    def _hold(self, name: str) -> _Row:
        if name in self._rows:
            raise Internal(f"plan adds {name}, which the worker holds and was not told to forget")
        if not self._free:
            raise Internal(f"no row left for {name}: the plan runs more than {len(self._lives)} sequences")
        index = heapq.heappop(self._free)
        self._lives[index] += 1
        row = self._rows[name] = _Row(index, self._lives[index])
        self._names[index, row.incarnation] = name
        return row

    def _release(self, name: str) -> int:
        row = self._rows.pop(name)
        # Results of steps that are under way may still name it: a preempted sequence keeps its late token (R154).
        self._left.append((self.last_step_id, (row.index, row.incarnation)))
        self._repeating.discard(name)
        heapq.heappush(self._free, row.index)
        return row.index

    def decode(self, message: worker_pb2.WorkerOutputs) -> WorkerResult | None:
        """The result in the core's terms; None for a result that is not awaited (sent again after a resume, or of another epoch).

        Rows that left in a step before are dropped. InvalidArgument when the columns do not fit together.
        """
        if message.epoch != self.epoch or message.step_id not in self._open:
            return None
        tokens, failed, logprobs = self._by_name(message)
        step = self._open.pop(message.step_id)
        while self._left and self._left[0][0] <= message.step_id + 1:
            del self._names[self._left.popleft()[1]]
        duration_ns = _duration_ns(message.timings)
        return WorkerResult(
            step_id=message.step_id,
            result=StepResult(step, tokens, failed, duration_s=duration_ns / NS_PER_S),
            logprobs=logprobs,
            num_computed_tokens=message.num_computed_tokens,
            duration_ns=duration_ns,
            error=message.error if message.HasField("error") else None,
        )

    def _by_name(
        self, message: worker_pb2.WorkerOutputs
    ) -> tuple[dict[str, list[int]], dict[str, str], dict[str, list[float]]]:
        rows = columns.unpack(message.rows, "rows")
        n = len(rows)
        lives = columns.unpack(message.incarnations, "incarnations", length=n)
        counts = columns.unpack(message.num_tokens, "num_tokens", length=n, minimum=0)
        ids = columns.unpack(message.token_ids, "token_ids", length=int(counts.sum()), minimum=0).tolist()
        flags = columns.unpack(message.flags, "flags", columns.U8, length=n).tolist()
        logprobs = columns.unpack(message.logprobs, "logprobs", columns.F32).tolist()
        if logprobs and len(logprobs) != len(ids):
            raise InvalidArgument.field("logprobs", f"has {len(logprobs)} elements where {len(ids)} tokens are")
        tokens: dict[str, list[int]] = {}
        failed: dict[str, str] = {}
        by_name: dict[str, list[float]] = {}
        start = 0
        for key, count, flag in zip(
            zip(rows.tolist(), lives.tolist(), strict=True), counts.tolist(), flags, strict=True
        ):
            end = start + count
            name = self._names.get(key)
            if name is not None and flag & worker_pb2.ROW_FLAG_NOT_FINITE:
                failed[name] = NOT_FINITE
            elif name is not None:
                tokens[name] = ids[start:end]
                if logprobs:
                    by_name[name] = logprobs[start:end]
            start = end
        return tokens, failed, by_name


def _put_pairs(message: worker_pb2.SchedulerOutputs, plan: StepPlan) -> None:
    if plan.swap_out:
        message.blocks_to_swap_out = columns.pack_pairs(plan.swap_out)
    if plan.swap_in:
        message.blocks_to_swap_in = columns.pack_pairs(plan.swap_in)
    if plan.copy:
        message.blocks_to_copy = columns.pack_pairs(plan.copy)


def _duration_ns(timings: worker_pb2.StepTimings) -> int:
    return timings.cache_ns + timings.prepare_ns + timings.model_ns + timings.sample_ns
