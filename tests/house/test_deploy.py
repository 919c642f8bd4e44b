"""Containers start the same services as `quire up`: right by construction, as far as files can show (issue 2, line 10)."""

import json
import re
import subprocess
import sys
import tomllib
from typing import Any

import grpc
import pytest
import yaml
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from svc_common import health_probe, rpc
from tests.house.cli_lines import parse_quire
from tests.house.tree import ROOT

OURS = ("gateway", "scheduler", "worker")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    """docker-compose.yml as compose reads it, variables at their defaults."""
    text = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    return yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text))


def dockerfile(service: str) -> str:
    """Text of the service's Dockerfile, continuation lines joined."""
    return (ROOT / "deploy" / f"{service}.Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")


def instruction(service: str, name: str) -> list[str]:
    """Words of the last `name [...]` of the final stage."""
    final = dockerfile(service).rpartition("\nFROM ")[2]
    return json.loads(re.findall(rf"^{name} (\[.*\])$", final, re.M)[-1])


def option(arguments: list[str], name: str) -> str:
    """Value of an option given as `--x v` or `--x=v`."""
    words = [word for argument in arguments for word in argument.split("=", 1)]
    return words[words.index(name) + 1]


def test_the_parser_of_command_lines_refuses_wrong_ones() -> None:
    """The checks below could fail."""
    assert parse_quire(["serve", "scheduler", "--worker", "worker:50061"]) == "quire serve scheduler"
    for wrong in (
        ["serve", "scheduler", "--wrker", "x:1"],
        ["serve", "broker"],
        ["serve", "gateway", "--port", "high"],
    ):
        with pytest.raises(Exception, match=r"(?i)no such|valid"):
            parse_quire(wrong)


@pytest.mark.parametrize("service", OURS)
def test_command_lines_are_those_of_the_real_cli(compose: dict[str, Any], service: str) -> None:
    """Entry point plus command, of the image and of compose, parse with the real options."""
    entry = instruction(service, "ENTRYPOINT")
    assert entry == ["quire", "serve", service]
    for command in (instruction(service, "CMD"), compose["services"][service]["command"]):
        assert parse_quire([*entry[1:], *command]) == f"quire serve {service}"


def test_services_find_each_other(compose: dict[str, Any]) -> None:
    """Each address names a service and a port it listens on, over a network both are in."""
    services = compose["services"]
    worker_port = option(services["worker"]["command"], "--port")
    scheduler_port = option(services["scheduler"]["command"], "--port")
    assert option(services["scheduler"]["command"], "--worker") == f"worker:{worker_port}"
    assert option(services["gateway"]["command"], "--scheduler") == f"scheduler:{scheduler_port}"
    # What the scheduler tells gateways about its AdminService is its own --host.
    assert option(services["scheduler"]["command"], "--host") == "scheduler"
    assert all("internal" in services[name]["networks"] for name in (*OURS, "jaeger"))


def test_doors_are_where_quire_up_has_them(compose: dict[str, Any]) -> None:
    """gRPC 50051, HTTP 8000, operators 50052, traces 16686: on 127.0.0.1 only; scheduler and worker publish nothing."""
    services = compose["services"]
    published = {name: sorted(service.get("ports", [])) for name, service in services.items()}
    assert published == {
        "worker": [],
        "scheduler": [],
        "gateway": sorted(f"127.0.0.1:{port}:{port}" for port in (50051, 8000, 50052)),
        "jaeger": ["127.0.0.1:16686:16686"],
    }
    command = services["gateway"]["command"]
    assert [option(command, name) for name in ("--port", "--http-port", "--admin-port")] == ["50051", "8000", "50052"]


