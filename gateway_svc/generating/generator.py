"""Start generations, for both APIs: validate, apply the chat template, tokenise, submit.

Events then come from `Generation`.
"""

import asyncio
import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from gateway_svc.calls import Call, FreePermit, Permit
from gateway_svc.chat.parsing import ChatParsing
from gateway_svc.chat.resolving import resolve_chat
from gateway_svc.chat.tool_calls.format_choice import FormatChoice
from gateway_svc.checks import validation
from gateway_svc.checks.validation import AnyRequest, ResolvedRequest
from gateway_svc.engine.request_table import RequestTable
from gateway_svc.engine.scheduler_link import SchedulerLink
from gateway_svc.generating.cell_model import CellModel, ServedModel
from gateway_svc.generating.generation import Generation
from gateway_svc.generating.model_catalog import ModelCatalog
from gateway_svc.generating.request_scope import RequestScope, Running
from gateway_svc.generating.resuming import num_delivered
from gateway_svc.metrics import GatewayMetrics
from gateway_svc.requests.engine_request import EngineRequest
from gateway_svc.spans import CallSpans, GenerationSpan
from gateway_svc.text.text_model import TextModel
from gateway_svc.text.text_stream import TextStream
from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2
from protos.inference.v1 import inference_pb2
from svc_common.errors import DeadlineExceeded, NotFound
from svc_common.observability import telemetry
from svc_common.observability import trace_names as names

# Tokenising more text than this takes over about a millisecond and is done on a thread, to keep the event
# loop free.
INLINE_TEXT_CHARS = 4_096

A = TypeVar("A")
R = TypeVar("R")


