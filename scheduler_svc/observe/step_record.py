"""The record of one step: its plan and its result, for the step log, metrics and `quire steps`.

Steps share columns: in fast decode names, token counts and prefill flags equal those of the step before, and
so does `computed before - step`, so that a step costs only its sampled tokens. Messages are built on request.
Block tables are kept as changes, from which the tables of any kept step can be rebuilt; a step that moves
blocks keeps them whole.
"""

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protos.inference.v1 import admin_pb2
from protos.worker.v1 import worker_pb2
from svc_common import wire_arrays
from svc_common.clock import unix_ns

Pairs = tuple[tuple[int, int], ...]
Tables = dict[str, list[str]]


@dataclass(frozen=True, slots=True, eq=False)
class Scheduled:
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
class TableChange:
    """Changes of block tables by one step: sequences removed, then blocks appended. `whole` replaces all, if blocks moved.

    `rank`: the dp rank that owns the blocks, if each has its own.
    """

    left: tuple[str, ...] = ()
    fresh: tuple[tuple[str, bytes], ...] = ()
    appended: tuple[tuple[str, bytes], ...] = ()
    whole: Tables | None = None
    rank: int | None = None

    def apply(self, tables: Tables) -> None:
        """Apply the change to tables as of the step before."""
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

    `worker`: number of the lane to the worker that runs it; `worker_id`: its boot id; `step_id`: the worker's
    number of the step within `epoch`. Times are monotonic. `failure`: empty if all succeeded; `WORKER_LOST`
    (details in `why`); `NOT_FINITE` if only some sequences failed (`failed` has them with the reason); else the
    reason of the worker's error.
    """

    step: int
    epoch: int
    lane: int
    policy: str
    scheduled: Scheduled
    swap_in: Pairs
    swap_out: Pairs
    copy: Pairs
    preempted: tuple[tuple[str, str], ...]
    queues: tuple[int, int, int]
    free: tuple[int, int]
    change: TableChange
    planned_ns: int = 0
    schedule_ns: int = 0
    step_id: int = 0
    worker: int = 0
    worker_id: str = ""
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


def _ints(data: bytes) -> NDArray[np.int32]:
    return np.frombuffer(data, dtype=wire_arrays.I32)


def _names_of(blocks: bytes, rank: int | None) -> list[str]:
    """Block names as in `Ledger.named_tables`."""
    suffix = "" if rank is None else f"@{rank}"
    return [f"g{block}{suffix}" for block in _ints(blocks).tolist()]


def _pairs(pairs: Pairs) -> list[admin_pb2.BlockPair]:
    return [admin_pb2.BlockPair(src=src, dst=dst) for src, dst in pairs]
