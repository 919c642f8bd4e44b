"""Start the calls of a client: the first attempt, retries, and the resumption of streams."""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from protos.inference.v1 import inference_pb2 as pb
from quire.client.connections import Credentials, Gateways, call_metadata
from quire.client.messages import EventMerger
from quire.client.retrying import Attempts, RetryPolicy
from svc_common.errors import QuireError

_CANCEL_TIMEOUT_S = 2.0

GENERATING = (pb.GenerateRequest, pb.ChatRequest)

Metadata = Sequence[tuple[str, str]]
SendCancel = Callable[[Any, pb.CancelRequest, float, Metadata], None]
"""(stub, request, timeout_s, metadata): sends a Cancel."""


@dataclass(frozen=True, slots=True)
class CallPlan:
    """How one client makes its calls. With several gateways, generation requests are resumable."""

    gateways: Gateways
    credentials: Credentials
    retries: RetryPolicy

    def attempts(self, timeout_s: float | None) -> Attempts:
        """Attempts of one call, until its deadline."""
        return Attempts(self.gateways, self.retries, timeout_s)

    def prepare(self, request: Any, request_id: str) -> list[tuple[str, str]]:
        """Make `request` resumable if needed, and return its metadata.

        A repeated call of a resumable request attaches to the running request.
        """
        generates = isinstance(request, GENERATING)
        if generates and len(self.gateways.targets) > 1:
            request.resumable = True
        idempotent = generates and request.resumable
        request_id = request_id or (uuid.uuid4().hex if idempotent else "")
        return call_metadata(self.credentials, request_id, idempotent=idempotent)

    def opening(
        self,
        method: str,
        request: Any,
        request_id: str,
        timeout_s: float | None,
        *,
        cancel: SendCancel,
    ) -> "CallOpening":
        """A CallOpening for one call, unary or streaming."""
        metadata = self.prepare(request, request_id)
        return CallOpening(
            self.gateways,
            method,
            request,
            self.attempts(timeout_s),
            metadata,
            call_metadata(self.credentials, ""),
            cancel,
        )


@dataclass(slots=True)
class CallOpening:
    """Calls `method` with `request`, retries it on failure, and sends Resume if a resumable stream had already started.

    `metadata` is for calls of `method`, `other_metadata` for Resume and Cancel.
    """

    gateways: Gateways
    method: str
    request: Any
    attempts: Attempts
    metadata: Metadata
    other_metadata: Metadata
    cancel: SendCancel

    @property
    def target(self) -> str:
        """See Opening."""
        return self.attempts.target

    @property
    def request_id(self) -> str:
        """Request id sent with the call; empty = the server assigns one."""
        if isinstance(self.request, pb.ResumeRequest):
            return self.request.request_id
        return dict(self.metadata).get("x-request-id", "")

    @property
    def _is_resumable(self) -> bool:
        generates = isinstance(self.request, GENERATING)
        return isinstance(self.request, pb.ResumeRequest) or (generates and self.request.resumable)

    def call(self) -> Any:
        """Send the request to the gateway of the last `attempts.begin()`."""
        method = getattr(self.attempts.stub, self.method)
        return method(self.request, timeout=self.attempts.remaining_s, metadata=self.metadata)

    def open(self, merger: EventMerger) -> Any:
        """See Opening."""
        self.attempts.begin()
        if not merger.is_started:
            return self.call()
        request = pb.ResumeRequest(request_id=merger.output.request_id, positions=merger.positions())
        timeout_s = self.attempts.remaining_s
        return self.attempts.stub.Resume(request, timeout=timeout_s, metadata=self.other_metadata)

    def pause_s(self, error: QuireError, merger: EventMerger) -> float | None:
        """See Opening."""
        if merger.is_started and not self._is_resumable:
            return None
        return self.attempts.pause_s(error)

    def succeeded(self) -> None:
        """See Opening."""
        self.attempts.succeeded()

    def interrupted(self) -> None:
        """See Opening."""
        self.gateways.renew(self.target)

    def abandon(self, started_as: str = "") -> None:
        """See Opening; cancels a resumable request, which dropping the call would not end. `started_as`:
        its id as reported by the server."""
        request_id = started_as or self.request_id
        if self._is_resumable and request_id:
            stub, request = self.gateways.stub(self.gateways.target), pb.CancelRequest(request_id=request_id)
            self.cancel(stub, request, _CANCEL_TIMEOUT_S, self.other_metadata)
