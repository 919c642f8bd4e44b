"""The routes of /v1/responses: create a response, streamed (SSE) or whole."""

import contextlib
from dataclasses import replace

from gateway_svc.calls import Call
from gateway_svc.generating.generation import Generation
from gateway_svc.generating.generator import Generator
from gateway_svc.generating.model_catalog import ModelCatalog
from gateway_svc.http.endpoint import HttpRequest
from gateway_svc.http.io import Reply
from gateway_svc.openai.answers.token_entries import TokenEntries
from gateway_svc.openai.requests.roles import settle_roles
from gateway_svc.openai.responses.output_items import ItemOptions
from gateway_svc.openai.responses.response_answer import ResponseAnswer
from gateway_svc.openai.responses.response_head import response_head
from gateway_svc.openai.responses.response_request import ResponseRequest, chat_request, parse_response_request
from svc_common.clock import NS_PER_S, wall_ns
from svc_common.errors import QuireError
from svc_common.net import rpc


class Responses:
    """Answers the routes."""

    def __init__(self, generator: Generator, catalog: ModelCatalog) -> None:
        self._generator = generator
        self._catalog = catalog

    async def create(self, http: HttpRequest, call: Call, reply: Reply) -> None:
        """Run the generation and send the response."""
        async with contextlib.AsyncExitStack() as stack:
            generation, answer, is_stream = await self._begin(http, call, stack)
            if is_stream:
                await _stream(generation, answer, reply)
                return
            async for events in generation:
                answer.events(events)
            answer.last_events(_now())
            await reply.json(answer.response())

    async def _begin(
        self, http: HttpRequest, call: Call, stack: contextlib.AsyncExitStack
    ) -> tuple[Generation, ResponseAnswer, bool]:
        """Parse the request and start the generation."""
        request, wishes = parse_response_request(http.take_body())
        call = replace(call, stream=bool(request.stream))
        message = chat_request(request, wishes, request.items())
        await settle_roles(message, call, self._catalog)
        generation = await stack.enter_async_context(self._generator.generate(call, message))
        return generation, _answer(call, request, generation), call.stream


def _answer(call: Call, request: ResponseRequest, generation: Generation) -> ResponseAnswer:
    model = generation.model
    head = response_head(request, call.request_id, model.name, _now(), is_stored=False)
    options = ItemOptions(
        TokenEntries(model.text, as_ids=False),
        summarized=request.summary is not None,
        carries_reasoning=request.carries_reasoning,
    )
    return ResponseAnswer(head, call.request_id, options, num_prompt_tokens=generation.num_prompt_tokens)


async def _stream(generation: Generation, answer: ResponseAnswer, reply: Reply) -> None:
    """Send events, at most one part in flight; output that arrives during a send goes into the next part."""
    try:
        async for events in generation:
            if made := answer.events(events):
                await reply.events(made)
    except Exception as error:
        if reply.status:
            await reply.events(answer.failed_events(error if isinstance(error, QuireError) else rpc.hide(error)))
            await reply.end_events()
        raise
    await reply.events(answer.last_events(_now()))
    await reply.end_events()


def _now() -> int:
    return wall_ns() // NS_PER_S
