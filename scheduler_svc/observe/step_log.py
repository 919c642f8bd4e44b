"""Log of the last steps, with plan and result, for `quire steps` and WatchScheduler.

Steps share columns: in fast decode names, token counts and prefill flags equal those of the step before, and
so does `computed before - step`, so that a step costs only its sampled tokens. Messages are built on request.
Block tables are kept as changes, from which the tables of any kept step can be rebuilt; a step that moves
blocks keeps them whole.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from protos.inference.v1 import admin_pb2
from protos.worker.v1 import worker_pb2
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.workers.result import SampledColumns, WorkerResult
from scheduler_svc.workers.row_failures import NOT_FINITE
from svc_common import wire_arrays
from svc_common.clock import NS_PER_S, monotonic_ns, unix_ns
from svc_common.reasons import known_reason

Pairs = tuple[tuple[int, int], ...]
Tables = dict[str, list[str]]
MAX_STATES = 256
WORKER_LOST, ROWS_NOT_FINITE = "WORKER_LOST", "NOT_FINITE"


@dataclass(frozen=True, slots=True, eq=False)
class _Scheduled:
    """Columns of the scheduled sequences. `lead`: int32, tokens computed before the step minus the step number."""

    names: tuple[str, ...]
    ids: tuple[str, ...]
    tokens: bytes
    lead: bytes
    prefill: bytes

    def num_tokens(self) -> tuple[int, int]:
        """Tokens of prefills and of decodes."""
        tokens = _ints(self.tokens)
        num_prefill = int(tokens[np.frombuffer(self.prefill, bool)].sum()) if 1 in self.prefill else 0
        return num_prefill, int(tokens.sum()) - num_prefill


@dataclass(slots=True)
class _TableChange:
    """Changes of block tables by one step: sequences removed, then blocks appended. `whole` replaces all, if blocks moved.

    `rank`: the dp rank that owns the blocks, if each has its own.
    """

    left: tuple[str, ...] = ()
    fresh: tuple[tuple[str, bytes], ...] = ()
    appended: tuple[tuple[str, bytes], ...] = ()
    whole: Tables | None = None
    rank: int | None = None

    def apply(self, tables: Tables) -> None:
        if self.whole is not None:
            tables.clear()
            tables.update({name: list(blocks) for name, blocks in self.whole.items()})
            return
        for name in self.left:
            tables.pop(name, None)
        for name, blocks in self.fresh:
            tables[name] = _names_of(blocks, self.rank)
        for name, blocks in self.appended:
            tables.setdefault(name, []).extend(_names_of(blocks, self.rank))


@dataclass(slots=True)
class StepRecord:
    """One step. Planning started at `planned_ns` and took `schedule_ns`; the result arrived at `closed_ns`, until then it is open.

    Times are monotonic. `failure`: empty if all succeeded; `WORKER_LOST` (details in `why`); `NOT_FINITE` if
    only some sequences failed (`failed` has them with the reason); else the reason of the worker's error.
    """

    step: int
    epoch: int
    lane: int
    policy: str
    scheduled: _Scheduled
    swap_in: Pairs
    swap_out: Pairs
    copy: Pairs
    preempted: tuple[tuple[str, str], ...]
    queues: tuple[int, int, int]
    free: tuple[int, int]
    change: _TableChange
    planned_ns: int
    schedule_ns: int
    timings: worker_pb2.StepTimings | None = None
    sampled_names: tuple[str, ...] = ()
    sampled_counts: bytes = b""
    sampled_ids: bytes = b""
    computed_tokens: int = 0
    duration_ns: int = 0
    error: str = ""
    failure: str = ""
    failed: tuple[tuple[str, str], ...] = ()
    why: str = ""
    is_closed: bool = False
    closed_ns: int = 0
    state: admin_pb2.StepState | None = None

    def report(self, tables: Tables | None, *, state: bool = False) -> admin_pb2.StepReport:
        """The record as a message. `tables`: block tables right after this step's schedule(), if wanted; `state`: include it."""
        report = admin_pb2.StepReport(
            step=self.step,
            epoch=self.epoch,
            lane=self.lane,
            policy=self.policy,
            scheduled=self._groups(),
            swap_in=_pairs(self.swap_in),
            swap_out=_pairs(self.swap_out),
            copy=_pairs(self.copy),
            preempted=[admin_pb2.Preempted(id=i, mode=m) for i, m in self.preempted],
            queues=admin_pb2.Queues(waiting=self.queues[0], running=self.queues[1], swapped=self.queues[2]),
            free=admin_pb2.FreeBlocks(gpu=self.free[0], cpu=self.free[1]),
            sampled=self._sampled(),
            computed_tokens=self.computed_tokens,
            error=self.error,
            duration_ns=self.duration_ns,
            times=self._times(),
            state=self.state if state else None,
        )
        if tables is not None:
            report.tables.extend(admin_pb2.BlockTable(sequence=s, blocks=b) for s, b in tables.items())
        return report

    def _times(self) -> admin_pb2.StepTimes:
        t = self.timings or worker_pb2.StepTimings()
        return admin_pb2.StepTimes(
            planned_ns=unix_ns(self.planned_ns),
            schedule_ns=self.schedule_ns,
            finished_ns=unix_ns(self.closed_ns),
            started_ns=t.started_ns,
            queued_ns=t.queued_ns,
            cache_ns=t.cache_ns,
            prepare_ns=t.prepare_ns,
            model_ns=t.model_ns,
            sample_ns=t.sample_ns,
        )

    def _groups(self) -> list[admin_pb2.ScheduledGroup]:
        """Adjacent sequences of one request form one group."""
        s = self.scheduled
        tokens, lead, prefill = _ints(s.tokens).tolist(), _ints(s.lead).tolist(), s.prefill
        groups = []
        for request_id, members in itertools.groupby(range(len(s.names)), key=lambda i: s.ids[i]):
            rows = list(members)
            groups.append(
                admin_pb2.ScheduledGroup(
                    id=request_id,
                    seqs=[s.names[i] for i in rows],
                    tokens=sum(tokens[i] for i in rows),
                    computed_before=lead[rows[0]] + self.step,
                    prefill=any(prefill[i] for i in rows),
                )
            )
        return groups

    def _sampled(self) -> list[admin_pb2.SampledTokens]:
        ids, start, found = _ints(self.sampled_ids).tolist(), 0, []
        for name, count in zip(self.sampled_names, _ints(self.sampled_counts).tolist(), strict=True):
            found.append(admin_pb2.SampledTokens(sequence=name, tokens=ids[start : start + count]))
            start += count
        return found


