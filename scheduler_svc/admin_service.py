"""AdminService of the scheduler, on a listener of its own: steps, blocks, explanations, recordings, and the policy in force."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc.aio

from block_manager.memory_report import MemoryReport
from block_manager.pool import PoolCounts
from protos.inference.v1 import admin_pb2, admin_pb2_grpc
from scheduler_svc import memory_view, policy_change
from scheduler_svc.adapter_calls import AdapterCalls
from scheduler_svc.core.reasons import Numbers
from scheduler_svc.core.spec import as_written
from scheduler_svc.core.timelines import Episode
from scheduler_svc.explanations import Explanations
from scheduler_svc.inquirer import Inquirer
from scheduler_svc.recording.needs import Needs
from scheduler_svc.recording.recorder import AnyCore
from scheduler_svc.recording.tape import PackedSegment, Tape, TapeReader
from scheduler_svc.step_log import StepLog, StepReader
from svc_common import rpc
from svc_common.clock import NS_PER_S, monotonic_ns, wall_ns
from svc_common.errors import FailedPrecondition, InvalidArgument, Unavailable

SetPolicy = Callable[[list[str]], tuple[int, list[policy_change.Change]]]


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """`core()` is the scheduler core in force, None before a worker has said how many blocks it has."""

    def __init__(
        self,
        log: StepLog,
        core: Callable[[], AnyCore | None],
        explanations: Explanations,
        tape: Tape,
        set_policy: SetPolicy,
        adapters: AdapterCalls,
    ) -> None:
        self._log = log
        self._core = core
        self._explanations = explanations
        self._tape = tape
        self._set_policy = set_policy
        self._adapters = adapters
        self._inquirer = Inquirer(tape)

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
                response.memory.CopyFrom(_memory(memory_view.memory_report(core.state)))
            return response
        raise AssertionError("errors_to_status ends the call")

    async def SetPolicy(
        self, request: admin_pb2.SetPolicyRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.SetPolicyResponse:
        """Other values from the next plan on."""
        async with rpc.errors_to_status(context):
            if not request.settings:
                raise InvalidArgument.field("settings", 'is empty: give one or more "KEY=VALUE"')
            step, changes = self._set_policy(list(request.settings))
            return admin_pb2.SetPolicyResponse(
                from_step=step,
                changes=[
                    admin_pb2.PolicyChange(key=key, old_value=as_written(old, str), new_value=as_written(new, str))
                    for key, old, new in changes
                ],
            )
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
            needs, num_open = await self._inquirer.needs(core_id, episodes) if request.needs else ({}, 0)
            messages = [_episode(episode, needs.get(i, {})) for i, episode in enumerate(episodes)]
            return admin_pb2.ExplainRequestResponse(id=core_id, episodes=messages, num_waits_not_searched=num_open)
        raise AssertionError("errors_to_status ends the call")

    async def LoadAdapter(
        self, request: admin_pb2.LoadAdapterRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.LoadAdapterResponse:
        """Into every worker; requests may name it then."""
        async with rpc.errors_to_status(context):
            return await self._adapters.load(request)
        raise AssertionError("errors_to_status ends the call")

    async def UnloadAdapter(
        self, request: admin_pb2.UnloadAdapterRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.UnloadAdapterResponse:
        """Requests may not name it any more."""
        async with rpc.errors_to_status(context):
            return await self._adapters.unload(request)
        raise AssertionError("errors_to_status ends the call")

    async def ListAdapters(
        self, request: admin_pb2.ListAdaptersRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.ListAdaptersResponse:
        """Those that requests may name."""
        return self._adapters.list()

    async def DumpRecording(
        self, request: admin_pb2.DumpRecordingRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[admin_pb2.DumpRecordingResponse]:
        """Held segments, oldest first; with `follow` new ones as they are complete."""
        async with rpc.errors_to_status(context):
            if not self._tape.is_on:
                raise FailedPrecondition(
                    "this scheduler records nothing; start it with --record-memory above 0",
                    reason="NOT_RECORDING",
                )
            yield admin_pb2.DumpRecordingResponse(beginning=self._tape.beginning(), segment=request.since_segment)
            reader = TapeReader(self._tape, request.since_segment, leaves_open=request.follow)
            while True:
                async for packed in _in_thread(reader.new()):
                    for part in _parts(packed):
                        yield part
                if not request.follow:
                    return
                await reader.wait()


_PART_BYTES = 2**20
_STARTED_NS = wall_ns() - monotonic_ns()
"""Taken once, so that the end of one episode is the beginning of the next to the nanosecond."""


async def _in_thread(packing: Iterator[PackedSegment]) -> AsyncIterator[PackedSegment]:
    """Packing takes long; steps go on meanwhile."""
    while (packed := await asyncio.to_thread(next, packing, None)) is not None:
        yield packed


def _parts(packed: PackedSegment) -> Iterator[admin_pb2.DumpRecordingResponse]:
    frame = packed.frame
    for start in range(0, len(frame), _PART_BYTES):
        part = admin_pb2.DumpRecordingResponse(
            data=frame[start : start + _PART_BYTES], segment=packed.number, num_left=packed.num_left
        )
        if start + _PART_BYTES >= len(frame):
            part.num_steps = packed.num_steps
        yield part


def _episode(episode: Episode, needs: Needs) -> admin_pb2.Episode:
    return admin_pb2.Episode(
        from_step=episode.from_step,
        to_step=episode.to_step,
        from_ns=_unix_ns(episode.from_time),
        to_ns=None if episode.to_time is None else _unix_ns(episode.to_time),
        queue=episode.queue,
        reason=episode.reason.value,
        numbers=_numbers(episode.numbers),
        sample=episode.sample,
        needs=_numbers(needs),
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
    return int(monotonic_s * NS_PER_S) + _STARTED_NS


def _blocks(core: AnyCore) -> admin_pb2.GetBlocksResponse:
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
