"""/v1/messages, whole and streamed (SSE), /v1/messages/count_tokens, and /v1/models in Anthropic's form."""

import contextlib
import datetime
from dataclasses import replace

from gateway_svc.anthropic.message_events import Json, MessageEvents, whole_message
from gateway_svc.anthropic.message_request import CountTokensBody, MessageBody
from gateway_svc.calls import Call
from gateway_svc.generating.cell_model import ServedModel
from gateway_svc.generating.generation import Generation
from gateway_svc.generating.generator import Generator
from gateway_svc.generating.model_catalog import ModelCatalog
from gateway_svc.http.endpoint import HttpRequest
from gateway_svc.http.io import Reply
from svc_common import public_ids


class MessageRoutes:
    """Handlers of /v1/messages and /v1/messages/count_tokens."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    async def create(self, http: HttpRequest, call: Call, reply: Reply) -> None:
        """Answer a conversation."""
        async with contextlib.AsyncExitStack() as stack:
            made, generation, is_stream = await self._begin(http, call, stack)
            if is_stream:
                await _stream(generation, made, reply)
                return
            events: list[Json] = []
            async for new in generation:
                events += made.add(new)
        await reply.json(whole_message(events))

    async def _begin(
        self, http: HttpRequest, call: Call, stack: contextlib.AsyncExitStack
    ) -> tuple[MessageEvents, Generation, bool]:
        """Parse the request and start the generation.

        A separate step, so that nothing of the request is kept during the answer.
        """
        body = MessageBody.parse(http.take_body())
        call = replace(call, stream=bool(body.stream))
        generation = await stack.enter_async_context(self._generator.generate(call, body.chat_request()))
        made = MessageEvents(
            {"id": f"{public_ids.MESSAGE}_{call.request_id}", "model": generation.model.name},
            num_prompt_tokens=generation.num_prompt_tokens,
            fills_context=generation.started.max_tokens < body.max_tokens,
            omits_thinking=body.omits_thinking,
        )
        return made, generation, call.stream

    async def count_tokens(self, http: HttpRequest, call: Call, reply: Reply) -> None:
        """Answer with the number of tokens of the prompt; nothing is generated."""
        request = CountTokensBody.parse(http.take_body()).chat_request()
        num_tokens, _ = await self._generator.count_tokens(call, request)
        await reply.json({"input_tokens": num_tokens})


async def _stream(generation: Generation, made: MessageEvents, reply: Reply) -> None:
    """Send events, at most one part in flight; output that arrives during a send goes into the next part."""
    async for new in generation:
        if events := made.add(new):
            await reply.events(events)
    await reply.end_events()


class ModelCards:
    """Handlers of /v1/models and /v1/models/NAME: the model and its adapters, all on one page."""

    def __init__(self, catalog: ModelCatalog) -> None:
        self._catalog = catalog
        self._created_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")

    async def list(self, http: HttpRequest, call: Call, reply: Reply) -> None:
        """Answer with all that the caller may use; empty before the first is loaded."""
        theirs = [self._card(model) for model in self._catalog.served if call.caller.terms.may_use(model.name)]
        ids = [card["id"] for card in theirs] or [None]
        await reply.json({"data": theirs, "has_more": False, "first_id": ids[0], "last_id": ids[-1]})

    async def get(self, http: HttpRequest, call: Call, reply: Reply) -> None:
        """Answer with one by name."""
        model = self._catalog.get(http.path_params["name"])
        call.caller.terms.check_model(model.name)
        await reply.json(self._card(model))

    def _card(self, model: ServedModel) -> Json:
        """Model object. `max_tokens`: the most that any prompt leaves room for."""
        return {
            "id": model.name,
            "type": "model",
            "display_name": model.name,
            "created_at": self._created_at,
            "lifecycle": "active",
            "max_input_tokens": model.limits.max_model_len - 1,
            "max_tokens": model.limits.max_model_len - 1,
        }
