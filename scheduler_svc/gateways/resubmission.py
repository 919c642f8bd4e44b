"""Resolution of an id to an existing request: a gateway's own after a lost stream, or one that another reader continues."""

from protos.engine.v1 import engine_pb2
from scheduler_svc.requests.live_request import LiveRequest, OutputReader
from scheduler_svc.requests.request_book import RequestBook
from scheduler_svc.requests.submission import Submission
from svc_common.errors import Aborted, AlreadyExists, NotFound


def meant_by_submit(book: RequestBook, submission: Submission, reader: OutputReader) -> LiveRequest | None:
    """The existing request that a Submit of `reader` refers to; None = it is new.

    Raises AlreadyExists for an id in use for something else, and Aborted if another reader took the request
    over meanwhile.
    """
    live = book.find(submission.tenant, submission.request_id)
    if live is None:
        return None
    if live.submission.prompt.tobytes() != submission.prompt.tobytes():
        raise _in_use(submission, "for another prompt")
    if live.submission.sampling.task != submission.sampling.task:
        raise _in_use(submission, "for a request of another kind")
    if submission.resubmitted:
        _check_not_lost(live, reader)
        return live
    if live.failure is not None:
        book.give_up(live)
        return None
    if not (submission.resumable and live.submission.resumable):
        raise _in_use(submission, "by a request that is not resumable")
    return live


def meant_by_attach(book: RequestBook, attach: engine_pb2.Attach) -> LiveRequest:
    """The resumable request that an Attach refers to. Raises NotFound."""
    live = book.find(attach.tenant, attach.request_id)
    if live is None or not live.submission.resumable:
        raise NotFound(
            "no resumable request of this id is held: it is unknown here, or its time is over; send it anew",
            reason="RESUME_EXPIRED",
            resource_type="request",
            resource_name=attach.request_id,
        )
    return live


def attached_elsewhere() -> Aborted:
    """The error sent to a request's former reader."""
    return Aborted("another reader attached to this request", reason="ATTACHED_ELSEWHERE")


def _check_not_lost(live: LiveRequest, reader: OutputReader) -> None:
    delivery = live.delivery
    if delivery is not None and not delivery.end_written and delivery.reader is not reader:
        raise attached_elsewhere()


def _in_use(submission: Submission, how: str) -> AlreadyExists:
    return AlreadyExists(
        f"request id {submission.request_id} is in use {how}; choose a new id",
        reason="REQUEST_ID_IN_USE",
        metadata={"request_id": submission.request_id},
    )
