"""What the gateway has to tell the scheduler next. Filled from anywhere on the event loop, emptied by the link's one writer."""

import asyncio

from gateway_svc.engine.engine_request import EngineRequest
from protos.engine.v1 import engine_pb2
from svc_common.tenant_load import Load, TenantLoad

MAX_SUBMIT_BYTES = 8 * 2**20


class Outbox:
    """Submits in arrival order, stops and cancels; `take` turns as much as fits into one message.

    `said_goodbye`: the farewell is in a message that was taken; nothing may follow it.
    """

    def __init__(self) -> None:
        self._submits: dict[int, tuple[EngineRequest, int]] = {}
        self._load = TenantLoad()
        self._stops: list[engine_pb2.Stopped] = []
        self._cancels: list[engine_pb2.Cancel] = []
        self._detaches: list[engine_pb2.Detach] = []
        self._goodbye = False
        self.said_goodbye = False
        self._filled = asyncio.Event()

    def has_room(self, tenant: str, num_prompt_tokens: int, limit: Load) -> bool:
        """Whether another request of that tenant may wait to be submitted; `limit`: of requests and prompt tokens that wait."""
        return self._load.has_room(tenant, num_prompt_tokens, limit)

    def submit(self, request: EngineRequest) -> None:
        """Submit this request (again)."""
        known = self._submits.get(request.handle)
        if known is not None:
            self._load.leave(request.submit.tenant, known[1])
        self._submits[request.handle] = request, request.num_prompt_tokens
        self._load.enter(request.submit.tenant, request.num_prompt_tokens)
        self._filled.set()

    def withdraw(self, request: EngineRequest) -> None:
        """Do not submit it after all."""
        if request.handle in self._submits:
            self._remove(request.handle)

    def _remove(self, handle: int) -> EngineRequest:
        request, num_prompt_tokens = self._submits.pop(handle)
        self._load.leave(request.submit.tenant, num_prompt_tokens)
        return request

    def stop(self, stopped: engine_pb2.Stopped) -> None:
        """A choice ended at a stop string."""
        self._stops.append(stopped)
        self._filled.set()

    def cancel(self, cancel: engine_pb2.Cancel) -> None:
        """End a request without result."""
        self._cancels.append(cancel)
        self._filled.set()

    def detach(self, handle: int) -> None:
        """The reader of a resumable request has gone."""
        self._detaches.append(engine_pb2.Detach(handle=handle))
        self._filled.set()

    def say_goodbye(self) -> None:
        """This gateway leaves for good."""
        self._goodbye = True
        self._filled.set()

    @property
    def detached(self) -> set[int]:
        """Handles whose readers went, which the scheduler has not been told yet."""
        return {detach.handle for detach in self._detaches}

    def forget_stream(self) -> None:
        """A new stream begins: what was meant for the old one is void, requests that wait stay."""
        self._stops.clear()
        self._cancels.clear()
        self._detaches.clear()

    async def wait(self) -> None:
        """Until there is something to say."""
        await self._filled.wait()

    def take(self) -> engine_pb2.FrontendMessage:
        """Everything new, as one message; submits beyond 8 MiB of prompts wait for the next."""
        message = engine_pb2.FrontendMessage(stops=self._stops, cancels=self._cancels, detaches=self._detaches)
        self._stops, self._cancels, self._detaches = [], [], []
        size = 0
        while self._submits and size < MAX_SUBMIT_BYTES:
            request = self._remove(next(iter(self._submits)))
            if request.is_attaching:
                message.attaches.append(request.attach_message())
                continue
            submit = request.submit_message()
            size += len(submit.token_ids)
            message.submits.append(submit)
            message.stops.extend(request.stops())
        if not self._submits:
            self._filled.clear()
            if self._goodbye:
                message.goodbye.SetInParent()
                self.said_goodbye = True
        return message
