"""Responses in the background: their generations are read to the end without a client.

The scheduler goes on with such a request for a grace time while no gateway reads it (`resumable`). A gateway that is
asked for a response in progress and does not read it resumes it; if another one reads it, that one stops. A gateway
that is lost therefore loses no response that is asked for within the grace time.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gateway_svc.calls import Call
from gateway_svc.generating.generation import Generation
from gateway_svc.generating.generator import Generator
from gateway_svc.openai.answers.token_entries import TokenEntries
from gateway_svc.openai.responses.output_items import ItemOptions
from gateway_svc.openai.responses.response_answer import ResponseAnswer
from gateway_svc.openai.responses.response_head import request_id_of
from gateway_svc.openai.responses.stored_responses import ResponseStore, StoredResponse
from protos.inference.v1 import inference_pb2 as pb
from svc_common.clock import unix_s
from svc_common.errors import Cancelled, InvalidArgument, NotFound, QuireError, Unavailable
from svc_common.net import rpc

Json = dict[str, Any]
Cancel = Callable[[str, str, QuireError], None]

_READ_ELSEWHERE = frozenset({"ATTACHED_ELSEWHERE", "DRAINING"})
"""Errors of a reader alone: the request goes on."""


@dataclass(frozen=True, slots=True)
class _Reading:
    """A response that this gateway reads."""

    tenant: str
    answer: ResponseAnswer
    stored: StoredResponse

    @property
    def key(self) -> tuple[str, str]:
        return self.tenant, self.stored.response["id"]

    def now(self) -> StoredResponse:
        """The response so far, to be stored."""
        return self.stored.with_response(self.answer.response())


class BackgroundResponses:
    """Owner of the readers of this gateway. `cancel(tenant, request_id, error)` cancels at any gateway."""

    def __init__(self, generator: Generator, store: ResponseStore, cancel: Cancel) -> None:
        self._generator = generator
        self._store = store
        self._cancel = cancel
        self._readers: dict[tuple[str, str], tuple[_Reading, asyncio.Task[None]]] = {}

    async def begin(
        self,
        tenant: str,
        answer: ResponseAnswer,
        stored: StoredResponse,
        generation: Generation,
        stack: contextlib.AsyncExitStack,
    ) -> None:
        """Store a response in progress and read its generation, which `stack` ends. Raises Unavailable if it cannot be stored."""
        if not await self._store.put(tenant, stored):
            raise Unavailable("the response could not be stored", reason="RESPONSE_NOT_STORED")
        self._read(_Reading(tenant, answer, stored), generation, stack.pop_all())

    async def find(self, tenant: str, name: str) -> StoredResponse:
        """The response of that id: as it is read here, else as it is stored. Raises NotFound."""
        found = self._readers.get((tenant, name))
        return await self._store.get(tenant, name) if found is None else found[0].now()

    async def current(self, call: Call, stored: StoredResponse) -> Json:
        """The response at present, of one that may be in progress."""
        if not stored.is_in_progress:
            return stored.response
        if found := self._readers.get((call.caller.tenant, stored.response["id"])):
            return found[0].answer.response()
        async with contextlib.AsyncExitStack() as stack:
            message = pb.ResumeRequest(request_id=request_id_of(stored.response["id"]))
            try:
                generation = await stack.enter_async_context(self._generator.resume(call, message))
            except NotFound:
                return await self._lost(call.caller.tenant, stored)
            answer = _answer(stored, generation)
            self._read(_Reading(call.caller.tenant, answer, stored), generation, stack.pop_all())
        return answer.response()

    async def cancel(self, tenant: str, stored: StoredResponse) -> Json:
        """Cancel a response; one that has ended stays as it is. Raises InvalidArgument for one not in the background."""
        if not stored.response["background"]:
            raise InvalidArgument.field("response_id", "names a response that was not created with background=true")
        if not stored.is_in_progress:
            return stored.response
        name = stored.response["id"]
        self._cancel(tenant, request_id_of(name), Cancelled("the response was cancelled", reason="CANCELLED"))
        if found := self._readers.get((tenant, name)):
            await asyncio.wait({found[1]})
            return found[0].answer.response()
        ended = stored.with_response({**stored.response, "status": "cancelled"})
        await self._store.put(tenant, ended)
        return ended.response

    # --- reading -----------------------------------------------------------------------------------------------------

    def _read(self, reading: _Reading, generation: Generation, stack: contextlib.AsyncExitStack) -> None:
        task = asyncio.create_task(self._read_all(reading, generation, stack), name="background response")
        self._readers[reading.key] = reading, task
        task.add_done_callback(lambda done: self._forget(reading, done))

    def _forget(self, reading: _Reading, task: asyncio.Task[None]) -> None:
        if (found := self._readers.get(reading.key)) and found[1] is task:
            del self._readers[reading.key]

    async def _read_all(self, reading: _Reading, generation: Generation, stack: contextlib.AsyncExitStack) -> None:
        """Read the generation and store the response, unless another gateway reads it."""
        answer = reading.answer
        async with stack:
            try:
                async for events in generation:
                    answer.events(events)
                answer.complete(unix_s())
            except Exception as error:
                known = error if isinstance(error, QuireError) else rpc.hide(error)
                if known.reason in _READ_ELSEWHERE:
                    return
                answer.fail(known)
        if answer.is_cancelled and not await self._store.has(*reading.key):
            return  # It was deleted.
        await self._store.put(reading.tenant, reading.now())

    async def _lost(self, tenant: str, stored: StoredResponse) -> Json:
        error = {
            "code": "server_error",
            "message": "its gateway was lost, and it was not resumed in time; send it again",
        }
        ended = stored.with_response({**stored.response, "status": "failed", "error": error})
        await self._store.put(tenant, ended)
        return ended.response


def _answer(stored: StoredResponse, generation: Generation) -> ResponseAnswer:
    """The answer of a response in progress, from its first token on."""
    options = ItemOptions(
        TokenEntries(generation.model.text, as_ids=False),
        summarized=stored.response["reasoning"]["summary"] is not None,
        carries_reasoning=stored.carries_reasoning,
    )
    return ResponseAnswer(stored.response, generation.request_id, options)
