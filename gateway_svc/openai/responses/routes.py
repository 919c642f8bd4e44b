"""POST /v1/responses: create a response, streamed (SSE) or whole, and store it."""

import contextlib
from dataclasses import dataclass, replace

from gateway_svc.calls import Call
from gateway_svc.generating.generation import Generation
from gateway_svc.generating.generator import Generator
from gateway_svc.generating.model_catalog import ModelCatalog
from gateway_svc.http.endpoint import HttpRequest
from gateway_svc.http.io import Reply
from gateway_svc.openai.answers.token_entries import TokenEntries
from gateway_svc.openai.requests.roles import settle_roles
from gateway_svc.openai.responses.background import BackgroundResponses
from gateway_svc.openai.responses.output_items import ItemOptions
from gateway_svc.openai.responses.response_answer import ResponseAnswer
from gateway_svc.openai.responses.response_head import response_head
from gateway_svc.openai.responses.response_request import ResponseRequest, chat_request, parse_response_request
from gateway_svc.openai.responses.stored_responses import ResponseStore, StoredResponse, listed_items
from svc_common.clock import unix_s
from svc_common.errors import QuireError
from svc_common.net import rpc


class Responses:
    """Answers the route."""

    def __init__(
        self, generator: Generator, catalog: ModelCatalog, store: ResponseStore, background: BackgroundResponses
    ) -> None:
        self._generator = generator
        self._catalog = catalog
        self._store = store
        self._background = background

    async def create(self, http: HttpRequest, call: Call, reply: Reply) -> None:
        """Run the generation, store the response and send it."""
        async with contextlib.AsyncExitStack() as stack:
            running = await self._begin(http, call, stack)
            answer = running.answer
            if running.is_background:
                assert running.stored is not None
                await self._background.begin(call.caller.tenant, answer, running.stored, running.generation, stack)
                await reply.json(answer.response())
                return
            if running.is_stream:
                await self._stream(running, reply)
                return
            async for events in running.generation:
                answer.events(events)
            await self._complete(running)
            await reply.json(answer.response())

    async def _begin(self, http: HttpRequest, call: Call, stack: contextlib.AsyncExitStack) -> "_Running":
        """Parse the request and start the generation. Only the items of a response to be stored are kept."""
        request, wishes = parse_response_request(http.take_body())
        call = replace(call, stream=bool(request.stream))
        items = await self._store.conversation(call.caller.tenant, request)
        message = chat_request(request, wishes, items)
        await settle_roles(message, call, self._catalog)
        generation = await stack.enter_async_context(self._generator.generate(call, message))
        answer, stored = _answer(call, request, generation), None
        if request.store is not False:
            given = listed_items(items, call.request_id)
            stored = StoredResponse(answer.response(), given, request.carries_reasoning)
        return _Running(
            generation, answer, call.caller.tenant, stored, call.stream, is_background=bool(request.background)
        )

    async def _stream(self, running: "_Running", reply: Reply) -> None:
        """Send events, at most one part in flight; output that arrives during a send goes into the next part."""
        try:
            async for events in running.generation:
                if made := running.answer.events(events):
                    await reply.events(made)
        except Exception as error:
            if reply.status:
                known = error if isinstance(error, QuireError) else rpc.hide(error)
                running.answer.fail(known)
                await reply.events(running.answer.last_events())
                await reply.end_events()
            raise
        await self._complete(running)
        await reply.events(running.answer.last_events())
        await reply.end_events()

    async def _complete(self, running: "_Running") -> None:
        """Complete the answer, and store it before its client knows, which may continue it at once."""
        answer, stored = running.answer, running.stored
        answer.complete(unix_s())
        if stored is not None and not await self._store.put(running.tenant, stored.with_response(answer.response())):
            answer.mark_unstored()


@dataclass(frozen=True, slots=True)
class _Running:
    """A response under construction. `stored`: what to store with it; None = it is not stored."""

    generation: Generation
    answer: ResponseAnswer
    tenant: str
    stored: StoredResponse | None
    is_stream: bool
    is_background: bool


def _answer(call: Call, request: ResponseRequest, generation: Generation) -> ResponseAnswer:
    model = generation.model
    head = response_head(request, call.request_id, model.name, unix_s(), is_stored=request.store is not False)
    options = ItemOptions(
        TokenEntries(model.text, as_ids=False),
        summarized=request.summary is not None,
        carries_reasoning=request.carries_reasoning,
    )
    return ResponseAnswer(head, call.request_id, options)
