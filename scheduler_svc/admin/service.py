"""AdminService of the scheduler, on its own port: steps, blocks, explanations, recordings, load and policy changes.

Methods take raw bytes and parse them inside (`svc_common.net.malformed`).
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from protos.inference.v1 import admin_pb2 as pb
from scheduler_svc.adapter_calls import AdapterCalls
from scheduler_svc.admin.live_requests import live_requests_message
from scheduler_svc.admin.load import LoadReport, workers_message
from scheduler_svc.admin.messages import blocks_message, episode_message, memory_message
from scheduler_svc.core.spec.policy_spec import as_written
from scheduler_svc.loop import policy_change
from scheduler_svc.observe import memory_view
from scheduler_svc.observe.counterfactual.live_search import LiveSearch
from scheduler_svc.observe.explanations import Explanations
from scheduler_svc.observe.recording.record_buffer import RecordBuffer, RecordBufferReader, SentSegment
from scheduler_svc.observe.recording.recorder import AnyCore
from scheduler_svc.observe.step_log import StepLog, StepReader
from scheduler_svc.readiness import Readiness
from scheduler_svc.requests.request_book import RequestBook
from scheduler_svc.workers.roster import WorkerRoster
from svc_common.errors import FailedPrecondition, InvalidArgument, Unavailable
from svc_common.net import rpc
from svc_common.net.malformed import parse

SERVICE = pb.DESCRIPTOR.services_by_name["AdminService"]
SERVICE_NAME = SERVICE.full_name

_MOST_IN_STATE = 300
_PART_BYTES = 2**20

DrainWorker = Callable[..., int]
SetPolicy = Callable[[list[str]], tuple[int, list[policy_change.Change]]]
_Context = grpc.aio.ServicerContext[Any, Any]
_Answer = Message | Awaitable[Message]
_Unary = Callable[[Any], _Answer]
_Streaming = Callable[[Any], AsyncIterator[Message]]


@dataclass(frozen=True, slots=True)
class AdminParts:
    """What the methods read and change, owned by others. `core()`: None before a worker reported its block counts."""

    core: Callable[[], AnyCore | None]
    log: StepLog
    explanations: Explanations
    record_buffer: RecordBuffer
    set_policy: SetPolicy
    drain_worker: DrainWorker
    adapters: AdapterCalls
    load: LoadReport
    roster: WorkerRoster
    readiness: Readiness
    book: RequestBook


class AdminService:
    """The methods' handlers, for one scheduler."""

    def __init__(self, parts: AdminParts) -> None:
        self._parts = parts
        self._live_search = LiveSearch(parts.record_buffer)
        parts.log.read_state = self._state

    def handler(self) -> "grpc.GenericRpcHandler[Any, Any]":
        """The handler for `server.add_generic_rpc_handlers`."""
        parts = self._parts
        unary: dict[type[Message], _Unary] = {
            pb.GetBlocksRequest: self.get_blocks,
            pb.SetPolicyRequest: self.set_policy,
            pb.ExplainRequestRequest: self.explain_request,
            pb.LoadAdapterRequest: parts.adapters.load,
            pb.UnloadAdapterRequest: parts.adapters.unload,
            pb.ListAdaptersRequest: lambda request: parts.adapters.list(),
            pb.ListRequestsRequest: self.list_requests,
            pb.GetLoadRequest: lambda request: parts.load.message(),
            pb.ListWorkersRequest: lambda request: workers_message(parts.roster.wanted, parts.core()),
            pb.DrainRequest: self.drain,
        }
        streaming: dict[type[Message], _Streaming] = {
            pb.WatchSchedulerRequest: self.watch_scheduler,
            pb.DumpRecordingRequest: lambda request: dump(parts.record_buffer, request),
        }
        handlers = {_method(cls): _unary_handler(cls, answer) for cls, answer in unary.items()}
        handlers |= {_method(cls): _stream_handler(cls, answers) for cls, answers in streaming.items()}
        return grpc.method_handlers_generic_handler(SERVICE_NAME, handlers)

    async def watch_scheduler(self, request: pb.WatchSchedulerRequest) -> AsyncIterator[Message]:
        """Kept steps, oldest first; with `follow`, new ones as they complete."""
        log = self._parts.log
        reader = StepReader(log, request.since_step, tables=request.tables, state=request.state)
        with log.keep_states() if request.state else nullcontext():
            while True:
                for report in reader.new():
                    yield report
                if not request.follow:
                    return
                await reader.wait()

    def get_blocks(self, request: pb.GetBlocksRequest) -> Message:
        """The block ledger at this instant; optionally with memory use (`memory`) and the hashes of cached blocks (`cached`)."""
        core = self._parts.core()
        if core is None:
            raise Unavailable("there are no blocks yet: no worker is ready", reason="NO_WORKER", retry_after_s=1.0)
        response = blocks_message(core)
        if request.cached:
            response.cached_blocks.extend(core.cached_blocks())
        if request.max_requests:
            requests = live_requests_message(
                self._parts.book, self._parts.explanations, core.step, request.max_requests
            )
            response.requests.CopyFrom(requests)
        if request.memory:
            response.memory.CopyFrom(memory_message(memory_view.memory_report(core.states)))
        return response

    def _state(self, step: int) -> pb.StepState:
        """Live requests and cached blocks right after a plan."""
        core = self._parts.core()
        requests = live_requests_message(self._parts.book, self._parts.explanations, step, _MOST_IN_STATE)
        return pb.StepState(requests=requests, cached_blocks=core.cached_blocks() if core is not None else [])

    def list_requests(self, request: pb.ListRequestsRequest) -> Message:
        """The live requests, and why the waiting ones wait."""
        core = self._parts.core()
        step = 0 if core is None else core.step
        return live_requests_message(self._parts.book, self._parts.explanations, step, request.max_requests)

    def set_policy(self, request: pb.SetPolicyRequest) -> Message:
        """Change policy settings from the next plan on."""
        if not request.settings:
            raise InvalidArgument.field("settings", 'is empty: give one or more "KEY=VALUE"')
        step, changes = self._parts.set_policy(list(request.settings))
        return pb.SetPolicyResponse(
            from_step=step,
            changes=[
                pb.PolicyChange(key=key, old_value=as_written(old, str), new_value=as_written(new, str))
                for key, old, new in changes
            ],
        )

    async def explain_request(self, request: pb.ExplainRequestRequest) -> Message:
        """Timeline of a request: where its time went and why."""
        if not request.request_id:
            raise InvalidArgument.field("request_id", "is empty: which request is to be explained?")
        explanations = self._parts.explanations
        core_id, *others = explanations.core_ids(request.tenant, request.request_id)
        episodes = explanations.episodes(core_id)
        needs, num_open = await self._live_search.counterfactuals(core_id, episodes) if request.needs else ({}, 0)
        messages = [episode_message(episode, needs.get(i, {})) for i, episode in enumerate(episodes)]
        return pb.ExplainRequestResponse(id=core_id, episodes=messages, num_waits_not_searched=num_open, others=others)

    def drain(self, request: pb.DrainRequest) -> Message:
        """Stop accepting requests, or accept them again; or drain one worker."""
        if request.worker:
            number = self._parts.drain_worker(request.worker, undo=request.undo, move=request.move)
            return pb.DrainResponse(num_requests=number)
        if request.move:
            raise InvalidArgument.field("move", "is for a worker: say which one in `worker`")
        self._parts.readiness.drain(on=not request.undo)
        return pb.DrainResponse(num_requests=sum(1 for _ in self._parts.book.live()))


