"""Takeover of a request by a second reader at this gateway: check, and error for the first reader. Pure."""

from gateway_svc.engine.engine_request import EngineRequest
from protos.engine.v1 import engine_pb2
from svc_common.errors import Aborted, AlreadyExists, NotFound, QuireError


def check_may_take_over(former: EngineRequest, submit: engine_pb2.Submit, *, is_attaching: bool) -> None:
    """Check that the reader of `submit` may take over `former`: both resumable and the same request.

    Raises AlreadyExists or NotFound.
    """
    if not (former.submit.resumable and submit.resumable):
        raise _not_resumable(submit) if is_attaching else _in_use(submit, "is running here")
    is_known = not (is_attaching or former.is_attaching)
    if is_known and (former.submit.token_ids, former.submit.task) != (submit.token_ids, submit.task):
        raise _in_use(submit, "is running here for another prompt, or of another kind")


def attached_elsewhere() -> Aborted:
    """Error for the reader that was replaced."""
    return Aborted("another reader attached to this request", reason="ATTACHED_ELSEWHERE")


def _in_use(submit: engine_pb2.Submit, how: str) -> QuireError:
    return AlreadyExists(
        f"a request with id {submit.request_id} {how}; use another x-request-id or none",
        reason="REQUEST_ID_IN_USE",
        metadata={"request_id": submit.request_id},
    )


def _not_resumable(submit: engine_pb2.Submit) -> QuireError:
    return NotFound(
        "the request of this id is not resumable; send requests with resumable = true that are to be read on",
        reason="RESUME_EXPIRED",
        resource_type="request",
        resource_name=submit.request_id,
    )
