"""GET /openapi.json: the routes, with request schemas from the models that validate them. Pure."""

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from gateway_svc.access.http_guard import is_open
from gateway_svc.anthropic.message_request import CountTokensBody, MessageBody
from gateway_svc.http.endpoint import TIMEOUT_HEADER
from gateway_svc.openai.embeddings import EmbeddingRequest
from gateway_svc.openai.requests.chat_request import ChatCompletionRequest
from gateway_svc.openai.requests.completion_request import CompletionRequest
from gateway_svc.openai.responses.response_request import ResponseRequest
from gateway_svc.openai.scoring.requests import LabelsRequest, PoolingRequest, RerankRequest, ScoreRequest
from gateway_svc.openai.tokenize_routes import DetokenizeRequest, TokenizeRequest
from svc_common.version import VERSION

_DESCRIPTION = "OpenAI's API (docs/openai.md) and Anthropic's Messages API (docs/messages.md)."
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message", "details"],
            "properties": {
                "type": {"type": "string"},
                "message": {"type": "string"},
                "details": {"type": "object", "properties": {"error_code": {"type": "string"}}},
            },
        },
        "request_id": {"type": ["string", "null"]},
    },
}
_HEADERS = {
    "authorization": "Bearer KEY, where keys are configured",
    "x-api-key": "KEY, instead of authorization",
    "x-request-id": "Name of this request; made where it is left out",
    TIMEOUT_HEADER: "Milliseconds that the answer may take, a whole number",
    "traceparent": "W3C trace context",
}


_IN_PATHS = {"name": "Served name", "id": "Id of the response"}


@dataclass(frozen=True, slots=True)
class _Operation:
    """One route. `streams`: may answer with server-sent events. `media`: type of the answer. `error`: form of its errors."""

    method: str
    path: str
    summary: str
    body: type[BaseModel] | None = None
    streams: bool = False
    media: str = "application/json"
    error: str = "Error"


OPERATIONS = (
    _Operation("post", "/v1/completions", "Completes prompts", CompletionRequest, streams=True),
    _Operation("post", "/v1/chat/completions", "Answers a conversation", ChatCompletionRequest, streams=True),
    _Operation("post", "/v1/responses", "Answers a conversation of items", ResponseRequest, streams=True),
    _Operation("get", "/v1/responses/{id}", "A stored response"),
    _Operation("delete", "/v1/responses/{id}", "Deletes a stored response"),
    _Operation("post", "/v1/responses/{id}/cancel", "Cancels a response in the background"),
    _Operation("get", "/v1/responses/{id}/input_items", "The items that a stored response answers"),
    _Operation("post", "/v1/embeddings", "Turns prompts into vectors", EmbeddingRequest),
    _Operation("post", "/v1/messages", "Answers a conversation", MessageBody, streams=True, error="AnthropicError"),
    _Operation(
        "post", "/v1/messages/count_tokens", "Counts a prompt's tokens", CountTokensBody, error="AnthropicError"
    ),
    *(_Operation("post", path, "Relevance of texts to each other", ScoreRequest) for path in ("/score", "/v1/score")),
    *(
        _Operation("post", path, "Documents by their relevance to a query", RerankRequest)
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
    _Operation("post", "/generative_scoring", "Probability of a label token after each item", LabelsRequest),
    _Operation("post", "/pooling", "Vectors of inputs, as vLLM answers", PoolingRequest),
    _Operation("post", "/classify", "Refused: the model has no classification head"),
    _Operation("post", "/invocations", "SageMaker's route: the body's fields say which route answers", streams=True),
    _Operation("get", "/v1/models", "The models served"),
    _Operation("get", "/v1/models/{name}", "One model"),
    _Operation("post", "/tokenize", "Token ids of a text or of a conversation's prompt", TokenizeRequest),
    _Operation("post", "/detokenize", "Text of token ids", DetokenizeRequest),
    _Operation("get", "/health", "200 when requests can be served, else 503"),
    _Operation("get", "/health/ready", "As /health"),
    _Operation("get", "/ping", "As /health"),
    _Operation("get", "/health/live", "200 while the process answers"),
    _Operation("get", "/version", "The release"),
    _Operation("get", "/metrics", "Metrics in Prometheus' text form", media="text/plain"),
    _Operation("get", "/v1/loads", "The cell's load, as SGLang answers"),
    _Operation("get", "/load", "Number of the cell's requests, as vLLM answers"),
    _Operation("get", "/openapi.json", "This description"),
)


def document() -> dict[str, Any]:
    """Return the OpenAPI 3.1 document."""
    bodies = [operation.body for operation in OPERATIONS if operation.body is not None]
    _, schemas = models_json_schema(
        [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Quire",
            "version": VERSION,
            "description": "OpenAI's API (docs/openai.md) and Anthropic's Messages API (docs/messages.md).",
        },
        "paths": paths,
        "components": {
            "schemas": {**schemas.get("$defs", {}), "Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _described(operation: _Operation) -> dict[str, Any]:
    described: dict[str, Any] = {"summary": operation.summary, "responses": _responses(operation)}
    parameters = [_parameter(name, "path", text) for name, text in _IN_PATHS.items() if f"{{{name}}}" in operation.path]
    if not is_open(operation.path):
        parameters += [_parameter(name, "header", text) for name, text in _HEADERS.items()]
        described["security"] = [{}, {"key": []}]
    if operation.body is not None:
        schema = {"$ref": f"#/components/schemas/{operation.body.__name__}"}
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return described | ({"parameters": parameters} if parameters else {})


def _parameter(name: str, place: str, description: str) -> dict[str, Any]:
    return {
        "name": name,
        "in": place,
        "required": place == "path",
        "description": description,
        "schema": {"type": "string"},
    }


def _responses(operation: _Operation) -> dict[str, Any]:
    kind = "object" if operation.media == "application/json" else "string"
    content: dict[str, Any] = {operation.media: {"schema": {"type": kind}}}
    if operation.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    answers: dict[str, Any] = {"200": {"description": "The answer", "content": content}}
    if not is_open(operation.path):
        error = {"application/json": {"schema": {"$ref": f"#/components/schemas/{operation.error}"}}}
        answers["default"] = {"description": "An error, in the API's own form", "content": error}
    return answers
