"""Error classes of all services, with gRPC status, HTTP status and details.

    QuireError
    ├── the caller's fault
    │   ├── InvalidArgument        INVALID_ARGUMENT   400   a field is wrong (with field violations)
    │   ├── OutOfRange             OUT_OF_RANGE       400   longer than the model or the cache can take
    │   ├── NotFound               NOT_FOUND          404   no such model, request, block
    │   ├── Unauthenticated        UNAUTHENTICATED    401
    │   ├── PermissionDenied       PERMISSION_DENIED  403
    │   ├── AlreadyExists          ALREADY_EXISTS     409
    │   └── Cancelled              CANCELLED          499   the caller ended it
    ├── a temporary condition
    │   ├── ResourceExhausted      RESOURCE_EXHAUSTED 429   queue full, quota (with a retry time)
    │   ├── Unavailable            UNAVAILABLE        503   no worker, draining (with a retry time)
    │   ├── DeadlineExceeded       DEADLINE_EXCEEDED  504
    │   ├── FailedPrecondition     FAILED_PRECONDITION 409  not in this state: peers of other revisions, model not loaded
    │   └── Aborted                ABORTED            409   an older epoch
    └── the service's fault
        ├── Unimplemented          UNIMPLEMENTED      501
        └── Internal               INTERNAL           500   a bug; an id, no traceback

Errors carry a status name and plain details. Only `svc_common.net.rpc` maps them to gRPC, and only the gateway's
HTTP API to HTTP.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One invalid field: its path (`sampling.top_p`) and what is wrong with it."""

    field: str
    description: str


@dataclass(frozen=True, slots=True)
class QuotaViolation:
    """An exhausted quota: its subject (`tenant:acme`) and a description."""

    subject: str
    description: str


class QuireError(Exception):
    """Base of all errors that a service may return.

    `message`: a sentence for people that says what to do. `reason`: a stable SCREAMING_SNAKE_CASE word for
    programs. `metadata`: the names and numbers behind it. `retry_after_s`: when to try again (None = not
    given). `quota`: the exhausted quota, if that is the reason.
    """

    status = "INTERNAL"
    http_status = 500

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
        violations: Sequence[FieldViolation] = (),
        retry_after_s: float | None = None,
        quota: QuotaViolation | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.status
        self.metadata: dict[str, str] = dict(metadata or {})
        self.violations = tuple(violations)
        self.retry_after_s = retry_after_s
        self.quota = quota


class InvalidArgument(QuireError):
    """A field of the caller's message is wrong."""

    status = "INVALID_ARGUMENT"
    http_status = 400

    @classmethod
    def field(cls, field: str, description: str) -> "InvalidArgument":
        """Error with one violation, the usual case."""
        return cls(f"{field}: {description}", reason="INVALID_FIELD", violations=[FieldViolation(field, description)])


class OutOfRange(QuireError):
    """Longer than the model or the cache can take; the limit is in `metadata`."""

    status = "OUT_OF_RANGE"
    http_status = 400


class NotFound(QuireError):
    """No such model, request or digest.

    `resource_type` and `resource_name`: what was requested (both empty = not given).
    """

    status = "NOT_FOUND"
    http_status = 404

    def __init__(self, message: str, *, resource_type: str = "", resource_name: str = "", **details: Any) -> None:
        super().__init__(message, **details)
        self.resource_type = resource_type
        self.resource_name = resource_name


class AlreadyExists(QuireError):
    """The id is in use for something else."""

    status = "ALREADY_EXISTS"
    http_status = 409


class Unauthenticated(QuireError):
    """Missing or wrong credentials."""

    status = "UNAUTHENTICATED"
    http_status = 401


class PermissionDenied(QuireError):
    """The caller is authenticated but not allowed."""

    status = "PERMISSION_DENIED"
    http_status = 403


class Cancelled(QuireError):
    """The caller, or another on its behalf, ended the request."""

    status = "CANCELLED"
    http_status = 499


class ResourceExhausted(QuireError):
    """A limit or quota is reached at the moment; `retry_after_s` says when to try again."""

    status = "RESOURCE_EXHAUSTED"
    http_status = 429


class Unavailable(QuireError):
    """No process can serve the request at the moment; `retry_after_s` says when to try again."""

    status = "UNAVAILABLE"
    http_status = 503


class DeadlineExceeded(QuireError):
    """The deadline passed; `reason` says where: EXPIRED_IN_QUEUE, INFEASIBLE or DURING_DECODE."""

    status = "DEADLINE_EXCEEDED"
    http_status = 504


class FailedPrecondition(QuireError):
    """Not possible in this state: a peer of another revision, a model that is not loaded."""

    status = "FAILED_PRECONDITION"
    http_status = 409


class Aborted(QuireError):
    """Superseded: an epoch older than the current one."""

    status = "ABORTED"
    http_status = 409


class Unimplemented(QuireError):
    """The method exists, but this service does not offer it."""

    status = "UNIMPLEMENTED"
    http_status = 501


class Internal(QuireError):
    """A bug in Quire; details stay in the log under `metadata["error_id"]`."""


class ConfigError(QuireError):
    """A setting of the operator is wrong; the message says which and what to do. Ends a command with status 2."""

    status = "INVALID_ARGUMENT"
    http_status = 400


def _concrete(cls: type[QuireError]) -> list[type[QuireError]]:
    return [cls, *(leaf for sub in cls.__subclasses__() for leaf in _concrete(sub))]


def from_status_name(status: str) -> type[QuireError]:
    """Return the class for a gRPC status name; `Internal` for unknown names."""
    classes = {cls.status: cls for cls in reversed(_concrete(QuireError)) if cls not in {QuireError, ConfigError}}
    return classes.get(status, Internal)
