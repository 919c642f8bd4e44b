"""Embeddings for both APIs: validate, tokenise, submit all inputs at once, gather the vectors in order."""

from gateway_svc.calls import Call, Permit
from gateway_svc.checks import validation
from gateway_svc.checks.validation import ResolvedRequest
from gateway_svc.generating.cell_model import ServedModel
from gateway_svc.generating.generation import timing_of
from gateway_svc.generating.generator import off_loop_if_long, wait_for_model
from gateway_svc.generating.model_catalog import ModelCatalog
from gateway_svc.generating.vectors import as_asked
from gateway_svc.metrics import GatewayMetrics
from gateway_svc.requests.engine_request import EngineRequest
from gateway_svc.spans import CallSpans, GenerationSpan
from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2
from protos.inference.v1 import inference_pb2 as pb
from svc_common import wire_arrays
from svc_common.errors import Cancelled, Internal, InvalidArgument
from svc_common.observability import trace_names as names


class Embedder:
    """Answers embedding requests; one per process, shared by both APIs."""

    def __init__(self, catalog: ModelCatalog, spans: CallSpans, metrics: GatewayMetrics) -> None:
        self._catalog = catalog
        self._spans = spans
        self._metrics = metrics

    async def embed(self, call: Call, request: pb.EmbedRequest) -> pb.EmbedResponse:
        """Return the vectors of all inputs, in order.

        Raises the error of the first input that fails, after releasing the others.
        """
        call.span.add_event(names.PARSED)
        room = self._catalog.cell(request.model).link.admission.admitted(
            call.caller.tenant, request.ByteSize(), is_known=call.idempotent
        )
        call.goals.put_priority(request.scheduling)
        permitted = call.caller.terms.permit(request.scheduling.priority)
        metered = self._metrics.request("embeddings", stream=False, span=call.span)
        with metered as meter, permitted as permit, room:
            model = await wait_for_model(self._catalog, call, request.model)
            meter.model = model.name
            response = await self._traced(call, request, model, permit)
            meter.usage = response.usage
            return response

    async def _traced(
        self, call: Call, request: pb.EmbedRequest, model: ServedModel, permit: Permit
    ) -> pb.EmbedResponse:
        with self._spans.generation(call.span, "embeddings", model.name, call.request_id) as span:
            with span.preparing():
                validation.check_embed(request, model.limits)
                resolved = [await _resolve(request, i, model) for i in range(len(request.inputs))]
            return await self._answer(call, request, resolved, model, span, permit)

    async def _answer(
        self,
        call: Call,
        request: pb.EmbedRequest,
        resolved: list[ResolvedRequest],
        model: ServedModel,
        span: GenerationSpan,
        permit: Permit,
    ) -> pb.EmbedResponse:
        normalize = request.normalize if request.HasField("normalize") else True
        response = pb.EmbedResponse(model=model.name)
        running: list[EngineRequest] = []
        try:
            for i, one in enumerate(resolved):
                request_id = call.request_id if len(resolved) == 1 else f"{call.request_id}-{i}"
                submit = one.submit(request_id, model.adapter, call.caller.tenant)
                permit.charge(submit)
                submit.trace.CopyFrom(span.context)
                submit.resumable = call.idempotent
                running.append(model.cell.link.submit(submit, call.deadline_of(1), spans=span.submission()))
            for engine_request in running:
                values, account = await _vector(engine_request)
                _add(response, as_asked(values, normalize=normalize), engine_request, account)
        finally:
            for engine_request in running:
                permit.settle(engine_request)
                model.cell.link.requests.release(engine_request)
        return response


async def _resolve(request: pb.EmbedRequest, index: int, model: ServedModel) -> ResolvedRequest:
    item = request.inputs[index]
    token_ids = list(item.token_ids.ids)
    if item.WhichOneof("input") == "text":
        validation.check_prompt_length(model.text.least_tokens(item.text), model.limits)
        token_ids = await off_loop_if_long(len(item.text), model.text.encode, item.text)
    if not token_ids:
        raise InvalidArgument.field(f"inputs[{index}]", "has no tokens; send at least one")
    return validation.resolve_embed(request, token_ids, model.limits)


async def _vector(request: EngineRequest) -> tuple[wire_arrays.Array, engine_pb2.RequestAccount]:
    values: wire_arrays.Array | None = None
    while True:
        update = await request.next()
        if update is None:
            continue
        if update.embedding is not None:
            values = wire_arrays.unpack(update.embedding.values, "embedding.values", wire_arrays.F32)
        if any(c.finished and c.finished.reason == common_pb2.FINISH_REASON_CANCELLED for c in update.choices.values()):
            raise Cancelled("the request was cancelled", reason="CANCELLED")
        if update.account is not None:
            break
    if values is None or not len(values):
        raise Internal("the scheduler ended the request without a vector", reason="BAD_FINISH")
    return values, update.account


def _add(
    response: pb.EmbedResponse, values: wire_arrays.Array, request: EngineRequest, account: engine_pb2.RequestAccount
) -> None:
    prompt_tokens = account.prompt_tokens or request.num_prompt_tokens
    response.embeddings.add(values=values.tolist(), prompt_tokens=prompt_tokens)
    usage, timing = response.usage, timing_of(account)
    usage.prompt_tokens += prompt_tokens
    usage.cached_prompt_tokens += account.cached_prompt_tokens
    usage.timing.queue_ms = max(usage.timing.queue_ms, timing.queue_ms)
    usage.timing.prefill_ms = max(usage.timing.prefill_ms, timing.prefill_ms)
    usage.timing.num_preemptions += timing.num_preemptions
    usage.timing.num_migrations += timing.num_migrations
