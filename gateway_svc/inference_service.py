"""The gRPC door: InferenceService over the pipeline.

Methods take raw bytes and parse them inside, so that malformed protobuf and text that is not UTF-8 are INVALID_ARGUMENT and not the
transport's UNKNOWN (operations.md 1.2). Events are written with `context.write`: a dropped stream ends the handler where it waits,
and leaving the pipeline's context cancels the request within the same turn of the loop.
"""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from gateway_svc import spans
from gateway_svc.calls import Call, CallIntake
from gateway_svc.checks.validation import AnyRequest, parse
from gateway_svc.embedder import Embedder
from gateway_svc.generation import Event, Generation, collect
from gateway_svc.model_catalog import ModelCatalog, ServedModel
from gateway_svc.pipeline import Pipeline
from protos.inference.v1 import inference_pb2 as pb
from svc_common import rpc, telemetry
from svc_common.errors import Cancelled, InvalidArgument, QuireError
from svc_common.telemetry import Telemetry

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name

_EVENT_FIELDS: dict[type[Event], str] = {
    pb.Started: "started",
    pb.Delta: "delta",
    pb.Finished: "finished",
    pb.Usage: "usage",
    pb.PromptLogprobs: "prompt_logprobs",
}

_Context = grpc.aio.ServicerContext
_Unary = Callable[[bytes, Call, _Context], Awaitable[Message]]
_Streaming = Callable[[bytes, Call, _Context], Awaitable[None]]


