"""VllmEngine: the service. Methods take raw bytes and parse them inside, as those of InferenceService."""

import contextlib
import functools
import hashlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace

import grpc
import grpc.aio
from google.protobuf.message import Message

from gateway_svc.calls import Call, CallIntake
from gateway_svc.cell.cell_load import CellLoad
from gateway_svc.cell.kv_formats import KvBatches
from gateway_svc.cell.load_routes import about, scheduler_load
from gateway_svc.checks.validation import parse
from gateway_svc.generating.embedder import Embedder
from gateway_svc.generating.generator import Generator
from gateway_svc.generating.model_catalog import ModelCatalog
from gateway_svc.grpc_calls import OpenCall, initial_metadata, metadata_of
from gateway_svc.metrics import GatewayMetrics
from gateway_svc.request_ids import accept_request_id
from gateway_svc.smg.engine_answers import EngineAnswer
from gateway_svc.smg.engine_requests import embed_request, generate_request
from gateway_svc.smg.tokenizer_archive import tokenizer_archive
from gateway_svc.spans import CallSpans
from gateway_svc.stalled_clients import until_left_unread
from protos.engine.v1 import engine_pb2
from protos.routers.v1 import smg_common_pb2
from protos.routers.v1 import vllm_engine_pb2 as pb
from protos.worker.v1 import worker_pb2
from svc_common.errors import Cancelled, InvalidArgument, QuireError
from svc_common.net import rpc

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name
CHUNK_BYTES = 64 * 1024
_UNENDING = frozenset({"SubscribeKvEvents"})

