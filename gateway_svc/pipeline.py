"""The generation pipeline behind both doors: validate, template, tokenise, submit; then events come from `Generation`."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from gateway_svc.calls import Call
from gateway_svc.checks import validation
from gateway_svc.checks.validation import AnyRequest, ResolvedRequest
from gateway_svc.generation import Generation
from gateway_svc.model_catalog import ModelCatalog, ServedModel
from gateway_svc.scheduler_link import SchedulerLink
from gateway_svc.spans import GenerationSpan
from gateway_svc.text.bundle import TextModel
from gateway_svc.text.text_stream import TextStream
from protos.common.v1 import common_pb2
from protos.inference.v1 import inference_pb2
from svc_common.clock import NS_PER_S, monotonic_ns
from svc_common.errors import DeadlineExceeded
from svc_common.telemetry import Telemetry

# Above this much text, tokenising takes more than about a millisecond: done on a thread, the loop goes on.
INLINE_TEXT_CHARS = 4_096

A = TypeVar("A")
R = TypeVar("R")


class Pipeline:
    """Starts generations; one per process, shared by all doors."""

    def __init__(self, link: SchedulerLink, catalog: ModelCatalog, telemetry: Telemetry) -> None:
        self._link = link
        self._catalog = catalog
        self._telemetry = telemetry

    @contextlib.asynccontextmanager
    async def generate(self, call: Call, request: AnyRequest) -> AsyncIterator[Generation]:
        """A generation while the context lasts; leaving it early cancels the request at the scheduler at once.

        Raises the typed errors of api.md for requests that cannot be accepted.
        """
        model = await wait_for_model(self._catalog, call, request.model)
        operation = "chat" if isinstance(request, inference_pb2.ChatRequest) else "text_completion"
        span = GenerationSpan(self._telemetry, call.span, operation, model.name, call.request_id)
        try:
            resolved = await resolve(request, model)
            span.set_request(resolved, stream=call.stream)
            async with self._submitted(call, resolved, model, span) as generation:
                yield generation
                if generation.usage is not None:
                    span.set_result(model.name, _reasons(generation), generation.usage)
        except BaseException as error:
            span.fail(error)
            raise
        finally:
            span.end()

    @contextlib.asynccontextmanager
    async def _submitted(
        self, call: Call, resolved: ResolvedRequest, model: ServedModel, span: GenerationSpan
    ) -> AsyncIterator[Generation]:
        arrival_ns = monotonic_ns()
        submit = resolved.submit(call.request_id, model.adapter, call.caller.tenant)
        submit.trace.CopyFrom(span.context)
        engine_request = self._link.submit(submit, call.deadline_ns)
        try:
            yield Generation(
                engine_request,
                self._link.requests,
                [
                    TextStream(model.text, resolved.stop_strings, min_tokens=resolved.stop.min_tokens)
                    for _ in range(resolved.num_choices)
                ],
                inference_pb2.Started(
                    request_id=call.request_id,
                    effective_seed=resolved.sampling.seed,
                    model=model.name,
                    max_tokens=resolved.stop.max_tokens,
                ),
                on_first_output=lambda: span.first_output((monotonic_ns() - arrival_ns) / NS_PER_S),
            )
        finally:
            self._link.requests.release(engine_request)

    # --- text alone --------------------------------------------------------------------------------------------------

    async def tokenize(self, name: str, text: str, timeout_s: float) -> list[int]:
        """Token ids of `text`."""
        model = await self._catalog.wait(name, timeout_s)
        return await off_loop_if_long(len(text), model.text.encode, text)

    async def detokenize(self, name: str, token_ids: list[int], timeout_s: float) -> str:
        """Text of `token_ids`. InvalidArgument for ids outside the vocabulary."""
        model = await self._catalog.wait(name, timeout_s)
        validation.check_token_ids(token_ids, "token_ids", model.limits)
        return await off_loop_if_long(len(token_ids), model.text.decode, token_ids)


def _reasons(generation: Generation) -> list[str]:
    names = [common_pb2.FinishReason.Name(finished.reason) for finished in generation.finished]
    return [name.removeprefix("FINISH_REASON_").lower() for name in names]


async def wait_for_model(catalog: ModelCatalog, call: Call, name: str) -> ServedModel:
    """The model or adapter of that name, waiting for the first model while there is time."""
    model = await catalog.wait(name, call.remaining_s)
    if call.remaining_s <= 0:
        raise DeadlineExceeded("the deadline passed before the request was accepted", reason="EXPIRED_IN_QUEUE")
    return model


async def resolve(request: AnyRequest, model: ServedModel) -> ResolvedRequest:
    """Checks, templates and tokenises a request and applies the defaults."""
    validation.check_parameters(request, model.limits)
    token_ids = await _prompt_token_ids(request, model.text, model.limits)
    arguments = (request, token_ids, model.limits, model.defaults, model.text)
    if request.WhichOneof("structured_output") is None:
        return validation.resolve(*arguments)
    return await asyncio.to_thread(validation.resolve, *arguments)


async def _prompt_token_ids(request: AnyRequest, text_model: TextModel, limits: common_pb2.ModelLimits) -> list[int]:
    if isinstance(request, inference_pb2.ChatRequest):
        messages = [{"role": message.role, "content": message.content} for message in request.messages]
        return await asyncio.to_thread(_encode_chat, messages, text_model, limits)
    if request.WhichOneof("prompt") == "token_ids":
        return list(request.token_ids.ids)
    # Text that is too long by its bytes alone is refused before it costs anything; here and below.
    validation.check_prompt_length(text_model.least_tokens(request.text), limits)
    return await off_loop_if_long(len(request.text), text_model.encode, request.text)


def _encode_chat(messages: list[dict[str, str]], text_model: TextModel, limits: common_pb2.ModelLimits) -> list[int]:
    prompt = text_model.apply_chat_template(messages)
    validation.check_prompt_length(text_model.least_tokens(prompt), limits)
    return text_model.encode(prompt, add_special_tokens=False)


async def off_loop_if_long(size: int, call: Callable[[A], R], argument: A) -> R:
    """`call(argument)`, on a thread where `size` characters or tokens take more than about a millisecond."""
    if size <= INLINE_TEXT_CHARS:
        return call(argument)
    return await asyncio.to_thread(call, argument)
