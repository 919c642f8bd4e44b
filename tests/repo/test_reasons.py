"""docs/errors.md, svc_common/reasons.py and the code say the same about every reason."""

import json
import re
from collections import defaultdict

import grpc
import pytest

from gateway_svc.http.errors import http_status
from protos.inference.v1 import inference_pb2
from svc_common.errors import ConfigError, QuireError, from_status_name
from svc_common.reasons import OTHER, REASONS, known_reason
from tests.repo.reasons import reasons_in_code
from tests.support.tree import ROOT

_ROW = re.compile(
    r"^\| `([A-Z0-9_]+)` \| ([A-Z_, ]+) \| ([0-9, ]+) \| (.+) \| (.+) \| (yes|no|as new) \|$", re.MULTILINE
)


def _documented() -> dict[str, set[str]]:
    found = defaultdict(set)
    for reason, statuses, *_ in _ROW.findall((ROOT / "docs/errors.md").read_text()):
        for status in statuses.split(", "):
            found[status].add(reason)
    return found


def test_every_reason_of_the_code_is_registered_and_no_other() -> None:
    """New ones belong into svc_common/reasons.py and docs/errors.md."""
    found = reasons_in_code()
    assert found.unread == []
    registered = {status: set(reasons) for status, reasons in REASONS.items()}
    assert {status: reasons for status, reasons in found.by_status.items() if reasons} == registered


def test_every_registered_reason_is_documented_and_no_other() -> None:
    """One row for each, in the table of the services that report it."""
    assert _documented() == {status: set(reasons) for status, reasons in REASONS.items()}


def test_http_statuses_are_those_of_the_bridge() -> None:
    """The column HTTP."""
    rows = _ROW.findall((ROOT / "docs/errors.md").read_text())
    assert len(rows) > 90
    for reason, statuses, http, *_ in rows:
        errors = [from_status_name(status)("", reason=reason) for status in statuses.split(", ")]
        assert {str(http_status(error)) for error in errors} == set(http.split(", ")), reason


def test_metrics_know_reasons_and_statuses_and_nothing_else() -> None:
    """known_reason bounds labels."""
    assert known_reason("QUEUE_FULL") == "QUEUE_FULL"
    assert known_reason("UNAVAILABLE") == "UNAVAILABLE"
    assert known_reason("what somebody wrote") == OTHER


def test_each_status_has_one_class() -> None:
    """from_status_name gives the class that has it."""
    for status in REASONS:
        cls = from_status_name(status)
        assert issubclass(cls, QuireError) and cls is not ConfigError and cls.status == status


def test_the_service_config_retries_broken_connections_only() -> None:
    """docs/grpc.md, Retries: names are those of our services, and gRPC takes it."""
    text = (ROOT / "protos/inference/v1/service_config.json").read_text()
    config = json.loads(text)
    [methods] = config["methodConfig"]
    name = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
    assert methods["name"] == [{"service": name}] and config["healthCheckConfig"] == {"serviceName": name}
    assert methods["retryPolicy"]["retryableStatusCodes"] == ["UNAVAILABLE"]
    with grpc.insecure_channel("127.0.0.1:1", options=[("grpc.service_config", text)]) as channel:
        call = channel.unary_unary(f"/{name}/ListModels")
        with pytest.raises(grpc.RpcError) as caught:
            call(b"", timeout=5)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
