"""Completions and chat: run one generation per prompt and combine them into one answer, streamed (SSE) or whole."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from gateway_svc.calls import Call
from gateway_svc.generating.cell_model import ServedModel
from gateway_svc.generating.generation import Event, Generation
from gateway_svc.generating.generator import Generator
from gateway_svc.generating.model_catalog import ModelCatalog
from gateway_svc.http.endpoint import HttpRequest, named
from gateway_svc.http.io import Reply
from gateway_svc.openai.answers.answer import HttpAnswer
from gateway_svc.openai.answers.answer_options import AnswerOptions
from gateway_svc.openai.answers.outputs import Prompt
from gateway_svc.openai.answers.shapes import AnswerShape
from gateway_svc.openai.requests.chat_request import ChatCompletionRequest
from gateway_svc.openai.requests.completion_request import CompletionRequest, parse_request
from gateway_svc.openai.requests.fields import AnyRequests
from gateway_svc.openai.requests.roles import settle_roles
from protos.inference.v1 import inference_pb2 as pb
from svc_common.clock import unix_s
from svc_common.version import VERSION


class Generations:
    """Answers requests of one kind: `cls` parses the request, `shape` formats the answer."""

    def __init__(
        self,
        cls: type[CompletionRequest] | type[ChatCompletionRequest],
        shape: AnswerShape,
        generator: Generator,
        catalog: ModelCatalog,
    ) -> None:
        self._cls = cls
        self._shape = shape
        self._generator = generator
        self._catalog = catalog

    async def respond(self, http: HttpRequest, call: Call, reply: Reply) -> None:
        """Run one generation per prompt and send one answer."""
        async with contextlib.AsyncExitStack() as stack:
            answer, generations, is_stream = await self._begin(http, call, reply, stack)
            async with contextlib.aclosing(merged(generations)) as events_of:
                if is_stream:
                    await _stream(events_of, answer, reply)
                    return
                async for index, events in events_of:
                    answer.add(index, events)
            await reply.json(answer.whole())

    async def _begin(
        self, http: HttpRequest, call: Call, reply: Reply, stack: contextlib.AsyncExitStack
    ) -> tuple[HttpAnswer, Sequence[Generation], bool]:
        """Parse the request and start the generations.

        A separate step, so that nothing of the request is kept during the answer.
        """
        request, messages = parse_request(self._cls, http.take_body())
        call = replace(named(call, request.request_id, reply), stream=bool(request.stream))
        generations = []
        for i, message in enumerate(messages):
            if isinstance(message, pb.ChatRequest):
                await settle_roles(message, call, self._catalog)
            part = call if len(messages) == 1 else _part(call, i)
            generations.append(await stack.enter_async_context(self._generator.generate(part, message)))
        return self._answer(call, messages, generations, request.options()), generations, call.stream

    def _answer(
        self, call: Call, messages: AnyRequests, generations: Sequence[Generation], options: AnswerOptions
    ) -> HttpAnswer:
        model = generations[0].model
        prompts = [
            _prompt(message, generation, model, options)
            for message, generation in zip(messages, generations, strict=True)
        ]
        head = {
            "id": f"{self._shape.prefix}-{call.request_id}",
            "created": unix_s(),
            "model": model.name,
            "system_fingerprint": f"quire-{VERSION}-{model.limits.model_digest[:12]}",
        }
        return HttpAnswer(self._shape, head, model.text, prompts, options, num_choices=generations[0].num_choices)


def _prompt(
    message: pb.GenerateRequest | pb.ChatRequest, generation: Generation, model: ServedModel, options: AnswerOptions
) -> Prompt:
    num_tokens = generation.num_prompt_tokens
    if not (options.echo or options.token_ids):
        return Prompt(num_tokens)
    token_ids = generation.prompt_token_ids
    if not options.echo or not isinstance(message, pb.GenerateRequest):
        return Prompt(num_tokens, token_ids)
    text = message.text if message.WhichOneof("prompt") == "text" else model.text.decode(token_ids, special_tokens=True)
    return Prompt(num_tokens, token_ids, text, awaits_logprobs=options.echo_logprobs)


def _part(call: Call, index: int) -> Call:
    """Call for one of several prompts, with a distinct request id."""
    return replace(call, request_id=f"{call.request_id}-{index}")


async def _stream(events_of: AsyncGenerator[tuple[int, list[Event]], None], answer: HttpAnswer, reply: Reply) -> None:
    """Send chunks, at most one part in flight; output that arrives during a send goes into the next part."""
    async for index, events in events_of:
        if chunks := answer.chunks(index, events):
            await reply.events(chunks)
    if chunks := answer.last_chunks():
        await reply.events(chunks)
    await reply.end_events()


async def merged(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, list[Event]], None]:
    """Yield events of all generations as they arrive, with the generation's index. The caller must close it."""
    if len(generations) == 1:
        async for events in generations[0]:
            yield 0, events
        return
    waiting = {asyncio.ensure_future(anext(generation, None)): i for i, generation in enumerate(generations)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting.keys(), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index, arrived = waiting.pop(task), task.result()
                if arrived is not None:
                    yield index, arrived
                    waiting[asyncio.ensure_future(anext(generations[index], None))] = index
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