@dataclass(slots=True)
class StepLog:
    """Records of the last `max_steps` steps. Call `begin` when a plan is sent and `complete` when its result arrives.

    `read_state`: reads the scheduler's state right after a plan. It is called only while a reader wants
    states (`keep_states`); the states of the last `MAX_STATES` steps are kept.
    """

    max_steps: int
    policy: str = ""
    _records: deque[StepRecord] = field(default_factory=deque)
    _open: dict[int, StepRecord] = field(default_factory=dict)
    _base: Tables = field(default_factory=dict)
    _left: list[str] = field(default_factory=list)
    _last: StepRecord | None = None
    _course: tuple[object, int] | None = None
    _last_sampled: tuple[tuple[str, ...], bytes] = ((), b"")
    _num_closed: int = 0
    _grown: asyncio.Event = field(default_factory=asyncio.Event)
    _listeners: list[Callable[[StepRecord], None]] = field(default_factory=list)
    read_state: Callable[[int], admin_pb2.StepState] | None = None
    _with_state: deque[StepRecord] = field(default_factory=deque)
    _num_state_readers: int = 0

    # --- writing --------------------------------------------------------------------------------------------------

    def begin(
        self,
        plan: StepPlan,
        epoch: int,
        whole: Tables | None = None,
        *,
        rank: int | None = None,
        planned_ns: int = 0,
        schedule_ns: int = 0,
    ) -> None:
        """Open a record for a plan about to be sent. No-op for empty plans.

        `rank`: the dp rank, if each has its own blocks. `whole`: the current block tables, required if the
        plan moves blocks.
        """
        self._left.extend(plan.left)
        if plan.is_empty:
            return
        record = StepRecord(
            step=plan.step,
            epoch=epoch,
            lane=plan.lane,
            policy=self.policy,
            scheduled=self._scheduled(plan),
            swap_in=tuple(plan.swap_in),
            swap_out=tuple(plan.swap_out),
            copy=tuple(plan.copy),
            preempted=tuple(plan.preempted),
            queues=(plan.num_waiting, plan.num_running, plan.num_swapped),
            free=(plan.free_gpu, plan.free_cpu),
            change=self._change(plan, whole, rank),
            planned_ns=planned_ns,
            schedule_ns=schedule_ns,
        )
        self._left = []
        self._open[plan.step] = self._last = record

    @contextmanager
    def keep_states(self) -> Iterator[None]:
        """Keep the state right after each plan made while this context is active."""
        self._num_state_readers += 1
        try:
            yield
        finally:
            self._num_state_readers -= 1

    def planned(self, step: int) -> None:
        """Keep the current state for that step, if a reader wants it; called when all listeners know the plan."""
        record = self._open.get(step)
        if record is None or self.read_state is None or not self._num_state_readers:
            return
        record.state = self.read_state(step)
        self._with_state.append(record)
        if len(self._with_state) > MAX_STATES:
            self._with_state.popleft().state = None

    def complete(self, result: WorkerResult, runs: Mapping[str, list[int]] | None = None) -> None:
        """Close a step with its result. `runs`: the core's outcome by sequence, used for sequences that branched."""
        record = self._open.get(result.result.step)
        if record is None:
            return
        sampled = SampledColumns.of({**(runs or {}), **result.result.tokens}) if result.branches else result.sampled
        who = sampled.names, sampled.counts
        if who != self._last_sampled:
            self._last_sampled = who
        record.sampled_names, record.sampled_counts = self._last_sampled
        record.sampled_ids = sampled.token_ids
        record.computed_tokens = result.num_computed_tokens
        record.duration_ns, record.timings = result.duration_ns, result.timings
        record.failure, record.failed = _failure(result), tuple(result.result.failed.items())
        self._close(record, result.error.message if result.error else "")

    def lost_worker(self, names: Iterable[str], steps: Iterable[int] | None = None, why: str = "") -> None:
        """Close steps (None: all open ones) without a result, and note that the sequences were removed from the worker."""
        for step in list(self._open) if steps is None else steps:
            if step in self._open:
                self._open[step].failure, self._open[step].why = WORKER_LOST, why
                self._close(self._open[step], "the worker was lost")
        self._left.extend(names)

    def _close(self, record: StepRecord, error: str) -> None:
        """Close a record. Records are appended in step order, although the workers of several ranks answer in any order."""
        record.error, record.is_closed, record.closed_ns = error, True, monotonic_ns()
        while self._open and (oldest := next(iter(self._open.values()))).is_closed:
            del self._open[oldest.step]
            self._append(oldest)

    def _append(self, record: StepRecord) -> None:
        self._records.append(record)
        self._num_closed += 1
        while len(self._records) > self.max_steps:
            self._records.popleft().change.apply(self._base)
        self._grown.set()
        self._grown = asyncio.Event()
        for listener in self._listeners:
            listener(record)

    def _scheduled(self, plan: StepPlan) -> _Scheduled:
        last, course = self._last.scheduled if self._last else None, plan.course
        if last is not None and course is not None and course == self._course:
            return last
        self._course = course
        entries = plan.scheduled
        made = _Scheduled(
            names=tuple([e.name for e in entries]),
            ids=tuple([e.request_id for e in entries]),
            tokens=wire_arrays.pack([e.num_tokens for e in entries]),
            lead=wire_arrays.pack([e.computed_before - plan.step for e in entries]),
            prefill=bytes([e.is_prefill for e in entries]),
        )
        if last is None or made.names != last.names:
            return made
        if (made.tokens, made.lead, made.prefill) == (last.tokens, last.lead, last.prefill):
            return last
        return _Scheduled(last.names, last.ids, made.tokens, made.lead, made.prefill)

    def _change(self, plan: StepPlan, whole: Tables | None, rank: int | None) -> _TableChange:
        if whole is not None:
            return _TableChange(whole=whole)
        grown = plan.grown
        return _TableChange(
            left=tuple(self._left),
            fresh=tuple((e.name, wire_arrays.pack(e.new_block_ids)) for e in grown if e.fresh),
            appended=tuple((e.name, wire_arrays.pack(e.new_block_ids)) for e in grown if not e.fresh),
            rank=rank,
        )

    # --- reading --------------------------------------------------------------------------------------------------

    def listen(self, listener: Callable[[StepRecord], None]) -> None:
        """Call `listener` with each step as it completes, in step order."""
        self._listeners.append(listener)

    @property
    def num_dropped(self) -> int:
        """Number of completed steps that are no longer kept."""
        return self._num_closed - len(self._records)

    def output_tokens_per_s(self, now_ns: int, window_s: float) -> float:
        """Tokens sampled per second over the last `window_s` seconds, or over the part of them that the log covers."""
        since_ns, num_tokens = now_ns - int(window_s * NS_PER_S), 0
        for record in reversed(self._records):
            if record.closed_ns < since_ns:
                return num_tokens / window_s
            num_tokens += len(record.sampled_ids) // wire_arrays.I32.itemsize
        held_s = max(1e-3, (now_ns - self._records[0].closed_ns) / NS_PER_S) if self.num_dropped else window_s
        return num_tokens / held_s

    def records_from(self, position: int) -> list[StepRecord]:
        """Kept records from the `position`-th completed step on (from 0), oldest first."""
        count = min(self._num_closed - position, len(self._records))
        return list(itertools.islice(reversed(self._records), count))[::-1]

    def oldest_tables(self) -> Tables:
        """Copy of the block tables before the oldest kept step."""
        return {name: list(blocks) for name, blocks in self._base.items()}

    async def wait(self, position: int) -> None:
        """Wait until more than `position` steps have completed."""
        while self._num_closed <= position:
            await self._grown.wait()


