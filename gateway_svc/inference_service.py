"""InferenceService: the gRPC API.

Methods take raw bytes and parse them inside, so that malformed protobuf and invalid UTF-8 become
INVALID_ARGUMENT and not the transport's UNKNOWN. Events are written with `context.write`: a dropped stream
ends the handler where it waits, and leaving the generator's context cancels the request within the same turn
of the event loop.
"""

import functools
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from gateway_svc.calls import Call, CallIntake
from gateway_svc.checks.validation import AnyRequest, parse
from gateway_svc.generating.cell_model import ServedModel
from gateway_svc.generating.embedder import Embedder
from gateway_svc.generating.generation import Event, Generation, collect
from gateway_svc.generating.generator import Generator
from gateway_svc.generating.model_catalog import ModelCatalog
from gateway_svc.generating.request_scope import Running
from gateway_svc.grpc_calls import OpenCall, initial_metadata, metadata_of
from gateway_svc.metrics import GatewayMetrics
from gateway_svc.spans import CallSpans
from gateway_svc.stalled_clients import until_left_unread
from protos.inference.v1 import inference_pb2 as pb
from svc_common.errors import Cancelled, InvalidArgument, QuireError
from svc_common.net import rpc

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name

_EVENT_FIELDS: dict[type[Event], str] = {
    pb.Started: "started",
    pb.Delta: "delta",
    pb.ReasoningDelta: "reasoning_delta",
    pb.ToolCallDelta: "tool_call_delta",
    pb.Finished: "finished",
    pb.Usage: "usage",
    pb.PromptLogprobs: "prompt_logprobs",
}

_Context = grpc.aio.ServicerContext[Any, Any]
_Unary = Callable[[bytes, Call, _Context], Awaitable[Message]]
_Streaming = Callable[[bytes, Call], Running[Generation]]


class InferenceService:
    """Handlers of one gateway.

    `cancel(tenant, request_id, error)` ends a request by id, at whichever gateway it runs.
    """

    def __init__(
        self,
        generator: Generator,
        embedder: Embedder,
        catalog: ModelCatalog,
        cancel: Callable[[str, str, QuireError], None],
        intake: CallIntake,
        call_spans: CallSpans,
        metrics: GatewayMetrics,
    ) -> None:
        self._generator = generator
        self._embedder = embedder
        self._catalog = catalog
        self._cancel = cancel
        self._intake = intake
        self._spans = call_spans
        self._metrics = metrics

    def handler(self) -> "grpc.GenericRpcHandler[Any, Any]":
        """Return the handler for `server.add_generic_rpc_handlers`."""
        unary: dict[str, _Unary] = {
            "Generate": functools.partial(self._answer, pb.GenerateRequest),
            "Chat": functools.partial(self._answer, pb.ChatRequest),
            "Embed": self.embed,
            "Cancel": self.cancel,
            "Tokenize": self.tokenize,
            "Detokenize": self.detokenize,
            "CountTokens": self.count_tokens,
            "ListModels": self.list_models,
            "GetModel": self.get_model,
        }
        streaming: dict[str, _Streaming] = {
            "GenerateStream": functools.partial(self._stream, pb.GenerateRequest),
            "ChatStream": functools.partial(self._stream, pb.ChatRequest),
            "Resume": self.resume,
        }
        handlers = {name: self._unary_handler(name, method) for name, method in unary.items()}
        handlers |= {name: self._stream_handler(name, method) for name, method in streaming.items()}
        return grpc.method_handlers_generic_handler(SERVICE_NAME, handlers)

    # --- generation --------------------------------------------------------------------------------------------------

    # Requests are parsed in the argument, so that the parsed message is not kept while the answer is
    # generated.

    async def _answer(self, cls: type[AnyRequest], raw: bytes, call: Call, context: _Context) -> Message:
        async with self._generator.generate(call, parse(cls, raw)) as generation:
            response = await collect(generation)
            _set_trailers(context, response.usage.timing, generation.worker_id)
        return response

    def _stream(self, cls: type[AnyRequest], raw: bytes, call: Call) -> Running[Generation]:
        return self._generator.generate(call, parse(cls, raw))

    def resume(self, raw: bytes, call: Call) -> Running[Generation]:
        """Resume a request: return the output that the caller does not have."""
        request = parse(pb.ResumeRequest, raw)
        if not request.request_id:
            raise InvalidArgument.field("request_id", "is missing; use the id from Started or x-request-id")
        return self._generator.resume(call, request)

    async def embed(self, raw: bytes, call: Call, context: _Context) -> Message:
        """Embed prompts."""
        response = await self._embedder.embed(call, parse(pb.EmbedRequest, raw))
        _set_trailers(context, response.usage.timing)
        return response

    async def cancel(self, raw: bytes, call: Call, context: _Context) -> Message:
        """Cancel by id, here or elsewhere; an unknown id is no error."""
        request = parse(pb.CancelRequest, raw)
        if not request.request_id:
            raise InvalidArgument.field("request_id", "is missing; use the id from Started or x-request-id")
        error = Cancelled("the request was cancelled by its id", reason="CANCELLED")
        self._cancel(call.caller.tenant, request.request_id, error)
        return pb.CancelResponse()

    # --- text and models ---------------------------------------------------------------------------------------------

    async def tokenize(self, raw: bytes, call: Call, context: _Context) -> Message:
        """Convert text to token ids."""
        request = parse(pb.TokenizeRequest, raw)
        return pb.TokenizeResponse(token_ids=await self._generator.tokenize(call, request.model, request.text))

    async def detokenize(self, raw: bytes, call: Call, context: _Context) -> Message:
        """Convert token ids to text."""
        request = parse(pb.DetokenizeRequest, raw)
        text = await self._generator.detokenize(call, request.model, list(request.token_ids))
        return pb.DetokenizeResponse(text=text)

    async def count_tokens(self, raw: bytes, call: Call, context: _Context) -> Message:
        """Count the tokens of a request's prompt, after the chat template."""
        asked = parse(pb.CountTokensRequest, raw)
        kind = asked.WhichOneof("request")
        if kind is None:
            raise InvalidArgument.field(
                "request", "is missing; set generate or chat to the request as you would send it"
            )
        prompt_tokens, max_output_tokens = await self._generator.count_tokens(call, getattr(asked, kind))
        return pb.CountTokensResponse(prompt_tokens=prompt_tokens, max_output_tokens=max_output_tokens)

    async def list_models(self, raw: bytes, call: Call, context: _Context) -> Message:
        """List the models and adapters served now; empty before the first is loaded."""
        parse(pb.ListModelsRequest, raw)
        theirs = [model for model in self._catalog.served if call.caller.terms.may_use(model.name)]
        return pb.ListModelsResponse(models=[_public_model(model) for model in theirs])

    async def get_model(self, raw: bytes, call: Call, context: _Context) -> Message:
        """Return one model with limits and defaults."""
        model = self._catalog.get(parse(pb.GetModelRequest, raw).model)
        call.caller.terms.check_model(model.name)
        return _public_model(model)

    # --- around each call --------------------------------------------------------------------------------------------

    def _unary_handler(self, name: str, method: _Unary) -> "grpc.RpcMethodHandler[Any, Any]":
        async def handle(raw: bytes, context: _Context) -> Message:
            async with rpc.errors_to_status(context):
                with self._open(name, context) as opened:
                    call = opened.accept(self._intake, context, stream=False)
                    async with until_left_unread(call):
                        answer = await method(raw, call, context)
                        await context.send_initial_metadata(initial_metadata(call.request_id, call.span))
                        return answer

        return grpc.unary_unary_rpc_method_handler(handle, response_serializer=_serialize)

    def _stream_handler(self, name: str, method: _Streaming) -> "grpc.RpcMethodHandler[Any, Any]":
        async def handle(raw: bytes, context: _Context) -> None:
            async with rpc.errors_to_status(context):
                with self._open(name, context) as opened:
                    call = opened.accept(self._intake, context, stream=True)
                    async with until_left_unread(call), method(raw, call) as generation:
                        await _write_events(generation, call, context)

        return grpc.unary_stream_rpc_method_handler(handle, response_serializer=pb.GenerateEvent.SerializeToString)

    def _open(self, name: str, context: _Context) -> OpenCall:
        span = self._spans.grpc(f"{SERVICE_NAME}/{name}", metadata_of(context))
        return OpenCall(name, span, self._metrics)


