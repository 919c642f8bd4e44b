"""/tokenize, /detokenize and /tokenizer_info in vLLM's format, without generating."""

import functools
from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from gateway_svc.calls import Call
from gateway_svc.checks import validation
from gateway_svc.generating.cell_model import ServedModel
from gateway_svc.generating.generator import Generator, off_loop_if_long, wait_for_model
from gateway_svc.generating.model_catalog import ModelCatalog
from gateway_svc.http.endpoint import HttpRequest
from gateway_svc.http.io import Reply
from gateway_svc.http.json_body import Ids, parse_body, refuse
from gateway_svc.openai.requests.chat_request import ChatCompletionRequest
from gateway_svc.openai.requests.completion_request import parse_request
from gateway_svc.openai.requests.roles import settle_roles


class TokenizeRequest(BaseModel):
    """A text, or `messages` with tools and template arguments (see ChatCompletionRequest)."""

    model_config = ConfigDict(strict=True, extra="ignore")
    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {}

    model: str = ""
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(BaseModel):
    """Token ids to decode."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str = ""
    tokens: Ids


class TextRoutes:
    """Handlers of the routes."""

    def __init__(self, generator: Generator, catalog: ModelCatalog) -> None:
        self._generator = generator
        self._catalog = catalog

    async def tokenize(self, http: HttpRequest, call: Call, reply: Reply) -> None:
        """Answer with token ids, their number, and the model's context length."""
        request, _ = parse_body(TokenizeRequest, http.body, TokenizeRequest.NEUTRAL)
        model = await wait_for_model(self._catalog, call, request.model)
        if (request.prompt is None) == (request.messages is None):
            refuse("prompt", "or messages is needed, and not both")
        if request.prompt is None:
            token_ids = await self._conversation(http.body, call)
        else:
            token_ids = await _encode(model, request.prompt, add_special_tokens=request.add_special_tokens is not False)
        answer = {"count": len(token_ids), "max_model_len": model.limits.max_model_len, "tokens": token_ids}
        await reply.json(answer | {"token_strs": model.text.names(token_ids) if request.return_token_strs else None})

    async def _conversation(self, body: bytes, call: Call) -> Sequence[int]:
        """Tokenise as a chat prompt; fields about the answer have no effect."""
        _, [message] = parse_request(ChatCompletionRequest, body)
        await settle_roles(message, call, self._catalog)  # type: ignore[arg-type]
        return await self._generator.prompt_token_ids(call, message)

    async def tokenizer(self, http: HttpRequest, call: Call, reply: Reply) -> None:
        """Answer with what the bundle has of the tokenizer's configuration, under the names of tokenizer_config.json."""
        model = await wait_for_model(self._catalog, call, "")
        sizes = {"vocab_size": model.limits.vocab_size, "model_max_length": model.limits.max_model_len}
        kind = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": model.text.chat_template or None}
        await reply.json({**kind, **sizes, **model.text.special_tokens})

    async def detokenize(self, http: HttpRequest, call: Call, reply: Reply) -> None:
        """Answer with the text of token ids, without special tokens."""
        request, _ = parse_body(DetokenizeRequest, http.body, {})
        model = await wait_for_model(self._catalog, call, request.model)
        validation.check_token_ids(request.tokens, "tokens", model.limits)
        await reply.json({"prompt": await off_loop_if_long(len(request.tokens), model.text.decode, request.tokens)})


async def _encode(model: ServedModel, text: str, *, add_special_tokens: bool) -> list[int]:
    encode = functools.partial(model.text.encode, add_special_tokens=add_special_tokens)
    return await off_loop_if_long(len(text), encode, text)
