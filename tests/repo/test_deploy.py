"""Containers start the same services as `quire up`: right by construction, as far as files can show."""

import fnmatch
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from svc_common import health_probe
from svc_common.net import rpc
from tests.support.cli_lines import parse_quire
from tests.support.tree import ROOT

OURS = ("gateway", "scheduler", "worker")
SERVICES = {
    "gateway": "gateway",
    "scheduler": "scheduler",
    "scheduler-dp": "scheduler",
    "worker": "worker",
    "worker-gpu": "worker",
    "worker-1": "worker",
    "worker-2": "worker",
}
"""Those of ours in docker-compose.yml, and what they run."""
WATCHERS = ("collector", "jaeger", "prometheus", "grafana")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    """docker-compose.yml as compose reads it, variables at their defaults."""
    return read_compose("docker-compose.yml")


def read_compose(name: str) -> dict[str, Any]:
    """One of the compose files."""
    text = (ROOT / name).read_text(encoding="utf-8")
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


@pytest.mark.parametrize("service", [name for name, kind in SERVICES.items() if kind != "gateway"])
def test_a_model_has_as_long_to_load_as_one_says(service: str) -> None:
    """A scheduler is healthy when its worker has loaded, so one variable is for both; the gateway waits for the scheduler."""
    settings = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    assert settings[service]["healthcheck"]["start_period"] == "${QUIRE_LOADING:-120s}"
    waits = settings["gateway"]["depends_on"]
    assert all(waits[name]["condition"] == "service_healthy" for name, kind in SERVICES.items() if kind == "scheduler")


@pytest.mark.parametrize("service", SERVICES)
def test_command_lines_are_those_of_the_real_cli(compose: dict[str, Any], service: str) -> None:
    """Entry point plus command, of the image and of both compose files, parse with the real options."""
    kind, settings = SERVICES[service], compose["services"][service]
    image = Path(settings["build"]["dockerfile"]).name.removesuffix(".Dockerfile")
    entry = instruction(image, "ENTRYPOINT")
    assert entry == ["quire", "serve", kind]
    guarded = read_compose("deploy/compose.access.yml")["services"].get(service, settings)
    for command in (instruction(image, "CMD"), settings["command"], guarded["command"]):
        assert parse_quire([*entry[1:], *command]) == f"quire serve {kind}"


def test_services_find_each_other(compose: dict[str, Any]) -> None:
    """Each address names a service and a port it listens on, over a network both are in."""
    services = compose["services"]
    worker_port = option(services["worker"]["command"], "--port")
    scheduler_port = option(services["scheduler"]["command"], "--port")
    assert option(services["scheduler"]["command"], "--worker") == f"worker:{worker_port}"
    of_both = [word for word in services["scheduler-dp"]["command"] if word.startswith("--worker=")]
    assert of_both == [f"--worker={name}:{worker_port}" for name in ("worker-1", "worker-2")]
    assert option(services["gateway"]["command"], "--scheduler") == f"scheduler:{scheduler_port}"
    for name, kind in SERVICES.items():
        networks = set(services[name]["networks"])
        assert networks == NETWORKS[kind]
        # Wherever it has another name than its kind, it is also found by that of its kind.
        aliases = [
            (services[name]["networks"][network] or {}).get("aliases", []) for network in networks if name != kind
        ]
        assert name == kind or [kind] in aliases
    assert [name for name, network in compose["networks"].items() if not network] == ["edge"]
    assert all(compose["networks"][name] == {"internal": True} for name in ("control", "data", "telemetry"))


NETWORKS = {
    "gateway": {"edge", "control", "telemetry"},
    "scheduler": {"control", "data", "telemetry"},
    "worker": {"data", "telemetry"},
}


def test_doors_are_where_quire_up_has_them(compose: dict[str, Any]) -> None:
    """gRPC, OpenAI HTTP, operators, lab, pages of the rest: on 127.0.0.1 only; schedulers and workers publish nothing."""
    services = compose["services"]
    published = {name: sorted(service["ports"]) for name, service in services.items() if "ports" in service}
    assert published == {
        "gateway": sorted(f"127.0.0.1:{port}:{port}" for port in (50051, 8000, 50052, 8001)),
        "jaeger": ["127.0.0.1:16686:16686"],
        "prometheus": ["127.0.0.1:9090:9090"],
        "grafana": ["127.0.0.1:3000:3000"],
    }
    command = services["gateway"]["command"]
    assert [option(command, name) for name in ("--port", "--http-port", "--admin-port")] == ["50051", "8000", "50052"]


@pytest.mark.parametrize("service", [*SERVICES, *WATCHERS])
def test_all_are_locked_down(compose: dict[str, Any], service: str) -> None:
    """Non-root, read-only, no capabilities, bounded; what is mounted from here is read-only."""
    settings = compose["services"][service]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", settings["user"])
    assert (settings["read_only"], settings["cap_drop"]) == (True, ["ALL"])
    assert settings["security_opt"] == ["no-new-privileges:true"]
    assert settings["pids_limit"] > 0
    assert settings["mem_limit"]
    assert float(settings["cpus"]) > 0
    assert settings["restart"] == "unless-stopped"
    assert settings["stop_grace_period"]
    assert all(volume.endswith(":ro") or not volume.startswith(".") for volume in settings.get("volumes", []))


