"""Fixtures for tests of the scheduler service."""

import pytest

from svc_common.net import rpc


@pytest.fixture(autouse=True)
def patient_connections(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of these tests do not come back after a lost connection: a machine that stops for seconds must not cost one."""
    if not request.node.get_closest_marker("hangs"):
        monkeypatch.setattr(rpc, "KEEPALIVE_S", 30.0)
