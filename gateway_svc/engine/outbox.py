"""Messages queued for the scheduler, filled from anywhere on the event loop and emptied by the link's one writer."""

import asyncio

from gateway_svc.requests.engine_request import EngineRequest
from protos.engine.v1 import engine_pb2
from svc_common.tenant_load import Load, TenantLoad

MAX_SUBMIT_BYTES = 8 * 2**20


class Outbox:
    """Queue of submits in arrival order, stops and cancels; `take` packs as many as fit into one message.

    `filled`: set while there is something to send. `said_goodbye`: the goodbye is in a message that was taken; nothing may
    follow it.
    """

    def __init__(self) -> None:
        self._submits: dict[int, tuple[EngineRequest, int]] = {}
        self._load = TenantLoad()
        self._stops: list[engine_pb2.Stopped] = []
        self._cancels: list[engine_pb2.Cancel] = []
        self._detaches: list[engine_pb2.Detach] = []
        self._goodbye = False
        self.said_goodbye = False
        self.filled = asyncio.Event()

    def has_room(self, tenant: str, num_prompt_tokens: int, limit: Load) -> bool:
        """True if another request of that tenant may be queued. `limit`: queued requests and their prompt tokens."""
        return self._load.has_room(tenant, num_prompt_tokens, limit)

    def submit(self, request: EngineRequest) -> None:
        """Queue a request for submission or resubmission."""
        known = self._submits.get(request.handle)
        if known is not None:
            self._load.leave(request.submit.tenant, known[1])
        num_prompt_tokens = request.num_prompt_tokens
        self._submits[request.handle] = request, num_prompt_tokens
        self._load.enter(request.submit.tenant, num_prompt_tokens)
        self.filled.set()

    def withdraw(self, request: EngineRequest) -> None:
        """Remove a request from the queue; no-op if it is not queued."""
        if request.handle in self._submits:
            self._remove(request.handle)

    def _remove(self, handle: int) -> EngineRequest:
        request, num_prompt_tokens = self._submits.pop(handle)
        self._load.leave(request.submit.tenant, num_prompt_tokens)
        return request

    def stop(self, stopped: engine_pb2.Stopped) -> None:
        """Queue the message that a choice ended at a stop string."""
        self._stops.append(stopped)
        self.filled.set()

    def cancel(self, cancel: engine_pb2.Cancel) -> None:
        """Queue the cancellation of a request."""
        self._cancels.append(cancel)
        self.filled.set()

    def detach(self, handle: int) -> None:
        """Queue the message that the reader of a resumable request disconnected."""
        self._detaches.append(engine_pb2.Detach(handle=handle))
        self.filled.set()

    def say_goodbye(self) -> None:
        """Queue the message that this gateway shuts down."""
        self._goodbye = True
        self.filled.set()

    @property
    def detached(self) -> set[int]:
        """Handles without a reader that the scheduler has not yet been sent."""
        return {detach.handle for detach in self._detaches}

    def forget_stream(self) -> None:
        """Drop messages meant for the previous stream; queued requests stay."""
        self._stops.clear()
        self._cancels.clear()
        self._detaches.clear()

    def take(self) -> engine_pb2.FrontendMessage:
        """Take everything queued as one message; submits beyond 8 MiB of prompts wait for the next."""
        message = engine_pb2.FrontendMessage(stops=self._stops, cancels=self._cancels, detaches=self._detaches)
        self._stops, self._cancels, self._detaches = [], [], []
        size = 0
        while self._submits and size < MAX_SUBMIT_BYTES:
            request = self._remove(next(iter(self._submits)))
            if request.is_attaching:
                message.attaches.append(request.attach_message())
                continue
            if request.was_sent:
                message.stops.extend(request.stops())
            submit = request.submit_message()
            size += len(submit.token_ids)
            message.submits.append(submit)
        if not self._submits:
            self.filled.clear()
            if self._goodbye:
                message.goodbye.SetInParent()
                self.said_goodbye = True
        return message
