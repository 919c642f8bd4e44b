"""The record of one step: its plan and its result, for the step log, metrics and `quire steps`.

In fast decode a record costs little more than its sampled tokens. Messages are built on request. Block tables
are kept as changes, from which the tables of any kept step can be rebuilt; a step that moves blocks keeps them
whole.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from protos.inference.v1 import admin_pb2
from protos.worker.v1 import worker_pb2
from scheduler_svc.observe.plan_record import Pairs, PlanRecord
from scheduler_svc.worker_values import SampledColumns
from svc_common import wire_arrays
from svc_common.clock import unix_ns

Tables = dict[str, list[str]]
NO_TOKENS = SampledColumns((), b"", b"")


@dataclass(frozen=True, slots=True)
class StepOrigin:
    """How a plan was made, and where it is sent. Planning started at `planned_ns` (monotonic; in a replay or simulation
    on its clock) and took `schedule_ns`.

    `worker`: number of the lane to the worker that runs it; `worker_id`: its boot id; `step_id`: the worker's
    number of the step within `epoch`. `rank`: the dp rank that owns the blocks, if each has its own.
    """

    planned_ns: int = 0
    schedule_ns: int = 0
    epoch: int = 0
    step_id: int = 0
    worker: int = 0
    worker_id: str = ""
    rank: int | None = None


@dataclass(slots=True)
class StepRecord:
    """One step. The result arrived at `closed_ns` (clock of `origin`); until then it is open.

    `left`: sequences that the worker forgets before the step. `whole`: all block tables, if blocks moved.
    `failure`: empty if all succeeded; `WORKER_LOST` (details in `why`); `NOT_FINITE` if only some sequences
    failed (`failed` has them with the reason); else the reason of the worker's error.
    """

    plan: PlanRecord
    origin: StepOrigin
    policy: str
    left: Sequence[str]
    whole: Tables | None = None
    sampled: SampledColumns = NO_TOKENS
    timings: worker_pb2.StepTimings | None = None
    computed_tokens: int = 0
    duration_ns: int = 0
    error: str = ""
    failure: str = ""
    failed: tuple[tuple[str, str], ...] = ()
    why: str = ""
    is_closed: bool = False
    closed_ns: int = 0
    state: admin_pb2.StepState | None = None

    @property
    def step(self) -> int:
        """Number of the step."""
        return self.plan.step

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens."""
        return len(self.sampled.token_ids) // wire_arrays.I32.itemsize

    def change_tables(self, tables: Tables) -> None:
        """Bring block tables from before the step's schedule() to right after it."""
        if self.whole is not None:
            tables.clear()
            tables.update({name: list(blocks) for name, blocks in self.whole.items()})
            return
        for name in self.left:
            tables.pop(name, None)
        for name in self.plan.shape.fresh:
            tables[name] = []
        for name, blocks in self.plan.new_blocks():
            tables.setdefault(name, []).extend(_names_of(blocks, self.origin.rank))

    def report(
        self, tables: Tables | None, *, state: bool = False, wall_ns: Callable[[int], int] = unix_ns
    ) -> admin_pb2.StepReport:
        """The record as a message. `tables`: block tables right after this step's schedule(), if wanted; `state`: include it.

        `wall_ns`: converts the times of plan and result, by default from this machine's monotonic clock.
        """
        plan = self.plan
        report = admin_pb2.StepReport(
            step=plan.step,
            epoch=self.origin.epoch,
            lane=plan.lane,
            policy=self.policy,
            scheduled=self._groups(),
            swap_in=_pairs(plan.swap_in),
            swap_out=_pairs(plan.swap_out),
            copy=_pairs(plan.copy),
            preempted=[admin_pb2.Preempted(id=i, mode=m) for i, m in plan.preempted],
            queues=admin_pb2.Queues(waiting=plan.num_waiting, running=plan.num_running, swapped=plan.num_swapped),
            free=admin_pb2.FreeBlocks(gpu=plan.free_gpu, cpu=plan.free_cpu),
            sampled=self._sampled(),
            computed_tokens=self.computed_tokens,
            error=self.error,
            duration_ns=self.duration_ns,
            times=self._times(wall_ns),
            state=self.state if state else None,
            granted_steps=plan.num_granted_steps,
            is_repeat=plan.is_repeat,
            revoked=plan.revoked,
        )
        if tables is not None:
            report.tables.extend(admin_pb2.BlockTable(sequence=s, blocks=b) for s, b in tables.items())
        return report

    def _times(self, wall_ns: Callable[[int], int]) -> admin_pb2.StepTimes:
        t = self.timings or worker_pb2.StepTimings()
        return admin_pb2.StepTimes(
            planned_ns=wall_ns(self.origin.planned_ns),
            schedule_ns=self.origin.schedule_ns,
            finished_ns=wall_ns(self.closed_ns),
            started_ns=t.started_ns,
            queued_ns=t.queued_ns,
            cache_ns=t.cache_ns,
            prepare_ns=t.prepare_ns,
            model_ns=t.model_ns,
            sample_ns=t.sample_ns,
        )

    def _groups(self) -> list[admin_pb2.ScheduledGroup]:
        """Adjacent sequences of one request form one group."""
        shape = self.plan.shape
        names, tokens, prefill = shape.names, shape.num_tokens, shape.is_prefill
        before = self.plan.computed_before
        groups = []
        for request_id, members in itertools.groupby(range(len(names)), key=lambda i: names[i].rpartition("/")[0]):
            rows = list(members)
            groups.append(
                admin_pb2.ScheduledGroup(
                    id=request_id,
                    seqs=[names[i] for i in rows],
                    tokens=sum(tokens[i] for i in rows),
                    computed_before=before[rows[0]],
                    prefill=any(prefill[i] for i in rows),
                )
            )
        return groups

    def _sampled(self) -> list[admin_pb2.SampledTokens]:
        ids, start, found = wire_arrays.unpack(self.sampled.token_ids, "token_ids").tolist(), 0, []
        counts = wire_arrays.unpack(self.sampled.counts, "counts").tolist()
        for name, count in zip(self.sampled.names, counts, strict=True):
            found.append(admin_pb2.SampledTokens(sequence=name, tokens=ids[start : start + count]))
            start += count
        return found


def _names_of(blocks: Sequence[int], rank: int | None) -> list[str]:
    """Block names as in `Ledger.named_tables`."""
    suffix = "" if rank is None else f"@{rank}"
    return [f"g{block}{suffix}" for block in blocks]


def _pairs(pairs: Pairs) -> list[admin_pb2.BlockPair]:
    return [admin_pb2.BlockPair(src=src, dst=dst) for src, dst in pairs]
