"""AdminService of the scheduler: its steps and its blocks, on a listener of their own. Reads only."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio

from block_manager.memory_report import MemoryReport
from block_manager.pool import PoolCounts
from protos.inference.v1 import admin_pb2, admin_pb2_grpc
from scheduler_svc import memory_view
from scheduler_svc.core.reasons import Numbers
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.timelines import Episode
from scheduler_svc.explanations import Explanations
from scheduler_svc.step_log import StepLog, StepReader
from svc_common import rpc
from svc_common.clock import NS_PER_S, monotonic_ns, wall_ns
from svc_common.errors import InvalidArgument, Unavailable


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """`core()` is the scheduler core in force, None before a worker has said how many blocks it has."""

    def __init__(self, log: StepLog, core: Callable[[], Scheduler | None], explanations: Explanations) -> None:
        self._log = log
        self._core = core
        self._explanations = explanations

    async def WatchScheduler(
        self, request: admin_pb2.WatchSchedulerRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[admin_pb2.StepReport]:
        """Held steps, oldest first; with `follow` new ones as they complete."""
        async with rpc.errors_to_status(context):
            reader = StepReader(self._log, request.since_step, tables=request.tables)
            while True:
                for report in reader.new():
                    yield report
                if not request.follow:
                    return
                await reader.wait()

    async def GetBlocks(
        self, request: admin_pb2.GetBlocksRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.GetBlocksResponse:
        """The ledger at this instant; with `memory` counted, too (R209)."""
        async with rpc.errors_to_status(context):
            core = self._core()
            if core is None:
                raise Unavailable("there are no blocks yet: no worker is ready", reason="NO_WORKER", retry_after_s=1.0)
            response = _blocks(core)
            if request.memory:
                response.memory.CopyFrom(_memory(memory_view.memory_report(core)))
            return response
        raise AssertionError("errors_to_status ends the call")

    async def ExplainRequest(
        self, request: admin_pb2.ExplainRequestRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.ExplainRequestResponse:
        """Where a request's time went and why."""
        async with rpc.errors_to_status(context):
            if not request.request_id:
                raise InvalidArgument.field("request_id", "is empty: which request is to be explained?")
            core_id = self._explanations.core_id(request.tenant, request.request_id)
            episodes = self._explanations.episodes(core_id)
            return admin_pb2.ExplainRequestResponse(id=core_id, episodes=[_episode(e) for e in episodes])
        raise AssertionError("errors_to_status ends the call")


def _episode(episode: Episode) -> admin_pb2.Episode:
    return admin_pb2.Episode(
        from_step=episode.from_step,
        to_step=episode.to_step,
        from_ns=_unix_ns(episode.from_time),
        to_ns=None if episode.to_time is None else _unix_ns(episode.to_time),
        queue=episode.queue,
        reason=episode.reason.value,
        numbers=_numbers(episode.numbers),
        sample=episode.sample,
    )


def _numbers(numbers: Numbers) -> list[admin_pb2.Number]:
    return [_number(name, value) for name, value in numbers.items()]


def _number(name: str, value: int | float | str) -> admin_pb2.Number:
    if isinstance(value, str):
        return admin_pb2.Number(name=name, text=value)
    return (
        admin_pb2.Number(name=name, integer=value)
        if isinstance(value, int)
        else admin_pb2.Number(name=name, real=value)
    )


def _unix_ns(monotonic_s: float) -> int:
    return int(monotonic_s * NS_PER_S) + wall_ns() - monotonic_ns()


def _blocks(core: Scheduler) -> admin_pb2.GetBlocksResponse:
    pools = core.pool_report()
    return admin_pb2.GetBlocksResponse(
        block_size=pools.block_size,
        gpu=_pool(pools.gpu),
        cpu=_pool(pools.cpu),
        tables=[admin_pb2.BlockTable(sequence=s, blocks=b) for s, b in core.block_tables().items()],
        refs=pools.refs,
        step=core.step,
    )


def _pool(counts: PoolCounts) -> admin_pb2.BlockPool:
    return admin_pb2.BlockPool(total=counts.total, free=counts.free, cached=counts.cached)


def _memory(report: MemoryReport) -> admin_pb2.MemoryReport:
    paged, contiguous = report.paged, report.contiguous
    return admin_pb2.MemoryReport(
        paged=admin_pb2.PagedMemory(
            num_sequences=paged.num_sequences,
            num_tokens=paged.num_tokens,
            logical_blocks=paged.logical_blocks,
            physical_blocks=paged.physical_blocks,
            waste_tokens=paged.waste_tokens,
            max_waste_tokens=paged.max_waste_tokens,
        ),
        contiguous=admin_pb2.ContiguousMemory(
            used=contiguous.used,
            reserved=contiguous.reserved,
            internal=contiguous.internal,
            external=contiguous.external,
            num_regions=contiguous.num_regions,
            num_left_out=contiguous.num_left_out,
        ),
    )
