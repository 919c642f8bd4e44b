"""OpenEngine's Control service: state of the engine, and the end of requests."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from gateway_svc.calls import Call
from gateway_svc.cell.cell import Cell
from gateway_svc.cell.cell_load import CellReading
from gateway_svc.cell.kv_publisher import KvEndpoints
from gateway_svc.checks.validation import parse
from gateway_svc.engine_calls import EngineCalls, EngineParts, FailureTold, StreamingMethod, UnaryMethod
from gateway_svc.openengine import descriptions, health_checks
from gateway_svc.openengine.engine_errors import engine_error
from gateway_svc.openengine.kv_event_stream import OpenEngineKvBatches, event_sources, own_address
from protos.inference.v1 import admin_pb2
from protos.routers.v1 import openengine_pb2 as pb
from svc_common.errors import Cancelled, InvalidArgument, NotFound, QuireError, Unavailable, Unimplemented
from svc_common.net import rpc

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Control"].full_name
ADAPTERS_TIMEOUT_S = 5.0

_LIST_ADAPTERS = "/quire.inference.v1.AdminService/ListAdapters"


@dataclass(frozen=True, slots=True)
class GatewayView:
    """What Control tells of the gateway itself.

    `published()`: where its KV events are published over ZeroMQ, None = they are not.
    """

    cells: Sequence[Cell]
    is_stopping: Callable[[], bool]
    grpc_at: Callable[[], tuple[str, int]]
    published: Callable[[], KvEndpoints | None]


class OpenEngineControl:
    """Methods of one gateway. What is about one model is about that of the first scheduler."""

    def __init__(self, parts: EngineParts, view: GatewayView) -> None:
        self._parts = parts
        self._view = view
        self._instance_id = uuid.uuid4().hex

    def handler(self, calls: EngineCalls) -> "grpc.GenericRpcHandler[Any, Any]":
        """Return the handler for `server.add_generic_rpc_handlers`."""
        unary: dict[str, UnaryMethod] = {
            "GetServerInfo": self.get_server_info,
            "GetModelInfo": self.get_model_info,
            "GetLoad": self.get_load,
            "Health": self.health,
            "Abort": self.abort,
            "LoadLora": self.change_lora,
            "UnloadLora": self.change_lora,
            "ListLoras": self.list_loras,
            "GetKvEventSources": self.get_kv_event_sources,
        }
        streaming: dict[str, StreamingMethod] = {"SubscribeKvEvents": self.subscribe_kv_events}
        return calls.handler(unary, streaming)

    # --- state -------------------------------------------------------------------------------------------------------

    async def get_server_info(self, raw: bytes, call: Call) -> Message:
        """The server; without a scheduler, what is known without one."""
        models = [model.name for model in self._parts.catalog.served if not model.adapter]
        reading: CellReading | None = None
        with contextlib.suppress(Unavailable):
            reading = await self._parts.cell.read()
        return descriptions.server_info(
            self._instance_id,
            filter(call.caller.terms.may_use, models),
            self._view.cells[0].link.state.limits,
            reading,
        )

    async def get_model_info(self, raw: bytes, call: Call) -> Message:
        """One model. Raises NotFound, and Unavailable before the first is loaded."""
        asked = parse(pb.GetModelInfoRequest, raw).model
        if not asked:
            raise InvalidArgument.field("model", "is missing; send a name of ServerInfo.supported_models")
        model, first = self._parts.catalog.get(asked), self._view.cells[0].model.current
        call.caller.terms.check_model(model.name)
        is_first = first is not None and model.name == first.name
        return descriptions.model_info(model, self._parts.catalog.aliases if is_first else ())

    async def get_load(self, raw: bytes, call: Call) -> Message:
        """The cell's load. Raises Unavailable without a scheduler."""
        per_rank = parse(pb.GetLoadRequest, raw).include_per_rank
        return descriptions.load_info(self._instance_id, await self._parts.cell.read(), per_rank=per_rank)

    async def health(self, raw: bytes, call: Call) -> Message:
        """Whether requests can be served; with a probe, whether one is."""
        request = parse(pb.HealthRequest, raw)
        checks = health_checks.state_checks(self._view.cells, is_stopping=self._view.is_stopping())
        checks += health_checks.role_checks(request.role)
        if request.include_inference_probe:
            checks.append(await health_checks.inference_check(self._parts.generator, call, request.model))
        return health_checks.response_of(checks)

    # --- requests and adapters ---------------------------------------------------------------------------------------

    async def abort(self, raw: bytes, call: Call) -> Message:
        """Cancel a request, or all of the caller's tenant at this gateway. Raises NotFound for a request that is not here."""
        request, tenant = parse(pb.AbortRequest, raw), call.caller.tenant
        match request.WhichOneof("target"):
            case "request_id":
                return self._abort_one(tenant, request.request_id)
            case "all_requests":
                error = Cancelled("all requests of the tenant were aborted", reason="CANCELLED")
                num = self._parts.catalog.cancel_all(tenant, error)
                return pb.AbortResponse(status=_status(is_finished=not num), message=f"{num} requests at this gateway")
            case "kv_session":
                raise NotFound("Quire has no KV sessions", reason="UNKNOWN_REQUEST", resource_type="kv_session")
        raise InvalidArgument.field("target", "is missing; set request_id or all_requests")

    def _abort_one(self, tenant: str, request_id: str) -> pb.AbortResponse:
        """One that is not here may run at another gateway of the cell, where the scheduler cancels it without an answer."""
        found = self._parts.catalog.running(tenant, request_id)
        is_finished = found is not None and found.is_over
        self._parts.abort(tenant, request_id)
        if found is not None:
            return pb.AbortResponse(status=_status(is_finished=is_finished))
        raise NotFound(
            "no request of this id runs at this gateway; if one runs at another gateway of the cell, it is cancelled",
            reason="UNKNOWN_REQUEST",
            resource_type="request",
            resource_name=request_id,
        )

    async def change_lora(self, raw: bytes, call: Call) -> Message:
        """Refuse: the scheduler numbers adapters, and operators load them."""
        raise Unimplemented(
            "adapters are loaded and unloaded by operators: `quire adapters load`, or LoadAdapter of the admin API",
            reason="ADAPTERS_BY_OPERATORS",
        )

    async def list_loras(self, raw: bytes, call: Call) -> Message:
        """The adapters that the caller may use; their folders for operators alone."""
        channel = await self._view.cells[0].admin.connected()
        ask = channel.unary_unary(_LIST_ADAPTERS, None, admin_pb2.ListAdaptersResponse.FromString)
        try:
            answer = await ask(admin_pb2.ListAdaptersRequest().SerializeToString(), timeout=ADAPTERS_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise rpc.from_rpc_error(error) from None
        terms = call.caller.terms
        usable = [each for each in answer.adapters if terms.may_use(each.name)]
        return pb.ListLorasResponse(adapters=descriptions.lora_adapters(usable, with_paths=call.caller.is_admin))

    # --- KV events ---------------------------------------------------------------------------------------------------

    async def get_kv_event_sources(self, raw: bytes, call: Call) -> Message:
        """Where KV events are to be had; for a rank other than 0 nowhere."""
        ranks = parse(pb.GetKvEventSourcesRequest, raw).data_parallel_ranks
        if ranks and 0 not in ranks:
            return pb.GetKvEventSourcesResponse()
        own_host = await asyncio.to_thread(own_address)
        sources = event_sources(self._view.grpc_at(), self._view.published(), own_host)
        return pb.GetKvEventSourcesResponse(sources=sources)

    async def subscribe_kv_events(self, raw: bytes, call: Call) -> AsyncGenerator[Message, None]:
        """Which KV blocks are stored. Raises FailedPrecondition if the scheduler does not keep track; a later error is told
        by the last message.
        """
        asked = parse(pb.SubscribeKvEventsRequest, raw)
        if any(asked.data_parallel_ranks):
            raise InvalidArgument.field("data_parallel_ranks", "has a rank other than 0; a cell is one rank")
        batches, has_begun = OpenEngineKvBatches(max(1, asked.start_sequence_number)), False
        try:
            async with contextlib.aclosing(self._parts.kv_events()) as changes:
                async for change in changes:
                    has_begun = True
                    yield pb.SubscribeKvEventsResponse(batch=batches.batch(change))
        except QuireError as error:
            if not has_begun:
                raise
            yield pb.SubscribeKvEventsResponse(error=engine_error(error))
            raise FailureTold(error) from error


def _status(*, is_finished: bool) -> pb.AbortStatus:
    return pb.ABORT_STATUS_ALREADY_FINISHED if is_finished else pb.ABORT_STATUS_ABORTED