class StepReader:
    """Position of one reader in the log. `tables`: rebuild block tables along the way; `state`: include kept states.

    A reader slower than the log skips the steps that the log dropped.
    """

    def __init__(self, log: StepLog, since_step: int, *, tables: bool, state: bool = False) -> None:
        self._log = log
        self._state = state
        self._since_step = since_step
        self._position = log.num_dropped
        self._tables = log.oldest_tables() if tables else None

    def new(self) -> Iterator[admin_pb2.StepReport]:
        """Completed steps that were not read yet, oldest first, as of the call."""
        if self._position < self._log.num_dropped:
            self._position = self._log.num_dropped
            self._tables = self._log.oldest_tables() if self._tables is not None else None
        records = self._log.records_from(self._position)
        self._position += len(records)
        return self._reports(records)

    def _reports(self, records: list[StepRecord]) -> Iterator[admin_pb2.StepReport]:
        for record in records:
            if self._tables is not None:
                record.change.apply(self._tables)
            if record.step >= self._since_step:
                yield record.report(self._tables, state=self._state)

    async def wait(self) -> None:
        """Wait until `new` has something."""
        await self._log.wait(self._position)


def _failure(result: WorkerResult) -> str:
    if result.error is not None:
        return known_reason(result.error.reason)
    return ROWS_NOT_FINITE if NOT_FINITE in result.result.failed.values() else ""


def _ints(data: bytes) -> NDArray[np.int32]:
    return np.frombuffer(data, dtype=wire_arrays.I32)


def _names_of(blocks: bytes, rank: int | None) -> list[str]:
    """Block names as in `Ledger.named_tables`."""
    suffix = "" if rank is None else f"@{rank}"
    return [f"g{block}{suffix}" for block in _ints(blocks).tolist()]


def _pairs(pairs: Pairs) -> list[admin_pb2.BlockPair]:
    return [admin_pb2.BlockPair(src=src, dst=dst) for src, dst in pairs]