class Generator:
    """Starts generations; one per process, shared by both APIs."""

    def __init__(
        self,
        catalog: ModelCatalog,
        spans: CallSpans,
        metrics: GatewayMetrics,
        formats: FormatChoice,
    ) -> None:
        self._catalog = catalog
        self._spans = spans
        self._metrics = metrics
        self._formats = formats

    def generate(self, call: Call, request: AnyRequest) -> Running[Generation]:
        """Context manager of a generation; leaving it early cancels the request at the scheduler at once.

        Raises the typed errors of docs/errors.md for requests that cannot be accepted.
        """
        return Running(functools.partial(self._begin, call, request))

    async def _begin(self, call: Call, request: AnyRequest, scope: RequestScope) -> Generation:
        """Start a generation. Keeps nothing of `request` but what a restarted scheduler must be sent again."""
        call.span.add_event(names.PARSED)
        operation = "chat" if isinstance(request, inference_pb2.ChatRequest) else "text_completion"
        meter = scope.enter(self._metrics.request(operation, stream=call.stream, span=call.span))
        call.goals.put_priority(request.scheduling)
        permit = scope.enter(call.caller.terms.permit(request.scheduling.priority))
        # Before any other work: check for room here and, as far as is known, at the scheduler.
        admission = self._catalog.cell(request.model).link.admission
        scope.enter(admission.admitted(call.caller.tenant, request.ByteSize(), is_known=call.idempotent))
        model = await wait_for_model(self._catalog, call, request.model)
        meter.model = model.name
        span = scope.enter(self._spans.generation(call.span, operation, model.name, call.request_id))
        with span.preparing():
            resolved = await resolve(request, model, self._formats)
        span.set_request(request, resolved, stream=call.stream)
        engine_request = scope.enter(self._submitted(call, resolved, model, span, permit))
        if engine_request.submit.resumable:
            # A call may repeat an earlier one with the same id; the request is then the earlier one.
            await engine_request.accepted()
            state = engine_request.frontend_state()
            model = model.cell.get(state.model)
        else:
            state = _state_of(resolved, model)
        generation = self._generation(engine_request, state, model, on_first_output=span.first_output)
        meter.generation = span.follow(generation)
        return generation

    def _submitted(
        self, call: Call, resolved: ResolvedRequest, model: ServedModel, span: GenerationSpan, permit: Permit
    ) -> "Submitted":
        submit = resolved.submit(call.request_id, model.adapter, call.caller.tenant)
        permit.charge(submit)
        submit.trace.CopyFrom(span.context)
        submit.resumable |= call.idempotent
        if submit.resumable:
            submit.frontend_state = _state_of(resolved, model).SerializeToString()
        request = model.cell.link.submit(
            submit,
            call.deadline_of(submit.stop.max_tokens),
            returns_partial=resolved.returns_partial,
            spans=span.submission(),
        )
        return Submitted(request, model.cell.link.requests, permit)

    def resume(self, call: Call, request: inference_pb2.ResumeRequest) -> Running[Generation]:
        """Context manager that resumes a resumable request from any submitter.

        Leaving it early leaves the request detached. Yields what the caller does not have yet. Raises
        NotFound if no such request is held, InvalidArgument and OutOfRange for impossible positions.
        """
        return Running(functools.partial(self._begin_again, call, request))

    async def _begin_again(self, call: Call, request: inference_pb2.ResumeRequest, scope: RequestScope) -> Generation:
        call.span.add_event(names.PARSED)
        meter = scope.enter(self._metrics.request("resume", stream=call.stream, span=call.span))
        # The submitter's call was charged; resuming costs no tokens, only a place among the running requests.
        scope.enter(call.caller.terms.permit(0))
        cells = self._catalog.cells_for_resuming(call.caller.tenant, request.request_id)
        scope.enter(cells[0].link.admission.admitted(call.caller.tenant, request.ByteSize(), is_known=True))
        await cells[0].wait_ready(call)
        _check_time(call)
        cell, engine_request = await self._attached(call, request.request_id, cells, scope)
        state = engine_request.frontend_state()
        meter.model = state.model
        await cell.wait_ready(call)
        model = cell.get(state.model)
        delivered = num_delivered(engine_request, request.positions)
        meter.generation = self._generation(engine_request, state, model, delivered)
        return meter.generation

    async def _attached(
        self, call: Call, request_id: str, cells: Sequence[CellModel], scope: RequestScope
    ) -> tuple[CellModel, EngineRequest]:
        """The request at the scheduler that holds it; each is asked, until one does."""
        *others, last = cells
        for cell in others:
            with contextlib.suppress(NotFound):
                return cell, await self._attached_to(cell.link, call, request_id, scope)
        return last, await self._attached_to(last.link, call, request_id, scope)

    async def _attached_to(
        self, link: SchedulerLink, call: Call, request_id: str, scope: RequestScope
    ) -> EngineRequest:
        spans = self._spans.submission(call.span)
        attached = link.attach(call.caller.tenant, request_id, call.deadline_ns, spans=spans)
        request = scope.enter(Submitted(attached, link.requests, FreePermit()))
        await request.accepted()
        return request

    def _generation(
        self,
        request: EngineRequest,
        state: engine_pb2.FrontendState,
        model: ServedModel,
        delivered: Sequence[int] = (),
        *,
        on_first_output: Callable[[], None] = lambda: None,
    ) -> Generation:
        """Build the generation that turns the request's tokens into events, as `state` defines."""
        min_tokens = request.submit.stop.min_tokens
        parsing = ChatParsing.from_json(state.chat_parsing.decode()) if state.chat_parsing else None
        return Generation(
            request,
            model.cell.link.requests,
            [
                TextStream(
                    model.text,
                    state.stop_strings,
                    min_tokens=min_tokens,
                    parser=None if parsing is None else parsing.parser(choice),
                    include_stop=state.include_stop,
                    special_tokens=state.special_tokens,
                )
                for choice in range(request.num_choices)
            ],
            model,
            num_delivered=delivered,
            on_first_output=on_first_output,
        )

    async def count_tokens(self, call: Call, request: AnyRequest) -> tuple[int, int]:
        """Return the number of prompt tokens that would be submitted, and the output limit. Raises as `generate`."""
        resolved = await resolve(request, await wait_for_model(self._catalog, call, request.model), self._formats)
        return len(resolved.prompt_token_ids), resolved.stop.max_tokens

    async def prompt_token_ids(self, call: Call, request: AnyRequest) -> list[int]:
        """Return the prompt that would be submitted. Raises the errors that would refuse the request."""
        model = await wait_for_model(self._catalog, call, request.model)
        return (await resolve(request, model, self._formats)).prompt_token_ids

    # --- tokenise and detokenise -------------------------------------------------------------------------------------

    async def tokenize(self, call: Call, name: str, text: str) -> list[int]:
        """Return the token ids of `text`."""
        model = await wait_for_model(self._catalog, call, name)
        return await off_loop_if_long(len(text), model.text.encode, text)

    async def detokenize(self, call: Call, name: str, token_ids: list[int]) -> str:
        """Return the text of `token_ids`. Raises InvalidArgument for ids outside the vocabulary."""
        model = await wait_for_model(self._catalog, call, name)
        validation.check_token_ids(token_ids, "token_ids", model.limits)
        return await off_loop_if_long(len(token_ids), model.text.decode, token_ids)


