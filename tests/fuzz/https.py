"""HTTP inputs as the bytes of one connection: any route, any body, headers that are wrong, bodies that stop."""

import random
import typing
from dataclasses import dataclass

from pydantic import BaseModel

from gateway_svc.anthropic.message_request import CountTokensBody, MessageBody
from gateway_svc.openai.embeddings import EmbeddingRequest
from gateway_svc.openai.requests.chat_request import ChatCompletionRequest
from gateway_svc.openai.requests.completion_request import CompletionRequest
from tests.fuzz import hostile

_POSTS: dict[str, type[BaseModel] | None] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/messages": MessageBody,
    "/v1/messages/count_tokens": CountTokensBody,
    "/tokenize": None,
    "/detokenize": None,
}
_GETS = (
    "/v1/models",
    "/v1/models/x",
    "/health/live",
    "/health/ready",
    "/metrics",
    "/openapi.json",
    "/version",
    "/",
    "/%00",
)
_CUT_SHARE = 0.9
_METHODS = ("GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "BREW")
_VALID: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "ab", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 2},
    "/v1/embeddings": {"input": ["ab"]},
    "/v1/messages": {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "ab"}]},
    "/tokenize": {"prompt": "ab"},
    "/detokenize": {"tokens": [65]},
}


@dataclass(frozen=True, slots=True)
class Input:
    """One connection. `is_http`: a well-formed request, which must be answered; else the transport may just close. `is_cut`: its
    end is told at once; else the peer stays and says nothing more, and the server has to end it."""

    kind: str
    sent: bytes
    is_http: bool = True
    is_cut: bool = True


def http_input(rng: random.Random) -> Input:
    """What one connection sends."""
    kind = rng.choices(
        ("json", "valid but one field", "random json", "random bytes", "other", "broken"), (30, 30, 10, 5, 15, 10)
    )[0]
    if kind == "broken":
        return _broken(rng)
    if kind == "other":
        method, path = (rng.choice(("GET", *_METHODS)), rng.choice((*_GETS, *_POSTS)))
        return Input(kind, _request(method, path, b"", _headers(rng)))
    path = rng.choice(list(_POSTS))
    return Input(kind, _request("POST", path, _body(rng, kind, path), _headers(rng)))


def _body(rng: random.Random, kind: str, path: str) -> bytes:
    if kind == "random bytes":
        return hostile.raw(rng)
    if kind == "random json":
        return hostile.json_text(rng, hostile.json_value(rng))
    model = _POSTS[path]
    names = list(model.model_fields) if model is not None else ["prompt", "tokens", "model", "messages"]
    value = dict(_VALID[path])
    for name in rng.sample(names, k=1 if kind != "json" else min(len(names), rng.randrange(1, 8))):
        value[name] = _field(rng, model, name)
    if kind == "json" and rng.random() < 0.3:
        value.pop(rng.choice(list(value)))
    return hostile.json_text(rng, value)


def _field(rng: random.Random, model: type[BaseModel] | None, name: str) -> object:
    """A value of the field's type where that is easy, of any type else."""
    hint = model.model_fields[name].annotation if model is not None else None
    kinds = set(typing.get_args(hint)) or {hint}
    if rng.random() < 0.6:
        if bool in kinds:
            return rng.random() < 0.5
        if int in kinds:
            return hostile.integer(rng, -(2**63), 2**64 - 1)
        if float in kinds:
            return hostile.real(rng)
        if str in kinds:
            return hostile.text(rng, name)
    return hostile.json_value(rng)


def _headers(rng: random.Random) -> list[tuple[str, str]]:
    found = [
        ("content-type", rng.choices(("application/json", "text/plain", "multipart/form-data", ""), (17, 1, 1, 1))[0])
    ]
    if rng.random() < 0.15:
        ids = [i for i in hostile.IDS if i.isascii()]
        name = rng.choice(
            ("x-request-id", "idempotency-key", "traceparent", "authorization", "x-request-timeout-ms", "accept")
        )
        found.append((name, rng.choice((*ids, "Bearer", "Bearer x", "-1", "0", "99999999999999999999", "1"))))
    return found


def _request(method: str, path: str, body: bytes, headers: list[tuple[str, str]]) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: x", "connection: close", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def _broken(rng: random.Random) -> Input:
    """No HTTP, or HTTP that stops."""
    path = rng.choice(list(_POSTS))
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n".encode()
    body = b'{"prompt": "ab"}'
    sent = rng.choice(
        (
            rng.randbytes(64),
            b"GET / HTTP/9.9\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            head + b"content-length: 100\r\n\r\n" + body,
            head + b"content-length: -1\r\n\r\n" + body,
            head + b"content-length: 5\r\ncontent-length: 6\r\n\r\n" + body,
            head + b"transfer-encoding: chunked\r\n\r\n10\r\n" + body + b"\r\n",
            head + b"transfer-encoding: chunked\r\n\r\nZZ\r\nno\r\n0\r\n\r\n",
            head + b"x: " + b"y" * 70_000 + b"\r\n\r\n",
            head + b"\xff\xfe: \x00\r\n\r\n",
            head + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\nGET /metrics HTTP/1.1\r\n\r\n",
            head + b"transfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n0\r\n\r\n",
            head + b"transfer-encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
            head + b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n",
            head.replace(b"HTTP/1.1", b"HTTP/1.0") + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            head + b"a: b\r\n" * rng.choice((10, 1_000, 9_000)) + b"content-length: 0\r\n\r\n",
            head + b" folded: \r\n\tand more\r\n\r\n",
            head.replace(b"\r\n", b"\n") + b"content-length: 0\n\n",
            head + b"upgrade: websocket\r\nconnection: upgrade\r\n\r\n",
            head + b"expect: 100-continue\r\ncontent-length: 100\r\n\r\n",
            *(whole[: rng.randrange(len(whole))] for whole in (head + b"content-length: 16\r\n\r\n" + body,)),
            head.replace(b"/v1", b"/\xff") + b"\r\n",
        )
    )
    return Input("broken", sent, is_http=False, is_cut=rng.random() < _CUT_SHARE)
