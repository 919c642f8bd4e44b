"""What an answer may be: a result, or an error that is typed, documented and complete (docs/errors.md); never a bug's status."""

import json
from collections.abc import Mapping
from typing import Any

import grpc
import grpc.aio
from google.rpc import error_details_pb2, status_pb2

from svc_common.net.rpc import PUBLIC_MESSAGE_BYTES
from svc_common.reasons import OTHER, known_reason
from tests.fuzz import https, protos

_BUGS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS}
_OURS_TO_END = {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}
_NEEDS = {
    grpc.StatusCode.INVALID_ARGUMENT: error_details_pb2.BadRequest,
    grpc.StatusCode.NOT_FOUND: error_details_pb2.ResourceInfo,
}
_WITHOUT_DETAIL = {"ADAPTER_IN_USE", "BAD_POLICY", "FIXED_AT_START", "BAD_LIMIT", "BLOCKS_IN_USE", "UNKNOWN_POLICY"}


def wrong_with_error(sent: protos.Input, error: Any) -> str:
    """Why a call must not have ended so; empty = it may."""
    code = error.code()
    raw = {key: value for key, value in error.trailing_metadata() or ()}.get("grpc-status-details-bin")
    if code in _BUGS:
        return f"{code.name}: {error.details()}"
    if raw is None:
        by_client = code in _OURS_TO_END and sent.timeout_s < 1
        too_large = code is grpc.StatusCode.RESOURCE_EXHAUSTED and len(sent.raw) > PUBLIC_MESSAGE_BYTES
        return "" if by_client or too_large else f"{code.name} without details: {error.details()}"
    return _wrong_with_details(code, status_pb2.Status.FromString(raw))


def _wrong_with_details(code: grpc.StatusCode, status: status_pb2.Status) -> str:
    kinds = {detail.TypeName().rpartition(".")[2] for detail in status.details}
    info = error_details_pb2.ErrorInfo()
    if not any(detail.Unpack(info) for detail in status.details if detail.Is(info.DESCRIPTOR)):
        return f"{code.name} without ErrorInfo: {status.message}"
    if info.domain != "quire" or known_reason(info.reason) == OTHER:
        return f"{code.name} with the undocumented reason {info.reason}: {status.message}"
    needed = _NEEDS.get(code)
    if needed is not None and needed.DESCRIPTOR.name not in kinds and info.reason not in _WITHOUT_DETAIL:
        return f"{info.reason} without {needed.DESCRIPTOR.name}: {status.message}"
    if (
        info.reason in {"QUEUE_FULL", "DRAINING", "NO_MODEL", "NO_WORKER", "SCHEDULER_AWAY"}
        and "RetryInfo" not in kinds
    ):
        return f"{info.reason} without RetryInfo: {status.message}"
    return "" if status.message else f"{info.reason} without a message"


def wrong_with_answer(sent: https.Input, answer: bytes) -> str:
    """Why a connection must not have been answered so; empty = it may. `answer`: all that came before it was closed."""
    if not answer:
        return "" if not sent.is_http else "no answer"
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    status = int(lines[0].split(" ")[1])
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    if not sent.is_http:
        return f"{status}: {body[:200]!r}" if status >= 500 and status != 503 else ""
    if status >= 500 and status not in {501, 503, 504}:
        return f"{status}: {body[:200]!r}"
    is_health = b" /health/ready " in sent.sent[:40]
    if sent.sent.startswith(b"HEAD ") or status < 400 or (is_health and status == 503):
        return ""
    return _wrong_with_body(status, headers, body)


def _wrong_with_body(status: int, headers: Mapping[str, str], body: bytes) -> str:
    """OpenAI's error object, or Anthropic's, which has the code in its details."""
    if headers.get("transfer-encoding") == "chunked":
        body = b"".join(body.split(b"\r\n")[1::2])
    try:
        told = json.loads(body)
        error: dict[str, Any] = told["error"]
        if told.get("type") == "error":
            error["code"] = error["details"]["error_code"]
    except (ValueError, KeyError, TypeError):
        return f"{status} without an error object: {body[:200]!r}"
    missing = [name for name in ("message", "type", "code") if not isinstance(error.get(name), str) or not error[name]]
    return f"{status} without {missing}: {error}" if missing else ""
