"""The HTTP door: OpenAI's API as a thin bridge over the pipeline, and health for load balancers. An ASGI application."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from opentelemetry.trace import Span
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gateway_svc import spans
from gateway_svc.calls import Call, CallIntake
from gateway_svc.embedder import Embedder
from gateway_svc.generation import Event, Generation
from gateway_svc.model_catalog import ModelCatalog, ServedModel
from gateway_svc.openai.embeddings import EmbeddingRequest
from gateway_svc.openai.http_io import ClientGone, Reply, error_body, read_body, retry_header, until_disconnect
from gateway_svc.openai.requests import AnyOpenAiRequest, ChatCompletionRequest, CompletionRequest, parse_request
from gateway_svc.openai.responses import Answer, ChatShape, CompletionShape, Shape, model_card
from gateway_svc.pipeline import Pipeline
from svc_common import rpc, telemetry
from svc_common.clock import NS_PER_S, wall_ns
from svc_common.errors import QuireError, from_status_name
from svc_common.telemetry import Telemetry

_Respond = Callable[[bytes, Call, Reply], Awaitable[None]]
_STATUS_NAMES = {404: "NOT_FOUND", 405: "UNIMPLEMENTED"}


def openai_app(
    pipeline: Pipeline,
    embedder: Embedder,
    catalog: ModelCatalog,
    intake: CallIntake,
    tracing: Telemetry,
    not_ready_because: Callable[[], str],
) -> Starlette:
    """The application. `not_ready_because()`: empty when requests can be served, else the reason for people."""

    def post(path: str, respond: _Respond) -> Route:
        return Route(path, _Endpoint(respond, intake, tracing), methods=["POST"])

    models = _ModelRoutes(catalog)
    completions = _Generations(CompletionRequest, CompletionShape(), pipeline, catalog)
    chat = _Generations(ChatCompletionRequest, ChatShape(), pipeline, catalog)
    routes = [
        post("/v1/completions", completions.respond),
        post("/v1/chat/completions", chat.respond),
        post("/v1/embeddings", _embeddings(embedder)),
        Route("/v1/models", models.list, methods=["GET"]),
        Route("/v1/models/{name:path}", models.get, methods=["GET"]),
        Route("/health/live", _live, methods=["GET"]),
        Route("/health/ready", _ready(not_ready_because), methods=["GET"]),
    ]
    handlers = {QuireError: _quire_error, HTTPException: _http_error}
    return Starlette(routes=routes, exception_handlers=handlers)  # type: ignore[arg-type]


class _Endpoint:
    """POST of one kind of OpenAI request, as an ASGI application of its own: it must see the client leave while it waits.

    `respond(body, call, reply)` answers.
    """

    def __init__(self, respond: _Respond, intake: CallIntake, tracing: Telemetry) -> None:
        self._respond = respond
        self._intake = intake
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers, or reports the error; when the client leaves, everything of the request ends at once."""
        headers, reply = _headers(scope), Reply(send)
        name = f"POST {scope['path']}"
        attributes = {"http.request.method": "POST", "url.path": scope["path"], "http.route": scope["path"]}
        span = spans.start_server_span(self._tracing, name, headers, attributes)
        try:
            call = self._call(headers, span, reply)
            body = await read_body(receive)
            await until_disconnect(receive, self._respond(body, call, reply))
        except ClientGone as error:
            spans.set_error(span, error)
        except Exception as error:
            known = error if isinstance(error, QuireError) else rpc.hide(error)
            spans.set_error(span, known)
            await reply.error(known)
        finally:
            span.set_attribute("http.response.status_code", reply.status)
            span.end()

    def _call(self, headers: Mapping[str, str], span: Span, reply: Reply) -> Call:
        call = self._intake.accept(headers, None, span, stream=False)
        reply.headers["x-request-id"] = call.request_id
        if trace_id := telemetry.trace_id(span):
            reply.headers["x-trace-id"] = trace_id
        return call