_Context = grpc.aio.ServicerContext
_Unary = Callable[[bytes, Call], Awaitable[Message]]
_Streaming = Callable[[bytes, Call], AsyncIterator[Message]]


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What the methods use, owned by others.

    `cancel(tenant, request_id, error)` ends a request at whichever gateway it runs; `fetch_bundle(digest)` returns a
    serialised model bundle; `kv_events()`: changes of the stored KV blocks; `not_ready_because()`: empty if requests can be
    served.
    """

    generator: Generator
    embedder: Embedder
    catalog: ModelCatalog
    cell: CellLoad
    cancel: Callable[[str, str, QuireError], None]
    fetch_bundle: Callable[[str], Awaitable[bytes]]
    kv_events: Callable[[], AsyncIterator[engine_pb2.SubscribeKvEventsResponse]]
    not_ready_because: Callable[[], str]


class VllmEngineService:
    """Handlers of one gateway."""

    def __init__(self, parts: EngineParts, intake: CallIntake, call_spans: CallSpans, metrics: GatewayMetrics) -> None:
        self._parts = parts
        self._intake = intake
        self._spans = call_spans
        self._metrics = metrics
        self._began_s = time.monotonic()

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler for `server.add_generic_rpc_handlers`."""
        unary: dict[str, _Unary] = {
            "Embed": self.embed,
            "HealthCheck": self.health_check,
            "Abort": self.abort,
            "GetModelInfo": self.get_model_info,
            "GetServerInfo": self.get_server_info,
            "GetLoads": self.get_loads,
        }
        streaming: dict[str, _Streaming] = {
            "Generate": self.generate,
            "GetTokenizer": self.get_tokenizer,
            "SubscribeKvEvents": self.subscribe_kv_events,
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(functools.partial(self._answer, name, method), None, _serialize)
            for name, method in unary.items()
        }
        handlers |= {
            name: grpc.unary_stream_rpc_method_handler(functools.partial(self._stream, name, method), None, _serialize)
            for name, method in streaming.items()
        }
        return grpc.method_handlers_generic_handler(SERVICE_NAME, handlers)

    # --- requests ----------------------------------------------------------------------------------------------------

    async def generate(self, raw: bytes, call: Call) -> AsyncIterator[Message]:
        """Generate; the stream's end cancels the request."""
        request = parse(pb.GenerateRequest, raw)
        call = replace(_named(call, request.request_id), stream=request.stream)
        async with self._parts.generator.generate(call, generate_request(request)) as generation:
            answer = EngineAnswer(generation.prompt_token_ids, generation.num_choices, stream=request.stream)
            async for events in generation:
                for message in answer.take(events):
                    yield message

    async def embed(self, raw: bytes, call: Call) -> Message:
        """Embed a prompt."""
        request = parse(pb.EmbedRequest, raw)
        answer = await self._parts.embedder.embed(_named(call, request.request_id), embed_request(request))
        [vector] = answer.embeddings
        return pb.EmbedResponse(
            embedding=vector.values, prompt_tokens=vector.prompt_tokens, embedding_dim=len(vector.values)
        )

    async def abort(self, raw: bytes, call: Call) -> Message:
        """Cancel by id, here or at another gateway."""
        error = Cancelled("the request was aborted by its id", reason="CANCELLED")
        for request_id in parse(pb.AbortRequest, raw).request_ids:
            self._parts.cancel(call.caller.tenant, request_id, error)
        return pb.AbortResponse()

    # --- state -------------------------------------------------------------------------------------------------------

    async def health_check(self, raw: bytes, call: Call) -> Message:
        """Whether requests can be served."""
        reason = self._parts.not_ready_because()
        return pb.HealthCheckResponse(healthy=not reason, message=reason)

    async def get_model_info(self, raw: bytes, call: Call) -> Message:
        """The model. Raises Unavailable before the first is loaded."""
        model = self._parts.catalog.get("")
        limits, defaults = model.limits, model.defaults
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        return pb.GetModelInfoResponse(
            model_path=model.name,
            is_generation=True,
            max_context_length=limits.max_model_len,
            vocab_size=limits.vocab_size,
            served_model_name=model.name,
            eos_token_ids=limits.eos_token_ids,
            max_req_input_len=limits.max_model_len - 1,
            default_sampling_params_json=json.dumps({name: getattr(defaults, name) for name in names}),
        )

    async def get_server_info(self, raw: bytes, call: Call) -> Message:
        """The server. Raises Unavailable without a scheduler."""
        reading, limits = await self._parts.cell.read(), self._parts.catalog.get("").limits
        return pb.GetServerInfoResponse(
            active_requests=reading.num_running + reading.num_waiting,
            uptime_seconds=time.monotonic() - self._began_s,
            server_type="quire",
            data_parallel_size=1,
            block_size=limits.block_size,
            model_dtype=limits.dtype,
            max_num_seqs=reading.load.max_running,
        )

    async def get_loads(self, raw: bytes, call: Call) -> Message:
        """The cell's load, as at `/v1/loads`. Raises Unavailable without a scheduler."""
        if rank := parse(pb.GetLoadsRequest, raw).dp_rank:
            raise InvalidArgument.field("dp_rank", f"is {rank}; a cell is one load, of rank 0")
        reading = await self._parts.cell.read()
        block_size = self._parts.catalog.get("").limits.block_size
        load = pb.SchedulerLoad(**scheduler_load(reading, block_size))
        return pb.GetLoadsResponse(**about(reading), loads=[load])

    async def get_tokenizer(self, raw: bytes, call: Call) -> AsyncIterator[Message]:
        """The tokenizer's files."""
        model = self._parts.catalog.get("")
        bundle = worker_pb2.ModelBundle.FromString(await self._parts.fetch_bundle(model.limits.bundle_digest))
        archive = tokenizer_archive(bundle)
        digest = hashlib.sha256(archive).hexdigest()
        for start in range(0, len(archive), CHUNK_BYTES):
            is_last = start + CHUNK_BYTES >= len(archive)
            data = archive[start : start + CHUNK_BYTES]
            yield smg_common_pb2.GetTokenizerChunk(data=data, sha256=digest if is_last else "")

    async def subscribe_kv_events(self, raw: bytes, call: Call) -> AsyncIterator[Message]:
        """Which KV blocks are stored, until the scheduler stops. Raises FailedPrecondition if it does not keep track."""
        batches = KvBatches(max(1, parse(smg_common_pb2.SubscribeKvEventsRequest, raw).start_sequence_number))
        async with contextlib.aclosing(self._parts.kv_events()) as changes:
            async for change in changes:
                yield batches.batch(change)

    # --- around each call --------------------------------------------------------------------------------------------

    async def _answer(self, name: str, method: _Unary, raw: bytes, context: _Context) -> Message:
        async with rpc.errors_to_status(context):
            with self._open(name, context) as opened:
                call = opened.accept(self._intake, context, stream=False)
                async with until_left_unread(call):
                    return await method(raw, call)
        raise AssertionError("an error ends the call")

    async def _stream(self, name: str, method: _Streaming, raw: bytes, context: _Context) -> None:
        async with rpc.errors_to_status(context):
            with self._open(name, context) as opened:
                call = opened.accept(self._intake, context, stream=True)
                limit = contextlib.nullcontext() if name in _UNENDING else until_left_unread(call)
                async with limit, contextlib.aclosing(method(raw, call)) as messages:
                    has_begun = False
                    async for message in messages:
                        if not has_begun:
                            await context.send_initial_metadata(initial_metadata(call.request_id, call.span))
                            has_begun = True
                        await context.write(message)

    def _open(self, name: str, context: _Context) -> OpenCall:
        return OpenCall(name, self._spans.grpc(f"{SERVICE_NAME}/{name}", metadata_of(context)), self._metrics)


def _named(call: Call, request_id: str) -> Call:
    """`call` under the id in the message, by which Abort names it."""
    return replace(call, request_id=accept_request_id(request_id, "request_id"), is_named=True) if request_id else call


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()
