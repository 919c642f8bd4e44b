"""VllmEngine: the service."""

import contextlib
import hashlib
import json
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import grpc
from google.protobuf.message import Message

from gateway_svc.calls import Call
from gateway_svc.cell.kv_formats import KvBatches
from gateway_svc.cell.load_routes import about, scheduler_load
from gateway_svc.checks.validation import parse
from gateway_svc.engine_calls import EngineCalls, EngineParts, StreamingMethod, UnaryMethod, named
from gateway_svc.smg.engine_answers import EngineAnswer
from gateway_svc.smg.engine_requests import embed_request, generate_request
from gateway_svc.smg.tokenizer_archive import tokenizer_archive
from protos.routers.v1 import smg_common_pb2
from protos.routers.v1 import vllm_engine_pb2 as pb
from protos.worker.v1 import worker_pb2
from svc_common.errors import InvalidArgument

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name
CHUNK_BYTES = 64 * 1024


class VllmEngineService:
    """Methods of one gateway."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._began_s = time.monotonic()

    def handler(self, calls: EngineCalls) -> "grpc.GenericRpcHandler[Any, Any]":
        """Return the handler for `server.add_generic_rpc_handlers`."""
        unary: dict[str, UnaryMethod] = {
            "Embed": self.embed,
            "HealthCheck": self.health_check,
            "Abort": self.abort,
            "GetModelInfo": self.get_model_info,
            "GetServerInfo": self.get_server_info,
            "GetLoads": self.get_loads,
        }
        streaming: dict[str, StreamingMethod] = {
            "Generate": self.generate,
            "GetTokenizer": self.get_tokenizer,
            "SubscribeKvEvents": self.subscribe_kv_events,
        }
        return calls.handler(unary, streaming)

    # --- requests ----------------------------------------------------------------------------------------------------

    async def generate(self, raw: bytes, call: Call) -> AsyncGenerator[Message, None]:
        """Generate; the stream's end cancels the request."""
        request = parse(pb.GenerateRequest, raw)
        call = replace(named(call, request.request_id), stream=request.stream)
        async with self._parts.generator.generate(call, generate_request(request)) as generation:
            answer = EngineAnswer(generation.prompt_token_ids, generation.num_choices, stream=request.stream)
            async for events in generation:
                for message in answer.take(events):
                    yield message

    async def embed(self, raw: bytes, call: Call) -> Message:
        """Embed a prompt."""
        request = parse(pb.EmbedRequest, raw)
        answer = await self._parts.embedder.embed(named(call, request.request_id), embed_request(request))
        [vector] = answer.embeddings
        return pb.EmbedResponse(
            embedding=vector.values, prompt_tokens=vector.prompt_tokens, embedding_dim=len(vector.values)
        )

    async def abort(self, raw: bytes, call: Call) -> Message:
        """Cancel by id, here or at another gateway."""
        for request_id in parse(pb.AbortRequest, raw).request_ids:
            self._parts.abort(call.caller.tenant, request_id)
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

    async def get_tokenizer(self, raw: bytes, call: Call) -> AsyncGenerator[Message, None]:
        """The tokenizer's files."""
        model = self._parts.catalog.get("")
        bundle = worker_pb2.ModelBundle.FromString(await self._parts.fetch_bundle(model.limits.bundle_digest))
        archive = tokenizer_archive(bundle)
        digest = hashlib.sha256(archive).hexdigest()
        for start in range(0, len(archive), CHUNK_BYTES):
            is_last = start + CHUNK_BYTES >= len(archive)
            data = archive[start : start + CHUNK_BYTES]
            yield smg_common_pb2.GetTokenizerChunk(data=data, sha256=digest if is_last else "")

    async def subscribe_kv_events(self, raw: bytes, call: Call) -> AsyncGenerator[Message, None]:
        """Which KV blocks are stored, until the scheduler stops. Raises FailedPrecondition if it does not keep track."""
        batches = KvBatches(max(1, parse(smg_common_pb2.SubscribeKvEventsRequest, raw).start_sequence_number))
        async with contextlib.aclosing(self._parts.kv_events()) as changes:
            async for change in changes:
                yield batches.batch(change)
