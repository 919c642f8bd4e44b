"""What docker-compose.yml promises of containers, as the kernel and the engine have it."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.compose.stack import Stack, docker

OURS = ("gateway", "scheduler", "worker")
ALL = (*OURS, "collector", "jaeger", "prometheus", "grafana")


@pytest.mark.parametrize("service", ALL)
def test_processes_have_no_power(cpu: Stack, service: str) -> None:
    """Of every process in the container: not root, no capability in any set, none to be had, system calls filtered."""
    pids = [int(line.split()[0]) for line in docker("top", cpu.container(service), "-eo", "pid").splitlines()[1:]]
    assert pids
    for pid in pids:
        status = _status(pid)
        assert "0" not in status["Uid"].split()
        assert {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")


def _status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


@pytest.mark.parametrize("service", ALL)
def test_containers_are_bounded(cpu: Stack, service: str) -> None:
    """Read-only, with limits of memory, processors, processes and log; restarted when they die."""
    settings = cpu.inspect(service)["HostConfig"]
    assert settings["ReadonlyRootfs"]
    assert not settings["Privileged"]
    assert settings["Memory"] > 0
    assert settings["NanoCpus"] > 0
    assert settings["PidsLimit"] == 256
    assert settings["RestartPolicy"]["Name"] == "unless-stopped"
    assert settings["LogConfig"]["Config"] == {"max-size": "10m", "max-file": "3"}
    assert _limit(cpu.pid(service), "memory", "memory.limit_in_bytes", "memory.max") == settings["Memory"]
    assert _limit(cpu.pid(service), "pids", "pids.max", "pids.max") == 256


def _limit(pid: int, controller: str, v1: str, v2: str) -> int:
    """As the kernel enforces it, with control groups of either version."""
    root = Path("/sys/fs/cgroup")
    groups = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text(encoding="ascii").splitlines()]
    for _, names, path in groups:
        if controller in names.split(","):
            return int((root / controller / path.lstrip("/") / v1).read_text(encoding="ascii"))
    (path,) = (path for number, _, path in groups if number == "0")
    return int((root / path.lstrip("/") / v2).read_text(encoding="ascii"))


@pytest.mark.parametrize("service", OURS)
def test_nothing_can_be_written_but_tmp(cpu: Stack, service: str) -> None:
    """Not the image, not the models; and what is in /tmp cannot be run."""
    code = """
import os, subprocess
for place in ("/quire", "/opt/quire/quire", "/models/quire", "/etc/quire"):
    try:
        open(place, "w").close()
        print("wrote", place)
    except OSError as error:
        assert error.errno in (2, 13, 30), error
open("/tmp/program", "w").write("#!/bin/sh\\n")
os.chmod("/tmp/program", 0o755)
try:
    subprocess.run(["/tmp/program"])
    print("ran /tmp/program")
except PermissionError:
    os.remove("/tmp/program")
"""
    done = cpu.python(service, code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_doors_are_published_on_loopback_alone(cpu: Stack) -> None:
    """Gateway's doors and pages; nothing of scheduler, worker, collector."""
    published: dict[str, list[str]] = {}
    for service in ALL:
        bindings = cpu.inspect(service)["HostConfig"]["PortBindings"] or {}
        found = [binding for entry in bindings.values() for binding in entry]
        assert all(binding["HostIp"] == "127.0.0.1" for binding in found)
        published[service] = sorted(binding["HostPort"] for binding in found)
    expected = {service: [] for service in ALL}
    expected |= {"gateway": ["50051", "50052", "8000", "8001"]}
    expected |= {"jaeger": ["16686"], "prometheus": ["9090"], "grafana": ["3000"]}
    assert published == expected


def test_networks_lead_where_they_should(cpu: Stack) -> None:
    """Only `edge` leads out, and each service is in the networks that docker-compose.yml names."""
    members = {name: _network(name) for name in ("edge", "control", "data", "telemetry")}
    assert {name: network["Internal"] for name, network in members.items()} == {
        "edge": False,
        "control": True,
        "data": True,
        "telemetry": True,
    }
    assert _services_of(members["edge"]) == {"gateway", "jaeger", "prometheus", "grafana"}
    assert _services_of(members["control"]) == {"gateway", "scheduler"}
    assert _services_of(members["data"]) == {"scheduler", "worker"}
    assert _services_of(members["telemetry"]) == set(ALL)


def test_networks_are_closed_to_other_services(cpu: Stack) -> None:
    """The gateway's address in `control` is the scheduler's to call and not the worker's; that in `edge` is neither's."""
    addresses = {
        name: cpu.inspect("gateway")["NetworkSettings"]["Networks"][f"quire_{name}"] for name in ("control", "edge")
    }
    reached = {
        (service, name): cpu.python(service, _CONNECT.format(address["IPAddress"])).returncode == 0
        for service in ("scheduler", "worker")
        for name, address in addresses.items()
    }
    assert [service for service, was in reached.items() if was] == [("scheduler", "control")]


_CONNECT = "import socket; socket.create_connection(('{}', 50051), timeout=3)"


def _network(name: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = json.loads(docker("network", "inspect", f"quire_{name}"))
    return found[0]


def _services_of(network: dict[str, Any]) -> set[str]:
    return {container["Name"].split("-")[1] for container in network["Containers"].values()}
