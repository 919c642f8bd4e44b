"""Envoy as a process, with an endpoint picker beside it, as an inference gateway in a cluster has them."""

import contextlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.client_tools import tool_environment
from tests.support.routers.smg import free_ports

INTERVAL_S = 0.5
"""Between two readings of the picker."""
_START_S = 60
_PICKER = Path(__file__).with_name("picker.py")


@dataclass
class PickerProcess:
    """The picker. `readings`: what it saw so far, the last one at the end."""

    process: "subprocess.Popen[str]"
    port: int
    readings: list[dict[str, Any]] = field(default_factory=list)

    def want(self, endpoints: Sequence[str]) -> None:
        """Only these are in the pool from now on; returns once it has read them."""
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(endpoints) + "\n")
        self.process.stdin.flush()
        told_s = time.time()
        self.wait_for(lambda reading: reading["began"] >= told_s and set(reading["loads"]) == set(endpoints))

    def wait_ready(self, endpoint: str) -> None:
        """Until it is seen to be ready."""
        self.wait_for(lambda reading: reading["loads"].get(endpoint) is not None)

    def wait_for(self, is_so: Any) -> dict[str, Any]:
        """The next reading of which that is so."""
        deadline, at = time.monotonic() + _START_S, len(self.readings)
        while time.monotonic() < deadline:
            for reading in self.readings[at:]:
                if is_so(reading):
                    return reading
            time.sleep(0.02)
        raise AssertionError(f"the picker does not see it: {self.readings[-1:]}")


@contextlib.contextmanager
def picker() -> Iterator[PickerProcess]:
    """Starts it, with an empty pool."""
    command = [tool_environment("envoy") / "python", _PICKER, str(INTERVAL_S)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        made = PickerProcess(process, int(process.stdout.readline()))
        reader = threading.Thread(
            target=lambda: made.readings.extend(json.loads(line) for line in process.stdout or ()), daemon=True
        )
        reader.start()
        try:
            yield made
        finally:
            process.terminate()


@contextlib.contextmanager
def envoy(picker_port: int, home: Path) -> Iterator[str]:
    """Starts Envoy in front of what the picker picks; its URL. Its output goes to `home`/envoy.log."""
    [port] = free_ports(1)
    (home / "envoy.json").write_text(json.dumps(_configuration(int(port), picker_port)), encoding="utf-8")
    command = [tool_environment("envoy") / "envoy", "-c", str(home / "envoy.json"), "--disable-hot-restart"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with (
        (home / "envoy.log").open("w") as log,
        subprocess.Popen(command, cwd=home, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log) as process,
    ):
        try:
            _wait(f"http://127.0.0.1:{port}", process, home / "envoy.log")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def _wait(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health").is_success:
                return
        time.sleep(0.1)
    pytest.fail(log.read_text()[-2_000:])


def _configuration(port: int, picker_port: int) -> dict[str, Any]:
    """A listener whose requests go where the picker says (`ORIGINAL_DST` by header), streams without a limit of time."""
    types = "type.googleapis.com/envoy.extensions"
    manager = {
        "@type": f"{types}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "inference",
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "cells", "timeout": "0s"}}],
                }
            ]
        },
        "http_filters": [
            {
                "name": "envoy.filters.http.ext_proc",
                "typed_config": {
                    "@type": f"{types}.filters.http.ext_proc.v3.ExternalProcessor",
                    "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "10s"},
                    "message_timeout": "10s",
                    "processing_mode": {"request_header_mode": "SEND", "response_header_mode": "SKIP"},
                },
            },
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{types}.filters.http.router.v3.Router"},
            },
        ],
    }
    protocol = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    http2 = {
        "@type": f"type.googleapis.com/{protocol}",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    return {
        "static_resources": {
            "listeners": [
                {
                    "address": _address(port),
                    "filter_chains": [
                        {
                            "filters": [
                                {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}
                            ]
                        }
                    ],
                }
            ],
            "clusters": [
                {
                    "name": "cells",
                    "type": "ORIGINAL_DST",
                    "lb_policy": "CLUSTER_PROVIDED",
                    "connect_timeout": "5s",
                    "original_dst_lb_config": {
                        "use_http_header": True,
                        "http_header_name": "x-gateway-destination-endpoint",
                    },
                },
                {
                    "name": "picker",
                    "type": "STATIC",
                    "connect_timeout": "5s",
                    "typed_extension_protocol_options": {protocol: http2},
                    "load_assignment": {
                        "cluster_name": "picker",
                        "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(picker_port)}}]}],
                    },
                },
            ],
        }
    }


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}