@pytest.mark.parametrize("service", SERVICES)
def test_ours_are_asked_over_grpc_and_traced(compose: dict[str, Any], service: str) -> None:
    """User 10001 with a /tmp; health asked over gRPC; spans go to the collector."""
    settings = compose["services"][service]
    assert settings["user"] == "10001:10001"
    assert any(mount.startswith("/tmp") for mount in settings["tmpfs"])
    assert settings["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://collector:4317"
    test = settings["healthcheck"]["test"]
    assert test[:4] == ["CMD", "python", "-m", "svc_common.health_probe"]
    assert test[4].rpartition(":")[2] == option(settings["command"], "--port")
    assert "USER 10001:10001" in (ROOT / settings["build"]["dockerfile"]).read_text(encoding="utf-8")


def test_they_wait_for_each_other(compose: dict[str, Any]) -> None:
    """Of those that the profile has: the gateway waits for a healthy scheduler. That one cannot wait for a healthy worker, as no
    worker is before a scheduler has given it its cache.
    """
    waits = {name: compose["services"][name].get("depends_on", {}) for name in SERVICES}
    healthy = {"condition": "service_healthy", "required": False}
    started = {"condition": "service_started", "required": False}
    assert waits == {
        "gateway": {"scheduler": healthy, "scheduler-dp": healthy},
        "scheduler": {"worker": started, "worker-gpu": started},
        "scheduler-dp": ["worker-1", "worker-2"],
    } | {name: {} for name, kind in SERVICES.items() if kind == "worker"}


def test_each_profile_is_a_whole_stack(compose: dict[str, Any]) -> None:
    """One scheduler and its workers; the gateway and what watches it belong to all. Without a profile: `cpu`."""
    members: dict[str, set[str]] = {}
    for name, settings in compose["services"].items():
        for profile in settings.get("profiles", ["all"]):
            members.setdefault(profile, set()).add(name)
    assert members == {
        "cpu": {"scheduler", "worker"},
        "gpu": {"scheduler", "worker-gpu"},
        "workers": {"scheduler-dp", "worker-1", "worker-2"},
        "all": {"gateway", *WATCHERS},
    }
    assert "COMPOSE_PROFILES=cpu" in (ROOT / ".env").read_text(encoding="utf-8").splitlines()


def test_with_access_control_nothing_is_in_plain_text() -> None:
    """deploy/compose.access.yml: no --insecure, and each service has its own key and no other's."""
    services = read_compose("deploy/compose.access.yml")["services"]
    for name, kind in ((name, SERVICES[name]) for name in services if name in SERVICES):
        settings = services[name]
        assert not any("insecure" in word for word in settings["command"])
        keys = [secret for secret in settings["secrets"] if "key" in secret]
        assert keys == [f"{kind}-key.pem"]
        used = {word.rpartition("/run/secrets/")[2] for word in settings["command"] if "/run/secrets/" in word}
        assert used == set(settings["secrets"])
        assert "--tls-ca=/run/secrets/ca.pem" in settings["healthcheck"]["test"]
    assert services.keys() - SERVICES == {"prometheus"}


def test_images_are_pinned(compose: dict[str, Any]) -> None:
    """No image without a full version; one Python for all stages."""
    names = sorted(path.name.removesuffix(".Dockerfile") for path in (ROOT / "deploy").glob("*.Dockerfile"))
    assert names == sorted([*OURS, "worker-cuda"])
    images = [image for name in names for image in re.findall(r"^FROM (\S+)", dockerfile(name), re.M)]
    assert set(images) == {"python:3.11.14-slim-bookworm"}
    assert re.fullmatch(r"jaegertracing/jaeger:2\.\d+\.\d+", compose["services"]["jaeger"]["image"])
    assert all(re.fullmatch(r"\S+:v?\d+\.\d+\.\d+", service["image"]) for service in compose["services"].values())
    for name in names:
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


def test_images_can_build_what_wheels_carry() -> None:
    """.dockerignore keeps nothing of it out, neither where a link leads, such as to the built-in model."""
    patterns = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    links = [path for path in (ROOT / "quire").iterdir() if path.is_symlink()]
    carried = [file.resolve().relative_to(ROOT) for link in links for file in (link, *link.iterdir())]
    packages = (
        *("quire", "quire_tools", "gateway_svc", "scheduler_svc", "worker_svc", "svc_common", "block_manager"),
        "protos",
    )
    carried += [path.relative_to(ROOT) for name in packages for path in (ROOT / name).rglob("*.py")]
    assert any(path.parts[0] == "models" for path in carried)
    assert [str(path) for path in carried if is_ignored(path, patterns)] == []
    assert is_ignored(Path("models/large/model.safetensors"), patterns)


def is_ignored(path: Path, patterns: Sequence[str]) -> bool:
    """As Docker reads .dockerignore: the last pattern that fits the path or a folder above it decides."""
    ignored = False
    for pattern in patterns:
        if pattern and not pattern.startswith("#"):
            wanted = pattern.removeprefix("!").removeprefix("**/")
            places = [path, *path.parents]
            names = [place.name if "**/" in pattern else str(place) for place in places]
            if any(fnmatch.fnmatch(name, wanted) and name.count("/") == wanted.count("/") for name in names):
                ignored = not pattern.startswith("!")
    return ignored


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


def test_the_health_probe_fails_without_a_listener() -> None:
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