async def _write_events(generation: Generation, call: Call, context: _Context) -> None:
    """Write the events, at most one message in flight; output that arrives during a write goes into the next message."""
    sequence = 0
    async for events in generation:
        if sequence == 0:
            # Not earlier: once headers are sent, the client can no longer retry a refusal by itself.
            await context.send_initial_metadata(initial_metadata(generation.request_id, call.span))
        for event in events:
            await context.write(_public_event(sequence, event))
            sequence += 1
        del events, event  # not kept while the next are awaited
    assert generation.usage is not None
    _set_trailers(context, generation.usage.timing, generation.worker_id)


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


def _set_trailers(context: _Context, timing: pb.Timing, worker_id: str = "") -> None:
    """Set timing trailers, for callers that log it without reading Usage.

    `worker_id`: the worker that ran the request, if any.
    """
    trailers = {
        "x-queue-ms": f"{timing.queue_ms:.3f}",
        "x-preemptions": str(timing.num_preemptions),
        "x-migrations": str(timing.num_migrations),
        "x-worker-id": worker_id,
    }
    context.set_trailing_metadata(tuple((key, value) for key, value in trailers.items() if value))


def _public_event(sequence: int, event: Event) -> pb.GenerateEvent:
    message = pb.GenerateEvent(sequence=sequence)
    getattr(message, _EVENT_FIELDS[type(event)]).CopyFrom(event)
    return message


def _public_model(model: ServedModel) -> pb.Model:
    limits, defaults = model.limits, model.defaults
    return pb.Model(
        name=model.name,
        max_model_len=limits.max_model_len,
        vocab_size=limits.vocab_size,
        block_size=limits.block_size,
        chat=model.text.has_chat_template,
        default_sampling=pb.SamplingParams(
            temperature=defaults.temperature,
            top_p=defaults.top_p,
            top_k=defaults.top_k,
            min_p=defaults.min_p,
            repetition_penalty=defaults.repetition_penalty,
            n=1,
        ),
        model_digest=limits.model_digest,
        base_model=model.base_model,
    )