class InferenceService:
    """Handlers of one gateway; `cancel(tenant, request_id, error)` ends a request by id, whoever runs it."""

    def __init__(
        self,
        pipeline: Pipeline,
        embedder: Embedder,
        catalog: ModelCatalog,
        cancel: Callable[[str, str, QuireError], None],
        intake: CallIntake,
        tracing: Telemetry,
    ) -> None:
        self._pipeline = pipeline
        self._embedder = embedder
        self._catalog = catalog
        self._cancel = cancel
        self._intake = intake
        self._tracing = tracing

    def handler(self) -> grpc.GenericRpcHandler:
        """For `server.add_generic_rpc_handlers`."""
        unary: dict[str, _Unary] = {
            "Generate": self.generate,
            "Chat": self.chat,
            "Embed": self.embed,
            "Cancel": self.cancel,
            "Tokenize": self.tokenize,
            "Detokenize": self.detokenize,
            "ListModels": self.list_models,
            "GetModel": self.get_model,
        }
        streaming: dict[str, _Streaming] = {"GenerateStream": self.generate_stream, "ChatStream": self.chat_stream}
        handlers = {name: self._unary_handler(name, method) for name, method in unary.items()}
        handlers |= {name: self._stream_handler(name, method) for name, method in streaming.items()}
        return grpc.method_handlers_generic_handler(SERVICE_NAME, handlers)

    # --- generation --------------------------------------------------------------------------------------------------

    async def generate(self, raw: bytes, call: Call, context: _Context) -> Message:
        """Completes a prompt and answers once."""
        return await self._answer(parse(pb.GenerateRequest, raw), call, context)

    async def chat(self, raw: bytes, call: Call, context: _Context) -> Message:
        """Answers a conversation once."""
        return await self._answer(parse(pb.ChatRequest, raw), call, context)

    async def generate_stream(self, raw: bytes, call: Call, context: _Context) -> None:
        """Completes a prompt, streaming."""
        await self._stream(parse(pb.GenerateRequest, raw), call, context)

    async def chat_stream(self, raw: bytes, call: Call, context: _Context) -> None:
        """Answers a conversation, streaming."""
        await self._stream(parse(pb.ChatRequest, raw), call, context)

    async def _answer(self, request: AnyRequest, call: Call, context: _Context) -> Message:
        async with self._pipeline.generate(call, request) as generation:
            response = await collect(generation)
            _set_trailers(context, _timing(generation))
        return response

    async def _stream(self, request: AnyRequest, call: Call, context: _Context) -> None:
        """At most one message in flight: what comes while it is being written is in the next one."""
        async with self._pipeline.generate(call, request) as generation:
            sequence = 0
            async for events in generation:
                if sequence == 0:
                    # Not earlier: headers end the client's right to retry a refusal by itself.
                    await context.send_initial_metadata(_initial_metadata(call))
                for event in events:
                    await context.write(_public_event(sequence, event))
                    sequence += 1
            _set_trailers(context, _timing(generation))

    async def embed(self, raw: bytes, call: Call, context: _Context) -> Message:
        """Prompts to vectors."""
        response = await self._embedder.embed(call, parse(pb.EmbedRequest, raw))
        _set_trailers(context, response.usage.timing)
        return response

    async def cancel(self, raw: bytes, call: Call, context: _Context) -> Message:
        """Cancels by id, here or elsewhere; an unknown id is no error."""
        request = parse(pb.CancelRequest, raw)
        if not request.request_id:
            raise InvalidArgument.field("request_id", "is missing; use the id from Started or x-request-id")
        error = Cancelled("the request was cancelled by its id", reason="CANCELLED")
        self._cancel(call.caller.tenant, request.request_id, error)
        return pb.CancelResponse()

    # --- text and models ---------------------------------------------------------------------------------------------

    async def tokenize(self, raw: bytes, call: Call, context: _Context) -> Message:
        """Text to token ids."""
        request = parse(pb.TokenizeRequest, raw)
        return pb.TokenizeResponse(
            token_ids=await self._pipeline.tokenize(request.model, request.text, call.remaining_s)
        )

    async def detokenize(self, raw: bytes, call: Call, context: _Context) -> Message:
        """Token ids to text."""
        request = parse(pb.DetokenizeRequest, raw)
        text = await self._pipeline.detokenize(request.model, list(request.token_ids), call.remaining_s)
        return pb.DetokenizeResponse(text=text)

    async def list_models(self, raw: bytes, call: Call, context: _Context) -> Message:
        """The models and adapters served now; none before the first is loaded."""
        parse(pb.ListModelsRequest, raw)
        return pb.ListModelsResponse(models=[_public_model(model) for model in self._catalog.served])

    async def get_model(self, raw: bytes, call: Call, context: _Context) -> Message:
        """One model with limits and defaults."""
        return _public_model(self._catalog.get(parse(pb.GetModelRequest, raw).model))

    # --- around each call --------------------------------------------------------------------------------------------

    def _unary_handler(self, name: str, method: _Unary) -> grpc.RpcMethodHandler:
        async def handle(raw: bytes, context: _Context) -> Message:
            async with self._call(name, context, stream=False) as call:
                answer = await method(raw, call, context)
                await context.send_initial_metadata(_initial_metadata(call))
                return answer
            raise AssertionError("an error ends the call")

        return grpc.unary_unary_rpc_method_handler(handle, response_serializer=_serialize)

    def _stream_handler(self, name: str, method: _Streaming) -> grpc.RpcMethodHandler:
        async def handle(raw: bytes, context: _Context) -> None:
            async with self._call(name, context, stream=True) as call:
                await method(raw, call, context)

        return grpc.unary_stream_rpc_method_handler(handle, response_serializer=_serialize)

    @contextlib.asynccontextmanager
    async def _call(self, name: str, context: _Context, *, stream: bool) -> AsyncIterator[Call]:
        """Id, deadline and span of a call; errors leave it typed, with the id in their metadata."""
        async with rpc.errors_to_status(context):
            metadata = _metadata(context)
            attributes = {"rpc.system.name": "grpc", "rpc.method": f"{SERVICE_NAME}/{name}"}
            span = spans.start_server_span(self._tracing, f"{SERVICE_NAME}/{name}", metadata, attributes)
            request_id = ""
            try:
                call = self._intake.accept(metadata, context.time_remaining(), span, stream=stream)
                request_id = call.request_id
                yield call
            except Exception as error:
                known = error if isinstance(error, QuireError) else rpc.hide(error)
                if request_id:
                    known.metadata.setdefault("request_id", request_id)
                spans.set_error(span, known)
                raise known from error
            except BaseException as error:  # the client went away
                spans.set_error(span, error)
                raise
            finally:
                span.end()


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


def _metadata(context: _Context) -> Mapping[str, str]:
    given: Any = context.invocation_metadata() or ()
    return {key: value for key, value in given if isinstance(value, str)}


def _initial_metadata(call: Call) -> tuple[tuple[str, str], ...]:
    trace_id = telemetry.trace_id(call.span)
    return (("x-request-id", call.request_id), *((("x-trace-id", trace_id),) if trace_id else ()))


def _timing(generation: Generation) -> pb.Timing:
    return generation.usage.timing if generation.usage is not None else pb.Timing()


def _set_trailers(context: _Context, timing: pb.Timing) -> None:
    context.set_trailing_metadata(
        (("x-queue-ms", f"{timing.queue_ms:.3f}"), ("x-preemptions", str(timing.num_preemptions)))
    )


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