def _method(request: type[Message]) -> str:
    """Name of the method that takes this request message; each method has its own."""
    [name] = [method.name for method in SERVICE.methods if method.input_type.full_name == request.DESCRIPTOR.full_name]
    return str(name)


def _unary_handler(cls: type[Message], answer: _Unary) -> "grpc.RpcMethodHandler[Any, Any]":
    async def handle(raw: bytes, context: _Context) -> Message:
        async with rpc.errors_to_status(context):
            given = answer(parse(cls, raw))
            return await given if inspect.isawaitable(given) else given
        raise AssertionError("errors_to_status ends the call")

    return grpc.unary_unary_rpc_method_handler(handle, response_serializer=_serialize)


def _stream_handler(cls: type[Message], answers: _Streaming) -> "grpc.RpcMethodHandler[Any, Any]":
    async def handle(raw: bytes, context: _Context) -> AsyncIterator[Message]:
        async with rpc.errors_to_status(context):
            async for message in answers(parse(cls, raw)):
                yield message

    return grpc.unary_stream_rpc_method_handler(handle, response_serializer=_serialize)


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


async def dump(
    record_buffer: RecordBuffer, request: pb.DumpRecordingRequest
) -> AsyncIterator[pb.DumpRecordingResponse]:
    """Kept segments, oldest first; with `follow`, new ones as they are completed. FailedPrecondition if recording is off."""
    if not record_buffer.is_on:
        raise FailedPrecondition(
            "this scheduler records nothing; start it with --record-memory above 0", reason="NOT_RECORDING"
        )
    yield pb.DumpRecordingResponse(beginning=record_buffer.beginning(), segment=request.since_segment)
    reader = RecordBufferReader(record_buffer, request.since_segment, leaves_open=request.follow)
    while True:
        async for packed in _in_thread(reader.new()):
            for part in _parts(packed):
                yield part
        if not request.follow:
            return
        await reader.wait()


async def _in_thread(packing: Iterator[SentSegment]) -> AsyncIterator[SentSegment]:
    """Pack segments in a thread, so that steps continue meanwhile."""
    while (packed := await asyncio.to_thread(next, packing, None)) is not None:
        yield packed


def _parts(packed: SentSegment) -> Iterator[pb.DumpRecordingResponse]:
    frame = packed.frame
    for start in range(0, len(frame), _PART_BYTES):
        part = pb.DumpRecordingResponse(
            data=frame[start : start + _PART_BYTES], segment=packed.number, num_left=packed.num_left
        )
        if start + _PART_BYTES >= len(frame):
            part.num_steps = packed.num_steps
        yield part