@pytest.mark.parametrize("service", OURS)
def test_services_are_locked_down_and_traced(compose: dict[str, Any], service: str) -> None:
    """Non-root, read-only, no capabilities, bounded; health asked over gRPC; spans go to Jaeger."""
    settings = compose["services"][service]
    assert (settings["user"], settings["read_only"], settings["cap_drop"]) == ("10001:10001", True, ["ALL"])
    assert settings["security_opt"] == ["no-new-privileges:true"]
    assert settings["pids_limit"] > 0
    assert settings["mem_limit"]
    assert any(mount.startswith("/tmp") for mount in settings["tmpfs"])
    assert settings["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://jaeger:4317"
    test = settings["healthcheck"]["test"]
    assert test[:4] == ["CMD", "python", "-m", "svc_common.health_probe"]
    assert test[4].rpartition(":")[2] == option(settings["command"], "--port")
    assert all(volume.endswith(":ro") for volume in settings.get("volumes", []))
    assert "USER 10001:10001" in dockerfile(service)


def test_they_wait_for_each_other(compose: dict[str, Any]) -> None:
    """gateway after scheduler after worker, each when healthy."""
    waits = {name: compose["services"][name].get("depends_on", {}) for name in OURS}
    healthy = {"condition": "service_healthy"}
    assert waits == {"gateway": {"scheduler": healthy}, "scheduler": {"worker": healthy}, "worker": {}}


def test_images_are_pinned(compose: dict[str, Any]) -> None:
    """No image without a full version; one Python for all stages."""
    images = [image for name in OURS for image in re.findall(r"^FROM (\S+)", dockerfile(name), re.M)]
    assert set(images) == {"python:3.11.14-slim-bookworm"}
    assert re.fullmatch(r"jaegertracing/jaeger:2\.\d+\.\d+", compose["services"]["jaeger"]["image"])
    for name in OURS:
        assert "-c constraints.txt" in dockerfile(name)


@pytest.mark.parametrize(("service", "torch"), [("gateway", False), ("scheduler", False), ("worker", True)])
def test_only_the_worker_gets_torch(service: str, torch: bool) -> None:
    """The requirements that an image installs are those of its extra."""
    assert f"requirements.py {service} " in dockerfile(service)
    command = [sys.executable, str(ROOT / "deploy" / "requirements.py"), service]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
    names = {re.split(r"[<>=\[ ]", line)[0] for line in listed}
    assert ("torch" in names) is torch
    assert ("transformers" in names) is torch
    assert "grpcio" in names


def _normalised(name: str) -> str:
    """PEP 503: pip writes `prometheus_client` for what asks for `prometheus-client`."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_constraints_lie_within_the_supported_ranges() -> None:
    """constraints.txt pins exactly, and pins every direct dependency."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = (line.split("==") for line in lines if line and not line.startswith("#"))
    pins = {_normalised(name): version for name, version in pinned}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = project["dependencies"] + [r for extra in project["optional-dependencies"].values() for r in extra]
    direct = {_normalised(re.split(r"[<>=\[; ]", line)[0]) for line in wanted} - {"quire"}
    assert direct <= pins.keys(), direct - pins.keys()
    assert pins["torch"] == "2.13.0"


@pytest.mark.parametrize(
    ("status", "expected"),
    [(health_pb2.HealthCheckResponse.SERVING, 0), (health_pb2.HealthCheckResponse.NOT_SERVING, 1)],
)
def test_the_health_probe_tells_serving_from_not_serving(status: int, expected: int) -> None:
    """Exit status 0 only for SERVING."""
    servicer = health.HealthServicer()
    servicer.set("", status)
    from concurrent.futures import ThreadPoolExecutor

    server = grpc.server(ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 0)])
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert health_probe.main([f"127.0.0.1:{port}"]) == expected
    finally:
        server.stop(0).wait()


def test_the_health_probe_fails_where_nobody_listens() -> None:
    """Unreachable is unhealthy; no address is wrong usage."""
    assert health_probe.main(["127.0.0.1:1"]) == 1
    assert health_probe.main([]) == 2


def test_a_server_can_listen_under_its_name() -> None:
    """`--host scheduler` in compose relies on binding to a name."""

    async def bound() -> int:
        server = rpc.server()
        port = rpc.bind(server, "localhost", 0, option="--port")
        await server.start()
        await server.stop(0)
        return port

    import asyncio

    assert asyncio.run(bound()) > 0