@dataclass(frozen=True, slots=True)
class Submitted:
    """Context manager of a submitted or resumed request: on exit, settles its permit and releases it, once."""

    request: EngineRequest
    requests: RequestTable
    permit: Permit

    def __enter__(self) -> EngineRequest:
        return self.request

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.permit.settle(self.request)
        self.requests.release(self.request)


def _state_of(resolved: ResolvedRequest, model: ServedModel) -> engine_pb2.FrontendState:
    """How the request's tokens become events, for any reader."""
    return engine_pb2.FrontendState(
        model=model.name,
        stop_strings=resolved.stop_strings,
        partial_at_deadline=resolved.returns_partial,
        chat_parsing=b"" if resolved.parsing is None else resolved.parsing.to_json().encode(),
        include_stop=resolved.include_stop,
        special_tokens=resolved.special_tokens,
    )


async def wait_for_model(catalog: ModelCatalog, call: Call, name: str) -> ServedModel:
    """Return the model or adapter of that name, waiting for the first model while there is time.

    Raises PermissionDenied if the caller may not use it.
    """
    model = await catalog.wait(name, call)
    _check_time(call)
    call.caller.terms.check_model(model.name)
    return model


def _check_time(call: Call) -> None:
    if call.remaining_s <= 0:
        raise DeadlineExceeded("the deadline passed before the request was accepted", reason="EXPIRED_IN_QUEUE")


async def resolve(request: AnyRequest, model: ServedModel, formats: FormatChoice) -> ResolvedRequest:
    """Check, template and tokenise a request, and apply the defaults."""
    validation.check_parameters(request, model.limits)
    if isinstance(request, inference_pb2.ChatRequest):
        return await asyncio.to_thread(resolve_chat, request, model.text, model.limits, model.defaults, formats)
    token_ids = await _prompt_token_ids(request, model.text, model.limits)
    arguments = (request, token_ids, model.limits, model.defaults, model.text)
    if request.WhichOneof("structured_output") is None:
        return validation.resolve(*arguments)
    return await asyncio.to_thread(validation.resolve, *arguments)


async def _prompt_token_ids(
    request: inference_pb2.GenerateRequest, text_model: TextModel, limits: common_pb2.ModelLimits
) -> list[int]:
    if request.WhichOneof("prompt") == "token_ids":
        return validation.truncated(request, list(request.token_ids.ids), limits)
    if len(request.text) > INLINE_TEXT_CHARS:
        # Refuse text that its size alone shows to be too long, before tokenising it.
        validation.check_least_length(text_model.least_tokens(request.text), request, limits)
    token_ids = await off_loop_if_long(len(request.text), text_model.encode, request.text)
    if request.HasField("truncate_prompt_tokens"):
        token_ids = validation.truncated(request, token_ids, limits)
    telemetry.note_stage(names.TOKENIZED, {names.INPUT_TOKENS: len(token_ids)})
    return token_ids


async def off_loop_if_long(size: int, call: Callable[[A], R], argument: A) -> R:
    """Run `call(argument)`, on a thread if `size` characters or tokens would take more than about a millisecond."""
    if size <= INLINE_TEXT_CHARS:
        return call(argument)
    return await asyncio.to_thread(call, argument)
