"""Errors of OpenEngine: failures after acceptance as its messages, and fields under the names that the client sent. Pure."""

from protos.routers.v1 import openengine_pb2 as pb
from svc_common.errors import FieldViolation, InvalidArgument, QuireError

_CODE_OF_STATUS = {
    "INVALID_ARGUMENT": pb.ERROR_CODE_INVALID_ARGUMENT,
    "OUT_OF_RANGE": pb.ERROR_CODE_INVALID_ARGUMENT,
    "NOT_FOUND": pb.ERROR_CODE_MODEL_NOT_FOUND,
    "ALREADY_EXISTS": pb.ERROR_CODE_DUPLICATE_REQUEST,
    "RESOURCE_EXHAUSTED": pb.ERROR_CODE_OVERLOADED,
    "CANCELLED": pb.ERROR_CODE_CANCELLED,
    "DEADLINE_EXCEEDED": pb.ERROR_CODE_CANCELLED,
    "UNIMPLEMENTED": pb.ERROR_CODE_UNSUPPORTED_FEATURE,
}
_CODE_OF_REASON = {"DRAINING": pb.ERROR_CODE_DRAINING, "EXPIRED_IN_QUEUE": pb.ERROR_CODE_OVERLOADED}
_RETRYABLE = frozenset({"RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED"})
_FINAL = frozenset({"INFEASIBLE", "ATTACHED_ELSEWHERE"})

_SENT_NAMES = {
    "prompt": "input",
    "text": "prompt",
    "token_ids": "token_ids",
    "sampling.n": "sampling.num_sequences",
    "stop.stop_strings": "stopping.conditions.stop_text",
    "stop.stop_token_ids": "stopping.conditions.stop_token_id",
    "stop": "stopping",
    "response.num_top_logprobs": "response.output_candidates.top_n",
    "response.num_prompt_logprobs": "response.prompt_candidates.top_n",
    "cache": "kv",
    "scheduling.priority": "openengine-priority",
    "json_schema": "guided.json_schema",
    "regex": "guided.regex",
    "choice": "guided.choice",
    "structured_output": "guided",
}
"""The contract's names of what Quire's checks name; of two that fit, the first counts."""


def engine_error(error: QuireError) -> pb.EngineError:
    """The message that ends a stream. Its text begins with the reason, by which docs/errors.md knows the error."""
    default = _CODE_OF_STATUS.get(error.status, pb.ERROR_CODE_INTERNAL)
    return pb.EngineError(
        code=_CODE_OF_REASON.get(error.reason, default),
        message=f"{error.reason}: {error.message}",
        retryable=error.status in _RETRYABLE and error.reason not in _FINAL,
    )


def name_as_sent(error: InvalidArgument) -> None:
    """Name the fields of a request that was converted as the client knows them."""
    if not error.violations:
        return
    error.violations = tuple(FieldViolation(_sent_name(v.field), v.description) for v in error.violations)
    error.message = "; ".join(f"{v.field}: {v.description}" for v in error.violations)


def _sent_name(field: str) -> str:
    for ours, theirs in _SENT_NAMES.items():
        rest = field.removeprefix(ours)
        if field == ours or (rest != field and rest[0] in ".["):
            return theirs + rest
    return field