class _Generations:
    """Answers completions and chat: `cls` says what was sent, `shape` how to answer."""

    def __init__(self, cls: type[AnyOpenAiRequest], shape: Shape, pipeline: Pipeline, catalog: ModelCatalog) -> None:
        self._cls = cls
        self._shape = shape
        self._pipeline = pipeline
        self._catalog = catalog

    async def respond(self, body: bytes, call: Call, reply: Reply) -> None:
        """One generation for each prompt, in one answer."""
        request, messages = parse_request(self._cls, body)
        call = replace(call, stream=bool(request.stream))
        async with contextlib.AsyncExitStack() as stack:
            generations = [
                await stack.enter_async_context(self._pipeline.generate(_part(call, i, len(messages)), message))
                for i, message in enumerate(messages)
            ]
            model = self._catalog.get(request.model)
            answer = Answer(
                self._shape,
                call.request_id,
                generations[0].started.model,
                model.text,
                wall_ns() // NS_PER_S,
                num_prompts=len(generations),
                num_choices=generations[0].num_choices,
            )
            if request.stream:
                await _stream(generations, answer, reply, include_usage=request.include_usage)
            else:
                async with contextlib.aclosing(merged(generations)) as events_of:
                    async for index, events in events_of:
                        answer.add(index, events)
                await reply.json(answer.whole())


def _embeddings(embedder: Embedder) -> _Respond:
    async def respond(body: bytes, call: Call, reply: Reply) -> None:
        """Vectors of all inputs."""
        request = EmbeddingRequest.parse(body)
        await reply.json(request.answer(await embedder.embed(call, request.message())))

    return respond


def _part(call: Call, index: int, num_parts: int) -> Call:
    """The call of one of several prompts: ids must differ."""
    return call if num_parts == 1 else replace(call, request_id=f"{call.request_id}-{index}")


async def _stream(generations: Sequence[Generation], answer: Answer, reply: Reply, *, include_usage: bool) -> None:
    """At most one part in flight: what comes while it is being sent is in the next one."""
    async with contextlib.aclosing(merged(generations)) as events_of:
        async for index, events in events_of:
            if chunks := answer.chunks(index, events):
                await reply.events(chunks)
    if include_usage:
        await reply.events([answer.usage_chunk()])
    await reply.end_events()


async def merged(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, list[Event]], None]:
    """Events of all generations as they come, each list with its generation's index. To be closed by the caller."""
    waiting = {asyncio.ensure_future(anext(generation, None)): i for i, generation in enumerate(generations)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting.keys(), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index, events = waiting.pop(task), task.result()
                if events is not None:
                    yield index, events
                    waiting[asyncio.ensure_future(anext(generations[index], None))] = index
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def _headers(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


# --- the small routes ------------------------------------------------------------------------------------------------


class _ModelRoutes:
    """/v1/models."""

    def __init__(self, catalog: ModelCatalog) -> None:
        self._catalog = catalog
        self._created_s = wall_ns() // NS_PER_S

    async def list(self, request: Request) -> Response:
        """The models and adapters served now; none before the first is loaded."""
        return JSONResponse({"object": "list", "data": [self._card(model) for model in self._catalog.served]})

    async def get(self, request: Request) -> Response:
        """One model."""
        return JSONResponse(self._card(self._catalog.get(request.path_params["name"])))

    def _card(self, model: ServedModel) -> Mapping[str, Any]:
        return model_card(model.name, model.limits.max_model_len, self._created_s, model.base_model)


async def _live(request: Request) -> Response:
    """The process answers."""
    return JSONResponse({"status": "live"})


def _ready(not_ready_because: Callable[[], str]) -> Callable[[Request], object]:
    async def ready(request: Request) -> Response:
        """Requests can be served."""
        reason = not_ready_because()
        if reason:
            return JSONResponse({"status": "not ready", "reason": reason}, status_code=503)
        return JSONResponse({"status": "ready"})

    return ready


async def _quire_error(request: Request, error: QuireError) -> Response:
    return JSONResponse(error_body(error), status_code=error.http_status, headers=retry_header(error))


async def _http_error(request: Request, error: HTTPException) -> Response:
    """What Starlette itself refuses: unknown paths and methods."""
    known = from_status_name(_STATUS_NAMES.get(error.status_code, "INVALID_ARGUMENT"))
    message = f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse(error_body(known(message)), status_code=error.status_code, headers=error.headers)
