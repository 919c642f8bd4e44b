"""ASGI application of the HTTP APIs, and health for load balancers."""

from collections.abc import Callable, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway_svc import openapi
from gateway_svc.anthropic.routes import MessageRoutes, ModelCards
from gateway_svc.calls import Call, CallIntake
from gateway_svc.cell.exposition import Exposition
from gateway_svc.cell.load_routes import LoadRoutes
from gateway_svc.engine.stored_values import StoredValues
from gateway_svc.generating.embedder import Embedder
from gateway_svc.generating.generator import Generator
from gateway_svc.generating.model_catalog import ModelCatalog
from gateway_svc.http.dialect import VERSION_HEADER
from gateway_svc.http.endpoint import Doorman, HttpRequest, Respond, named
from gateway_svc.http.io import Reply
from gateway_svc.http.json_body import json_object
from gateway_svc.http.public_routes import RequestIds, http_error, known_error, public_routes
from gateway_svc.metrics import GatewayMetrics
from gateway_svc.openai.answers.shapes import ChatShape, CompletionShape
from gateway_svc.openai.embeddings import EmbeddingRequest
from gateway_svc.openai.generations import Generations
from gateway_svc.openai.models import Models
from gateway_svc.openai.requests.chat_request import ChatCompletionRequest
from gateway_svc.openai.requests.completion_request import CompletionRequest
from gateway_svc.openai.responses.background import BackgroundResponses, Cancel
from gateway_svc.openai.responses.response_dialect import RESPONSES
from gateway_svc.openai.responses.routes import Responses
from gateway_svc.openai.responses.stored_responses import ResponseStore
from gateway_svc.openai.responses.stored_routes import StoredResponseRoutes
from gateway_svc.openai.scoring.requests import PAIRS
from gateway_svc.openai.scoring.routes import ScoringRoutes
from gateway_svc.openai.scoring.scorers import Scorer
from gateway_svc.openai.tokenize_routes import TextRoutes
from gateway_svc.spans import CallSpans
from svc_common.errors import InvalidArgument, QuireError


def http_app(
    generator: Generator,
    embedder: Embedder,
    catalog: ModelCatalog,
    values: StoredValues,
    cancel: Cancel,
    intake: CallIntake,
    spans: CallSpans,
    not_ready_because: Callable[[], str],
    metrics: GatewayMetrics,
    scorer: Scorer,
    exposition: Exposition,
    loads: LoadRoutes,
    *,
    shows_tokenizer: bool,
) -> Starlette:
    """Build the application. `not_ready_because()`: empty if requests can be served, else the reason for people.

    `cancel(tenant, request_id, error)` cancels a request at any gateway.
    """
    store = ResponseStore(values)
    door, models, text = Doorman(intake, spans, metrics), Models(catalog), TextRoutes(generator, catalog)
    completions = Generations(CompletionRequest, CompletionShape(), generator, catalog)
    chat = Generations(ChatCompletionRequest, ChatShape(), generator, catalog)
    embeddings, scoring = _embeddings(embedder), ScoringRoutes(scorer, generator, embedder, catalog)
    invocations = _invocations(
        [
            (("messages",), chat.respond),
            (("prompt",), completions.respond),
            (("input",), embeddings),
            (("query", "documents"), scoring.rerank),
            *((names, scoring.score) for names in PAIRS),
        ]
    )
    background = BackgroundResponses(generator, store, cancel)
    responses, stored = Responses(generator, catalog, store, background), StoredResponseRoutes(store, background)
    messages, cards = MessageRoutes(generator), ModelCards(catalog)
    routes = [
        door.route("POST", "/v1/completions", completions.respond),
        door.route("POST", "/v1/chat/completions", chat.respond),
        door.route("POST", "/v1/responses", responses.create, RESPONSES),
        *stored.routes(door),
        door.route("POST", "/v1/messages", messages.create),
        door.route("POST", "/v1/messages/count_tokens", messages.count_tokens),
        door.route("POST", "/v1/embeddings", embeddings),
        *scoring.routes(door),
        door.route("POST", "/invocations", invocations),
        door.route("GET", "/v1/models", _by_version(models.list, cards.list)),
        door.route("GET", "/v1/models/{name:path}", _by_version(models.get, cards.get)),
        door.route("POST", "/tokenize", text.tokenize),
        door.route("POST", "/detokenize", text.detokenize),
        *([door.route("GET", "/tokenizer_info", text.tokenizer)] if shows_tokenizer else []),
        *loads.routes(door),
        *public_routes(not_ready_because),
        Route("/openapi.json", _described(), methods=["GET"]),
        Route("/metrics", _measured(exposition), methods=["GET"]),
    ]
    handlers = {QuireError: known_error, HTTPException: http_error}
    return Starlette(routes=routes, middleware=[Middleware(RequestIds)], exception_handlers=handlers)


def _embeddings(embedder: Embedder) -> Respond:
    async def respond(http: HttpRequest, call: Call, reply: Reply) -> None:
        """Answer with the vectors of all inputs."""
        request = EmbeddingRequest.parse(http.body)
        call = named(call, request.request_id, reply)
        await reply.json(request.answer(await embedder.embed(call, request.message())))

    return respond


def _by_version(openai: Respond, anthropic: Respond) -> Respond:
    async def respond(http: HttpRequest, call: Call, reply: Reply) -> None:
        """Answer in the form of the API that the request's headers name."""
        await (anthropic if VERSION_HEADER in http.headers else openai)(http, call, reply)

    return respond


def _invocations(handlers: Sequence[tuple[Sequence[str], Respond]]) -> Respond:
    """SageMaker's route, as in vLLM: the fields of the body say which handler answers."""

    async def respond(http: HttpRequest, call: Call, reply: Reply) -> None:
        """Answer as the other route does. Raises InvalidArgument for a body of none."""
        given = {name for name, value in json_object(http.body).items() if value is not None}
        for fields, handler in handlers:
            if given.issuperset(fields):
                await handler(http, call, reply)
                return
        known = "; ".join(" and ".join(fields) for fields, _ in handlers)
        raise InvalidArgument.field("body", f"has the fields of no route; send one of: {known}")

    return respond


def _described() -> Callable[[Request], object]:
    described = JSONResponse(openapi.document()).body

    async def answer(request: Request) -> Response:
        """Answer with the OpenAPI document, which is made once."""
        return Response(described, media_type="application/json")

    return answer


def _measured(exposition: Exposition) -> Callable[[Request], object]:
    async def answer(request: Request) -> Response:
        """Answer with the metrics in the requested format."""
        text, kind = await exposition.text(request.headers.get("accept", ""))
        return Response(text, headers={"content-type": kind})

    return answer
